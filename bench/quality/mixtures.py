"""Do routers find the hidden sources of a text, and is a mixture of experts then better than one dense model?
Each source is a Markov chain of 64 letters, whose entropy no model can go below. All have equal total tokens and models
of one size: a dense model, the mixture, experts told the source, and experts of a random split. Takes about half an
hour on two cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.lib.experts import Division, Trained
from bench.lib.runs import Runs, around
from bench.lib.sources import CHAINS, sources
from bench.lib.store import Settings, Store
from bench.lib.table import Part, Table
from bench.lib.training import save_llama
from farflung.files import typed
from farflung.mixtures.corpus import Corpus
from farflung.mixtures.routers import RouterRound
from farflung.mixtures.settings import SplitSettings
from farflung.mixtures.split import split
from farflung.networks import SimulatedNetwork
from farflung.workloads import store as stores
from farflung.workloads.tokenizers import Bytes

WAYS = ("dense", "mixture", "told the source", "random split")


@dataclass(frozen=True)
class Options:
    sources: tuple[int, ...] = (4,)
    """How many sources, and experts, there are."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of the chains, the routers and the runs."""
    steps: int = 800
    """Of the dense model; the experts have as many together."""
    batch_size: int = 16
    length: int = 64
    """Tokens in a sequence."""
    prefix: int = 32
    """Tokens that routers read."""
    rounds: int = 6
    """Of the routers."""
    router_sequences: int = 2048
    """That each router gets in each."""
    width: int = 64
    """Of all models, which have one layer; routers have half of it."""
    lr: float = 5e-3
    """Of all models, and of routers."""

    @property
    def tokens(self) -> int:
        """That the dense model is trained on."""
        return self.steps * self.batch_size * self.length


SMOKE = Options((2,), (0,), steps=8, batch_size=4, length=32, prefix=16, rounds=2, router_sequences=64, width=16)


def run(options: Options, store: Store) -> Iterator[Part]:
    common: Settings = {
        "model": _model(store, options.width),
        "tokenizer": "bytes",
        "inner": "adamw",
        "lr": options.lr,
        "batch_size": options.batch_size,
        "sequence_length": options.length,
        "replicas": 1,
        "method": "local",
        "warmup": options.steps // 40,
        "eval_sequences": 1 << 20,
        "eval_every": options.steps,
        "log_every": options.steps,
    }
    with Runs(store, common) as runs:
        for count in options.sources:
            pure, losses, floors = [], [], []
            for seed in options.seeds:
                folder = store.scratch / f"{count} sources, {options.tokens} tokens, seed {seed}"
                floors.append(_write_sources(folder, count, options, seed))
                settings = _settings(folder, options, seed, _model(store, options.width // 2))
                pure.append(store.once(_named(options, count), seed, partial(_split, settings)))
                losses.append(_losses(runs, settings, common, options.steps))
            yield _purities(count, pure)
            lines = [(way, around(one[way] for one in losses)) for way in WAYS]
            title = (
                f"{count} sources: nats a token after {options.tokens:,} tokens; no model can go below {around(floors)}"
            )
            yield Table(dict.fromkeys(("", "loss"), ""), lines, title)


def _write_sources(folder: Path, count: int, options: Options, seed: int) -> float:
    """Writes a text of each source, a quarter more than is trained on; the mean entropy, in nats a token."""
    folder.mkdir(parents=True, exist_ok=True)
    found = sources(count, CHAINS * (options.tokens * 5 // 4 // count // CHAINS + options.length), seed)
    for number, source in enumerate(found):
        (folder / f"{number}.txt").write_bytes(source.text.tobytes())
    return float(np.mean([source.entropy for source in found]))


def _named(options: Options, count: int) -> Settings:
    names = ("prefix", "rounds", "router_sequences", "length", "tokens", "width", "lr")
    return {"routers of": count, **{name: getattr(options, name) for name in names}}


def _model(store: Store, width: int) -> str:
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "vocab_size": 256, "max_position_embeddings": 256}
    return save_llama(typed(store.scratch / f"model-{width}"), num_hidden_layers=1, num_attention_heads=2, **sizes)


def _settings(folder: Path, options: Options, seed: int, router: str) -> SplitSettings:
    texts = sorted(map(str, folder.glob("*.txt")))
    return SplitSettings(
        data=tuple(texts),
        out=folder / f"mix-{options.rounds}-{options.router_sequences}",
        experts=len(texts),
        sequence_length=options.length,
        prefix=options.prefix,
        rounds=options.rounds,
        router_sequences=options.router_sequences,
        router=router,
        lr=options.lr,
        seed=seed,
    )


def _split(settings: SplitSettings) -> dict[str, Any]:
    rounds: list[RouterRound] = []
    split(settings, SimulatedNetwork.alone(), rounds.append)
    return {"purity": [one.purity for one in rounds]}


def _losses(runs: Runs, settings: SplitSettings, common: Settings, steps: int) -> dict[str, float]:
    """Each way's loss on all sequences held out."""
    folder, seed = settings.out.parent, settings.seed
    corpus = Corpus(settings, Bytes())
    told, judged = corpus.sources(np.arange(len(corpus))), corpus.held_out()[1]
    chance = np.random.default_rng(seed)
    by_chance = [chance.permutation(len(each)) % settings.experts for each in (told, judged)]
    mixed = [settings.out / f"expert-{number}" for number in range(settings.experts)]
    of_mixture = [len(stores.read(where).held_out) // settings.sequence_length for where in mixed]
    ways = {
        "dense": Division.write(folder / "dense", corpus, np.zeros_like(told), np.zeros_like(judged)),
        "mixture": Division(mixed, of_mixture),
        "told the source": Division.write(folder / "told", corpus, told, judged),
        "random split": Division.write(folder / "random", corpus, *by_chance),
    }
    trained = {way: Trained(runs, one, common, steps, seed) for way, one in ways.items()}
    return {way: one.loss() for way, one in trained.items()}


def _purities(count: int, found: list[dict[str, Any]]) -> Part:
    by_round = zip(*(one["purity"] for one in found), strict=True)
    lines = [(str(number), around(each)) for number, each in enumerate(by_round, start=1)]
    return Table(
        dict.fromkeys(("round", "purity"), ""), lines, f"{count} sources, purity of what the routers are dealt"
    )
