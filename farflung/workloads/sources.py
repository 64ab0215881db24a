"""What a run trains on and what it is judged by: text, chats, files that come one by one, or a mixture of texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farflung.errors import UserError
from farflung.workloads import chats, data, far, mixtures, shards, store
from farflung.workloads.base import Ids
from farflung.workloads.chats import Chats, Labelled
from farflung.workloads.data import Data
from farflung.workloads.dealing import Deal, mixed
from farflung.workloads.mixtures import BLOCK
from farflung.workloads.settings import LanguageSettings
from farflung.workloads.shard_cache import ShardCache
from farflung.workloads.shards import Shards
from farflung.workloads.text import documents, is_small, no_text
from farflung.workloads.tokenizers import Tokenizer

IN_SOURCE = 56
"""The bits of a sequence's number that say which one of its source it is; those above say which source."""
LEAST_TOKENS = 1000
"""Of each source, where they are limited."""


class Mixture:
    """Sequences of several sources, of which a replica trains on so many of each as their shares are.

    Args:
        parts: each source's data by its name; files that come one by one have one cache.
        shares: how many of so many sequences, one after the other, are each one's.
        deal: how the sequences of a source are dealt to replicas.
    """

    available = None
    """Some sources are gone through more often than others."""

    def __init__(self, parts: Mapping[str, Data | Shards], shares: list[int], deal: Deal) -> None:
        self._names, self._parts, self._shares, self._deal = list(parts), list(parts.values()), shares, deal
        self._from_far = [part for part in self._parts if isinstance(part, Shards)]

    @property
    def known(self) -> dict[str, Any]:
        """See Shards."""
        return self._from_far[0].known if self._from_far else {}

    def at(self, seed: int, replica: int, places: Ids) -> Ids:
        """The numbers of the sequences at some places of the row that a replica trains on. Raises UserError."""
        sources, turns = mixed(seed, replica, places, self._shares)
        found = np.empty_like(places)
        for number, part in enumerate(self._parts):
            own = turns[sources == number]
            if isinstance(part, Shards):
                within = part.at(seed, replica, own)
            else:
                within = self._deal.at(seed, replica, own, part.available)
            found[sources == number] = number << IN_SOURCE | within
        return found

    def epochs(self, sequences: float) -> dict[str, float]:
        """How often the sequences of each source come, by its name, in so many; not of files that come one by one."""
        each = zip(self._names, self._parts, self._shares, strict=True)
        total = sum(self._shares)
        return {name: sequences * share / total / part.available for name, part, share in each if part.available}

    def batch(self, ids: Ids) -> Tensor:
        """Sequences (n, length) int64 by their numbers. Raises UserError."""
        sources, within = ids >> IN_SOURCE, ids & ((1 << IN_SOURCE) - 1)
        rows = [self._parts[of].batch(within[turn : turn + 1]) for turn, of in enumerate(sources.tolist())]
        return torch.cat(rows)

    def held_out(self, most: int) -> Tensor:
        """Sequences (n, length) int64 held out of all sources, one after the other."""
        return torch.cat([*self.held_out_of(most).values()])

    def held_out_of(self, most: int) -> dict[str, Tensor]:
        """Of each source by its name, sequences (n, length) int64 held out: its share of `most`, and at least one."""
        counts = [max(1, round(most * share / sum(self._shares))) for share in self._shares]
        return {name: part.held_out(count) for name, part, count in zip(self._names, self._parts, counts, strict=True)}

    def let_go(self) -> None:
        """See Shards."""
        for part in self._from_far:
            part.let_go()


def is_prepared(settings: LanguageSettings) -> bool:
    """Whether the data is what `farflung prepare` has made."""
    return store.is_store(Path(settings.data).expanduser())


def holds_chats(settings: LanguageSettings) -> bool:
    """Whether the data is chats, of which answers are learnt. Raises UserError."""
    return not (mixtures.sources(settings.data) or is_prepared(settings)) and chats.holds_chats(settings)


def load(
    settings: LanguageSettings, tokenizer: Tokenizer, deal: Deal, as_chats: bool
) -> Data | Shards | Chats | Mixture:
    """What the settings name to train on, which `holds_chats` or not. Raises UserError."""
    if as_chats:
        return chats.load(settings, tokenizer, deal)
    if not (parts := _parts(settings)):
        return _of_one(settings, tokenizer, deal)
    kept = shards.cache_of(settings, tokenizer)
    found = {name: _of_one(part, tokenizer, deal, kept) for name, (_, part) in parts.items()}
    return Mixture(found, [share for share, _ in parts.values()], deal)


def _of_one(
    settings: LanguageSettings, tokenizer: Tokenizer, deal: Deal, kept: ShardCache | None = None
) -> Data | Shards:
    if far.is_far(settings.data) and not settings.max_tokens:
        return shards.load(settings, deal, kept or shards.cache_of(settings, tokenizer))
    return data.load(settings, tokenizer, deal)


def _parts(settings: LanguageSettings) -> dict[str, tuple[int, LanguageSettings]]:
    """Of each source of a mixture by its name: its share, and the settings as if there were no other."""
    sources, most = mixtures.sources(settings.data), settings.max_tokens
    limits = [most and max(LEAST_TOKENS, most * source.share // BLOCK) for source in sources]
    return {
        source.data: (source.share, replace(settings, data=source.data, max_tokens=limit))
        for source, limit in zip(sources, limits, strict=True)
    }


def judged_by(
    settings: LanguageSettings, tokenizer: Tokenizer, trained_on: Data | Shards | Chats | Mixture
) -> dict[str, Tensor | Labelled]:
    """What the model is judged by: samples of each source, by its name where there are several. Raises UserError."""
    if not settings.validation:
        most = settings.eval_sequences
        return {**trained_on.held_out_of(most)} if isinstance(trained_on, Mixture) else {"": trained_on.held_out(most)}
    own = _to_judge_by(settings, settings.validation)
    if isinstance(trained_on, Chats):
        return {"": chats.load_all(own, tokenizer)}
    if not (parts := _parts(own)):
        return {"": data.load_all(own, tokenizer)}
    return {
        name: data.load_all(replace(part, eval_sequences=max(1, round(own.eval_sequences * share / BLOCK))), tokenizer)
        for name, (share, part) in parts.items()
    }


def _to_judge_by(settings: LanguageSettings, data: str) -> LanguageSettings:
    """The settings as if that data were what is trained on, all of it."""
    return replace(settings, data=data, validation=None, max_tokens=None)


def check(settings: LanguageSettings, tokenizer: Tokenizer, deal: Deal, as_chats: bool) -> None:
    """Raises UserError for data that cannot be trained on, as far as that is soon known. See `holds_chats`."""
    if deal.draws and mixtures.sources(settings.data):
        raise UserError("the sequences of a mixture are not drawn; leave out --order draws")
    _check(settings, tokenizer, partial(data.load, deal=deal), as_chats)
    if not settings.validation:
        return
    own = _to_judge_by(settings, settings.validation)
    try:
        if (other := holds_chats(own)) != as_chats:
            kinds = "chats, and data text" if other else "text, and data chats"
            raise UserError(f"{own.data} holds {kinds}; give two of a kind")
        _check(own, tokenizer, data.load_all, other)
    except UserError as error:
        raise UserError(f"validation: {error}") from error


def _check(
    settings: LanguageSettings,
    tokenizer: Tokenizer,
    load_text: Callable[[LanguageSettings, Tokenizer], object],
    as_chats: bool,
) -> None:
    if as_chats:
        chats.check(settings, tokenizer)
        return
    parts = _parts(settings)
    for _, part in parts.values() or [(0, settings)]:
        if parts and holds_chats(part):
            raise UserError(f"data {part.data}: holds chats, which cannot be mixed yet; write them into one file")
        if far.is_far(part.data):
            far.files(part.data)
        elif is_prepared(part) or is_small(part.data):
            load_text(part, tokenizer)  # too little of it is told before anything is begun
        elif not any(documents(part.data, part.text_column)):
            raise no_text(part.data)
