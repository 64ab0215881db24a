"""Tells transformers that sequences are not packed, so that no pass waits to read their positions off a GPU.

It would ask so before each pass, and the device then has nothing to do until the next layers come.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

from torch import Tensor

_not_packed: ContextVar[bool] = ContextVar("not packed", default=False)


@contextmanager
def positions_given(positions: Tensor | None) -> Iterator[None]:
    """In it, passes of this thread's models take such positions; without any, a sequence is one piece."""
    _answer_for_transformers()
    token = _not_packed.set(positions is None)
    try:
        yield
    finally:
        _not_packed.reset(token)


@cache
def _answer_for_transformers() -> None:
    """Elsewhere, and in passes of others, transformers finds out by itself as before."""
    from transformers import masking_utils

    find = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda positions: None if _not_packed.get() else find(positions)
