"""Times as people read them."""

import pytest

from farflung.durations import duration


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0, "0.0 s"),
        (0.0171, "17 ms"),
        (0.00003, "0.03 ms"),
        (3.24, "3.2 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min"),
        (191, "3 min 11 s"),
        (3600, "1 h"),
        (7500, "2 h 5 min"),
        (7199.6, "2 h"),
        (86400, "1 day"),
        (200_000, "2 days 7 h"),
        (float("inf"), "inf s"),
        (float("nan"), "nan s"),
    ],
)
def test_a_time_is_told_in_the_two_units_that_say_most(seconds: float, told: str) -> None:
    assert duration(seconds) == told


def test_whole_seconds_where_no_digits_are_asked_for() -> None:
    assert duration(0.04, 0) == "0 s" and duration(4.6, 0) == "5 s" and duration(59.6, 0) == "1 min"
