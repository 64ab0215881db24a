"""A text, split among experts: each gets a store of tokens that `farflung train --data` takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import save_model
from torch import Tensor

from farflung.errors import UserError
from farflung.files import refuse_taken
from farflung.mixtures.corpus import BLOCK, Corpus
from farflung.mixtures.folder import Mixture, written_beside
from farflung.mixtures.routers import RouterRound, Routers, learn
from farflung.mixtures.seats import balanced_assignment, table_of
from farflung.mixtures.settings import SplitSettings
from farflung.networks import Network
from farflung.workloads import models, store, tokenizers
from farflung.workloads.base import Ids
from farflung.workloads.tokenizers import Tokenizer

LEAST_CHOSEN = 0.1
"""Of an even share: a router that fewer sequences would choose has learnt nothing of its own."""


WEIGHTS = "model.safetensors"
"""Where transformers looks for a model's weights."""


def split(settings: SplitSettings, network: Network, told: Callable[[RouterRound], object]) -> Mixture:
    """Trains routers, deals the text, and writes the mixture's folder; on each machine of the network, the same one.

    Raises UserError: the folder is taken; there is too little text; an expert would get none; the routers have
    collapsed; another machine is lost.
    """
    refuse_taken(settings.out, "give another folder with --out")
    tokenizer = tokenizers.load(settings.tokenizer)
    corpus = Corpus(settings, tokenizer)
    if len(corpus) < settings.experts:
        raise UserError(
            f"the text has {len(corpus)} sequences for {settings.experts} experts, so one would have no data; "
            "give more text, or fewer --experts"
        )
    routers = Routers(settings, tokenizer, network)
    routers.refuse_other_data(corpus)
    learn(routers, corpus, settings, rounds := _Told(told))
    blocks = _blocks(np.arange(len(corpus)))
    scores = _all_scores(routers, (corpus.take(ids)[:, : settings.prefix] for ids in blocks), "all")
    refuse_collapsed(scores)
    experts = balanced_assignment(scores)
    held_out, _ = corpus.held_out()
    judges = _all_scores(routers, held_out[:, : settings.prefix].split(BLOCK), "held-out").argmax(axis=1)
    judged = np.bincount(judges, minlength=settings.experts)
    if not judged.all():
        raise UserError(
            f"expert {judged.argmin()} would have no data to be judged by: none of the {len(judges)} sequences held "
            "out goes to it; give more text, or fewer --experts"
        )
    mixture = Mixture(
        folder=settings.out,
        experts=settings.experts,
        dealt=table_of(experts, corpus.sources(np.arange(len(corpus)))).tolist(),
        held_out=judged.tolist(),
        prefix=settings.prefix,
        sequence_length=settings.sequence_length,
        tokenizer=settings.tokenizer,
        digest=tokenizer.digest,
        data=[*settings.data],
        rounds=[asdict(one) for one in rounds.rounds],
    )
    with written_beside(settings.out) as folder, models.without_remarks():
        there = replace(mixture, folder=folder)
        for number, router in routers.all().items():
            # transformers' own way to save does so on one of several processes alone.
            router.config.save_pretrained(there.router(number))
            save_model(router, str(there.router(number) / WEIGHTS), {"format": "pt"})
        for number in range(settings.experts):
            rows = held_out.numpy()[judges == number]
            _write_store(there.store(number), corpus, np.flatnonzero(experts == number), rows, tokenizer)
        np.save(there.who_got_what, experts.astype(np.int32))
        there.write()
    return mixture


class _Told:
    """Tells of each round, and keeps it."""

    def __init__(self, told: Callable[[RouterRound], object]) -> None:
        self._told = told
        self.rounds: list[RouterRound] = []

    def __call__(self, one: RouterRound) -> None:
        self.rounds.append(one)
        self._told(one)


def refuse_collapsed(scores: NDArray[np.floating]) -> None:
    """Raises UserError where a router would be chosen by hardly any of the sequences that (n, E) scores are of."""
    chosen = np.bincount(scores.argmax(axis=1), minlength=scores.shape[1])
    even = len(scores) / scores.shape[1]
    if chosen.min() < LEAST_CHOSEN * even:
        raise UserError(
            f"the routers have collapsed: {chosen.min()} of {len(scores)} sequences would choose expert "
            f"{chosen.argmin()}, where {even:.0f} are an even share; give more --rounds or --router-sequences, "
            "another --seed, or fewer --experts"
        )


def _blocks(ids: Ids) -> Iterator[Ids]:
    yield from (ids[begin : begin + BLOCK] for begin in range(0, len(ids), BLOCK))


def _all_scores(routers: Routers, blocks: Iterable[Tensor], name: str) -> NDArray[np.float16]:
    return np.concatenate([routers.scores(block, f"{name}-{number}") for number, block in enumerate(blocks)])


def _write_store(folder: Path, corpus: Corpus, ids: Ids, held_out: NDArray[np.int64], tokenizer: Tokenizer) -> None:
    blocks = (corpus.take(block).numpy() for block in _blocks(ids))
    store.write_sequences(folder, blocks, held_out, tokenizer)
