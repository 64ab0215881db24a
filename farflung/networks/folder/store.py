"""A folder anywhere: objects written once, listed, read and removed through fsspec, counted, and tried again."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from fsspec.core import url_to_fs
from tenacity import Retrying, retry_if_not_exception_type, stop_after_delay, wait_random_exponential

from farflung.errors import UserError
from farflung.networks.base import Traffic

T = TypeVar("T")

FINAL = (FileNotFoundError, FileExistsError, NotADirectoryError, NotImplementedError, TypeError, ValueError)
"""What does not pass when it is tried again."""
LONGEST_PAUSE_SECONDS = 15.0
RENAMED = {"file", "local", "sftp", "ssh", "smb"}
"""Stores where others may see a file before all of it is written: there it is written beside, and renamed."""
BESIDE = "."
"""How the name of a file begins that is not whole yet."""
REMOVED_AT_ONCE = {"s3", "s3a", "gs", "gcs"}
"""Stores that remove many objects with one request."""


class StoreAwayError(Exception):
    """The store did not answer for so long that whoever asks goes on without."""


class Store:
    """The objects of one folder. A request that fails is tried again for at most `patience_s` seconds.

    Raises UserError for a URL that leads to no store that fsspec knows.
    """

    def __init__(self, url: str, patience_s: float, traffic: Traffic) -> None:
        self.url = url.rstrip("/")
        self.traffic = traffic
        self._patience_s = patience_s
        try:
            self._files, self._root = url_to_fs(self.url, skip_instance_cache=True)
        except ImportError as error:
            raise UserError(f"cannot open {url}: {error}; install it with pip") from error
        except Exception as error:  # each store has errors of its own for what it cannot reach
            raise UserError(f"cannot open {url}: {error}; see that the address and your access are right") from error
        protocols = {self._files.protocol} if isinstance(self._files.protocol, str) else set(self._files.protocol)
        self._renames = bool(protocols & RENAMED)
        self._one_removal = bool(protocols & REMOVED_AT_ONCE)
        self._creates = (
            "mode" in inspect.signature(getattr(self._files, "_pipe_file", self._files.pipe_file)).parameters
        )

    def begin(self) -> None:
        """Makes the folder where such a thing exists. Raises StoreAwayError."""
        if not self._renames:
            return
        try:
            self._asked(lambda: self._files.makedirs(self._root, exist_ok=True))
        except (FileExistsError, NotADirectoryError) as error:
            raise StoreAwayError(f"{self.url} leads through a file: {_told(error)}") from error

    def put(self, name: str, content: bytes) -> None:
        """Writes an object that nobody else writes; others see all of it or nothing. Raises StoreAwayError."""
        self._asked(lambda: self._write(name, content, self._files.mv))
        self.traffic.bytes_sent += len(content)

    def create(self, name: str, content: bytes) -> bool:
        """Writes an object unless there is one; whether it has. Raises StoreAwayError."""
        try:
            self._asked(lambda: self._write(name, content, self._link) if self._renames else self._new(name, content))
        except FileExistsError:
            return False
        self.traffic.bytes_sent += len(content)
        return True

    def names(self) -> dict[str, int]:
        """The objects that there are, and their bytes. Raises StoreAwayError."""
        self._files.invalidate_cache()
        try:
            found = self._asked(lambda: self._files.ls(self._root, detail=True))
        except FileNotFoundError as error:
            if self._renames:  # where `begin` has made it
                raise StoreAwayError(f"{self.url} is not there any more") from error
            return {}
        named = ((str(one["name"]).rstrip("/").rpartition("/")[2], one) for one in found if one["type"] == "file")
        return {name: int(one["size"] or 0) for name, one in named if name}

    def get(self, name: str, begin: int | None = None, end: int | None = None) -> bytes:
        """An object's content, or a part of it. Raises FileNotFoundError and StoreAwayError."""
        content: bytes = self._asked(lambda: self._files.cat_file(self._path(name), start=begin, end=end))
        self.traffic.bytes_received += len(content)
        return content

    def remove(self, names: Sequence[str]) -> None:
        """Removes objects, if they are there. Raises StoreAwayError."""
        if not names:
            return
        if self._one_removal:
            self._asked(lambda: self._files.rm([self._path(name) for name in names]))
            return
        for name in names:
            try:
                self._asked(partial(self._files.rm_file, self._path(name)))
            except FileNotFoundError:
                continue  # somebody else was quicker

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _write(self, name: str, content: bytes, place: Callable[[str, str], None]) -> None:
        """Writes an object; where that takes a while for others to see, beside, and puts it in its place."""
        if not self._renames:
            self._files.pipe_file(self._path(name), content)
            return
        beside = self._path(f"{BESIDE}{os.urandom(8).hex()}")
        try:
            self._files.pipe_file(beside, content)
            place(beside, self._path(name))
        except Exception as error:
            with contextlib.suppress(OSError):  # on a full disk, even a part of it takes room
                self._files.rm_file(beside)
            if isinstance(error, (FileNotFoundError, NotADirectoryError)):  # it may come back
                raise OSError(f"{self._root}, or a file just written there, has gone") from error
            raise

    def _link(self, beside: str, path: str) -> None:
        """Puts a file in its place unless there is one. Raises FileExistsError."""
        try:
            self._files.link(beside, path)
        except FileExistsError:
            raise
        except (NotImplementedError, AttributeError, OSError):  # the disk knows no links: two might both come first
            if self._files.exists(path):
                raise FileExistsError(path) from None
            self._files.cp_file(beside, path)
        self._files.rm_file(beside)

    def _new(self, name: str, content: bytes) -> None:
        if self._creates:
            self._files.pipe_file(self._path(name), content, mode="create")
        elif self._files.exists(self._path(name)):
            raise FileExistsError(name)
        else:
            self._files.pipe_file(self._path(name), content)

    def _asked(self, request: Callable[[], T]) -> T:
        """The answer to a request, tried again while it fails. Raises StoreAwayError."""

        def ask() -> T:
            self.traffic.requests += 1
            return request()

        tries = Retrying(
            retry=retry_if_not_exception_type(FINAL),
            stop=stop_after_delay(self._patience_s),
            wait=wait_random_exponential(multiplier=0.1, max=LONGEST_PAUSE_SECONDS),
            reraise=True,
        )
        try:
            return tries(ask)
        except FINAL:
            raise
        except Exception as error:
            raise StoreAwayError(f"{self.url} has failed for {self._patience_s:g} s: {_told(error)}") from error


def _told(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def clock_of(store: Store, name: str) -> float | None:
    """When the store says that an object was written, in seconds since 1970; None where it does not."""
    files: Any = store._files
    try:
        return float(files.modified(store._path(name)).timestamp())
    except (NotImplementedError, AttributeError, OSError):
        return None
