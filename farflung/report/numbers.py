"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Mapping


def number(value: float | None, digits: int = 4) -> str:
    """A number for people; None, which events have for NaN and infinity, in words."""
    return "not finite" if value is None else f"{value:.{digits}f}"


def nbytes(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


LEAST_SHARE = 0.005
"""Smaller shares are left out."""
IN_WORDS = {"others": "waiting for others", "batches": "waiting for data", "rest": "all else"}
"""What events call otherwise than people do."""


def shares(seconds: Mapping[str, float]) -> str:
    """What time went to, the most first, in percent."""
    whole = sum(seconds.values())
    told = sorted(
        ((spent / whole, what) for what, spent in seconds.items() if spent > LEAST_SHARE * whole), reverse=True
    )
    return ", ".join(f"{IN_WORDS.get(what, what)} {share:.0%}" for share, what in told)
