"""What the planner says of rounds and steps, against the simulated network."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung import methods
from farflung.networks import Conditions
from farflung.networks.simulator.cluster import SimulatedCluster
from farflung.networks.simulator.conditions import HEADERS, Link
from farflung.networks.simulator.fabric import Demand
from farflung.outer import message_bytes
from farflung.pipeline.settings import IslandSettings
from farflung.planner.architecture import architecture_of
from farflung.planner.cost import Exchange, blocked_seconds, exchange
from farflung.planner.layout import Layout
from farflung.planner.machines import Cluster, Machines
from farflung.planner.step import boundary_bytes, step_seconds
from farflung.planner.timing import Timer

quickly = settings(max_examples=40, deadline=None)

MODEL = architecture_of("small")
FOUR = Layout(4, 1, 1, tuple((n,) for n in range(4)))


def rounds_of(mbps: float, latency_ms: float, step_ms: float, **chosen: int) -> tuple[float, float]:
    """Seconds from round to round, as planned and as simulated."""
    method = methods.diloco(**chosen)
    link = (Link(("here", "here"), latency_ms),)
    cluster = Cluster((Machines(4, 80, 100, network_gbps=mbps / 1000),), link)
    conditions = Conditions(bandwidth_mbps=mbps, latency_ms=latency_ms, step_ms=step_ms, headers=HEADERS)
    blocked = blocked_seconds(method, exchange(MODEL, method, cluster, FOUR), step_ms / 1000)
    timing = Timer(method, partial(message_bytes, method, MODEL.cells), conditions, 4, 12, 1e9).run()
    landed = [times.landed for times in timing.rounds if times.fragment == 0]
    return chosen["every"] * step_ms / 1000 + blocked, (landed[-1] - landed[-5]) / 4


@quickly
@given(
    fragments=st.sampled_from([1, 2, 3, 4]),
    delay=st.integers(0, 20),
    step_ms=st.sampled_from([5.0, 20.0, 50.0, 400.0]),
    latency_ms=st.sampled_from([0.0, 1.0, 100.0]),
)
def test_rounds_of_fragments_wait_as_long_as_in_the_simulator(
    fragments: int, delay: int, step_ms: float, latency_ms: float
) -> None:
    """On links that a whole exchange takes about a second on."""
    planned, simulated = rounds_of(500, latency_ms, step_ms, every=20, fragments=fragments, delay=delay)
    assert planned == pytest.approx(simulated, rel=0.002)


def test_fragments_that_do_not_meet_each_wait_for_their_own_exchange_only() -> None:
    method = methods.diloco(every=40, fragments=4, delay=8)
    assert blocked_seconds(method, Exchange(0.5, 0.1), step=0.07) == pytest.approx(4 * (0.6 - 8 * 0.07))
    assert blocked_seconds(method, Exchange(0.5, 0.1), step=0.08) == 0


# Steps


def passed(cluster: Cluster, pipelines: int, microbatches: int, nbytes: float) -> float:
    """Seconds of a step that only passes microbatches, one after the other, on the simulated network."""
    network = cluster.network
    simulated = SimulatedCluster(
        2 * pipelines, replace(network, bandwidth_mbps=1000 * cluster.machines[0].network_gbps)
    )

    def send(way: tuple[int, int], left: int) -> None:
        demand = Demand(way, (nbytes, 0.0), (0.0, nbytes), nbytes)
        simulated.fabric.send(demand, f"{way}", lambda: send(way, left - 1) if left > 1 else None)

    for number in range(pipelines):
        # Activations go on while others' gradients come back, so both directions are busy all the time.
        send((2 * number, 2 * number + 1), 2 * microbatches)
        send((2 * number + 1, 2 * number), 2 * microbatches)
    while simulated.clock.advance():
        pass
    return simulated.clock.now


@quickly
@given(
    pipelines=st.integers(1, 6),
    microbatches=st.integers(2, 5),
    shared=st.booleans(),
    mbps=st.sampled_from([20.0, 100.0, 2000.0]),
    card=st.sampled_from([0.05, 1.0]),
)
def test_pipelines_share_what_they_have_in_common(
    pipelines: int, microbatches: int, shared: bool, mbps: float, card: float
) -> None:
    each = Machines(pipelines, 80, 1e6, "east", network_gbps=card)
    link = Link(("east", "west"), 10, mbps, shared=shared)
    cluster = Cluster((each, replace(each, site="west")), (link,))
    layout = Layout(pipelines, 2, 1, tuple((n, pipelines + n) for n in range(pipelines)))
    run = IslandSettings(batch_size=microbatches, stages=2, microbatches=microbatches)
    nbytes = boundary_bytes(MODEL, run, 128)
    assert nbytes == 128 * MODEL.hidden * 4
    planned = step_seconds(MODEL, cluster, layout, run, 128)
    assert planned == pytest.approx(passed(cluster, pipelines, microbatches, nbytes), rel=1e-3)
    if shared:
        assert planned > pipelines * microbatches * nbytes / (mbps * 125e3)
