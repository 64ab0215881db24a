"""What rounds through a folder take where they are simulated: known answers, and the planner's."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import same_weights, trained_here

from farflung import methods
from farflung.errors import UserError
from farflung.networks import Conditions, PeerLostError, SimulatedNetwork, Simulation
from farflung.networks.simulator.conditions import Death, Link, Site
from farflung.outer import traffic_per_hop
from farflung.planner.folder import passage
from farflung.planner.timing import Timer

STORE = Conditions(bandwidth_mbps=8, latency_ms=0, store_ms=50)
"""A megabyte a second each way, and 0.05 s a request, of which four in an exchange wait for each other."""


RUN: dict[str, Any] = {
    "model": "micro",
    "network": "simulated",
    "replicas": 3,
    "steps": 6,
    "every": 3,
    "batch_size": 2,
    "sequence_length": 16,
    "eval_sequences": 2,
    "warmup": 2,
    "max_tokens": 100_000,
}


def packet(megabytes: float) -> torch.Tensor:
    return torch.zeros(round(1e6 * megabytes), dtype=torch.uint8)


def test_a_packet_goes_up_once_and_down_to_each_reader() -> None:
    def exchange(network: SimulatedNetwork) -> float:
        network.exchange(packet(2), network.members(), "1").wait(math.inf)
        assert network.traffic.bytes_sent == 2e6  # however many read it
        assert network.traffic.bytes_received == 2e6 * (len(network.members()) - 1)
        return network.now()

    assert Simulation(2, STORE).run(exchange) == pytest.approx([2 + 2 + 0.2] * 2)
    assert Simulation(4, STORE).run(exchange) == pytest.approx([2 + 3 * 2 + 0.2] * 4)


def test_a_packet_for_each_goes_up_for_each() -> None:
    def exchange(network: SimulatedNetwork) -> float:
        others = [rank for rank in network.members() if rank != network.rank]
        network.all_to_all(dict.fromkeys(others, packet(1)), network.members(), "1").wait(math.inf)
        return network.now()

    assert Simulation(4, STORE).run(exchange) == pytest.approx([3 + 3 + 0.2] * 4)


def test_a_mean_through_a_store_is_of_all_at_once_where_that_is_little_or_of_two_and_else_of_parts() -> None:
    def seconds(network: SimulatedNetwork, values: int) -> float:
        own, group = torch.full((values,), float(network.rank)), network.members()
        mean = network.all_reduce(own, group, f"{values}").wait(math.inf)
        assert (mean == sum(group) / len(group)).all()
        return network.now()

    def took(replicas: int, values: int) -> list[float]:
        return Simulation(replicas, STORE).run(lambda network: seconds(network, values))

    assert took(2, 1_000_000) == pytest.approx([4 + 4 + 0.2] * 2)
    assert took(4, 100_000) == pytest.approx([0.4 + 3 * 0.4 + 0.2] * 4)
    # a megabyte to each of three, and one from each; then one's mean up, and three down
    assert took(4, 1_000_000) == pytest.approx([3 + 3 + 1 + 3 + 2 * 0.2] * 4)


def test_the_slowest_link_up_and_then_the_slowest_down_is_what_a_round_through_a_store_takes() -> None:
    def exchange(network: SimulatedNetwork) -> float:
        network.exchange(packet(2), network.members(), "1").wait(math.inf)
        return network.now()

    uneven = Conditions(bandwidth_mbps=8, up_mbps=4, store_ms=50)
    assert Simulation(2, uneven).run(exchange) == pytest.approx([4 + 2 + 0.2] * 2)
    spread = Conditions(bandwidth_mbps=8, bandwidth_sigma=1.0, store_ms=50, seed=3)
    slowest = min(spread.up_bytes(rank) for rank in range(3))
    assert Simulation(3, spread).run(exchange) == pytest.approx([2e6 / slowest + 2 * 2e6 / slowest + 0.2] * 3)


def test_rounds_that_pass_through_a_store_at_a_time_share_a_link() -> None:
    def exchange(network: SimulatedNetwork) -> float:
        pending = [network.exchange(packet(1), (0, 1), f"{fragment}") for fragment in range(2)]
        for one in pending:
            one.wait(math.inf)
        return network.now()

    assert Simulation(2, STORE).run(exchange) == pytest.approx([2 + 2 + 0.2] * 2)


def test_a_death_ends_what_goes_through_a_store_too() -> None:
    def exchange(network: SimulatedNetwork) -> float:
        with pytest.raises(PeerLostError):
            network.exchange(packet(2), (0, 1), "1").wait(math.inf)
        return network.now()

    dying = Conditions(bandwidth_mbps=8, store_ms=50, deaths=(Death(1, 3.0),))  # while its packet is read
    assert Simulation(2, dying).run(exchange) == [3.0, None]


def test_a_store_takes_time_and_is_not_between_sites_that_have_links_of_their_own() -> None:
    with pytest.raises(UserError, match="store_ms is -1; it must be at least 0"):
        Conditions(store_ms=-1)
    with pytest.raises(UserError, match="leave out sites and links"):
        Conditions(store_ms=50, sites=(Site("a"), Site("b")), links=(Link(("a", "b"), 10.0),))


@given(st.integers(2, 20), st.integers(4, 10**9), st.floats(1e-3, 1e3), st.floats(0, 1e4))
def test_the_planner_says_of_a_round_what_the_simulator_does(
    members: int, nbytes: int, mbps: float, store_ms: float
) -> None:
    method = methods.diloco(every=1)
    conditions = Conditions(bandwidth_mbps=mbps, store_ms=store_ms)
    simulated = Timer(method, lambda _: nbytes, conditions, members, 1, math.inf).run()
    planned = passage(members, traffic_per_hop(method.codec, method.averaging, members), nbytes)
    took = simulated.rounds[0].landed - simulated.rounds[0].started
    assert took == pytest.approx(planned.seconds(mbps * 125e3, store_ms / 1e3))
    assert simulated.bytes_sent == pytest.approx(members * planned.up)


@pytest.mark.slow
@pytest.mark.parametrize("given", [{"method": "noloco"}, {"method": "diloco", "codec": "ef-int8"}])
def test_a_run_through_a_simulated_folder_has_the_same_weights_and_takes_as_much_longer_as_its_rounds(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    def trained(name: str, world: str) -> float:
        (tmp_path / f"{name}.toml").write_text(f"bandwidth_mbps = 80\nlatency_ms = 0\nstep_ms = 1000\n{world}")
        folder = tmp_path / name
        trained_here(folder, conditions=str(tmp_path / f"{name}.toml"), **RUN, **given)
        return float(json.loads((folder / "summary.json").read_text())["seconds"])

    straight, stored = trained("straight", ""), trained("stored", "store_ms = 1000")
    assert same_weights(tmp_path / "straight", tmp_path / "stored", 6, range(3))
    assert straight < 7
    hops = 2 if given["method"] == "diloco" else 1
    exchanges = 2 * hops + 1  # of two rounds, and of the weights that are averaged in the end
    assert stored - straight == pytest.approx(4 * exchanges, abs=0.5)
