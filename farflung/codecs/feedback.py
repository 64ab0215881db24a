"""Error feedback: what one packet leaves out is added to the next message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from farflung.codecs.base import Codec, Compound, Name, Traits
from farflung.codecs.chain import check_composable
from farflung.codecs.packets import Packet
from farflung.codecs.values import check_floating, norm


class ErrorFeedback(Compound):
    """Adds the residual, what the last packets left out, to each message.

        x = decay · e + message;   packet = encode(x);   e ← x - decode(packet)

    (arXiv 1901.09847; with a decay below 1 it is the momentum of SparseLoCo and DeMo.) Packets are those of the codec
    within, and any receiver that has it can read them. The residual e is float32, or float64 where the message is; a
    message of other shapes than the last begins with no residual.

    Args:
        codec: makes the packets.
        decay: how much of what was left out is kept.

    Raises UserError for a codec that only works alone.
    """

    def __init__(self, codec: Codec, decay: float = 1.0) -> None:
        check_composable(codec)
        self.codec, self.parts = codec, (codec,)
        self.decay = decay
        self._residual: list[Tensor] = []
        self._relative_error = 0.0

    def __repr__(self) -> str:
        return f"ErrorFeedback({self.codec!r}, decay={self.decay})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ErrorFeedback) and (self.codec, self.decay) == (other.codec, other.decay)

    @property
    def traits(self) -> Traits:
        """See Codec."""
        return replace(super().traits, composable=False, remembers=True, feeds_back=True)

    def nbytes(self, like: Sequence[Tensor]) -> int:
        """See Codec."""
        return self.codec.nbytes(like)

    def state_nbytes(self, like: Sequence[Tensor]) -> int:
        """See Codec."""
        residual = sum(tensor.numel() * _kept_as(tensor).itemsize for tensor in like)
        return residual + self.codec.state_nbytes(like)

    def encode(self, tensors: Sequence[Tensor]) -> Packet:
        """See Codec."""
        check_floating(tensors)
        residual = self._residual
        if [e.shape for e in residual] != [t.shape for t in tensors]:
            residual = [torch.zeros_like(t, dtype=_kept_as(t)) for t in tensors]
        total = [torch.add(t.detach(), e, alpha=self.decay) for t, e in zip(tensors, residual, strict=True)]
        packet = self.codec.encode(total)
        size = norm(total)
        # As a receiver decodes it: rounded to the message's dtype.
        self._residual = [t.sub_(sent) for t, sent in zip(total, self.codec.decode(packet, tensors), strict=True)]
        self._relative_error = norm(self._residual) / max(size, 1e-30)
        return packet

    def decode(self, packet: Packet, like: Sequence[Tensor]) -> list[Tensor]:
        """See Codec."""
        return self.codec.decode(packet, like)

    def error_of(self, packet: Packet, tensors: Sequence[Tensor]) -> float:
        """See Codec; x includes the residual."""
        return self._relative_error

    def state_dict(self) -> dict[str, Any]:
        """The residual, and the inner codec's state."""
        return {"residual": self._residual, **super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Codec."""
        self._residual = list(state["residual"])
        super().load_state_dict(state)


NAME = Name(
    pattern="ef",
    make=ErrorFeedback,
    examples=("ef-int4", "ef-lowrank64-int4"),
    travels="error feedback: what a packet leaves out is added to the next message",
    wraps=True,
)


def _kept_as(tensor: Tensor) -> torch.dtype:
    """In bfloat16, 1 and 0.001 make 1."""
    return torch.promote_types(tensor.dtype, torch.float32)
