"""A live run on the internet with one liar in it: whatever it stores, answers or serves, the others go on."""

from __future__ import annotations

import gc
import json
import logging
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils import get_dht_time
from hivemind.utils.timed_storage import ValueWithExpiration
from patience import patience, until
from test_internet import Run, two_peers, unspoilt

from farflung.networks.internet import InternetNetwork
from farflung.networks.internet.contact.streams import PeerStream
from farflung.testing.liars import Liar

pytestmark = pytest.mark.slow

YEARS = 10 * 365 * 86400.0


@pytest.fixture(scope="module", autouse=True)
def quick_beats() -> Iterator[None]:
    """These tests mostly wait for beats."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("farflung.networks.internet.contact.directory.BEAT_SECONDS", 0.5)
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
    made.peers._directory._node.protocol.record_validator = None  # it stores what it likes
    yield made
    made.close()
    for peer in pair.peers:
        peer.peers.members.by_rank.pop(made.peers.identity.rank, None)


def store(liar: Liar, subkey: str, record: Any, seconds: float, key: str = "") -> None:
    """What a liar's own node makes the others' store."""
    directory = liar.peers._directory
    liar.peers.background.run(
        directory._node.store(key or directory._key, record, get_dht_time() + seconds, subkey=subkey), patience(30)
    )


def signed(liar: Liar, **info: Any) -> dict[str, str]:
    """A record in the liar's own name."""
    text = json.dumps({**liar.peers.info, **info})
    return {"about": text, "signature": liar.peers.identity.sign(text.encode())}


def beat_of(other: InternetNetwork, at: InternetNetwork) -> int:
    return at.peers.members.by_rank[other.rank].beat


def go_on(pair: Run) -> None:
    """Each hears the other's next beats: both write their records, and both read them."""
    one, other = pair.peers
    begun = beat_of(one, other), beat_of(other, one)
    until(lambda: beat_of(one, other) > begun[0] + 1 and beat_of(other, one) > begun[1] + 1)


# The directory


def test_no_record_in_the_directory_ends_a_beat_or_shuts_out_a_newcomer(pair: Run, liar: Liar) -> None:
    for number, record in enumerate(
        (
            {"about": "[]", "signature": ""},
            {"about": "[" * 60_000, "signature": ""},
            [[]],
            None,
            {"about": "{}"},
        )
    ):
        store(liar, f"Qmnobody{number}", record, 3600)
    store(liar, liar.peers.identity.peer, signed(liar, facts={"loss": 10**401}), 15)
    go_on(pair)
    newcomer = pair.join()
    try:
        assert newcomer.peers.members.by_rank.keys() >= {peer.rank for peer in pair.peers[:2]}
    finally:
        pair.peers.remove(newcomer)
        newcomer.close()
    assert sum(peer.refused.get("forged record", 0) for peer in pair.peers) > 0


@pytest.mark.parametrize("replayed", [False, True], ids=["garbage", "its own of before"])
def test_nobody_can_hide_another_s_record(pair: Run, liar: Liar, replayed: bool) -> None:
    victim = pair.peers[1]
    record: Any = {"about": "x", "signature": ""}
    if replayed:
        directory = liar.peers._directory
        found = liar.peers.background.run(directory._node.get(directory._key, latest=True), patience(30))
        record = found.value[victim.peers.identity.peer].value
    store(liar, victim.peers.identity.peer, record, YEARS)
    begun = victim.peers.info["beat"]
    until(lambda: victim.peers.info["beat"] > begun + 1)  # the one before it has been written
    found = pair.peers[0].peers.background.run(pair.peers[0].peers._directory.read(), patience(20))
    assert max(member.beat for member in found if member.rank == victim.rank) > begun


def test_one_s_own_record_lasts_only_as_long_as_others_and_nothing_else_is_stored(pair: Run, liar: Liar) -> None:
    until_then = get_dht_time() + YEARS
    store(liar, liar.peers.identity.peer, signed(liar, until=until_then), YEARS)
    store(liar, "anything", "at all", 60, key="another key")
    for peer in pair.peers:
        stored = peer.peers._directory._node.protocol.storage
        ((_, record),) = stored.items()
        kept = dict(record.value.items())
        assert liar.peers.identity.peer in kept
        assert all(item.expiration_time < get_dht_time() + 60 for item in kept.values())


def test_a_node_that_answers_with_an_empty_directory_that_never_expires_hides_nobody(pair: Run, liar: Liar) -> None:
    one, other = pair.peers
    protocol = liar.peers._directory._node.protocol
    (key,) = [key for key, _ in one.peers._directory._node.protocol.storage.items()]
    protocol.storage.data[key] = ValueWithExpiration(DictionaryDHTValue(), float("inf"))

    async def read_without_own_copy() -> set[str]:
        node = one.peers._directory._node
        node.protocol.storage.clear()
        node.protocol.cache.clear()
        return {member.peer for member in await one.peers._directory.read()}

    for _ in range(10):
        assert other.peers.identity.peer in one.peers.background.run(read_without_own_copy(), patience(20))


def test_a_beat_that_fails_is_told_once_and_the_next_ones_go_on(pair: Run) -> None:
    one = pair.peers[0]
    told = len(pair.told)
    one.tell_others(loss=object())  # type: ignore[arg-type]
    try:
        until(lambda: len(pair.told) > told)
        begun = one.peers.info["beat"]
        until(lambda: one.peers.info["beat"] > begun + 2)
    finally:
        one.tell_others(loss=1.0)
    assert ["not JSON serializable" in line for line in pair.told[told:]] == [True]
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
    ],
    ids=["huge", "deep", "infinite", "refused"],
)
def test_a_host_s_answer_that_cannot_be_read_costs_one_question(pair: Run, liar: Liar, answer: bytes) -> None:
    """The next host is asked, by all alike."""
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


# Addresses


@pytest.mark.parametrize("address", ["garbage", "/ip4/999.1.1.1/tcp/1/p2p/{}", "/p2p/{}", "/ip4/127.0.0.1/tcp/1"])
def test_a_peer_with_an_address_that_is_none_is_not_taken_for_a_member(pair: Run, liar: Liar, address: str) -> None:
    peer = liar.peers.identity.peer
    liar.peers.info["addresses"] = [address.format(peer)]
    one = pair.peers[0].peers
    with pytest.raises(Exception, match="address"):
        liar.peers.background.run(liar.peers.handshake(one.identity.peer), patience(20))
    assert address.format(peer) not in one.addresses


# Leaving


def test_who_leaves_when_its_daemon_is_gone_leaves_in_silence(pair: Run, caplog: pytest.LogCaptureFixture) -> None:
    """As after Ctrl-C, which a terminal also sends to the daemon."""
    peer = pair.join()
    pair.peers.remove(peer)
    peer.peers._host.p2p._child.terminate()
    info, begun = peer.peers.info, peer.peers.info["beat"]
    until(lambda: info["beat"] > begun + 1)
    peer.close()
    del peer
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio" and record.levelno >= logging.WARNING]
