"""What a run trains on and what it is judged by: text, chats, files that come one by one, or a mixture of these."""

from __future__ import annotations

import warnings
from collections import ChainMap, Counter
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from farflung.errors import UserError, first_of
from farflung.workloads import chat_store, chats, data, far, mixtures, shards, store
from farflung.workloads.base import Ids
from farflung.workloads.chats import Chats, Labelled, joined, labelled
from farflung.workloads.data import Data
from farflung.workloads.dealing import Deal, mixed
from farflung.workloads.mixtures import BLOCK
from farflung.workloads.prepared import is_prepared, store_of
from farflung.workloads.settings import LanguageSettings
from farflung.workloads.shard_cache import ShardCache
from farflung.workloads.shards import Shards
from farflung.workloads.text import files, has_text, is_small, no_text
from farflung.workloads.tokenizers import Tokenizer

IN_SOURCE = 56
"""The bits of a sequence's number that say which one of its source it is; those above say which source."""
LEAST_TOKENS = 1000
"""Of each source, where they are limited."""
TOKEN_BYTES = 4
"""At most, on disk."""


class Source(NamedTuple):
    """What a model is trained on or judged by, or one part of it."""

    share: int
    """Sequences of each BLOCK."""
    settings: LanguageSettings
    """The settings as if there were no other."""
    is_chats: bool
    """Whether only answers are learnt."""


class Mixture:
    """Sequences of several sources, of which a replica trains on so many of each as their shares are.

    Where some are chats, all have labels; of text, all tokens are learnt.

    Args:
        parts: each source's data by its name; files that come one by one have one cache.
        shares: how many of so many sequences, one after the other, are each one's.
        deal: how the sequences of a source are dealt to replicas.
        padding: the token that fills chats up to the length of text.
    """

    available = None
    """Some sources are gone through more often than others."""

    def __init__(self, parts: Mapping[str, Data | Shards | Chats], shares: list[int], deal: Deal, padding: int) -> None:
        self._names, self._parts, self._shares, self._deal = list(parts), list(parts.values()), shares, deal
        self._padding = padding
        self._from_far = [part for part in self._parts if isinstance(part, Shards)]

    @property
    def known(self) -> MutableMapping[str, Any]:
        """That of all parts; what is put back is for those that come file by file, which have one table."""
        return ChainMap(*(cast(dict[str, Any], part.known) for part in [*self._from_far, *self._parts]))

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

    def batch(self, ids: Ids) -> Tensor | Labelled:
        """Sequences (n, length) int64 by their numbers, where some source is chats with labels. Raises UserError."""
        sources, within = ids >> IN_SOURCE, ids & ((1 << IN_SOURCE) - 1)
        rows = [self._parts[of].batch(within[turn : turn + 1]) for turn, of in enumerate(sources.tolist())]
        return self._together(rows)

    def held_out(self, most: int) -> Tensor | Labelled:
        """Samples held out of all sources, one after the other, as `batch` gives them."""
        return self._together([*self.held_out_of(most).values()])

    def held_out_of(self, most: int) -> dict[str, Tensor | Labelled]:
        """Of each source by its name, samples held out: its share of `most`, and at least one."""
        counts = [max(1, round(most * share / sum(self._shares))) for share in self._shares]
        return {name: part.held_out(count) for name, part, count in zip(self._names, self._parts, counts, strict=True)}

    def learnt(self, length: int) -> int:
        """The tokens that are learnt of a sample, in the mean; of text, so many."""
        each = zip(self._parts, self._shares, strict=True)
        return round(sum(learnt(part, length) * share for part, share in each) / sum(self._shares))

    def _together(self, samples: list[Tensor | Labelled]) -> Tensor | Labelled:
        return together(samples, self._padding, any(isinstance(part, Chats) for part in self._parts))

    def let_go(self) -> None:
        """See Shards."""
        for part in self._from_far:
            part.let_go()


def learnt(trained_on: Data | Shards | Chats | Mixture, length: int) -> int:
    """The tokens that are learnt of a sample, in the mean, where a sequence of text has so many."""
    if isinstance(trained_on, Mixture):
        return trained_on.learnt(length)
    return trained_on.answer_tokens if isinstance(trained_on, Chats) else length


def together(samples: list[Tensor | Labelled], padding: int, with_labels: bool) -> Tensor | Labelled:
    """Samples one after the other; those with labels are filled up to the longest."""
    if with_labels:
        return joined([labelled(one) for one in samples], padding)
    return torch.cat(cast("list[Tensor]", samples))


def named(settings: LanguageSettings) -> list[Source]:
    """What the settings name to train on. Raises UserError."""
    sources, most = mixtures.sources(settings.data), settings.max_tokens
    if not sources:
        return [Source(BLOCK, settings, _is_chats(settings))]
    limits = [most and max(LEAST_TOKENS, most * source.share // BLOCK) for source in sources]
    parts = [replace(settings, data=one.data, max_tokens=limit) for one, limit in zip(sources, limits, strict=True)]
    return [Source(one.share, part, _is_chats(part)) for one, part in zip(sources, parts, strict=True)]


def judges(settings: LanguageSettings) -> list[Source]:
    """What the settings name to judge by; nothing where that is held out. Raises UserError.

    That is all of it, but on other machines only its beginning, as far as the samples take.
    """
    if not settings.validation:
        return []
    try:
        found = named(replace(settings, data=settings.validation, validation=None, max_tokens=None))
    except UserError as error:
        raise UserError(f"validation: {error}") from error
    most = settings.eval_sequences
    counts = [max(1, round(most * source.share / BLOCK)) for source in found]
    return [
        source._replace(settings=_beginning(replace(source.settings, eval_sequences=count)))
        for source, count in zip(found, counts, strict=True)
    ]


def _beginning(settings: LanguageSettings) -> LanguageSettings:
    """The same, but of data on other machines so many tokens as its samples have, if there is room for them."""
    if not far.is_far(settings.data):
        return settings
    wanted = (settings.eval_sequences + 1) * settings.sequence_length  # of a store's two parts, the ends are no samples
    room = int(settings.data_room * 1e9) // TOKEN_BYTES
    return replace(settings, max_tokens=max(LEAST_TOKENS, min(wanted, room)))


def load(sources: list[Source], tokenizer: Tokenizer, deal: Deal) -> Data | Shards | Chats | Mixture:
    """What is trained on, of sources that were `named`. Raises UserError."""
    if len(sources) == 1:
        return _load(sources[0], tokenizer, deal, None)
    kept = shards.cache_of(sources[0].settings, tokenizer)
    found = {source.settings.data: _load(source, tokenizer, deal, kept) for source in sources}
    return Mixture(found, [source.share for source in sources], deal, tokenizer.end)


def _load(source: Source, tokenizer: Tokenizer, deal: Deal, kept: ShardCache | None) -> Data | Shards | Chats:
    settings = source.settings
    if source.is_chats:
        return chats.load(settings, tokenizer, deal)
    if far.is_far(settings.data) and not settings.max_tokens:
        return shards.load(settings, deal, kept or shards.cache_of(settings, tokenizer))
    return data.load(settings, tokenizer, deal)


def _load_all(source: Source, tokenizer: Tokenizer) -> Tensor | Labelled:
    load = chats.load_all if source.is_chats else data.load_all
    return load(source.settings, tokenizer)


def held_out(
    trained_on: Data | Shards | Chats | Mixture, judges: list[Source], tokenizer: Tokenizer, most: int
) -> dict[str, Tensor | Labelled]:
    """What the model is judged by: samples of each source, by its name where there are several. Raises UserError.

    All have labels where some have.
    """
    found: dict[str, Tensor | Labelled]
    if judges:
        names = [source.settings.data for source in judges] if len(judges) > 1 else [""]
        found = {name: _load_all(source, tokenizer) for name, source in zip(names, judges, strict=True)}
    elif isinstance(trained_on, Mixture):
        found = trained_on.held_out_of(most)
    else:
        found = {"": trained_on.held_out(most)}
    if not any(isinstance(samples, tuple) for samples in found.values()):
        return found
    return {name: labelled(samples) for name, samples in found.items()}


def _is_chats(settings: LanguageSettings) -> bool:
    """Whether a source is chats, of which answers are learnt. Raises UserError."""
    if is_prepared(settings):
        return bool(store.read(Path(settings.data).expanduser()).manifest.template)
    return chat_store.holds_chats(settings)


def check(sources: list[Source], judges: list[Source], tokenizer: Tokenizer, deal: Deal) -> None:
    """Raises UserError for data that cannot be trained on or judged by, as far as that is soon known."""
    if deal.draws and len(sources) > 1:
        raise UserError("the sequences of a mixture are not drawn; leave out --order draws")
    for source in sources:
        _check(source, tokenizer, partial(data.load, deal=deal))
    kinds = {source.is_chats for source in sources}
    try:
        for source in judges:
            if source.is_chats not in kinds:
                told = "chats, and data text" if source.is_chats else "text, and data chats"
                raise UserError(f"{source.settings.data} holds {told}; give two of a kind")
            _check(source, tokenizer, data.load_all)
    except UserError as error:
        raise UserError(f"validation: {error}") from error
    _warn_of_both(sources, judges)
    if not judges:
        _warn_of_twice(sources)


def prepare(sources: list[Source], judges: list[Source], tokenizer: Tokenizer, deal: Deal) -> None:
    """Makes the stores of what is large and lies here, where there are none yet. Raises UserError."""
    for source, numbered in [*((one, deal.draws) for one in sources), *((one, False) for one in judges)]:
        settings, is_chats = source.settings, source.is_chats
        if not (far.is_far(settings.data) or is_prepared(settings) or is_small(settings.data)):
            store_of(settings, tokenizer, numbered=numbered and not is_chats, as_chats=is_chats)


def _warn_of_both(sources: list[Source], judges: list[Source]) -> None:
    """Warns of files that are trained on and judged by."""
    trained_on = {file for source in sources for file in _files(source.settings.data)}
    if both := [file for source in judges for file in _files(source.settings.data) if file in trained_on]:
        told = f"validation: trained on, too: {first_of(both)}; the loss says little of other text"
        warnings.warn(f"{told}; give other data to judge by, or leave out validation", stacklevel=2)


def _warn_of_twice(sources: list[Source]) -> None:
    """Warns of files of several sources, of which each holds out something by itself."""
    times = Counter(file for source in sources for file in {*_files(source.settings.data)})
    if twice := sorted(file for file, count in times.items() if count > 1):
        told = f"data: in several sources: {first_of(twice)}; what one of them holds out, another may train on"
        warnings.warn(f"{told}; give each file in one source, or data to judge by with validation", stacklevel=2)


def _files(data: str) -> list[str]:
    """What tells a source's files from others'; an address is not asked for those that it means."""
    return [data] if far.is_far(data) else [str(path.resolve()) for path in files(data)]


def _check(source: Source, tokenizer: Tokenizer, load_text: Callable[[LanguageSettings, Tokenizer], object]) -> None:
    settings = source.settings
    if source.is_chats:
        chats.check(settings, tokenizer)
    elif far.is_far(settings.data):
        far.files(settings.data)
    elif is_prepared(settings) or is_small(settings.data):
        load_text(settings, tokenizer)  # too little of it is told before anything is begun
    elif not has_text(settings.data, settings.text_column):
        raise no_text(settings.data)
