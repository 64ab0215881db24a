"""From how many tokens on is a mixture of experts better than one dense model of their size, on real text?
The text is what Python, torch and plotly bring along: Python, C++, JavaScript and English. The model is so small that
its capacity soon limits it. All have equal work in training and in use. Takes about ten minutes on two cores.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from bench.lib.experts import Division, Trained
from bench.lib.runs import Runs, around
from bench.lib.store import Settings, Store
from bench.lib.table import Part, Table
from bench.lib.training import save_llama
from farflung.files import typed
from farflung.mixtures.corpus import Corpus
from farflung.mixtures.routers import RouterRound
from farflung.mixtures.settings import SplitSettings
from farflung.mixtures.split import split
from farflung.networks import SimulatedNetwork
from farflung.workloads.tokenizers import Bytes

WAYS = ("dense", "mixture", "told the kind", "random split")
FITTED = 3
"""Points that tell where lines will cross."""


@dataclass(frozen=True)
class Options:
    seeds: tuple[int, ...] = (0,)
    """Of the routers and the runs."""
    steps: int = 3200
    """Of the dense model; the experts have as many together."""
    points: int = 8
    """Lengths of run that are compared; the learning rate falls in the last fifth alone."""
    batch_size: int = 16
    length: int = 64
    """Tokens in a sequence."""
    prefix: int = 32
    """Tokens that routers read."""
    rounds: int = 6
    """Of the routers."""
    router_sequences: int = 1024
    """That each router gets in each."""
    width: int = 32
    """Of all models, which have one layer."""
    kind_tokens: int = 800_000
    """Of each kind of text, at most."""
    lr: float = 5e-3
    """Of all models, and of routers."""


SMALL = {"steps": 16, "points": 2, "batch_size": 4, "length": 32, "prefix": 16, "width": 16, "kind_tokens": 20_000}
SMOKE = Options((0,), rounds=4, router_sequences=64, **SMALL)


def kinds() -> dict[str, str]:
    """The kinds of text that there are here."""
    torch, plotly = (Path(next(iter(spec.submodule_search_locations or ()))) for spec in _found("torch", "plotly"))
    return {
        "Python": "stdlib",
        "C++": f"{torch}/include/torch/csrc/**/*.h",
        "JavaScript": f"{plotly}/package_data/plotly.min.js",
        "English": f"{sysconfig.get_paths()['stdlib']}/pydoc_data/topics.py",
    }


def _found(*names: str) -> list[Any]:
    return [find_spec(name) for name in names]


def run(options: Options, store: Store) -> Iterator[Part]:
    steps = options.steps
    sizes = {"hidden_size": options.width, "intermediate_size": 3 * options.width, "vocab_size": 256}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 256}
    common: Settings = {
        "model": save_llama(typed(store.scratch / f"model-{options.width}"), **sizes, **heads),
        "tokenizer": "bytes",
        "lr": options.lr,
        "lr_schedule": "stable",
        "warmup": steps // 80,
        "inner": "adamw",
        "batch_size": options.batch_size,
        "sequence_length": options.length,
        "replicas": 1,
        "method": "local",
        "eval_sequences": 1 << 20,
        "eval_every": steps // options.points,
        "log_every": steps,
    }
    losses: list[dict[str, dict[int, float]]] = []
    with Runs(store, common) as runs:
        for seed in options.seeds:
            folder = store.scratch / f"{options.kind_tokens} tokens, {options.rounds} rounds, seed {seed}"
            ways = _ways(folder, options, store, seed, common["model"])
            trained = {way: Trained(runs, one, common, steps, seed) for way, one in ways.items()}
            losses.append({way: one.losses() for way, one in trained.items()})
    told = [dealt for seed in options.seeds for dealt in store.results(_named(options))[seed]["dealt"][:1]]
    yield f"what the first expert of each seed was dealt, of {', '.join(kinds())}: {told}"
    lines = [
        (f"{step * options.batch_size * options.length:,}", *(around(one[way][step] for one in losses) for way in WAYS))
        for step in sorted(losses[0]["dense"])
    ]
    yield Table(dict.fromkeys(("tokens", *WAYS), ""), lines, "nats a token of the text held out")
    for seed, one in zip(options.seeds, losses, strict=True):
        gaps = [(step, one["mixture"][step] - one["dense"][step]) for step in sorted(one["dense"])]
        yield f"seed {seed}: {crossing(gaps, options.batch_size * options.length)}"


def crossing(gaps: Sequence[tuple[int, float]], tokens_per_step: int) -> str:
    """Where the mixture's loss falls below the dense model's: in the runs, or by a line over the log of their size."""
    below = [step for step, gap in gaps if gap < 0]
    if below and gaps[-1][1] < 0:
        return f"the mixture is better from {below[0] * tokens_per_step:,} tokens on"
    steps, last = zip(*gaps[-FITTED:], strict=True)
    slope, at_one = np.polyfit(np.log(steps), last, 1)
    if slope >= 0:
        return f"the dense model is better by {last[-1]:.4f} at the end, and what it is ahead by does not shrink"
    tokens = math.exp(min(-at_one / slope, 60)) * tokens_per_step
    return f"the dense model is better by {last[-1]:.4f} at the end; by a line the two cross at {tokens:.2g} tokens"


def _named(options: Options) -> dict[str, Any]:
    return {key: value for key, value in asdict(options).items() if key != "seeds"}


def _ways(folder: Path, options: Options, store: Store, seed: int, model: str) -> dict[str, Division]:
    settings = SplitSettings(
        data=tuple(kinds().values()),
        out=folder / "mix",
        experts=len(kinds()),
        max_tokens=options.kind_tokens,
        sequence_length=options.length,
        prefix=options.prefix,
        rounds=options.rounds,
        router_sequences=options.router_sequences,
        router=model,
        lr=options.lr,
        seed=seed,
    )
    result = store.once(_named(options), seed, partial(_split, settings))
    corpus = Corpus(settings, Bytes())
    of_kind, judged = corpus.sources(np.arange(len(corpus))), corpus.held_out()[1]
    chance = np.random.default_rng(seed)
    by_chance = [chance.permutation(len(each)) % settings.experts for each in (of_kind, judged)]
    return {
        "dense": Division.write(folder / "dense", corpus, np.zeros_like(of_kind), np.zeros_like(judged)),
        "mixture": Division([settings.out / f"expert-{one}" for one in range(settings.experts)], result["held_out"]),
        "told the kind": Division.write(folder / "told", corpus, of_kind, judged),
        "random split": Division.write(folder / "random", corpus, *by_chance),
    }


def _split(settings: SplitSettings) -> dict[str, Any]:
    rounds: list[RouterRound] = []
    made = split(settings, SimulatedNetwork.alone(), rounds.append)
    return {"purity": [one.purity for one in rounds], "dealt": made.dealt, "held_out": made.held_out}
