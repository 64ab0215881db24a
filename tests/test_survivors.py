"""Those who are left at the end of a run agree on who they are, whoever is lost on the way."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import patience
from problem import flat, inner_steps, small_model
from processes import SMALL, free_port, run_replicas, same, saved
from warm import Python

from farflung import methods
from farflung.methods import Method
from farflung.networks import Conditions, Group, PeerLostError, SimulatedNetwork, Simulation
from farflung.networks.membership import among_survivors, connected
from farflung.networks.simulator.conditions import Cut, Death
from farflung.outer import Round
from farflung.training import checkpoint


class CrashedError(Exception):
    """A process that was killed."""


class Mortal:
    """A network whose process is killed after so many exchanges, and that cannot reach some of the others."""

    def __init__(self, network: SimulatedNetwork, lives: int | None, unreachable: set[int]) -> None:
        self._network, self._left, self._unreachable = network, lives, unreachable

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def exchange(self, packet: torch.Tensor, group: Group, key: str) -> Any:
        if self._left == 0:
            raise CrashedError
        self._left = None if self._left is None else self._left - 1
        if self._unreachable & set(group):
            # As over a broken connection: neither side hears of the other under any key.
            return self._network.exchange(packet, group, f"{key}, to {self._network.rank}")
        return self._network.exchange(packet, group, key)


def ends(replicas: int, lives: dict[int, int], broken: set[frozenset[int]]) -> list[Any]:
    """What each replica ends with: the group and the sum of its members' numbers; None if it crashed or was left out"""

    def work(network: SimulatedNetwork) -> Any:
        unreachable = {rank for pair in broken if network.rank in pair for rank in pair - {network.rank}}
        mortal: Any = Mortal(network, lives.get(network.rank), unreachable)
        attempts = 0

        def total(group: Group) -> int:
            """Every member's number, pair by pair, so that one who is killed may have been heard by some."""
            nonlocal attempts
            attempts += 1
            number = torch.tensor([1 << network.rank], dtype=torch.uint8)
            pairs = [tuple(sorted((network.rank, other))) for other in group if other != network.rank]
            pending = [mortal.exchange(number, pair, f"work {attempts} of {group}") for pair in pairs]
            return (1 << network.rank) + sum(
                int(packet) for pair in pending for rank, packet in pair.wait(60.0).items() if rank != network.rank
            )

        try:
            return among_survivors(mortal, lambda group: group, total, 60.0)
        except (CrashedError, PeerLostError):
            return None

    return Simulation(replicas).run(work)


def test_without_losses_all_end_together() -> None:
    assert ends(3, {}, set()) == [((0, 1, 2), 7)] * 3


@settings(max_examples=60)
@given(st.data())
def test_whenever_one_is_killed_the_rest_end_alike(data: st.DataObject) -> None:
    replicas = data.draw(st.integers(2, 4))
    victim = data.draw(st.integers(0, replicas - 1))
    moment = data.draw(st.integers(0, 7 * (replicas - 1)))
    ended = ends(replicas, {victim: moment}, set())
    rest = [end for rank, end in enumerate(ended) if rank != victim]
    (group, total), *others = rest
    assert others == [(group, total)] * len(others)
    assert total == sum(1 << rank for rank in group)
    assert set(group) >= set(range(replicas)) - {victim}
    if moment == 0:
        assert victim not in group


def test_after_a_death_in_a_simulation_the_rest_end_together() -> None:
    """There, nobody comes twice under one key: each pair that sees who is left has one of its own."""

    def work(network: SimulatedNetwork) -> Group:
        while network.now() < 1.0:
            network.computed()
        return among_survivors(network, lambda group: group, lambda group: None, 60.0)[0]

    conditions = Conditions(step_ms=100, deaths=(Death(3, 0.35),))
    assert Simulation(4, conditions).run(work)[:3] == [(0, 1, 2)] * 3


def test_two_that_are_killed_before_the_end_are_left_out() -> None:
    assert ends(4, {0: 0, 2: 0}, set()) == [None, ((1, 3), 10), None, ((1, 3), 10)]


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ({frozenset({1, 2})}, [((0, 1), 3)] * 2 + [None]),  # who is left out knows it, from replica 0
        ({frozenset({0, 2}), frozenset({1, 2})}, [((0, 1), 3)] * 2 + [((2,), 4)]),
    ],
)
def test_broken_connections_part_them_alike(broken: set[frozenset[int]], expected: list[Any]) -> None:
    assert ends(3, {}, broken) == expected


def test_who_reaches_the_fewest_is_left_out() -> None:
    assert connected({0: {0, 1}, 1: {0, 1, 2, 3}, 2: {1, 2, 3}, 3: {1, 2, 3}}) == (1, 2, 3)
    assert connected({0: {0, 1}, 1: {1}}) == (0,)
    assert connected({4: {4}}) == (4,)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "of_each"), [("dies", [0, 1, 2]), ("dies in an island", [0, 2])])
def test_who_is_left_of_a_loop_of_ones_own_averages_among_themselves(
    case: str, of_each: list[int], tmp_path: Path
) -> None:
    seen = run_replicas(4, case, "", tmp_path, may_die=frozenset({3}), script="torch_mishap.py")
    left, lost = [told[case] for told in seen[:3]], "3" if case == "dies" else "2"
    for _, ended, _ in left:
        for name in left[0][0]:
            expected = torch.stack([left[process][0][name] for process in of_each]).mean(0)
            torch.testing.assert_close(ended[name], expected)
        if "seen" in ended:
            torch.testing.assert_close(ended["seen"], torch.ones(2))
    assert left[0][2] == f"replica 0 averages without those that are lost: {lost}\n"


@pytest.mark.slow
def test_nobody_waits_for_a_replica_with_fewer_batches(tmp_path: Path) -> None:
    seen = run_replicas(4, "fewer", "", tmp_path, script="torch_mishap.py")
    for name in ("pairs", "pairs, delayed", "everyone", "everyone, delayed", "fragments"):
        told = [one["fewer"][name] for one in seen]
        assert all(same(told[0][2], weights) for _, _, weights in told), name
        for rounds, _, _ in told[:3]:
            lost = [round for round in rounds if round[2] != "averaged"]
            assert all("replica 3 has ended its rounds" in reason and 3 in group for _, group, _, reason in lost), lost
            if "everyone" in name:
                assert len(lost) == 1 and rounds[-1][1] == (0, 1, 2), rounds
    for one in seen[:3]:
        rounds, error, _ = one["fewer"]["gradients"]
        assert len(rounds) == 5 and error == "replica 3 has ended its rounds"


@pytest.mark.parametrize("method", [methods.diloco, methods.noloco], ids=["diloco", "noloco"])
@pytest.mark.parametrize("fewer", [20, 29])
def test_simulated_replicas_wait_no_deadline_for_one_with_fewer_batches(
    method: Callable[..., Method], fewer: int
) -> None:
    def work(network: SimulatedNetwork) -> list[Round]:
        model, rounds = small_model(), list[Round]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with method(every=10).attach(model, optimizer, network, on_round=rounds.append) as outer:
            inner_steps(model, optimizer, network.rank, range(fewer if network.rank == 2 else 60))
            outer.finish(average_weights=True)
        return rounds

    for rounds in Simulation(3, Conditions(step_ms=100)).run(work):
        assert max(round.landed - round.waited_from for round in rounds) < 5
        assert sum(round.lost for round in rounds) < 3


def test_at_the_end_nobody_waits_for_one_that_came_there_while_they_were_cut_off() -> None:
    """Replica 0 has fewer batches, and ends while 3 is cut off: it does not count on 3, which need not wait for it."""

    def work(network: SimulatedNetwork) -> tuple[float, torch.Tensor, str]:
        model, lost = small_model(), ""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with methods.diloco(every=10).attach(model, optimizer, network) as outer:
            inner_steps(model, optimizer, network.rank, range(30 if network.rank == 0 else 100))
            try:
                outer.finish(average_weights=True)
            except PeerLostError as error:
                lost = str(error)
        return network.now(), flat(model), lost

    slow = Conditions(step_ms=100, bandwidth_mbps=8 * flat(small_model()).nbytes / 1e6, cuts=(Cut((3,), 0.5, 9.0),))
    *together, (ended, _, lost) = Simulation(4, slow).run(work)
    assert lost == "lost 3 of (0, 1, 2, 3), so the rest end without us" and ended < 60
    assert all(torch.equal(weights, together[0][1]) and ended < 60 and not lost for ended, weights, lost in together)


MORTAL = """
import os, signal, sys
from farflung import cli
from farflung.training.trainer import Trainer
original, victim = Trainer._train_step, sys.argv[1]
def step(self, outer):
    original(self, outer)
    if self.step == 8 and os.environ["RANK"] == victim:
        os.kill(os.getpid(), signal.SIGKILL)
Trainer._train_step = step
sys.argv = ["farflung", *sys.argv[2:]]
cli.main()
"""


def train(folder: Path, processes: int, victim: int, *arguments: object) -> list[tuple[int, str]]:
    """Trains on as many machines as processes, one of which is killed after step 8; how each ended, and its words."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        Python(
            *("-c", MORTAL, str(victim), "train", *SMALL, "--steps", 20, *arguments, "--out", folder / str(rank)),
            **common,
            RANK=str(rank),
            GROUP_RANK=str(rank),
            WORLD_SIZE=str(processes),
        )
        for rank in range(processes)
    ]
    try:
        return [(process.wait(patience(100)), "".join(process.communicate())) for process in started]
    finally:
        for process in started:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(("method", "processes", "victim"), [("noloco", 3, 2), ("diloco", 2, 1)])
def test_when_a_replica_is_killed_the_others_end_the_run(
    tmp_path: Path, method: str, processes: int, victim: int
) -> None:
    ended = train(tmp_path, processes, victim, "--method", method, "--every", "5")
    living = [rank for rank in range(processes) if rank != victim]
    final = [saved(tmp_path / str(rank), 20, rank)["model"] for rank in living]
    for rank in living:
        code, said = ended[rank]
        assert code == 0 and f"replicas lost: {victim}" in said and "a sample from the trained model" in said, said
        summary = json.loads((tmp_path / str(rank) / "summary.json").read_text())
        assert summary["missing"] == [victim] and len(summary["validation_loss_per_replica"]) == len(living)
        averaged = checkpoint.read(checkpoint.average_of(tmp_path / str(rank)))["model"]
        assert averaged.keys() == final[0].keys()
        for name, weight in averaged.items():
            torch.testing.assert_close(weight, torch.stack([weights[name] for weights in final]).mean(0))


@pytest.mark.slow
@pytest.mark.parametrize(("method", "processes"), [("ist", 4), ("resist", 2)])
def test_units_of_a_replica_that_is_killed_are_in_the_whole_model(tmp_path: Path, method: str, processes: int) -> None:
    """As they were when it got them: among processes the dead stay members, so that no round gives its units back."""
    ended = train(tmp_path, processes, processes - 1, "--method", method, "--every", "5")
    for rank in range(processes - 1):
        code, said = ended[rank]
        assert code == 0 and f"replicas lost: {processes - 1}" in said, said
        whole = checkpoint.read(checkpoint.average_of(tmp_path / str(rank)))["model"]
        for name, weights in whole.items():
            if "_proj" in name:
                assert bool((weights.flatten(1) != 0).any(1).all() and (weights != 0).any(0).all()), name


@pytest.mark.slow
def test_an_island_that_has_lost_a_process_is_left_out_as_a_whole(tmp_path: Path) -> None:
    ended = train(tmp_path, 4, 3, "--every", "5", "--stages", "2", "--microbatches", "2", "--deadline", "20")
    assert [code for code, _ in ended[:2]] == [0, 0] and ended[2][0] == 1, ended
    for rank in (0, 1):
        summary = json.loads((tmp_path / str(rank) / "summary.json").read_text())
        assert summary["missing"] == [1] and len(summary["validation_loss_per_replica"]) == 1


@pytest.mark.slow
def test_a_method_that_needs_all_replicas_stops_when_one_is_killed(tmp_path: Path) -> None:
    (code, said), _ = train(tmp_path, 2, 1, "--method", "ddp")
    assert code == 1 and "lost replica 1" in said and "farflung train --resume" in said
    assert not (tmp_path / "0" / "summary.json").exists()
