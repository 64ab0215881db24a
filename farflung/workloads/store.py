"""Tokens on disk: made of text or chats once, and mapped by every process that trains on them.

A store of text is a folder with the tokens to train on and those held out, document after document, each ended, in one
order. One of chats has the tokens of all, which of these are learnt, and where each chat lies: which chats are held
out depends on where a run cuts them. The manifest says what made them and how many there are; it is written last, so a
store that has one is whole.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from farflung import formats
from farflung.errors import UserError
from farflung.files import write_text
from farflung.workloads.held_out import HELD_OUT_SHARE, by_number, is_held_out
from farflung.workloads.tokenizers import Tokenizer

D = TypeVar("D")

MANIFEST, PROGRESS = "store.json", "progress.json"
TRAINING, HELD_OUT = TEXT = ("training.bin", "held-out.bin")
"""The files of text."""
TOKENS, LEARNT, INDEX = CHATS = ("chats.bin", "learnt.bin", "index.bin")
"""The files of chats."""
ENTRY = np.dtype([("begin", "u8"), ("tokens", "u4"), ("first", "u4"), ("learnt", "u4"), ("held_out", "?")])
"""What the index says of a chat: where its tokens begin; how many they are; the place of the first that is learnt, or
their number where none is (place 0 does not count, since nothing predicts that token); how many are learnt; and whether
the chat is held out, if a run does not cut it."""
BATCH = 1 << 22
"""Bytes of text that are made tokens of together."""
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
    """Tokens to train on; of chats, all."""
    held_out: int
    """Tokens held out."""
    template: str = ""
    """Of chats, the hash of the template that they were rendered by; of text, nothing."""
    sources: str = ""
    """The hash of all documents in their order; nothing in stores of earlier releases."""
    lost: tuple[str, ...] = ()
    """What of their text is left out or replaced, in words; nothing in stores of earlier releases."""

    @property
    def files(self) -> dict[str, tuple[np.dtype[Any], int]]:
        """What each file consists of, and how many of it."""
        tokens = np.dtype(self.kind)
        if not self.template:
            return {TRAINING: (tokens, self.training), HELD_OUT: (tokens, self.held_out)}
        learnt = np.dtype(np.bool_)
        return {TOKENS: (tokens, self.training), LEARNT: (learnt, self.training), INDEX: (ENTRY, self.documents)}


@dataclass(frozen=True)
class Store:
    """A whole store."""

    folder: Path
    manifest: Manifest

    @property
    def training(self) -> NDArray[np.integer]:
        """Flat tokens of text to train on, mapped from the disk, read only."""
        return self.mapped(TRAINING)

    @property
    def held_out(self) -> NDArray[np.integer]:
        """Flat tokens of text held out, as `training`."""
        return self.mapped(HELD_OUT)

    def known_as(self, name: str) -> dict[str, str]:
        """The hash of its documents under a name, for a resumed run to see that they are the same."""
        return {name: self.manifest.sources} if self.manifest.sources else {}

    def mapped(self, name: str) -> NDArray[Any]:
        """What one of its files holds, flat, mapped from the disk, read only."""
        kind, size = self.manifest.files[name]
        if not size:  # nothing cannot be mapped
            return np.empty(0, dtype=kind)
        return np.asarray(np.memmap(self.folder / name, dtype=kind, mode="r", shape=(size,)))


def is_store(folder: Path) -> bool:
    """Whether a whole store is in a folder."""
    return (folder / MANIFEST).is_file()


def read(folder: Path) -> Store:
    """The store in a folder. Raises UserError where it is damaged or of another format."""
    where, remedy = folder / MANIFEST, "remove the folder, and prepare it again"
    try:
        table = json.loads(where.read_text("utf-8"))
        formats.STORE.check(table, str(where))
        told = {name: table[name] for name in Manifest.__dataclass_fields__ if name in table}
        store = Store(folder, Manifest(**told | {"lost": tuple(map(str, table.get("lost", ())))}))
        sizes = [(folder / name).stat().st_size for name in store.manifest.files]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{where}: the store is damaged ({error}); {remedy}") from error
    for size, (name, (kind, count)) in zip(sizes, store.manifest.files.items(), strict=True):
        if size // kind.itemsize != count:
            there = f"{size // kind.itemsize} {'chats' if name == INDEX else 'tokens'}"
            raise UserError(f"{folder / name}: has {there}, and {MANIFEST} says {count}; {remedy}")
    return store


def whole(folder: Path) -> Store | None:
    """The store in a folder, where there is one that is not damaged."""
    try:
        return read(folder) if is_store(folder) else None
    except UserError:
        return None


def write(
    folder: Path,
    documents: Iterable[str],
    tokenizer: Tokenizer,
    most: int | None,
    told: Told,
    numbered: bool = False,
    lost: Callable[[], Sequence[str]] = tuple,
) -> Store:
    """Makes a store of text, or goes on where another process was interrupted with the same documents.

    Args:
        most: the most tokens; None for all.
        told: is told now and then how far it is.
        numbered: whether documents are held out by their number, as earlier releases did, and not by their content.
        lost: says at the end what of their text is left out or replaced.

    Raises OSError where the disk does not let it, and what reading the documents raises.
    """
    return _TextWriter(folder, tokenizer, most, numbered, lost).write(filter(None, documents), told)


def write_sequences(
    folder: Path, training: Iterable[NDArray[np.integer]], held_out: NDArray[np.integer], tokenizer: Tokenizer
) -> None:
    """Makes a store of sequences (n, length), in their order: those to train on in blocks, and those held out.

    A run with sequences of that length trains on these very ones. Raises OSError.
    """
    kind, count = token_kind(tokenizer), len(held_out)
    folder.mkdir(parents=True)
    tokens = 0
    with (folder / TRAINING).open("wb") as file:
        for rows in training:
            file.write(rows.astype(kind).tobytes())
            count, tokens = count + len(rows), tokens + rows.size
    (folder / HELD_OUT).write_bytes(held_out.astype(kind).tobytes())
    _write_manifest(folder, Manifest(tokenizer.digest, kind.name, count, tokens, held_out.size))


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    write_text(folder / MANIFEST, json.dumps({formats.KEY: formats.STORE.version, **asdict(manifest)}, indent=1))


class Writer(ABC, Generic[D]):
    """A store that is being made; of what an interrupted one has left, it keeps all that is known to be whole.

    Args:
        kinds: the dtypes of its files, by their names.
        most: so many tokens are enough; None for all.
    """

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, most: int | None, kinds: Mapping[str, np.dtype[Any]]
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self.tokenizer, self._most = folder, tokenizer, most
        self.files: list[BinaryIO] = [(folder / name).open("a+b") for name in kinds]
        self.documents, self.sources, self.bytes = self._left()
        for file, size in zip(self.files, self.bytes, strict=True):
            file.truncate(size)
        self._safe = sum(self.bytes)

    @property
    @abstractmethod
    def tokens(self) -> int:
        """How many there are."""

    @abstractmethod
    def content(self, document: D) -> bytes:
        """All that a document holds, before it becomes tokens."""

    @abstractmethod
    def encoded(self, documents: list[D]) -> Iterator[tuple[NDArray[Any], ...]]:
        """What each document adds to each file; one is added before the next is asked for."""

    @abstractmethod
    def ended(self) -> Manifest:
        """Does what is left to do with all documents, and says what there is."""

    @property
    def room(self) -> float:
        """The tokens that may still be added."""
        return math.inf if self._most is None else self._most - self.tokens

    def write(self, documents: Iterable[D], told: Told) -> Store:
        """Adds the documents behind those that are there already, and ends the store.

        Raises UserError where those that are there are others.
        """
        read_now, coming = 0, iter(documents)
        try:
            self._pass(coming)
            for batch, contents in self._batches(coming):
                if self.room <= 0:
                    break
                read_now += sum(map(len, contents))
                for content, parts in zip(contents, self.encoded(batch), strict=True):
                    self._add(content, parts)
                    if self.room <= 0:
                        break
                told(read_now, self.tokens)
                self._keep_some()
            return self._finish()
        finally:
            for file in self.files:
                file.close()

    def flush(self) -> None:
        """Makes sure that what was written is on the disk."""
        for file in self.files:
            file.flush()
            os.fsync(file.fileno())

    def _left(self) -> tuple[int, str, list[int]]:
        """The documents that are whole, their hash, and the bytes that they have become."""
        nothing = 0, "", [0] * len(self.files)
        try:
            left = json.loads((self._folder / PROGRESS).read_text("utf-8"))
            documents, sources, sizes = int(left["documents"]), str(left["sources"]), list(map(int, left["bytes"]))
        except (OSError, ValueError, KeyError, TypeError):
            return nothing
        there = [os.fstat(file.fileno()).st_size for file in self.files]
        fits = len(sizes) == len(there) and all(map(int.__ge__, there, sizes))
        return (documents, sources, sizes) if fits else nothing

    def _pass(self, documents: Iterator[D]) -> None:
        """Passes by those that are there already. Raises UserError where they are others."""
        sources = ""
        for document in itertools.islice(documents, self.documents):
            sources = _with(sources, self.content(document))
        if sources != self.sources:
            raise UserError(
                f"{self._folder}: this store was begun with other documents than there are now; put back what they "
                "were, or remove the folder"
            )

    def _batches(self, documents: Iterator[D]) -> Iterator[tuple[list[D], list[bytes]]]:
        """Documents that have some BATCH bytes together, or as many as there is room for tokens; what each holds."""
        batch: list[D] = []
        contents: list[bytes] = []
        size = 0
        for document in documents:
            batch.append(document)
            contents.append(self.content(document))
            if (size := size + len(contents[-1])) >= min(BATCH, self.room):
                yield batch, contents
                batch, contents, size = [], [], 0
        if batch:
            yield batch, contents

    def _add(self, content: bytes, parts: tuple[NDArray[Any], ...]) -> None:
        for number, part in enumerate(parts):
            self.files[number].write(part.tobytes())
            self.bytes[number] += part.nbytes
        self.documents += 1
        self.sources = _with(self.sources, content)

    def _keep_some(self) -> None:
        """Makes what is there safe, if it has become much."""
        if sum(self.bytes) - self._safe >= KEPT_EVERY:
            self.flush()
            self._safe = sum(self.bytes)
            left = {"documents": self.documents, "sources": self.sources, "bytes": self.bytes}
            write_text(self._folder / PROGRESS, json.dumps(left))

    def _finish(self) -> Store:
        self.flush()
        manifest = self.ended()
        _write_manifest(self._folder, manifest)
        (self._folder / PROGRESS).unlink(missing_ok=True)
        return Store(self._folder, manifest)


def _with(sources: str, content: bytes) -> str:
    """The hash of documents and one more; a chain, so that who goes on with a store needs no more than the last."""
    return hashlib.sha256(sources.encode() + hashlib.sha256(content).digest()).hexdigest()


def token_kind(tokenizer: Tokenizer) -> np.dtype[np.integer]:
    """The smallest dtype that holds a tokenizer's tokens."""
    return np.min_scalar_type(max(tokenizer.size - 1, tokenizer.end))


class _TextWriter(Writer[str]):
    """Text is dealt to its files as it comes."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        most: int | None,
        numbered: bool,
        lost: Callable[[], Sequence[str]],
    ) -> None:
        self._kind, self._numbered, self._lost = token_kind(tokenizer), numbered, lost
        super().__init__(folder, tokenizer, most, dict.fromkeys(TEXT, self._kind))

    @property
    def tokens(self) -> int:
        return sum(self.bytes) // self._kind.itemsize

    def content(self, document: str) -> bytes:
        return document.encode()

    def encoded(self, documents: list[str]) -> Iterator[tuple[NDArray[Any], ...]]:
        nothing = np.empty(0, dtype=self._kind)
        for text, tokens in zip(documents, self.tokenizer.encode_all(documents), strict=True):
            ended = np.append(tokens.astype(self._kind), np.array([self.tokenizer.end], dtype=self._kind))
            cut = ended if len(ended) <= self.room else ended[: int(self.room)]
            content = by_number(self.documents) if self._numbered else text.encode()
            yield (nothing, cut) if is_held_out(content) else (cut, nothing)

    def ended(self) -> Manifest:
        share = self.bytes[1] / max(sum(self.bytes), 1)
        unfit = not (self._numbered or LEAST_HELD_OUT <= share <= MOST_HELD_OUT)
        if self.documents < HELD_OUT_SHARE or unfit:
            self._hold_out_the_end()
        training, held_out = (size // self._kind.itemsize for size in self.bytes)
        used = self.tokenizer.digest, self._kind.name
        return Manifest(*used, self.documents, training, held_out, sources=self.sources, lost=tuple(self._lost()))

    def _hold_out_the_end(self) -> None:
        """Of too few documents to hold out whole ones, the end of the text is held out instead."""
        (self._folder / PROGRESS).unlink(missing_ok=True)  # from here on, files of that size may hold something else
        training, held_out = self.files
        held_out.seek(0)
        shutil.copyfileobj(held_out, training)
        end = self.tokens // HELD_OUT_SHARE * self._kind.itemsize
        cut = sum(self.bytes) - end
        held_out.truncate(0)
        training.seek(cut)
        shutil.copyfileobj(training, held_out)
        self.flush()
        training.truncate(cut)
        self.bytes = [cut, end]
