"""Training data as a pure function of seed, replica and step: there is no iterator to save or to hand over."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farflung.config import Config
from farflung.errors import UserError
from farflung.workloads.text import documents
from farflung.workloads.tokenizers import Tokenizer

HELD_OUT_SHARE = 20
"""One document in this many is held out for validation."""


class Data:
    """Tokens to train on and tokens held out, in sequences of one length.

    Args:
        training, held_out: flat arrays of tokens.
        length: tokens in a sequence.
        name: what the user calls it.
        shares: stretches of one length that the training part is divided into; a replica sees one of them only.

    Raises:
        UserError: either is shorter than one sequence.
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
        self._shares = shares
        if len(training) < shares * length:
            raise UserError(
                f"data {name}: {len(training)} tokens are less than a sequence of {length} for each of {shares} "
                "replicas; give more text, or leave out shares"
            )

    def batch(self, seed: int, replica: int, step: int, size: int) -> Tensor:
        """Sequences (size, length) int64 that a replica trains on in a step."""
        available = len(self._training) // self._length // self._shares
        ids = sample_ids(seed, replica, step, size, available)
        return self._sequences(self._training, replica % self._shares * available + ids)

    def held_out(self, most: int) -> Tensor:
        """Up to `most` held-out sequences (n, length) int64, evenly spread; the same for every replica and step."""
        available = len(self._held_out) // self._length
        return self._sequences(self._held_out, np.linspace(0, available - 1, min(most, available), dtype=np.int64))

    def _sequences(self, tokens: NDArray[np.integer], ids: NDArray[np.int64]) -> Tensor:
        positions = ids[:, None] * self._length + np.arange(self._length)
        return torch.from_numpy(tokens[positions].astype(np.int64))


def sample_ids(seed: int, replica: int, step: int, size: int, available: int) -> NDArray[np.int64]:
    """Which of the `available` sequences a replica trains on in a step: drawn anew, with replacement.

    A pure function: replicas draw independently, so a replica that joins or leaves changes nobody else's data.
    """
    return np.random.default_rng((seed, replica, step)).integers(available, size=size)


def load(config: Config, tokenizer: Tokenizer) -> Data:
    """Reads the data that the settings name. Raises UserError when it is missing, empty or too short."""
    shares = config.replicas if config.shares == "apart" else 1
    training: list[NDArray[np.integer]] = []
    held_out: list[NDArray[np.integer]] = []
    for number, tokens in enumerate(_tokenized(config, tokenizer)):
        chosen = hashlib.sha256(str(number).encode()).digest()[0] * HELD_OUT_SHARE < 256
        (held_out if chosen else training).append(tokens)
    if not training and not held_out:
        raise UserError(f"data {config.data}: holds no text; give another path, or another text_column")
    if len(training) + len(held_out) < HELD_OUT_SHARE:
        # Too few documents to hold out whole ones: the end of the text is held out instead.
        tokens = np.concatenate(training + held_out)
        cut = len(tokens) - len(tokens) // HELD_OUT_SHARE
        return Data(tokens[:cut], tokens[cut:], config.sequence_length, config.data, shares)
    return Data(_joined(training), _joined(held_out), config.sequence_length, config.data, shares)


def _tokenized(config: Config, tokenizer: Tokenizer) -> Iterator[NDArray[np.integer]]:
    """The documents' tokens, each with its end marked, until there are `max_tokens`."""
    kind = np.min_scalar_type(max(tokenizer.size - 1, tokenizer.end))
    room = config.max_tokens
    for text in documents(config.data, config.text_column):
        if text:
            tokens = np.append(tokenizer.encode(text).astype(kind), np.array([tokenizer.end], dtype=kind))
            yield tokens[:room]
            room -= len(tokens)
        if room <= 0:
            return


def _joined(parts: list[NDArray[np.integer]]) -> NDArray[np.integer]:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint8)
