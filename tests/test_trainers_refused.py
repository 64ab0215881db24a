"""What cannot work in others' trainers is refused in one line, and so are checkpoints that are cut or another's."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from problem import small_model
from torch import Tensor, nn

import farflung
from farflung import methods
from farflung.errors import UserError
from farflung.networks import SimulatedNetwork

pytestmark = pytest.mark.slow
METHOD = methods.diloco(every=2)


class Judged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = small_model()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.net(x) - x.sum(1, keepdim=True)).square().mean()}


DATA = [{"x": torch.randn(6, generator=torch.Generator().manual_seed(number))} for number in range(8)]


def trainer(out: Path, model: nn.Module | None = None, callbacks: tuple[Any, ...] = (), **settings: Any) -> Any:
    """A Trainer of transformers with Rounds on a network of one replica."""
    from transformers import Trainer, TrainingArguments

    rounds = farflung.integrations.transformers.Rounds(METHOD, SimulatedNetwork.alone())
    usual: dict[str, Any] = {"max_steps": 4, "save_steps": 2, "use_cpu": True, "report_to": "none"}
    args = TrainingArguments(str(out), **{**usual, "disable_tqdm": True, **settings})
    return Trainer(model or Judged(), args, train_dataset=DATA, eval_dataset=DATA, callbacks=[rounds, *callbacks])


def early_stopping(out: Path) -> Any:
    from transformers import EarlyStoppingCallback

    return trainer(out, callbacks=(EarlyStoppingCallback(),))


def added_later(out: Path) -> None:
    from transformers import Trainer, TrainingArguments

    made = Trainer(Judged(), TrainingArguments(str(out), use_cpu=True, report_to="none"), train_dataset=DATA)
    made.add_callback(farflung.integrations.transformers.Rounds(METHOD, SimulatedNetwork.alone()))
    made.train()


def twice(out: Path) -> None:
    network = SimulatedNetwork.alone()
    first = farflung.integrations.transformers.Rounds(METHOD, network)
    farflung.integrations.transformers.Rounds(METHOD, network)
    assert first


def fitted(out: Path, *callbacks: Any, steps: int = 2, device: str = "cpu", **resumed: Any) -> None:
    """Some steps of a Trainer of Lightning, with Rounds on a network of one replica."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            with torch.device(device):
                self.net = small_model()

        def training_step(self, x: Tensor, index: int) -> Any:
            return self.net(x).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    rounds = farflung.integrations.lightning.Rounds(METHOD, SimulatedNetwork.alone())
    given: list[Any] = [rounds, *callbacks]
    lightning.Trainer(accelerator="cpu", logger=False, callbacks=given, default_root_dir=out, max_steps=steps).fit(
        Module(), torch.utils.data.DataLoader([one["x"] for one in DATA]), **resumed
    )


def in_lightning(callback: str, **settings: Any) -> Callable[[Path], None]:
    def fit(out: Path) -> None:
        from lightning.pytorch import callbacks

        fitted(out, getattr(callbacks, callback)(**settings))

    return fit


def accelerator(**settings: Any) -> Any:
    return farflung.integrations.accelerate.Accelerator(METHOD, SimulatedNetwork.alone(), cpu=True, **settings)


def with_plugin(name: str, kind: str) -> Callable[[Path], Any]:
    def make(out: Path) -> Any:
        import accelerate

        return accelerator(**{name: getattr(accelerate, kind)()})

    return make


def with_arguments(**later: Any) -> Callable[[Path], Any]:
    """Arguments that are set after they are made: DeepSpeed is not installed here, and FSDP wants several processes."""

    def make(out: Path) -> Any:
        from transformers import Trainer, TrainingArguments

        args = TrainingArguments(str(out), use_cpu=True, report_to="none")
        vars(args).update(later)
        rounds = farflung.integrations.transformers.Rounds(METHOD, SimulatedNetwork.alone())
        return Trainer(Judged(), args, train_dataset=DATA, callbacks=[rounds])

    return make


def on_meta(out: Path) -> None:
    with torch.device("meta"):
        model = Judged()
    accelerator().prepare(model, torch.optim.SGD(model.parameters()))


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no network": (
        lambda out: farflung.integrations.transformers.Rounds(METHOD, None),  # type: ignore[arg-type]
        "make one first",
    ),
    "a network that is a class": (
        lambda out: farflung.integrations.accelerate.Accelerator(METHOD, SimulatedNetwork),
        "make one first",
    ),
    "a network in two trainers": (twice, "already serves a trainer"),
    "early stopping": (early_stopping, "EarlyStoppingCallback would stop one replica"),
    "batch sizes that are tried": (lambda out: trainer(out, auto_find_batch_size=True), "per_device_train_batch_size"),
    "checkpoints of the best": (
        lambda out: trainer(out, save_strategy="best", eval_strategy="steps", metric_for_best_model="loss"),
        "save_strategy='best'",
    ),
    "rounds that come too late": (added_later, "too late to divide its data"),
    "DeepSpeed": (with_arguments(deepspeed={"zero_optimization": {"stage": 2}}), "DeepSpeed divides the optimizer"),
    "FSDP": (with_arguments(fsdp=True, fsdp_config={"xla": True}), "FSDP would divide one model"),
    "accelerate's DeepSpeed": (with_plugin("deepspeed_plugin", "DeepSpeedPlugin"), "deepspeed_plugin would divide"),
    "accelerate's FSDP": (with_plugin("fsdp_plugin", "FullyShardedDataParallelPlugin"), "fsdp_plugin would divide"),
    "lightning's early stopping": (in_lightning("EarlyStopping", monitor="x"), "EarlyStopping would stop one replica"),
    "lightning's averages": (in_lightning("StochasticWeightAveraging", swa_lrs=0.1), "swaps the weights"),
    "a model without values": (on_meta, "has no values yet"),
    "a model without values in lightning": (lambda out: fitted(out, device="meta"), "has no values yet"),
    "an optimizer without its model": (
        lambda out: accelerator().prepare(torch.optim.SGD(small_model().parameters())),
        "without its model",
    ),
    "a state without a folder": (lambda out: accelerator().save_state(), "need a folder"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_work_is_refused_in_one_line(what: str, tmp_path: Path) -> None:
    make, words = REFUSED[what]
    with pytest.raises(UserError, match=words) as refused:
        make(tmp_path)
    assert "\n" not in str(refused.value)


def test_one_replica_where_several_were_started_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="2 processes were started, but the network given has one replica"):
        farflung.integrations.transformers.Rounds(METHOD, SimulatedNetwork.alone())


@pytest.mark.parametrize("name", ["DEEPSPEED", "FSDP", "MEGATRON_LM"])
def test_what_accelerate_launch_was_told_to_divide_with_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process believes itself alone, so that accelerate would leave this out without a word."""
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    for make in (accelerator, lambda: farflung.integrations.transformers.Rounds(METHOD, SimulatedNetwork.alone())):
        with pytest.raises(UserError, match=f"ACCELERATE_USE_{name} is set, and .* would divide one model"):
            make()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with whole checkpoints of steps 2 and 4."""
    out = tmp_path_factory.mktemp("saved") / "run"
    trainer(out).train()
    return out


def altered(folder: Path, **changes: Any) -> None:
    state = torch.load(folder / "rounds.pt")
    torch.save({**state, **changes}, folder / "rounds.pt")


def other_weights(folder: Path) -> None:
    """Files of the earlier save, of the same size."""
    shutil.copy(folder.parent / "checkpoint-2" / "model.safetensors", folder)


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another replica's": (lambda folder: altered(folder, replica=1), "is of replica 1, and this is replica 0"),
    "of more replicas": (lambda folder: altered(folder, replicas=2), "of a run of 2 replicas, and there are 1"),
    "with a strange file": (lambda folder: torch.save({"a": 1}, folder / "rounds.pt"), "holds no rounds"),
    "with other weights": (other_weights, "belong to other weights"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_checkpoint_that_is_another_is_refused(what: str, saved: Path, tmp_path: Path) -> None:
    spoil, words = BAD[what]
    out = tmp_path / "run"
    shutil.copytree(saved, out)
    spoil(out / "checkpoint-4")
    with pytest.raises(UserError, match=words):
        trainer(out, max_steps=6).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("cut", ["rounds.pt", "optimizer.pt", "model.safetensors"])
def test_a_checkpoint_with_a_cut_file_is_set_aside_with_a_word_and_the_one_before_it_resumed(
    cut: str, saved: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(saved, out)
    file = out / "checkpoint-4" / cut
    file.write_bytes(file.read_bytes()[:100])
    with pytest.warns(UserWarning, match=f"checkpoint-4 is set aside as unfinished-checkpoint-4: .*{cut}.* damaged"):
        again = trainer(out, max_steps=4)
    again.train(resume_from_checkpoint=True)
    for name in ("model.safetensors", "optimizer.pt"):
        assert (out / "checkpoint-4" / name).read_bytes() == (saved / "checkpoint-4" / name).read_bytes()


def test_a_checkpoint_of_lightning_without_rounds_is_refused(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    fitted(tmp_path, ModelCheckpoint(tmp_path, filename="one"))
    whole = torch.load(tmp_path / "one.ckpt", weights_only=False)
    del whole["callbacks"]["farflung"]
    torch.save(whole, tmp_path / "one.ckpt")
    with pytest.raises(UserError, match="this checkpoint holds no rounds"):
        fitted(tmp_path, steps=4, ckpt_path=str(tmp_path / "one.ckpt"), weights_only=False)


@pytest.mark.parametrize("left", [0.0, 0.5, 0.99])
def test_a_cut_checkpoint_of_lightning_is_refused_with_a_word(left: float, tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    fitted(tmp_path, ModelCheckpoint(tmp_path, filename="one"))
    file = tmp_path / "one.ckpt"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(left * len(whole))])
    with (
        pytest.warns(UserWarning, match=f"{file} is left out, since it is damaged"),
        pytest.raises(UserError, match=f"{file} is no checkpoint that all replicas have whole") as refused,
    ):
        fitted(tmp_path, ckpt_path=str(file), weights_only=False)
    assert "\n" not in str(refused.value)


def test_a_checkpoint_of_the_model_alone_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, save_only_model=True).train()
    with pytest.raises(UserError, match="checkpoint-4 holds only the model"):
        trainer(tmp_path, max_steps=6).train(resume_from_checkpoint=True)


def test_a_checkpoint_without_rounds_is_refused(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(str(tmp_path), max_steps=2, save_steps=2, use_cpu=True, report_to="none")
    Trainer(Judged(), args, train_dataset=DATA).train()
    with pytest.raises(UserError, match="checkpoint-2 holds no rounds"):
        trainer(tmp_path).train(resume_from_checkpoint=True)


def test_the_best_model_is_loaded_with_epochs_evaluation_and_schedules(tmp_path: Path) -> None:
    made = trainer(
        tmp_path,
        max_steps=-1,
        num_train_epochs=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        lr_scheduler_type="cosine",
        per_device_train_batch_size=4,
        bf16=True,
        label_names=["x"],
        prediction_loss_only=True,
    )
    made.train()
    assert made.state.global_step == 4 and made.state.best_model_checkpoint.startswith(str(tmp_path))
