"""A folder anywhere: objects written once, listed, read and removed through fsspec, counted, and tried again."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from statistics import mean
from typing import Any, TypeVar

from fsspec.core import url_to_fs
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from farflung.errors import UserError
from farflung.networks.base import Traffic
from farflung.networks.folder.kinds import STALL_SECONDS, kind_of, options_for

T = TypeVar("T")

FINAL = (FileNotFoundError, FileExistsError, NotADirectoryError)
"""What does not pass when it is tried again; what is answered by somebody else in between may be anything."""
LONGEST_PAUSE_SECONDS = 15.0
LARGE = 1 << 19
"""Bytes of objects that are written one after the other: others read the first while the next is written."""
BESIDE = "."
"""How the name of a file begins that is not whole yet."""
LONGEST_FAULT = 300
"""Letters of what an error says."""
MEASURED = 8
"""Listings whose mean is what one takes."""


class StoreAwayError(Exception):
    """The store did not answer for so long that whoever asks goes on without."""


class Store:
    """The objects of one folder. A request that fails is tried again for at most `patience_s` seconds.

    Raises UserError for a URL that leads to no store that fsspec knows.
    """

    def __init__(self, url: str, patience_s: float, traffic: Traffic) -> None:
        self._address = url.rstrip("/")
        self.url = re.sub(r"(?<=://)([^/@:]*):[^/@]*@", r"\1@", self._address)  # a password is nothing to be shown
        self.traffic = traffic
        self._patience_s = patience_s
        self._link = threading.Lock()
        self._listings = deque[float](maxlen=MEASURED)
        self._answered: set[str] = set()
        """What this peer may do there."""
        self._open()
        self._turn = threading.Lock() if self._kind.one_at_a_time else contextlib.nullcontext()
        self._creates = (
            "mode" in inspect.signature(getattr(self._files, "_pipe_file", self._files.pipe_file)).parameters
        )

    def _open(self) -> None:
        """Connects to the store, perhaps anew. Raises UserError."""
        try:
            options = options_for(self._address)
            self._files, self._root = url_to_fs(self._address, skip_instance_cache=True, **options)
            protocols = self._files.protocol
            self._kind = kind_of((protocols,) if isinstance(protocols, str) else protocols)
            if self._kind.path_has_host:
                self._root = self._root.partition("/")[2]
            if hasattr(self._files, "ftp"):  # what it is told holds for its beginning
                self._files.ftp.get_channel().settimeout(STALL_SECONDS)
            if hasattr(self._files, "retries"):
                self._files.retries = 1
        except ImportError as error:
            raise UserError(f"cannot open {self.url}: {error}; install it with pip") from error
        except UserError as error:
            raise UserError(f"cannot open {self.url}: {error}") from error
        except Exception as error:  # each store has errors of its own for what it cannot reach
            why = f"cannot open {self.url}: {error}"
            raise UserError(f"{why}; see that the address and your access are right") from error

    def begin(self) -> None:
        """Makes the folder where such a thing exists. Raises StoreAwayError."""
        if not self._kind.rename:
            return
        try:
            self._asked("make it", lambda: self._files.makedirs(self._root, exist_ok=True))
        except FileExistsError as error:
            raise StoreAwayError(f"{self.url} is a file: {_told(error)}") from error
        except FileNotFoundError as error:
            raise StoreAwayError(f"{self.url} cannot be made there: {_told(error)}") from error

    def put(self, name: str, content: bytes) -> None:
        """Writes an object that nobody else writes; others see all of it or nothing. Raises StoreAwayError."""
        turn = self._link if len(content) > LARGE else contextlib.nullcontext()
        with turn, contextlib.suppress(FileExistsError):  # a request whose answer was lost has written it
            write = self._write if content else self._write_at_once
            self._asked("write", lambda: self._into_folder(write, name, content))
        self.traffic.bytes_sent += len(content)

    def create(self, name: str, content: bytes) -> bool:
        """Writes an object unless there is one; whether it has. Raises StoreAwayError."""
        began = 0.0

        def write() -> None:
            nonlocal began
            began = time.monotonic()
            self._into_folder(self._write if self._kind.rename else self._new, name, content)

        try:
            self._asked("write", write)
        except FileExistsError:
            return False
        self.traffic.bytes_sent += len(content)
        if (self._kind.rename or self._creates) and not self._kind.two_may_create:
            return True
        time.sleep(time.monotonic() - began)  # until whoever has found nothing there, too, has written
        with contextlib.suppress(FileNotFoundError):
            return self.get(name, 0, len(content) + 1) == content
        return False

    def names(self, some: bool = False) -> dict[str, int]:
        """The objects that there are, and their bytes. Where there must be `some`, an empty listing is a failed one.

        Raises StoreAwayError.
        """
        self._files.invalidate_cache()
        try:
            found = self._asked("list", lambda: self._listed(some))
        except FileNotFoundError as error:
            if self._kind.rename:  # where `begin` has made it
                raise StoreAwayError(f"{self.url} is not there any more") from error
            if error.__cause__:  # an answer of the store's own, as where there is no such bucket
                raise StoreAwayError(f"{self.url} is not there: {_told(error)}") from error
            return {}
        named = ((str(one["name"]).rstrip("/").rpartition("/")[2], one) for one in found if one["type"] == "file")
        return {name: int(one["size"] or 0) for name, one in named if name}

    @property
    def listing_s(self) -> float:
        """What a listing takes, in seconds, on the average of the last ones; 0 while that is unknown."""
        return mean(tuple(self._listings) or (0.0,))

    def get(self, name: str, begin: int, end: int) -> bytes:
        """A part of an object's content, or what there is of it. Raises FileNotFoundError and StoreAwayError."""
        if end <= begin:  # as the name of an object may say; a server is not to be asked for less than a byte
            return b""
        content = self._asked("read", lambda: self._kind.read(self._files, self._path(name), begin, end))
        self.traffic.bytes_received += len(content)
        return content

    def remove(self, names: Sequence[str]) -> list[str]:
        """Removes objects, if they are there; those that may not be removed. Raises StoreAwayError."""
        if self._kind.removes_many and names:
            paths = [self._path(name) for name in names]
            return [] if self._removed(lambda: self._files.rm(paths)) else list(names)
        return [name for name in names if not self._removed(partial(self._remove_one, name))]

    def _remove_one(self, name: str) -> None:
        self._files.rm_file(self._path(name))

    def _removed(self, remove: Callable[[], object]) -> bool:
        """Whether something may be removed; somebody else may have been quicker. Raises StoreAwayError."""

        def ask() -> bool:
            try:
                remove()
            except PermissionError:  # which does not change when it is tried again
                return False
            return True

        with contextlib.suppress(FileNotFoundError):
            return self._asked("remove", ask)
        return True

    def _listed(self, some: bool) -> Any:
        began = time.monotonic()
        try:
            found = self._files.ls(self._root, detail=True)
        except FileNotFoundError:
            if not some or self._kind.rename:
                raise
            found = []
        if some and not found:
            raise OSError("a listing shows nothing of what this peer has written there")
        self._listings.append(time.monotonic() - began)
        return found

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _into_folder(self, write: Callable[[str, bytes], None], name: str, content: bytes) -> None:
        """Writes an object in some way. Raises OSError, which is tried again, while the folder has gone."""
        try:
            write(name, content)
        except (FileNotFoundError, NotADirectoryError) as error:  # it may come back
            if self._kind.rename and not self._kind.mounted:
                with contextlib.suppress(Exception):  # whatever is wrong, it is tried again
                    self._files.makedirs(self._root, exist_ok=True)
            gone = f"{self._root}, or a file just written there, has gone" if self._kind.rename else _told(error)
            raise OSError(gone) from error

    def _write_at_once(self, name: str, content: bytes) -> None:
        self._kind.write(self._files, self._path(name), content)

    def _write(self, name: str, content: bytes) -> None:
        """Writes an object; where others may see a part of it meanwhile, beside, and puts it in its place.

        Raises FileExistsError for a file that is there and was written beside.
        """
        if not self._kind.rename:
            self._write_at_once(name, content)
            return
        path, beside = self._path(name), self._path(f"{BESIDE}{os.urandom(8).hex()}")
        try:
            self._kind.write(self._files, beside, content)
            self._kind.rename(self._files, beside, path)
        except Exception as error:
            with contextlib.suppress(Exception):  # on a full disk, even a part of it takes room
                self._files.rm_file(beside)
            if not isinstance(error, FileExistsError) and self._files.exists(path):  # stores say so in words of theirs
                raise FileExistsError(path) from error
            raise

    def _new(self, name: str, content: bytes) -> None:
        if self._creates:
            self._files.pipe_file(self._path(name), content, mode="create")
        elif self._files.exists(self._path(name)):
            raise FileExistsError(name)
        else:
            self._files.pipe_file(self._path(name), content)

    def _asked(self, what: str, request: Callable[[], T]) -> T:
        """The answer to a request, tried again while it fails. Raises StoreAwayError.

        One that is refused is tried again only where such a request was answered before: keys expire, and are renewed.
        """

        closed: BaseException | None = None  # why it could not be opened anew

        def ask() -> T:
            self.traffic.requests += 1
            with self._turn:
                return request()

        def anew(state: RetryCallState) -> None:
            nonlocal closed
            if state.attempt_number == 1 and not self._kind.one_at_a_time:  # to open a bucket takes a processor 0.3 s
                return
            with self._turn:  # a connection that has broken does not mend by itself
                closed = None
                try:
                    self._open()
                except UserError as error:
                    closed = error.__cause__

        def refused(error: BaseException) -> bool:
            return what not in self._answered and _is_refusal(error)

        tries = Retrying(
            retry=retry_if_exception(lambda error: not (isinstance(error, FINAL) or refused(error))),
            stop=stop_after_delay(self._patience_s),
            wait=wait_random_exponential(multiplier=0.1, max=LONGEST_PAUSE_SECONDS),
            after=anew,
            reraise=True,
        )
        try:
            answer = tries(ask)
            self._answered.add(what)
            return answer
        except NotADirectoryError as error:
            raise StoreAwayError(f"{self.url} leads through a file: {_told(error)}") from error
        except FINAL:
            raise
        except Exception as error:
            if refused(error):
                raise StoreAwayError(f"{self.url} does not let this peer {what}: {_told(error)}") from error
            why = _told(closed or error)
            raise StoreAwayError(f"{self.url} has failed for {self._patience_s:g} s: {why}") from error


def _is_refusal(error: BaseException) -> bool:
    """Whether the store says that this peer's access is not enough."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return isinstance(error, PermissionError) or status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


def _told(error: BaseException) -> str:
    """What an error says, without the name of a file that was not whole, which is another each time."""
    told = re.sub(rf"/{re.escape(BESIDE)}[0-9a-f]{{16}}\b", "", str(error))
    return " ".join(told.split())[:LONGEST_FAULT] or type(error).__name__


def clock_of(store: Store, name: str) -> float | None:
    """When the store says that an object was written, in seconds since 1970; None where it does not."""
    files: Any = store._files
    try:
        return float(files.modified(store._path(name)).timestamp())
    except (NotImplementedError, AttributeError, OSError):
        return None
