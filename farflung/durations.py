"""Times as people read them."""

from __future__ import annotations

import math


def duration(seconds: float, digits: int = 1) -> str:
    """A time for people, in the two units that say most: 3.2 s, 3 min 11 s, 2 h 5 min, 1 day 4 h.

    Seconds below a minute have so many `digits`. What is below a tenth of a second is told in milliseconds.
    """
    if 0 < seconds < 0.1 and digits:
        return f"{1000 * seconds:.2g} ms"
    if not math.isfinite(seconds) or round(seconds, digits) < 60:
        return f"{seconds:.{digits}f} s"
    whole = round(seconds)
    parts = [(whole // 86400, "day"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    first = next(place for place, (count, _) in enumerate(parts) if count)
    return " ".join(
        f"{count} {unit}{'s' * (unit == 'day' and count > 1)}" for count, unit in parts[first : first + 2] if count
    )
