"""What inner steps are made with: optimizers, learning rates, shares of the data, and averages of late weights."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import same, saved, trained_here
from torch import nn

from farflung import inner
from farflung.errors import UserError
from farflung.hooks.wholes import portions
from farflung.inner import MULOCO, MUON, SIGN, Muon, MuonAdamW, names_of
from farflung.memory.far import far_homes, near_home
from farflung.memory.measure import Held
from farflung.settings import Settings
from farflung.training import launch
from farflung.training.learning_rate import lr_scale
from farflung.training.tail import TailAverage
from farflung.workloads.data import Data, Rows
from farflung.workloads.dealing import Deal


class Small(nn.Module):
    """Embeddings, a list of layers, and a head, as language models have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, 11, bias=False)

    def loss(self, step: int) -> torch.Tensor:
        tokens = torch.randint(11, (5,), generator=torch.Generator().manual_seed(step))
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return nn.functional.cross_entropy(self.head(hidden), tokens.roll(1))


def trained(model: Small, optimizers: list[Any], steps: range) -> None:
    for step in steps:
        model.loss(step).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_muon_is_for_the_matrices_of_layers_and_adamw_for_the_rest() -> None:
    ours, theirs = Small(), Small()
    named = dict(theirs.named_parameters())
    matrices = [named.pop("layers.0.weight"), named.pop("layers.1.weight")]
    by_hand = [
        Muon(matrices, lr=0.01, weight_decay=0.2),
        torch.optim.AdamW(named.values(), lr=0.01, weight_decay=0.2, betas=(0.9, 0.95), fused=True),
    ]
    optimizer = MuonAdamW(ours.named_parameters(), lr=0.01, weight_decay=0.2)
    assert names_of(optimizer)[:2] == ["layers.0.weight", "layers.1.weight"]
    trained(ours, [optimizer], range(5))
    trained(theirs, by_hand, range(5))
    assert torch.equal(weights(ours), weights(theirs))
    for group in (*optimizer.param_groups, *(group for part in by_hand for group in part.param_groups)):
        group["lr"] = 0.003  # as a trainer sets it
    trained(ours, [optimizer], range(5, 8))
    trained(theirs, by_hand, range(5, 8))
    assert torch.equal(weights(ours), weights(theirs))


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_muons_steps_are_those_of_its_polynomial_on_singular_values(shape: tuple[int, int]) -> None:
    gradients = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    parameter = nn.Parameter(torch.ones(shape))
    optimizer = Muon([parameter], lr=0.1, weight_decay=0.2)
    expected, mean = np.ones(shape), np.zeros(shape)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
        mean = 0.95 * mean + 0.05 * gradient.double().numpy()
        left, values, right = np.linalg.svd(0.05 * gradient.double().numpy() + 0.95 * mean, full_matrices=False)
        values = values / np.sqrt(np.sum(values**2))
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        expected = expected * (1 - 0.1 * 0.2) - 0.1 * 0.2 * np.sqrt(max(shape)) * (left * values) @ right
    np.testing.assert_allclose(parameter.detach().numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("shape", [(8, 2), (2, 8)])
def test_mulocos_steps_are_along_the_plain_mean_and_by_the_root_of_rows_over_columns(shape: tuple[int, int]) -> None:
    """Of a matrix of equal singular values the factor is that matrix over that value, but for its polynomial."""
    corner, other = torch.eye(*shape), torch.eye(*shape).flip(1)
    parameter = nn.Parameter(torch.zeros(shape))
    optimizer = MULOCO.make([("layers.0.weight", parameter)], lr=0.1, weight_decay=0.0)
    for gradient, momentum in ((corner, corner), (other, 0.9 * 0.1 * corner + 0.1 * other)):
        before = parameter.detach().clone()
        parameter.grad = gradient.clone()
        optimizer.step()
        step = (before - parameter.detach()) / (0.1 * (shape[0] / shape[1]) ** 0.5)
        left, _, right = torch.linalg.svd(momentum, full_matrices=False)
        through = left.mT @ step @ right.mT  # the polynomial brings singular values to 0.7 … 1.2
        torch.testing.assert_close(through, torch.diag(through.diagonal()), atol=1e-4, rtol=0)
        assert ((through.diagonal() > 0.65) & (through.diagonal() < 1.25)).all()


def test_flags_change_one_thing_each_of_muon_and_survive_the_run_folder() -> None:
    for flags in ({"muon_momentum": 0.8}, {"muon_nesterov": True, "inner": "muloco"}, {"muon_scale": "fans"}):
        settled = Settings.of(**flags).settled()
        assert settled.inner.inner == flags.get("inner", "muon") and settled.settled() == settled
        (group,) = settled.method().inner.make([("layers.0.weight", nn.Parameter(torch.ones(2, 2)))]).param_groups
        base = MULOCO if "inner" in flags else MUON
        (usual,) = base.make([("layers.0.weight", nn.Parameter(torch.ones(2, 2)))]).param_groups
        changed = {f"muon_{name}" for name, value in group.items() if name != "params" and value != usual[name]}
        assert changed == flags.keys() - {"inner"}


def test_muons_state_of_the_version_before_is_taken() -> None:
    optimizer = MUON.make(list(Small().named_parameters()))
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group.pop("nesterov", None), group.pop("scale", None)
    optimizer.load_state_dict(state)
    trained(Small(), [optimizer], range(1))
    muon, adamw = optimizer.param_groups
    assert (muon["nesterov"], muon["scale"]) == (True, "rms") and "scale" not in adamw


def test_matrices_of_many_shapes_step_as_each_does_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lying and standing ones together, some larger than what is computed at once, and one without a gradient."""
    monkeypatch.setattr(inner, "TOGETHER", 50)
    shapes = [(4, 6), (6, 4), (4, 6), (5, 5), (4, 6), (30, 2), (12, 13)]
    together, alone = ([nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    optimizers = [Muon(together, lr=0.1), *(Muon([parameter], lr=0.1) for parameter in alone)]
    for seed in range(3):
        for number, shape in enumerate(shapes):
            gradient = torch.randn(shape, generator=torch.Generator().manual_seed(10 * seed + number))
            for parameter in (together[number], alone[number]):
                parameter.grad = None if (number, seed) == (2, 1) else gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(together, alone, strict=True):
        assert (one - 1).abs().min() > 0
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_layers_matrices_step_with_all_others_as_alone_bit_for_bit(restored_threads: None) -> None:
    """One of each has a shape that no other one of its layer has: alone, threads had divided it otherwise."""
    torch.set_num_threads(2)
    shapes = {f"h.{n}.{name}": shape for n in range(3) for name, shape in (("a", (64, 64)), ("b", (64, 128)))}
    together, alone = ({n: nn.Parameter(torch.ones(s)) for n, s in shapes.items()} for _ in range(2))
    layers = [[(n, p) for n, p in alone.items() if n.startswith(f"h.{number}.")] for number in range(3)]
    optimizers = [Muon(together.items(), lr=0.1), *(Muon(layer, lr=0.1) for layer in layers)]
    for name, one in together.items():
        one.grad = torch.randn(one.shape)
        alone[name].grad = one.grad.clone()
    for optimizer in optimizers:
        optimizer.step()
    assert all(torch.equal(one, alone[name]) for name, one in together.items())


@pytest.fixture
def restored_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_muon_takes_one_name_for_several_matrices() -> None:
    """As of two models with one optimizer: both had stepped along the last one's gradient."""
    gradients = torch.randn(2, 3, 4)
    together, alone = ([nn.Parameter(torch.ones(3, 4)) for _ in range(2)] for _ in range(2))
    groups: list[dict[str, Any]] = [{"params": [("weight", one)]} for one in together]
    for one, other, gradient in zip(together, alone, gradients, strict=True):
        one.grad, other.grad = gradient.clone(), gradient.clone()
        Muon([other], lr=0.1).step()
    Muon(groups, lr=0.1).step()
    assert all(map(torch.equal, together, alone))


def test_muon_refuses_what_is_no_matrix() -> None:
    matrix, others = nn.Parameter(torch.ones(2, 2)), [nn.Parameter(torch.ones(shape)) for shape in ((2,), (2, 2, 2))]
    optimizer = Muon([("matrix", matrix)])
    for other in others:
        with pytest.raises(UserError, match=r"Muon is for matrices, but parameter .* has . dimensions; give it to"):
            optimizer.add_param_group({"params": [("kernel", other)]})
    assert [group["params"] for group in optimizer.param_groups] == [[matrix]]


def test_muons_step_holds_little_beside_weights_gradients_and_momenta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 48 matrices, what a few of them need: it was a copy of all, and another one of their steps."""
    monkeypatch.setattr(inner, "TOGETHER", 2048)
    weights = [nn.Parameter(torch.randn(shape)) for shape in 16 * [(32, 32), (8, 64), (64, 16)]]
    optimizer = Muon(weights)
    for _ in range(2):  # the first step makes momenta
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        with Held() as held:
            optimizer.step()
    assert held.most < 8 * 4 * 2048 < sum(weight.nbytes for weight in weights)


@given(sizes=st.lists(st.integers(0, 20)), most=st.integers(1, 30))
def test_portions_are_of_neighbours_and_no_smaller_than_they_must_be(sizes: list[int], most: int) -> None:
    cut = portions({str(number): size for number, size in enumerate(sizes)}, most)
    assert [name for portion in cut for name in portion] == [str(number) for number in range(len(sizes))]
    sums = [sum(sizes[int(name)] for name in portion) for portion in cut]
    assert all(total <= most or len(portion) == 1 for total, portion in zip(sums, cut, strict=True))
    following = [sizes[int(portion[0])] for portion in cut[1:]]
    assert all(total + size > most for total, size in zip(sums, following, strict=False))


def test_muon_goes_as_torchs_does_within_the_rounding_of_bfloat16() -> None:
    ours, theirs = nn.Parameter(torch.zeros(16, 24)), nn.Parameter(torch.zeros(16, 24))
    both = [
        Muon([ours], lr=0.1),
        torch.optim.Muon([theirs], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    ]
    for seed in range(4):
        gradient = torch.randn(16, 24, generator=torch.Generator().manual_seed(seed))
        for parameter, optimizer in zip((ours, theirs), both, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.002)


def test_muon_goes_on_from_its_state_bit_for_bit(tmp_path: Path) -> None:
    model = Small()
    optimizer = MuonAdamW(model.named_parameters(), lr=0.01)
    trained(model, [optimizer], range(4))
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "state")
    trained(model, [optimizer], range(4, 8))

    again = Small()
    other = MuonAdamW(again.named_parameters(), lr=0.5)
    of_model, of_optimizer = torch.load(tmp_path / "state")
    again.load_state_dict(of_model)
    other.load_state_dict(of_optimizer)
    trained(again, [other], range(4, 8))
    assert torch.equal(weights(model), weights(again))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_of_muon_trains_the_copy(copied: Callable[[Any], Any]) -> None:
    model = Small()
    optimizer = MuonAdamW(model.named_parameters(), lr=0.01)
    trained(model, [optimizer], range(4))
    again, other = copied((model, optimizer))
    trained(model, [optimizer], range(4, 8))
    assert not torch.equal(weights(model), weights(again))
    trained(again, [other], range(4, 8))
    assert torch.equal(weights(model), weights(again))


SMALL: dict[str, Any] = {
    "network": "simulated",
    "replicas": 2,
    "model": "micro",
    "steps": 12,
    "batch_size": 2,
    "sequence_length": 16,
    "eval_sequences": 4,
    "max_tokens": 60_000,
    "warmup": 2,
    "checkpoint_every": 5,
}


def run(folder: Path, resume: bool = False, **more: Any) -> dict[str, Any]:
    trained_here(folder, resume, **SMALL | more)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


@pytest.mark.slow
def test_a_run_with_all_of_it_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    """Muon's momenta, slow ones, rounds that grow rarer, and the late average all lie in the checkpoint."""
    everything = {"method": "noloco", "inner": "muon", "every": 2, "every_final": 4, "tail_average": 0.9}
    everything |= {"slow_share": 0.5, "slow_rounds": 1, "muon_align": 0.1}
    whole = run(tmp_path / "whole", **everything)
    run(tmp_path / "broken", **everything)
    for path in (tmp_path / "broken" / "checkpoints").glob("step-000012/*"):
        path.unlink()
    (tmp_path / "broken" / "summary.json").unlink()
    again = run(tmp_path / "broken", resume=True, **everything)
    assert {**again, "seconds": 0} == {**whole, "seconds": 0}  # the clock began anew
    one, other = (saved(tmp_path / name, 12, 1) for name in ("whole", "broken"))
    assert same(one["late"]["mean"], other["late"]["mean"]) and one["late"]["mean"].keys() == one["model"].keys()
    assert one["late"]["count"] == other["late"]["count"] == 4


@pytest.mark.slow
def test_late_weights_are_averaged_into_the_final_ones(tmp_path: Path) -> None:
    """With rounds at every step of a single pair, the late average is the mean of the weights that steps left."""
    settings = {"method": "diloco", "every": 1, "outer_momentum": 0.0, "outer_lr": 1.0, "checkpoint_every": 1}
    run(tmp_path / "run", **settings, keep_checkpoints=100, tail_average=0.5)
    steps = [saved(tmp_path / "run", step, 0) for step in range(7, 13)]
    assert steps[-1]["late"]["count"] == 6 and steps[-1]["late"]["mean"].keys() == steps[-1]["model"].keys()
    for name, mean in steps[-1]["late"]["mean"].items():
        each = torch.stack([state["model"][name] for state in steps]).double().mean(0)
        torch.testing.assert_close(mean.double(), each, rtol=0, atol=1e-6)
    assert run(tmp_path / "none", **settings)["steps"] == 12
    assert saved(tmp_path / "none", 12, 0)["late"] == {"count": 0, "first": 0, "mean": {}}


@pytest.mark.parametrize("far", [False, True])
def test_the_late_average_is_a_mean_of_all_that_was_added(far: bool, tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    late, second = (TailAverage(model, home=far_homes(str(tmp_path)) if far else near_home) for _ in range(2))
    late.apply()
    before = weights(model)
    samples = [before]
    late.add(1)
    for step, value in enumerate((1.0, 5.0, -2.0), start=2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        samples.append(weights(model))
        late.add(step)
    second.load_state_dict(late.state_dict())
    second.apply()
    torch.testing.assert_close(weights(model), torch.stack(samples).mean(0))


@pytest.mark.parametrize(
    ("schedule", "halfway", "near_the_end"),
    [("cosine", 0.625, 0.2684), ("linear", 0.625, 0.325), ("stable", 1.0, 0.625)],
)
def test_the_learning_rate_falls_as_asked(schedule: Any, halfway: float, near_the_end: float) -> None:
    config = Settings.of(lr=1.0, warmup=0, steps=100, lr_schedule=schedule, lr_final=0.25)
    assert lr_scale(config.inner, 50, 100) == pytest.approx(halfway, abs=1e-4)
    assert lr_scale(config.inner, 90, 100) == pytest.approx(near_the_end, abs=1e-3)
    assert lr_scale(config.inner, 100, 100) == pytest.approx(0.25)


@given(replicas=st.integers(1, 9), sequences=st.integers(1, 60), step=st.integers(0, 99))
@settings(max_examples=60)
def test_shares_apart_do_not_overlap(replicas: int, sequences: int, step: int) -> None:
    tokens = np.arange(sequences * replicas * 3)
    data = Data(Rows([tokens], 3), None, "numbers", shares=replicas)
    drawn = [
        set(data.batch(Deal(replicas, apart=True).ids(0, replica, step, 40, data.available))[:, 0].tolist())
        for replica in range(replicas)
    ]
    assert sum(map(len, drawn)) == len(set.union(*drawn))
    assert all(max(mine) - min(mine) < 3 * sequences for mine in drawn)


@pytest.mark.slow
def test_shares_apart_train_otherwise_and_need_enough_text(tmp_path: Path) -> None:
    alike, apart = (run(tmp_path / shares, method="ddp", shares=shares) for shares in ("alike", "apart"))
    assert alike["validation_loss"] != apart["validation_loss"]
    text = tmp_path / "short.txt"
    text.write_text("x" * 500)
    with pytest.raises(UserError, match="less than a sequence of 16 for each of 40 replicas"):
        run(tmp_path / "few", method="local", data=str(text), shares="apart", replicas=40)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"method": "ddp", "every_final": 9}, "ddp has no setting every_final"),
        ({"method": "diloco", "every": 9, "delay": 4, "every_final": 3}, "every_final is 3, less than delay"),
        ({"method": "dilocox", "every_final": 300}, "add --adapt False"),
        ({"method": "eager-diloco", "every_final": 90}, "without every_final"),
        ({"shares": "apart", "network": "internet"}, "the number of replicas is not known"),
        ({"tail_average": 1.5}, "tail_average is 1.5; it must be at most 1"),
        ({"inner": "adamw", "muon_momentum": 0.5}, "muon_momentum is 0.5, which only Muon has; leave it out"),
        ({"inner": "adam"}, "inner is 'adam'; it must be one of adamw, muon, muloco, sign"),
    ],
)
def test_what_cannot_work_is_refused_before_it_starts(wrong: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        launch.prepare(Settings.of(**{**SMALL, **wrong}), tmp_path / "run", resume=False)


def test_the_inner_optimizer_that_is_named_takes_the_methods_own_place() -> None:
    assert Settings.of(method="demo").method().inner is SIGN
    assert Settings.of(method="demo", shard=2).method().inner is SIGN
    assert Settings.of(method="demo", inner="muon").method().inner is MUON
    assert Settings.of(method="noloco").method().inner is MUON
    assert Settings.of(method="noloco", shard=2).method().inner is MUON


@pytest.mark.parametrize("make", [MUON.make, SIGN.make])
def test_a_closure_is_called_once_and_its_loss_returned(make: Any) -> None:
    with_closure, without = Small(), Small()
    optimizer, plain = (make(list(model.named_parameters()), lr=0.01) for model in (with_closure, without))
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = with_closure.loss(step)
            loss.backward()
            return loss

        loss = without.loss(step)
        trained(without, [plain], range(step, step + 1))
        assert torch.equal(optimizer.step(closure), loss)
    assert torch.equal(weights(with_closure), weights(without))


def test_what_is_added_to_muon_later_is_trained_as_if_it_had_been_there() -> None:
    whole, grown = Small(), Small()
    first = [(name, p) for name, p in grown.named_parameters() if not name.startswith(("layers.1", "head"))]
    later = [(name, p) for name, p in grown.named_parameters() if name.startswith(("layers.1", "head"))]
    optimizer = MuonAdamW(first, lr=0.01)
    optimizer.add_param_group({"params": later, "lr": 0.01})
    reference = MuonAdamW(whole.named_parameters(), lr=0.01)
    trained(whole, [reference], range(4))
    trained(grown, [optimizer], range(4))
    assert torch.equal(weights(whole), weights(grown))
    again = MuonAdamW(first, lr=0.5)
    again.add_param_group({"params": later})
    again.load_state_dict(optimizer.state_dict())
    trained(whole, [reference], range(4, 6))
    trained(grown, [again], range(4, 6))
    assert torch.equal(weights(whole), weights(grown))
    with pytest.raises(UserError, match="by their names"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 3))]})


@pytest.mark.parametrize("make", [inner.SlowAdamW, inner.PrimalAveraging, Muon])
def test_sparse_gradients_are_refused_in_one_line(make: Callable[..., torch.optim.Optimizer]) -> None:
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = make(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UserError, match=r"takes no sparse gradients; make the embedding with sparse=False, or .* both"):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.parametrize("kind", [MUON, MULOCO])
def test_matrices_without_values_are_left_alone(kind: inner.Inner) -> None:
    named = {f"layers.{n}": nn.Parameter(torch.ones(shape)) for n, shape in enumerate([(4, 0), (0, 4), (2, 2)])}
    optimizer = kind.make(list(named.items()), lr=0.1)
    sum(one.sum() for one in named.values()).backward()  # type: ignore[union-attr]
    optimizer.step()
    assert (named["layers.2"] < 1).all()


@pytest.mark.parametrize(
    ("make", "setting", "told"),
    [
        (Muon, {"momentum": 1.5}, "momentum is 1.5; it must be less than 1"),
        (Muon, {"scale": "cube"}, "scale is 'cube'; choose one of rms, fans"),
        (Muon, {"align": 2.0}, "align is 2.0; it must be at most 1"),
        (inner.SlowAdamW, {"slow_momentum": 1.0}, "slow_momentum is 1.0; it must be less than 1"),
        (inner.SlowAdamW, {"slow_share": -0.5}, "slow_share is -0.5; it must be at least 0"),
        (inner.PrimalAveraging, {"average": 2.0}, "average is 2.0; it must be at most 1"),
        (inner.PrimalAveraging, {"betas": (0.9, 1.0)}, "betas is 1.0; it must be less than 1"),
        (inner.SignSGD, {"lr": -1.0}, "lr is -1.0; it must be at least 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(make: Any, setting: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        make([nn.Parameter(torch.ones(2, 2))], **setting)
