"""Text as sequences of tokens, to train on and held out."""

from __future__ import annotations

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


class Data:
    """Tokens to train on and tokens held out, in sequences of one length.

    Args:
        training, held_out: flat arrays of tokens.
        length: tokens in a sequence.
        name: what the user calls it.
        shares: stretches of one length that the training part is cut into; a replica sees one of them.

    Raises UserError where the held-out part, or a share, is shorter than one sequence.
    """

    def __init__(
        self, training: NDArray[np.integer], held_out: NDArray[np.integer], length: int, name: str, shares: int = 1
    ) -> None:
        for part, tokens in (("training", training), ("validation", held_out)):
            if len(tokens) < length:
                raise UserError(
                    f"data {name}: the {part} part has {len(tokens)} tokens, fewer than one sequence of {length}; "
                    "give more text or a smaller sequence_length"
                )
        self._training = training
        self._held_out = held_out
        self._length = length
        if len(training) < shares * length:
            raise UserError(
                f"data {name}: {len(training)} tokens are less than a sequence of {length} for each of {shares} "
                "replicas; give more text, or leave out shares"
            )

    @property
    def available(self) -> int:
        """Training sequences."""
        return len(self._training) // self._length

    def batch(self, ids: Ids) -> Tensor:
        """Training sequences (n, length) int64 by their numbers."""
        return self._sequences(self._training, ids)

    def held_out(self, most: int) -> Tensor:
        """Up to `most` held-out sequences (n, length) int64, evenly spread; the same for every replica and step."""
        available = len(self._held_out) // self._length
        return self._sequences(self._held_out, evenly(available, most))

    def _sequences(self, tokens: NDArray[np.integer], ids: Ids) -> Tensor:
        positions = ids[:, None] * self._length + np.arange(self._length)
        return torch.from_numpy(tokens[positions].astype(np.int64))


def load(settings: LanguageSettings, tokenizer: Tokenizer, deal: Deal = ALL) -> Data:
    """The data that the settings name, mapped from its store. Raises UserError: missing, empty or too short."""
    store, most = store_of(settings, tokenizer, numbered=deal.draws), settings.max_tokens
    training, held_out = store.training, store.held_out
    if most and (there := len(training) + len(held_out)) > most:  # a store that was prepared with more
        training, held_out = (part[: len(part) * most // there] for part in (training, held_out))
    return Data(training, held_out, settings.sequence_length, settings.data, deal.shares)
