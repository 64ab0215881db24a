"""Text as sequences of tokens, to train on and held out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farflung.errors import UserError
from farflung.workloads.base import Ids
from farflung.workloads.dealing import ALL, Deal
from farflung.workloads.held_out import evenly
from farflung.workloads.prepared import store_of
from farflung.workloads.settings import LanguageSettings
from farflung.workloads.tokenizers import Tokenizer


class Rows:
    """The sequences of one length that flat arrays of tokens hold, numbered from one array to the next."""

    def __init__(self, arrays: Sequence[NDArray[np.integer]], length: int) -> None:
        self.length, self.tokens = length, sum(map(len, arrays))
        self._arrays = [tokens[: len(tokens) // length * length].reshape(-1, length) for tokens in arrays]
        self._begins = [*accumulate(map(len, self._arrays), initial=0)]

    def __len__(self) -> int:
        return self._begins[-1]

    def take(self, ids: Ids) -> Tensor:
        """(n, length) int64 by their numbers."""
        found = np.empty((len(ids), self.length), dtype=np.int64)
        for begin, rows in zip(self._begins, self._arrays, strict=False):
            here = (begin <= ids) & (ids < begin + len(rows))
            found[here] = rows[ids[here] - begin]
        return torch.from_numpy(found)

    def spread(self, most: int) -> Tensor:
        """Up to `most` of them, evenly spread."""
        return self.take(evenly(len(self), most))

    def refuse_none(self, name: str) -> None:
        """Raises UserError where there is no sequence."""
        if not len(self):
            raise UserError(
                f"data {name} has {self.tokens} tokens, fewer than one sequence of {self.length}; "
                "give more text or a smaller sequence_length"
            )


class Data:
    """Sequences to train on, and sequences held out of them, unless a run is judged on others.

    Args:
        name: what the user calls it.
        shares: stretches of one length that the training part is cut into; a replica sees one of them.
        known: see Workload.

    Raises UserError where a part, or a share, is shorter than one sequence.
    """

    def __init__(
        self,
        training: Rows,
        held_out: Rows | None,
        name: str,
        shares: int = 1,
        known: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        training.refuse_none(f"{name}: the training part")
        if held_out is not None:
            held_out.refuse_none(f"{name}: the validation part")
        if len(training) < shares:
            raise UserError(
                f"data {name}: {training.tokens} tokens are less than a sequence of {training.length} for each of "
                f"{shares} replicas; give more text, or leave out shares"
            )
        self._training, self._held_out, self.known = training, held_out, dict(known)

    @property
    def available(self) -> int:
        """Training sequences."""
        return len(self._training)

    def batch(self, ids: Ids) -> Tensor:
        """Training sequences (n, length) int64 by their numbers."""
        return self._training.take(ids)

    def held_out(self, most: int) -> Tensor:
        """Up to `most` held-out sequences (n, length) int64, evenly spread; the same for every replica and step."""
        assert self._held_out is not None, "a run that is judged on data of its own"
        return self._held_out.spread(most)


def load(settings: LanguageSettings, tokenizer: Tokenizer, deal: Deal = ALL) -> Data:
    """The data that the settings name, mapped from its store. Raises UserError: missing, empty or too short.

    Where they name data to judge by, nothing else is held out.
    """
    store, most = store_of(settings, tokenizer, numbered=deal.draws), settings.max_tokens
    training, held_out = store.training, store.held_out
    if most and (there := len(training) + len(held_out)) > most:  # a store that was prepared with more
        training, held_out = (part[: len(part) * most // there] for part in (training, held_out))
    length, told = settings.sequence_length, (settings.data, deal.shares, store.known_as(settings.data))
    if settings.validation:
        return Data(Rows([training, held_out], length), None, *told)
    return Data(Rows([training], length), Rows([held_out], length), *told)


def load_all(settings: LanguageSettings, tokenizer: Tokenizer) -> Tensor:
    """Up to `eval_sequences` of all sequences (n, length) int64 of the data that is named. Raises UserError."""
    store = store_of(settings, tokenizer)
    rows = Rows([store.training, store.held_out], settings.sequence_length)
    rows.refuse_none(settings.data)
    return rows.spread(settings.eval_sequences)
