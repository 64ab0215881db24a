"""Text as sequences of tokens, to train on and held out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farflung.errors import UserError
from farflung.workloads.base import Ids
from farflung.workloads.settings import LanguageSettings
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


def is_held_out(number: int) -> bool:
    """Whether a document is held out for validation: by its number alone, one in HELD_OUT_SHARE on average."""
    return hashlib.sha256(str(number).encode()).digest()[0] * HELD_OUT_SHARE < 256


def evenly(available: int, most: int) -> Ids:
    """Up to `most` of so many numbers from 0, evenly spread."""
    return np.linspace(0, available - 1, min(most, available), dtype=np.int64)


def load(settings: LanguageSettings, tokenizer: Tokenizer, shares: int = 1) -> Data:
    """Reads the data that the settings name. Raises UserError when it is missing, empty or too short."""
    training: list[NDArray[np.integer]] = []
    held_out: list[NDArray[np.integer]] = []
    for number, tokens in enumerate(_tokenized(settings, tokenizer)):
        (held_out if is_held_out(number) else training).append(tokens)
    if not training and not held_out:
        raise no_text(settings.data)
    if len(training) + len(held_out) < HELD_OUT_SHARE:
        # Too few documents to hold out whole ones: the end of the text is held out instead.
        tokens = np.concatenate(training + held_out)
        cut = len(tokens) - len(tokens) // HELD_OUT_SHARE
        return Data(tokens[:cut], tokens[cut:], settings.sequence_length, settings.data, shares)
    return Data(_joined(training), _joined(held_out), settings.sequence_length, settings.data, shares)


def no_text(data: str) -> UserError:
    """The error of data in which there is no letter."""
    if Path(data).is_file() and not Path(data).stat().st_size:
        return UserError(f"data {data}: the file is empty; give one with text in it")
    return UserError(f"data {data}: holds no text; give another path, or another text_column")


def _tokenized(settings: LanguageSettings, tokenizer: Tokenizer) -> Iterator[NDArray[np.integer]]:
    """The documents' tokens, each with its end marked, until there are `max_tokens`."""
    kind = np.min_scalar_type(max(tokenizer.size - 1, tokenizer.end))
    room = settings.max_tokens
    for text in documents(settings.data, settings.text_column):
        if text:
            tokens = np.append(tokenizer.encode(text).astype(kind), np.array([tokenizer.end], dtype=kind))
            yield tokens[:room]
            room -= len(tokens)
        if room <= 0:
            return


def _joined(parts: list[NDArray[np.integer]]) -> NDArray[np.integer]:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint8)
