"""What rounds through a folder take and cost, by hand."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import run_here

from farflung.networks.peers.ticket import read_ticket
from farflung.planner.command import commands
from farflung.planner.folder import Folder, passage
from farflung.planner.options import PlanOptions
from farflung.planner.plan import plan
from farflung.training.peer import ticket_settings

MACHINES = """
[[machines]]
count = 4
memory_gb = 80
tflops = 300
network_gbps = 0.1

[folder]
per_gb_out = 1.0
"""


def test_two_send_all_of_it_at_once() -> None:
    assert passage(2, [0.5, 0.5], 20e6) == passage(2, [1.0], 20e6)


@given(st.integers(2, 300), st.floats(1, 1e10), st.floats(1e3, 1e9))
def test_no_round_takes_less_than_twice_a_links_time(members: int, size: float, rate: float) -> None:
    assert passage(members, [1.0], size).seconds(rate, 0.0) >= 2 * size / rate


def test_a_pair_sends_up_then_down() -> None:
    pair = passage(2, [1.0], 20e6)
    assert (pair.reads, pair.up, pair.down) == (1, 20e6, 20e6)
    assert pair.seconds(12.5e6, 0.05) == pytest.approx(1.6 + 1.6 + 4 * 0.05)


def test_what_a_hop_after_another_sends() -> None:
    four = passage(4, [0.25, 0.25], 8e6)  # a part to each of three, then the mean of one's own to all
    assert (four.up, four.down) == (3 * 2e6 + 2e6, 3 * 2e6 + 3 * 2e6)
    assert four.reads == 6


@pytest.mark.parametrize(("members", "most"), [(8, 12), (64, 20)])
def test_many_read_bundles_and_not_every_packet(members: int, most: int) -> None:
    small, large = (passage(members, [1.0], size) for size in (4e5, 4e6))
    assert small.writes + small.reads + 2 <= most  # and two removals
    assert large.reads == members - 1


def test_prices_are_of_writes_reads_and_bytes_that_leave_the_store() -> None:
    folder = Folder(per_1000_writes=5.0, per_1000_reads=2.0, per_gb_out=0.5)
    assert folder.price(2000, 500, 4e9) == 10 + 1 + 2


def test_a_plan_through_a_folder_takes_longer_and_tells_what_the_store_costs(tmp_path: Path) -> None:
    machines = tmp_path / "machines.toml"
    machines.write_text(MACHINES)
    ways = {
        folder: plan(
            PlanOptions("micro", machines, 1e9, methods="noloco", folder=folder, batch_tokens=4096, search_s=0)
        )[0]
        for folder in (False, True)
    }
    by_islands = {folder: {one.choice.layout.replicas: one for one in plans} for folder, plans in ways.items()}
    replicas = max(by_islands[True])
    near, far = by_islands[False][replicas], by_islands[True][replicas]
    assert far.exchange > 2 * near.exchange * 0.9
    assert near.store is None and far.store is not None
    assert far.store >= far.bytes_sent / 1e9  # at a price of 1 a gigabyte: a pair reads what it writes


def test_a_plan_counts_the_requests_of_the_meeting_and_of_the_exchange(tmp_path: Path) -> None:
    """A note, a listing; a packet, a listing, another's packet, and half a pause, which is as much as a listing."""
    exchanges = []
    for latency_ms in (0, 100):
        machines = tmp_path / f"{latency_ms}.toml"
        machines.write_text(f"{MACHINES}latency_ms = {latency_ms}\n")
        options = PlanOptions("micro", machines, 1e9, methods="noloco", folder=True, batch_tokens=4096, search_s=0)
        exchanges.append({one.choice.layout.replicas: one.exchange for one in plan(options)[0]})
    near, far = exchanges
    replicas = max(far)
    assert far[replicas] - near[replicas] == pytest.approx(6 * 0.1)


def test_what_is_planned_through_a_folder_can_be_begun_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machines = tmp_path / "machines.toml"
    machines.write_text(MACHINES)
    plans, failures, cluster = plan(
        PlanOptions("micro", machines, 1e7, methods="noloco,ddp", folder=True, batch_tokens=4096, search_s=0)
    )
    assert {(one.choice.settings.rounds.method, one.choice.layout.replicas) for one in plans} == {("noloco", 4)}
    several = "peers of several processes are not planned through a folder yet"
    always = "this method needs all replicas at every step; on the internet use noloco or diloco"
    assert {(failure.method, failure.layout.replicas): failure.reason for failure in failures} == {
        ("noloco", 2): several,
        ("ddp", 2): several,
        ("ddp", 4): always,
    }
    invite, join = commands(plans[0].choice, cluster)
    assert join == "farflung join NAME.ticket   # on each of 4 workers"
    words = shlex.split(invite.replace("NAME", "ours").replace("URL", f"file://{tmp_path}/run"))
    assert run_here(monkeypatch, tmp_path, *words[1:]) == 0, capsys.readouterr().err
    begun, planned = ticket_settings(read_ticket(tmp_path / "ours.ticket")).flat(), plans[0].choice.settings.flat()
    own = {"replicas", "network"}
    assert {name for name, value in begun.items() if value != planned[name]} <= own
