"""A few numbers that are sent with a message's tensors, in the same packets, and must arrive unchanged."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from farflung.codecs import Codec, Dense
from farflung.codecs.split import Divided, Shares

NOTES = 3
"""Notes of a message of gradients beside that of each parameter: the loss, whether it counts, an overflow."""


class Noted(Divided):
    """Sends notes (tensors without dimensions) unchanged, and all other tensors by a codec.

    Args:
        codec: makes the packets of all other tensors.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec, self.parts = codec, (codec,)

    def __repr__(self) -> str:
        return f"Noted({self.codec!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Noted) and self.codec == other.codec

    def shares(self, tensors: Sequence[Tensor]) -> Shares:
        """Which tensors go by which codec; a codec that none goes by is left out."""
        notes = [n for n, tensor in enumerate(tensors) if tensor.dim() == 0]
        others = [n for n, tensor in enumerate(tensors) if tensor.dim()]
        return [(codec, places) for codec, places in ((self.codec, others), (Dense(), notes)) if places]
