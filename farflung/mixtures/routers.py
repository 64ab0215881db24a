"""Routers of text: small language models that deal sequences among themselves by how likely each finds their begin.

Each learns from the sequences that it has, then new ones are dealt, and so on: expectation and maximisation (arXiv
2410.03529). Of all that they learn, machines tell each other the scores alone, 2 bytes for each sequence and router.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farflung.errors import UserError, counted
from farflung.mixtures import packets
from farflung.mixtures.corpus import BLOCK, Corpus
from farflung.mixtures.modeling import log_likelihoods
from farflung.mixtures.seats import balanced_assignment, purity
from farflung.mixtures.settings import SplitSettings
from farflung.networks import Network, PeerLostError
from farflung.networks.base import Packets, name_of
from farflung.networks.peers.frames import plain
from farflung.workloads import models, tokenizers
from farflung.workloads.base import Ids
from farflung.workloads.dealing import in_epochs, permuted
from farflung.workloads.settings import LanguageSettings
from farflung.workloads.tokenizers import Tokenizer

AT_ONCE = 1 << 22
"""Logits that scoring computes at once."""


@dataclass(frozen=True)
class RouterRound:
    """How the routers have dealt one round's sequences."""

    number: int
    """From 1."""
    loss: float
    """Nats a token of their begins, each under the router that it was given to."""
    chosen: tuple[float, ...]
    """The share of the sequences that each router would have had without a limit of seats."""
    purity: float | None
    """The share of sequences that are of the source that most of their router's are of; None for one source."""


class Routers:
    """The routers of a mixture, dealt to the machines of a network in turn: each trains its own, and all hear scores.

    Raises UserError for more machines than routers, and for a model that cannot be.
    """

    def __init__(self, settings: SplitSettings, tokenizer: Tokenizer, network: Network) -> None:
        self._settings, self._network, self._tokenizer = settings, network, tokenizer
        self._members = network.members()
        if len(self._members) > settings.experts:
            raise UserError(
                f"{len(self._members)} machines for {counted(settings.experts, 'router')}; start at most one for each"
            )
        self._own = {one: self._model(one) for one in self._numbers(network.rank)}
        self._optimizers = {
            one: torch.optim.AdamW(model.parameters(), lr=settings.lr) for one, model in self._own.items()
        }
        self._attachment = network.attachment()

    @property
    def own(self) -> dict[int, Any]:
        """The models of this machine's routers."""
        return self._own

    def refuse_other_data(self, corpus: Corpus) -> None:
        """Raises UserError where another machine has read other sequences, or splits them otherwise."""
        if len(self._members) == 1:
            return
        shared = f"{sorted(self._settings.shared.items())} {self._tokenizer.digest} {corpus.digest()}"
        tokens = (len(corpus) + len(corpus.held_out()[0])) * self._settings.sequence_length
        own = packets.Reading(len(corpus), tokens, hashlib.sha256(shared.encode()).hexdigest())
        for member, packet in self._exchanged(own.packet(), "read").items():
            with self._read(member):
                theirs = packets.reading_in(packet)
            if theirs != own:
                told = f"has read {theirs.sequences:,} sequences of {theirs.tokens:,} tokens, and this machine "
                told += f"{own.sequences:,} of {own.tokens:,}"
                if (theirs.sequences, theirs.tokens) == (own.sequences, own.tokens):
                    told = "has read as much as this machine, but other text, or has other settings"
                raise UserError(
                    f"{name_of(self._network, member)} {told}; give all machines the same text and settings"
                )

    def train(self, number: int, prefixes: Tensor) -> None:
        """Trains one of this machine's routers on begins (n, prefix), once, in their order."""
        model, optimizer = self._own[number].train(), self._optimizers[number]
        rows = torch.cat([prefixes.new_full((len(prefixes), 1), self._tokenizer.end), prefixes], dim=1)
        for batch in rows.split(self._settings.batch_size):
            optimizer.zero_grad()
            models.sequence_loss(model, batch).backward()
            optimizer.step()

    def scores(self, prefixes: Tensor, name: str) -> NDArray[np.float16]:
        """(n, E): each router's log-likelihood of each begin (n, prefix), in nats a token; the same on all machines.

        Raises UserError where another machine is lost, and where a router's weights are no numbers any more.
        """
        own = [mean_scores(model, prefixes, self._tokenizer.end) for model in self._own.values()]
        found = np.empty((len(prefixes), self._settings.experts), dtype=packets.SCORE)
        for member, packet in self._exchanged(packets.scores_packet(own), name).items():
            numbers = self._numbers(member)
            with self._read(member):
                found[:, numbers] = packets.scores_in(packet, len(numbers), len(prefixes)).T
            for number in numbers:
                if not np.isfinite(found[:, number]).all():
                    raise UserError(
                        f"router {number}, of {name_of(self._network, member)}, has diverged with --lr "
                        f"{self._settings.lr:g}; give a smaller one"
                    )
        return found

    def all(self) -> dict[int, Any]:
        """All routers by number, on each machine; it has then sent the weights of its own once. Raises UserError."""
        found: dict[int, Any] = {}
        for member, packet in self._exchanged(packets.weights_packet(self._own), "weights").items():
            theirs = {one: self._model(one) for one in self._numbers(member)}
            with self._read(member):
                packets.load_weights(theirs, packet)
            found |= theirs
        return dict(sorted(found.items()))

    def _numbers(self, member: int) -> range:
        """The routers of a machine."""
        return range(self._members.index(member), self._settings.experts, len(self._members))

    def _model(self, number: int) -> Any:
        settings = self._settings
        return models.build(model_settings(settings), self._tokenizer, settings.seed * settings.experts + number)

    @contextmanager
    def _read(self, member: int) -> Iterator[None]:
        """Says whose packet is none. Raises UserError."""
        try:
            yield
        except ValueError as error:
            raise UserError(
                f"{name_of(self._network, member)} breaks off the split: {plain(str(error))}; see that it has the same "
                "farflung, and start again on all machines"
            ) from error

    def _exchanged(self, packet: Tensor, name: str) -> Packets:
        """What all machines tell under a name, by their ranks. Raises UserError."""
        try:
            key = f"routers-{self._attachment}-{name}"
            return self._network.exchange(packet, self._members, key).wait(self._settings.deadline)
        except PeerLostError as error:
            raise UserError(f"the split has lost a machine ({error}); start it again on all of them") from error


def model_settings(settings: SplitSettings) -> LanguageSettings:
    """What a router is, in the words of language models."""
    seen = settings.prefix + 1  # with the token that stands before a text
    return LanguageSettings(model=settings.router, tokenizer=settings.tokenizer, sequence_length=seen)


def largest_packet(settings: SplitSettings, machines: int) -> int:
    """Bytes of the largest packet that so many machines send each other. Raises UserError."""
    tokenizer = tokenizers.load(settings.tokenizer)
    router = models.outline(models.model_config(model_settings(settings), tokenizer))
    routers = -(-settings.experts // machines)
    return packets.largest_packet(router, routers, max(BLOCK, settings.round_sequences))


@torch.no_grad()
def mean_scores(model: Any, prefixes: Tensor, start: int) -> NDArray[np.float32]:
    """(n,): a router's log-likelihood of begins (n, prefix), in nats a token."""
    model.eval()
    rows = max(1, AT_ONCE // (prefixes.shape[1] * model.config.vocab_size))
    known = torch.ones_like(prefixes, dtype=torch.bool)
    each = zip(prefixes.split(rows), known.split(rows), strict=True)
    found = torch.cat([log_likelihoods(model, *batch, start) for batch in each])
    return (found / prefixes.shape[1]).numpy()


def learn(routers: Routers, corpus: Corpus, settings: SplitSettings, told: Callable[[RouterRound], object]) -> None:
    """Trains routers round by round, first on sequences that were dealt by chance. Raises UserError."""
    count = settings.round_sequences
    dealt = permuted(np.arange(count), count, (settings.seed, 1)) % settings.experts
    for number in range(settings.rounds):
        prefixes = corpus.take(_round_ids(settings, corpus, number))[:, : settings.prefix]
        for one in routers.own:
            routers.train(one, prefixes[torch.from_numpy(dealt == one)])
        ids = _round_ids(settings, corpus, number + 1)
        scores = routers.scores(corpus.take(ids)[:, : settings.prefix], f"round-{number}")
        dealt = balanced_assignment(scores)
        told(_round(number + 1, scores, dealt, corpus.sources(ids)))


def _round_ids(settings: SplitSettings, corpus: Corpus, number: int) -> Ids:
    places = number * settings.round_sequences + np.arange(settings.round_sequences)
    return in_epochs(places, len(corpus), (settings.seed, 0))


def _round(number: int, scores: NDArray[np.float16], dealt: Ids, sources: Ids) -> RouterRound:
    loss = -float(np.take_along_axis(scores, dealt[:, None], axis=1).mean(dtype=np.float64))
    chosen = np.bincount(scores.argmax(axis=1), minlength=scores.shape[1]) / len(scores)
    pure = purity(dealt, sources) if sources.any() else None
    return RouterRound(number, loss, tuple(chosen.round(4).tolist()), pure)
