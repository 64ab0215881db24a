"""Cores: a part of a model that computes alone, and replicas of which some train no more than that."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import cored
import pytest
import torch
from cored import EVERY, KINDS, LR, METHODS, STEPS, WEAK, joint, train
from processes import run_replicas, same
from subnet import decoder, ids, loss_of
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from farflung import methods
from farflung.errors import UserError
from farflung.inner import ADAMW, MUON
from farflung.joint import kinds
from farflung.joint.kinds import core_named
from farflung.joint.maps import FirstColumns, LowRankMap, core_alone, rest_of
from farflung.networks import SimulatedNetwork, Simulation
from farflung.outer import Round
from farflung.outer.holders import Holders

# What a core computes


def ordinary(kind: str, model: Any, alone: bool) -> Any:
    """A plain model of transformers with the weights of a divided one, or of its core."""
    core, config = core_named(kind), copy.deepcopy(model.config)
    weights = model.state_dict()
    found = core.ordinary(weights, model) if alone else kinds.whole(weights, model)
    if alone:
        core.narrow(config)
    plain = LlamaForCausalLM(config).double()
    plain.load_state_dict(found)
    return plain


def logits(model: Any) -> Tensor:
    found: Tensor = model(input_ids=ids(0, 0), use_cache=False).logits
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_core_and_whole_compute_what_ordinary_models_with_their_weights_do(kind: str) -> None:
    """Logits in float64: of the whole; of the core in it; of the core where there is nothing else."""
    whole, alone = (joint(kind, one, torch.float64) for one in (False, True))
    torch.testing.assert_close(logits(whole), logits(ordinary(kind, whole, alone=False)), rtol=0, atol=1e-12)
    expected = logits(ordinary(kind, whole, alone=True))
    assert not torch.allclose(logits(whole), expected, atol=1e-3)
    with core_alone(whole):
        torch.testing.assert_close(logits(whole), expected, rtol=0, atol=1e-12)
        loss_of(whole, 0, 0).backward()
    torch.testing.assert_close(logits(alone), expected, rtol=0, atol=1e-12)
    loss_of(alone, 0, 0).backward()
    gradients = {name: one.grad for name, one in whole.named_parameters()}
    assert {name for name, one in gradients.items() if one is None} == rest_of(whole) and not rest_of(alone)
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=0, atol=1e-12)


def test_a_core_of_heads_is_a_narrower_model_of_the_same_class() -> None:
    """Half of the heads, KV groups and FFN columns; all shapes of what is trained alone are its."""
    narrow = decoder(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=6)
    assert {n: p.shape for n, p in joint("heads4", alone=True).named_parameters()} == {
        n: p.shape for n, p in narrow.named_parameters()
    }


@pytest.mark.parametrize("inner", [ADAMW, MUON])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_the_core_leave_the_rest_and_its_optimizer_state_as_they_are(kind: str, inner: Any) -> None:
    """Bit for bit, with momentum and weight decay, which would move weights whose gradients are noughts."""
    model = joint(kind)
    optimizer = inner.make(model.named_parameters(), lr=1e-2, weight_decay=0.1)
    train(model, optimizer, 0, range(2))
    named, rest = dict(model.named_parameters()), rest_of(model)
    before = {n: p.detach().clone() for n, p in named.items()}
    state = {n: copy.deepcopy(optimizer.state[named[n]]) for n in named}
    with core_alone(model):
        for step in range(2, 5):
            loss_of(model, 0, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in named.items():
        assert torch.equal(parameter, before[name]) == (name in rest), name
        kept = {key: one for key, one in state[name].items() if isinstance(one, Tensor)}
        alike = [torch.equal(one, optimizer.state[parameter][key]) for key, one in kept.items()]
        assert kept and (all(alike) == (name in rest)), name


def alternate(model: nn.Module, loss: Any, lr: float, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(steps):
        with torch.enable_grad():
            if step % 2:
                loss().backward()
            else:
                with core_alone(model):
                    loss().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_an_additive_core_reaches_the_best_of_its_rank_and_the_whole_has_no_loss_left() -> None:
    """Whitened inputs: the core's loss is the tail of the target's spectrum (Eckart and Young), and the whole's 0."""
    torch.manual_seed(0)
    target = torch.randn(6, 5, dtype=torch.float64)
    model = LowRankMap(nn.Linear(5, 6, bias=False, dtype=torch.float64), rank=2, spread=0.3)
    model.initialise()
    eye = torch.eye(5, dtype=torch.float64)

    def loss() -> Tensor:
        return (model(eye) - target.T).square().sum() / 2

    alternate(model, loss, lr=0.1, steps=1500)
    with torch.no_grad():
        assert float(loss()) < 1e-8
        with core_alone(model):
            bound = torch.linalg.svdvals(target)[2:].square().sum() / 2
            assert float(loss()) == pytest.approx(float(bound), rel=1e-6)


def test_a_nested_core_on_a_quadratic_ends_where_the_sheet_says() -> None:
    """c = (2 A_cc - A_cw A_ww^-1 A_wc)^-1 (2 b_c - A_cw A_ww^-1 b_w), of the losses' mean; to the step's size."""
    torch.manual_seed(0)
    root = torch.randn(5, 5, dtype=torch.float64) / 4 + torch.eye(5, dtype=torch.float64)
    hessian, linear, c = root @ root.T, torch.randn(5, dtype=torch.float64), 2
    model = FirstColumns(nn.Linear(5, 1, bias=False, dtype=torch.float64), c)
    inputs = torch.linalg.cholesky(hessian).T
    targets = torch.linalg.solve(inputs.T, linear)[:, None]  # so that inputs^T targets = b

    def loss() -> Tensor:
        return (model(inputs) - targets).square().sum() / 2

    alternate(model, loss, lr=0.02, steps=2000)
    cc, cw, ww = hessian[:c, :c], hessian[:c, c:], hessian[c:, c:]
    through = torch.linalg.solve(ww, cw.T).T
    expected = torch.linalg.solve(2 * cc - through @ cw.T, 2 * linear[:c] - through @ linear[c:])
    torch.testing.assert_close(model.weight[0], expected, rtol=0.005, atol=0)


# Who holds what: rounds against an average by hand


def reference(kind: str, rest_every: int) -> list[dict[str, Tensor]]:
    """Plain gradient steps; the core's weights averaged over all four, the rest over the strong ones, as often."""
    models = [joint(kind, rank in WEAK, torch.float64) for rank in range(4)]
    for step in range(STEPS):
        for rank, model in enumerate(models):
            with core_alone(model) if step % 2 == 0 else torch.enable_grad():
                loss_of(model, rank, step).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= LR * parameter.grad
            model.zero_grad()
        if (step + 1) % EVERY == 0:
            states = [dict(model.named_parameters()) for model in models]
            for name, one in states[0].items():
                if name in rest_of(models[0]) and (step + 1) // EVERY % rest_every:
                    continue
                holders = [state[name] for state in states if name in state]
                assert len(holders) == (2 if name in rest_of(models[0]) else 4)
                with torch.no_grad():
                    mean = sum(holder.clone() for holder in holders) / len(holders)
                    for holder in holders:
                        holder.copy_(mean)
                assert one.requires_grad
    return [{name: one.detach() for name, one in model.named_parameters()} for model in models]


@pytest.mark.parametrize(("kind", "rest_every"), [("lowrank2", 1), ("heads4", 1), ("lowrank2", 2)])
def test_rounds_average_each_cell_over_those_who_hold_it(kind: str, rest_every: int) -> None:
    """In float64, but for what travels, which is float32."""

    def work(network: SimulatedNetwork) -> dict[str, Tensor]:
        model = joint(kind, network.rank in WEAK, torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        method = methods.diloco(every=EVERY, outer_lr=1.0, outer_momentum=0.0)
        with method.attach(model, optimizer, network, holders=Holders(WEAK, rest_every)):
            train(model, optimizer, network.rank, range(STEPS))
        return {name: one.detach() for name, one in model.named_parameters()}

    for found, expected in zip(Simulation(4).run(work), reference(kind, rest_every), strict=True):
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            torch.testing.assert_close(found[name], values, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "name"),
    [*((KINDS[0], name) for name in METHODS if "diloco" in name), (KINDS[1], "diloco"), (KINDS[1], "diloco int8")],
)
def test_after_a_round_of_all_a_weak_replica_has_the_strong_ones_core(kind: str, name: str) -> None:
    """Bit for bit, under whatever codec: the round lands with the last step, or when the rounds end."""
    # With a delay, steps that are trained meanwhile are each replica's own, and only anchors are equal.
    work = partial(anchors_of, kind=kind, name=name) if "later" in name else cored.replica(kind, name)
    weights = Simulation(4).run(work)
    core = weights[WEAK[0]]
    for rank, one in enumerate(weights):
        assert (one.keys() > core.keys()) == (rank not in WEAK)
        assert all(torch.equal(one[key], core[key]) for key in core)
    beside = weights[0].keys() - core.keys()
    assert beside and all(torch.equal(weights[0][key], weights[1][key]) for key in beside)


def anchors_of(network: SimulatedNetwork, kind: str, name: str) -> dict[str, Tensor]:
    model = joint(kind, network.rank in WEAK)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with METHODS[name]().attach(model, optimizer, network, holders=Holders(WEAK)) as outer:
        train(model, optimizer, network.rank, range(STEPS))
        outer.apply_pending()
        return {cell: kept["anchor"].clone() for cell, kept in outer.state_dict()["cells"].items()}


def test_pairs_for_the_rest_are_of_those_who_hold_it() -> None:
    """Random pairs of five: the core's change among all, the rest's among the three strong ones, every second time."""

    def work(network: SimulatedNetwork) -> list[tuple[int, int, tuple[int, ...]]]:
        model, told = joint("lowrank2", network.rank >= 3), list[Round]()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        given = {"holders": Holders((3, 4), rest_every=2), "on_round": told.append}
        with methods.noloco(every=1).attach(model, optimizer, network, **given):  # type: ignore[arg-type]
            train(model, optimizer, network.rank, range(12))
        return [(one.fragment, one.started_step, one.group) for one in told]

    seen = Simulation(5).run(work)
    for rank, rounds in enumerate(seen):
        assert [step for fragment, step, _ in rounds if fragment == 0] == list(range(1, 13))
        rest = [(step, group) for fragment, step, group in rounds if fragment == 1]
        assert [step for step, _ in rest] == ([] if rank >= 3 else list(range(2, 13, 2)))
        assert all(set(group) <= {0, 1, 2} for _, group in rest)
    pairs = {group for rounds in seen for fragment, _, group in rounds if fragment == 0 and group}
    assert any(set(pair) & {3, 4} and set(pair) & {0, 1, 2} for pair in pairs)


# What weak replicas never have


@pytest.mark.parametrize("codec", [None, "int8"])
def test_a_weak_replica_sends_and_keeps_never_a_byte_of_the_rest(codec: str | None) -> None:
    """As many bytes as among weak ones alone, and outer and inner state of the core's cells alone."""

    def work(network: SimulatedNetwork, weak: tuple[int, ...]) -> tuple[list[int], int, int, int]:
        model, sent = joint("heads4", network.rank in weak), list[int]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        method = methods.diloco(every=2, codec=codec)

        def note(_: Round) -> None:
            sent.append(network.traffic.bytes_sent + network.traffic.bytes_received)

        with method.attach(model, optimizer, network, holders=Holders(weak), on_round=note) as outer:
            train(model, optimizer, network.rank, range(8))
            cells = outer.state_dict()["cells"]
        values = sum(one.numel() for kept in optimizer.state.values() for one in kept.values())
        kept = sum(one.numel() for cell in cells.values() for one in cell.values() if isinstance(one, Tensor))
        trained = sum(parameter.numel() for parameter in model.parameters())
        return [later - before for before, later in itertools.pairwise(sent)], trained, values, kept

    mixed, alone = (Simulation(4).run(partial(work, weak=weak)) for weak in (WEAK, (0, 1, 2, 3)))
    core = sum(p.numel() for p in joint("heads4", alone=True).parameters())
    assert mixed[3] == alone[3] and mixed[3][1] == core
    assert mixed[3][3] == 2 * core  # its anchor, and the outer momentum
    whole = sum(p.numel() for p in joint("heads4").parameters())
    assert mixed[0][1] == whole and mixed[0][3] == 2 * whole
    assert sum(mixed[0][0]) > sum(mixed[3][0])


# Going on, and real processes


@pytest.mark.parametrize("name", ["diloco in fragments, later", "noloco int4"])
def test_who_goes_on_from_a_saved_state_comes_to_the_same_bits(name: str) -> None:
    at = EVERY + 1

    def work(network: SimulatedNetwork, resumes: bool) -> dict[str, Tensor]:
        def begun() -> tuple[Any, Any]:
            model = joint("lowrank2", network.rank in WEAK)
            return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

        given = {"holders": Holders(WEAK, rest_every=2)}
        model, optimizer = begun()
        with METHODS[name]().attach(model, optimizer, network, **given) as outer:  # type: ignore[arg-type]
            train(model, optimizer, network.rank, range(at))
            if not resumes:
                train(model, optimizer, network.rank, range(at, STEPS))
                outer.finish()
                return {key: one.clone() for key, one in model.state_dict().items()}
            saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), outer.state_dict()])
        model, optimizer = begun()
        with METHODS[name]().attach(model, optimizer, network, **given) as outer:  # type: ignore[arg-type]
            for one, state in zip((model, optimizer, outer), saved, strict=True):
                one.load_state_dict(state)
            train(model, optimizer, network.rank, range(at, STEPS))
        return {key: one.clone() for key, one in model.state_dict().items()}

    through, resumed = (Simulation(4).run(partial(work, resumes=resumes)) for resumes in (False, True))
    assert all(same(one, other) for one, other in zip(through, resumed, strict=True))


@pytest.mark.slow
def test_simulated_replicas_and_those_of_torch_end_with_the_same_bits(tmp_path: Path) -> None:
    names = ["diloco", "noloco int4"]
    real = run_replicas(4, ",".join(names), "", tmp_path, script="cored.py")
    for name in names:
        for rank, weights in enumerate(Simulation(4).run(cored.replica(KINDS[0], name))):
            assert same(weights, real[rank][name])


def test_averaged_weights_are_the_mean_of_those_who_hold_them() -> None:
    """While the run goes on, too; and each replica has its own back afterwards."""

    def work(network: SimulatedNetwork) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = joint("lowrank2", network.rank in WEAK)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        with methods.noloco(every=50).attach(model, optimizer, network, holders=Holders(WEAK)) as outer:
            train(model, optimizer, network.rank, range(3))
            own = {name: one.detach().clone() for name, one in model.named_parameters()}
            with outer.averaged_weights():
                shown = {name: one.detach().clone() for name, one in model.named_parameters()}
            assert same(own, dict(model.named_parameters()))
        return own, shown

    seen = Simulation(4).run(work)
    for _, shown in seen:
        for name, values in shown.items():
            held = [own[name] for own, _ in seen if name in own]
            torch.testing.assert_close(values, sum(held) / len(held), rtol=1e-5, atol=1e-6)


# What cannot be


@pytest.mark.parametrize(
    ("kind", "settings", "what"),
    [
        ("lowrank16", {}, "core must be narrower; choose at most lowrank"),
        ("heads8", {}, "core must be narrower; choose fewer"),
        ("heads3", {}, "do not divide so; choose a multiple of 2"),
        ("heads2", {"intermediate_size": 11}, "11 FFN columns, which do not divide so"),
        ("heads", {}, "give lowrank16 or heads2"),
        ("lowrank0", {}, "give lowrank16 or heads2"),
    ],
)
def test_a_core_that_cannot_be_is_refused_in_a_line(kind: str, settings: dict[str, int], what: str) -> None:
    with pytest.raises(UserError, match=what) as refused:
        core_named(kind).divide(decoder(**settings))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_core_of_a_model_whose_layers_are_not_known_is_refused(kind: str) -> None:
    with pytest.raises(UserError, match="are found in Sequential, so that nothing is known of a core"):
        core_named(kind).divide(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


def test_replicas_that_begin_with_other_cores_are_told_so() -> None:
    def work(network: SimulatedNetwork) -> None:
        model = joint("lowrank2", network.rank in WEAK)
        if network.rank == 3:
            with torch.no_grad():
                model.model.layers[1].mlp.up_proj.enter.weight[0, 0] += 1
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        with METHODS["diloco"]().attach(model, optimizer, network, holders=Holders(WEAK)):
            train(model, optimizer, network.rank, range(1))

    with pytest.raises(RuntimeError, match="starts from other weights"):
        Simulation(4).run(work)


@pytest.mark.parametrize("kind", ["heads4", "lowrank2"])
def test_a_model_that_is_divided_computes_what_it_did_and_what_is_frozen_stays_so(kind: str) -> None:
    """Such as one that was trained before: it had begun with new weights."""
    model = decoder(torch.float64)
    for parameter in model.model.layers[1].mlp.parameters():
        parameter.requires_grad_(False)
    before = loss_of(model, 0, 0).detach()
    core_named(kind).divide(model)
    torch.testing.assert_close(loss_of(model, 0, 0).detach(), before)
    rest = rest_of(model)
    assert not any(
        one.requires_grad for name, one in model.named_parameters() if "layers.1.mlp" in name and name in rest
    )
    assert all(one.requires_grad for name, one in model.named_parameters() if "layers.0.mlp" in name)
