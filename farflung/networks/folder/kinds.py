"""What is special about kinds of stores: how objects are written and read there, in as few requests as can be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fsspec.config import conf

logging.getLogger("paramiko").addHandler(logging.NullHandler())  # else it prints tracebacks of what is told in a line

STALL_SECONDS = 10.0
"""How long a request may stand still."""


def _write(files: Any, path: str, content: bytes) -> None:
    files.pipe_file(path, content)


def _read(files: Any, path: str, begin: int, end: int) -> bytes:
    content: bytes = files.cat_file(path, start=begin, end=end)
    return content


@dataclass(frozen=True)
class StoreKind:
    """How a kind of store is used, through fsspec's `files`."""

    write: Callable[[Any, str, bytes], None] = _write
    """Writes a file."""
    read: Callable[[Any, str, int, int], bytes] = _read
    """A part of a file's content, or what there is of it. Whatever comes, no more than that is kept in memory."""
    rename: Callable[[Any, str, str], None] | None = None
    """Of stores where others may see a file before all of it is written: there it is written beside, and renamed.

    Fails where there is such a file already: of two that write it, one has.
    """
    mounted: bool = False
    """Whether its folder is missing, too, where its disk is: then it is not made again."""
    two_may_create: bool = False
    """Whether two that create a file at the same time may both hear that they have."""
    one_at_a_time: bool = False
    """Whether its connection bears but one request at a time."""
    removes_many: bool = False
    """Whether it removes many objects with one request."""
    path_has_host: bool = False
    """Whether fsspec takes the server's name for a folder on it."""


def kind_of(protocols: Iterable[str]) -> StoreKind:
    """The kind of a store that fsspec knows by some names."""
    return next((KINDS[name] for name in protocols if name in KINDS), StoreKind())


def options_for(url: str) -> dict[str, Any]:
    """What a store must be told besides its URL: how long it may stand still, whose key to compare, a server's address.

    That of a WebDAV server is not given where fsspec's settings do. Trying again is not the store's work, which would
    take minutes.
    """
    protocol, _, rest = url.partition("://")
    if protocol in ("s3", "s3a"):
        waits = {"connect_timeout": STALL_SECONDS, "read_timeout": STALL_SECONDS, "retries": {"max_attempts": 0}}
        return {"config_kwargs": waits}
    if protocol in ("sftp", "ssh"):
        from farflung.networks.folder.host_keys import comparing  # what it imports comes with no extra

        waits = dict.fromkeys(("timeout", "banner_timeout", "auth_timeout", "channel_timeout"), STALL_SECONDS)
        return {**waits, **comparing(url)}
    if protocol == "webdav":
        address = conf.get(protocol, {}).get("base_url", f"https://{rest.partition('/')[0]}")
        return {"base_url": address, "timeout": STALL_SECONDS}
    return {}


def _linked(files: Any, beside: str, path: str) -> None:
    """Puts a file of this machine in its place unless there is one. Raises FileExistsError."""
    try:
        files.link(beside, path)
    except FileExistsError:
        raise
    except OSError:  # the disk knows no links: two might both come first
        if files.exists(path):
            raise FileExistsError(path) from None
        files.mv(beside, path)
    else:
        files.rm_file(beside)


def _webdav_write(files: Any, path: str, content: bytes) -> None:
    """One request: fsspec asks for the folder, and makes it, each time. Raises FileNotFoundError where it has gone."""
    answer = files.client.http.request("PUT", files.client.join_url(path), content=content)
    gone = answer.status_code in (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT)
    if gone or (answer.is_server_error and not files.client.exists(path.rpartition("/")[0])):  # so nginx says it
        raise FileNotFoundError(path)
    answer.raise_for_status()


def _webdav_read(files: Any, path: str, begin: int, end: int) -> bytes:
    """One request: fsspec asks before what there is. Raises FileNotFoundError."""
    asked = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
    address = files.client.join_url(path)
    with files.client.http.stream("GET", address, headers=asked, follow_redirects=True) as answer:
        if answer.status_code == HTTPStatus.NOT_FOUND:
            raise FileNotFoundError(path)
        if answer.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return b""
        answer.raise_for_status()
        first = begin if answer.status_code == HTTPStatus.PARTIAL_CONTENT else 0
        return _between(answer.iter_raw(), begin - first, end - first)


def _between(content: Iterable[bytes], begin: int, end: int) -> bytes:
    """A part of a content that comes piece by piece; what there is besides is not waited for."""
    found = bytearray()
    for piece in content:
        found += piece
        if len(found) > end:
            break
    return bytes(found[begin:end])


def _sftp_write(files: Any, path: str, content: bytes) -> None:
    """Without waiting for an answer to each 32 KiB. Raises OSError where not all was written."""
    with files.ftp.open(path, "wb") as file:
        file.set_pipelined(True)
        file.write(content)
    if content and files.ftp.stat(path).st_size != len(content):
        raise OSError(f"{path} was not written whole")


def _sftp_read(files: Any, path: str, begin: int, end: int) -> bytes:
    """Without waiting for each 8 KiB before the next are asked for."""
    with files.ftp.open(path, "rb") as file:
        count = min(file.stat().st_size, end) - begin
        return b"".join(file.readv([(begin, count)])) if count > 0 else b""


_DISK = StoreKind(rename=_linked, mounted=True)
_SFTP = StoreKind(
    write=_sftp_write,
    read=_sftp_read,
    rename=lambda files, beside, path: files.ftp.rename(beside, path),
    one_at_a_time=True,
)
_WEBDAV = StoreKind(
    write=_webdav_write,
    read=_webdav_read,
    rename=lambda files, beside, path: files.client.move(beside, path, overwrite=False),
    two_may_create=True,  # servers look, and then move
    path_has_host=True,
)
_BUCKET = StoreKind(removes_many=True)
KINDS = {
    "file": _DISK,
    "local": _DISK,
    "smb": StoreKind(rename=lambda files, beside, path: files.mv(beside, path)),
    "sftp": _SFTP,
    "ssh": _SFTP,
    "webdav": _WEBDAV,
    **dict.fromkeys(("s3", "s3a", "gs", "gcs"), _BUCKET),
}
"""By their names in URLs."""
