"""What checks of a machine or a run have found: `farflung doctor`."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """The result of one check, and what to do about it, if anything."""

    good: bool
    text: str
    remedy: str = ""

    @property
    def line(self) -> str:
        """ok, BAD, or where nothing is wrong and something could be better: note."""
        mark = "BAD " if not self.good else "note" if self.remedy else "ok  "
        return f"{mark} {self.text}" + (f"; {self.remedy}" if self.remedy else "")
