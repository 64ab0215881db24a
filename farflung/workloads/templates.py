"""Chats as tokens, by a tokenizer's own template, and which of these are answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farflung.errors import UserError

Message = Mapping[str, Any]
"""What somebody says, with `role` and mostly `content`."""

ANSWERS = "assistant"
"""The role whose messages are learnt."""

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Rendered(NamedTuple):
    """A chat: its flat tokens, and which of them belong to answers (bool)."""

    tokens: NDArray[np.integer]
    answers: NDArray[np.bool_]


class ChatError(Exception):
    """A template does not take a chat; in words, why."""


def rendered(tokenizer: Any, name: str, messages: Sequence[Message]) -> Rendered:
    """A chat as the template of a transformers tokenizer, called `name`, renders it.

    A template that marks its answers with `{% generation %}` says itself which tokens these are. Else an answer is what
    a chat gets longer by with it; a template that renders a chat's beginning otherwise than the whole is refused.

    Raises UserError for a tokenizer that cannot tell answers, and ChatError for a chat that its template refuses.
    """
    if not tokenizer.chat_template:
        raise UserError(
            f"tokenizer {name} has no chat template; give one that has, such as an instruct model's, or put a "
            "chat_template.jinja into its folder"
        )
    if not tokenizer.is_fast:
        raise UserError(
            f"tokenizer {name} does not say which part of a text a token stands for, so answers cannot be told from "
            "prompts; give one with a tokenizer.json"
        )
    chat = [dict(message) for message in messages]
    if _MARKED.search(tokenizer.get_chat_template()):
        found = _render(tokenizer, chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return Rendered(_ids(found["input_ids"]), np.asarray(found["assistant_masks"], dtype=bool))
    text, spans = _spans(tokenizer, name, chat)
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    begins = np.asarray([begin for begin, _ in found["offset_mapping"]], dtype=np.int64)
    return Rendered(_ids(found["input_ids"]), within(spans, begins))


def within(spans: Sequence[tuple[int, int]], places: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which places lie in one of some spans, each from its first place to before its last."""
    inside = np.zeros(len(places), dtype=bool)
    for begin, end in spans:
        inside |= (places >= begin) & (places < end)
    return inside


def _spans(tokenizer: Any, name: str, chat: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
    """A chat's text, and where the answers lie in it. Raises UserError where the template does not let us see that."""
    text: str = _render(tokenizer, chat, tokenize=False)
    spans = []
    for number, message in enumerate(chat):
        if message.get("role") != ANSWERS:
            continue
        before = _render(tokenizer, chat[:number], tokenize=False, add_generation_prompt=True) if number else ""
        with_it = _render(tokenizer, chat[: number + 1], tokenize=False)
        if not (text.startswith(with_it) and with_it.startswith(before)):
            raise UserError(
                f"tokenizer {name}: its chat template renders the beginning of a chat otherwise than the whole, so "
                "answers cannot be told from prompts; put {% generation %} and {% endgeneration %} around the answers "
                "in its template, or give chats of one answer"
            )
        spans.append((len(before), len(with_it)))
    return text, spans


def _render(tokenizer: Any, chat: list[dict[str, Any]], **how: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(chat, **how)
    except Exception as error:  # templates raise what they like
        raise ChatError(str(error).partition("\n")[0] or type(error).__name__) from error


def _ids(ids: Sequence[int]) -> NDArray[np.integer]:
    return np.asarray(ids, dtype=np.uint32)
