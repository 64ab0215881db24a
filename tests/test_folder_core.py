"""Peers in a folder that hold the core of the model only: what they take, give and keep of the run's state."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from folder_seats import Seats, seats
from patience import patience

from farflung.networks import PeerLostError, SharedState
from farflung.networks.base import CORE_ONLY
from farflung.networks.folder import FolderNetwork
from farflung.networks.folder.sealing import Kind

WEAK = {"facts": {CORE_ONLY: 1.0}}
CORE, REST = torch.arange(5.0), torch.rand(20_000)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Seats]:
    with seats(f"memory://{tmp_path.name}-{time.monotonic_ns()}/run", tmp_path, 0) as made:
        yield made


def state_of(network: FolderNetwork, step: int) -> SharedState:
    tensors = {"core": CORE + step} | ({} if CORE_ONLY in network.peers.info["facts"] else {"rest": REST + step})
    return SharedState(tensors, {"step": step, "history": "h"}, beside=frozenset({"rest"} & tensors.keys()))


def fetched(run: Seats, late: FolderNetwork) -> SharedState | None:
    """What one takes of the others, who do what replicas do at the end of each step."""
    over, others = threading.Event(), [network for network in run.open if network is not late]

    def give() -> None:
        while not over.wait(0.05):
            for network in others:
                network.peers.look(time.monotonic())
                if network.wanted:
                    network.give(state_of(network, 5))

    giver = threading.Thread(target=give)
    giver.start()
    try:
        return late.fetch(False).wait(patience(60))
    finally:
        over.set()
        giver.join()


def test_each_takes_what_it_holds_of_those_who_hold_it(run: Seats) -> None:
    weak, strong = run.sit("weak", **WEAK), run.sit("strong")
    run.look()
    for name, info, tensors in (("late", {}, {"core", "rest"}), ("late and weak", WEAK, {"core"})):
        late = run.sit(name, trains=False, **info)
        run.look()
        found = fetched(run, late)
        assert found is not None and found.tensors.keys() == tensors
        assert torch.equal(found.tensors["core"], CORE + 5)
        assert found.givers == (strong.rank,) or tensors == {"core"}
        run.leave(late)
    assert weak.telling(CORE_ONLY) == strong.telling(CORE_ONLY) == (weak.rank,)


def test_who_holds_all_keeps_the_core_by_itself_and_a_weak_one_reads_nothing_else_the_next_day(run: Seats) -> None:
    weak, strong = run.sit("weak", **WEAK), run.sit("strong")
    run.look()
    assert strong.keeps and not weak.keeps
    for step in (40, 50):
        strong.give(state_of(strong, step))
    run.leave(strong)
    run.leave(weak)
    for name, info, tensors in (("new and weak", WEAK, {"core"}), ("new", {}, {"core", "rest"})):
        new = run.sit(name, trains=False, **info)
        there = new.peers.look(time.monotonic()).written
        assert [one.note.kind for one in there if one.note.rank != new.rank].count(Kind.STATE) == 2, "no older one"
        before = new.traffic.bytes_received
        new.find_others()
        assert new.behind(10) == 40
        found = new.fetch(True).wait(patience(20))
        assert found is not None and found.tensors.keys() == tensors
        assert torch.equal(found.tensors["core"], CORE + 50)
        rest_bytes = new.traffic.bytes_received - before > REST.nbytes / 2
        assert rest_bytes == ("rest" in tensors)
        run.leave(new)


def test_while_only_weak_ones_train_one_with_all_takes_what_was_kept_but_goes_back_to_nothing(run: Seats) -> None:
    strong = run.sit("strong")
    strong.give(state_of(strong, 50))
    weak = run.sit("weak", **WEAK)
    run.look()
    run.leave(strong)
    late = run.sit("late", trains=False)
    run.look()
    found = fetched(run, late)
    assert found is not None and found.facts["step"] == 50 and "rest" in found.tensors
    late.peers.info["step"] = 60
    with pytest.raises(PeerLostError, match="no peer has the run's state"):
        fetched(run, late)
    assert weak.rank in late.members()
