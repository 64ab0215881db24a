"""A host's rounds when some of those who come mean it ill: nobody is steered, and no group is opened by one alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from patience import patience
from test_internet import Run, live, pair

from farflung.networks.internet.contact.frames import FrameError
from farflung.networks.internet.contact.member import Member
from farflung.networks.internet.contact.streams import RequestRefusedError
from farflung.networks.internet.gathering import GRACE_SECONDS
from farflung.networks.internet.matchmaker import RENDEZVOUS_KEPT, VISITS

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


def request(*wants: int, key: str, wait_s: float = 20.0) -> dict[str, Any]:
    asked = {"wants": list(wants), "key": key, "step": 5, "weight": 1.0, "lineage": "", "shuns": []}
    return {**asked, "patience": wait_s}


def group_of(answer: dict[str, Any]) -> set[int]:
    return {rank for rank, _ in answer["weights"]}


def come(host: Run, *guests: tuple[int, dict[str, Any]], apart_s: float = 0.3) -> list[set[int]]:
    """The groups of those who come one after the other."""
    matchmaker = host.peers[0]._matchmaker

    async def one(number: int, rank: int, asked: dict[str, Any]) -> set[int]:
        await asyncio.sleep(number * apart_s)
        return group_of(await matchmaker._welcome(rank, asked))

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


def test_nobody_comes_to_a_round_twice_or_to_very_many_and_none_that_is_live_is_forgotten(host: Run) -> None:
    matchmaker = host.peers[0]._matchmaker
    key = "round 1 of fragment 5"
    assert come(host, (LIAR, request(key=key, wait_s=0.0))) == [{LIAR}]
    with pytest.raises(RequestRefusedError, match="came to this round before"):
        come(host, (LIAR, request(key=key)))

    async def besiege() -> int:
        waiting = asyncio.ensure_future(matchmaker._welcome(11, request(11, 12, key="live")))
        await asyncio.sleep(0.1)
        junk = [asyncio.ensure_future(matchmaker._welcome(LIAR, request(LIAR, 14, key=f"{n}"))) for n in range(500)]
        await asyncio.sleep(0.5)
        refused = sum(one.done() and isinstance(one.exception(), RequestRefusedError) for one in junk)
        partner = await matchmaker._welcome(12, request(11, 12, key="live"))
        assert group_of(partner) == group_of(await waiting) == {11, 12}
        for one in junk:
            one.cancel()
        await asyncio.gather(*junk, return_exceptions=True)
        return refused

    assert host.peers[0].peers.background.run(besiege(), patience(30)) == 500 - VISITS
    assert len(matchmaker._rendezvous) <= RENDEZVOUS_KEPT + VISITS
