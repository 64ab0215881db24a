"""A plan's peak is what torch's own tracker of memory sees."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from test_memory_modes import CPU, layers_of, model_of
from torch.distributed._tools.mem_tracker import MemTracker

from farflung import inner
from farflung.memory import modes
from farflung.memory.copies import Threads
from farflung.memory.far import HostMemory
from farflung.memory.plan import LayerPlan, Plan, Profile
from farflung.memory.profile import Model, profiled
from farflung.memory.search import leanest, search
from farflung.memory.step import simulate
from farflung.workloads import models

CONFIG = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 6}
TOKENS = torch.randint(2, 256, (8, 64), generator=torch.Generator().manual_seed(0))


class Small:
    """A model of six layers, its optimizer, and what its step takes."""

    def __init__(
        self, precision: str, passes: int, optimizer: inner.Inner = inner.ADAMW, tokens: torch.Tensor = TOKENS
    ) -> None:
        self.precision, self.passes, self.tokens = precision, passes, tokens
        self.model = model_of("llama", **CONFIG)
        self.layers = list(layers_of(self.model))
        self.make = partial(optimizer.make, lr=1e-3, weight_decay=0.1)
        self.optimizer = self.make(list(self.model.named_parameters()))
        self.copies = Threads(HostMemory(), CPU)
        model = Model(self.model, self.layers, self.loss, self.make, CPU)
        self.profile: Profile = profiled(model, self.copies, passes)

    def loss(self) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bfloat16"):
            return models.sequence_loss(self.model, self.tokens, self.tokens, None)

    def step(self, tracker: MemTracker | None = None) -> None:
        for number in range(self.passes):
            self.loss().backward()
            if tracker and number + 1 < self.passes:
                tracker.reset_mod_stats()  # which it wants between passes; the peak of all stays
        self.optimizer.step()
        self.optimizer.zero_grad()

    def peak(self, plan: Plan) -> int:
        """Of a step with a plan, in bytes, after one that has made the optimizer's state."""
        modes.apply(self.layers, plan.layers, self.profile.layers, modes.Calling(self.copies, plan.prefetch_bytes))
        self.step()
        tracker = MemTracker()
        tracker.track_external(self.model, self.optimizer)
        with tracker:
            self.step(tracker)
        modes.undo(self.layers)
        return int(tracker.get_tracker_snapshot("peak")[CPU]["Total"])


@pytest.mark.parametrize(("precision", "passes"), [("float32", 1), ("float32", 2), ("bfloat16", 1)])
def test_a_step_takes_what_its_plan_predicts(precision: str, passes: int) -> None:
    small = Small(precision, passes)
    kept = simulate(small.profile, [LayerPlan()] * 6, prefetch_bytes=0, clip=True).peak_bytes
    found = {}
    least = leanest(small.profile, clip=True, states=("near",)).peak_bytes
    for share in (1.0, 0.3, 0.0) if passes > 1 else (1.0, 0.6, 0.3, 0.0):
        cap = least + int(share * (kept - least))
        plan = search(small.profile, cap, clip=True, states=("near",))
        measured = small.peak(plan)
        found[share] = (measured / cap, measured / plan.peak_bytes, "".join(layer.mode[0] for layer in plan.layers))
    assert all(of_cap <= 1 and abs(of_plan - 1) < 0.1 for of_cap, of_plan, _ in found.values()), found


def test_what_an_optimizers_step_holds_is_in_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few tokens, nearly all that is held meanwhile is Muon's, which works on a part of a layer at a time."""
    monkeypatch.setattr(inner, "TOGETHER", 1 << 17)
    small = Small("float32", 1, inner.MUON, TOKENS[:1, :8])
    plan = search(small.profile, 1 << 30, clip=True, states=("near",))
    assert small.profile.layers[0].step_bytes > 1 << 20
    assert abs(small.peak(plan) / plan.peak_bytes - 1) < 0.1
