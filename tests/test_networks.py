"""The network contract, on all networks; and what only one of them has."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from internet import run_peers
from patience import patience
from problem import replica
from processes import HERE, run_replicas, run_together
from torch_replica import METHODS, SHORT, contract

from farflung import methods
from farflung.networks import NETWORKS, Conditions, NetworkKind, PeerLostError, SimulatedNetwork, Simulation
from farflung.outer import bundles
from farflung.testing.hosts import torch_rendezvous


def observe_simulated(network: SimulatedNetwork) -> Any:
    return contract(network, "")  # type: ignore[arg-type]


def observe(kind: NetworkKind, folder: Path) -> list[Any]:
    if kind.simulate:
        return kind.simulate(4, Conditions()).run(observe_simulated)
    return (run_peers if kind.elastic else run_replicas)(4, "contract", "", folder)


# What is sent through a folder is counted as the store has it; test_folder.py compares its exchanges with a reference.
@pytest.mark.parametrize("name", sorted(NETWORKS.keys() - {"folder"}))
def test_contract(name: str, tmp_path: Path) -> None:
    kind = NETWORKS[name]
    seen = observe(kind, tmp_path)
    for rank, observed in enumerate(seen):
        assert observed["elastic"] == kind.elastic
        assert observed["processes"] in ((), (0, 1, 2, 3))
        assert observed["alone"] and observed["attachments"] == [0, 1, 2]
        # Those who have left the simulation meanwhile are named alone; on real networks, all who have not come.
        for lost in (observed["lost"], observed["lost when dealt"]):
            assert set(lost) <= {0, 1, 2, 3} - {rank} and lost
        assert observed["packets"] == {peer: [peer] * (peer + 1) for peer in range(4)}
        assert observed["mean"] == [2.5 * i for i in range(10)]
        assert observed["in_place"] and observed["done"] and observed["empty"] == 0
        assert observed["pair_mean"] == [0.5 if rank < 2 else 2.5]
        # Each combines what the others sent to it: 10 times their rank and its own; and all get all of that.
        assert observed["relayed"] == {p: [p, *(10 * other + p for other in range(4) if other != p)] for p in range(4)}
        # Each has the packet that another made for it, of as many bytes as its own place asks for, and not its own.
        others = [other for other in range(4) if other != rank]
        assert observed["dealt"] == {other: [10 * other + rank] * (rank + 1) for other in others}
        assert list(observed["dealt"]) == others and observed["dealt_alone"] == {}
        # 10 floats among four: a replica sends its three other parts, then its own to three; and a pair swaps a tensor.
        assert 2_800_004 <= observed["sent"] <= 2_800_004 + 300
    assert sum(o["sent"] for o in seen) == sum(o["received"] for o in seen)


@pytest.mark.slow
def test_a_package_adds_a_network_by_an_entry_point(tmp_path: Path) -> None:
    about = tmp_path / "theirs-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: theirs\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[farflung.networks]\npigeons = theirs:KIND\n")
    (tmp_path / "theirs.py").write_text(
        "from farflung.networks import NetworkKind, SimulatedNetwork, Simulation\n"
        "class Pigeons(SimulatedNetwork):\n    pass\n"
        "KIND = NetworkKind(lambda starting, deadline: Pigeons(Simulation(1), 0))\n"
    )
    (tmp_path / "opens.py").write_text("from farflung import networks\nprint(type(networks.from_env()).__name__)\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    opened = subprocess.run(
        [sys.executable, tmp_path / "opens.py"],
        env={**os.environ, "PYTHONPATH": path, "FARFLUNG_NETWORK": "pigeons"},
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    assert opened.stdout == "Pigeons\n", opened.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What four real processes end with, by method."""
    return run_replicas(4, "train", ",".join(METHODS), tmp_path_factory.mktemp("trained"))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_simulated_and_torch_give_the_same_weights_bit_for_bit(
    method: str, trained: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "STRIP", SHORT)
    simulated = [result.weights for result in Simulation(4).run(replica(METHODS[method], steps=12))]
    real = [weights[method] for weights in trained]
    for rank in range(4):
        assert torch.equal(simulated[rank], real[rank]), rank
    if method.startswith("noloco"):
        assert not torch.equal(real[0], real[1])


def test_who_ends_at_once_leaves_no_other_waiting_to_join() -> None:
    """The first process has the store, in which replicas leave each other words."""
    run_together(2, HERE / "early_leaver.py")


def test_seats_that_there_are_not_are_refused_in_a_line(tmp_path: Path) -> None:
    own = "process 0 is none of {}; name it there, or leave this out in processes that take no part"
    unknown = "process {} is none of the 3 that have joined; give ranks from 0 to 2"
    twice = "process 1 is given twice, but it has one seat; name each process once"
    assert run_replicas(3, "refused", "", tmp_path)[0] == {
        "in no island": own.format("1, 2"),
        "no islands": own.format("no processes"),
        "in two islands": twice,
        "an empty island": "replica 1 is an island without processes; give each replica at least one",
        "unknown island": unknown.format(5),
        "not among": own.format("1"),
        "among none": own.format("no processes"),
        "unknown among": unknown.format(7),
        "twice among": twice,
    }


@pytest.mark.slow
def test_a_late_peer_costs_one_deadline_and_the_network_stays_whole(tmp_path: Path) -> None:
    (first, after_first), (second, after_second) = run_replicas(2, "late", "", tmp_path)
    assert first.startswith("(1,) replica 1 (") and "did not deliver within 1 s" in first and second == "delivered"
    assert after_first == after_second == [0.5]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["open", "destroyed"])
def test_a_process_that_waits_in_vain_for_another_ends_well(how: str, tmp_path: Path) -> None:
    common = {**os.environ, **torch_rendezvous(2), "GLOO_SOCKET_IFNAME": "lo"}
    script = [sys.executable, HERE / "torch_last_words.py", how, tmp_path]  # forks are not torn down as these are
    processes = [
        subprocess.Popen(script, env={**common, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    told = [process.communicate(timeout=patience(60))[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], told


@pytest.mark.slow
def test_a_wait_in_slices_names_all_who_are_late_and_ends_with_what_came_or_why_it_never_will(tmp_path: Path) -> None:
    first, second, third, fourth = run_replicas(4, "deadlines", "", tmp_path, may_die=frozenset({3}))
    assert fourth is None
    assert "replica 1 (" not in first["late"] and "replica 2 (" in first["late"] and "replica 3 (" in first["late"]
    assert first["late"].endswith("they are running and can be reached, or raise the deadline")
    for seen in (first, second, third):
        assert seen["packets"] == {rank: [rank] * (rank + 1) for rank in range(4)}
    # Who calls with the same key and something else is no partner; it must not end the process, nor what comes after.
    for seen, other in ((first, 1), (second, 0)):
        assert all(f"replica {other} (" in told and "did not deliver" in told for told in seen["unequal"])
        assert seen["after"] == [1.0] * 3
    assert first["dead"].startswith("lost replica 3 (")


@pytest.mark.slow
def test_a_partner_that_dies_costs_its_peer_one_average_each_time_and_never_the_run(tmp_path: Path) -> None:
    seen = run_replicas(4, "death", "", tmp_path, may_die=frozenset({2}))
    assert seen[2] is None
    lost = [(rank, round) for rank in (0, 1, 3) for round in seen[rank] if 2 in round[1] and round[0] > 1]
    assert lost, "somebody must have been paired with the dead one"
    for rank in (0, 1, 3):
        assert [round[0] for round in seen[rank]] == [1, 2, 3]
        for number, group, outcome, reason in seen[rank]:
            met_the_dead = 2 in group and number > 1
            assert outcome == ("peer lost" if met_the_dead else "averaged")
            assert ("replica 2 (" in reason) == met_the_dead


def test_a_simulated_partner_that_leaves_costs_one_average_each_time() -> None:
    def work(network: SimulatedNetwork) -> Any:
        return replica(lambda: methods.noloco(every=4), steps=6 if network.rank == 2 else 12)(network).rounds

    seen = Simulation(4).run(work)
    outcomes = {(r.round, 2 in r.group): r.outcome for rank in (0, 1, 3) for r in seen[rank]}
    assert {outcome for (number, met), outcome in outcomes.items() if met and number > 1} == {"peer lost"}
    assert {outcome for (number, met), outcome in outcomes.items() if not met or number == 1} == {"averaged"}


def test_the_virtual_clock_follows_the_conditions() -> None:
    def work(network: SimulatedNetwork) -> tuple[float, float, float]:
        for _ in range(10 * (network.rank + 1)):
            network.advance()
        pending = network.exchange(torch.zeros(1_000_000, dtype=torch.uint8), (0, 1), "x")
        pending.wait(100)
        return pending.finished_at, network.now(), network.traffic.seconds_blocked

    seen = Simulation(2, Conditions(bandwidth_mbps=8, latency_ms=50, step_ms=100)).run(work)
    # Replica 1 begins to send at 2 s; a megabyte takes 1 s at 8 Mbit/s, and 50 ms to arrive.
    assert [(round(f, 6), round(now, 6), round(blocked, 6)) for f, now, blocked in seen] == [
        (3.05, 3.05, 2.05),
        (3.05, 3.05, 1.05),
    ]


def test_a_relay_takes_two_sendings_and_two_latencies() -> None:
    def work(network: SimulatedNetwork) -> tuple[float, int, int]:
        others = [rank for rank in range(3) if rank != network.rank]
        packets = dict.fromkeys(others, torch.zeros(500_000, dtype=torch.uint8))
        pending = network.scatter_combine_gather(
            packets, (0, 1, 2), "x", lambda received: torch.zeros(250_000, dtype=torch.uint8)
        )
        pending.wait(100)
        return round(pending.finished_at, 6), network.traffic.bytes_sent, network.traffic.bytes_received

    # Two packets of half a megabyte take 1 s at 8 Mbit/s; two of a quarter, half a second more.
    seen = Simulation(3, Conditions(bandwidth_mbps=8, latency_ms=50)).run(work)
    assert seen == [(1.6, 1_500_000, 1_500_000)] * 3


def test_what_is_dealt_takes_as_long_as_the_fullest_link() -> None:
    sizes = {0: {1: 500_000, 2: 500_000}, 1: {0: 100_000, 2: 0}, 2: {0: 100_000, 1: 250_000}}

    def work(network: SimulatedNetwork) -> tuple[float, int, int]:
        packets = {to: torch.zeros(size, dtype=torch.uint8) for to, size in sizes[network.rank].items()}
        pending = network.all_to_all(packets, (0, 1, 2), "x")
        received = {sender: packet.numel() for sender, packet in pending.wait(100).items()}
        assert received == {sender: to[network.rank] for sender, to in sizes.items() if sender != network.rank}
        return round(pending.finished_at, 6), network.traffic.bytes_sent, network.traffic.bytes_received

    # Replica 0 sends a megabyte, 1 s at 8 Mbit/s, and 50 ms to arrive.
    assert Simulation(3, Conditions(bandwidth_mbps=8, latency_ms=50)).run(work) == [
        (1.05, 1_000_000, 200_000),
        (1.05, 100_000, 750_000),
        (1.05, 350_000, 500_000),
    ]


def test_a_simulated_deadline_passes_in_virtual_time() -> None:
    def work(network: SimulatedNetwork) -> tuple[tuple[int, ...], float]:
        with pytest.raises(PeerLostError) as lost:
            network.exchange(torch.zeros(1, dtype=torch.uint8), (0, 1), f"only {network.rank}").wait(7.0)
        return lost.value.ranks, network.now()

    assert Simulation(2).run(work) == [((1,), 7.0), ((0,), 7.0)]


def test_the_same_simulation_twice_is_the_same() -> None:
    def work(network: SimulatedNetwork) -> Any:
        result = replica(lambda: methods.noloco(every=3, delay=1), steps=9)(network)
        return result.weights.tolist(), result.rounds, torch.rand(2).tolist(), network.now()

    assert Simulation(5).run(work) == Simulation(5).run(work)


def test_an_error_in_one_replica_comes_out_and_no_thread_stays() -> None:
    def work(network: SimulatedNetwork) -> None:
        network.advance()
        if network.rank == 1:
            raise ZeroDivisionError("replica 1")

    with pytest.raises(ZeroDivisionError, match="replica 1"):
        Simulation(3).run(work)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("replica-")]
