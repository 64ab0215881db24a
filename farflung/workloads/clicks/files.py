"""Click logs in files: tab-separated text, as Criteo's, and Parquet."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farflung.errors import UserError, counted, disk_errors, suggestion
from farflung.files import files_named
from farflung.workloads.clicks.log import Categories, ClickLog
from farflung.workloads.clicks.settings import ClicksSettings

CRITEO_NUMBERS = 13
"""Criteo's logs have no names: a label, so many numbers, and categories."""
BLOCK = 1 << 24
"""Bytes of text that are read at a time."""


def paths_of(data: str) -> list[Path]:
    """The files of a path or a glob. Raises UserError where there are none."""
    found = sorted(files_named(data), key=str)
    if not found:
        raise UserError(f"there are no files {data!r}; give synthetic, debian, or a path or glob of click logs")
    if folders := [path for path in found if path.is_dir()]:
        raise UserError(f"{folders[0]} is a folder; name its files, as in '{folders[0]}/*.parquet'")
    return found


def read(data: str, settings: ClicksSettings) -> ClickLog:
    """The clicks of some files, one after the other. Raises UserError."""
    import pyarrow as pa

    left, tables = settings.max_clicks, list[Any]()
    for path in paths_of(data):
        table = _File(path, settings).table(left)
        if tables and table.schema != tables[0].schema:
            raise UserError(
                f"{path} has the columns {_named(table)} where {paths_of(data)[0]} has {_named(tables[0])}, or others "
                "of the same names; give logs that are alike"
            )
        tables.append(table)
        left = None if left is None else left - table.num_rows
        if left == 0:
            break
    whole = pa.concat_tables(tables)
    columns = {name: whole[name] for name in whole.column_names}
    labels = columns.pop("").to_numpy()
    numbers = {n: column.to_numpy() for n, column in columns.items() if pa.types.is_floating(column.type)}
    categories = {name: _categories(column) for name, column in columns.items() if name not in numbers}
    if not categories:
        raise UserError(f"{data} has no column of categories; leave some out of --numbers")
    return ClickLog(data, labels, numbers, categories)


def _categories(column: Any) -> Categories:
    import pyarrow as pa

    encoded = column.combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    return Categories(encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist())


class _File:
    """One file, and where in it something is amiss."""

    def __init__(self, path: Path, settings: ClicksSettings) -> None:
        self._path, self._settings = path, settings
        self._is_parquet = path.suffix.lower() in (".parquet", ".pq")
        self._first_row = 1  # the number of the first click, as a message tells it

    def table(self, most: int | None) -> Any:
        """The label under the name "", numbers as float32 (NaN where there is none), categories as strings."""
        import pyarrow as pa

        with disk_errors(f"read {self._path}", "look at its rights, or name another"), self._undamaged():
            batches, count = [], 0
            for batch in self._parquet() if self._is_parquet else self._text():
                batches.append(batch)
                count += batch.num_rows
                if most is not None and count >= most:
                    break
        if not count:
            raise UserError(f"{self._path} holds no clicks; leave it out")
        raw = pa.Table.from_batches(batches).slice(0, most)
        self._check_names(raw.column_names)
        label = self._label_of(raw)
        numbers = self._numbers_of(raw)
        table = {"": pa.array(self._labels(raw[label]))}
        for name in raw.column_names:
            if name in numbers:
                table[name] = pa.array(self._numbers(name, raw[name]))
            elif name != label:
                table[name] = self._words(name, raw[name])
        return pa.table(table)

    @contextmanager
    def _undamaged(self) -> Iterator[None]:
        """Within, what is packed is unpacked, whose errors have no number of the disk's. Raises UserError."""
        try:
            yield
        except OSError as error:
            if error.errno is not None:
                raise
            raise UserError(f"{self._path} is damaged: {_line(error)}; mend it, or name another") from error

    def _check_names(self, names: Sequence[str]) -> None:
        if "" in names:
            raise UserError(f"{self._path}: column {names.index('') + 1} has no name; give it one, or remove it")
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise UserError(f"{self._path} has {twice[0]!r} as the name of more than one column; rename the others")

    def _words(self, name: str, column: Any) -> Any:
        """A column as categories."""
        import pyarrow as pa
        import pyarrow.compute as pc

        try:
            return pc.fill_null(column.cast(pa.string()), "")
        except pa.ArrowException as error:
            raise UserError(
                f"{self._path}: column {name!r} holds {column.type}, which makes no categories ({_line(error)}); write "
                "it as text or numbers, or remove it"
            ) from error

    def _parquet(self) -> Iterator[Any]:
        """Its batches. Raises UserError."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            yield from pq.ParquetFile(self._path).iter_batches()
        except pa.ArrowInvalid as error:
            raise UserError(f"{self._path} is no Parquet file: {_line(error)}; name another") from error

    def _text(self) -> Iterator[Any]:
        """Its batches. Raises UserError."""
        import pyarrow as pa
        from pyarrow import csv

        names, has_names = self._names()
        self._first_row = 2 if has_names else 1
        layout = csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False)
        reading = csv.ReadOptions(use_threads=False, column_names=names, skip_rows=int(has_names), block_size=BLOCK)
        types = csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False)
        try:
            yield from csv.open_csv(self._path, reading, layout, types)
        except pa.ArrowInvalid as error:
            if where := self._broken_line(len(names)):
                raise UserError(f"{self._path}, {where}; mend or remove that line") from error
            raise UserError(f"{self._path} cannot be read: {_line(error)}; mend it, or name another") from error

    def _broken_line(self, fields: int) -> str:
        """What is amiss with the first line that has another number of fields, or is no text; "" for none."""
        import pyarrow as pa

        with pa.input_stream(str(self._path), compression="detect") as stream:
            for number, line in enumerate(io.BufferedReader(stream), 1):
                try:
                    found = len(line.decode("utf-8").split("\t"))
                except UnicodeDecodeError:
                    return f"line {number} is no text in UTF-8"
                if line.strip(b"\r\n") and found != fields:
                    return f"line {number}: {counted(found, 'field')} where line 1 has {fields}"
        return ""

    def _names(self) -> tuple[list[str], bool]:
        """The columns' names, and whether they are the file's first line."""
        import pyarrow as pa

        with pa.input_stream(str(self._path), compression="detect") as stream:
            first = re.split(rb"[\r\n]", stream.read(1 << 16), maxsplit=1)[0].decode("utf-8-sig", errors="replace")
        if not first:
            raise UserError(f"{self._path} begins with an empty line, or is empty; leave it out")
        fields = first.split("\t")
        if len(fields) == 1:
            raise UserError(f"{self._path}, line 1 has no tabs, which must be between columns; mend it")
        if fields[0] not in ("0", "1"):
            return fields, True
        numbers = min(CRITEO_NUMBERS, len(fields) - 1)
        categories = len(fields) - 1 - numbers
        named = [f"I{n + 1}" for n in range(numbers)] + [f"C{n + 1}" for n in range(categories)]
        return [self._settings.label, *named], False

    def _label_of(self, raw: Any) -> str:
        label = self._settings.label
        if label not in raw.column_names:
            raise UserError(f"{self._path} has no column {label!r}{suggestion(label, raw.column_names)}; set --label")
        return label

    def _numbers_of(self, raw: Any) -> set[str]:
        """The columns that hold numbers."""
        import pyarrow as pa

        if self._settings.numbers:
            asked = [name.strip() for name in self._settings.numbers.split(",")]
            if missing := [name for name in asked if name not in raw.column_names]:
                known = suggestion(missing[0], raw.column_names)
                raise UserError(f"{self._path} has no column {missing[0]!r}, which --numbers names{known}")
            if self._settings.label in asked:
                raise UserError(f"--numbers names {self._settings.label!r}, which is the label; leave it out")
            return set(asked)
        if self._is_parquet:
            return {field.name for field in raw.schema if pa.types.is_floating(field.type)} - {self._settings.label}
        criteo = {f"I{n + 1}" for n in range(CRITEO_NUMBERS)}
        return criteo & set(raw.column_names) if self._first_row == 1 else set()

    def _labels(self, column: Any) -> NDArray[np.float32]:
        labels = self._floats(column)
        if (wrong := ~np.isin(labels, (0, 1))).any():
            where, value = self._at(column, wrong)
            raise UserError(f"{where}: the label is {value!r}; it must be 0 or 1")
        return labels

    def _numbers(self, name: str, column: Any) -> NDArray[np.float32]:
        import pyarrow.compute as pc

        numbers = self._floats(column)
        missing = pc.fill_null(pc.equal(column.cast("string"), ""), True).to_numpy()
        if (wrong := ~np.isfinite(numbers) & ~missing).any():
            where, value = self._at(column, wrong)
            raise UserError(
                f"{where}: column {name} holds {value!r}, which is no number; mend it, or name others in --numbers"
            )
        return numbers

    def _floats(self, column: Any) -> NDArray[np.float32]:
        """A column's numbers; NaN for what is none."""
        import pyarrow as pa
        import pyarrow.compute as pc

        with suppress(pa.ArrowInvalid):
            words = column.cast(pa.string())
            filled = pc.if_else(pc.equal(words, ""), None, words).cast(pa.float32()).fill_null(float("nan"))
            return np.asarray(filled.to_numpy(), dtype=np.float32)
        return np.array([_float(value) for value in column.to_pylist()], dtype=np.float32)

    def _at(self, column: Any, wrong: NDArray[np.bool_]) -> tuple[str, Any]:
        """Where the first wrong value is, in words, and what it is."""
        number = int(wrong.argmax())
        place = "row" if self._is_parquet else "line"
        return f"{self._path}, {place} {number + self._first_row}", column[number].as_py()


def _named(table: Any) -> str:
    """The columns beside the label."""
    return ", ".join(filter(None, table.column_names))


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


def _line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".")
