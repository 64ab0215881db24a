"""DiLoCoX's published throughputs, from the planner's costs: model size, link, H, and one set of constants.

    python bench/dilocox_throughput.py

Two islands joined by 1 Gbit/s (arXiv 2506.21263; figures quoted second-hand). What was computed on how many GPUs is
not known: the constants below stand for it. They were chosen once, for both models and all rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from transformers import OPTConfig, PretrainedConfig, Qwen2Config

from farflung import Method, methods
from farflung.codecs import Dense, ErrorFeedback, LowRank, Quantize
from farflung.networks.simulator import Link
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


def overlapped(codec: object) -> Method:
    return methods.dilocox(every=EVERY, codec=codec, adapt=False)  # type: ignore[arg-type]


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


def main() -> None:
    for name, (config, gpus, rows) in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            model = architecture_of(folder)
        print(f"{name}: {model.parameters / 1e9:.2f}B parameters, {gpus} GPUs, {GBIT:g} Gbit/s, H = {EVERY}")
        print(
            f"  {'':22} {'published':>10} {'planned':>9} {'apart':>7}   {'published':>10} {'planned':>9} {'apart':>7}"
            f"\n  {'':22} {'tokens/s':>10} {'tokens/s':>9} {'%':>7}   {'/ DiLoCoX':>10} {'/ DiLoCoX':>9} {'%':>7}"
        )
        best = tokens_per_second(model, gpus, rows[0])
        for row in rows:
            planned = tokens_per_second(model, gpus, row)
            ratios = row.published / rows[0].published, planned / best
            print(
                f"  {row.name:22} {row.published:10,.1f} {planned:9,.1f} {100 * (planned / row.published - 1):+7.1f}   "
                f"{ratios[0]:10.5f} {ratios[1]:9.5f} {100 * (ratios[1] / ratios[0] - 1):+7.1f}"
            )
        if name == "107B":
            planned = tokens_per_second(model, gpus, RANKED)
            print(f"  without overlap, were packets of rank 2048 in 4 bits as farflung makes them: {planned:,.1f}")


if __name__ == "__main__":
    main()
