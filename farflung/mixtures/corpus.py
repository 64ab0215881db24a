"""The text that is split: sequences of one or several sources, one after the other."""

from __future__ import annotations

import hashlib
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farflung.errors import UserError
from farflung.mixtures.settings import SplitSettings
from farflung.workloads import data, mixtures
from farflung.workloads.base import Ids
from farflung.workloads.settings import LanguageSettings
from farflung.workloads.tokenizers import Tokenizer

BLOCK = 1 << 14
"""Sequences that are read, and scored, at once."""


class Corpus:
    """All sequences of a text's sources, each whole in one of them. Raises UserError where a source has too little."""

    def __init__(self, settings: SplitSettings, tokenizer: Tokenizer) -> None:
        if mixed := [one for one in settings.data if mixtures.sources(one)]:
            raise UserError(f"data {mixed[0]!r}: sources have no weights here; give them one after the other")
        each = [
            LanguageSettings(
                data=one,
                text_column=settings.text_column,
                max_tokens=settings.max_tokens,
                sequence_length=settings.sequence_length,
            )
            for one in settings.data
        ]
        self._parts = [data.load(one, tokenizer) for one in each]
        self._begins = [*accumulate((part.available for part in self._parts), initial=0)]

    def __len__(self) -> int:
        """Sequences to train on."""
        return self._begins[-1]

    def take(self, ids: Ids) -> Tensor:
        """(n, length) int64 by their numbers."""
        sources = self.sources(ids)
        found: Tensor | None = None
        for source, part in enumerate(self._parts):
            here = sources == source
            rows = part.batch(ids[here] - self._begins[source])
            found = rows.new_empty((len(ids), rows.shape[1])) if found is None else found
            found[torch.from_numpy(here)] = rows
        assert found is not None
        return found

    def sources(self, ids: Ids) -> NDArray[np.int64]:
        """(n,) which source each is of."""
        return np.searchsorted(self._begins, ids, side="right") - 1

    def held_out(self) -> tuple[Tensor, NDArray[np.int64]]:
        """All sequences held out (n, length) int64, and which source each is of."""
        rows = [part.held_out(1 << 62) for part in self._parts]
        return torch.cat(rows), np.repeat(np.arange(len(rows)), [len(one) for one in rows])

    def digest(self) -> str:
        """A hash of all sequences, and of which source each is of."""
        held_out, sources = self.held_out()
        hashed = hashlib.sha256(repr(self._begins).encode())
        for begin in range(0, len(self), BLOCK):
            hashed.update(self.take(np.arange(begin, min(begin + BLOCK, len(self)))).numpy().data)
        for rows in (held_out.numpy(), sources):
            hashed.update(np.ascontiguousarray(rows).data)
        return hashed.hexdigest()
