"""What of some data is no text, and is not trained on: it is told, for nobody would see it in the tokens."""

from __future__ import annotations

import re
import warnings

from farflung.errors import counted, first_of

_NO_UTF8 = re.compile("[\udc80-\udcff]")
"""Bytes that were decoded with the error handler `surrogateescape`."""


class Lost:
    """Counts what some files lose when they are read, and warns of it once.

    Args:
        column: which column of a row should hold its text.
    """

    def __init__(self, column: str) -> None:
        self._column, self._told = column, False
        self._bytes: dict[str, int] = {}
        self._rows: dict[str, int] = {}

    def legible(self, text: str, where: str) -> str:
        """A file's text, decoded with `surrogateescape`; what is no UTF-8 becomes replacement characters."""
        try:
            text.encode()  # far faster than to look for such bytes
        except UnicodeEncodeError:
            self._bytes[where] = self._bytes.get(where, 0) + len(_NO_UTF8.findall(text))
            return text.encode(errors="surrogateescape").decode(errors="replace")
        return text

    def row(self, where: str) -> None:
        """A row has no text."""
        self._rows[where] = self._rows.get(where, 0) + 1

    def tell(self) -> None:
        """Warns of what was lost up to now, if it has not warned before."""
        if self._told:
            return
        if self._bytes:
            what = f"{counted(sum(self._bytes.values()), 'byte')} that are no UTF-8, and become �"
            self._warn(f"{first_of([*self._bytes])}: {what}; make UTF-8 of it, such as by iconv -f LATIN1 -t UTF-8")
        if self._rows:
            what = f"{counted(sum(self._rows.values()), 'row')} without text in the column {self._column!r}"
            self._warn(
                f"{first_of([*self._rows])}: {what}, which are left out; mend them, or set text_column to another"
            )

    def _warn(self, message: str) -> None:
        self._told = True
        warnings.warn(f"data {message}", stacklevel=1)
