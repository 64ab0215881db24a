"""One line in others' trainers: the same weights and bytes as in a plain loop, and going on after a crash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from patience import patience
from problem import flat
from processes import run_replicas, run_together
from torch.utils.data import DataLoader, TensorDataset
from warm import Python

from farflung import integrations, methods
from farflung.networks import SimulatedNetwork
from farflung.testing.hosts import torch_rendezvous

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
KILLED = Path(__file__).parent / "torch_killed.py"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_replicas(2, "all", "-", tmp_path_factory.mktemp("trainers"), script="torch_trainers.py")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["noloco", "diloco"])
@pytest.mark.parametrize("trainer", ["huggingface", "lightning", "accelerate"])
def test_a_trainer_ends_with_the_weights_of_a_plain_loop_with_the_same_rounds(
    seen: list[Any], method: str, trainer: str
) -> None:
    for replica in seen:
        weights, sent = replica[f"{method} {trainer}"]
        wanted, wanted_sent = replica[f"{method} plain {trainer == 'accelerate'}"]
        assert torch.equal(weights, wanted)
        assert len(sent) == len(wanted_sent) == 3
        assert sent[2] - sent[1] == sent[1] - sent[0] == wanted_sent[1] - wanted_sent[0]
    if method == "noloco":
        assert sent[1] - sent[0] == 4 * len(weights)  # a round's message, and so nothing in the steps between


@pytest.mark.slow
def test_of_a_model_with_adapters_only_these_travel(seen: list[Any]) -> None:
    one, other = (replica["lora"] for replica in seen)
    assert one["sent"][1] - one["sent"][0] == 4 * one["values"] > 0
    assert torch.equal(one["weights"], other["weights"])


CASES = {
    "trainer_lora": (["--steps", "30"], 17, "final/adapter_model.safetensors"),
    "trainer_lightning": (["--steps", "120"], 50, "final.pt"),
    "loop_accelerate": (["--epochs", "2"], 45, "final.pt"),
    "loop_two_optimizers": (["--steps", "40"], 50, "final.pt"),
}
"""Each example's shorter form, the optimizer's step at which replica 1 is killed, and what it leaves."""


def kill_one(example: Path, steps: int, arguments: list[str]) -> None:
    """Kills replica 1 at a step, and then the other, as torchrun would."""
    common = {**torch_rendezvous(2), "GLOO_SOCKET_IFNAME": "lo"}
    both = [
        Python(KILLED, steps if rank else 0, example, *arguments, **common, RANK=str(rank), LOCAL_RANK=str(rank))
        for rank in range(2)
    ]
    try:
        assert both[1].wait(patience(120)) == -9, both[1].err.read_text()
    finally:
        for process in both:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_example_that_is_killed_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    settings, step, left = CASES[name]
    example = EXAMPLES / f"{name}.py"
    whole, cut = (["--out", str(tmp_path / folder), *settings] for folder in ("whole", "cut"))
    run_together(2, example, *whole)
    kill_one(example, step, cut)
    assert not (tmp_path / "cut" / left).exists()
    run_together(2, example, *cut, "--resume")
    assert (tmp_path / "cut" / left).read_bytes() == (tmp_path / "whole" / left).read_bytes()


def test_every_example_is_run() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("scaled", [False, True])
def test_lightning_clips_gradients_in_mixed_precision_as_without_rounds(scaled: bool, tmp_path: Path) -> None:
    """With a GradScaler also where gradients overflow: at the first steps, of a scale that float16 cannot hold."""
    import lightning
    from lightning.pytorch.plugins.precision import MixedPrecision
    from torch_trainers import SAMPLES, Module

    def trained(*callbacks: Any) -> torch.Tensor:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=4) if scaled else None
        plugin = MixedPrecision("16-mixed" if scaled else "bf16-mixed", "cpu", scaler)
        quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        lightning.Trainer(
            max_steps=16, accelerator="cpu", devices=1, gradient_clip_val=0.5, plugins=plugin, callbacks=[*callbacks],
            **quiet,
        ).fit(model := Module(), DataLoader(TensorDataset(SAMPLES), 2))  # fmt: skip
        return flat(model)

    rounds = integrations.lightning.Rounds(methods.local(), SimulatedNetwork.alone())
    assert torch.equal(trained(rounds), trained())


@pytest.mark.slow
def test_after_an_error_in_lightning_the_network_serves_the_next_trainer(tmp_path: Path) -> None:
    import lightning
    from torch_trainers import SAMPLES, Module

    class Fails(lightning.Callback):
        def on_train_batch_end(self, *given: Any) -> None:
            raise ValueError("a user's own")

    network, kept = SimulatedNetwork.alone(), list[BaseException]()
    for callbacks in ([Fails()], []):
        quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        rounds = integrations.lightning.Rounds(methods.diloco(every=2), network)
        trainer = lightning.Trainer(max_steps=4, accelerator="cpu", callbacks=[rounds, *callbacks], **quiet)
        try:
            trainer.fit(Module(), DataLoader(TensorDataset(SAMPLES), 2))
        except ValueError as error:
            kept.append(error)  # and with it all that was there, as a notebook does
    assert len(kept) == 1 and trainer.global_step == 4


@pytest.mark.slow
def test_a_lightning_trainer_may_fit_again_with_more_steps(tmp_path: Path) -> None:
    import lightning
    from torch_trainers import SAMPLES, Module

    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    rounds = integrations.lightning.Rounds(methods.diloco(every=2), SimulatedNetwork.alone())
    trainer = lightning.Trainer(max_steps=4, accelerator="cpu", callbacks=[rounds], **quiet)
    model, data = Module(), DataLoader(TensorDataset(SAMPLES), 2)
    trainer.fit(model, data)
    before = flat(model)
    trainer.fit_loop.epoch_loop.max_steps = 8
    trainer.fit(model, data)
    assert trainer.global_step == 8 and not torch.equal(flat(model), before)
