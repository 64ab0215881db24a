"""The internet network: who is let in, what is refused, who meets whom, and what a state is made of."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import os
import random
import signal
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from patience import patience, until
from processes import free_port

from farflung.errors import UserError
from farflung.formats import PROTOCOL
from farflung.networks import Party, PeerLostError, Pending, SharedState, from_env
from farflung.networks.internet import (
    Identity,
    InternetNetwork,
    ListenAddress,
    Peers,
    Ticket,
    examine,
    read_ticket,
    transport,
)
from farflung.networks.internet.contact import host
from farflung.networks.internet.contact.background import Background
from farflung.networks.internet.contact.gossip import news_in
from farflung.networks.internet.contact.streams import PeerStream, RequestRefusedError
from farflung.networks.internet.gathering import party_of
from farflung.networks.internet.matchmaker import _turn
from farflung.networks.internet.states import snapshots
from farflung.networks.peers import packing
from farflung.networks.peers.admission import check_clock
from farflung.networks.peers.frames import LARGEST_FRAME, FrameError, encoded, read_frame
from farflung.networks.peers.guard import (
    BAN_SECONDS,
    FEW,
    MISSED,
    STREAMS,
    STREAMS_PER_PEER,
    STRIKES,
    UNPROVEN,
    UNPROVEN_PER_PEER,
    Guard,
)
from farflung.networks.peers.manifests import described
from farflung.networks.peers.member import Member, member_in, signed
from farflung.networks.peers.members import Members
from farflung.networks.peers.ticket import NobodyAnswersError
from farflung.testing.liars import Liar, Stranger, as_a_stranger

PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
INFO = {"version": "1", "settings": "s", "shapes": "", "host": "here", "trains": True}


class Run:
    """Peers of one run in this process, each with a host and a thread of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.told: list[str] = []
        first = Identity(folder / "0.key").peer
        self.ticket = Ticket.new("test", {}).at((f"/ip4/127.0.0.1/tcp/{self.port}/p2p/{first}",))
        self.peers: list[InternetNetwork] = []

    def join(self, **info: Any) -> InternetNetwork:
        number = len(self.peers)
        local = ListenAddress("127.0.0.1", 0 if number else self.port)
        identity = Identity(self.folder / f"{number}.key")
        peers = Peers(self.ticket, identity, local, {**INFO, **info}, self.told.append, first=not number)
        self.peers.append(InternetNetwork(peers, largest=1 << 24, deadline=patience(60)))
        return self.peers[-1]

    def all_know_each_other(self) -> None:
        until(lambda: all(len(peer.members()) == len(self.peers) for peer in self.peers))

    def close(self) -> None:
        for peer in self.peers:
            peer.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.close()


def two_peers(folder: Path) -> Iterator[Run]:
    """A run of two, until they are no longer wanted."""
    made = Run(folder)
    made.join()
    made.join()
    made.all_know_each_other()
    yield made
    made.close()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    yield from two_peers(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def pair(live: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Two peers that have refused nothing yet; what a test makes one believe of another is taken back."""
    return unspoilt(live, monkeypatch)


def unspoilt(live: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    live.told.clear()
    for peer in live.peers:
        peer.refused.clear()
        for told in ("step", "rate", "trains"):  # one that fetches a state does not train
            monkeypatch.setitem(peer.peers.info, told, peer.peers.info[told])
        for member in peer.peers.members.by_rank.values():
            member.moved = time.monotonic()  # they never train
            for name in ("step", "rate", "believed", "failed"):
                monkeypatch.setattr(member, name, getattr(member, name))
    live.all_know_each_other()
    return live


# Start and end


def apart(folder: Path, name: str, told: list[str]) -> Peers:
    """One that calls nobody."""
    local = ListenAddress("127.0.0.1")
    return Peers(Ticket.new("test", {}), Identity(folder / name), local, INFO, told.append, first=True)


def test_who_leaves_while_it_starts_lets_others_start(tmp_path: Path) -> None:
    told: list[str] = []
    leaving, staying = apart(tmp_path, "1.key", told), apart(tmp_path, "2.key", told)
    with ThreadPoolExecutor(1) as pool:
        with host._STARTING:  # as while another peer of this process starts
            started = pool.submit(leaving.start, patience(20))
            until(lambda: asyncio.all_tasks(leaving.background._loop))
            time.sleep(1)
            leaving.close()
        with pytest.raises(BaseException, match=r"^$"):
            started.result(patience(20))
    staying.start(patience(5))
    staying.close()
    assert not told


def test_who_leaves_while_its_daemon_starts_leaves_none_behind(tmp_path: Path) -> None:
    told: list[str] = []
    begun = children()
    for number in range(3):
        leaving = apart(tmp_path, f"{number}.key", told)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(leaving.start, patience(20))
            until(lambda: children() - begun)
            leaving.close()
    until(lambda: not children() - begun)
    assert not told


def children() -> set[str]:
    """The processes of this one."""
    return {*subprocess.run(["pgrep", "-P", str(os.getpid())], capture_output=True, text=True).stdout.split()}


def test_leaving_before_the_start_or_twice_is_done_at_once(tmp_path: Path) -> None:
    told: list[str] = []
    early, twice = apart(tmp_path, "1.key", told), apart(tmp_path, "2.key", told)
    early.close()
    twice.start(patience(20))
    twice.close()
    began = time.monotonic()
    twice.close()
    assert time.monotonic() - began < 8, "it has waited for a thread that has ended"
    assert not told


# Tickets


def test_a_ticket_is_read_as_it_was_written_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    ticket = Ticket.new('a "run" 🚀', {"every": 3, "model": "tiny"}).at((f"/ip4/1.2.3.4/tcp/5/p2p/{PEER}",))
    ticket.write(tmp_path / "run.ticket")
    assert read_ticket(tmp_path / "run.ticket") == ticket
    assert (tmp_path / "run.ticket").stat().st_mode & 0o077 == 0
    assert ticket.secret not in ticket.run


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name = 3", "it has no name"),
        ("not toml", "is no ticket"),
        ('name="x"\nsecret="00"\naddresses=[]\n[settings]', "not 64 hexadecimal digits"),
        (f'name="../x"\nsecret="{"0" * 64}"\naddresses=[]\n[settings]', "run's name is '../x'"),
        ("every=1979-05-27", "is no ticket"),
        (f"every={'9' * 5000}", "is no ticket"),
        (f"every={'[' * 5000}", "is no ticket"),
        (f'name="x"\nsecret="{"0" * 64}"\naddresses=["host:1"]\n[settings]', "is not of the form"),
        (f'name="x"\nsecret="{"0" * 64}"\naddresses=["garbage/p2p/{PEER}"]\n[settings]', "is not of the form"),
    ],
)
def test_a_damaged_ticket_is_refused_in_one_line(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(UserError, match=says) as error:
        read_ticket(tmp_path / "t")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["", "..", "../up", "a/b", "a\\b", ".hidden", "a\nb", "a\udcff", "x" * 65])
def test_a_run_cannot_have_a_name_that_no_folder_may_have(name: str) -> None:
    with pytest.raises(UserError, match="choose one of at most 64 letters") as error:
        Ticket.new(name, {})
    assert "\n" not in str(error.value)
    str(error.value).encode()


def test_a_missing_ticket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the ticket"):
        read_ticket(tmp_path / "none")


# Frames


def parsed(content: bytes) -> dict[str, Any]:
    async def read() -> dict[str, Any]:
        reader = asyncio.StreamReader()
        reader.feed_data(content)
        reader.feed_eof()
        return await read_frame(reader)

    return asyncio.run(read())


@given(st.dictionaries(st.text(max_size=20), st.one_of(st.integers(), st.text(max_size=50), st.booleans()), max_size=8))
def test_a_frame_is_read_as_it_was_written(frame: dict[str, Any]) -> None:
    assert parsed(encoded(frame)) == frame


@given(st.binary(max_size=300))
def test_bytes_that_are_no_frame_are_refused_whatever_they_are(content: bytes) -> None:
    try:
        found = parsed(len(content).to_bytes(4) + content)
    except FrameError:
        return
    assert found == json.loads(content), "it was a frame by chance"


def test_a_frame_that_says_it_is_huge_is_refused_before_it_is_read() -> None:
    with pytest.raises(FrameError, match="at most"):
        parsed((LARGEST_FRAME + 1).to_bytes(4))


NOT_JSON = '{"a": Infinity}', '{"a": [-Infinity]}', '{"a": NaN}', '{"a": 1e999}', "[" * 50_000
HALF_CHARACTERS = '{"a": "\\ud800"}', '{"\\udfff": 1}', '{"a": "\udcff"}'


@pytest.mark.parametrize("text", [*NOT_JSON, *HALF_CHARACTERS, "[]", "1"])
def test_what_cannot_be_handed_on_is_no_frame(text: str) -> None:
    content = text.encode(errors="surrogatepass")
    with pytest.raises(FrameError):
        parsed(len(content).to_bytes(4) + content)


@pytest.mark.parametrize("text", [*NOT_JSON, *HALF_CHARACTERS])
def test_what_cannot_be_handed_on_is_no_news(text: str) -> None:
    """Who hands it on would be blamed for it."""
    assert news_in(zlib.compress(b'[{"a": "\\ud83d\\ude00"}]')) == [{"a": "\N{GRINNING FACE}"}]
    with pytest.raises(FrameError):
        news_in(zlib.compress(b"[" + text.encode(errors="surrogatepass") + b"]"))


class Memory:
    """The sending end of a stream, into memory."""

    def __init__(self) -> None:
        self.written = bytearray()

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    async def drain(self) -> None:
        await asyncio.sleep(0)

    def close(self) -> None:
        pass


@pytest.mark.slow
def test_a_hundred_thousand_garbled_requests_of_a_member_change_nothing(pair: Run) -> None:
    """Straight into the handlers of a live peer, past the guard that would have banned the sender after three."""
    one, other = pair.peers
    member = one.peers.members.by_rank[other.rank]
    chance = random.Random(5)
    names = ["packet", "stripe", "meet", "state", "piece", "probe", "hello", "nothing"]
    values = [0, -1, 1 << 70, "x", None, [], {}, [1, "2"], True, 1.5, "round 1 of fragment 0", other.rank, one.rank]
    fields = ["run", "key", "sender", "to", "size", "signature", "session", "wants", "step", "weight", "lineage", "id"]
    kept = dict(one.peers.guard.refused)

    async def bombard() -> int:
        refused = 0
        for number in range(100_000):
            chosen = chance.sample(fields, 6)
            frame = {"kind": names[number % 8], **{field: chance.choice(values) for field in chosen}}
            if frame["kind"] in ("state", "probe") or (frame["kind"] == "meet" and type(frame.get("wants")) is list):
                frame["wants"] = "everyone"  # a sound request is answered, not refused, and takes its time
                frame["kind"] = "meet"
            handler = one.peers.handlers.get(frame["kind"])
            if handler is None:
                continue  # it is refused before a handler is asked
            reader, writer = asyncio.StreamReader(), Memory()
            reader.feed_eof()
            try:
                await handler(PeerStream(member, reader, writer), frame)  # type: ignore[arg-type]
            except Exception as error:
                assert isinstance(error, FrameError) or "awaited" in str(error) or "kept no longer" in str(error), error
                refused += 1
        return refused

    assert one.peers.background.run(bombard(), patience(60)) == 75_000
    assert dict(one.peers.guard.refused) == kept
    assert one.exchange(torch.ones(3, dtype=torch.uint8), (one.rank,), "still there").wait(1)


# Who is let in


def test_a_stranger_is_refused_before_anything_is_read_and_counted(pair: Run) -> None:
    one = pair.peers[0]

    async def attack(stranger: Stranger) -> tuple[bytes, bytes, bytes, list[str]]:
        packet = encoded({"kind": "packet", "run": pair.ticket.run, "size": 5}) + b"12345"
        large = encoded({"kind": "hello", "nonce": "0" * (1 << 15)})
        found = await stranger.ask_for_peers()
        return await stranger.send(packet), await stranger.send(large), await stranger.guess_the_secret(), found

    asked, told, guessed, found = as_a_stranger(pair.ticket, attack)
    assert b"has not proven" in asked and b"at most 32768 are read" in told
    assert b"does not know the run's secret" in guessed
    assert not found
    assert one.refused["stranger"] == 3


@pytest.mark.slow
def test_random_messages_of_strangers_are_refused_and_the_run_goes_on(pair: Run) -> None:
    one, other = pair.peers
    assert as_a_stranger(pair.ticket, lambda stranger: stranger.bombard(2000)) == 0
    assert one.refused["stranger"] + one.refused["too many streams"] >= 1000
    group = tuple(sorted((one.rank, other.rank)))
    mean = both(
        pair, lambda peer: peer.all_reduce(torch.tensor([float(peer is one)]), group, "after").wait(patience(20))
    )
    assert [m.tolist() for m in mean] == [[0.5], [0.5]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("info", "says"),
    [
        ({"version": "3", "protocol": PROTOCOL.version + 1}, "use theirs: pip install farflung==1"),
        ({"version": "0.1.0", "protocol": 0}, "update farflung: pip install farflung==1"),
        ({"settings": "t"}, "the ticket's settings are not the run's"),
        ({"shapes": "other"}, "the model made here has other shapes"),
    ],
)
def test_a_newcomer_that_cannot_take_part_is_told_why(info: dict[str, Any], says: str, tmp_path: Path) -> None:
    run = Run(tmp_path)
    try:
        run.join(shapes="these")
        with pytest.raises(UserError, match="the run's peers refuse this one") as refused:
            run.join(**{"shapes": "these", **info})
    finally:
        run.close()
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_releases_with_one_protocol_train_together(tmp_path: Path) -> None:
    run = Run(tmp_path)
    try:
        one, other = run.join(version="1"), run.join(version="1.0.1")
        assert other.members() == tuple(sorted((one.rank, other.rank)))
    finally:
        run.close()


def test_another_secret_does_not_find_the_run(pair: Run, tmp_path: Path) -> None:
    stranger = Ticket.new("test", {}).at(pair.ticket.addresses)
    with pytest.raises(UserError, match="are not of this run, or the ticket's secret is wrong"):
        InternetNetwork(Peers(stranger, Identity(tmp_path / "k"), ListenAddress("127.0.0.1"), INFO))


@pytest.mark.slow
def test_nobody_at_the_addresses_is_said_with_what_to_do(tmp_path: Path) -> None:
    first = Identity(tmp_path / "first").peer
    ticket = Ticket.new("test", {}).at((f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{first}",))
    with pytest.raises(
        UserError,
        match=r"the ticket leads to 1 address, where nobody has answered .*the run may be over; if not, ask",
    ):
        InternetNetwork(
            Peers(ticket, Identity(tmp_path / "k"), ListenAddress("127.0.0.1"), INFO), deadline=patience(10)
        )


def test_a_ticket_without_addresses_leads_to_no_run_but_for_who_begins_one(tmp_path: Path) -> None:
    nowhere = Ticket.new("test", {})
    with pytest.raises(NobodyAnswersError, match="the ticket has no addresses; ask a peer for its newer ticket"):
        Peers(nowhere, Identity(tmp_path / "k"), ListenAddress("127.0.0.1"), INFO).start(patience(20))
    begins = Peers(nowhere, Identity(tmp_path / "k"), ListenAddress("127.0.0.1"), INFO, first=True)
    begins.start(patience(20))
    begins.close()


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({}, "FARFLUNG_TICKET is not set; set it to the path"),
        ({"FARFLUNG_TICKET": "t", "FARFLUNG_PORT": "abc"}, "FARFLUNG_PORT is 'abc'; give a number"),
        ({"FARFLUNG_TICKET": "t", "FARFLUNG_PORT": "65536"}, "FARFLUNG_PORT is '65536'; give a number"),
        ({"FARFLUNG_TICKET": "t", "FARFLUNG_KEY": "."}, "the key [.]: Is a directory; name another file"),
    ],
)
def test_a_mistake_in_the_environment_is_told_in_one_line(
    told: dict[str, str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    Ticket.new("test", {}).write(tmp_path / "t")
    for name, value in {"FARFLUNG_NETWORK": "internet", **told}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=says):
        from_env()


def test_who_trains_is_counted_once_each_has_been_asked(pair: Run) -> None:
    """One that had no answer a moment ago may be there nevertheless."""
    one, other = pair.peers
    one.peers.members.failed(other.rank)
    told = [finding.text for finding in examine(one.peers)]
    assert any("there and back" in line for line in told) and told[-1].startswith("1 peer in training; "), told


def test_one_that_listens_for_its_own_machine_is_told_that_nobody_else_reaches_it(pair: Run) -> None:
    where = next(examine(pair.peers[0].peers)).line
    assert where.startswith("note only programs on this machine reach this peer") and "leave out --listen" in where
    assert "those on the same network" not in where


@pytest.mark.slow
def test_one_whose_link_takes_for_ever_to_measure_is_told_of(
    pair: Run, liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farflung.networks.internet.examination.PROMPT_SECONDS", 0.2)

    async def drip(stream: PeerStream, _: Any) -> None:
        await stream.tell({"go": True})
        while await stream.reader.read(1):
            stream.writer.write(bytes(1000))
            await asyncio.sleep(0.1)

    liar.peers.handlers["probe"] = drip
    assert any(not finding.good and "liar" in finding.text for finding in examine(pair.peers[1].peers))


def test_a_port_in_use_is_named(pair: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="choose another with --port"):
        local = ListenAddress("127.0.0.1", pair.port)
        InternetNetwork(Peers(pair.ticket, Identity(tmp_path / "k"), local, INFO, first=True), deadline=patience(10))


@pytest.mark.parametrize(
    "address",
    [
        *("", "hello", "/foo/bar", "/ip4/1.2.3.4", "/ip4/999.1.1.1/tcp/1", "/ip4/1.2.3.4/tcp/99999"),
        *("/ip4/1.2.3.4/udp/4001", "/dns4/my host/tcp/1", f"/ip4/1.2.3.4/tcp/4001/p2p/{PEER}"),
    ],
)
def test_what_leads_nobody_here_is_not_announced(address: str, tmp_path: Path) -> None:
    local = ListenAddress("127.0.0.1", announce=(address,))
    peers = Peers(Ticket.new("test", {}), Identity(tmp_path / "k"), local, INFO, first=True)
    with pytest.raises(UserError, match=r"announce is '.*', which leads nobody here; give this machine's address"):
        peers.start(patience(20))


@pytest.mark.parametrize("address", ["/ip4/203.0.113.7/tcp/4001", "/dns4/gpu.example.org/tcp/4001"])
def test_what_is_announced_is_told_to_others(address: str, tmp_path: Path) -> None:
    local = ListenAddress("127.0.0.1", announce=(address,))
    peers = Peers(Ticket.new("test", {}), Identity(tmp_path / "k"), local, INFO, first=True)
    peers.start(patience(20))
    assert [at.rpartition("/p2p/")[0] for at in peers.addresses] == [address]
    peers.close()


@pytest.mark.parametrize("listen", ["", "localhost", "300.1.1.1", "::1"])
def test_only_an_ipv4_address_is_listened_at(listen: str, tmp_path: Path) -> None:
    peers = Peers(Ticket.new("test", {}), Identity(tmp_path / "k"), ListenAddress(listen), INFO, first=True)
    with pytest.raises(UserError, match=r"listen is '.*', which is no IPv4 address; give one"):
        peers.start(patience(20))


@pytest.mark.parametrize(("off", "word"), [(3600.0, "ahead of"), (-3600.0, "behind")])
def test_a_clock_that_is_off_by_an_hour_is_told(off: float, word: str) -> None:
    now = time.time()
    with pytest.raises(UserError, match=f"clock is 3600 s {word} the other peers'.*timedatectl"):
        check_clock(now - off, now, now)
    check_clock(now - 0.5, now - 1, now)


# Packets


def both(run: Run, work: Callable[[InternetNetwork], Any]) -> list[Any]:
    """What the peers make of something at the same time."""
    with ThreadPoolExecutor(len(run.peers)) as pool:
        return list(pool.map(work, run.peers))


@pytest.fixture
def liar(pair: Run, tmp_path: Path) -> Iterator[Liar]:
    made = Liar(pair.ticket, tmp_path / "liar.key", "s")
    yield made
    made.close()


def test_forged_and_oversized_packets_are_refused_and_the_third_has_the_liar_shunned(pair: Run, liar: Liar) -> None:
    assert "not from who sends it" in liar.tells(liar.header(sender=pair.peers[1].rank))["refused"]
    assert "signature" in liar.tells({**liar.header(), "signature": "00" * 256})["refused"]
    assert "10000000000 bytes" in liar.tells(liar.header(size=10_000_000_000))["refused"]
    assert "refused" in liar.tells(liar.header())
    assert pair.peers[0].peers.guard.bans(liar.peers.identity.peer)
    assert any("is banned for 10 min" in line for line in pair.told)


def test_a_replayed_packet_is_dropped(pair: Run, liar: Liar) -> None:
    victim = pair.peers[0]
    header = liar.header(key="replayed")
    taken = []
    for _ in range(2):
        awaited = victim.peers.background.run(expectation(victim, liar, "replayed"), patience(5))
        answer = liar.tells(header, bytes(8))
        taken.append((answer, awaited.done() and not awaited.exception()))
    assert taken[0][0] == {"taken": True} and taken[0][1]
    assert "sent again" in taken[1][0]["refused"] and not taken[1][1]


def test_a_packet_is_taken_once_at_a_time_in_however_many_sessions_names_it_is_sent(pair: Run, liar: Liar) -> None:
    """Each would have memory of its own for as large a message as may be."""
    victim = pair.peers[0]
    victim.peers.background.run(expectation(victim, liar, "twice"), patience(5))
    content = bytes(1000)
    headers = []
    for session in ("one", "other"):
        liar.peers.info["session"] = session
        headers.append(liar.header(key="twice", size=len(content), digest=hashlib.sha256(content).hexdigest()))
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(liar.tells, headers[0], content, drip_s=0.003)
        until(lambda: victim._transport._arriving)
        assert "announced twice" in liar.tells(headers[1], content)["refused"]
        assert told.result() == {"taken": True}


def test_altered_bytes_and_a_slow_drip_are_no_packet(pair: Run, liar: Liar, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = pair.peers[0]
    awaited = victim.peers.background.run(expectation(victim, liar, "altered"), patience(5))
    assert "not those that were announced" in liar.tells(liar.header(key="altered"), b"12345678")["refused"]
    assert awaited.exception()
    monkeypatch.setattr("farflung.networks.internet.transport.SLOWEST", 1e4)
    monkeypatch.setattr(victim._transport, "_stall_s", 0.5)
    awaited = victim.peers.background.run(expectation(victim, liar, "dripped"), patience(5))
    assert "refused" in liar.tells(liar.header(key="dripped", size=1000, digest=""), bytes(1000), drip_s=0.05)
    assert awaited.exception()


@pytest.mark.parametrize("striped", [False, True])
def test_what_drips_for_a_round_that_is_over_is_kept_no_longer(
    pair: Run, liar: Liar, striped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each round would leave as much memory as a message takes, for hours."""
    victim = pair.peers[0]
    monkeypatch.setattr(transport, "SLOWEST", 1.0)
    if striped:
        monkeypatch.setattr(transport, "STRIPED", 1000)
    victim.peers.background.run(expectation(victim, liar, "over"), patience(5))
    header, content = liar.header(key="over", size=4000, digest=""), bytes(1000 if striped else 999)
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(liar.tells, header, content, drip_s=0.001)
        until(lambda: victim._transport._arriving)
        time.sleep(1)
        victim.peers.background.run(_forgets(victim, liar, "over"), patience(5))
        until(lambda: not victim._transport._arriving, 2)
        assert "nobody waits for this packet any more" in told.result()["refused"]


async def _forgets(victim: InternetNetwork, liar: Liar, key: str) -> None:
    victim._transport.forget(liar.peers.identity.rank, key)


async def expectation(victim: InternetNetwork, liar: Liar, key: str) -> Any:
    return victim._transport.expect(liar.peers.identity.rank, key)


def test_a_silent_partner_costs_one_deadline_and_names_itself(pair: Run) -> None:
    one, other = pair.peers
    with pytest.raises(
        PeerLostError, match=rf"here \({other.peers.identity.peer[-3:]}\) did not deliver within 1 s"
    ) as lost:
        one.exchange(torch.ones(5, dtype=torch.uint8), tuple(sorted((one.rank, other.rank))), "alone").wait(1.0)
    assert lost.value.ranks == (other.rank,)
    until(lambda: other.rank in one.members())  # its next news says that it is there


def test_a_partner_that_dies_with_its_own_packet_unsent_is_not_waited_for(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "ASK_SECONDS", 0.2)
    one, other = run.join(), run.join()
    run.all_know_each_other()

    async def took() -> Any:
        return other._transport.expect(one.rank, "half")

    taken = other.peers.background.run(took(), patience(5))
    pending = one.exchange(torch.ones(5, dtype=torch.uint8), tuple(sorted((one.rank, other.rank))), "half")
    until(taken.done)
    time.sleep(1)
    assert not pending.done(), "it is there, and has its time"
    other.close()
    with pytest.raises(PeerLostError, match="it has gone") as lost:
        pending.wait(patience(60))
    assert lost.value.ranks == (other.rank,) and other.rank not in one.members()


@pytest.mark.parametrize("size", [5, 3_000_000])
def test_a_packet_that_nobody_waits_for_is_refused_in_words_whatever_has_come_of_it(
    pair: Run, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair.peers
    monkeypatch.setattr(other._transport, "_stall_s", 0.5)
    pending = one.exchange(torch.ones(size, dtype=torch.uint8), tuple(sorted((one.rank, other.rank))), "unwanted")
    with pytest.raises(PeerLostError, match="nobody waits for unwanted here"):
        pending.wait(patience(20))
    assert other.rank in one.members(), "it is there"


# Meeting


def met(party: Party) -> tuple[tuple[int, ...], bool]:
    return party.group, party.behind


def test_a_pair_meets_and_each_knows_what_the_other_weighs(pair: Run) -> None:
    group = tuple(peer.rank for peer in sorted(pair.peers, key=lambda peer: peer.rank))
    weights = {peer.rank: float(number + 1) for number, peer in enumerate(pair.peers)}

    def meet(peer: InternetNetwork) -> Party:
        key = "round 3 of fragment 0"
        return peer.meet(group, key, 5, weights[peer.rank], "", lambda party: party).wait(patience(60))

    parties = both(pair, meet)
    assert [(p.group, p.weights) for p in parties] == [(group, weights)] * 2
    assert {p.host for p in parties} == {pair.peers[0]._matchmaker._hosts("round 3 of fragment 0")[0]}


def round_of(hosts: list[InternetNetwork]) -> str:
    """A round for which these are to be asked one after the other."""
    ranks = [host.rank for host in hosts]
    keys = (f"round {number} of fragment 2" for number in range(1000))
    return next(key for key in keys if hosts[0]._matchmaker._hosts(key) == ranks)


def forget(forgetful: InternetNetwork, forgotten: InternetNetwork) -> None:
    """Has a peer not know another one, and hear nothing of it."""
    peers = forgetful.peers
    peers.background.run(_never_again(forgetful), patience(1))
    peers.members.by_rank = {rank: one for rank, one in peers.members.by_rank.items() if rank != forgotten.rank}
    peers.members._room_for = lambda news, proven: proven  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("dead", [False, True], ids=["there", "dead"])
def test_one_that_does_not_know_a_round_s_host_is_sent_on_to_it(
    run: Run, dead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And back again, if it is there no more."""
    monkeypatch.setattr("farflung.networks.peers.members.ALIVE_SECONDS", 1e6)
    host, other, unaware = (run.join() for _ in range(3))
    run.all_know_each_other()
    key = round_of([host, other, unaware])
    forget(unaware, host)
    if dead:
        host.peers.background.run(_never_again(host), patience(1))
        os.kill(host.peers._host.p2p._child.pid, signal.SIGKILL)
    everyone = tuple(sorted(peer.rank for peer in run.peers))
    guests = [other, unaware] if dead else [host, other, unaware]

    def meet(peer: InternetNetwork) -> Party:
        return peer.meet(everyone, key, 5, 1.0, "", lambda party: party).wait(patience(60))

    with ThreadPoolExecutor(3) as pool:
        parties = list(pool.map(meet, guests))
    assert [party.group for party in parties] == [tuple(sorted(peer.rank for peer in guests))] * len(guests)
    assert {party.host for party in parties} == {other.rank if dead else host.rank}


@pytest.mark.parametrize("unknown", [{"listed": False}, {"door_of": 7}], ids=["an onlooker", "a door"])
def test_one_that_others_do_not_know_of_comes_to_no_round(pair: Run, tmp_path: Path, unknown: dict[str, Any]) -> None:
    """They would wait for its message, and it would never be to blame."""
    info = {**INFO, **unknown}
    onlooker = Peers(pair.ticket, Identity(tmp_path / "o.key"), ListenAddress("127.0.0.1"), info, pair.told.append)
    onlooker.start(patience(20))
    try:
        host = onlooker.members.by_rank[pair.peers[0].rank]
        wants = [onlooker.identity.rank, *pair.peers[0].members()]
        request = {"kind": "meet", "wants": wants, "key": "round 1 of fragment 8", "step": 5, "weight": 1.0}
        with pytest.raises(RequestRefusedError, match="do not know of it"):
            request |= {"shuns": [], "lineage": "", "patience": 0.0}
            onlooker.background.run(onlooker.ask(host, request), patience(20))
    finally:
        onlooker.close()


def test_one_with_other_anchors_is_told_that_it_is_behind(pair: Run) -> None:
    group = tuple(sorted(peer.rank for peer in pair.peers))
    lineages = {pair.peers[0].rank: "1", pair.peers[1].rank: "2"}

    def meet(peer: InternetNetwork) -> Party:
        return peer.meet(group, "round 9 of fragment 0", 5, 1.0, lineages[peer.rank], lambda party: party).wait(
            patience(60)
        )

    parties = {peer.rank: party for peer, party in zip(pair.peers, both(pair, meet), strict=True)}
    assert met(parties[pair.peers[1].rank]) == ((pair.peers[1].rank,), False)
    assert met(parties[pair.peers[0].rank]) == ((), True)


@pytest.mark.slow
def test_a_host_that_goes_to_a_better_one_takes_its_guests_along(run: Run) -> None:
    """As when one comes while the others meet, and only some have heard of it: they would wait at two places."""
    one, other, newcomer = (run.join() for _ in range(3))
    run.all_know_each_other()
    names = (f"round {number} of fragment 5" for number in range(1000))
    turns = {name: [_turn(name, peer.rank) for peer in (newcomer, one, other)] for name in names}
    key = next(name for name, found in turns.items() if found == sorted(found))
    group = tuple(sorted((one.rank, other.rank)))

    def meet(peer: InternetNetwork) -> Pending[tuple[int, ...]]:
        return peer.meet(group, key, 5, 1.0, "", lambda party: party.group)

    known = [peer.peers.members.by_rank.pop(newcomer.rank) for peer in (one, other)]
    first = meet(other)
    until(lambda: other.rank in one._matchmaker._rendezvous_of(key).waiting)
    one.peers.members.by_rank[newcomer.rank] = known[0]
    assert [meet(one).wait(patience(60)), first.wait(patience(60))] == [group, group]


@pytest.mark.slow
def test_one_that_is_banned_is_in_no_round_of_those_who_banned_it(run: Run) -> None:
    """Neither as their host nor in a group: they take no message of its, and would wait for one until the deadline."""
    one, other, banned = (run.join() for _ in range(3))
    run.all_know_each_other()
    ban(banned, one, other)
    everyone = tuple(sorted(peer.rank for peer in run.peers))
    pair = tuple(sorted((one.rank, other.rank)))
    for number in range(8):

        def meet(peer: InternetNetwork, key: str = f"round {number} of fragment 3") -> tuple[int, ...]:
            return peer.meet(everyone, key, 5, 1.0, "", lambda party: party.group).wait(patience(60))

        found = both(run, meet)
        assert found[:2] == [pair, pair] and not {*found[2]} & {*pair}
    assert one.members() == other.members() == pair


@pytest.mark.slow
def test_who_alone_has_banned_another_is_not_shut_out_for_it(run: Run) -> None:
    """It is in no group with that one, until two hosts have said that the others keep it."""
    one, _, _, banned = (run.join() for _ in range(4))
    run.all_know_each_other()
    ban(banned, one)
    together: list[bool] = []
    while len(together) < 60 and not any(together):

        def meet(peer: InternetNetwork, key: str = f"round {len(together)} of fragment 3") -> tuple[int, ...]:
            return peer.meet(peer.members(), key, 5, 1.0, "", lambda party: party.group).wait(patience(60))

        found = {peer.rank: group for peer, group in zip(run.peers, both(run, meet), strict=True)}
        together.append(banned.rank in found[one.rank])
        assert all(found[rank] == group for group in found.values() for rank in group)
    assert len(together) > 2 and together[-1]
    ban(banned, one)
    assert not one.peers.guard.bans(banned.peers.identity.peer), "nor soon again"


def ban(peer: InternetNetwork, *judges: InternetNetwork) -> None:
    for judge in judges:
        for _ in range(STRIKES):
            judge.blame(peer.rank, "it has lied")


@pytest.mark.slow
def test_one_whose_partner_does_not_come_is_not_kept_waiting(pair: Run) -> None:
    """It comes alone before the half of the deadline that a meeting may take at most has passed."""
    one, other = pair.peers
    for round in (20, 21):
        party = one.meet((one.rank, other.rank), f"round {round} of fragment 7", 5, 1.0, "", lambda party: party)
        assert party.wait(patience(60) / 3).group == (one.rank,)


@pytest.mark.slow
def test_packets_that_wait_for_others_on_a_slow_link_are_not_given_up(
    pair: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight packets of a second each, of which two travel at a time; a transfer without a byte for two is given up."""
    real = transport.write_payload

    async def slow(writer: Any, payload: memoryview, stall_s: float) -> None:
        await asyncio.sleep(0.5)
        await real(writer, payload, stall_s)

    monkeypatch.setattr(transport, "write_payload", slow)
    one, other = pair.peers
    for peer in pair.peers:
        monkeypatch.setattr(peer._transport, "_stall_s", patience(2))
    group, packet = tuple(sorted((one.rank, other.rank))), torch.ones(1 << 19, dtype=torch.uint8)
    pending = [peer.exchange(packet, group, f"packet {n}") for n in range(8) for peer in pair.peers]
    assert all(len(packets.wait(patience(60))) == 2 for packets in pending)


@pytest.mark.slow
def test_rounds_that_wait_do_not_hold_up_each_other_however_many_they_are(run: Run) -> None:
    one, together = run.join(), threading.Barrier(20)

    def waits(party: Party) -> int:
        return together.wait(patience(20))

    rounds = [one.meet((one.rank,), f"round {n} of fragment {n}", 5, 1.0, "", waits) for n in range(20)]
    assert sorted(round.wait(patience(30)) for round in rounds) == list(range(20))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({}, "'weights' is missing"),
        ({"weights": [[1]]}, "cannot be read"),
        ({"weights": [["1", 2.0]]}, "no whole number"),
        ({"weights": [[7, float("nan")]]}, "no number from 0"),
        ({"weights": [[7, -1.0]]}, "no number from 0"),
        ({"weights": [[8, 1.0], [9, 1.0]]}, "has left out who asked"),
    ],
)
def test_what_a_host_says_is_not_believed_blindly(answer: dict[str, Any], says: str) -> None:
    with pytest.raises(FrameError, match=says):
        party_of(answer, own=7, weight=2.0)


def test_no_weight_counts_more_than_ten_times_the_own_one() -> None:
    assert party_of({"weights": [[7, 2.0], [8, 1e30]], "behind": False}, 7, 2.0).weights == {7: 2.0, 8: 20.0}
    told = {"weights": [[7, 0], [8, 50]]}
    assert party_of(told, 7, 5.0).weights == {7: 5.0, 8: 50.0}, "what one's own counts, no host can say"
    assert party_of({"weights": [], "behind": True}, 7, 2.0) == Party((), {}, True)


# Pace


def member(rank: int, step: int, rate: float = 0.0) -> Member:
    return Member(str(rank), rank, "s", "host", (), signed_at=1.0, step=step, rate=rate)


def table(step: int = 0, rate: float = 0.0) -> Members:
    """Of a peer that trains, if it has a rate."""
    return Members({"trains": rate > 0, "step": step, "rate": rate}, Guard(print))


def test_the_lead_is_where_the_middle_one_is_so_no_single_liar_moves_it() -> None:
    members = table()
    for rank, step in enumerate((100, 102, 104, 10**9)):
        members.hear(member(rank, step), first_hand=True)
    assert members.median_step() == 102
    assert table().median_step() is None


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_news_of_a_peer_are_never_older_than_what_it_said_by_the_way(record: int, said: int) -> None:
    members = table()
    members.hear(member(1, 0))
    members.heard_step(1, said)
    newer = member(1, record)
    newer.signed_at = 2.0
    members.hear(newer)
    assert members.by_rank[1].step == max(record, said)
    assert not members.hear(member(1, 5000)), "what was signed before is no news"


def test_a_slow_peer_is_moved_on_and_a_fast_one_held(pair: Run) -> None:
    one, other = pair.peers
    info = one.peers.members.by_rank[other.rank]
    info.step, info.rate, info.believed, info.heard = 100, 0.0, 100.0, time.monotonic()
    assert one.paced(50, every=10) == 100
    assert one.paced(5000, every=10) == 5000, "its rate is unknown: it may be anywhere"
    info.rate = 1e-6
    assert one.paced(99, every=10) == 99
    assert one.paced(111, every=10) == 111
    assert one.paced(130, every=10) == 129


@pytest.mark.parametrize(
    "lie", [{"rate": float("nan")}, {"rate": 1e9}, {"rate": "x"}, {"step": -1}, {"step": 1 << 70}, {"facts": []}]
)
def test_a_peer_that_says_what_cannot_be_is_refused(pair: Run, lie: dict[str, Any]) -> None:
    peers = pair.peers[0].peers
    with pytest.raises(FrameError):
        member_in(signed(peers.identity, {**peers.info, **lie}))


def test_what_onlookers_are_told_is_numbers_and_plain_names(pair: Run) -> None:
    peers = pair.peers[0].peers
    facts = {"loss": 1.5, "rounds": "many", "state": "trains", "refused": float("inf")}
    member = member_in(signed(peers.identity, {**peers.info, "host": "a\x1b[31m b", "facts": facts}))
    assert member.facts == {"loss": 1.5} and member.host == "a??31m?b"


def test_one_whose_loss_is_no_number_tells_of_none_and_is_not_to_blame(pair: Run) -> None:
    one, other = pair.peers
    one.tell_others(loss=2.0, rounds=3)
    one.tell_others(loss=float("nan"), tokens_per_second=float("inf"))
    heard = other.peers.background.run(other.peers.handshake(one.peers.identity.peer), patience(20))
    assert heard.facts == {"rounds": 3} and not other.refused


def test_a_guest_whose_weight_is_none_is_refused_and_its_host_not_blamed(pair: Run, liar: Liar) -> None:
    meeting = {"kind": "meet", "key": "odd", "wants": [], "shuns": [], "step": 1, "lineage": "", "patience": 0.0}
    for weight in (float("nan"), float("inf"), -1.0):
        assert "is no number" in liar.tells({**meeting, "weight": weight})["refused"]


def test_a_peer_that_cannot_be_reached_is_refused_and_ends_nothing(pair: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = pair.peers
    known = one.peers._proven[other.peers.identity.peer]
    monkeypatch.delitem(one.peers._proven, other.peers.identity.peer)

    def off_by_an_hour(*_: float) -> None:
        raise UserError("the clock is off")

    monkeypatch.setattr("farflung.networks.internet.contact.handshake.check_clock", off_by_an_hour)
    with pytest.raises(RequestRefusedError, match="the clock is off"):
        one.peers.background.run(one.peers.ask(known, {"kind": "probe", "size": 0}), patience(20))


@pytest.mark.slow
def test_one_that_comes_back_is_proven_to_anew_by_those_who_knew_it(run: Run) -> None:
    _, one, gone = (run.join() for _ in range(3))  # a ticket leads to the first one, to whom all prove themselves
    run.all_know_each_other()
    probe = {"kind": "probe", "size": 0}
    one.peers.background.run(one.peers.ask(one.peers.members.by_rank[gone.rank], probe), patience(20))
    run.peers.pop().close()
    back = run.join()
    assert back.rank == gone.rank
    until(lambda: one.peers.members.by_rank[back.rank].session == back.peers.info["session"])
    one.peers.background.run(one.peers.ask(one.peers.members.by_rank[back.rank], probe), patience(20))


@pytest.mark.slow
def test_who_answers_does_not_close_before_its_answer_is_read(pair: Run) -> None:
    """The daemon may cut an answer off when the stream is closed at once: some in ten thousand were lost."""
    one, other = pair.peers

    async def answer(stream: PeerStream, _: Any) -> None:
        await stream.tell({"good": "day"})

    async def ask(kind: str) -> tuple[dict[str, Any], bool]:
        member = one.peers.members.by_rank[other.rank]
        async with one.peers.stream(member) as stream:
            await stream.tell({"kind": kind})
            answered = await read_frame(stream.reader)
            _, pending = await asyncio.wait([asyncio.ensure_future(stream.reader.read(1))], timeout=0.5)
            return answered, bool(pending)

    other.peers.handlers["greeting"] = answer
    assert one.peers.background.run(ask("greeting"), patience(20)) == ({"good": "day"}, True)
    refused, open_still = one.peers.background.run(ask("nonsense"), patience(20))
    assert "there is no request" in refused["refused"] and open_still


async def _never_again(peer: InternetNetwork) -> None:
    """Has a peer neither tell of itself nor start its daemon again."""
    peer.peers._gossip.beat = lambda: asyncio.sleep(0)  # type: ignore[method-assign]
    peer.peers._daemon.cancel()


@pytest.mark.slow
def test_a_dead_member_is_not_waited_for_though_the_last_news_is_that_it_trains(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farflung.networks.peers.pace.FIRST_ROUND_SECONDS", 1e6)  # as long as can be
    monkeypatch.setattr("farflung.networks.peers.members.ALIVE_SECONDS", 1e6)
    one, other, dead = (run.join() for _ in range(3))
    run.all_know_each_other()
    everyone = tuple(sorted(peer.rank for peer in run.peers))
    keys = (f"round {number} of fragment 5" for number in range(1000))
    key = next(key for key in keys if one._matchmaker._hosts(key)[0] != dead.rank)
    dead.peers.background.run(_never_again(dead), patience(1))
    os.kill(dead.peers._host.p2p._child.pid, signal.SIGKILL)

    def meet(peer: InternetNetwork) -> tuple[int, ...]:
        return peer.meet(everyone, key, 5, 1.0, "", lambda party: party.group).wait(patience(10))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(meet, [one, other])) == [tuple(sorted((one.rank, other.rank)))] * 2


# Guard


def test_the_third_strike_has_a_peer_shunned_and_streams_are_limited() -> None:
    told: list[str] = []
    guard = Guard(told.append)
    for _ in range(STRIKES - 1):
        guard.strike("peer", "bad", "why")
    assert guard.admit("peer", proven=True) and not told
    guard.strike("peer", "bad", "why")
    assert not guard.admit("peer", proven=True) and len(told) == 1
    assert guard.refused == {"bad": STRIKES, "banned peer": 1}
    assert [guard.admit("other", proven=True) for _ in range(STREAMS_PER_PEER + 1)].count(True) == STREAMS_PER_PEER
    guard.release("other", proven=True)
    assert guard.admit("other", proven=True)


def test_members_with_many_streams_leave_some_to_others() -> None:
    guard = Guard(lambda _: None)
    for number in range(16 * STREAMS_PER_PEER):
        guard.admit(f"greedy {number % 16}", proven=True)
    assert all(guard.admit(f"member {number % 64}", proven=True) for number in range(64 * FEW))


def test_one_that_never_delivers_while_others_do_is_shunned_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    guard, clock = Guard(lambda _: None), [100.0]
    monkeypatch.setattr("farflung.networks.peers.guard.time.monotonic", lambda: clock[0])

    def miss(peer: str, times: int = MISSED) -> None:
        for _ in range(times):
            clock[0] += 1
            guard.missed(peer)

    miss("one"), miss("other")
    assert not guard.shuns("one"), "nobody delivers: it is this peer's own line"
    guard.delivered("other")
    assert guard.shuns("one") and not guard.bans("one") and not guard.shuns("other")
    clock[0] += 2 * BAN_SECONDS
    assert not guard.shuns("one")
    miss("one", MISSED - 1), guard.delivered("one"), guard.delivered("other"), miss("one", MISSED - 1)
    assert not guard.shuns("one"), "it does now and then"


def test_strangers_take_no_streams_from_members() -> None:
    guard = Guard(lambda _: None)
    admitted = [guard.admit(f"stranger {number // 8}", proven=False) for number in range(8 * UNPROVEN)]
    assert admitted[:8] == [True] * UNPROVEN_PER_PEER + [False] * (8 - UNPROVEN_PER_PEER)
    assert admitted.count(True) == UNPROVEN
    assert all(guard.admit(f"member {number}", proven=True) for number in range(STREAMS))
    guard.release("stranger 0", proven=False)
    assert guard.admit("stranger 0", proven=False)


# State


@pytest.mark.slow
def test_a_state_comes_in_pieces_from_several_and_survives_one_that_sends_other_bytes(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farflung.networks.peers.manifests.PIECE", 1000)
    for _ in range(3):
        run.join()
    run.all_know_each_other()
    values = torch.randn(5000)
    bad = run.peers[0]._snapshots
    keep = bad._keep

    async def spoilt(content: torch.Tensor, described: dict[str, Any], core: bool) -> None:
        await keep(content, described, core)
        for kept in bad._kept.values():
            for piece in kept.pieces:
                piece[:] = bytes(len(piece))

    monkeypatch.setattr(bad, "_keep", spoilt)
    stop = threading.Event()

    def train(peer: InternetNetwork) -> None:
        while not stop.wait(0.02):
            peer.paced(peer.peers.info["step"] + 1, 10)
            if peer.wanted:
                peer.give(SharedState({"anchor 0": values}, {"step": 7, "until": 10}))

    threads = [threading.Thread(target=train, args=(peer,)) for peer in run.peers[:2]]
    for thread in threads:
        thread.start()
    try:
        state = run.peers[2].fetch(identical=False).wait(patience(30))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert torch.equal(state.tensors["anchor 0"], values) and state.facts["step"] == 7
    assert run.peers[2].refused.get("bad piece", 0) >= 1


@pytest.mark.slow
def test_one_that_asks_for_pieces_and_reads_none_has_few_packed_for_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, greedy = run.join(), run.join()
    run.all_know_each_other()
    values, packed = torch.randn(8 << 20), list[int]()

    def counting(piece: memoryview) -> bytes:
        packed.append(len(piece))
        return packing.packed(piece)

    monkeypatch.setattr(snapshots, "packed", counting)

    async def ask(number: int, name: str) -> None:
        async with greedy.peers.stream(greedy.peers.members.by_rank[one.rank]) as stream:
            await stream.tell({"kind": "piece", "id": name, "number": number})
            await asyncio.sleep(patience(20))

    one.peers.background.run(one._snapshots._keep(*described(SharedState({"x": values}, {}))), patience(20))
    (name,) = one._snapshots._kept
    asked = [greedy.peers.background.submit(ask(number % 8, name)) for number in range(32)]
    until(lambda: one.peers.guard._streams[greedy.peers.identity.peer] == 32)
    time.sleep(2)
    assert len(packed) == snapshots.AT_A_TIME
    for one_of in asked:
        one_of.cancel()


def test_one_that_asks_for_sketches_again_and_again_leaves_threads_to_others(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is made of the whole state; packets of rounds would wait behind them all to be checked."""
    one, greedy = run.join(), run.join()
    run.all_know_each_other()
    made, may_end = list[str](), threading.Event()

    def slow(pieces: Any, seed: str) -> torch.Tensor:
        made.append(seed)
        may_end.wait(patience(60))
        return torch.zeros(1)

    monkeypatch.setattr(snapshots, "sketches_of", slow)

    async def ask(name: str) -> None:
        async with greedy.peers.stream(greedy.peers.members.by_rank[one.rank]) as stream:
            await stream.tell({"kind": "sketch", "id": name, "seed": "s"})
            await stream.hear(patience(60))

    one.peers.background.run(one._snapshots._keep(*described(SharedState({"x": torch.ones(8)}, {}))), patience(20))
    (name,) = one._snapshots._kept
    asked = [greedy.peers.background.submit(ask(name)) for _ in range(32)]
    try:
        until(lambda: one.peers.guard._streams[greedy.peers.identity.peer] == 32)
        time.sleep(1)
        assert len(made) == snapshots.AT_A_TIME
    finally:
        may_end.set()
    for one_of in asked:
        one_of.result(patience(60))


def test_a_state_that_nobody_has_is_not_waited_for(pair: Run) -> None:
    lonely = pair.peers[0]
    lonely.peers.members.by_rank[pair.peers[1].rank].failed = True
    with pytest.raises(PeerLostError, match="no peer has the run's state"):
        lonely.fetch(identical=False).wait(patience(30))


def test_what_shall_never_end_begins_again_and_each_of_its_faults_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("farflung.networks.internet.contact.background.AGAIN_SECONDS", 0.01)
    told: list[str] = []
    background, begun = Background(told.append), 0

    async def work() -> None:
        nonlocal begun
        begun += 1
        raise RecursionError("a fault") if begun % 2 else ValueError("another")

    async def nothing() -> None:
        pass

    background.start()
    background.run(kept(background, work), patience(5))
    until(lambda: begun > 5)
    background.end(nothing())
    assert sorted(told) == [
        "finding others has failed, and begins again: RecursionError('a fault')",
        "finding others has failed, and begins again: ValueError('another')",
    ]


async def kept(background: Background, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    background.keep("finding others", work)


def test_what_ends_a_background_task_is_heard_unless_it_is_that_the_daemon_has_gone(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """As when Ctrl-C ends the daemon together with this process."""

    async def raises(error: Exception) -> None:
        raise error

    async def nobody_waits(error: Exception) -> None:
        task = asyncio.create_task(raises(error))
        await asyncio.sleep(0)
        del task
        gc.collect()

    peers = run.join().peers
    peers.background.run(nobody_waits(ConnectionResetError("Connection lost")), patience(10))
    peers.background.run(nobody_waits(ZeroDivisionError("a fault of ours")), patience(10))
    assert "a fault of ours" in caplog.text and "Connection lost" not in caplog.text
