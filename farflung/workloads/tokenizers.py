"""Text to tokens and back."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farflung.errors import UserError
from farflung.workloads import templates
from farflung.workloads.templates import Message

BYTES_TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""Chats as `Bytes.chat` renders them, for the tokenizer that is exported."""


class Bytes:
    """UTF-8 bytes as tokens; byte 0 ends a document."""

    size = 256
    end = 0
    marks_ends = True

    digest = template = "bytes"

    def encode(self, text: str) -> NDArray[np.integer]:
        """The flat tokens of a text, one a byte."""
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def encode_all(self, texts: Sequence[str]) -> Iterator[NDArray[np.integer]]:
        """The flat tokens of each text."""
        return map(self.encode, texts)

    def decode(self, tokens: list[int]) -> str:
        """The text of some tokens; what is no byte or no UTF-8 becomes replacement characters."""
        return bytes(token if token < self.size else 0xFF for token in tokens).decode(errors="replace")

    def count_bytes(self, tokens: list[int]) -> int:
        """Bytes of text that some tokens stand for."""
        return len(tokens)

    def chat(self, messages: Sequence[Message]) -> templates.Rendered:
        """A line `ROLE: CONTENT` of each message; an answer ends with byte 0 in place of the line's end.

        Raises ChatError for a message with that byte in it.
        """
        if any("\0" in f"{message['role']}{message.get('content')}" for message in messages):
            raise templates.ChatError("a message holds the character of code 0, which ends an answer")
        text, spans = "", []
        for message in messages:
            text += f"{message['role']}: "
            begin = len(text.encode())
            answers = message["role"] == templates.ANSWERS
            text += f"{message.get('content', '')}" + ("\0" if answers else "\n")
            spans += [(begin, len(text.encode()))] if answers else []
        tokens = self.encode(text)
        return templates.Rendered(tokens, templates.within(spans, np.arange(len(tokens))))

    def save(self, folder: str) -> None:
        """Writes what AutoTokenizer loads beside an exported model, with these very tokens."""
        from transformers import PreTrainedTokenizerFast

        ended_by = chr(self.end)
        PreTrainedTokenizerFast(
            tokenizer_object=_byte_level(self.end),
            bos_token=ended_by,
            eos_token=ended_by,
            chat_template=BYTES_TEMPLATE,
            clean_up_tokenization_spaces=False,
        ).save_pretrained(folder)


class Pretrained:
    """Anything that transformers' AutoTokenizer loads."""

    def __init__(self, name: str) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(name)
        except Exception as error:  # the many kinds that loading raises
            why = reason(name, error)
            raise UserError(f"tokenizer {name!r}: {why}; give bytes, a folder, or a name on the hub") from error
        self._name = name
        self.size: int = len(self._tokenizer)
        end = self._tokenizer.eos_token_id
        self.end: int = 0 if end is None else end
        self.marks_ends = end is not None
        """Whether the token that ends a text is in no text; another tokenizer's first token ends it, and may be."""

    def encode(self, text: str) -> NDArray[np.integer]:
        """The flat tokens of a text, without special ones."""
        return np.concatenate([*self.encode_all([text])])

    @cached_property
    def digest(self) -> str:
        """A hash of all that its tokens depend on."""
        kind, fast = type(self._tokenizer).__name__, getattr(self._tokenizer, "backend_tokenizer", None)
        rules: dict[str, Any] = json.loads(fast.to_str()) if fast else self._tokenizer.get_vocab()
        for how_to_batch in ("truncation", "padding"):  # which change with each call, and no text's tokens
            rules.pop(how_to_batch, None)
        return hashlib.sha256(json.dumps([kind, self.end, rules], sort_keys=True).encode()).hexdigest()

    @cached_property
    def template(self) -> str:
        """A hash of all that its chats' text depends on."""
        by = [self._tokenizer.chat_template, self._tokenizer.special_tokens_map]
        return hashlib.sha256(json.dumps(by, sort_keys=True, default=str).encode()).hexdigest()

    def encode_all(self, texts: Sequence[str]) -> Iterator[NDArray[np.integer]]:
        """The flat tokens of each text, without special ones; fast tokenizers use all cores.

        A text of more than LONGEST characters is cut at line ends, since its tokens take a hundred times its memory.
        """
        pieces = [[*_cut(text)] for text in texts]
        ids = iter(
            self._tokenizer(
                [*chain.from_iterable(pieces)],
                add_special_tokens=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )["input_ids"]
        )
        for of_text in pieces:
            yield np.concatenate([np.asarray(next(ids), dtype=np.uint32) for _ in of_text])

    def decode(self, tokens: list[int]) -> str:
        """The text of some tokens, without special ones."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def count_bytes(self, tokens: list[int]) -> int:
        """Bytes of text that some tokens stand for."""
        return len(self.decode(tokens).encode())

    def alike(self, other: Tokenizer) -> bool:
        """Whether each number means the same piece of text to another tokenizer."""
        theirs = _byte_level(Bytes.end) if isinstance(other, Bytes) else other._tokenizer
        return bool(self._tokenizer.get_vocab() == theirs.get_vocab())

    def chat(self, messages: Sequence[Message]) -> templates.Rendered:
        """A chat as the tokenizer's own template renders it. Raises UserError, and ChatError for a chat it refuses."""
        return templates.rendered(self._tokenizer, self._name, messages)

    def save(self, folder: str) -> None:
        """Writes what AutoTokenizer loads beside an exported model."""
        self._tokenizer.save_pretrained(folder)


Tokenizer = Bytes | Pretrained

LONGEST = 1 << 20
"""Characters of text that are made tokens of in one piece."""

FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""A folder with none of these has no tokenizer, of which AutoTokenizer would make an empty one."""


def _cut(text: str) -> Iterator[str]:
    """Pieces of some LONGEST characters; each ends with a line that another one follows that begins with a letter."""
    begin = 0
    for line_end in re.finditer(r"\n(?=\S)", text):
        if line_end.end() - begin >= LONGEST:
            yield text[begin : line_end.end()]
            begin = line_end.end()
    yield text[begin:]


def _byte_level(end: int) -> Any:
    """A tokenizer of the tokenizers library: a byte's token is its number; the character of `end` stands for itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # The library writes bytes that cannot be printed as the characters from 256 on, in order.
    printed = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    vocabulary = {chr(byte if byte in printed else next(others)): byte for byte in range(Bytes.size)}
    vocabulary = {token: byte for token, byte in vocabulary.items() if byte != end} | {chr(end): end}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def load(name: str) -> Tokenizer:
    """The tokenizer that `--tokenizer` names. Raises UserError."""
    return Bytes() if name == "bytes" else Pretrained(name)


def comes_with(model: str) -> bool:
    """Whether a model, a folder or a name on the hub, may have a tokenizer of its own."""
    folder = Path(model).expanduser()
    return not folder.is_dir() or any((folder / name).exists() for name in FILES)


def reason(name: str, error: Exception) -> str:
    """Why something that is a folder or a name on the hub could not be loaded, in one line."""
    if name[:1] in "/.~" and not Path(name).expanduser().exists():
        return "no such folder"
    return str(error).partition("\n")[0].rstrip(".")
