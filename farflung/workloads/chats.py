"""Chats as sequences of tokens of which only the answers are learnt, to train on and held out."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farflung.errors import UserError, counted
from farflung.workloads.base import Ids
from farflung.workloads.dealing import ALL, Deal
from farflung.workloads.far import HUB, is_far
from farflung.workloads.held_out import HELD_OUT_SHARE, by_number, evenly, is_held_out
from farflung.workloads.settings import LanguageSettings
from farflung.workloads.templates import ANSWERS, ChatError, Message, Rendered
from farflung.workloads.text import records
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
        training, held_out: the chats, none longer than a sequence.
        padding: the token that fills shorter ones up.
    """

    def __init__(self, training: Sequence[Rendered], held_out: Sequence[Rendered], padding: int) -> None:
        self._training, self._held_out = _Rows(training), _Rows(held_out)
        self._padding = padding

    @property
    def available(self) -> int:
        """Training chats."""
        return len(self._training)

    @property
    def answer_tokens(self) -> int:
        """Tokens of answers in a training chat, in the mean; at least 1."""
        return max(1, round(int(self._training.answers.sum()) / self.available))

    def batch(self, ids: Ids) -> Labelled:
        """Training chats by their numbers, filled up to the longest."""
        return self._training.batch(ids, self._padding)

    def held_out(self, most: int) -> Labelled:
        """Up to `most` held-out chats, evenly spread; the same for every replica and step."""
        return self._held_out.batch(evenly(len(self._held_out), most), self._padding)


class _Rows:
    """Sequences of unlike lengths, one after the other."""

    def __init__(self, chats: Sequence[Rendered]) -> None:
        self._tokens = np.concatenate([chat.tokens for chat in chats] or [np.empty(0, dtype=np.int64)])
        self.answers = np.concatenate([chat.answers for chat in chats] or [np.empty(0, dtype=np.bool_)])
        self._bounds = list(pairwise(accumulate((len(chat.tokens) for chat in chats), initial=0)))

    def __len__(self) -> int:
        return len(self._bounds)

    def batch(self, ids: Ids, padding: int) -> Labelled:
        """Some of them, filled up to the longest."""
        chosen = [slice(*self._bounds[number]) for number in ids.tolist()]
        shape = (len(chosen), max(one.stop - one.start for one in chosen))
        tokens, labels = np.full(shape, padding, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64)
        for row, one in enumerate(chosen):
            length, own = one.stop - one.start, self._tokens[one].astype(np.int64)  # bytes hold no IGNORED
            tokens[row, :length] = own
            labels[row, :length] = np.where(self.answers[one], own, IGNORED)
        return torch.from_numpy(tokens), torch.from_numpy(labels)


def holds_chats(settings: LanguageSettings) -> bool:
    """Whether the first record of the data is a chat. Raises UserError where it cannot be read."""
    if is_far(settings.data) and not settings.data.startswith(HUB):
        return False  # which would be read whole
    _, first = next(records(settings.data), ("", ""))
    if isinstance(first, str) or isinstance(first.get(settings.text_column), str):
        return False
    return _form_of(first, settings.text_column) is not None


def check(settings: LanguageSettings, tokenizer: Tokenizer) -> None:
    """Refuses a tokenizer that cannot tell the first chat's answers. Raises UserError."""
    next(_rendered(settings, tokenizer), None)


def load(settings: LanguageSettings, tokenizer: Tokenizer, deal: Deal = ALL) -> Chats:
    """Reads the chats that the settings name, and warns of those that are too long.

    Raises UserError where one is no chat, or where there are too few.
    """
    kept, lost = _read(settings, tokenizer)
    training, held_out = (kept, []) if settings.validation else _dealt(kept, deal.draws)
    least = max(deal.shares, LEAST_TRAINING)
    if len(training) < least:
        wanted = str(least) if settings.validation else f"{least + 1}: {least} to train on, and one held out"
        raise _too_few(settings, kept, lost, wanted)
    _warn(settings, lost)
    return Chats(training, held_out, tokenizer.end)


def load_all(settings: LanguageSettings, tokenizer: Tokenizer) -> Labelled:
    """Up to `eval_sequences` of all chats that the settings name, evenly spread. Raises UserError."""
    kept, lost = _read(settings, tokenizer)
    if not kept:
        raise _too_few(settings, kept, lost, "1")
    _warn(settings, lost)
    return Chats([], kept, tokenizer.end).held_out(settings.eval_sequences)


def _read(settings: LanguageSettings, tokenizer: Tokenizer) -> tuple[list[Rendered], str]:
    """The chats that have something to learn within a sequence, and what is told of others. Raises UserError."""
    kept, cut, left_out, silent = [], 0, 0, 0
    for chat in _rendered(settings, tokenizer):
        fits = Rendered(chat.tokens[: settings.sequence_length], chat.answers[: settings.sequence_length])
        if fits.answers[1:].any():  # of a first token, nobody predicts anything
            kept.append(fits)
            cut += len(fits.tokens) < len(chat.tokens)
        else:
            left_out += bool(chat.answers.any())
            silent += not chat.answers.any()
    if not kept and left_out:
        raise UserError(
            f"data {settings.data}: all {left_out} chats are cut at sequence_length {settings.sequence_length}, before "
            "their answers begin; give a larger sequence_length, or shorter prompts"
        )
    lost = _told_of_lost(settings, len(kept) + left_out + silent, cut, left_out, silent)
    return kept, lost


def _warn(settings: LanguageSettings, lost: str) -> None:
    if lost:
        warnings.warn(f"data {settings.data}: {lost}", stacklevel=3)


def _too_few(settings: LanguageSettings, kept: list[Rendered], lost: str, wanted: str) -> UserError:
    there = f"{counted(len(kept), 'chat')} to learn from{f' ({lost})' if lost else ''}"
    longer = ", or a larger sequence_length" if "longer than" in lost else ""
    return UserError(f"data {settings.data}: {there}; give at least {wanted}{longer}")


def _told_of_lost(settings: LanguageSettings, count: int, cut: int, left_out: int, silent: int) -> str:
    """What has become of chats that are not learnt whole; "" where all are."""
    lost = []
    if cut or left_out:
        long = f"{cut + left_out} of {count} chats are longer than a sequence of {settings.sequence_length} tokens"
        lost.append(f"{long} ({cut} are cut, {left_out} left out, whose answers begin behind it)")
    if silent:
        lost.append(f"{silent} of {count} chats are left out, which have no answer of the role {ANSWERS}")
    return ", and ".join(lost)


def _dealt(chats: list[Rendered], numbered: bool) -> tuple[list[Rendered], list[Rendered]]:
    """Chats to train on and chats held out, by what they hold or their number; of few ones, the last are held out."""
    if len(chats) < HELD_OUT_SHARE:
        return chats[:-1], chats[-1:]
    training: list[Rendered] = []
    held_out: list[Rendered] = []
    for number, chat in enumerate(chats):
        content = by_number(number) if numbered else chat.tokens.astype(np.int64).tobytes()
        (held_out if is_held_out(content) else training).append(chat)
    return (training, held_out) if training and held_out else (chats[:-1], chats[-1:])


def _rendered(settings: LanguageSettings, tokenizer: Tokenizer) -> Iterator[Rendered]:
    """The chats as tokens, until there are `max_tokens`."""
    room = settings.max_tokens
    for number, (where, record) in enumerate(records(settings.data)):
        at = f"data {where}: record {number + 1}"
        form = None if isinstance(record, str) else _form_of(record, settings.text_column)
        if form is None:
            raise UserError(f"{at} is no chat, as the first is; give {FORMS}, in all of them")
        try:
            chat = tokenizer.chat(_checked(form, at))
        except ChatError as error:
            raise UserError(f"{at}: the tokenizer's chat template refuses it: {error}; mend or remove it") from error
        yield chat
        if room is not None and (room := room - len(chat.tokens)) <= 0:
            return


FORMS = "messages with role and content, prompt and completion, or instruction and output"
"""What records of chats hold."""


def _form_of(record: Mapping[str, Any], column: str) -> list[Any] | None:
    """The messages of a record; None where it is no chat."""
    for name in (column, "messages"):
        if isinstance(record.get(name), list):
            return list(record[name])
    if {"prompt", "completion"} <= record.keys():
        return _exchange(record["prompt"], record["completion"])
    if {"instruction", "output"} <= record.keys():
        asked = "\n\n".join(filter(None, (record["instruction"], record.get("input"))))
        return _exchange(asked, record["output"])
    return None


def _exchange(asked: Any, answered: Any) -> list[Any]:
    """A question and its answer, which may both be lists of messages already."""
    before = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
    after = answered if isinstance(answered, list) else [{"role": ANSWERS, "content": answered}]
    return [*before, *after]


def _checked(messages: list[Any], at: str) -> list[Message]:
    """Messages without what is unset. Raises UserError where one has no role, or the chat is empty."""
    if not messages:
        raise UserError(f"{at} is a chat without messages; remove it")
    found: list[Message] = []
    for message in messages:
        if not (isinstance(message, Mapping) and isinstance(message.get("role"), str)):
            raise UserError(f"{at} has a message without a role; give each a role and content")
        found.append({name: value for name, value in message.items() if value is not None})
        if message["role"] in (ANSWERS, "user") and "content" not in found[-1] and "tool_calls" not in found[-1]:
            raise UserError(f"{at} has a message of {message['role']} without content; mend or remove it")
    return found
