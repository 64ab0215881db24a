"""A live run on the internet with one liar in it: whatever it stores, answers or serves, the others go on."""

from __future__ import annotations

import gc
import json
import logging
import struct
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from patience import patience, until
from test_internet import Run, two_peers, unspoilt

from farflung.networks.internet import Identity, InternetNetwork
from farflung.networks.internet.contact.streams import PeerStream
from farflung.networks.internet.matchmaker import VISITED, _turn
from farflung.networks.peers.guard import MISSED
from farflung.networks.peers.identity import rank_of
from farflung.networks.peers.member import signed
from farflung.testing.liars import Liar

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def quick_beats() -> Iterator[None]:
    """These tests mostly wait for beats."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("farflung.networks.internet.contact.gossip.BEAT_SECONDS", 0.5)
        yield


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    yield from two_peers(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def pair(live: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    return unspoilt(live, monkeypatch)


@pytest.fixture
def liar(pair: Run, tmp_path: Path) -> Iterator[Liar]:
    made = Liar(pair.ticket, tmp_path / "liar.key", "s")
    yield made
    made.close()
    for peer in pair.peers:
        peer.peers.members.by_rank.pop(made.peers.identity.rank, None)


def signed_at(other: InternetNetwork, at: InternetNetwork) -> float:
    return at.peers.members.by_rank[other.rank].signed_at


def go_on(pair: Run) -> None:
    """Each hears the other's next beats."""
    one, other = pair.peers
    now = time.time()
    until(lambda: signed_at(one, other) > now and signed_at(other, one) > now)


def news(*records: Any) -> bytes:
    return zlib.compress(json.dumps(records).encode())


def made_up(folder: Path, number: int, liar: Liar) -> dict[str, Any]:
    """The record of one that does not exist, signed as it should be."""
    identity = Identity(folder / f"{number}.key")
    info = {**liar.peers.info, "addresses": [f"/ip4/127.0.0.1/tcp/1/p2p/{identity.peer}"], "trains": True}
    return signed(identity, info)


# News


def test_no_news_end_a_beat_or_shut_out_a_newcomer(pair: Run, liar: Liar) -> None:
    sound = liar.peers.record()
    about = {**sound["about"], "facts": {"loss": 10**401}}
    for content in (
        b"",
        b"no zlib",
        zlib.compress(b"[" * 60_000),
        zlib.compress(bytes(1 << 24)),
        news(*[sound] * 60),
        news([], None, "x", {"about": "[]", "signature": ""}, {"about": [], "signature": ""}, {"about": {}}),
        news({"about": about, "signature": "00" * 64}, {**sound, "age": "old"}, {**sound, "signature": "x"}),
    ):
        liar.spread(content)
        pair.peers[0].peers.guard._banned.clear()
        pair.peers[0].peers._gossip._came.clear()
    go_on(pair)
    newcomer = pair.join()
    try:
        assert newcomer.peers.members.by_rank.keys() >= {peer.rank for peer in pair.peers[:2]}
    finally:
        pair.peers.remove(newcomer)
        newcomer.close()
    assert sum(peer.refused.get("forged record", 0) for peer in pair.peers) >= 6
    assert sum(peer.refused.get("bad request", 0) for peer in pair.peers) >= 3


def test_a_record_of_before_hides_no_newer_one_and_takes_no_step_back(pair: Run, liar: Liar) -> None:
    one, victim = pair.peers
    before = victim.peers.record()
    victim.peers.info["step"] += 50
    go_on(pair)
    known = one.peers.members.by_rank[victim.rank]
    liar.spread(news({**before, "age": 0.0}))
    assert one.peers.members.by_rank[victim.rank].signed_at >= known.signed_at
    assert one.peers.members.by_rank[victim.rank].step == victim.peers.info["step"]
    go_on(pair)


def test_peers_that_do_not_exist_count_for_nothing_and_are_not_handed_on(pair: Run, liar: Liar, tmp_path: Path) -> None:
    one, other = pair.peers
    ghosts = [made_up(tmp_path, number, liar) for number in range(40)]
    members = one.members()
    assert "refused" not in liar.spread(news(*ghosts))
    assert one.members() == members
    ranks = {rank_of(ghost["about"]["peer"]) for ghost in ghosts}
    until(lambda: not ranks & one.peers.members.by_rank.keys())
    go_on(pair)
    assert not ranks & other.peers.members.by_rank.keys()


def test_one_that_tells_news_without_end_is_not_answered(pair: Run, liar: Liar) -> None:
    answers = [liar.spread(news(liar.peers.record())) for _ in range(20)]
    assert any("it was told a moment ago" in answer.get("refused", "") for answer in answers)
    assert pair.peers[0].refused["too much news"] > 0


def test_a_beat_that_fails_is_told_once_and_the_next_ones_go_on(pair: Run) -> None:
    one = pair.peers[0]
    told = len(pair.told)
    one.peers.info["facts"] = {"loss": object()}
    try:
        until(lambda: len(pair.told) > told)
        time.sleep(2)
    finally:
        one.peers.info["facts"] = {"loss": 1.0}
    lines = [line for line in pair.told[told:] if "has failed" in line]
    assert lines and len(lines) == len(set(lines)) <= 2 and all("not JSON serializable" in line for line in lines)
    blamed = one.refused.keys() - {"too much news"}  # beats are quick here, and an honest one's may come too often
    assert not blamed, "who hears of it is not to blame"
    go_on(pair)


# Meetings


def meet(liar: Liar, answer: bytes) -> None:
    """Has a liar answer every meeting so."""

    async def on_meet(stream: PeerStream, _: Any) -> None:
        body = answer % stream.member.rank
        stream.writer.write(struct.pack(">I", len(body)) + body)
        await stream.writer.drain()

    liar.peers.handlers["meet"] = on_meet
    liar.peers.info["trains"] = True


@pytest.mark.parametrize(
    "answer",
    [
        b'{"weights":[[%d,1],[5,1' + b"0" * 401 + b']],"behind":false}',
        b'{"weights":' + b"[" * 60_000 + b"%d",
        b'{"weights":[[%d,1],[7,1e999]]}',
        b'{"refused":{"why":[%d]}}',
        b'{"better":[%d]}',
        b'{"better":"\\ud800%d"}',
    ],
    ids=["huge", "deep", "infinite", "refused", "better", "half a character"],
)
def test_a_host_s_answer_that_cannot_be_read_costs_one_question(pair: Run, liar: Liar, answer: bytes) -> None:
    """The next host is asked, by all alike."""
    gc.collect()  # nothing that tests before have left shall be finalized at the depth of the deep one
    meet(liar, answer)
    rank = liar.peers.identity.rank
    until(lambda: all(rank in peer.members() for peer in pair.peers))
    group = tuple(sorted(peer.rank for peer in pair.peers))
    keys = [f"round {number} of {answer[:30]!r}" for number in range(1000)]

    def asks_the_liar_first(key: str) -> bool:
        hosts = [peer._matchmaker._hosts(key)[:2] for peer in pair.peers]
        return hosts[0] == hosts[1] and hosts[0][0] == rank and hosts[0][1] in group

    key = next(filter(asks_the_liar_first, keys))

    def met(peer: InternetNetwork) -> tuple[int, ...]:
        return peer.meet(group, key, 5, 1.0, "", lambda party: party.group).wait(patience(30))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(met, pair.peers)) == [group, group]


def test_a_host_that_keeps_others_waiting_is_asked_last_after_a_few_times(
    pair: Run, liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farflung.networks.internet.matchmaker.PROMPT_SECONDS", 0.5)
    one, rank, visits = pair.peers[0], liar.peers.identity.rank, list[int]()

    async def on_meet(stream: PeerStream, _: Any) -> None:
        visits.append(stream.member.rank)
        await stream.reader.read(1)

    liar.peers.handlers["meet"] = on_meet
    liar.peers.info["trains"] = True
    for number in range(MISSED + 2):
        until(lambda: rank in one.members())  # its next news says that it is there
        key = asked_first(one, rank, f"try {number}")
        one.peers.background.run(one._matchmaker.meet(one.members(), key, 5, 1.0, "", 0.0), patience(20))
    assert visits == [one.rank] * MISSED


@pytest.mark.parametrize("better", [True, False])
def test_a_host_that_sends_others_on_to_nobody_is_asked_last(
    pair: Run, liar: Liar, tmp_path: Path, better: bool
) -> None:
    """Six visits are made in all; to one that is no better none is."""
    one, rank, visits = pair.peers[0], liar.peers.identity.rank, list[int]()
    ghosts = {rank_of(ghost["about"]["peer"]): ghost for ghost in (made_up(tmp_path, n, liar) for n in range(20))}

    async def on_meet(stream: PeerStream, frame: Any) -> None:
        visits.append(stream.member.rank)
        by_turn = sorted(ghosts, key=lambda ghost: _turn(frame["key"], ghost))
        await stream.tell({"better": ghosts[by_turn[0 if better else -1]]})

    liar.peers.handlers["meet"] = on_meet
    liar.peers.info["trains"] = True
    until(lambda: rank in one.members())
    keys = (asked_first(one, rank, f"going {number}") for number in range(100))
    turns = ((key, sorted(_turn(key, one) for one in ghosts)) for key in keys)
    key = next(key for key, (first, *_, last) in turns if first < _turn(key, rank) < last)
    one.peers.background.run(one._matchmaker.meet(one.members(), key, 5, 1.0, "", 0.0), patience(60))
    assert len(visits) == (VISITED // 2 if better else 1)
    assert (one._matchmaker._hosts(key)[-1] == rank) is better and one.refused["bad answer"] == (not better)


def asked_first(one: InternetNetwork, host: int, what: str = "") -> str:
    """A round for which a host is to be asked first."""
    keys = (f"round {number} of {what}" for number in range(1000))
    return next(key for key in keys if min(one.members(), key=lambda rank: _turn(key, rank)) == host)


# Addresses


@pytest.mark.parametrize("address", ["garbage", "/ip4/999.1.1.1/tcp/1/p2p/{}", "/p2p/{}", "/ip4/127.0.0.1/tcp/1"])
def test_a_peer_with_an_address_that_is_none_is_not_taken_for_a_member(pair: Run, liar: Liar, address: str) -> None:
    peer, one = liar.peers.identity.peer, pair.peers[0].peers

    async def lie() -> list[str]:
        return [address.format(peer)]

    liar.peers._host.addresses = lie  # type: ignore[method-assign]
    liar.peers.background.run(liar.peers.look_around(), patience(20))
    with pytest.raises(Exception, match="address"):
        liar.peers.background.run(liar.peers.handshake(one.identity.peer), patience(20))
    assert address.format(peer) not in one.addresses


# Leaving


def test_who_leaves_when_its_daemon_is_gone_leaves_in_silence(pair: Run, caplog: pytest.LogCaptureFixture) -> None:
    """As after Ctrl-C, which a terminal also sends to the daemon."""
    peer = pair.join()
    pair.peers.remove(peer)
    peer.peers._host.p2p._child.terminate()
    until(lambda: any("has died; it is started again" in line for line in pair.told))
    peer.close()
    del peer
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio" and record.levelno >= logging.WARNING]
