"""Tokens on disk: made of text once, and mapped by every process that trains on them.

A store is a folder with the tokens to train on and those held out, document after document, each ended, in one order.
Its manifest says what made them and how many there are; it is written last, so a store that has one is whole.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from farflung import formats
from farflung.errors import UserError
from farflung.files import write_text
from farflung.workloads.held_out import HELD_OUT_SHARE, by_number, is_held_out
from farflung.workloads.tokenizers import Tokenizer

MANIFEST, PROGRESS = "store.json", "progress.json"
PARTS = ("training.bin", "held-out.bin")
BATCH = 1 << 22
"""Characters of text that are made tokens of together."""
LEAST_HELD_OUT, MOST_HELD_OUT = 0.01, 0.5
"""The share of the tokens that held-out documents may have; where it is another, the end of the text is held out."""
KEPT_EVERY = 1 << 26
"""Bytes of tokens after which what is there is made safe, for a preparation that is interrupted to go on from."""

Told = Callable[[int, int], object]
"""Is told how far a store is that is being made: bytes of text read by this process, and tokens in all."""


@dataclass(frozen=True)
class Manifest:
    """What is in a store."""

    tokenizer: str
    """The hash of the tokenizer."""
    kind: str
    """The tokens' dtype."""
    documents: int
    training: int
    """Tokens to train on."""
    held_out: int
    """Tokens held out."""


@dataclass(frozen=True)
class Store:
    """A whole store."""

    folder: Path
    manifest: Manifest

    @property
    def training(self) -> NDArray[np.integer]:
        """Flat tokens to train on, mapped from the disk, read only."""
        return self._mapped(PARTS[0], self.manifest.training)

    @property
    def held_out(self) -> NDArray[np.integer]:
        """Flat tokens held out, as `training`."""
        return self._mapped(PARTS[1], self.manifest.held_out)

    def _mapped(self, name: str, size: int) -> NDArray[np.integer]:
        if not size:  # nothing cannot be mapped
            return np.empty(0, dtype=self.manifest.kind)
        return np.asarray(np.memmap(self.folder / name, dtype=self.manifest.kind, mode="r", shape=(size,)))


def is_store(folder: Path) -> bool:
    """Whether a whole store is in a folder."""
    return (folder / MANIFEST).is_file()


def read(folder: Path) -> Store:
    """The store in a folder. Raises UserError where it is damaged or of another format."""
    where, remedy = folder / MANIFEST, "remove the folder, and prepare it again"
    try:
        table = json.loads(where.read_text("utf-8"))
        formats.STORE.check(table, str(where))
        store = Store(folder, Manifest(**{name: table[name] for name in Manifest.__dataclass_fields__}))
        sizes = [(folder / name).stat().st_size // np.dtype(store.manifest.kind).itemsize for name in PARTS]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{where}: the store is damaged ({error}); {remedy}") from error
    for name, found, told in zip(PARTS, sizes, (store.manifest.training, store.manifest.held_out), strict=True):
        if found != told:
            raise UserError(f"{folder / name}: has {found} tokens, and {MANIFEST} says {told}; {remedy}")
    return store


def whole(folder: Path) -> Store | None:
    """The store in a folder, where there is one that is not damaged."""
    try:
        return read(folder) if is_store(folder) else None
    except UserError:
        return None


def write(
    folder: Path, documents: Iterable[str], tokenizer: Tokenizer, most: int | None, told: Told, numbered: bool = False
) -> Store:
    """Makes a store of documents, or goes on where another process was interrupted with the same ones.

    Args:
        most: the most tokens; None for all.
        told: is told now and then how far it is.
        numbered: whether documents are held out by their number, as earlier releases did, and not by their content.

    Raises OSError where the disk does not let it, and what reading the documents raises.
    """
    writer = _Writer(folder, np.min_scalar_type(max(tokenizer.size - 1, tokenizer.end)))
    room = float("inf") if most is None else most - writer.tokens
    read_now = 0
    try:
        for texts in _batches(itertools.islice(filter(None, documents), writer.documents, None)):
            if room <= 0:
                break
            read_now += sum(len(one.encode()) for one in texts)
            for text, tokens in zip(texts, tokenizer.encode_all(texts), strict=True):
                ended = np.append(tokens.astype(writer.kind), np.array([tokenizer.end], dtype=writer.kind))
                content = by_number(writer.documents) if numbered else text.encode()
                writer.add(ended if len(ended) <= room else ended[: int(room)], is_held_out(content))
                if (room := room - len(ended)) <= 0:
                    break
            told(read_now, writer.tokens)
            writer.keep_some()
        return writer.finish(tokenizer.digest, numbered)
    finally:
        writer.close()


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Texts that have some BATCH characters together."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        if (size := size + len(text)) >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Writer:
    """A store that is being made; of what an interrupted one has left, it keeps all that is known to be whole."""

    def __init__(self, folder: Path, kind: np.dtype[np.integer]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self.kind = folder, kind
        self._files: list[BinaryIO] = [(folder / name).open("a+b") for name in PARTS]
        self.documents, self._bytes = self._left()
        for file, size in zip(self._files, self._bytes, strict=True):
            file.truncate(size)
        self._safe = sum(self._bytes)

    def _left(self) -> tuple[int, list[int]]:
        """The documents and bytes that are whole."""
        try:
            left = json.loads((self._folder / PROGRESS).read_text("utf-8"))
            documents, sizes = int(left["documents"]), [int(size) for size in left["bytes"]]
        except (OSError, ValueError, KeyError, TypeError):
            return 0, [0, 0]
        there = [os.fstat(file.fileno()).st_size for file in self._files]
        return (documents, sizes) if all(map(int.__ge__, there, sizes)) else (0, [0, 0])

    @property
    def tokens(self) -> int:
        """How many there are."""
        return sum(self._bytes) // self.kind.itemsize

    def add(self, tokens: NDArray[np.integer], held_out: bool) -> None:
        """The next document's."""
        part = int(held_out)
        self._files[part].write(tokens.tobytes())
        self._bytes[part] += tokens.nbytes
        self.documents += 1

    def keep_some(self) -> None:
        """Makes what is there safe, if it has become much."""
        if sum(self._bytes) - self._safe >= KEPT_EVERY:
            self._flush()
            self._safe = sum(self._bytes)
            write_text(self._folder / PROGRESS, json.dumps({"documents": self.documents, "bytes": self._bytes}))

    def finish(self, tokenizer: str, numbered: bool) -> Store:
        """Writes the manifest."""
        self._flush()
        share = self._bytes[1] / max(sum(self._bytes), 1)
        unfit = not (numbered or LEAST_HELD_OUT <= share <= MOST_HELD_OUT)
        if self.documents < HELD_OUT_SHARE or unfit:
            self._hold_out_the_end()
        training, held_out = (size // self.kind.itemsize for size in self._bytes)
        manifest = Manifest(tokenizer, self.kind.name, self.documents, training, held_out)
        write_text(
            self._folder / MANIFEST, json.dumps({formats.KEY: formats.STORE.version, **asdict(manifest)}, indent=1)
        )
        (self._folder / PROGRESS).unlink(missing_ok=True)
        return Store(self._folder, manifest)

    def close(self) -> None:
        """Closes its files."""
        for file in self._files:
            file.close()

    def _flush(self) -> None:
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())

    def _hold_out_the_end(self) -> None:
        """Of too few documents to hold out whole ones, the end of the text is held out instead."""
        training, held_out = self._files
        held_out.seek(0)
        shutil.copyfileobj(held_out, training)
        end = self.tokens // HELD_OUT_SHARE * self.kind.itemsize
        cut = sum(self._bytes) - end
        held_out.truncate(0)
        training.seek(cut)
        shutil.copyfileobj(training, held_out)
        self._flush()
        training.truncate(cut)
        self._bytes = [cut, end]
