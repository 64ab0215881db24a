"""Times as people read them."""

from __future__ import annotations

import math
import re

from farflung.errors import UserError

TICKS_PER_SECOND = 10
"""By the clock, a run counts tenths of a second where it else counts inner steps."""

_UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}


def duration(seconds: float, digits: int = 1) -> str:
    """A time for people, in the two units that say most: 3.2 s, 3 min 11 s, 2 h 5 min, 1 day 4 h.

    Seconds below a minute have so many `digits`. What is below a tenth of a second is told in milliseconds.
    """
    if 0 < seconds < 0.0995 and digits:  # what is rounded to a tenth is none below it
        return f"{1000 * seconds:.2g} ms"
    if not math.isfinite(seconds) or round(seconds, digits) < 60:
        return f"{seconds:.{digits}f} s"
    whole = round(seconds)
    parts = [(whole // 86400, "day"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    first = next(place for place, (count, _) in enumerate(parts) if count)
    return " ".join(
        f"{count} {unit}{'s' * (unit == 'day' and count > 1)}" for count, unit in parts[first : first + 2] if count
    )


def seconds_of(name: str, text: str) -> float:
    """The seconds that a text says: 30s, 0.5 s, 2min, 1h. Raises UserError, which tells what the text is for."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text)
    if not found or found[2] not in _UNITS:
        raise UserError(f"{name} is {text!r}; give inner steps, such as 50, or a time, such as 30s or 2min")
    return float(found[1]) * _UNITS[found[2]]


def ticks_of(name: str, seconds: float) -> int:
    """A time in tenths of a second, of which there must be a whole number. Raises UserError."""
    ticks = round(seconds * TICKS_PER_SECOND) if 0 <= seconds < math.inf else -1
    if not math.isclose(ticks, seconds * TICKS_PER_SECOND):
        raise UserError(f"{name} is {seconds:g} s; give a whole number of tenths of a second, such as 0.5s or 30s")
    return ticks
