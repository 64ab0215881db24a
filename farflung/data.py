"""farflung's data for a loop of your own: sequences of tokens, each once before any comes twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from farflung.errors import UserError
from farflung.workloads import data, mixtures, prepared, tokenizers
from farflung.workloads.data import Data
from farflung.workloads.dealing import Deal
from farflung.workloads.settings import LanguageSettings

__all__ = ["Sequences"]


class Sequences(Dataset[Tensor]):
    """The sequences that a replica trains on in an epoch, in their order, for a torch `DataLoader` without shuffling.

    Item `i` follows from the arguments, the epoch and `i` alone, so that a loop that is resumed leaves out what it has
    seen (`torch.utils.data.Subset`). Text becomes tokens once, in a store that all processes and later runs map.

    Args:
        source: stdlib, hf:NAME, a path, glob or address, or what `farflung prepare` has made: as `--data`.
        length: tokens in a sequence.
        tokenizer: bytes, or anything that transformers' AutoTokenizer loads.
        seed: of the order.
        replica: whose sequences these are.
        replicas: how many deal the sequences out among them; None where they come and go, and each goes through all.
        column: of rows, that which holds the text.

    Raises UserError where there is no text, or too little, and for a number that cannot be.
    """

    def __init__(
        self,
        source: str,
        length: int,
        tokenizer: str = "bytes",
        *,
        seed: int = 0,
        replica: int = 0,
        replicas: int | None = None,
        column: str = "text",
    ) -> None:
        if mixtures.sources(source):
            raise UserError("a mixture has no end; make Sequences of each source, and mix them in your loop")
        for name, number, least in (("seed", seed, 0), ("replica", replica, 0), ("replicas", replicas, 1)):
            _refuse_below(least, name, number)
        if replicas is not None and replica >= replicas:
            raise UserError(f"replica is {replica} of {replicas}; number them from 0 to {replicas - 1}")
        settings = LanguageSettings(data=source, tokenizer=tokenizer, sequence_length=length, text_column=column)
        self.tokenizer = tokenizers.load(tokenizer)
        self._deal = Deal(replicas)
        self._data = data.load(settings, self.tokenizer, self._deal)
        self._kept = replace(settings, data=str(prepared.store_of(settings, self.tokenizer).folder))
        self._seed, self._replica, self._epoch = seed, replica, 0
        if not len(self):
            raise UserError(
                f"data {source}: {self._data.available} sequences are fewer than {replicas} replicas; give more text"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Without the tokens: each process of a DataLoader maps them for itself, however it is started."""
        return {name: value for name, value in vars(self).items() if name != "_data"}

    @cached_property
    def _data(self) -> Data:
        return data.load(self._kept, self.tokenizer, self._deal)

    def set_epoch(self, epoch: int) -> None:
        """Goes to an epoch, from 0; each has another order. Loaders that have begun keep theirs. Raises UserError."""
        _refuse_below(0, "epoch", epoch)
        self._epoch = epoch

    def __len__(self) -> int:
        return self._data.available // (self._deal.replicas or 1)

    def __getitem__(self, item: int) -> Tensor:
        return self.__getitems__([item])[0]

    def __getitems__(self, items: Sequence[int]) -> list[Tensor]:
        """What a DataLoader asks for: (length,) int64 each. Raises IndexError."""
        if wrong := [item for item in items if not 0 <= item < len(self)]:
            raise IndexError(f"item {wrong[0]} of {len(self)} sequences")
        places = self._epoch * len(self) + np.array(items, dtype=np.int64)
        return list(self._data.batch(self._deal.at(self._seed, self._replica, places, self._data.available)))

    def held_out(self, most: int) -> Tensor:
        """Up to `most` sequences held out, (n, length) int64, evenly spread; the same for every replica."""
        return self._data.held_out(most)


def _refuse_below(least: int, name: str, number: int | None) -> None:
    if number is not None and number < least:
        raise UserError(f"{name} is {number}; it must be at least {least}")
