"""How peers find each other: at once, after outages, restarts of all, and when a daemon dies; whom they count."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from patience import patience, until
from processes import free_port
from test_internet import INFO, Run, member, run, table

from farflung.errors import UserError
from farflung.networks.internet import Identity, ListenAddress, Peers, Ticket
from farflung.networks.internet.contact.gossip import AT_A_TIME
from farflung.networks.internet.contact.streams import RequestRefusedError
from farflung.networks.peers.frames import FrameError
from farflung.networks.peers.identity import is_peer, rank_of
from farflung.networks.peers.member import STALLED_SECONDS, Member, member_in, signed
from farflung.networks.peers.members import A_TELLER, AN_ADDRESS, KNOWN, LOST

__all__ = ["run"]


class Meeting:
    """Peers of one run, whose ticket leads to all of them before any is there."""

    def __init__(self, folder: Path, count: int) -> None:
        self.identities = [Identity(folder / f"{number}.key") for number in range(count)]
        self.ports = [free_port() for _ in range(count)]
        places = zip(self.ports, self.identities, strict=True)
        self.ticket = Ticket.new("test", {}).at(
            tuple(f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity.peer}" for port, identity in places)
        )
        self.told: list[str] = []

    def start(self, number: int, first: bool = False, identity: Identity | None = None, port: int = 0) -> Peers:
        made = self.peers(number, first, identity, port)
        made.start(patience(40))
        return made

    def peers(self, number: int, first: bool = False, identity: Identity | None = None, port: int = 0) -> Peers:
        local = ListenAddress("127.0.0.1", port or self.ports[number])
        return Peers(self.ticket, identity or self.identities[number], local, INFO, self.told.append, first)


def know(peers: Peers, *others: Peers) -> bool:
    return {other.identity.peer for other in others} <= {one.peer for one in peers.members.proven()}


# Finding each other


def test_a_newcomer_knows_all_before_it_trains(run: Run) -> None:
    for number in range(5):
        assert len(run.join().members()) == number + 1


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("first", [False, True], ids=["all at once", "all with --first"])
def test_peers_that_begin_at_once_find_each_other(tmp_path: Path, first: bool) -> None:
    """Each calls while it listens, though nobody was there when it began."""
    meeting = Meeting(tmp_path, 3)
    with ThreadPoolExecutor(3) as pool:
        peers = list(pool.map(lambda number: meeting.start(number, first), range(3)))
    try:
        until(lambda: all(know(one, *(other for other in peers if other is not one)) for one in peers))
    finally:
        for one in peers:
            one.close()


def test_a_port_that_one_who_was_killed_is_about_to_leave_is_waited_for(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 1)
    with ThreadPoolExecutor(1) as pool, socket.create_server(("127.0.0.1", meeting.ports[0])):
        started = pool.submit(meeting.start, 0, True)
        time.sleep(2)
        assert not started.done()
    started.result().close()
    assert not meeting.told


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_one_whose_ticket_leads_nowhere_yet_calls_until_somebody_is_there(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meeting.start, 0)
        until(lambda: any("nobody answers yet at the ticket's 2 addresses" in line for line in meeting.told))
        late = meeting.start(1, first=True)
        early = waiting.result()
    try:
        assert know(early, late)
    finally:
        early.close()
        late.close()


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_who_is_alone_says_so_and_finds_the_other_when_it_is_back(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 2)
    one, other = meeting.start(0, first=True), meeting.start(1)
    other.close()
    until(lambda: any("no other peer of the run answers" in line for line in meeting.told))
    back = meeting.start(1, first=True)
    back._gossip.beat = lambda: None  # type: ignore[assignment, method-assign, return-value]
    try:
        until(lambda: know(one, back) and any("others of the run are there again" in line for line in meeting.told))
        assert sum("no other peer of the run answers" in line for line in meeting.told) == 1
    finally:
        one.close()
        back.close()


def test_who_is_lost_is_called_for_ever_and_ever_more_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peers, other = Meeting(tmp_path, 1).peers(0), Identity(tmp_path / "other")
    peers.members.hear(member_in(made_up_record(tmp_path / "other", 1)), first_hand=True)
    began, clock, calls = round(time.monotonic()), [0], list[tuple[str, int]]()
    monkeypatch.setattr(time, "monotonic", lambda: began + clock[0])
    monkeypatch.setattr(peers._gossip, "_call", lambda peer: calls.append((peer, clock[0])))
    monkeypatch.setattr(peers.background, "spawn", lambda call: None)
    for clock[0] in range(60, 24 * 3600, 5):
        peers._gossip._seek_the_lost()
    called = [at for peer, at in calls if peer == other.peer]
    pauses = [after - before for before, after in itertools.pairwise(called)]
    assert pauses[:6] == [10, 20, 40, 80, 160, 320] and set(pauses[6:]) == {600}
    assert called[-1] > 24 * 3600 - 610
    peers.close()


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_a_daemon_that_dies_is_started_again_at_its_place_and_the_third_death_ends_it(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 2)
    one, other = meeting.start(0, first=True), meeting.start(1)
    try:
        before = other.info["addresses"]
        for death in range(2):
            begun = time.time()
            os.kill(other._host.p2p._child.pid, signal.SIGKILL)
            until(lambda: one.members.by_rank[other.identity.rank].signed_at > begun + 1 and know(other, one))  # noqa: B023
            assert other.info["addresses"] == before and len(meeting.told) >= death + 1
        os.kill(other._host.p2p._child.pid, signal.SIGKILL)
        until(lambda: other.fault is not None)
        with pytest.raises(UserError, match=r"has died 3 times.*farflung join RUN/run.ticket --out RUN"):
            other.check()
    finally:
        one.close()
        other.close()


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("passes", [True, False])
def test_a_daemon_that_cannot_start_again_is_tried_again_and_then_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: bool
) -> None:
    monkeypatch.setattr("farflung.networks.internet.contact.peers.AGAIN_SECONDS", patience(1 if passes else 0))
    meeting = Meeting(tmp_path, 2)
    one, other = meeting.start(0, first=True), meeting.start(1)
    key, away = tmp_path / "1.key", tmp_path / "away.key"
    try:
        key.rename(away)
        key.mkdir()
        os.kill(other._host.p2p._child.pid, signal.SIGKILL)
        until(lambda: any("cannot start" in line and "tried again" in line for line in meeting.told))
        if passes:
            key.rmdir()
            away.rename(key)
            begun = time.time()
            until(lambda: one.members.by_rank[other.identity.rank].signed_at > begun and know(one, other))
            other.check()
        else:
            until(lambda: other.fault is not None)
            with pytest.raises(UserError, match="the libp2p daemon cannot start"):
                other.check()
    finally:
        one.close()
        other.close()


def test_a_machine_that_was_suspended_has_a_clock_that_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    peers = Peers(Ticket.new("test", {}), Identity(tmp_path / "k"), ListenAddress("127.0.0.1"), INFO, told.append)
    slept = 3600.0
    clocks = {"time": time.time, "clock_gettime": time.clock_gettime}
    monkeypatch.setattr(time, "time", lambda: clocks["time"]() + slept)
    monkeypatch.setattr(
        time, "clock_gettime", lambda clock: clocks["clock_gettime"](clock) + slept * (clock == time.CLOCK_BOOTTIME)
    )
    peers._gossip._watch_the_clock()
    assert not told
    monkeypatch.setattr(time, "time", lambda: clocks["time"]() + slept + 10)
    peers._gossip._watch_the_clock()
    assert len(told) == 1 and "has jumped by +10 s" in told[0]
    peers.close()


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_of_two_with_one_key_the_younger_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farflung.networks.internet.contact.peers.CLOCK_SECONDS", 0.1)
    meeting = Meeting(tmp_path, 2)
    first, elder = meeting.start(0, first=True), meeting.start(1)
    shutil.copy(tmp_path / "1.key", tmp_path / "copy.key")
    younger = meeting.start(1, identity=Identity(tmp_path / "copy.key"), port=free_port())
    try:
        until(lambda: younger.fault is not None)
        with pytest.raises(UserError, match=r"another process takes part with the same key.*remove peer.key"):
            younger.check()
        assert elder.fault is None and first.fault is None
    finally:
        for one in (younger, elder, first):
            one.close()


# Whom a peer counts


def test_those_that_were_only_heard_of_count_for_nothing() -> None:
    members = table()
    members.hear(member(1, 10**9))
    assert not members.training() and members.median_step() is None and members.unproven()
    again = member(1, 7)
    members.hear(again, first_hand=True)
    assert members.median_step() == 7


def test_who_first_had_a_rank_keeps_it() -> None:
    members = table()
    members.hear(member(1, 5), first_hand=True)
    other = member(1, 500)
    other.peer, other.signed_at = "another", 9.0
    assert not members.hear(other, first_hand=True)
    assert members.by_rank[1].step == 5


@pytest.mark.parametrize("content", [b"", b"garbage", bytes.fromhex("0800120130"), bytes(300)])
def test_a_file_that_holds_no_key_is_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "peer.key").write_bytes(content)
    with pytest.raises(UserError, match=r"peer.key holds an older farflung's key.*another --out"):
        Identity(tmp_path / "peer.key")


def test_a_key_is_its_owner_s_alone_and_stays(tmp_path: Path) -> None:
    one, again = (Identity(tmp_path / "peer.key") for _ in range(2))
    assert one.peer == again.peer and (tmp_path / "peer.key").stat().st_mode & 0o077 == 0


def test_one_key_has_one_spelling(tmp_path: Path) -> None:
    peer = Identity(tmp_path / "key").peer
    assert is_peer(peer) and not any(map(is_peer, (f"{peer} ", f" {peer}", f"{peer}\n", peer[:-1], "", "\ud800")))
    assert not is_peer(peer * 10**6), "which would take days to find out by its number"


def test_one_signature_has_one_spelling(tmp_path: Path) -> None:
    record = made_up_record(tmp_path / "key", 1)
    member_in(record)
    with pytest.raises(FrameError, match="not signed"):
        member_in({**record, "signature": " ".join(record["signature"][n : n + 2] for n in range(0, 128, 2))})


def test_ranks_are_numbers_that_floats_and_json_hold_and_depend_on_the_whole_key() -> None:
    ranks = {rank_of(f"12D3KooW{number}") for number in range(10_000)}
    assert len(ranks) == 10_000 and max(ranks) < 1 << 52 and all(int(float(rank)) == rank for rank in ranks)


def test_a_table_is_bounded_and_the_proven_stay() -> None:
    members = table()
    for rank in range(KNOWN):
        members.hear(member(rank, 1), first_hand=True)
    for rank in range(KNOWN, 20 * KNOWN):
        assert not members.hear(member(rank, 1))
    assert members.by_rank.keys() == set(range(KNOWN))
    assert members.hear(member(10_000, 1), first_hand=True)
    assert len(members.by_rank) == KNOWN and 10_000 in members.by_rank
    for rank in list(members.by_rank):
        members.failed(rank)
    for rank in range(20_000, 20_000 + 10 * LOST):
        members.hear(member(rank, 1), first_hand=True)
        members.failed(rank)
    assert len(members.by_rank) <= LOST + KNOWN


def test_no_machine_holds_more_than_some_members() -> None:
    members = table()
    for rank in range(200):
        one = member(rank, 1)
        one.addresses = (f"/ip4/203.0.113.7/tcp/{rank}/p2p/{rank}",)
        members.hear(one, first_hand=True)
    assert len(members.by_rank) == AN_ADDRESS
    for rank in list(members.by_rank):
        members.failed(rank)
    again = member(1000, 1)
    again.addresses = ("/ip4/203.0.113.7/tcp/9/p2p/9",)
    assert members.hear(again, first_hand=True), "who has gone takes nobody's place"


def test_members_that_were_made_up_at_a_newcomer_s_address_do_not_keep_it_out() -> None:
    members = table()
    for rank in range(AN_ADDRESS):
        made_up = member(rank, 1)
        made_up.addresses = (f"/ip4/203.0.113.7/tcp/{rank + 1}/p2p/{rank}",)
        made_up.teller = f"liar {rank % 2}"
        members.hear(made_up)
    newcomer = member(1000, 1)
    newcomer.addresses = ("/ip4/203.0.113.7/tcp/4001/p2p/1000",)
    assert len(members.by_rank) == AN_ADDRESS and members.hear(newcomer, first_hand=True)


@pytest.mark.slow
def test_one_that_refuses_to_tell_news_does_not_keep_others_from_being_asked(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farflung.networks.internet.contact.gossip.BEAT_SECONDS", 0.5)
    one, _, refuser = (run.join() for _ in range(3))
    run.all_know_each_other()

    async def refuse(stream: Any, frame: Any) -> None:
        raise RequestRefusedError("no")

    async def nothing() -> None:
        pass

    monkeypatch.setitem(refuser.peers.handlers, "news", refuse)
    monkeypatch.setattr(refuser.peers._gossip, "beat", nothing)
    asked = []
    swap = one.peers._gossip._swap
    monkeypatch.setattr(one.peers._gossip, "_swap", lambda other: asked.append(other.rank) or swap(other))
    until(lambda: len(asked) >= 10)
    assert asked.count(refuser.rank) <= 7, "it takes turns with the others"


def test_one_can_tell_of_no_more_than_some_that_it_may_have_made_up() -> None:
    members = table()
    for rank in range(3 * A_TELLER):
        made_up = member(rank, 1)
        made_up.teller = "liar"
        members.hear(made_up)
    other = member(10_000, 1)
    other.teller = "another"
    assert members.hear(other) and len(members.by_rank) == A_TELLER + 1


@pytest.mark.slow
def test_members_that_one_has_made_up_keep_nobody_from_being_greeted(tmp_path: Path, run: Run) -> None:
    one, honest = run.join(), run.join()
    peers = one.peers
    silent = socket.create_server(("127.0.0.1", 0))
    made_up = [made_up_record(tmp_path / f"{number}.key", silent.getsockname()[1]) for number in range(200)]

    async def hear() -> None:
        peers.members.by_rank.clear()
        for begin in range(0, len(made_up), 40):
            peers._gossip.hear(made_up[begin : begin + 40], f"liar {begin // 100}")
            await peers._gossip.beat()
        peers._gossip.hear([honest.peers.record()], "honest")

    with silent:
        peers.background.run(hear(), patience(20))
        assert len(peers._gossip._greetings) == AT_A_TIME
        until(lambda: know(peers, honest.peers), 20)


def made_up_record(path: Path, port: int) -> dict[str, Any]:
    """Of a member that nobody is, at an address where nobody says a word."""
    identity = Identity(path)
    info = {"session": path.stem, "host": "x", "addresses": [f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity.peer}"]}
    info |= {"began": 0.0, "listed": True, "step": 1, "rate": 1.0, "trains": True, "shapes": "", "facts": {}}
    return signed(identity, info)


def test_one_that_could_not_be_reached_is_gone_until_it_says_something_newer() -> None:
    members = table()
    now = time.time()
    members.hear(at(1, now - 5), first_hand=True)
    members.failed(1)
    members.hear(at(1, now - 1))
    assert not members.proven()
    members.hear(at(1, now + 1))
    assert [one.rank for one in members.proven()] == [1]


def at(rank: int, signed_at: float) -> Member:
    one = member(rank, 1)
    one.signed_at = signed_at
    return one


def test_one_alone_cannot_say_that_the_run_is_nearly_over() -> None:
    """Nor can two; a peer that has just come believes what it is told, and so does one whose three others agree."""
    members, newcomer = table(step=100, rate=2.0), table()
    for one in (members, newcomer):
        one.hear(member(1, 10**9), first_hand=True)
    assert members.median_step() == 100 and newcomer.median_step() == 10**9
    later = member(1, 10**9, rate=1e6)
    later.signed_at += 1e9
    members.by_rank[1].believed_at -= 10
    members.by_rank[1].heard -= 1e9
    members.hear(later)
    believed = members.median_step()
    assert believed is not None and 100 < believed <= 100 + 32 * 2.0 * 10 + 1
    for rank in (2, 3):
        members.hear(member(rank, 5000), first_hand=True)
    assert members.median_step() == 5000


def test_one_that_was_away_for_long_goes_to_where_the_other_is() -> None:
    members = table(step=100, rate=2.0)
    members.hear(member(1, 100, rate=2.0), first_hand=True)
    back = member(1, 100 + 7200, rate=2.0)
    back.signed_at += 3600
    members.by_rank[1].believed_at -= 3600
    members.hear(back)
    assert members.median_step() == pytest.approx(7300, abs=1)


def test_one_that_beats_but_no_longer_trains_is_not_waited_for() -> None:
    members = table()
    members.hear(member(1, 40, rate=1.0), first_hand=True)
    hung = members.by_rank[1]
    assert hung.arrives(50, 20.0) and members.training()
    hung.moved -= STALLED_SECONDS + 1
    again = member(1, 40, rate=1.0)
    again.signed_at = 2.0
    members.hear(again)
    assert not members.by_rank[1].arrives(50, 20.0) and not members.training()
    moved = member(1, 41, rate=1.0)
    moved.signed_at = 3.0
    members.hear(moved)
    assert members.by_rank[1].arrives(50, 20.0)


def test_one_that_says_it_trains_and_never_does_is_not_waited_for() -> None:
    members = table()
    members.hear(member(1, 40), first_hand=True)
    assert members.training()
    members.by_rank[1].moved -= STALLED_SECONDS + 1
    assert not members.training() and not members.by_rank[1].arrives(50, 20.0)
    members.heard_step(1, 41)
    assert members.training(), "its first step has taken long"


def test_one_of_many_of_whom_news_is_rare_is_waited_for() -> None:
    members = table()
    members.hear(member(1, 40, rate=1.0), first_hand=True)
    members.by_rank[1].heard -= STALLED_SECONDS + 1
    members.by_rank[1].moved -= STALLED_SECONDS + 1
    members.by_rank[1].lasts = 2 * STALLED_SECONDS
    assert members.training()


def test_the_time_of_a_long_round_does_not_count_as_time_without_a_step() -> None:
    members = table(step=40, rate=1.0)
    members.hear(member(1, 40, rate=1.0), first_hand=True)
    members.stepped(1.0)
    members._stepped -= 100.0  # type: ignore[operator]
    members.by_rank[1].moved -= 100.0
    members.stepped(1.0)
    assert members.training()
    members.by_rank[1].moved -= STALLED_SECONDS
    members.stepped(1.0)
    assert not members.training(), "it goes on no more, and this one does"


def test_the_more_there_are_the_longer_each_counts_as_there() -> None:
    random.seed(0)
    few, many = table(), table()
    for members, count in ((few, 3), (many, 100)):
        for rank in range(count):
            members.hear(member(rank, 1), first_hand=True)
    assert few.by_rank[2].lasts < 25 and many.by_rank[99].lasts > 100
