"""Times as people read them."""

import pytest

from farflung.durations import duration, seconds_of, ticks_of
from farflung.errors import UserError


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0, "0.0 s"),
        (0.0171, "17 ms"),
        (0.00003, "0.03 ms"),
        (0.0994, "99 ms"),
        (0.0996, "0.1 s"),
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


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("0.5 s", 0.5), ("2min", 120), (" 2 m ", 120), ("1.5h", 5400), ("20sec", 20)]
)
def test_a_time_is_read(text: str, seconds: float) -> None:
    assert seconds_of("every", text) == seconds and ticks_of("every", seconds) == 10 * seconds


@pytest.mark.parametrize("text", ["", "30", "s", "30 steps", "-3s", "1e3s", "nan s", "3 days"])
def test_what_is_no_time_is_told_apart(text: str) -> None:
    with pytest.raises(UserError, match=r"every is '.*'; give inner steps, such as 50, or a time"):
        seconds_of("every", text)


@pytest.mark.parametrize("seconds", [0.25, -1.0, float("inf"), float("nan")])
def test_times_are_of_whole_tenths_of_a_second(seconds: float) -> None:
    with pytest.raises(UserError, match=r"every is .* s; give a whole number of tenths of a second"):
        ticks_of("every", seconds)
