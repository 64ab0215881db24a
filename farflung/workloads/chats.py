"""Chats as sequences of tokens of which only the answers are learnt, to train on and held out."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farflung.errors import UserError, counted
from farflung.workloads import store
from farflung.workloads.base import Ids
from farflung.workloads.chat_store import chats_of, content
from farflung.workloads.dealing import ALL, Deal
from farflung.workloads.held_out import HELD_OUT_SHARE, by_number, evenly, is_held_out
from farflung.workloads.prepared import is_prepared, store_of
from farflung.workloads.settings import LanguageSettings
from farflung.workloads.store import Store
from farflung.workloads.templates import ANSWERS
from farflung.workloads.tokenizers import Tokenizer

IGNORED = -100
"""The label of a token that is not learnt, as torch and transformers have it."""

Labelled = tuple[Tensor, Tensor]
"""Tokens (n, length) int64, and what is to be predicted of them: the tokens themselves, or IGNORED."""


LEAST_TRAINING = 2
"""The fewest chats that are trained on."""


class Chats:
    """Chats to train on and chats held out; the beginning of a sequence is a prompt.

    Args:
        training, held_out: their numbers in the store.
        settings: say after how many tokens they are cut, and what the user calls them.
        padding: the token that fills shorter ones up.
    """

    def __init__(self, kept: Store, training: Ids, held_out: Ids, settings: LanguageSettings, padding: int) -> None:
        self._tokens, self._learnt, self._index = map(kept.mapped, store.CHATS)
        self._training, self._held_out = training, held_out
        self._length, self._padding = settings.sequence_length, padding
        self.known = kept.known_as(settings.data)
        """See Workload."""

    @property
    def available(self) -> int:
        """Training chats."""
        return len(self._training)

    @cached_property
    def answer_tokens(self) -> int:
        """Tokens of answers in a training chat, in the mean; at least 1."""
        entries = self._index[self._training]
        cut = entries["tokens"] > self._length
        learnt = int(entries["learnt"][~cut].sum())
        learnt += sum(int(self._learnt[self._span(entry)].sum()) for entry in entries[cut])
        return max(1, round(learnt / self.available))

    def batch(self, ids: Ids) -> Labelled:
        """Training chats by their numbers, filled up to the longest."""
        return self._filled_up(self._training[ids])

    def held_out(self, most: int) -> Labelled:
        """Up to `most` held-out chats, evenly spread; the same for every replica and step."""
        return self._filled_up(self._held_out[evenly(len(self._held_out), most)])

    def _filled_up(self, numbers: Ids) -> Labelled:
        rows = []
        for entry in self._index[numbers]:
            span = self._span(entry)
            tokens = torch.from_numpy(self._tokens[span].astype(np.int64))
            learnt = torch.from_numpy(self._learnt[span].copy())
            rows.append((tokens.unsqueeze(0), torch.where(learnt, tokens, IGNORED).unsqueeze(0)))
        return joined(rows, self._padding)

    def _span(self, entry: NDArray[np.void]) -> slice:
        """Where the tokens of a chat lie, as far as they are trained on."""
        begin = int(entry["begin"])
        return slice(begin, begin + min(int(entry["tokens"]), self._length))


def labelled(samples: Tensor | Labelled) -> Labelled:
    """Samples with labels; of text, all tokens are learnt."""
    return (samples, samples) if isinstance(samples, Tensor) else samples


def joined(samples: Sequence[Labelled], padding: int) -> Labelled:
    """Samples one after the other, filled up to the longest with a token that is not learnt."""
    shape = sum(len(tokens) for tokens, _ in samples), max(tokens.shape[1] for tokens, _ in samples)
    found = torch.full(shape, padding), torch.full(shape, IGNORED)
    row = 0
    for sample in samples:
        here = slice(row, row := row + len(sample[0]))
        for whole, part in zip(found, sample, strict=True):
            whole[here, : part.shape[1]] = part
    return found


def check(settings: LanguageSettings, tokenizer: Tokenizer) -> None:
    """Refuses a tokenizer that cannot tell the first chat's answers, or is not the store's. Raises UserError."""
    if is_prepared(settings):
        store_of(settings, tokenizer, as_chats=True)
    elif first := next(chats_of(settings), None):
        first.rendered(tokenizer)


def load(settings: LanguageSettings, tokenizer: Tokenizer, deal: Deal = ALL) -> Chats:
    """The chats that the settings name, mapped from their store; warns of those that are too long.

    Raises UserError where one is no chat, or where there are too few.
    """
    found = store_of(settings, tokenizer, as_chats=True)
    kept, lost = _fit(found, settings)
    training, held_out = (kept, kept[:0]) if settings.validation else _dealt(found, kept, settings, deal.draws)
    least = max(deal.shares, LEAST_TRAINING)
    if len(training) < least:
        wanted = str(least) if settings.validation else f"{least + 1}: {least} to train on, and one held out"
        raise _too_few(settings, len(kept), lost, wanted)
    _warn(settings, lost)
    return Chats(found, training, held_out, settings, tokenizer.end)


def load_all(settings: LanguageSettings, tokenizer: Tokenizer) -> Labelled:
    """Up to `eval_sequences` of all chats that the settings name, evenly spread. Raises UserError."""
    found = store_of(settings, tokenizer, as_chats=True)
    kept, lost = _fit(found, settings)
    if not len(kept):
        raise _too_few(settings, 0, lost, "1")
    _warn(settings, lost)
    return Chats(found, kept[:0], kept, settings, tokenizer.end).held_out(settings.eval_sequences)


def _fit(found: Store, settings: LanguageSettings) -> tuple[Ids, str]:
    """The chats that have something to learn within a sequence, and what is told of others. Raises UserError."""
    index, length = found.mapped(store.INDEX), settings.sequence_length
    if settings.max_tokens:  # of a store that was prepared with more
        index = index[: np.searchsorted(index["begin"], settings.max_tokens)]
    fits, silent = index["first"] < np.minimum(index["tokens"], length), index["learnt"] == 0
    cut, left_out = int((fits & (index["tokens"] > length)).sum()), int((~fits & ~silent).sum())
    if left_out and not fits.any():
        raise UserError(
            f"data {settings.data}: all {left_out} chats are cut at sequence_length {length}, before "
            "their answers begin; give a larger sequence_length, or shorter prompts"
        )
    return np.flatnonzero(fits), _told_of_lost(length, len(index), cut, left_out, int(silent.sum()))


def _warn(settings: LanguageSettings, lost: str) -> None:
    if lost:
        warnings.warn(f"data {settings.data}: {lost}", stacklevel=3)


def _too_few(settings: LanguageSettings, kept: int, lost: str, wanted: str) -> UserError:
    there = f"{counted(kept, 'chat')} to learn from{f' ({lost})' if lost else ''}"
    longer = ", or a larger sequence_length" if "longer than" in lost else ""
    return UserError(f"data {settings.data}: {there}; give at least {wanted}{longer}")


def _told_of_lost(length: int, count: int, cut: int, left_out: int, silent: int) -> str:
    """What has become of chats that are not learnt whole; "" where all are."""
    lost = []
    if cut or left_out:
        long = f"{cut + left_out} of {count} chats are longer than a sequence of {length} tokens"
        lost.append(f"{long} ({cut} are cut, {left_out} left out, whose answers begin behind it)")
    if silent:
        lost.append(f"{silent} of {count} chats are left out, which have no answer of the role {ANSWERS}")
    return ", and ".join(lost)


def _dealt(found: Store, chats: Ids, settings: LanguageSettings, numbered: bool) -> tuple[Ids, Ids]:
    """Chats to train on and chats held out, by what they hold or their number; of few ones, the last are held out."""
    entries, tokens, length = found.mapped(store.INDEX)[chats], found.mapped(store.TOKENS), settings.sequence_length
    out = entries["held_out"].copy()
    if numbered:
        out[:] = [is_held_out(by_number(number)) for number in range(len(chats))]
    else:
        for place in np.flatnonzero(entries["tokens"] > length):
            begin = int(entries["begin"][place])
            out[place] = is_held_out(content(tokens[begin : begin + length]))
    if len(chats) < HELD_OUT_SHARE or out.all() or not out.any():
        return chats[:-1], chats[-1:]
    return chats[~out], chats[out]
