"""What does a step of Muon cost beside one of AdamW, and of torch's own Muon?
Steps of farflung's optimizers on the parameters of each model, without its forward and backward passes; torch's Muon
takes the layers' matrices, and AdamW the rest, as in farflung's. Takes three minutes, mostly torch's Muon.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from bench.lib.store import Store
from bench.lib.table import Cell, Part, Table
from farflung.inner import ADAMW, MuonAdamW
from farflung.workloads import Language
from farflung.workloads.settings import LanguageSettings

LONGEST = 10_000
"""Milliseconds after which no further step is measured."""


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = ("micro", "tiny", "small", "llama-125m")
    """Whose parameters are stepped."""
    repeats: int = 5
    """Steps measured of each; the median counts."""
    most_with_torch: int = 20_000_000
    """The most parameters of a model that torch's own Muon steps, which takes minutes with more."""


SMOKE = Options(models=("micro",), repeats=1)

Optimizers = list[torch.optim.Optimizer]


def milliseconds(optimizers: Optimizers, repeats: int) -> float:
    """The median time of their step, once they have their state; of one step, where that takes long."""
    taken: list[float] = []
    while len(taken) <= repeats and sum(taken) < LONGEST:
        began = time.perf_counter()
        for optimizer in optimizers:
            optimizer.step()
        taken.append(1e3 * (time.perf_counter() - began))
    return median(taken[1:] or taken)


def torchs(named: dict[str, nn.Parameter]) -> Optimizers:
    """torch's Muon and AdamW, of what farflung's `MuonAdamW` has in either."""
    ours = MuonAdamW(named.items())
    matrices, rest = (group["params"] for group in ours.param_groups)
    return [torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw"), ADAMW.make(rest)]


def run(options: Options, store: Store) -> Iterator[Part]:
    def row(model: str) -> tuple[Cell, ...]:
        named = dict(Language(LanguageSettings(model=model)).build(0).named_parameters())
        for parameter in named.values():
            parameter.grad = torch.randn_like(parameter)
        values = sum(parameter.numel() for parameter in named.values())
        adamw = milliseconds([ADAMW.make(named.values())], options.repeats)
        muon = milliseconds([MuonAdamW(named.items())], options.repeats)
        theirs = milliseconds(torchs(named), options.repeats) if values <= options.most_with_torch else None
        return model, values, adamw, muon, muon / adamw, theirs, theirs and theirs / muon

    columns = {"model": "", "parameters": ",d", "AdamW ms": ".2f", "Muon ms": ".2f", "to AdamW": ".1f"}
    yield Table(
        columns | {"torch's Muon ms": ".1f", "to Muon": ".1f"},
        map(row, options.models),
        f"{torch.get_num_threads()} threads, median of {options.repeats} steps",
    )
