"""Which rounds a replica with a slow link stays out of."""

from __future__ import annotations

import pytest

from farflung.outer import Round
from farflung.outer.outcomes import Outcome
from farflung.outer.slow_link import LAST, SlowLink

TRAINED_S = 5.0


def after(held_up_s: float, rounds: int = LAST + 1, outcome: Outcome = Outcome.AVERAGED) -> SlowLink:
    """The link of a replica that has trained five seconds before each of some rounds, which held it up."""
    link, now = SlowLink(), 100.0
    for number in range(rounds):
        waited_from = now + TRAINED_S
        now = waited_from + held_up_s
        times = {"started": waited_from, "finished": now, "waited_from": waited_from, "landed": now}
        link.landed(Round(round=number, fragment=0, group=(1, 2), started_step=0, step=0, outcome=outcome, **times))
    return link


def comes_to(link: SlowLink, others_s: list[float], rounds: int = 120) -> int:
    comes = [[not link.stays_out(0, f"round {number}", others_s) for _ in range(2)] for number in range(rounds)]
    assert all(once == again for once, again in comes)
    return sum(once for once, _ in comes)


@pytest.mark.parametrize(
    ("held_up_s", "others_s", "one_in"),
    [
        (3.4, [0.3, 0.4, 0.3, 3.4], 4),  # 3.05 s more than the others: a fifth of 5 s is three times as little
        (0.6, [0.3, 0.4, 0.3], 1),  # not much slower
        (1.2, [0.3, 0.3, 0.3], 1),  # slower, but it holds up nobody for long
        (3.4, [0.3], 1),  # one other alone may lie, or have no other partner
        (3.4, [3.0, 3.3, 3.6], 1),  # all are as slow
        (3.4, [0.0, 3.3, 3.6], 1),  # one of three lies
        (0.3, [-1e15, 0.3], 1),  # one of two does
        (60.0, [0.3, 0.4, 0.3], 8),  # but it never stays away for good
    ],
)
def test_a_slow_one_comes_to_so_few_rounds_that_partners_wait_little(
    held_up_s: float, others_s: list[float], one_in: int
) -> None:
    assert comes_to(after(held_up_s), others_s) == 120 // one_in


def test_one_that_has_met_few_or_whose_rounds_were_lost_comes_to_all() -> None:
    assert comes_to(after(30.0, rounds=LAST - 1), [0.3, 0.3]) == 120
    assert comes_to(after(30.0, outcome=Outcome.PEER_LOST), [0.3, 0.3]) == 120


@pytest.mark.parametrize("fragments", [2, 3, 4])
def test_a_slow_one_comes_to_as_many_rounds_of_each_fragment(fragments: int) -> None:
    link, others_s = after(3.4), [0.3, 0.4, 0.3, 3.4]
    came = [0] * fragments
    for number in range(120):
        for fragment in range(fragments):
            came[fragment] += not link.stays_out(fragment, f"round {number}, fragment {fragment}", others_s)
    assert came == [30] * fragments


def test_one_whose_link_is_as_fast_again_comes_to_all_rounds_again() -> None:
    link, now = after(3.4), 1000.0
    assert comes_to(link, [0.3, 0.4, 0.3]) == 30
    for number in range(LAST):
        times = {"started": now, "finished": now + 0.3, "waited_from": now, "landed": now + 0.3}
        link.landed(
            Round(round=number, fragment=0, group=(1, 2), started_step=0, step=0, outcome=Outcome.AVERAGED, **times)
        )
        now += 5.3
    assert comes_to(link, [0.3, 0.4, 0.3]) == 120
