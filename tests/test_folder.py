"""Peers that meet in a folder: who is there, who meets whom, what they exchange, and the state of their run."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from folder_seats import Seats, mean_of, met, seats
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st
from patience import patience, until
from problem import flat, inner_steps, small_model
from processes import HERE, SMALL, run_here
from warm import Python

from farflung import methods
from farflung.errors import UserError
from farflung.networks import Party, PeerLostError, SharedState
from farflung.networks.base import Traffic, mean_in_order
from farflung.networks.folder import FolderNetwork, Identity
from farflung.networks.folder.meetings import Guest, direct, grouped, party_of
from farflung.networks.folder.sealing import Kind, Seals
from farflung.networks.folder.store import Store
from farflung.networks.peers.ticket import NobodyAnswersError, Ticket, read_ticket
from farflung.networks.peers.weights import HEAVIEST
from farflung.outer import Round
from farflung.settings import Settings
from farflung.training.limits import check_folder


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"memory://{tmp_path.name}-{time.monotonic_ns()}/run"


GUESTS = st.dictionaries(
    st.integers(0, 9),
    st.tuples(
        st.sampled_from([b"a", b"b"]), st.integers(1, 4), st.booleans(), st.floats(0, 1e6), st.sampled_from("xy")
    ),
    min_size=1,
).map(lambda told: {rank: Guest(rank, *about[:4], about[4].encode()) for rank, about in told.items()})


@given(GUESTS, st.sets(st.integers(0, 9)), st.booleans())
def test_nobody_is_in_two_groups_or_taken_from_one_and_all_in_a_pair_have_waited(
    guests: dict[int, Guest], taken: set[int], patient: bool
) -> None:
    groups = grouped(guests, taken, patient)
    placed = [rank for group in groups for rank in group]
    assert len(set(placed)) == len(placed) and not set(placed) & taken and set(placed) <= guests.keys()
    assert all(len(group) > 1 for group in groups)
    assert all(guests[rank].idle or guests[rank].open for rank in placed)


@given(GUESTS)
def test_all_of_a_group_have_the_same_weights_and_nobody_is_far_heavier(guests: dict[int, Guest]) -> None:
    group = tuple(sorted(guests))
    parties = [party_of(group, guests, own, "key") for own in group]
    inside = [party for party in parties if party.group]
    assert inside and all(party == inside[0] for party in inside)
    assert all(party.behind for party in parties if not party.group)
    weights = inside[0].weights
    least = min((heavy for heavy in weights.values() if heavy), default=0.0)
    assert max(weights.values()) <= HEAVIEST * max(least, 1.0)
    assert len({guests[rank].lineage for rank in weights}) == 1


@given(GUESTS)
def test_who_is_in_a_group_that_all_want_agrees_with_all_others_in_it(guests: dict[int, Guest]) -> None:
    for own in guests:
        group = direct(own, guests, ())
        assert all(direct(other, guests, ()) == group or guests[other].count != guests[own].count for other in group)


@pytest.mark.parametrize("count", [2, 3, 6])
def test_exchanges_are_what_their_names_say(url: str, tmp_path: Path, count: int) -> None:
    with seats(url, tmp_path, count) as run:
        networks, generator = run.open, torch.Generator().manual_seed(1)
        group = tuple(sorted(network.rank for network in networks))
        values = {rank: torch.randn(17, generator=generator) for rank in group}
        packet = {rank: values[rank].view(torch.uint8) for rank in group}
        sums = [network.all_reduce(values[network.rank].clone(), group, "sum") for network in networks]
        expected = mean_in_order([values[rank] for rank in group])
        assert all(torch.equal(one.wait(patience(10)), expected) for one in sums)
        gathered = [network.exchange(packet[network.rank], group, "all") for network in networks]
        for one in gathered:
            assert {rank: bytes(p.numpy()) for rank, p in one.wait(patience(10)).items()} == {
                rank: bytes(p.numpy()) for rank, p in packet.items()
            }
        sent = {
            a: {b: torch.tensor([i, j, 7], dtype=torch.uint8)[: 1 + j] for j, b in enumerate(group) if b != a}
            for i, a in enumerate(group)
        }
        dealt = [network.all_to_all(sent[network.rank], group, "deal") for network in networks]
        for network, one in zip(networks, dealt, strict=True):
            assert {a: p.tolist() for a, p in one.wait(patience(10)).items()} == {
                a: sent[a][network.rank].tolist() for a in group if a != network.rank
            }


def test_all_that_is_left_when_all_have_gone_is_nothing(url: str, tmp_path: Path) -> None:
    with seats(url, tmp_path, 3) as run:
        assert [mean.tolist() for mean in mean_of(run.open, "round 1 of 0", 4)] == [[1.0] * 4] * 3
    assert not [path for path in fsspec.filesystem("memory").find(url.removeprefix("memory:/")) if path]


def test_two_that_wait_in_vain_for_others_meet_and_a_third_hears_why_it_is_alone(url: str, tmp_path: Path) -> None:
    with seats(url, tmp_path, 4) as run:
        one, two, three, away = run.open
        for network in run.open:
            network.peers.info["step"] = 10
            network.peers.info["rate"] = 1e-6
            network.peers.beat()
        away.peers.info["step"] = 10**6  # who is long past the round, as all know
        away.peers.beat()
        run.look()
        pending = [
            network.meet(tuple(sorted((network.rank, away.rank))), "round 1 of 0", 10, 1.0, "", lambda party: party)
            for network in (one, two, three)
        ]
        parties = [one.wait(patience(20)) for one in pending]
        met_ranks = sorted(rank for party in parties if party.group for rank in party.group)
        assert sorted(len(party.group) for party in parties) == [0, 2, 2]
        assert len(set(met_ranks)) == 2


def test_who_is_far_from_the_others_anchors_is_behind(url: str, tmp_path: Path) -> None:
    with seats(url, tmp_path, 3) as run:
        ranks, all_placed = tuple(sorted(network.rank for network in run.open)), threading.Barrier(3)

        def then(party: Party) -> Party:
            all_placed.wait(patience(20))  # who has left a round is nobody's partner
            return party

        pending = [
            network.meet(ranks, "round 1 of 0", 1, 1.0, lineage, then)
            for network, lineage in zip(run.open, ["old", "new", "new"], strict=True)
        ]
        behind, *others = [one.wait(patience(20)) for one in pending]
        assert behind.behind and not behind.group
        assert [party.group for party in others] == [tuple(sorted(network.rank for network in run.open[1:]))] * 2


def test_who_leaves_a_round_holds_up_nobody_until_the_deadline(url: str, tmp_path: Path) -> None:
    with seats(url, tmp_path, 2) as run:
        one, two = run.open
        both = threading.Barrier(2)

        def then(network: FolderNetwork, party: Party) -> str:
            both.wait(patience(20))
            if network is two:
                return "left"
            with pytest.raises(PeerLostError) as lost:
                network.all_reduce(torch.ones(3), party.group, "mean").wait(patience(20))
            return str(lost.value)

        told, left = met([one, two], "round 1 of 0", then)
        assert "has left the round" in told and left == "left"


def state(step: int, value: float) -> SharedState:
    return SharedState({"anchor of a": torch.full((5,), value), "b": torch.arange(3.0)}, {"step": step, "history": "h"})


def giving(networks: list[FolderNetwork], states: list[SharedState], over: threading.Event) -> None:
    """What replicas do at the end of each step."""
    while not over.wait(0.05):
        for network, own in zip(networks, states, strict=True):
            network.peers.look(time.monotonic())
            if network.wanted:
                network.give(own)


@pytest.mark.parametrize("identical", [True, False])
def test_a_newcomer_has_the_state_that_most_have_and_not_one_of_three(
    url: str, tmp_path: Path, identical: bool
) -> None:
    with seats(url, tmp_path, 3) as run:
        over = threading.Event()
        near = 1.0 if identical else 1.001
        states = [state(5, 1.0), state(5, near), state(5, 77.0)]
        giver = threading.Thread(target=giving, args=(list(run.open), states, over))
        late = run.sit("late", trains=False)
        giver.start()
        try:
            found = late.fetch(identical).wait(patience(60))
        finally:
            over.set()
            giver.join()
        assert found is not None and found.facts["step"] == 5
        assert found.tensors["b"].tolist() == [0.0, 1.0, 2.0]
        assert found.tensors["anchor of a"].tolist() in ([1.0] * 5, torch.full((5,), near).tolist())


def test_the_last_state_is_there_the_next_day_and_nothing_else(url: str, tmp_path: Path) -> None:
    run = Seats(url, tmp_path)
    first = run.sit("one")
    assert first.keeps
    first.give(state(40, 3.0))
    first.give(state(50, 4.0))
    run.leave(first)
    left = fsspec.filesystem("memory").find(url.removeprefix("memory:/"))
    assert len(left) == 3  # a description, and a piece for each of two tensors
    second = run.sit("two", trains=False)
    second.find_others()
    assert second.behind(10) == 40
    found = second.fetch(True).wait(patience(20))
    assert found is not None and found.tensors["anchor of a"].tolist() == [4.0] * 5
    run.leave(second)


def test_where_nobody_is_and_nothing_was_kept_one_is_told(url: str, tmp_path: Path) -> None:
    run = Seats(url, tmp_path)
    alone = run.sit("one", trains=False)
    alone._deadline = 0.1
    with pytest.raises(NobodyAnswersError, match="nobody is in memory://"):
        alone.find_others()
    run.leave(alone)


class Faulty(MemoryFileSystem):  # type: ignore[misc]
    """A store that loses requests, as many as `fails` says, and the answers to as many others as `unheard` says."""

    protocol = "faulty"
    cachable = False
    fails = unheard = 0

    def _maybe(self) -> None:
        if Faulty.fails > 0:
            Faulty.fails -= 1
            raise OSError("slow down")

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> Any:
        self._maybe()
        super().pipe_file(path, value, mode=mode, **kwargs)
        if Faulty.unheard > 0:
            Faulty.unheard -= 1
            raise OSError("the connection was closed")

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        self._maybe()
        return super().ls(path, detail=detail, **kwargs)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("faulty:/").replace("//", "/"))


@pytest.fixture
def faulty() -> Iterator[None]:
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    yield
    Faulty.fails = Faulty.unheard = 0


@pytest.mark.usefixtures("faulty")
def test_a_request_that_is_lost_is_made_again_and_counted(tmp_path: Path) -> None:
    traffic = Traffic()
    store = Store(f"faulty://{tmp_path.name}/x", patience(5), traffic)
    Faulty.fails = 2
    store.put("a", b"12345")
    assert store.names() == {"a": 5}
    assert (traffic.requests, traffic.bytes_sent) == (4, 5)
    assert store.create("b", b"1") and not store.create("b", b"2")
    assert store.get("b", 0, 9) == b"1"
    store.remove(["a", "b", "c"])
    assert store.names() == {}


@pytest.mark.usefixtures("faulty")
def test_while_the_store_is_away_a_peer_is_alone_and_then_joins_again(tmp_path: Path) -> None:
    with seats(f"faulty://{tmp_path.name}/y", tmp_path, 2) as run:
        for network in run.open:
            network.peers.notes.store._patience_s = 0.2
        Faulty.fails = 10**6
        parties = met(run.open, "round 1 of 0", lambda _, party: party)
        assert [(party.group, party.alone) for party in parties] == [((), "away")] * 2
        until(lambda: sum("trains on alone" in line for line in run.told) == 2, patience(20))
        Faulty.fails = 0
        until(lambda: sum("is there again" in line for line in run.told) == 2, patience(40))
        assert [mean.tolist() for mean in mean_of(run.open, "round 2 of 0", 2)] == [[0.5] * 2] * 2


@pytest.mark.usefixtures("faulty")
def test_who_goes_on_alone_leaves_no_note_by_which_others_wait_for_it(tmp_path: Path) -> None:
    """What it could not write as far as it knows, may be there all the same."""
    with seats(f"faulty://{tmp_path.name}/z", tmp_path, 2) as run:
        one, other = run.open
        for network in run.open:
            network.peers._over.set()  # no beat comes between
            network.peers._thread.join()
        one.peers.notes.store._patience_s = 0.0
        Faulty.unheard = 1
        visit, party = one._meetings.come((one.rank, other.rank), "round 1 of 0", 1, 1.0, "", 0.0)
        assert (party.group, party.alone, visit.note) == ((), "away", None)
        seen = []
        for _ in range(2):
            seen.append(set(other.peers.of(other.peers.look(time.monotonic()).written, Kind.HERE)))
            one.peers.notes.sweep()
        assert seen == [{one.rank}, set()]


@pytest.mark.parametrize("name", ["noloco", "diloco", "nolocox", "streaming-diloco"])
def test_methods_run_in_a_folder_and_members_of_the_same_rounds_are_equal(url: str, tmp_path: Path, name: str) -> None:
    with seats(url, tmp_path, 2) as run:
        method = getattr(methods, name.replace("-", "_"))(every=4)
        models = [small_model() for _ in run.open]
        begin = torch.cat([flat(model) for model in models])
        together = threading.Barrier(2)

        def train(number: int) -> tuple[torch.Tensor, list[Round]]:
            model, rounds = models[number], list[Round]()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            together.wait(patience(20))
            with method.attach(model, optimizer, run.open[number], on_round=rounds.append) as outer:
                for step in range(16):
                    inner_steps(model, optimizer, number, range(step, step + 1))
                    time.sleep(0.02)
                anchors = torch.cat([anchor.detach().flatten() for anchor in outer.anchors])
            return anchors, rounds

        with ThreadPoolExecutor(2) as pool:
            (anchors, rounds), (others, other_rounds) = pool.map(train, range(2), timeout=patience(60))
        averaged = [[one for one in of if one.outcome == "averaged"] for of in (rounds, other_rounds)]
        assert all(averaged), (rounds, other_rounds)
        assert not torch.equal(torch.cat([flat(model) for model in models]), begin)
        if method.topology.identical and averaged == [rounds, other_rounds]:
            assert torch.equal(anchors, others)


def test_a_ticket_leads_to_a_folder_or_says_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "run.ticket"
    Ticket.new("test", {}).at(("s3://bucket/run",)).write(path)
    assert read_ticket(path).folder == "s3://bucket/run"
    path.write_text(path.read_text().replace("s3://bucket/run", "nonsense"))
    with pytest.raises(UserError, match="is not of the form"):
        read_ticket(path)


def test_what_a_folder_needs_does_not_import_hivemind() -> None:
    code = "import sys, farflung.networks.folder, farflung.training.peer; sys.exit('hivemind' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.slow
def test_a_peer_that_is_killed_comes_back_and_nothing_is_left_but_the_last_state(tmp_path: Path) -> None:
    ticket = Ticket.new("test", {}).at(((tmp_path / "store").as_uri(),))
    ticket.write(tmp_path / "run.ticket")

    def outcomes(name: str) -> list[str]:
        path = tmp_path / f"{name}.txt"
        return path.read_text().split("\n") if path.exists() else []

    def start(name: str) -> Python:
        own = (tmp_path / "run.ticket", tmp_path / f"{name}.key", 400, tmp_path / f"{name}.txt")
        return Python(HERE / "folder_peer.py", *own)

    processes = {name: start(name) for name in ("one", "two")}
    try:
        until(lambda: "averaged" in outcomes("two"), 60)
        processes["two"].kill()
        processes["two"].wait()
        before = {name: len(outcomes(name)) for name in processes}
        processes["two"] = start("two")
        until(lambda: all("averaged" in outcomes(name)[before[name] :] for name in processes), 60)
        for process in processes.values():
            _, errors = process.communicate(timeout=patience(100))
            assert process.returncode == 0, errors
    finally:
        for process in processes.values():
            process.kill()
    seals = Seals(ticket.secret, Identity(tmp_path / "one.key"))
    left = [seals.note(path.name)[0].kind for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert left.count(Kind.STATE) in (1, 2) and set(left) == {Kind.STATE, Kind.PIECE}


@pytest.mark.slow
def test_a_run_begins_with_invite_and_goes_on_the_next_day_from_the_folder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at = ("--at", (tmp_path / "store").as_uri(), "--ticket", "run.ticket", "--name", "test", "--every", "4")
    assert run_here(monkeypatch, tmp_path, "invite", *at, "--train", "--out", "one", *SMALL, "--steps", "20") == 0
    assert run_here(monkeypatch, tmp_path, "status", "run.ticket", "--once") == 0
    assert "nobody trains now" in capsys.readouterr().out
    assert run_here(monkeypatch, tmp_path, "doctor", "run.ticket") == 0
    assert run_here(monkeypatch, tmp_path, "join", "run.ticket", "--out", "two") == 0
    events = next((tmp_path / "two" / "events").glob("*.jsonl")).read_text()
    assert '"joined"' in events and '"finished"' in events
    learnt = next((tmp_path / "one" / "events").glob("*.jsonl")).read_text()
    assert learnt.count('"event": "step"') == learnt.count('"peak_memory": ') > 0
    assert run_here(monkeypatch, tmp_path, "invite", *at, "--swarm", "--stages", "2", *SMALL, "--batch-size", "4") != 0
    assert "peers in a folder do not" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"swarm": True, "stages": 2}, "stages of a swarm call each other"),
        ({"shard": 2}, "add --gateway"),
    ],
)
def test_what_peers_in_a_folder_cannot_do_is_refused_in_a_line(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as told:
        check_folder(Settings.of(network="folder", **given))
    assert "\n" not in str(told.value)
