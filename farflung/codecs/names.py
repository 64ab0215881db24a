"""How a codec is written in settings: one row beside each codec is all that it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from farflung.codecs.base import Codec


@dataclass(frozen=True)
class Name:
    """A codec's row in the registry.

    Args:
        pattern: what is written, as a regular expression.
        make: the codec, given what the pattern's groups match; of a wrapper, given the codec that follows.
        examples: what may be written, each a complete name; all of them where there are few.
        travels: what its packets hold, in one line for people.
        wraps: whether it goes before another codec, with a hyphen between.
    """

    pattern: str
    make: Callable[..., Codec]
    examples: tuple[str, ...]
    travels: str
    wraps: bool = False
