"""Replicas that each train some units of one model, against a whole one that is masked, and against the papers."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import subnet
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import SMALL, run_here, run_replicas, same, same_weights, saved
from safetensors.torch import load_file
from subnet import EVERY, LR, STEPS, decoder, ids, loss_of, train
from torch import Tensor, nn

from farflung import methods
from farflung.errors import UserError
from farflung.networks import Conditions, SimulatedNetwork, Simulation
from farflung.networks.simulator.conditions import Death
from farflung.outer import RandomGroups, Schedule
from farflung.subnets.holdings import Units, first_holdings
from farflung.subnets.parts import Parts
from farflung.subnets.units import KINDS

SHARED = ("embed_tokens", "norm", "lm_head", "o_proj.bias")


# Who holds what


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 99), st.sampled_from([None, 2]))
def test_a_deal_is_a_pure_function_and_gives_each_unit_to_one_and_as_many_to_each(
    replicas: int, each: int, seed: int, size: int | None
) -> None:
    members = tuple(range(replicas))
    holdings = first_holdings([replicas * each, 2 * replicas], members, seed)
    for round in range(3):
        groups = RandomGroups(size, seed).groups(members, str(round)) if size else [members]
        later = holdings.dealt(groups, seed, str(round))
        assert later == holdings.dealt(groups, seed, str(round))
        assert [[len(pool) for pool in later.of(rank)] for rank in members] == [[each, 2]] * replicas
        assert sorted(unit for rank in members for unit in later.of(rank)[0]) == list(range(replicas * each))
        for old, new, gave in zip(holdings.holders[0], later.holders[0], later.givers[0], strict=True):
            assert old == new or (gave == old and any(old in group and new in group for group in groups))
        moved = [holdings.moving(later, one, other)[0] for one in members for other in members if one != other]
        staying = [unit for unit in range(replicas * each) if holdings.holders[0][unit] == later.holders[0][unit]]
        assert sorted(itertools.chain(staying, *moved)) == list(range(replicas * each))
        holdings = later


def test_other_seeds_and_other_rounds_deal_otherwise() -> None:
    first = first_holdings([24], (0, 1, 2), 0)
    deals = [first.dealt([(0, 1, 2)], seed, label).holders for seed, label in itertools.product((0, 1), "ab")]
    assert len({*deals, first.holders}) == 5


def test_units_of_the_lost_go_back_to_those_who_gave_them() -> None:
    holdings = first_holdings([12], (0, 1, 2, 3), 0).dealt([(0, 1, 2, 3)], 0, "round 0")
    left = holdings.among((0, 1, 2))
    for unit, (holder, giver) in enumerate(zip(holdings.holders[0], holdings.givers[0], strict=True)):
        if holder != 3:
            assert left.holders[0][unit] == holder
        elif giver != 3:
            assert left.holders[0][unit] == giver
    assert set(left.holders[0]) <= {0, 1, 2} and left.among((0, 1, 2)) == left


def test_a_deal_moves_what_the_formula_says() -> None:
    """P / N (1 - 1 / N) from each of N among all, half of that among N where pairs deal: a mean over 400 deals."""
    for replicas, size, share in ((4, None, 3 / 4), (4, 2, 1 / 2)):
        members = tuple(range(replicas))
        holdings, moved = first_holdings([40], members, 0), 0
        for round in range(400):
            groups = RandomGroups(size, 0).groups(members, str(round)) if size else [members]
            later = holdings.dealt(groups, 0, str(round))
            moved += sum(old != new for old, new in zip(holdings.holders[0], later.holders[0], strict=True))
            holdings = later
        assert moved / 400 == pytest.approx(40 * share, rel=0.02)


# The narrow model, against the whole one with masks


@contextmanager
def masked(model: Any, kind: str, held: Units) -> Iterator[None]:
    """The whole model, in which what others hold is multiplied by nought."""
    hooks = []

    def keep(units: list[int], width: int) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
            factors = torch.zeros(inputs[0].shape[-1], dtype=inputs[0].dtype)
            for unit in units:
                factors[unit * width : (unit + 1) * width] = 1
            return (inputs[0] * factors,)

        return hook

    blocks = model.model.layers
    for number, block in enumerate(blocks):
        if kind == "heads":
            hooks.append(block.self_attn.o_proj.register_forward_pre_hook(keep(held[number], 8)))
            hooks.append(block.mlp.down_proj.register_forward_pre_hook(keep(held[len(blocks) + number], 1)))
        elif number not in held[0]:
            hooks.append(block.register_forward_hook(lambda _, inputs, __: inputs[0]))
    yield
    for hook in hooks:
        hook.remove()


def positions(kind: str, name: str, held: Units) -> tuple[int, list[int]] | None:
    """The dimension of a parameter of four layers, and the places in it, that some units are; None for shared ones."""
    if any(part in name for part in SHARED) and not (kind == "layers" and ".layers." in name):
        return None
    layer = int(name.split(".")[2])
    if kind == "layers":
        return 0, list(range(1000)) if layer in held[0] else []
    width = {"q_proj": 8, "k_proj": 4, "v_proj": 4, "o_proj": 8}.get(name.split(".")[-2], 1)
    units = held[layer] if "self_attn" in name else held[4 + layer]
    return int("o_proj" in name or "down_proj" in name), [unit * width + n for unit in units for n in range(width)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_narrow_model_computes_what_the_masked_whole_one_does(kind: str) -> None:
    """Logits and gradients, in float64."""
    whole, narrow = decoder(), decoder()
    pools = KINDS[kind](narrow)
    held = first_holdings([pool.units for pool in pools], (0, 1), 5).of(1)
    parts = Parts(narrow, pools, None)
    parts.hold(held)
    with masked(whole, kind, held):
        expected = whole(input_ids=ids(0, 0), use_cache=False).logits
        loss_of(whole, 0, 0).backward()
    torch.testing.assert_close(narrow(input_ids=ids(0, 0), use_cache=False).logits, expected, rtol=0, atol=1e-12)
    loss_of(narrow, 0, 0).backward()
    of_whole = dict(whole.named_parameters())
    for name, parameter in narrow.named_parameters():
        gradient, place = of_whole[name].grad, positions(kind, name, held)
        if place and place[1]:
            there = [n for n in place[1] if n < gradient.shape[place[0]]]
            gradient = gradient.index_select(place[0], torch.tensor(there))
        if place and not place[1]:
            assert parameter.grad is None and parameter.numel() == 0
        else:
            torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-12)


def reference(kind: str, replicas: int, size: int | None) -> list[dict[str, Tensor]]:
    """Whole models of which all but the own units are masked and kept; each replica's at the end, masked."""
    models, members = [decoder() for _ in range(replicas)], tuple(range(replicas))
    counts = [4] * 4 + [12] * 4 if kind == "heads" else [4]
    holdings = first_holdings(counts, members, 0)
    for step in range(STEPS):
        for rank, model in enumerate(models):
            with masked(model, kind, holdings.of(rank)):
                loss_of(model, rank, step).backward()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    own = mine(kind, name, parameter, holdings.of(rank))
                    if parameter.grad is not None:
                        parameter -= LR * parameter.grad * own
            model.zero_grad()
        if (step + 1) % EVERY == 0:
            label = f"round {step // EVERY + 1}"
            topology = RandomGroups(size, 0) if size else None
            groups = topology.groups(members, f"{label} of fragment 0") if topology else [members]
            states = [{name: one.detach().clone() for name, one in model.named_parameters()} for model in models]
            with torch.no_grad():
                for rank, model in enumerate(models):
                    group = next(group for group in groups if rank in group)
                    for name, parameter in model.named_parameters():
                        if positions(kind, name, holdings.of(0)) is None:
                            parameter.copy_(sum(states[one][name] for one in group) / len(group))
                        else:
                            owners = [mine(kind, name, parameter, holdings.of(one)) for one in members]
                            parameter.copy_(sum(states[one][name] * owners[one] for one in members))
            holdings = holdings.dealt(groups, 0, label)
    return [
        {n: one.detach() * mine(kind, n, one, holdings.of(rank)) for n, one in model.named_parameters()}
        for rank, model in enumerate(models)
    ]


def mine(kind: str, name: str, parameter: Tensor, held: Units) -> Tensor:
    """Ones where a replica trains, and noughts elsewhere."""
    if (place := positions(kind, name, held)) is None:
        return torch.ones_like(parameter)
    dim, there = place
    mask = torch.zeros_like(parameter)
    return mask.index_fill(dim, torch.tensor([n for n in there if n < parameter.shape[dim]], dtype=torch.long), 1)


@pytest.mark.parametrize(("kind", "size"), [("heads", None), ("heads", 2), ("layers", None)])
def test_rounds_come_to_what_masked_whole_models_come_to(kind: str, size: int | None) -> None:
    """In float64, but for messages, which are of float32."""
    make = methods.ist if kind == "heads" else methods.resist

    def work(network: SimulatedNetwork) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = decoder()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        with make(every=EVERY, group_size=size).attach(model, optimizer, network) as outer:
            train(model, optimizer, network.rank, range(STEPS))
            during = {name: one.clone() for name, one in model.state_dict().items()}
            with outer.averaged_weights():
                shown = {name: one.clone() for name, one in model.state_dict().items()}
            assert same(during, model.state_dict())
        assert same(during, model.state_dict())
        return during, shown

    seen, expected = Simulation(4).run(work), reference(kind, 4, size)
    for (during, _), reached in zip(seen, expected, strict=True):
        for name, values in reached.items():
            torch.testing.assert_close(during[name], values, rtol=0, atol=1e-7)
    for name, values in seen[0][1].items():
        shared = positions(kind, name, [[]] * 8) is None
        whole = sum(reached[name] for reached in expected) / (4 if shared else 1)
        torch.testing.assert_close(values, whole, rtol=0, atol=1e-7)


# What travels


@pytest.mark.parametrize("size", [None, 2])
def test_a_round_sends_only_the_units_that_change_hands_and_what_all_share(size: int | None) -> None:
    """Four bytes a value; a deal's eight bytes of agreement to each, and among all a sketch of the anchors."""
    members, beside = (0, 1, 2, 3), 8 + (136 if size is None else 0)

    def work(network: SimulatedNetwork) -> list[int]:
        model, sent = decoder(torch.float32), list[int]()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        method = methods.ist(every=1, group_size=size)
        with method.attach(model, optimizer, network, on_round=lambda ended: sent.append(network.traffic.bytes_sent)):
            start = network.traffic.bytes_sent
            train(model, optimizer, network.rank, range(4))
        return [later - before for before, later in itertools.pairwise([start, *sent])]

    shared = sum(p.numel() for n, p in decoder().named_parameters() if positions("heads", n, [[]] * 8) is None)
    of_unit = [(8 + 4 + 4) * (16 + 1) + 16 * 8] * 4 + [3 * 16] * 4  # q, k, v with biases, and o; gate, up, down
    holdings, seen = first_holdings([4] * 4 + [12] * 4, members, 0), Simulation(4).run(work)
    for round in range(1, 5):
        groups = RandomGroups(size, 0).groups(members, f"round {round} of fragment 0") if size else [members]
        later = holdings.dealt(groups, 0, f"round {round}")
        for rank in members if round > 1 else ():  # before the first, replicas compare where they start from
            others = [one for group in groups if rank in group for one in group if one != rank]
            units = sum(
                of_unit[pool] * len(gone) for to in others for pool, gone in enumerate(holdings.moving(later, rank, to))
            )
            mean = 4 * shared * 2 * len(others) // (len(others) + 1)
            assert seen[rank][round - 1] == mean + 4 * units + beside * len(others)
        holdings = later


def test_a_codec_is_for_what_is_averaged_and_units_travel_as_they_are() -> None:
    """Few bits make the shared mean coarse; a unit that nobody trains is, bit for bit, what it was at the start."""

    def work(network: SimulatedNetwork) -> tuple[dict[str, Tensor], int]:
        model = decoder(torch.float32)
        for one, parameter in model.named_parameters():
            parameter.requires_grad_("mlp" not in one)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        with methods.ist(every=EVERY, codec="int8").attach(model, optimizer, network) as outer:
            train(model, optimizer, network.rank, range(STEPS))
            outer.finish(average_weights=True)
        return dict(model.named_parameters()), network.traffic.bytes_sent

    seen, start = Simulation(4).run(work), dict(decoder(torch.float32).named_parameters())
    for weights, _ in seen:
        for name, values in weights.items():
            assert torch.equal(values, seen[0][0][name])
            assert torch.equal(values, start[name]) == ("mlp" in name)


@pytest.mark.slow
def test_simulated_replicas_and_those_of_torch_end_with_the_same_bits(tmp_path: Path) -> None:
    names = list(subnet.METHODS)
    real = run_replicas(4, ",".join(names), "", tmp_path, script="subnet.py")
    for name in names:
        for rank, weights in enumerate(Simulation(4).run(subnet.replica(name))):
            assert same(weights, real[rank][name])


# Going on


@pytest.mark.parametrize("name", ["ist", "ist in pairs", "resist"])
def test_who_goes_on_from_a_saved_state_comes_to_the_same_bits(name: str) -> None:
    at = EVERY + 1

    def work(network: SimulatedNetwork, resumes: bool) -> dict[str, Tensor]:
        def begun() -> tuple[Any, Any]:
            model = decoder(torch.float32)
            return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

        model, optimizer = begun()
        with subnet.METHODS[name]().attach(model, optimizer, network) as outer:
            train(model, optimizer, network.rank, range(at))
            if not resumes:
                train(model, optimizer, network.rank, range(at, STEPS))
                outer.finish()
                return {key: one.clone() for key, one in model.state_dict().items()}
            whole = {key: one.shape for key, one in decoder().state_dict().items()}
            assert {key: one.shape for key, one in model.state_dict().items()} == whole
            saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), outer.state_dict()])
        model, optimizer = begun()
        with subnet.METHODS[name]().attach(model, optimizer, network) as outer:
            for one, state in zip((model, optimizer, outer), saved, strict=True):
                one.load_state_dict(state)
            train(model, optimizer, network.rank, range(at, STEPS))
        return {key: one.clone() for key, one in model.state_dict().items()}

    through, resumed = (Simulation(4).run(partial(work, resumes=resumes)) for resumes in (False, True))
    assert all(same(one, other) for one, other in zip(through, resumed, strict=True))


def test_spoilt_steps_do_not_travel() -> None:
    """A replica whose units become NaN gives what it had at the last round."""

    def work(network: SimulatedNetwork) -> dict[str, Tensor]:
        model = decoder(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        with methods.ist(every=EVERY).attach(model, optimizer, network) as outer:
            train(model, optimizer, network.rank, range(EVERY + 1))
            if network.rank == 2:
                with torch.no_grad():
                    model.model.layers[1].mlp.up_proj.weight.fill_(float("nan"))
            train(model, optimizer, network.rank, range(EVERY + 1, STEPS))
            outer.finish(average_weights=True)
        return dict(model.named_parameters())

    for weights in Simulation(4).run(work):
        assert all(bool(one.isfinite().all()) for one in weights.values())


@pytest.mark.parametrize("at_s", [0.33, 0.35, 0.45])
def test_a_lost_replica_takes_no_units_with_it(at_s: float) -> None:
    """Those who gave them have them still, whether it dies in a round or between two."""

    def work(network: SimulatedNetwork) -> tuple[dict[str, Tensor], int]:
        model = decoder(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        with methods.ist(every=EVERY).attach(model, optimizer, network) as outer:
            train(model, optimizer, network.rank, range(STEPS))
        return dict(model.named_parameters()), outer.rounds

    conditions = Conditions(step_ms=100, deaths=(Death(3, at_s),))
    seen = [one for one in Simulation(4, conditions).run(work) if one is not None]
    assert len(seen) == 3 and all(rounds >= 2 for _, rounds in seen)
    for name in seen[0][0]:
        if positions("heads", name, [[]] * 8) is not None:
            held = torch.stack([weights[name] != 0 for weights, _ in seen]).sum(0)
            assert bool((held == 1).all()), name


@pytest.mark.parametrize("name", ["ist", "resist"])
@pytest.mark.parametrize("at_s", [0.35, 0.65, 0.8])
def test_what_is_averaged_after_a_loss_is_the_whole_model_all_the_same(name: str, at_s: float) -> None:
    """Before the next round as well as at the end; each unit is as its holder, or who has a copy, knows it."""

    def whole(model: nn.Module) -> dict[str, Tensor]:
        return {key: values.detach().clone() for key, values in model.named_parameters()}

    def work(network: SimulatedNetwork) -> list[dict[str, Tensor]]:
        model, seen = decoder(torch.float32), []
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        with subnet.METHODS[name]().attach(model, optimizer, network) as outer:
            for step in range(STEPS):
                train(model, optimizer, network.rank, range(step, step + 1))
                if step % EVERY == 1:
                    before = whole(model)
                    with outer.averaged_weights():
                        seen.append(whole(model))
                    assert same(before, whole(model))
            outer.finish(average_weights=True)
        return [*seen, whole(model)]

    seen = Simulation(4, Conditions(step_ms=100, deaths=(Death(3, at_s),))).run(work)
    left = [one for one in seen if one is not None]
    assert len(left) == 3
    for told in zip(*left, strict=True):
        assert same(told[0], told[1]) and same(told[0], told[2])
        for key, values in told[0].items():
            if positions("heads", key, [[]] * 8) is not None:
                begun = decoder(torch.float32).get_parameter(key).detach()
                assert bool((values != 0).all()), key
                assert 0.5 < float(values.norm() / begun.norm()) < 2, key


# Theory (arXiv 2306.16484), with the replicas' deals


@pytest.mark.parametrize("bias", [False, True])
def test_each_step_of_dealt_coordinates_is_what_the_theorems_say(bias: bool) -> None:
    """Quadratics x L_i x / 2 - b_i x, of n replicas in n dimensions, sketched by sqrt(n) L_ii^-1/2 e e^T.

    Without b each x shrinks by 1 - step whatever was dealt; with it, the mean over all deals goes on towards
    sum of D_i^-1/2 b_i / (n sqrt n).
    """
    n, step, random = 3, 0.4, np.random.default_rng(0)
    roots = random.normal(size=(n, n, n))
    hessians = [root @ root.T + np.eye(n) for root in roots]
    biases = random.normal(size=(n, n)) * bias
    limit = sum(b / np.sqrt(np.diag(L)) for L, b in zip(hessians, biases, strict=True)) / (n * np.sqrt(n))

    def stepped(x: np.ndarray, holders: tuple[int, ...]) -> np.ndarray:
        total = np.zeros(n)
        for unit, rank in enumerate(holders):
            sketch = np.zeros((n, n))
            sketch[unit, unit] = np.sqrt(n) / np.sqrt(hessians[rank][unit, unit])
            total += sketch @ (hessians[rank] @ sketch @ x - biases[rank])
        return x - step * total / n

    start, members = random.normal(size=n), tuple(range(n))
    deals = {first_holdings([n], members, seed).holders[0] for seed in range(100)}
    assert deals == set(itertools.permutations(members))
    now = {(): start}
    for k in range(1, 4):
        now = {(*past, deal): stepped(x, deal) for past, x in now.items() for deal in deals}
        expected = (1 - step) ** k * start + (1 - (1 - step) ** k) * limit
        np.testing.assert_allclose(np.mean(list(now.values()), axis=0), expected, atol=1e-12)
        assert bias or all(np.allclose(x, expected, atol=1e-12) for x in now.values())


def test_local_convergence_on_a_quadratic_ends_where_the_sheet_says() -> None:
    """L = (1 - rho) I + rho 11^T, of which 1 is the optimum: units end at (1 + (d-1) rho) / (1 + (q-1) rho)."""
    rho, n, q = 0.3, 4, 5
    d = n * q
    hessian = (1 - rho) * np.eye(d) + rho
    x, holdings = np.zeros(d), first_holdings([d], tuple(range(n)), 0)
    for round in range(5):
        holdings = holdings.dealt([tuple(range(n))], 0, str(round))
        for rank in range(n):
            own = holdings.of(rank)[0]
            x[own] = np.linalg.solve(hessian[np.ix_(own, own)], hessian[own].sum(1))
    np.testing.assert_allclose(x, (1 + (d - 1) * rho) / (1 + (q - 1) * rho), rtol=1e-12)


# As a method of a run


def test_a_run_is_resumed_assembled_and_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twelve steps at once, and six and six; each replica is judged by what it holds, and all of them by the whole."""
    given = ["train", *SMALL, "--network", "simulated", "--replicas", "2", "--method", "ist", "--every", "4"]
    for steps in (["--steps", "12", "--out", "once"], ["--steps", "6", "--out", "twice"]):
        assert run_here(monkeypatch, tmp_path, *given, *steps, "--lr-schedule", "stable") == 0
    assert run_here(monkeypatch, tmp_path, "export", "twice", "middle") == 0
    assert run_here(monkeypatch, tmp_path, "train", "--resume", "twice", "--steps", "12") == 0
    assert same_weights(tmp_path / "once", tmp_path / "twice", 12)
    summary = json.loads((tmp_path / "once" / "summary.json").read_text())
    assert summary["branch_scale"] in [2 ** (step / 4 - 1) for step in range(5)]
    whole = sum(saved(tmp_path / "once", 12, rank)["model"]["model.layers.0.mlp.up_proj.weight"] for rank in (0, 1))
    assert run_here(monkeypatch, tmp_path, "export", "once", "whole") == 0
    exported = load_file(tmp_path / "whole" / "model.safetensors")
    assert torch.equal(exported["model.layers.0.mlp.up_proj.weight"], whole)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--method", "ist", "--replicas", "3"], "has 4 KV heads, which 3 replicas cannot share evenly"),
        (["--method", "resist", "--replicas", "4"], "has 2 layers, which 4 replicas cannot share evenly"),
        (["--method", "ist", "--tail-average", "0.5"], "leave out --tail-average"),
        (["--method", "ist", "--batched-replicas"], "leave out --batched-replicas"),
        (["--method", "ist", "--delay", "1"], "ist has no setting delay"),
    ],
)
def test_what_cannot_be_dealt_is_refused_in_a_line(
    flags: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_here(monkeypatch, tmp_path, "train", *SMALL, "--network", "simulated", "--out", "run", *flags) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line and not (tmp_path / "run").exists()


def across_heads() -> Any:
    model = decoder()
    model.model.layers[2].self_attn.q_norm = nn.LayerNorm(32)
    return model


def with_one_weight_for_two_layers() -> Any:
    model = decoder()
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    return model


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "no units are found in Sequential"),
        (across_heads, "its q_norm.weight is of all of them together"),
        (with_one_weight_for_two_layers, r"layers\.0\.mlp\.up_proj\.weight is the weight of another module, too"),
        (lambda: decoder(intermediate_size=14), "has 14 FFN columns, which 4 replicas cannot share evenly"),
    ],
)
def test_models_without_such_units_are_refused_at_attach(model: Any, told: str) -> None:
    def work(network: SimulatedNetwork) -> None:
        own = model()
        with pytest.raises(UserError, match=told):
            methods.ist().attach(own, torch.optim.SGD(own.parameters(), lr=LR), network)

    Simulation(4).run(work)


def test_methods_that_cannot_deal_are_refused() -> None:
    model, network = decoder(), SimulatedNetwork.alone()
    overlapped = replace(methods.ist(), schedule=Schedule(every=4, delay=2))
    with pytest.raises(UserError, match="leave that out"):
        overlapped.attach(model, torch.optim.SGD(model.parameters(), lr=LR), network)
    with pytest.raises(UserError, match="on the internet use noloco"):
        methods.ist().check_elastic()


# What users bring


def warm(model: Any) -> torch.optim.Optimizer:
    """An optimizer that has trained the whole model before it is attached."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    train(model, optimizer, 0, range(1))
    optimizer.param_groups[0]["lr"] = 1e-2
    return optimizer


OPTIMIZERS: dict[str, Any] = {
    "warm": warm,
    "with state from the start": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", ["ist", "resist"])
def test_moments_of_whole_matrices_from_before_are_left_behind(name: str, kind: str) -> None:
    def work(network: SimulatedNetwork, cleared: bool) -> dict[str, Tensor]:
        model = decoder(torch.float32)
        optimizer = OPTIMIZERS[kind](model)
        if cleared:
            for parameter in [
                one for key, one in model.named_parameters() if re.search(r"_proj\.", key) and "o_proj.bias" not in key
            ]:
                optimizer.state.pop(parameter)
        with subnet.METHODS[name]().attach(model, optimizer, network):
            train(model, optimizer, network.rank, range(STEPS))
        return {key: values.clone() for key, values in model.state_dict().items()}

    found, anew = (Simulation(2).run(partial(work, cleared=cleared)) for cleared in (False, True))
    if name == "ist":
        assert all(same(one, other) for one, other in zip(found, anew, strict=True))
    assert all(values.isfinite().all() for one in found for values in one.values())


def test_layers_with_frozen_weights_are_refused_at_attach() -> None:
    model = decoder(torch.float32)
    for parameter in model.model.layers[1].self_attn.parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    with pytest.raises(UserError, match=r"layers\.1\.self_attn\.\S+ is frozen") as error:
        subnet.METHODS["resist"]().attach(model, optimizer, SimulatedNetwork.alone())
    assert "\n" not in str(error.value)


def test_more_replicas_than_a_state_is_of_are_told_so() -> None:
    def begun(network: SimulatedNetwork) -> tuple[Any, torch.optim.Optimizer, Any]:
        model = decoder(torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, subnet.METHODS["ist"]().attach(model, optimizer, network)

    def saved(network: SimulatedNetwork) -> dict[str, Any]:
        model, optimizer, attached = begun(network)
        with attached as outer:
            train(model, optimizer, network.rank, range(EVERY))
            return copy.deepcopy(outer.state_dict())

    states = Simulation(2).run(saved)

    def resumed(network: SimulatedNetwork) -> str:
        with begun(network)[2] as outer:
            with pytest.raises(UserError) as error:
                outer.load_state_dict(states[network.rank % 2])
            return str(error.value)

    told = "this state is of replicas 0, 1, whose units nobody has dealt to replica 2, 3; go on with as many replicas"
    assert Simulation(4).run(resumed) == [told] * 4
