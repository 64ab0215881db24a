"""A host's rounds when some of those who come mean it ill: nobody is steered, and no group is opened by one alone."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from patience import patience, until
from test_internet import Run, live, pair

from farflung.networks.internet.contact.streams import RequestRefusedError
from farflung.networks.internet.gathering import GRACE_SECONDS, guest_of
from farflung.networks.internet.matchmaker import RENDEZVOUS_KEPT, VISITS, Matchmaker
from farflung.networks.peers.frames import FrameError
from farflung.networks.peers.member import Member

__all__ = ["live", "pair"]

LIAR = 99
HONEST = (11, 12, 13, 14)


pytestmark = pytest.mark.slow


@pytest.fixture
def host(pair: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A host that knows four honest members, who train, and a liar."""
    table = dict(pair.peers[0].peers.members.by_rank)
    monkeypatch.setattr(pair.peers[0].peers.members, "by_rank", table)
    for rank in (*HONEST, LIAR):
        table[rank] = Member(f"peer {rank}", rank, "s", "here", (), signed_at=2e9, proven=True, lasts=1e6)
    return pair


def request(*wants: int, key: str, wait_s: float = 20.0, **other: Any) -> dict[str, Any]:
    asked = {"wants": list(wants), "key": key, "step": 5, "weight": 1.0, "lineage": "", "shuns": []}
    return {**asked, "patience": wait_s, **other}


async def welcomed(matchmaker: Matchmaker, rank: int, asked: dict[str, Any]) -> dict[str, Any]:
    """What the host answers one that asks."""
    return await matchmaker._welcome(*guest_of(asked, rank))


def group_of(answer: dict[str, Any]) -> set[int]:
    return {rank for rank, _ in answer["weights"]}


def come(host: Run, *guests: tuple[int, dict[str, Any]], apart_s: float = 0.3) -> list[set[int]]:
    """The groups of those who come one after the other."""
    matchmaker = host.peers[0]._matchmaker

    async def one(number: int, rank: int, asked: dict[str, Any]) -> set[int]:
        await asyncio.sleep(number * apart_s)
        return group_of(await welcomed(matchmaker, rank, asked))

    async def all_of_them() -> list[set[int]]:
        return list(await asyncio.gather(*(one(number, *guest) for number, guest in enumerate(guests))))

    return host.peers[0].peers.background.run(all_of_them(), patience(60))


def test_one_that_wants_another_without_itself_is_refused(host: Run) -> None:
    for wants in ((11,), (11, 12)):
        with pytest.raises(FrameError, match="a group without itself"):
            come(host, (LIAR, request(*wants, key=f"steered by {len(wants)}")))


def test_nobody_is_paired_with_one_whom_it_does_not_want_while_its_partner_can_come(host: Run) -> None:
    key = "round 1 of fragment 1"
    liar, one, other = come(
        host,
        (LIAR, request(LIAR, 11, key=key, wait_s=3.0)),
        (11, request(11, 12, key=key)),
        (12, request(11, 12, key=key)),
    )
    assert one == other == {11, 12} and liar == {LIAR}


def test_one_with_a_partner_that_it_shuns_meets_another(host: Run) -> None:
    key = "round 1 of fragment 7"
    groups = come(
        host,
        (11, request(11, LIAR, key=key, shuns=[LIAR])),
        (LIAR, request(11, LIAR, key=key, wait_s=1.0)),
        (12, request(12, 13, key=key, wait_s=2.0)),
    )
    assert groups == [{11, 12}, {LIAR}, {11, 12}]


def test_one_that_alone_shuns_another_hears_that_it_is_kept(host: Run) -> None:
    group = (11, 12, 13, LIAR)
    matchmaker = host.peers[0]._matchmaker

    async def meet() -> list[dict[str, Any]]:
        asked = [request(*group, key="round 1 of fragment 8", shuns=[LIAR] if rank == 11 else []) for rank in group]
        return list(await asyncio.gather(*map(partial(welcomed, matchmaker), group, asked)))

    answers = host.peers[0].peers.background.run(meet(), patience(60))
    assert [group_of(answer) for answer in answers] == [{11}] + 3 * [{12, 13, LIAR}]
    assert [answer["kept"] for answer in answers] == [[LIAR], [], [], []]


@pytest.mark.parametrize("name", ["key", "lineage"])
def test_a_name_too_long_to_be_kept_is_refused(host: Run, name: str) -> None:
    with pytest.raises(FrameError, match="more than 512 letters"):
        come(host, (LIAR, {**request(key="round 1 of fragment 9"), name: "x" * 513}))


def test_a_visit_beforehand_does_not_keep_a_host_from_calling_those_who_do_not_come(
    host: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, called = "round 1 of fragment 10", []

    async def still_there(member: Member) -> bool:
        called.append(member.rank)
        return True

    monkeypatch.setattr(host.peers[0].peers, "still_there", still_there)
    host.peers[0]._matchmaker._called.clear()
    come(host, (LIAR, request(LIAR, key=key, wait_s=0.0)))
    guests = [(rank, request(11, 12, 13, key=key, wait_s=2.0)) for rank in (11, 12)]
    assert come(host, *guests, apart_s=0.0) == 2 * [{11, 12}]
    assert called == [13]


def test_one_without_patience_does_not_open_a_group_for_the_others(host: Run) -> None:
    key, all_of_them = "round 1 of fragment 2", (11, 12, 13, LIAR)
    groups = come(
        host,
        (11, request(*all_of_them, key=key)),
        (LIAR, request(*all_of_them, key=key, wait_s=0.0)),
        (12, request(*all_of_them, key=key)),
        (13, request(*all_of_them, key=key)),
    )
    assert groups == [set(all_of_them)] * 4


def test_one_without_patience_goes_alone_when_the_others_do_not_come(host: Run) -> None:
    key, all_of_them = "round 2 of fragment 2", (11, 12, 13, LIAR)
    groups = come(
        host,
        (LIAR, request(*all_of_them, key=key, wait_s=0.0)),
        (11, request(*all_of_them, key=key, wait_s=GRACE_SECONDS + 3)),
        (12, request(*all_of_them, key=key, wait_s=GRACE_SECONDS + 3)),
        apart_s=0.05,
    )
    assert groups == [{LIAR}, {11, 12}, {11, 12}]


def test_those_who_want_overlapping_groups_meet_in_one(host: Run) -> None:
    """Some have heard of a newcomer, and some not yet."""
    key = "round 1 of fragment 3"
    groups = come(
        host,
        (11, request(11, 12, 13, key=key)),
        (14, request(11, 12, 13, 14, key=key)),
        (12, request(11, 12, 13, key=key)),
        (13, request(11, 12, 13, 14, key=key)),
    )
    assert groups == [{11, 12, 13, 14}] * 4


def test_groups_of_three_that_miss_one_do_not_draw_in_others(host: Run) -> None:
    key = "round 1 of fragment 4"
    host.peers[0].peers.members.by_rank[13].trains = False
    groups = come(
        host,
        (14, request(14, 15, LIAR, key=key, wait_s=2.0)),
        (11, request(11, 12, 13, key=key)),
        (12, request(11, 12, 13, key=key)),
    )
    assert groups[1:] == [{11, 12}] * 2


def test_one_that_leaves_is_not_waited_for_and_may_come_again(host: Run) -> None:
    """Its process may have died, and joined again."""
    guest, key = host.peers[1], "round 1 of fragment 6"
    matchmaker = host.peers[0]._matchmaker
    asked = request(guest.rank, 11, key=key, wait_s=100.0)

    async def come_and_leave() -> None:
        member = guest.peers.members.by_rank[host.peers[0].rank]
        async with guest.peers.stream(member) as stream:
            await stream.tell({"kind": "meet", **asked})
            while not (key in matchmaker._rendezvous and matchmaker._rendezvous[key].waiting):
                await asyncio.sleep(0.05)

    for _ in range(2):
        guest.peers.background.run(come_and_leave(), patience(20))
        until(lambda: not matchmaker._rendezvous[key].waiting, 20)


def test_nobody_comes_to_a_round_twice_or_to_very_many_and_none_that_is_live_is_forgotten(host: Run) -> None:
    matchmaker = host.peers[0]._matchmaker
    key = "round 1 of fragment 5"
    assert come(host, (LIAR, request(key=key, wait_s=0.0))) == [{LIAR}]
    with pytest.raises(RequestRefusedError, match="came to this round before"):
        come(host, (LIAR, request(key=key)))

    async def besiege() -> int:
        waiting = asyncio.ensure_future(welcomed(matchmaker, 11, request(11, 12, key="live")))
        await asyncio.sleep(0.1)
        junk = [asyncio.ensure_future(welcomed(matchmaker, LIAR, request(LIAR, 14, key=f"{n}"))) for n in range(500)]
        await asyncio.sleep(0.5)
        refused = sum(one.done() and isinstance(one.exception(), RequestRefusedError) for one in junk)
        partner = await welcomed(matchmaker, 12, request(11, 12, key="live"))
        assert group_of(partner) == group_of(await waiting) == {11, 12}
        for one in junk:
            one.cancel()
        await asyncio.gather(*junk, return_exceptions=True)
        return refused

    assert host.peers[0].peers.background.run(besiege(), patience(30)) == 500 - VISITS
    assert len(matchmaker._rendezvous) <= RENDEZVOUS_KEPT + VISITS


def test_one_that_stays_alone_hears_why(host: Run) -> None:
    matchmaker = host.peers[0]._matchmaker

    async def one(number: int, rank: int, asked: dict[str, Any]) -> str:
        await asyncio.sleep(0.5 * number)
        return str((await welcomed(matchmaker, rank, asked))["alone"])

    async def all_of(key: str, *guests: tuple[int, dict[str, Any]]) -> list[str]:
        asked = [(rank, {**request(rank, key=key, wait_s=3.0), **more}) for rank, more in guests]
        return await asyncio.gather(*(one(number, *guest) for number, guest in enumerate(asked)))

    def heard(key: str, *guests: tuple[int, dict[str, Any]]) -> list[str]:
        return host.peers[0].peers.background.run(all_of(f"{key} of fragment 11", *guests), patience(60))

    first, second = {"wants": [11, 12]}, {"wants": [13, 14]}
    assert heard("round 1", (11, first)) == ["nobody"]
    assert heard("round 2", (13, second), (11, first), (12, first))[0] == "left over"
    assert heard("round 3", (11, first), (12, first), (13, second))[2] == "late"
    unloved = {"wants": [12, LIAR], "patience": 6.0}
    assert heard("round 4", (11, {**first, "shuns": [LIAR]}), (LIAR, unloved))[0] == "shuns"
    assert (
        heard("round 5", (11, {**first, "shuns": [LIAR], "patience": 6.0}), (LIAR, {**unloved, "patience": 1.0}))[1]
        == "shunned"
    )
    own = host.peers[0].rank
    waits_for_another = {"wants": [13, own], "patience": 4.0}
    assert heard("round 6", (13, waits_for_another), (11, {**first, "patience": 1.0}))[1] == "left over"
