"""Text that is larger than the disk: a replica goes through its files one after the other, in an order of its own.

All sequences of a file come before the next file. Which ones a replica trains on in a step is a pure function of the
files: how many sequences each has is remembered when its tokens are gone, and goes into checkpoints.
"""

from __future__ import annotations

import bisect
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farflung.errors import UserError
from farflung.workloads import far
from farflung.workloads.base import Ids
from farflung.workloads.dealing import Deal, permuted
from farflung.workloads.held_out import evenly
from farflung.workloads.prepared import cache
from farflung.workloads.settings import LanguageSettings
from farflung.workloads.shard_cache import Known, ShardCache
from farflung.workloads.tokenizers import Tokenizer

IN_FILE = 32
"""The bits of a sequence's number that say which one of its file it is; those above say which file."""
AHEAD = 2
"""Files that are made ready while a replica trains on another."""


class Unit(NamedTuple):
    """What a replica goes through at a time: a file, or every n-th sequence of one where replicas outnumber files."""

    file: int
    part: int
    epoch: int


class Shards:
    """Sequences of one length from files that come here when they are needed.

    Args:
        files: their addresses, in order; the first ones' held-out parts are what is held out.
        length: tokens in a sequence.
        name: what the user calls it.
        deal: how files are dealt to replicas, or every n-th sequence of each where replicas outnumber them.
    """

    def __init__(self, cache: ShardCache, files: list[str], length: int, name: str, deal: Deal) -> None:
        self._cache, self._files, self._length, self._name = cache, files, length, name
        self._replicas, self._apart = deal.replicas or 1, deal.apart
        self._parts = -(-self._replicas // len(files))
        self._walks: dict[tuple[int, int], _Walk] = {}

    available = None
    """How many sequences there are is not known before all files have come."""

    @property
    def known(self) -> Known:
        """What each file held that a replica has come to, which a resumed run need not read again for it."""
        return self._cache.known

    def at(self, seed: int, replica: int, places: Ids) -> Ids:
        """The numbers of the sequences at some places of the row that a replica trains on. Raises UserError."""
        if (walk := self._walks.get((seed, replica))) is None:
            walk = self._walks[seed, replica] = _Walk(self, seed, replica)
            self._cache.most_open += 2 + AHEAD
        reached = [walk.at(place) for place in places.tolist()]
        found = [
            self._numbers(seed, unit, [place for _, place in own]) for unit, own in groupby(reached, lambda one: one[0])
        ]
        for unit in walk.coming(AHEAD):
            self._cache.ahead(self._files[unit.file])
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def let_go(self) -> None:
        """Waits for no more files."""
        self._cache.let_go()

    def batch(self, ids: Ids) -> Tensor:
        """Training sequences (n, length) int64 by their numbers. Raises UserError."""
        return torch.stack(
            [self._sequence(number >> IN_FILE, number & ((1 << IN_FILE) - 1)) for number in ids.tolist()]
        )

    def held_out(self, most: int) -> Tensor:
        """Up to `most` sequences (n, length) int64 that the first files hold out. Raises UserError."""
        parts: list[NDArray[np.integer]] = []
        for file in self._files:
            tokens = self._cache.tokens(file, for_steps=False).held_out
            parts.append(tokens[: len(tokens) // self._length * self._length].reshape(-1, self._length))
            if sum(map(len, parts)) >= most:
                break
        found = np.concatenate(parts)
        if not len(found):
            raise self.too_short("validation")
        return torch.from_numpy(found[evenly(len(found), most)].astype(np.int64))

    def too_short(self, part: str) -> UserError:
        """The error of files none of which has a sequence."""
        return UserError(
            f"data {self._name}: the {part} part of no file has a sequence of {self._length} tokens; "
            "give more text in each file, or a smaller sequence_length"
        )

    def order(self, seed: int, replica: int, epoch: int) -> list[Unit]:
        """What a replica goes through in an epoch."""
        units = np.arange(len(self._files) * self._parts)
        if self._replicas > 1:
            units = np.random.default_rng((seed,) if self._apart else (seed, epoch)).permutation(units)
            units = units[replica % self._replicas :: self._replicas]
        if self._replicas == 1 or self._apart:
            units = np.random.default_rng((seed, epoch, replica)).permutation(units)
        return [Unit(one // self._parts, one % self._parts, epoch) for one in units.tolist()]

    def size(self, unit: Unit) -> int:
        """The sequences in a unit."""
        return len(range(unit.part, self._cache.count(self._files[unit.file]) // self._length, self._parts))

    def _numbers(self, seed: int, unit: Unit, places: list[int]) -> Ids:
        """The numbers of the sequences at some places of a unit's own order."""
        own = permuted(np.array(places), self.size(unit), (seed, unit.epoch, unit.file, unit.part))
        return unit.file << IN_FILE | own * self._parts + unit.part

    def _sequence(self, file: int, number: int) -> Tensor:
        tokens = self._cache.tokens(self._files[file]).training
        return torch.from_numpy(tokens[number * self._length : (number + 1) * self._length].astype(np.int64))


def cache_of(settings: LanguageSettings, tokenizer: Tokenizer) -> ShardCache:
    """Where a run's files are kept once they have come."""
    folder, room = cache() / "shards", round(settings.data_room * 1e9)
    return ShardCache(folder, room, tokenizer, settings.text_column, settings.data_deadline)


def load(settings: LanguageSettings, deal: Deal, kept: ShardCache) -> Shards:
    """The data that the settings name, whose files are on other machines. Raises UserError."""
    return Shards(kept, far.files(settings.data), settings.sequence_length, settings.data, deal)


class _Walk:
    """A replica's way through the files, as far as it is known."""

    def __init__(self, shards: Shards, seed: int, replica: int) -> None:
        self._shards, self._seed, self._replica = shards, seed, replica
        self._units: list[Unit] = []
        self._ends: list[int] = []
        """The positions behind the units that it has come to; of later ones, no size is known yet."""

    def at(self, position: int) -> tuple[Unit, int]:
        """The unit that a position is in, and which of its sequences that is. Raises UserError where there are none."""
        while position >= self._end:
            (unit,) = self.coming(1)
            if unit.epoch > 1 and not self._end:
                raise self._shards.too_short("training")
            self._ends.append(self._end + self._shards.size(unit))
        found = bisect.bisect_right(self._ends, position)
        return self._units[found], position - (self._ends[found - 1] if found else 0)

    def coming(self, count: int) -> list[Unit]:
        """The units after those that it has come to."""
        while len(self._units) < (last := len(self._ends) + count):
            epoch = self._units[-1].epoch + 1 if self._units else 0
            self._units += self._shards.order(self._seed, self._replica, epoch)
        return self._units[len(self._ends) : last]

    @property
    def _end(self) -> int:
        return self._ends[-1] if self._ends else 0
