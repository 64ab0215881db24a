"""Does the cost model give DiLoCoX's published throughputs, from model size, link, H and one set of constants?
Two islands joined by 1 Gbit/s; the baseline is arXiv 2506.21263's figures, quoted second-hand. What was computed on
how many GPUs is not known: the constants stand for it, chosen once for both models and all rows. Takes seconds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from transformers import OPTConfig, PretrainedConfig, Qwen2Config

from bench.lib.store import Store
from bench.lib.table import Cell, Part, Table
from farflung import Method, methods
from farflung.codecs import Codec, Dense, ErrorFeedback, LowRank, Quantize
from farflung.networks.simulator.conditions import Link
from farflung.outer import Schedule
from farflung.planner.architecture import Architecture, architecture_of
from farflung.planner.cost import blocked_seconds, exchange
from farflung.planner.layout import Layout
from farflung.planner.machines import Cluster, Machines

TOKENS = 16_384
"""Tokens of one inner step, both islands together."""
TFLOPS = 14.35
"""What a GPU reaches, bubbles of the pipeline and all: 4.6 % of an A800's 312."""
FIXED = 0.136
"""Seconds that a step takes however small the model."""
COCKTAIL_RATIO, COCKTAIL_SECONDS = 700, 0.3
"""CocktailSGD, each step: how many times fewer bytes than 16 bits a parameter, and what making them takes."""
EVERY, GBIT = 125, 1.0

FLOAT16, INT4 = Dense(torch.float16), ErrorFeedback(Quantize(bits=4))


def overlapped(codec: Codec) -> Method:
    return methods.dilocox(every=EVERY, codec=codec, adapt=False)


@dataclass(frozen=True)
class Row:
    """A published figure, and the method that it is of."""

    name: str
    published: float
    method: Callable[[], Method]
    fewer_bytes: float = 1.0
    extra_seconds: float = 0.0


def all_reduce() -> Method:
    return methods.ddp(codec=FLOAT16)


COCKTAIL = {"fewer_bytes": COCKTAIL_RATIO, "extra_seconds": COCKTAIL_SECONDS}

MODELS: dict[str, tuple[PretrainedConfig, int, list[Row]]] = {
    "OPT-1.3B": (
        OPTConfig(hidden_size=2048, num_hidden_layers=24, ffn_dim=8192, num_attention_heads=32),
        16,
        [
            Row("DiLoCoX", 23_880, lambda: overlapped(INT4)),
            Row("all-reduce", 745, all_reduce),
            Row("CocktailSGD", 16_161, all_reduce, **COCKTAIL),
        ],
    ),
    "107B": (
        Qwen2Config(
            hidden_size=8192,
            num_hidden_layers=77,
            intermediate_size=49_152,
            num_attention_heads=64,
            num_key_value_heads=8,
            vocab_size=152_064,
            tie_word_embeddings=False,
        ),
        160,
        [
            Row("DiLoCoX", 3_728, lambda: overlapped(INT4)),
            Row("all-reduce", 10.4, all_reduce),
            Row("CocktailSGD", 2_427, all_reduce, **COCKTAIL),
            Row("without overlap", 2_197, lambda: replace(overlapped(INT4), schedule=Schedule(EVERY))),
            Row("without compression", 1_168, lambda: overlapped(FLOAT16)),
        ],
    ),
}


RANK_2048 = ErrorFeedback(LowRank(rank=2048) | Quantize(bits=4))
RANKED = Row("", 0, lambda: replace(overlapped(RANK_2048), schedule=Schedule(EVERY)))


def tokens_per_second(model: Architecture, gpus: int, row: Row) -> float:
    """The planner's: steps of compute, and what of an exchange over the link they do not hide."""
    islands = Machines(count=1, memory_gb=1e6, tflops=1, site="east", network_gbps=1000)
    link = Link(("east", "west"), 1.0, 1000 * GBIT, shared=True)
    cluster = Cluster((islands, replace(islands, site="west")), (link,))
    method = row.method()
    found = exchange(model, method, cluster, Layout(2, 1, 1, ((0,), (1,))))
    found = replace(found, wire_seconds=found.wire_seconds / row.fewer_bytes)
    step = FIXED + 6 * model.parameters * TOKENS / (gpus * TFLOPS * 1e12) + row.extra_seconds
    steps = method.schedule.every or 1
    return steps * TOKENS / (steps * step + blocked_seconds(method, found, step))


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = tuple(MODELS)
    """Which to predict."""


SMOKE = Options(models=("OPT-1.3B",))


def run(options: Options, store: Store) -> Iterator[Part]:
    for name in options.models:
        config, gpus, rows = MODELS[name]
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            model = architecture_of(folder)
        best = tokens_per_second(model, gpus, rows[0])
        lines: list[tuple[Cell, ...]] = []
        for row in rows:
            planned = tokens_per_second(model, gpus, row)
            published, ours = row.published / rows[0].published, planned / best
            apart = 100 * (planned / row.published - 1), 100 * (ours / published - 1)
            lines.append((row.name, row.published, planned, apart[0], published, ours, apart[1]))
        columns = {"": "", "published, tokens/s": ",.1f", "planned, tokens/s": ",.1f", "apart, %": "+.1f"}
        columns |= {"published / DiLoCoX": ".5f", "planned / DiLoCoX": ".5f", "apart of ratios, %": "+.1f"}
        size = f"{model.parameters / 1e9:.2f}B parameters, {gpus} GPUs"
        yield Table(columns, lines, f"{name}: {size}, {GBIT:g} Gbit/s, H = {EVERY}")
        if name == "107B":
            planned = tokens_per_second(model, gpus, RANKED)
            yield f"without overlap, were packets of rank 2048 in 4 bits as farflung makes them: {planned:,.1f}"
