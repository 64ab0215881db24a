"""Numbers as people read them."""

from __future__ import annotations


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
