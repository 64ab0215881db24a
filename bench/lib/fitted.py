"""A model whose steps are fitted into memory, as benches measure it: on the CPU, with a far tier that can be slow."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import transformers.modeling_utils as transformers_models
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import LlamaConfig

from farflung import inner
from farflung.memory import modes
from farflung.memory.copies import Copies, Threads
from farflung.memory.far import HostMemory
from farflung.memory.plan import Plan, Profile
from farflung.memory.profile import Model, profiled
from farflung.workloads import decoder, models

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """A Llama's, and its batch's."""

    width: int = 128
    layers: int = 24
    sequences: int = 32
    length: int = 128


class SlowMemory(HostMemory):
    """Memory of this machine that takes and gives so many bytes a second, each way."""

    def __init__(self, bytes_s: float) -> None:
        super().__init__()
        self._bytes_s = bytes_s

    def write(self, slot: Tensor, near: Tensor) -> None:
        """See Far."""
        with taking(near.nbytes / self._bytes_s):
            super().write(slot, near)

    def read(self, slot: Tensor, near: Tensor) -> None:
        """See Far."""
        with taking(near.nbytes / self._bytes_s):
            super().read(slot, near)


class Trained:
    """A Llama of random weights, its optimizer and one batch."""

    def __init__(self, shape: Shape, precision: str = "float32") -> None:
        sizes = {"hidden_size": shape.width, "intermediate_size": 4 * shape.width, "num_hidden_layers": shape.layers}
        heads = max(1, shape.width // 64)
        config = LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=heads, vocab_size=256)
        self.model: Any = models.outline(config)
        models.materialise(self.model, seed=0)
        self.model.train()
        parts = decoder.anatomy(self.model)
        self.layers = list(parts[parts.layers])
        self._precision = precision
        self._tokens = torch.randint(
            0, 256, (shape.sequences, shape.length), generator=torch.Generator().manual_seed(0)
        )
        self._make = partial(inner.ADAMW.make, lr=1e-3, weight_decay=0.1)
        self._optimizer = self._make(list(self.model.named_parameters()))

    def loss(self) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self._precision == "bfloat16"):
            return models.sequence_loss(self.model, self._tokens)

    def step(self) -> None:
        self.loss().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def profile(self, copies: Copies) -> Profile:
        """What its step takes."""
        return profiled(Model(self.model, self.layers, self.loss, self._make, CPU), copies)

    @contextmanager
    def planned(self, plan: Plan, profile: Profile, copies: Copies) -> Iterator[None]:
        """A context in which steps follow a plan."""
        modes.apply(self.layers, plan.layers, profile.layers, modes.Calling(copies, plan.prefetch_bytes))
        try:
            yield
        finally:
            modes.undo(self.layers)

    @contextmanager
    def offloading(self, bytes_s: float) -> Iterator[None]:
        """A context in which steps recompute with inputs offloaded by transformers, at so many bytes a second."""
        ours, transformers_models.save_on_cpu = transformers_models.save_on_cpu, partial(_slow_save, bytes_s)
        self.model.activation_checkpointing_enable(offload=True)
        try:
            yield
        finally:
            self.model.activation_checkpointing_disable()
            self.model.disable_input_require_grads()
            transformers_models.save_on_cpu = ours

    def peak(self) -> int:
        """Of a step, in bytes, as torch's tracker counts it; after one that has made the optimizer's state."""
        self.step()
        tracker = MemTracker()
        tracker.track_external(self.model, self._optimizer)
        with tracker:
            self.step()
        return int(tracker.get_tracker_snapshot("peak")[CPU]["Total"])

    def seconds(self) -> float:
        """Of a step, after one that takes from the system the memory which steps of another plan did without."""
        self.step()
        began = time.perf_counter()
        self.step()
        return time.perf_counter() - began


def ratios(one: Callable[[], float], others: Sequence[Callable[[], float]], times: int) -> list[float]:
    """Seconds of others over those of one, taken in turns: the median of `times`."""
    found: list[list[float]] = [[] for _ in others]
    for _ in range(times):
        before = one()
        taken = [other() for other in others]
        beside = (before + one()) / 2
        for ratio, seconds in zip(found, taken, strict=True):
            ratio.append(seconds / beside)
    return [median(each) for each in found]


@contextmanager
def taking(seconds: float) -> Iterator[None]:
    """A context that takes at least so long."""
    began = time.perf_counter()
    yield
    threading.Event().wait(max(0.0, seconds - (time.perf_counter() - began)))


def slow_copies(bytes_s: float) -> Copies:
    """Copies to slow memory."""
    return Threads(SlowMemory(bytes_s), CPU)


def _slow_save(bytes_s: float, **_: Any) -> save_on_cpu:
    """As torch saves on the CPU, but not faster than a far tier: on the thread that computes, as it does on a GPU."""
    found = save_on_cpu()
    for name in ("pack_hook", "unpack_hook"):
        setattr(found, name, partial(_slowed, getattr(found, name), bytes_s))
    return found


def _slowed(hook: Callable[[Any], Any], bytes_s: float, packed: Any) -> Any:
    nbytes = sum(one.nbytes for one in (packed if isinstance(packed, tuple) else [packed]) if isinstance(one, Tensor))
    with taking(nbytes / bytes_s):
        return hook(packed)
