"""Chats in the forms that data has them, and the store that they become."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farflung.errors import UserError
from farflung.workloads import store
from farflung.workloads.far import HUB, is_far
from farflung.workloads.held_out import is_held_out
from farflung.workloads.settings import LanguageSettings
from farflung.workloads.store import Manifest, Store, Told, Writer
from farflung.workloads.templates import ANSWERS, ChatError, Message, Rendered
from farflung.workloads.text import records
from farflung.workloads.tokenizers import Tokenizer

FORMS = "messages with role and content, prompt and completion, or instruction and output"
"""What records of chats hold."""


class Chat(NamedTuple):
    """Messages, and where they are from, for what is told of them."""

    where: str
    messages: list[Message]

    def rendered(self, tokenizer: Tokenizer) -> Rendered:
        """The chat as tokens. Raises UserError where the tokenizer cannot."""
        try:
            return tokenizer.chat(self.messages)
        except ChatError as error:
            raise UserError(
                f"{self.where}: the tokenizer's chat template refuses it: {error}; mend or remove it"
            ) from error


def holds_chats(settings: LanguageSettings) -> bool:
    """Whether the first record of the data is a chat. Raises UserError where it cannot be read."""
    if is_far(settings.data) and not settings.data.startswith(HUB):
        return False  # which would be read whole
    _, first = next(records(settings.data), ("", ""))
    if isinstance(first, str) or isinstance(first.get(settings.text_column), str):
        return False
    return _form_of(first, settings.text_column) is not None


def chats_of(settings: LanguageSettings) -> Iterator[Chat]:
    """The chats that `--data` names, in one order on every machine. Raises UserError where one is none."""
    for number, (where, record) in enumerate(records(settings.data)):
        at = f"data {where}: record {number + 1}"
        form = None if isinstance(record, str) else _form_of(record, settings.text_column)
        if form is None:
            raise UserError(f"{at} is no chat, as the first is; give {FORMS}, in all of them")
        yield Chat(at, _checked(form, at))


def write(folder: Path, chats: Iterable[Chat], tokenizer: Tokenizer, most: int | None, told: Told) -> Store:
    """Makes a store of chats, or goes on where another process was interrupted with the same ones.

    Args:
        most: so many tokens are enough; the chat that reaches them is the last. None for all.
        told: is told now and then how far it is.

    Raises UserError for a chat that the tokenizer cannot render, and OSError where the disk does not let it.
    """
    return _ChatWriter(folder, tokenizer, most).write(chats, told)


class _ChatWriter(Writer[Chat]):
    """Chats are kept whole, and dealt out when a run knows where it cuts them."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, most: int | None) -> None:
        self._kind = store.token_kind(tokenizer)
        kinds = (self._kind, np.dtype(np.bool_), store.ENTRY)
        super().__init__(folder, tokenizer, most, dict(zip(store.CHATS, kinds, strict=True)))

    @property
    def tokens(self) -> int:
        return self.bytes[0] // self._kind.itemsize

    def content(self, document: Chat) -> bytes:
        return json.dumps(document.messages, sort_keys=True, default=str).encode()

    def encoded(self, documents: list[Chat]) -> Iterator[tuple[NDArray[Any], ...]]:
        for tokens, learnt in (chat.rendered(self.tokenizer) for chat in documents):
            later = np.flatnonzero(learnt[1:])
            first = int(later[0]) + 1 if len(later) else len(tokens)
            entry = (self.tokens, len(tokens), first, np.count_nonzero(learnt), is_held_out(content(tokens)))
            yield tokens.astype(self._kind), learnt, np.array([entry], dtype=store.ENTRY)

    def ended(self) -> Manifest:
        used = self.tokenizer.digest, self._kind.name
        chats = self.tokenizer.template, self.sources
        return Manifest(*used, self.documents, self.tokens, 0, *chats)


def content(tokens: NDArray[np.integer]) -> bytes:
    """What decides whether a chat is held out, of its tokens as far as they are trained on."""
    return tokens.astype(np.int64).tobytes()


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
