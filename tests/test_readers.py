"""One law for all that reads what a peer of the internet network sends: a FrameError, or something sound."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from farflung.formats import PROTOCOL
from farflung.networks.internet import Identity, ListenAddress
from farflung.networks.internet.contact.gossip import news_in
from farflung.networks.internet.contact.host import Host
from farflung.networks.internet.contact.streams import RequestRefusedError, accepted
from farflung.networks.internet.gathering import guest_of, party_of
from farflung.networks.internet.states.downloads import Download
from farflung.networks.peers.addresses import is_global, leads_to, readable
from farflung.networks.peers.admission import disagreement
from farflung.networks.peers.frames import FrameError, parsed
from farflung.networks.peers.guard import Guard
from farflung.networks.peers.manifests import Manifest, manifest_of
from farflung.networks.peers.member import Member, member_in, signed
from farflung.networks.peers.members import Members
from farflung.networks.peers.packing import longest, packed, unpack
from farflung.networks.peers.weights import HEAVIEST

T = TypeVar("T")

PEER, RELAY = (
    "12D3KooWHHzSeKaY8xuZVzkLbKFfvNgPPeKhFBGrMbNzbm5akpqu",
    "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN",
)
HUGE = 10**401  # a whole number that no float can hold
DEEP = "[" * 60_000  # nested further than Python reads

words = st.text(st.characters(), max_size=20) | st.sampled_from(["", "\ud800", "\x1b[31m", "garbage"])
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | words
    | st.sampled_from([HUGE, -HUGE, 1 << 31, 1 << 63, math.inf, math.nan, -1])
)
anything = st.recursive(
    scalars, lambda parts: st.lists(parts, max_size=4) | st.dictionaries(words, parts, max_size=4), max_leaves=6
)


@st.composite
def nearly(draw: st.DrawFn, sound: Any) -> Any:
    """Something much like what is sound: one or two of its parts are any JSON, or missing."""
    told = copy.deepcopy(sound)
    for _ in range(draw(st.integers(1, 2))):
        part = told
        while True:
            keys = list(part) if isinstance(part, dict) else list(range(len(part)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            inner = part[key]
            if isinstance(inner, dict | list) and draw(st.booleans()):
                part = inner
                continue
            if draw(st.integers(0, 4)):
                part[key] = draw(anything)
            else:
                del part[key]
            break
    return told


def read(reader: Callable[[], T]) -> T | None:
    """What a reader makes of something; None for what it refuses."""
    try:
        return reader()
    except FrameError:
        return None


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return Identity(tmp_path_factory.mktemp("reader") / "key")


def info_of(identity: Identity) -> dict[str, Any]:
    return {
        "protocol": PROTOCOL.version,
        "version": "1",
        "settings": "s",
        "shapes": "",
        "host": "here",
        "trains": True,
        "session": "0",
        "addresses": [f"/ip4/127.0.0.1/tcp/1/p2p/{identity.peer}"],
        "began": 1.75e9,
        "listed": True,
        "step": 5,
        "rate": 1.0,
        "facts": {"loss": 1.0, "rounds": 3},
    }


def check_member(member: Member, identity: Identity) -> None:
    """All that the network does with a member, it can do with this one."""
    assert member.peer == identity.peer and member.rank == identity.rank
    assert len(member.described) < 100 and member.described.isprintable()
    for address in member.addresses:
        place, _, peer = address.rpartition("/p2p/")
        assert Multiaddr(place) and peer == identity.peer
    assert all(math.isfinite(fact) for fact in member.facts.values())
    members = Members({"trains": False, "step": 0, "rate": 0.0}, Guard(print))
    assert members.hear(member, first_hand=True)
    members.heard_step(member.rank, 7)
    assert math.isfinite(members.median_step() or 0.0) and member.arrives(10, 3.0) in (True, False)
    json.dumps({"step": member.step_now(), **member.facts}, allow_nan=False)


@settings(max_examples=300)
@given(st.data())
def test_what_a_peer_says_of_itself(identity: Identity, data: st.DataObject) -> None:
    info = data.draw(nearly(info_of(identity)))
    if member := read(lambda: member_in(signed(identity, info))):
        check_member(member, identity)
    assert isinstance(read(lambda: disagreement(info, info_of(identity))) or "", str)


@pytest.mark.parametrize(
    "lie",
    [
        {"rate": HUGE},
        {"addresses": ["garbage"]},
        {"addresses": ["/p2p/{peer}"]},
        {"addresses": ["/ip4/999.1.1.1/tcp/1/p2p/{peer}"]},
        {"addresses": ["/ip4/127.0.0.1/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"]},
        {"began": -1},
        {"listed": 1},
        {"shapes": []},
        {"shapes": "x" * 5000},
        {"more": [[]]},
        {"facts": {"loss": {}}},
        {"addresses": ["/unix/p2p/{peer}"]},
        {"addresses": ["/ip4/0x5.1/tcp/1/p2p/{peer}"]},
        {"addresses": ["/ip4/5.0.0.1/tcp/1\n/p2p/{peer}"]},
        {"addresses": ["/ip4/5.0.0.1/tcp/1/p2p/x/p2p-circuit/p2p/{peer}"]},
        {"addresses": ["/ip4/5.0.0.1/tcp/1/p2p//p2p-circuit/p2p/{peer}"]},
    ],
)
def test_what_a_peer_cannot_say_of_itself(identity: Identity, lie: dict[str, Any]) -> None:
    info = json.loads(json.dumps({**info_of(identity), **lie}).replace("{peer}", identity.peer))
    with pytest.raises(FrameError):
        member_in(signed(identity, info))


PARTS = [*("ip4", "ip6", "dns", "tcp", "udp", "p2p", "p2p-circuit", "unix", "", "0", "1", "65536", "a.b", "x" * 300)]
PARTS += [
    "5.0.0.1",
    "0x5.1",
    "::1",
    "fe80::1%lan",
    "Host.de",
    RELAY,
    RELAY[:-1],
    "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
]


@settings(max_examples=1000)
@given(st.lists(st.sampled_from(PARTS) | st.text(max_size=4), max_size=9).map("/".join))
@example("unix/\n")
def test_no_address_raises_where_it_is_used(path: str) -> None:
    address = f"/ip4/5.0.0.1/{path}/p2p/{PEER}"
    for told in (address, f"/{path}/p2p/{PEER}"):
        if leads_to(told, PEER):
            assert "\n" not in told and is_global(told) in (True, False)
            assert str(readable(told)) == told and readable(told.rpartition("/p2p/")[0])


def test_an_address_at_a_relay_is_told_and_read_as_the_daemon_does(identity: Identity) -> None:
    address = f"/ip4/5.0.0.1/tcp/443/p2p/{RELAY}/p2p-circuit/p2p/{identity.peer}"
    assert member_in(signed(identity, {**info_of(identity), "addresses": [address]})).addresses == (address,)
    place = address.rpartition("/p2p/")[0]
    assert PeerID.from_base58(RELAY).to_bytes() in readable(place).to_bytes()
    assert b"\x01\x72" + PeerID.from_base58(RELAY).to_bytes() not in readable(place).to_bytes()


def test_what_another_says_of_where_it_sees_this_peer_cannot_hinder_the_daemon(identity: Identity) -> None:
    host = Host(ListenAddress(), identity, "test")
    for lie in ("", "5.0.0.1", "/ip4/5.0.0.1/tcp/0", "/ip4/5.0.0.1/udp/7", "/ip4/192.168.1.2/tcp/7", "/dns/a.b/tcp/7"):
        assert not host.appears(lie)
    for lie in (
        "/ip4/5.0.0.1/tcp/7/ws",
        f"/ip4/5.0.0.1/tcp/7/p2p/{RELAY}/p2p-circuit",
        "/ip4/5.0.0.1/tcp/7/",
        "/ip6/x",
    ):
        assert not host.appears(lie)
    assert host.appears("/ip4/5.0.0.1/tcp/7")
    assert not host.appears("/ip4/5.0.0.2/tcp/7"), "it has one already"


def test_a_fact_that_is_no_number_is_left_out(identity: Identity) -> None:
    info = {**info_of(identity), "facts": {"loss": HUGE, "rounds": 3, "refused": True, "other": 1}}
    assert member_in(signed(identity, info)).facts == {"rounds": 3}


def test_what_is_sound_is_taken(identity: Identity) -> None:
    check_member(member_in(signed(identity, info_of(identity))), identity)
    assert party_of({"weights": [[7, 1.0], [8, 2.0]], "behind": False}, 7, 1.0).group == (7, 8)
    assert parsed('{"kind": "probe"}') == {"kind": "probe"}


@settings(max_examples=100)
@given(st.data())
def test_a_record(identity: Identity, data: st.DataObject) -> None:
    record = signed(identity, info_of(identity))
    told = data.draw(nearly(record) | anything)
    if found := read(lambda: member_in(told, data.draw(st.floats(0, 1e9)))):
        check_member(found, identity)


def test_a_record_that_another_has_signed_or_of_another_time_is_none(identity: Identity, tmp_path: Path) -> None:
    other, record = Identity(tmp_path / "other"), signed(identity, info_of(identity))
    with pytest.raises(FrameError, match="not signed"):
        member_in({**record, "signature": signed(other, info_of(identity))["signature"]})
    for seconds in (-601.0, 6.0):
        about = {**record["about"], "time": record["about"]["time"] + seconds}
        text = json.dumps(about, sort_keys=True, separators=(",", ":")).encode()
        with pytest.raises(FrameError, match="too old, or of a time that is still to come"):
            member_in({"about": about, "signature": identity.sign(text)})


def test_a_record_is_as_old_as_is_said_as_far_as_when_it_was_signed_allows(identity: Identity) -> None:
    record = signed(identity, info_of(identity))
    about = {**record["about"], "time": record["about"]["time"] - 100}
    text = json.dumps(about, sort_keys=True, separators=(",", ":")).encode()
    old = {"about": about, "signature": identity.sign(text)}
    ages = [time.monotonic() - member_in(old, told).heard for told in (0.0, 97.0, 300.0)]
    assert ages == pytest.approx([95.0, 97.0, 105.0], abs=2)


@given(st.binary(max_size=200) | anything.map(lambda told: zlib.compress(json.dumps(told).encode())))
@example(zlib.compress(b"[" * 100_000))
@example(zlib.compress(b"[0" + b",0" * 100 + b"]"))
@example(zlib.compress(bytes(1 << 24)))
@example(zlib.compress(b"[]")[:-1])
def test_news(content: bytes) -> None:
    if (told := read(lambda: news_in(content))) is not None:
        assert isinstance(told, list) and len(told) < 50


@given(anything | nearly({"weights": [[7, 1.0], [8, 2.0]], "behind": False}), st.floats(0, 1e6))
@example({"weights": [[7, 1], [8, HUGE]]}, 5.0)
@example({"weights": [[7, 0], [8, 50]]}, 5.0)
@example({"weights": [[7, 1e-300], [8, 1e9]]}, 5.0)
@example({"weights": [[7, 1.0], [8, 11]]}, 0.0)  # whose own message counts nothing has nothing to compare with
@example({"weights": [[7, 1.0], [8, 11], [9, HUGE]]}, 0.0)
def test_a_host_s_answer(told: Any, weight: float) -> None:
    if party := read(lambda: party_of(told, 7, weight)):
        assert set(party.group) == party.weights.keys() and sorted(party.group) == list(party.group)
        assert not party.group or party.weights[7] <= weight
        least = weight or min((heavy for heavy in party.weights.values() if heavy > 0), default=0.0)
        assert all(0 <= heavy <= HEAVIEST * max(least, 1.0) for heavy in party.weights.values())
        assert type(party.behind) is bool


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=5))
@example([2.0, 40.0])
def test_all_members_of_a_party_find_the_same_weights(heavy: list[float]) -> None:
    """Or a mean would not be the same everywhere, and anchors that must be equal would part."""
    told = {"weights": [[rank, one] for rank, one in enumerate(heavy)], "behind": False}
    found = [party_of(told, rank, one).weights for rank, one in enumerate(heavy)]
    assert all(weights == found[0] for weights in found)
    assert heavy != [2.0, 40.0] or found[0] == {0: 2.0, 1: 20.0}


@given(
    anything
    | nearly({"wants": [1, 2], "key": "round 1", "step": 1, "weight": 1.0, "lineage": "", "shuns": [], "patience": 3.0})
)
@example({"wants": [], "key": "", "step": 1, "weight": HUGE, "lineage": "", "shuns": [], "patience": 1.0})
@example({"wants": [], "key": "", "step": 1, "weight": 1.0, "lineage": "", "shuns": [], "patience": HUGE})
def test_a_request_to_meet(told: Any) -> None:
    async def guest() -> None:
        if found := read(lambda: guest_of(told, 1)):
            guest, key = found
            assert 0 <= guest.weight < math.inf and guest.until < asyncio.get_running_loop().time() + 601
            assert all(type(rank) is int for rank in guest.wants) and type(key) is str

    asyncio.run(guest())


STATE = {
    "id": "a",
    "digests": ["0" * 64, "1" * 64],
    "tensors": [["anchor 0", 3], ["velocity 0", 3]],
    "facts": {"step": 3, "history": "h"},
}


@given(anything | nearly(STATE))
@example({**STATE, "tensors": [["anchor 0", math.inf]]})
@example({**STATE, "tensors": [["anchor 0", 1.5]]})
@example({**STATE, "tensors": [], "digests": []})
@example({**STATE, "facts": {"step": True}})
@example({**STATE, "digests": ["0" * 64, "../" + "1" * 61]})
@example({**STATE, "digests": ["0" * 64, 1]})
def test_a_state_s_description(identity: Identity, told: Any) -> None:
    if manifest := read(lambda: manifest_of(told, largest=1000, furthest=math.inf)):
        assert 0 < manifest.size <= 1000 and type(manifest.step) is int
        download = Download(manifest)
        for number, _ in enumerate(manifest.digests):
            download.room(number)[:] = bytes(len(download.room(number)))
        download.sources = [(member_in(signed(identity, info_of(identity))), manifest)]
        state = download.state()
        assert torch.cat(list(state.tensors.values())).count_nonzero() == 0, "all pieces are the whole"
        assert [(name, len(tensor)) for name, tensor in state.tensors.items()] == list(manifest.tensors)


def test_a_state_as_it_is_described_is_taken() -> None:
    assert manifest_of(STATE, 1000, 10) == Manifest(
        "a", ("0" * 64, "1" * 64), (("anchor 0", 3), ("velocity 0", 3)), 3, "h"
    )
    with pytest.raises(FrameError, match="from 0 to 2"):
        manifest_of(STATE, 1000, 2)


@given(anything.map(json.dumps) | st.text() | st.just(DEEP) | st.just('{"a":' * 30_000))
def test_a_frame(text: str) -> None:
    assert isinstance(read(lambda: parsed(text)) or {}, dict)


@given(anything)
def test_a_refusal(told: Any) -> None:
    with pytest.raises(RequestRefusedError) as refused:
        accepted({"refused": told})
    assert str(refused.value).isprintable() and len(str(refused.value)) <= 300


@given(st.lists(st.floats(width=32), min_size=1, max_size=300))
@example([0.0] * 5000)
def test_packed_values_are_the_same_to_the_bit(values: list[float]) -> None:
    content = torch.tensor(values).view(torch.uint8).numpy().data
    told, into = packed(content), memoryview(bytearray(len(content)))
    assert len(told) <= longest(len(content))
    unpack(bytearray(told), into)
    assert into == content
    assert read(lambda: unpack(bytearray(told[:-1]), into)) is None


@given(st.binary(max_size=100), st.integers(1, 10))
@example(packed(memoryview(bytearray(44))), 10)  # a value more
@example(packed(memoryview(bytearray(4 << 20))), 10)
def test_a_piece_that_is_none_is_refused(told: bytes, values: int) -> None:
    into = memoryview(bytearray(4 * values))
    assume(len(told) != len(packed(into)))
    with pytest.raises(FrameError):
        unpack(bytearray(told), into)


def test_weights_are_packed_in_five_sixths_of_their_bytes() -> None:
    content = (0.02 * torch.randn(100_000)).view(torch.uint8).numpy().data
    assert len(packed(content)) < 0.85 * len(content)
