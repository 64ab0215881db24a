"""How long does a checkpoint hold training up?
A replica's whole state (weights, AdamW's two moments, a round's anchor and velocity) is written while steps go on; what
a step waits for is to be the copy of that state, and nothing of the disk. Beside it: copying the same tensors, writing
within the step, and how much steps slow down while the thread writes, on cores that it shares with them. Takes two
minutes.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from bench.lib.store import Store
from bench.lib.table import Part, Table
from farflung import methods
from farflung.hooks.trained import trainable
from farflung.inner import ADAMW
from farflung.networks import SimulatedNetwork
from farflung.training.saving import Saving


@dataclass(frozen=True)
class Options:
    parameters: int = 100_000_000
    """Float32 parameters, in 100 tensors."""
    repeats: int = 5
    """Checkpoints of each kind."""


SMOKE = Options(parameters=100_000, repeats=2)


def run(options: Options, store: Store) -> Iterator[Part]:
    model: Any = nn.ParameterList([nn.Parameter(torch.randn(options.parameters // 100)) for _ in range(100)])
    optimizer = ADAMW.make(trainable(model).items())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with methods.noloco(every=1).attach(model, optimizer, SimulatedNetwork.alone()) as outer:
        optimizer.step()

        def state() -> Any:
            return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "outer": outer.state_dict()}

        gigabytes = sum(tensor.nbytes for tensor in tensors_of(state())) / 1e9
        with tempfile.TemporaryDirectory(dir=store.scratch) as folder:
            rows = list(measured(state, Path(folder), options.repeats))
    columns = {"": "", "seconds": ".3f", "of the copy": ".2f"}
    about = f"{options.parameters:,} parameters, {gigabytes:.2f} GB of state, {torch.get_num_threads()} threads"
    copying = rows[0][1]
    yield Table(columns, [(what, seconds, seconds / copying) for what, seconds in rows], about)
    yield slowed(state, store.scratch)


def measured(state: Any, folder: Path, repeats: int) -> Iterator[tuple[str, float]]:
    """What is timed, and its median seconds; the copy and the delay take turns."""
    copies, delays, whole, within = list[float](), list[float](), list[float](), list[float]()
    background, waiting = (Saving(folder, "replica-0", lambda: None, thread) for thread in (True, False))
    for turn in range(repeats):
        began = time.perf_counter()
        held = [tensor.clone() for tensor in tensors_of(state())]
        copies.append(time.perf_counter() - began)
        del held
        began = time.perf_counter()
        background.begin(turn, state(), None)
        delays.append(time.perf_counter() - began)
        saved = background.ended(wait=True)
        assert saved and not saved.fault, saved
        whole.append(saved.seconds)
        began = time.perf_counter()
        waiting.begin(turn, state(), None)
        within.append(time.perf_counter() - began)
        assert waiting.ended(wait=True)
    background.close()
    yield "the copy alone", median(copies)
    yield "a step is delayed by", median(delays)
    yield "until the checkpoint is whole", median(whole)
    yield "written within the step, a step is delayed by", median(within)


def slowed(state: Any, scratch: Path) -> str:
    """How much slower steps are while a checkpoint is written."""
    factor = torch.randn(512, 512)

    def step() -> float:
        began = time.perf_counter()
        for _ in range(20):
            factor @ factor
        return time.perf_counter() - began

    alone = median(step() for _ in range(50))
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        saving = Saving(Path(folder), "replica-0", lambda: None, True)
        saving.begin(1, state(), None)
        meanwhile = [step()]
        while saving.ended(wait=False) is None:
            meanwhile.append(step())
        saving.close()
    longest = max(meanwhile)
    return (
        f"steps of {1e3 * alone:.1f} ms take {1e3 * median(meanwhile):.1f} ms while it is written "
        f"({len(meanwhile)} of them), the longest {1e3 * longest:.1f} ms"
    )


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors in a state, each memory once."""
    tensors = [one for one in tree_leaves(value) if isinstance(one, torch.Tensor)]
    return list({tensor.data_ptr(): tensor for tensor in tensors}.values())
