"""Files of text on other machines: which there are, and how one of them comes here."""

from __future__ import annotations

import contextlib
import errno
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from farflung.errors import LostDataError, UserError
from farflung.files import beside
from farflung.scoped import quiet
from farflung.workloads.packed import PACKED, know_zstandard

if TYPE_CHECKING:
    from collections.abc import Callable

    from fsspec import AbstractFileSystem

T = TypeVar("T")

HUB = "hf:"
SILENT_S = 60.0
"""Seconds without a byte after which a transfer is given up, and tried again."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Seconds before a source is asked again, the first time and at most."""
DEADLINE_S = 300.0
"""How long a source is asked again, where no setting says so."""
PIECE = 1 << 22
"""Bytes of text after which a piece of a file ends, with the line."""
TOLD_OF_FILES = (
    *("size", "ETag", "etag", "mtime", "LastModified", "last_modified", "blob_id"),
    *("Last-Modified", "Content-MD5", "Digest"),
)
"""What the kinds of store tell of a file that changes when it does."""
ARRIVED = "arrived-"
"""How names of files begin that have come here, beside those that are made of them."""
HERE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
"""What only the disk of this machine raises, so that asking again does not help."""


def is_far(data: str) -> bool:
    """Whether `--data` names files on other machines, or a data set on the hub."""
    return data.startswith(HUB) or "://" in data


def hub_name(data: str) -> str:
    """The name of a data set on the hub. Raises UserError where there is none."""
    if not (name := data.removeprefix(HUB).strip()):
        raise UserError(f"data {data!r} names no data set; give hf:NAME, such as hf:roneneldan/TinyStories")
    return name


def files(data: str) -> list[str]:
    """The addresses of the files that an address, a glob of them, a folder (…/) or `hf:NAME` names, in order.

    Raises UserError where there are none, or their server cannot be reached.
    """
    try:
        found = sorted(set(_on_hub(data) if data.startswith(HUB) else _at(data)))
    except UserError:
        raise
    except ImportError as error:
        raise UserError(f"data {data}: {_line(error)}; install it, and try again") from error
    except Exception as error:  # each kind of store has its own
        raise UserError(f"data {data}: cannot be read: {_line(error)}; see that it is there") from error
    if not found:
        raise UserError(f"data {data}: no files there; give a file, a glob, a folder that ends in /, or hf:NAME")
    return found


def version(address: str, deadline_s: float) -> str:
    """What changes when a file does: its size, and what else is told of it. Raises LostDataError after the deadline."""

    def told() -> str:
        detail = _system(address).info(address)
        return " ".join(str(detail[name]) for name in TOLD_OF_FILES if detail.get(name) is not None)

    return _persistently(told, address, deadline_s)


def fetch(address: str, folder: Path, deadline_s: float) -> Path:
    """Copies a file into a folder, whole or not at all; it keeps its name, after ARRIVED.

    Raises LostDataError after the deadline, and OSError where this machine's disk does not let it.
    """
    target = folder / f"{ARRIVED}{PurePosixPath(urlsplit(address).path).name}"
    part = beside(target)
    try:
        _persistently(lambda: _system(address).get_file(address, str(part)), address, deadline_s)
        return part.rename(target)
    finally:
        part.unlink(missing_ok=True)


def pieces(address: str, folder: Path, deadline_s: float) -> Iterator[Path]:
    """A file of lines in pieces, unpacked; each takes the place of the one before in a folder.

    No more of the file is read than for the pieces that are asked for. Raises as `fetch`.
    """
    name = PurePosixPath(urlsplit(address).path)
    target = folder / (name.stem if name.suffix in PACKED else name.name)
    rest = bytearray()
    for block in _blocks(address, deadline_s):
        rest += block
        while end := rest.find(b"\n", PIECE) + 1:
            target.write_bytes(rest[:end])
            del rest[:end]
            yield target
    if rest:
        target.write_bytes(rest)
        yield target


def _blocks(address: str, deadline_s: float) -> Iterator[bytes]:
    """What a file holds, unpacked, in order; it is opened again where it breaks off."""
    with contextlib.ExitStack() as opened:
        file: Any = None
        read = 0

        def block() -> bytes:
            nonlocal file
            try:
                if file is None:
                    file = opened.enter_context(_system(address).open(address, "rb", compression="infer"))
                    _skip(file, read)
                found: bytes = file.read(PIECE)
            except BaseException:
                opened.close()
                file = None
                raise
            return found

        while found := _persistently(block, address, deadline_s):
            read += len(found)
            yield found


def _skip(file: IO[bytes], size: int) -> None:
    """Reads on behind so many bytes, in a file that can only be read in order. Raises EOFError where it has fewer."""
    while size:
        if not (found := file.read(min(size, PIECE))):
            raise EOFError("the file has become shorter")
        size -= len(found)


def _persistently(ask: Callable[[], T], address: str, deadline_s: float) -> T:
    """What a source answers, which is asked again until the deadline where it does not."""
    last, pause = time.monotonic() + deadline_s, FIRST_PAUSE_S
    while True:
        try:
            return ask()
        except Exception as error:  # each kind of store has its own
            if isinstance(error, OSError) and error.errno in HERE:
                raise
            left = last - time.monotonic()
            if left <= 0:
                fault = f"cannot be read, for {deadline_s:g} s now: {_line(error)}"
                raise LostDataError(f"data {address}: {fault}; see that it is there and can be reached") from error
            warnings.warn(f"data {address}: {_line(error)}; it is asked again for {left:.0f} s", stacklevel=2)
            time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE_S)


def _on_hub(data: str) -> list[str]:
    """The files of a data set's training part."""
    import datasets  # slow to import

    with quiet("huggingface_hub"):
        parts: Mapping[str, Any] = datasets.load_dataset_builder(hub_name(data)).config.data_files or {}
    return [str(address) for address in parts.get("train", [])]


def _at(address: str) -> Iterator[str]:
    """The files at an address, below a folder there, or that a glob means."""
    system = _system(address)
    if not (address.endswith("/") or "*" in address):
        # A web server leads from the name of a folder to the page that lists it, which is no text to train on.
        if system.info(address).get("url") == f"{address}/":
            raise UserError(f"data {address}: is a folder; end it with /")
        yield address
        return
    found = system.glob(address, detail=True) if "*" in address else system.find(address, detail=True)
    if not found and address.startswith("http"):  # whose folders are empty where nobody answers
        system.info(address.partition("*")[0].rpartition("/")[0])
    for detail in found.values():
        # Pages that list a folder have links beside those to files, such as to sort it.
        if detail["type"] == "file" and not (address.startswith("http") and urlsplit(detail["name"]).query):
            yield str(system.unstrip_protocol(detail["name"]))


def _system(address: str) -> AbstractFileSystem:
    import fsspec

    know_zstandard()
    protocol = address.partition("://")[0]
    return fsspec.filesystem(protocol, **_patient() if protocol in ("http", "https") else {})


def _patient() -> dict[str, Any]:
    """A file may take as long as it needs, as long as something comes; aiohttp would give up after five minutes.

    A file that is opened comes in order, without blocks, since some servers know no ranges.
    """
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENT_S, sock_read=SILENT_S)
    return {"client_kwargs": {"timeout": timeout}, "block_size": 0}


def _line(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError) and error.__cause__:  # so fsspec calls all that a web server refuses
        error = error.__cause__
    return (str(error).partition("\n")[0] or type(error).__name__).rstrip(".")
