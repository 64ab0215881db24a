"""The simulated world: its clock, its links, what is random in it, and what goes wrong in it."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.errors import UserError
from farflung.networks import Conditions, PeerLostError, SimulatedNetwork, Simulation, conditions_named
from farflung.networks.simulator.clock import Clock
from farflung.networks.simulator.conditions import HEADERS, Cut, Death, Link, Site
from farflung.networks.simulator.flows import Links
from farflung.networks.simulator.randomness import largest_factor, uniform
from farflung.networks.simulator.step_times import StepTimes

QUIET = Conditions(bandwidth_mbps=8, latency_ms=0, step_ms=1000)
"""A megabyte a second, and a second a step."""


def packet(megabytes: float) -> torch.Tensor:
    return torch.zeros(round(1e6 * megabytes), dtype=torch.uint8)


# The clock's laws

flows = st.lists(
    st.tuples(
        st.floats(0, 10),  # begins
        st.dictionaries(st.integers(0, 3), st.floats(0, 100), min_size=1, max_size=4),  # bytes by link
        st.one_of(st.just(math.inf), st.floats(0.5, 20)),  # its own limit
    ),
    min_size=1,
    max_size=8,
)


def alone(loads: dict[int, float], capacities: list[float], limit: float) -> float:
    """How long these bytes take when nobody else sends, seconds."""
    return max(max(load / capacities[link] for link, load in loads.items()), max(loads.values()) / limit)


@settings(max_examples=300, deadline=None)
@given(flows=flows, capacities=st.lists(st.floats(0.5, 50), min_size=4, max_size=4))
def test_sharing_a_link_conserves_bytes_and_never_exceeds_it(
    flows: list[tuple[float, dict[int, float], float]], capacities: list[float]
) -> None:
    clock = Clock()
    links = Links(clock, capacities)
    ended: dict[int, float] = {}

    def begin(number: int, loads: dict[int, float], limit: float) -> None:
        links.start(loads, limit, lambda: ended.setdefault(number, clock.now))

    for number, (begins, loads, limit) in enumerate(flows):
        clock.at(begins, lambda n=number, o=loads, m=limit: begin(n, o, m))
    while clock.advance():
        for link, capacity in enumerate(capacities):
            assert links.carried[link] <= capacity * clock.now * (1 + 1e-9) + 1e-6
    for number, (begins, loads, limit) in enumerate(flows):
        # Never before its sender began, nor sooner than on links of its own.
        assert ended[number] >= begins + alone(loads, capacities, limit) - 1e-9 * ended[number]
    for link in range(4):
        assert links.carried[link] == pytest.approx(sum(loads.get(link, 0.0) for _, loads, _ in flows), abs=1e-6)


@settings(max_examples=200, deadline=None)
@given(
    routes=st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=1, max_size=8),
    capacities=st.lists(st.floats(1, 50), min_size=4, max_size=4),
)
def test_shares_are_max_min_fair(routes: list[set[int]], capacities: list[float]) -> None:
    links = Links(clock := Clock(), capacities)
    made = [links.start(dict.fromkeys(route, 1e9), math.inf, lambda: None) for route in routes]
    clock.at(0.0, lambda: None)
    while clock.now == 0.0 and any(flow.rate == 0.0 for flow in made):
        clock.advance()
    used = [sum(flow.rate for flow in made if link in flow.shares) for link in range(4)]
    for flow in made:
        # Somewhere on its way a link is full, and nobody there has more.
        assert any(
            used[link] == pytest.approx(capacities[link])
            and flow.rate >= max(other.rate for other in made if link in other.shares) * (1 - 1e-9)
            for link in flow.shares
        )


def test_events_of_one_moment_happen_in_the_order_they_were_asked_for_and_none_in_the_past() -> None:
    clock, seen = Clock(), []
    for name in "abc":
        clock.at(1.0, lambda name=name: seen.append(name))
    clock.at(0.5, lambda: seen.append("early"))
    clock.at(1.0, lambda: seen.append("never")).cancel()
    while clock.advance():
        pass
    assert seen == ["early", "a", "b", "c"] and clock.now == 1.0
    with pytest.raises(ValueError, match="has passed"):
        clock.at(0.9, lambda: None)


# Known answers


def test_two_exchanges_share_the_link_that_both_use() -> None:
    def work(network: SimulatedNetwork) -> list[float]:
        pending = []
        if network.rank < 2:
            pending.append(network.exchange(packet(1), (0, 1), "one"))
        if network.rank != 1:
            pending.append(network.exchange(packet(2), (0, 2), "two"))
        return [p.finished_at for p in pending if p.wait(100) is not None]

    seen = Simulation(3, QUIET).run(work)
    # Together at half a megabyte a second for 2 s; then the second has the link for its other megabyte.
    assert seen == [[pytest.approx(2), pytest.approx(3)], [pytest.approx(2)], [pytest.approx(3)]]


def test_sites_are_joined_by_links_of_their_own() -> None:
    conditions = Conditions(
        bandwidth_mbps=80,
        latency_ms=1,
        sites=(Site("a"), Site("b")),
        links=(Link(("a", "b"), 50, 8),),
    )

    def work(network: SimulatedNetwork) -> tuple[float, float]:
        apart = network.exchange(packet(1), (0, 1) if network.rank < 2 else (2, 3), "apart")
        apart.wait(100)
        began = network.now()
        near = network.exchange(packet(1), (0, 2) if network.rank % 2 == 0 else (1, 3), "near")
        near.wait(100)
        return apart.finished_at, near.finished_at - began

    assert Simulation(4, conditions).run(work) == [(pytest.approx(1.05), pytest.approx(0.101))] * 4


def test_a_shared_link_between_sites_is_shared() -> None:
    sites, link = (Site("a"), Site("b")), Link(("a", "b"), 0, 8, shared=True)
    conditions = Conditions(bandwidth_mbps=80, latency_ms=0, sites=sites, links=(link,))

    def work(network: SimulatedNetwork) -> float:
        pending = network.exchange(packet(1), (0, 1) if network.rank < 2 else (2, 3), "x")
        pending.wait(100)
        return pending.finished_at

    assert Simulation(4, conditions).run(work) == [pytest.approx(2)] * 4


def test_a_slow_uplink_is_what_an_exchange_waits_for() -> None:
    def work(network: SimulatedNetwork) -> float:
        pending = network.exchange(packet(1), (0, 1), "x")
        pending.wait(100)
        return pending.finished_at

    assert Simulation(2, Conditions(bandwidth_mbps=80, up_mbps=8, latency_ms=0)).run(work) == [pytest.approx(1)] * 2
    with_headers = Conditions(bandwidth_mbps=8, latency_ms=0, headers=HEADERS, loss=0.2)
    least = (1 + HEADERS) / 0.8
    assert Simulation(2, with_headers).run(work) == [pytest.approx(least)] * 2


# What is random


def test_the_largest_of_many_latencies_is_distributed_as_if_each_had_been_drawn() -> None:
    drawn = np.exp(0.5 * np.random.default_rng(0).standard_normal((4000, 64))).max(1)
    made = np.array([largest_factor(uniform("x", n), 64, 0.5) for n in range(4000)])
    for quantile in (0.1, 0.5, 0.9):
        assert np.quantile(made, quantile) == pytest.approx(np.quantile(drawn, quantile), rel=0.04)


@pytest.mark.parametrize(("segments", "loss"), [(1, 0.3), (20, 0.1), (1000, 0.02)])
def test_resendings_are_distributed_as_if_each_segment_had_been_sent(segments: int, loss: float) -> None:
    random = np.random.default_rng(1)
    drawn = (random.geometric(1 - loss, (4000, segments)) - 1).max(1)
    conditions = Conditions(loss=loss)
    made = [conditions.resendings(1448 * segments, f"packet {n}") for n in range(4000)]
    for count in range(4):
        assert np.mean(np.array(made) <= count) == pytest.approx(np.mean(drawn <= count), abs=0.04)


def test_steps_take_the_same_time_one_by_one_and_many_at_a_time() -> None:
    conditions = Conditions(step_ms=100, speed_sigma=0.3, step_sigma=0.2, slow_share=0.05, slow_factor=10)
    singly, together = StepTimes(conditions, 3), StepTimes(conditions, 3)
    assert sum(singly.seconds(1) for _ in range(3000)) == pytest.approx(together.seconds(3000), rel=1e-9)
    typical = conditions.step_seconds(3)
    mean = StepTimes(conditions, 3).seconds(20_000) / 20_000
    assert mean == pytest.approx(typical * math.exp(0.02) * 1.45, rel=0.05)
    assert len({conditions.step_seconds(rank) for rank in range(8)}) == 8


# What goes wrong


def test_an_exchange_stands_still_while_its_members_are_cut_off() -> None:
    cut = Conditions(bandwidth_mbps=8, latency_ms=0, cuts=(Cut((1,), 0.25, 3.0),))

    def work(network: SimulatedNetwork) -> tuple[float, Any, Any]:
        pending = network.exchange(packet(1), (0, 1), "x")
        network.advance()  # 0.1 s
        before = network.members()
        for _ in range(3):
            network.advance()
        during = network.members()
        pending.wait(100)
        return pending.finished_at, before, during

    assert Simulation(2, cut).run(work) == [
        (pytest.approx(3.75), (0, 1), (0,)),
        (pytest.approx(3.75), (0, 1), (1,)),
    ]


def test_a_death_fails_what_is_under_way_at_once_and_thins_the_members() -> None:
    conditions = Conditions(bandwidth_mbps=8, latency_ms=0, deaths=(Death(2, 0.5),))

    def work(network: SimulatedNetwork) -> tuple[tuple[int, ...], float, Any]:
        with pytest.raises(PeerLostError, match=r"^replica 2 \(simulated\) has died$") as lost:
            network.exchange(packet(1), (0, 1, 2), "x").wait(100)
        return lost.value.ranks, network.now(), network.members()

    seen = Simulation(3, conditions).run(work)
    assert seen == [((2,), 0.5, (0, 1)), ((2,), 0.5, (0, 1)), None]


def test_an_exchange_that_was_given_up_does_not_disturb_the_next() -> None:
    def work(network: SimulatedNetwork) -> tuple[float, float]:
        if network.rank == 0:
            with pytest.raises(PeerLostError, match="within 1 s"):
                network.exchange(packet(0), (0, 1), "given up").wait(1.0)
        else:
            for _ in range(3):
                network.advance()
            network.exchange(packet(0), (0, 1), "given up").wait(1.0)
            network.advance()
        began = network.now()
        network.exchange(packet(1), (0, 1), "next").wait(100)
        return began, network.now()

    assert Simulation(2, QUIET).run(work) == [(1.0, pytest.approx(5)), (4.0, pytest.approx(5))]


def test_changed_members_end_what_had_not_begun_and_can_try_again() -> None:
    conditions = Conditions(bandwidth_mbps=8, latency_ms=0, step_ms=1000, deaths=(Death(2, 0.5),))

    def work(network: SimulatedNetwork) -> list[Any]:
        seen: list[Any] = []
        if network.rank == 0:
            with pytest.raises(PeerLostError, match=r"^replica 2 \(simulated\) has died$"):
                network.exchange(packet(1), (0, 1, 2), "x").wait(100)
            seen.append(network.now())
        network.advance()
        network.exchange(packet(1), network.members(), f"x of {network.members()}").wait(100)
        return [*seen, network.members(), network.now()]

    assert Simulation(3, conditions).run(work) == [
        [0.5, (0, 1), pytest.approx(2.5)],
        [(0, 1), pytest.approx(2.5)],
        None,
    ]


def test_nobody_waits_for_one_who_has_met_others() -> None:
    late = Conditions(bandwidth_mbps=8, latency_ms=0, step_ms=1000, cuts=(Cut((2,), 0.0, 0.5),))

    def work(network: SimulatedNetwork) -> float:
        if network.rank == 2:
            network.advance()
        group = (0, 1) if network.rank < 2 else (1, 2)
        pending = network.exchange(packet(1), group, "round 1")
        if network.rank < 2:
            pending.wait(100)
        else:
            with pytest.raises(PeerLostError, match="replica 1"):
                pending.wait(100)
        return network.now()

    assert Simulation(3, late).run(work) == [pytest.approx(1), pytest.approx(1), 1.0]


def lost_by(
    conditions: Conditions, comes: dict[int, int], group: tuple[int, ...] = (), wait: float = 100
) -> dict[int, Any]:
    """What the members of a group are told that come to a meeting after so many steps of a second each.

    Without a group it is for each all members whom it knows when it comes.
    """

    def work(network: SimulatedNetwork) -> tuple[tuple[int, ...], str] | None:
        if network.rank not in comes:
            return None
        for _ in range(comes[network.rank]):
            network.advance()
        with pytest.raises(PeerLostError) as lost:
            network.exchange(packet(1), group or network.members(), "x").wait(wait)
        for _ in range(10 - comes[network.rank]):
            network.advance()  # nobody leaves meanwhile
        return lost.value.ranks, str(lost.value)

    return dict(enumerate(Simulation(4, conditions).run(work)))


def away(ranks: tuple[int, ...], fate: str) -> tuple[tuple[int, ...], str]:
    return ranks, f"replica {', '.join(map(str, ranks))} (simulated) {fate}"


def test_who_is_cut_off_is_named_and_never_one_who_is_only_late() -> None:
    cut = Conditions(bandwidth_mbps=8, latency_ms=0, step_ms=1000, cuts=(Cut((2, 3), 0.5, 100.0),))
    told = lost_by(cut, {0: 0, 1: 2, 2: 0, 3: 2}, (0, 1, 2, 3))
    assert told[0] == told[1] == away((2, 3), "is cut off")
    assert told[2] == told[3] == away((0, 1), "is cut off")
    under_way = Conditions(bandwidth_mbps=0.8, latency_ms=0, step_ms=1000, cuts=(Cut((2,), 0.5, 100.0),))
    told = lost_by(under_way, {0: 0, 1: 0, 2: 0}, (0, 1, 2), wait=5)
    assert told[1] == away((2,), "is cut off") and told[2] == away((0, 1), "is cut off")


def test_when_a_partition_has_healed_those_who_meet_others_are_named() -> None:
    heals = Conditions(bandwidth_mbps=8, latency_ms=0, step_ms=1000, cuts=(Cut((3,), 0.0, 0.5),))
    told = lost_by(heals, {0: 0, 1: 0, 2: 2})
    assert told[0] == told[1] == away((2,), "meets others, since the members have changed")
    assert told[2] == away((0, 1), "meets others, since the members have changed")


def test_those_whom_a_cut_leaves_together_meet_though_others_come_and_go() -> None:
    cuts = (Cut((2,), 0.2, 0.5), Cut((3,), 0.4, 1.5))
    conditions = Conditions(bandwidth_mbps=8, latency_ms=0, step_ms=1000, cuts=cuts)

    def work(network: SimulatedNetwork) -> list[int]:
        for _ in range(2 * network.rank):
            network.advance()
        return sorted(network.exchange(packet(network.rank), (0, 1), "x").wait(100)) if network.rank < 2 else []

    assert Simulation(4, conditions).run(work) == [[0, 1], [0, 1], [], []]


def test_each_lost_replica_has_its_own_fate() -> None:
    both = Conditions(
        bandwidth_mbps=8, latency_ms=0, step_ms=1000, cuts=(Cut((2,), 0.5, 9.0),), deaths=(Death(1, 0.4),)
    )
    late = lost_by(both, {0: 1, 2: 1}, (0, 1, 2))
    assert late[0] == ((1, 2), "replica 2 (simulated) is cut off; replica 1 (simulated) has died")
    still = Conditions(bandwidth_mbps=0.8, latency_ms=0, step_ms=1000)
    assert lost_by(still, {0: 0, 1: 0}, (0, 1), wait=5)[0] == away((1,), "is still delivering after 5 s")
    assert lost_by(still, {0: 0, 1: 9}, (0, 1), wait=5)[0] == away((1,), "did not deliver within 5 s")


def test_a_late_joiner_is_no_member_before_it_joins() -> None:
    def work(network: SimulatedNetwork) -> list[Any]:
        seen = []
        for _ in range(3):
            seen.append(network.members())
            network.advance()
        return seen

    late = Conditions(step_ms=1000, cuts=(Cut((0,), 0.0, 1.5),))
    assert Simulation(3, late).run(work)[1] == [(1, 2), (1, 2), (0, 1, 2)]


# Files and presets


def test_a_file_changes_a_preset_and_takes_links_from_a_measured_matrix(tmp_path: Path) -> None:
    (tmp_path / "links.csv").write_text("from,to,latency_ms,bandwidth_mbps\nBonn,Lyon,12,900\nBonn,Bonn,1,5000\n")
    (tmp_path / "net.toml").write_text('links_file = "links.csv"\nstep_ms = 250\n[[deaths]]\nreplica = 1\nat_s = 5.0\n')
    conditions = conditions_named(str(tmp_path / "net.toml"))
    assert [site.name for site in conditions.sites] == ["Bonn", "Lyon"]
    assert conditions.link(1, 0) == Link(("Bonn", "Lyon"), 12, 900) and conditions.link(0, 0).bandwidth_mbps == 5000
    assert conditions.step_ms == 250 and conditions.deaths == (Death(1, 5.0),)
    (tmp_path / "home.toml").write_text('preset = "home"\nloss = 0.1\n')
    changed = conditions_named(str(tmp_path / "home.toml"))
    assert changed.loss == 0.1 and changed.up_mbps == conditions_named("home").up_mbps


def test_the_world_has_the_measured_links() -> None:
    world = conditions_named("world")
    names = [site.name for site in world.sites]
    tokyo_london = world.link(names.index("London"), names.index("Tokyo"))
    assert (tokyo_london.latency_ms, tokyo_london.bandwidth_mbps) == (210, pytest.approx(366))
    ireland_frankfurt = world.link(names.index("Ireland"), names.index("Frankfurt"))
    assert (ireland_frankfurt.latency_ms, ireland_frankfurt.bandwidth_mbps) == (24, 1080)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("bandwith_mbps = 1", "no setting 'bandwith_mbps'; did you mean 'bandwidth_mbps'"),
        ("bandwidth_mbps = 0", "bandwidth_mbps is 0; it must be at least 1e-06"),
        ("latency_ms = -1", "latency_ms is -1"),
        ("loss = 1.0", "loss is 1.0; it is a share"),
        ('preset = "hom"', "did you mean 'home'"),
        ('[[sites]]\nname = "a"\n[[sites]]\nname = "b"', "no link between a and b; add one"),
        ('[[sites]]\nname = "a"\n[[links]]\nbetween = ["a", "c"]\nlatency_ms = 1', "names the site 'c'; there are: a"),
        ('[[sites]]\nname = "a"\n[[links]]\nlatency_ms = 1', "links 1: between is missing"),
        ("[[cuts]]\nreplicas = [1]\nfrom_s = 5\nuntil_s = 2", "it must end after it begins"),
        ("[[cuts]]\nreplicas = [1]\nfrom_s = 5\nuntil_s = inf", "until_s is inf; it must be a finite number"),
        ("[[deaths]]\nreplica = 1\nat_s = -1", "death 1, of replica 1: at_s is -1; it must be at least 0"),
        ("sites = 3", "sites is 3; it must be a list"),
        ('links_file = "nowhere.csv"', "links_file is a path beside the conditions"),
        ("loss = ", "is not valid TOML"),
    ],
)
def test_a_wrong_file_is_told_in_one_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "net.toml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        conditions_named(str(path))
    told = str(error.value)
    assert complaint in told and "\n" not in told and ("net.toml" in told or "nowhere.csv" in told)


def test_a_name_that_is_none_and_a_replica_that_is_not_there_are_told() -> None:
    with pytest.raises(UserError, match="no conditions 'wolrd'; did you mean 'world'"):
        conditions_named("wolrd")
    with pytest.raises(UserError, match="deaths names replica 4; there are 0 to 3"):
        Simulation(4, Conditions(deaths=(Death(4, 1.0),)))


WORLD = """bandwidth_mbps = 10.0
latency_ms = 1.0
step_ms = 100.0
up_mbps = 5.0
bandwidth_sigma = 0.1
latency_sigma = 0.1
speed_sigma = 0.1
step_sigma = 0.1
slow_share = 0.1
slow_factor = 2.0
loss = 0.1
headers = 0.1
seed = 3
links_file = "links.csv"
[[sites]]
name = "a"
weight = 2
[[sites]]
name = "b"
[[links]]
between = ["a", "a"]
latency_ms = 1.0
[[cuts]]
replicas = [1]
from_s = 5.0
until_s = 9.0
[[deaths]]
replica = 1
at_s = 50.0
"""
LINKS = "from,to,latency_ms,bandwidth_mbps\na,b,12.0,900.0\n"
NUMBERS = [line for line in WORLD.splitlines() if line[-1].isdigit()]


def refused(folder: Path, world: str, links: str) -> str:
    (folder / "links.csv").write_text(links)
    (folder / "net.toml").write_text(world)
    with pytest.raises(UserError) as error:
        conditions_named(str(folder / "net.toml"))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("line", NUMBERS)
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf", "-1.0", "1e30"])
def test_each_number_of_a_file_is_finite_and_in_its_range(tmp_path: Path, line: str, bad: str) -> None:
    name = line.split()[0]
    told = refused(tmp_path, WORLD.replace(line, f"{name} = {bad}", 1), LINKS)
    assert f"{name} is {float(bad)}" in told or f"{name} {float(bad)}" in told
    assert "must be" in told or "must end" in told


@pytest.mark.parametrize(("column", "value"), [("latency_ms", "12.0"), ("bandwidth_mbps", "900.0")])
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf", "-1.0", "1e30", "fast", ""])
def test_each_number_of_a_matrix_of_links_is_finite_and_in_its_range(
    tmp_path: Path, column: str, value: str, bad: str
) -> None:
    told = refused(tmp_path, WORLD, LINKS.replace(value, bad))
    assert column in told and ("the link between a and b" in told or "links.csv, line 2" in told)


def test_a_world_of_proper_numbers_is_taken(tmp_path: Path) -> None:
    (tmp_path / "links.csv").write_text(LINKS)
    (tmp_path / "net.toml").write_text(WORLD)
    assert conditions_named(str(tmp_path / "net.toml")).link(0, 1) == Link(("a", "b"), 12.0, 900.0)


def test_a_folder_is_no_file_of_conditions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hme").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no conditions 'hme'; did you mean 'home'"):
        conditions_named("hme")


@pytest.mark.parametrize("replicas", [0, -1, 1.5, "2", None])
def test_a_simulation_of_no_replicas_is_refused(replicas: Any) -> None:
    with pytest.raises(UserError, match=r"replicas is .*; give a whole number, at least 1"):
        Simulation(replicas)


def test_conditions_are_numbers() -> None:
    with pytest.raises(UserError, match="latency_ms is '5'; it must be a number"):
        Conditions(latency_ms="5")  # type: ignore[arg-type]
