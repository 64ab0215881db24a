"""What is held out for validation: documents by what they hold, the same ones on every machine."""

from __future__ import annotations

import hashlib

import numpy as np

from farflung.workloads.base import Ids

HELD_OUT_SHARE = 20
"""One document in this many is held out for validation."""


def is_held_out(content: bytes) -> bool:
    """Whether a document is held out: by its content alone, one in HELD_OUT_SHARE on average."""
    return hashlib.sha256(content).digest()[0] * HELD_OUT_SHARE < 256


def by_number(number: int) -> bytes:
    """What stands for a document's content in runs of earlier releases, which chose by its number."""
    return str(number).encode()


def evenly(available: int, most: int) -> Ids:
    """Up to `most` of so many numbers from 0, evenly spread."""
    return np.linspace(0, available - 1, min(most, available), dtype=np.int64)
