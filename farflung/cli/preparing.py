"""farflung prepare: text or chats to tokens, before a run needs them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from farflung.cli.arguments import parse
from farflung.errors import UserError, counted, disk_errors

if TYPE_CHECKING:
    from farflung.workloads.store import Store


@dataclass(frozen=True)
class PrepareOptions:
    """Which text or chats to make tokens of, and where to."""

    data: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")]
    """stdlib, hf:NAME (hub), or a path or glob of text, JSON Lines, CSV or Parquet, as for train --data."""
    out: Path
    """The folder to write, which is then given to train --data; an interrupted one is gone on with."""
    tokenizer: str = "bytes"
    """bytes, or anything that AutoTokenizer loads: the one that the model will be trained with."""
    text_column: str = "text"
    """The column of JSON Lines, CSV, Parquet and hub data that holds the text."""
    max_tokens: int | None = None
    """Make at most this many tokens; unset: all."""


def prepare(arguments: list[str]) -> None:
    """Make a store of tokens from text or chats, for train --data; a run makes its own where it is given these."""
    options = parse(PrepareOptions, arguments, "prepare", prepare.__doc__)

    from farflung.workloads import chat_store, mixtures, prepared, store, text, tokenizers
    from farflung.workloads.progress import bar
    from farflung.workloads.settings import LanguageSettings

    prepared.refuse_whole(options.out)
    if mixtures.sources(options.data):
        raise UserError("prepare each source by itself, and mix the stores: train --data '0.7*STORE + 0.3*OTHER'")
    settings = LanguageSettings(data=options.data, text_column=options.text_column, max_tokens=options.max_tokens)
    size = text.text_bytes(options.data)  # a misspelt path is told before the hub is asked for a tokenizer
    as_chats = chat_store.holds_chats(settings)
    with (
        disk_errors(f"write to {options.out}", "make room, and give the same command again"),
        bar(size) as told,
    ):
        there = {path.name for path in options.out.iterdir()} if options.out.exists() else set()
        if there - {*(store.CHATS if as_chats else store.TEXT), store.PROGRESS, prepared.LOCK}:
            raise UserError(f"{options.out} holds something else; give another folder with --out")
        tokenizer = tokenizers.load(options.tokenizer)
        made = prepared.prepare(options.out, settings, tokenizer, told, as_chats)
    print(f"farflung: {options.out} holds {_told(made)}; train on it with: farflung train --data {options.out}")


def _told(made: Store) -> str:
    """What is in a store."""
    from farflung.workloads import store

    manifest = made.manifest
    tokens = manifest.training + manifest.held_out
    if manifest.template:
        answers = int(made.mapped(store.INDEX)["learnt"].sum())
        return f"{tokens:,} tokens of {counted(manifest.documents, 'chat')}, {answers:,} of them in answers"
    return f"{tokens:,} tokens of {counted(manifest.documents, 'document')}, {manifest.held_out:,} of them held out"
