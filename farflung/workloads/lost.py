"""What of some data is no text, and is not trained on: it is told, for nobody would see it in the tokens."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Sequence

from farflung.errors import counted, first_of

END = "\0"
"""Ends a text where bytes are tokens, so that it may be in none."""

_NO_UTF8 = re.compile("[\udc80-\udcff]")
"""Bytes that were decoded with the error handler `surrogateescape`."""


class Lost:
    """Counts what some files lose when they are read, and warns of it once.

    Args:
        column: which column of a row should hold its text.
    """

    def __init__(self, column: str) -> None:
        self._column, self._warned = column, False
        self._bytes, self._zeros, self._rows = Counter[str](), Counter[str](), Counter[str]()

    def legible(self, text: str, where: str) -> str:
        """A text, decoded with `surrogateescape`; what is no UTF-8, or ends a text, becomes replacement characters."""
        if zeros := text.count(END):
            self._zeros[where] += zeros
            text = text.replace(END, "\ufffd")
        try:
            text.encode()  # far faster than to look for such bytes
        except UnicodeEncodeError:
            self._bytes[where] += len(_NO_UTF8.findall(text))
            return text.encode(errors="surrogateescape").decode(errors="replace")
        return text

    def row(self, where: str) -> None:
        """A row has no text."""
        self._rows[where] += 1

    def told(self, where: str = "") -> list[str]:
        """What was lost up to now, in words, each with a remedy: of one file, or of all."""
        without = f"without text in the column {self._column!r}, which are left out"
        each = (
            (
                self._bytes,
                "byte",
                "that are no UTF-8, and become �; make UTF-8 of it, such as by iconv -f LATIN1 -t UTF-8",
            ),
            (self._zeros, "character", "of code 0, which would end a text, and become �; remove them"),
            (self._rows, "row", f"{without}; mend them, or set text_column to another"),
        )
        found = ((counts if not where else {where: counts[where]}, thing, what) for counts, thing, what in each)
        return [
            f"{first_of([*counts])}: {counted(total, thing)} {what}"
            for counts, thing, what in found
            if (total := sum(counts.values()))
        ]

    def tell(self) -> None:
        """Warns of what was lost up to now, if it has not warned before."""
        self.tell_again(self.told())

    def tell_again(self, told: Sequence[str]) -> None:
        """Warns of what was lost when a store was made, if it has not warned before."""
        if not self._warned:
            self._warned = bool(told)
            warn_of(told)


def warn_of(lost: Sequence[str]) -> None:
    """Warns of what was lost, as it is `told`."""
    for message in lost:
        warnings.warn(f"data {message}", stacklevel=1)
