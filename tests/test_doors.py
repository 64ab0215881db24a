"""Doors: where an island's processes are, as others learn it; and the state that its first process deals out."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from patience import patience, until
from test_internet import INFO, Run

from farflung import methods
from farflung.networks import Party, PeerLostError, Simulation
from farflung.networks.internet.contact.host import UNREACHABLE
from farflung.networks.internet.contact.peers import Peers
from farflung.networks.internet.contact.streams import PeerStream, RequestRefusedError
from farflung.networks.internet.doors import Doorkeeper, Doors, doors_of, seated
from farflung.networks.listening import ListenAddress
from farflung.networks.peers.frames import FrameError, write_payload
from farflung.networks.peers.guard import STRIKES
from farflung.networks.peers.identity import Identity
from farflung.outer.whole_state import NearProcesses
from farflung.testing.liars import Liar

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(("peers", "sessions", "addresses", "keepers"), json_values)))
def test_whatever_an_island_tells_is_read_or_refused(told: dict[str, Any]) -> None:
    try:
        doors = doors_of(told)
    except FrameError:
        return
    assert all(0 <= keeper < len(doors.peers) for keeper in doors.keepers)
    assert len(doors.seats([str(cell) for cell in range(len(doors.keepers))])) == len(doors.keepers)


def test_an_island_s_doors_are_read_as_they_were_told(tmp_path: Path) -> None:
    peers = [Identity(tmp_path / name).peer for name in ("one", "other")]
    doors = Doors(tuple(peers), ("a", "b"), tuple((f"/ip4/127.0.0.1/tcp/1/p2p/{peer}",) for peer in peers), (1, 0, 1))
    assert doors_of(json.loads(json.dumps(doors.told()))) == doors
    seats = doors.seats(["a", "b", "c"])
    assert seats["a"] == seats["c"] != seats["b"]


@pytest.fixture
def run(tmp_path: Path, quick: None) -> Iterator[Run]:
    made = Run(tmp_path)
    made.join()
    yield made
    made.close()


def told_by(liar: Liar, **changes: Any) -> bytes:
    own = liar.peers.info
    told = {"peers": [liar.peers.identity.peer], "addresses": [own["addresses"]], "keepers": [0, 0], **changes}
    return json.dumps({"sessions": [own["session"]] * len(told["peers"]), **told}).encode()


LIES = {
    "nothing": {"peers": [], "addresses": [], "keepers": []},
    "no sessions": {"sessions": []},
    "another model's cells": {"keepers": [0]},
    "a process that is not there": {"keepers": [0, 1]},
    "an address of somebody else": {"addresses": [["/ip4/127.0.0.1/tcp/1/p2p/QmNobody"]]},
    "a peer that is none": {"peers": [7], "addresses": [[]]},
    "a session without end": {"sessions": ["x" * 10**6]},
}


@pytest.mark.slow
@pytest.mark.parametrize("lie", LIES)
def test_an_island_that_lies_of_its_doors_is_lost_and_struck(run: Run, liar: Liar, lie: str) -> None:
    keeper, rank = asking(run, liar, told_by(liar, **LIES[lie]))
    for _ in range(2):  # it is not asked again so soon
        assert not run.peers[0].peers.background.run(keeper.of([rank, run.peers[0].rank]), patience(30))
    assert run.peers[0].refused["bad answer"] == 1


@pytest.mark.slow
def test_an_honest_island_is_asked_once(run: Run, liar: Liar) -> None:
    keeper, rank = asking(run, liar, told_by(liar))
    background = run.peers[0].peers.background
    first = background.run(keeper.of([rank]), patience(30))
    del liar.peers.handlers["doors"]
    assert first == background.run(keeper.of([rank]), patience(30)) and first[rank].keepers == (0, 0)


@pytest.mark.slow
def test_an_island_that_calls_another_peer_its_process_is_found_out(run: Run, liar: Liar) -> None:
    victim = run.join()
    doors = {"peers": [liar.peers.identity.peer, victim.peers.identity.peer]}
    doors |= {"addresses": [liar.peers.info["addresses"], victim.peers.info["addresses"]]}
    keeper, rank = asking(run, liar, told_by(liar, **doors, keepers=[0, 1]))
    assert not run.peers[0].peers.background.run(keeper.of([rank]), patience(30))
    assert run.peers[0].refused["bad answer"] == 1 and not run.peers[0].peers.doors


@pytest.mark.slow
def test_a_process_that_is_not_there_is_told_of_in_one_line(run: Run, liar: Liar, tmp_path: Path) -> None:
    gone = Identity(tmp_path / "gone.key").peer
    doors = {"peers": [liar.peers.identity.peer, gone], "keepers": [0, 1]}
    doors |= {"addresses": [liar.peers.info["addresses"], [f"/ip4/127.0.0.1/tcp/1/p2p/{gone}"]]}
    keeper, rank = asking(run, liar, told_by(liar, **doors))
    assert not run.peers[0].peers.background.run(keeper.of([rank]), patience(30))
    (line,) = run.told
    assert "cannot be reached" in line and "--gateway" in line and "\n" not in line


@pytest.fixture
def door(run: Run, liar: Liar, tmp_path: Path) -> Iterator[Peers]:
    """One that says that it is a process of the liar's island."""
    info = {**INFO, "door_of": liar.peers.identity.rank}
    made = Peers(run.ticket, Identity(tmp_path / "door.key"), ListenAddress("127.0.0.1"), info)
    made.start(patience(20))
    yield made
    made.close()


def seat(run: Run, liar: Liar, door: Peers) -> None:
    """The liar calls the door its own."""
    island = liar.peers
    doors = {"peers": [island.identity.peer, door.identity.peer], "keepers": [0, 1]}
    doors |= {"addresses": [island.info["addresses"], door.info["addresses"]]}
    doors |= {"sessions": [island.info["session"], door.info["session"]]}
    keeper, rank = asking(run, liar, told_by(liar, **doors))
    network = run.peers[0]
    found = network.peers.background.run(keeper.of([rank]), patience(30))
    seated(Party((rank,), {rank: 1.0}), found, ["a", "b"], network.peers)


@pytest.mark.slow
@pytest.mark.parametrize("owned", [True, False], ids=["its own", "one that only says so"])
def test_an_island_answers_for_its_own_processes_alone(run: Run, liar: Liar, door: Peers, owned: bool) -> None:
    network, island = run.peers[0], liar.peers.identity
    if owned:
        seat(run, liar, door)
    member = door.members.by_rank[network.rank]
    for _ in range(STRIKES):
        with pytest.raises(RequestRefusedError):
            door.background.run(door.ask(member, {"kind": "nonsense"}), patience(20))
    assert network.peers.guard.bans(island.peer) == owned
    assert network.peers.guard.bans(door.identity.peer) != owned
    assert door.identity.rank not in network.peers.members.by_rank
    with pytest.raises(UNREACHABLE):
        door.background.run(door.ask(member, {"kind": "nonsense"}), patience(20))


@pytest.mark.slow
def test_a_door_is_proven_once_and_beats_for_nobody(run: Run, liar: Liar, door: Peers) -> None:
    async def answer(stream: PeerStream, _: Any) -> None:
        await stream.tell({"good": True})

    door.handlers["day"] = answer
    seat(run, liar, door)
    peers = run.peers[0].peers
    told_of_itself, record = [], door._handshake._record
    door._handshake._record = lambda: told_of_itself.append(1) or record()  # type: ignore[func-returns-value]
    for _ in range(3):
        told = peers.background.run(peers.ask(peers.doors[door.identity.rank], {"kind": "day"}), patience(20))
        assert told == {"good": True}
    time.sleep(1.5)
    assert not told_of_itself


def asking(run: Run, liar: Liar, told: bytes) -> tuple[Doorkeeper, int]:
    """Who asks a liar, once it is known to have doors, and the liar's rank; it answers with these bytes."""

    async def answer(stream: PeerStream, _: Any) -> None:
        await stream.tell({"size": len(told)})
        await write_payload(stream.writer, memoryview(told), patience(5))
        await stream.reader.read(1)

    liar.peers.handlers["doors"] = answer
    liar.peers.info["doors"] = 1
    network, rank = run.peers[0], liar.peers.identity.rank
    until(lambda: rank in network.peers.members.by_rank and network.peers.members.by_rank[rank].doors == 1)
    network.keep(["a", "b"], ["a", "b"])
    return network._doorkeeper, rank


@pytest.mark.slow
def test_a_seat_where_nobody_is_loses_the_replica(run: Run) -> None:
    network = run.peers[0]
    replica, seat = network.rank + 1, network.rank + 2
    between = network.between({network.rank: network.rank, replica: seat})
    pending = between.exchange(torch.zeros(3, dtype=torch.uint8), (network.rank, replica), "a round")
    with pytest.raises(PeerLostError, match="not there") as lost:
        pending.wait(patience(30))
    assert lost.value.ranks == (replica,)


@pytest.mark.slow
def test_a_state_lists_its_tensors_in_one_order_for_all_layouts(run: Run) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(12)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with methods.noloco(every=10, fragments=3).attach(model, optimizer, run.peers[0]) as outer:
        optimizer.step()
        told = list(outer.state().tensors)  # type: ignore[attr-defined]
    assert len(told) == 12 and told == sorted(told)


@pytest.mark.parametrize("processes", [1, 2, 3])
@given(values=st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=6))
def test_a_state_is_gathered_whole_and_dealt_out_to_its_keepers(processes: int, values: list[float]) -> None:
    """Tensor n is kept by process n modulo the processes; the first gathers all, doubles them, and deals them out."""
    whole = {f"cell {n}": torch.tensor([value, -value]) for n, value in enumerate(values)}

    def work(network: Any) -> dict[str, torch.Tensor]:
        near = NearProcesses(network, 10.0)
        own = {name: whole[name] for n, name in enumerate(whole) if n % processes == network.rank}
        found = near.gathered(own)
        assert found.keys() == (own.keys() if network.rank else whole.keys())
        doubled = {name: 2 * tensor for name, tensor in found.items()} if network.rank == 0 else {}
        return near.dealt_out(doubled, own.__contains__)

    kept = {name: tensor for told in Simulation(processes).run(work) for name, tensor in told.items()}
    assert kept.keys() == whole.keys()
    assert all(torch.equal(kept[name], 2 * tensor) for name, tensor in whole.items())
