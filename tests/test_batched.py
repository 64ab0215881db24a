"""Simulated replicas that compute their gradients together: the same as one after the other, or a refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import COMMON, ROUTED
from processes import trained_here
from transformers import LlamaConfig

from farflung.errors import UserError
from farflung.events import StepEvent
from farflung.networks import Conditions, SimulatedNetwork, Simulation
from farflung.networks.simulator.conditions import Death
from farflung.pipeline.assemble import assemble
from farflung.report.read import read_run
from farflung.settings import Settings

SMALL: dict[str, Any] = {
    "network": "simulated",
    "replicas": 3,
    "model": "micro",
    "batch_size": 4,
    "sequence_length": 16,
    "eval_sequences": 4,
    "max_tokens": 60_000,
    "steps": 12,
    "log_every": 1,
    "warmup": 2,
    "checkpoint_every": 6,
    "device": "cpu",
}


def trained(folder: Path, resume: bool = False, **more: Any) -> dict[int, list[float]]:
    """The losses of each replica's steps."""
    trained_here(folder, resume, **SMALL | more)
    run = read_run(folder)
    return {replica: [event.loss for event in run.of(replica, StepEvent)] for replica in run.replicas}


DYING = """
step_ms = 100
[[deaths]]
replica = 1
at_s = 0.75
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"method": "noloco", "every": 4, "microbatches": 2},
        {"method": "diloco", "every": 5, "delay": 2, "inner": "adamw"},
        {"method": "ddp", "inner": "sign", "clip": 0.1},
        {"method": "diloco", "every": 4, "conditions": "dying"},
        {"method": "local", "model": "mixtral"},
    ],
    ids=["noloco", "delay", "ddp", "dying", "routers"],
)
def test_together_they_train_as_one_after_the_other(more: dict[str, Any], tmp_path: Path) -> None:
    """Also where one dies, and where a run goes on in the other way."""
    if "conditions" in more:
        (tmp_path / "dying.toml").write_text(DYING)
        more = {**more, "conditions": str(tmp_path / "dying.toml")}
    if "model" in more:
        ROUTED[more["model"]].save_pretrained(tmp_path / "model")
        more = {**more, "model": str(tmp_path / "model")}
    alone = trained(tmp_path / "alone", **more)
    together = trained(tmp_path / "together", **more, batched_replicas=True)
    assert alone.keys() == together.keys() and len(alone[0]) == 12
    for replica, losses in alone.items():
        assert together[replica] == pytest.approx(losses, abs=1e-5)
    for path in (tmp_path / "together").glob("checkpoints/step-000012/*"):
        path.unlink()
    (tmp_path / "together" / "summary.json").unlink()
    again = trained(tmp_path / "together", resume=True, **more)
    assert again[2] == pytest.approx(alone[2], abs=1e-5)


def gradients(network: SimulatedNetwork, config: Settings, spoilt: int) -> tuple[float, str, list[torch.Tensor]]:
    """A replica's loss, fault and gradients in its third step; the weights of one become NaN before."""
    workload = config.made_workload()
    island, _ = assemble(config.island, workload, network, config.mesh(), 0, config.network, torch.device("cpu"))
    weights = list(island.model.parameters())
    island.gradients(0)
    island.model.zero_grad()
    with torch.no_grad():
        weights[0].data = weights[0] * (1 + network.rank)  # who replaces a weight's memory is seen, too
        if network.rank == spoilt:
            weights[1].fill_(float("nan"))
    if network.rank == 2:  # comes later than the others, who go on without it
        network.advance()
    loss, fault = island.gradients(2)
    return loss, fault, [weight.grad for weight in weights if weight.grad is not None]


def test_one_without_a_finite_loss_leaves_the_others_as_they_are() -> None:
    config = Settings.of(**SMALL)
    seen = {
        together: Simulation(3, Conditions()).run(
            lambda network, together=together: gradients(  # type: ignore[misc]
                network, config.changed(batched_replicas=together), spoilt=1
            )
        )
        for together in (False, True)
    }
    for replica, (alone, together) in enumerate(zip(seen[False], seen[True], strict=True)):
        assert alone[1] == together[1] == ("loss is nan" if replica == 1 else "")
        if replica != 1:
            assert together[0] == pytest.approx(alone[0], abs=1e-6) and len(together[2]) == len(alone[2]) > 0
            for one, other in zip(alone[2], together[2], strict=True):
                torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_all_meet_at_each_moment_to_which_their_steps_bring_them() -> None:
    def work(network: SimulatedNetwork) -> list[Any]:
        met = []
        for _ in range(3):
            with torch.no_grad():  # in which steps are taken; what is worked on together is not
                network.advance()
            met.append(network.meet(network.rank, lambda ranks: [sorted(ranks) * torch.is_grad_enabled()] * len(ranks)))
        return met

    assert Simulation(3, Conditions(step_ms=100)).run(work) == [[[0, 1, 2]] * 3] * 3


def test_who_is_there_at_a_moment_meets_and_gets_its_part_or_the_error() -> None:
    def work(network: SimulatedNetwork) -> list[Any]:
        met = [network.meet(network.rank, lambda ranks: [sorted(ranks)] * len(ranks))]
        if network.rank == 0:
            network.advance()
        met.append(network.meet(network.rank, lambda ranks: [10 * rank for rank in ranks]))
        met.append(network.now())
        try:
            network.meet(network.rank, lambda ranks: [1 // 0 for _ in ranks])
        except ZeroDivisionError:
            met.append("error")
        return met

    met = Simulation(3, Conditions(step_ms=100, deaths=(Death(1, 0.05),))).run(work)
    assert met == [[[0, 1, 2], 0, 0.1, "error"], [[0, 1, 2], 10, 0.0, "error"], [[0, 1, 2], 20, 0.0, "error"]]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"network": "torch"}, "batched_replicas is for replicas in one process; add --network simulated"),
        ({"conditions": "home"}, "batched_replicas needs replicas of one speed, and speed_sigma is"),
        ({"model": "minimax, with a buffer"}, "batched_replicas: the model has buffers, such as .*bias; leave out"),
        ({"model": "dropout"}, "batched_replicas: torch.vmap cannot compute this model: .*; leave out"),
        ({"data": "chats"}, "batched_replicas needs batches of one shape, and chats are of unlike lengths"),
        ({"compile": True}, "batched_replicas computes layers as they are; leave out compile, or batched_replicas"),
        ({"precision": "bfloat16"}, "batched_replicas computes in float32, and precision is bfloat16; choose one"),
    ],
)
def test_what_cannot_be_batched_is_refused_in_a_line(more: dict[str, Any], words: str, tmp_path: Path) -> None:
    if (model := more.get("model")) is not None:
        config = LlamaConfig(**COMMON, attention_dropout=0.1) if model == "dropout" else ROUTED[model]
        config.save_pretrained(tmp_path / "model")
        more = {"model": str(tmp_path / "model")}
    if "data" in more:
        lines = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        (tmp_path / "chats.jsonl").write_text("\n".join([json.dumps({"messages": lines})] * 9))
        more = {"data": str(tmp_path / "chats.jsonl")}
    with pytest.raises(UserError, match=words) as refused:
        trained(tmp_path / "run", **{"method": "local", **more}, batched_replicas=True)
    assert "\n" not in str(refused.value)
