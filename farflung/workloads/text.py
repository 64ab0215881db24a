"""Documents of text: of the standard library, of files, or of the hub."""

from __future__ import annotations

import codecs
import contextlib
import logging
import os
import shlex
import sysconfig
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from farflung.errors import UserError
from farflung.files import files_below, files_named, is_data, written_by_farflung
from farflung.scoped import quiet
from farflung.workloads import far
from farflung.workloads.lost import Lost
from farflung.workloads.packed import PACKED, opened

_LOADERS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}

_LINES = {".jsonl", ".ndjson"}
"""Of these, files that can be read in pieces."""

_WIDE = {
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),  # whose first mark is the beginning of one above
}
"""Encodings by the marks that a text in them begins with."""

LOOKED_AT = 1 << 13
"""The bytes of a file that show whether it is text, in which no byte is zero."""

SMALL = 1 << 20
"""Bytes of files that are soon read."""

COLUMNS_NAMED = 6
"""The most columns that a message names."""


def documents(data: str, column: str, lost: Lost | None = None) -> Iterator[str]:
    """The documents that `--data` names, in one order on every machine.

    Args:
        data: `stdlib`, a path or glob, addresses as fsspec takes them, or `hf:NAME`. A text file is one document, and
            on another machine each piece of one, so that no more is read of it than is asked for; other files hold one
            a row.
        column: which column of a row holds its text.
        lost: counts what is no text, and warns of it.

    Raises:
        UserError: there is nothing there, or it cannot be read.
    """
    yield from _texts(records(data), column, lost or Lost(column))


def documents_of(path: Path, where: str, column: str, lost: Lost) -> Iterator[str]:
    """The documents of one file, which messages call `where`. Raises UserError."""
    yield from _texts(_records_of(path, where), column, lost)


def has_text(data: str, column: str) -> bool:
    """Whether there is a document with text; what else there is, is told by whoever reads it. Raises UserError."""
    with warnings.catch_warnings(action="ignore"):
        return any(documents(data, column))


def _texts(found: Iterable[tuple[str, str | Mapping[str, Any]]], column: str, lost: Lost) -> Iterator[str]:
    try:
        yield from _each_text(found, column, lost)
    finally:  # also where no more are asked for
        lost.tell()


def _each_text(found: Iterable[tuple[str, str | Mapping[str, Any]]], column: str, lost: Lost) -> Iterator[str]:
    for where, record in found:
        if isinstance(record, str):
            yield lost.legible(record, where)
        elif column not in record:
            named = ", ".join([*list(record)[:COLUMNS_NAMED], *(["…"] if len(record) > COLUMNS_NAMED else [])])
            or_else = "copy it here first if it holds chats" if far.is_far(where) else "give a narrower path or glob"
            raise UserError(f"data {where}: no column {column!r}; set text_column to one of {named}, or {or_else}")
        elif isinstance(record[column], str):
            yield lost.legible(record[column], where)
        else:
            lost.row(where)


def records(data: str) -> Iterator[tuple[str, str | Mapping[str, Any]]]:
    """Where each document of `--data` lies, and the document itself: a text, or a row by its columns.

    Bytes of a text that are no UTF-8 are decoded by `surrogateescape`.

    Raises UserError: there is nothing there, or it cannot be read.
    """
    if data.startswith(far.HUB):
        yield from _rows(far.hub_name(data), None, data)
        return
    if far.is_far(data):
        for address in far.files(data):
            with tempfile.TemporaryDirectory() as folder:
                for path in _parts(address, Path(folder)):
                    yield from _records_of(path, address)
        return
    for path in files(data):
        yield from _records_of(path, str(path))


def _parts(address: str, folder: Path) -> Iterator[Path]:
    """A file on another machine, as it is asked for: in pieces where it consists of lines, and else whole."""
    name = _unpacked_name(PurePosixPath(urlsplit(address).path))
    if name.suffix.lower() in _LINES or name.suffix.lower() not in _LOADERS:
        yield from far.pieces(address, folder, far.DEADLINE_S)
    else:
        yield far.fetch(address, folder, far.DEADLINE_S)


def _records_of(path: Path, where: str) -> Iterator[tuple[str, str | Mapping[str, Any]]]:
    if loader := loader_of(path):
        with _reading(where):
            has_rows = _has_rows(path, loader)
        if has_rows:
            yield from _rows(loader, path, where)
    else:
        yield where, _read(path, where)


def loader_of(path: Path) -> str | None:
    """What of the datasets library reads a file's rows, packed or not; None for a file of text."""
    return _LOADERS.get(_unpacked_name(path).suffix.lower())


def _unpacked_name(path: PurePath) -> PurePath:
    return path.with_suffix("") if path.suffix in PACKED else path


def files(data: str) -> list[Path]:
    """The files that `--data` names, in order; not for the hub. Raises UserError where there are none."""
    return _standard_library() if data == "stdlib" else _matching(data)


def text_bytes(data: str) -> int | None:
    """The size of what `--data` names; None where it is rows, whose text is not known before they are read.

    Raises UserError where there is nothing.
    """
    paths = [] if far.is_far(data) else files(data)
    rows = not paths or any(loader_of(path) or path.suffix in PACKED for path in paths)
    return None if rows else sum(path.stat().st_size for path in paths)


def is_small(data: str) -> bool:
    """Whether what `--data` names is soon read, and may be too little. Raises UserError where there is nothing."""
    return not far.is_far(data) and sum(path.stat().st_size for path in files(data)) <= SMALL


def version_of(data: str) -> object:
    """What changes when data on other machines does, for JSON. Raises UserError where it cannot be reached."""
    if not data.startswith(far.HUB):
        return [[address, far.version(address, far.DEADLINE_S)] for address in far.files(data)]
    import datasets  # slow to import, and only rows need it

    with _reading(data):
        return str(datasets.load_dataset_builder(far.hub_name(data)).hash)


def no_text(data: str) -> UserError:
    """The error of data in which there is no letter."""
    if Path(data).is_file() and not Path(data).stat().st_size:
        return UserError(f"data {data}: the file is empty; give one with text in it")
    return UserError(f"data {data}: holds no text; give another path, or another text_column")


def _standard_library() -> list[Path]:
    """The sources of Python's own library without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    found = []
    for where, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped]
        found += [Path(where, name) for name in names if name.endswith(".py")]
    return sorted(found)


def _matching(data: str) -> list[Path]:
    """The files that a path, folder or glob names."""
    if not data.strip():
        raise UserError("data is empty; give stdlib, a path, a quoted glob, or hf:NAME; all that lies here is .")
    found = Path(data).expanduser()
    if written_by_farflung(found):
        raise UserError(f"data {data!r}: this is a run of farflung, and holds no text to train on; give other data")
    names = files_below(found) if found.is_dir() else _globbed(str(found))
    paths = [found] if found.is_file() else sorted(names)
    if not paths:
        what = "this folder has no file to train on" if found.is_dir() else "no such file"
        hint = "; write a mixture as '0.7*PATH + 0.3*OTHER'" if "+" in data and "*" in data else ""
        raise UserError(f"data {data!r}: {what}; give stdlib, a path, a quoted glob, or hf:NAME{hint}")
    return paths


def _globbed(pattern: str) -> Iterator[Path]:
    """The files that a glob names.

    Raises UserError for a link that leads round, which would be followed again and again, or to nothing.
    """
    root = len(Path(pattern.partition("**")[0]).parts)
    for path in files_named(pattern):
        folders = [folder.resolve() for folder in path.parents if "**" in pattern and len(folder.parts) >= root]
        if len({*folders}) < len(folders):
            narrower = "give the folder itself, whose links are not followed, or a narrower glob"
            raise UserError(f"data {pattern!r}: {path} goes round, by a link to a folder above it; {narrower}")
        if is_data(path):
            yield path


def _read(path: Path, where: str) -> str:
    """The text of a file. Raises UserError for one that is no text, or whose letters have two or four bytes each."""
    try:
        content = _unpacked(path)
    except OSError as error:
        raise UserError(f"data {where}: {error.strerror or error}; see that the file can be read") from error
    if wide := next((name for name, marks in _WIDE.items() if content.startswith(marks)), None):
        as_utf8 = shlex.quote(str(path.with_suffix(f".utf8{path.suffix}")))
        remedy = f"iconv -f {wide} -t UTF-8 {shlex.quote(str(path))} > {as_utf8}"
        raise UserError(f"data {where}: the text is {wide}; make UTF-8 of it: {remedy}")
    if b"\0" in content[:LOOKED_AT]:
        kinds = "text, JSON Lines, CSV or Parquet"
        raise UserError(f"data {where}: the file is binary; give {kinds}, or a glob such as '*.txt'")
    return content.removeprefix(codecs.BOM_UTF8).decode(errors="surrogateescape")


def _unpacked(path: Path) -> bytes:
    if path.suffix not in PACKED:
        return path.read_bytes()
    with _reading(str(path)), opened(path) as file:
        content: bytes = file.read()
    return content


def _has_rows(path: Path, loader: str) -> bool:
    """Whether a file has any; the datasets library takes one that has none for damaged."""
    if loader == "parquet" and path.suffix not in PACKED:
        import pyarrow.parquet  # which datasets needs, too

        return int(pyarrow.parquet.read_metadata(path).num_rows) > 0
    with opened(path) as file:
        return bool(file.read(1))


def _rows(source: str, path: Path | None, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows, streamed, of a data set on the hub or of one file."""
    import datasets  # slow to import, and only rows need it

    with _reading(where):
        rows = iter(
            datasets.load_dataset(source, data_files=str(path) if path else None, split="train", streaming=True)
        )
        while (row := next(rows, None)) is not None:
            yield where, row


@contextlib.contextmanager
def _reading(where: str) -> Iterator[None]:
    """Makes a line of what readers and hubs raise, of many kinds."""
    try:
        with quiet("huggingface_hub", logging.ERROR), quiet("datasets"):  # which tell of each attempt by themselves
            yield
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        raise UserError(f"data {where}: cannot be read: {first_line}; see that it is there and whole") from error
