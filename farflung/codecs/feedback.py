"""Nothing is lost for good: what one packet leaves out is added to the next message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from farflung.codecs.base import Codec, norm
from farflung.codecs.packets import Packet


class ErrorFeedback(Codec):
    """Adds what the last packets left out to each message.

        x = decay · e + message;   packet = encode(x);   e ← x - decode(packet)

    (arXiv 1901.09847; with a decay below 1 it is the momentum of SparseLoCo and DeMo.) Packets are those of the codec
    within, and any receiver that has it can read them. e is float32, or float64 where the message is; a message of
    other shapes than the last begins with no residual.

    Args:
        codec: makes the packets.
        decay: how much of what was left out is kept.
    """

    def __init__(self, codec: Codec, decay: float = 1.0) -> None:
        self.codec = codec
        self.decay = decay
        self._residual: list[Tensor] = []
        self._relative_error = 0.0

    def __repr__(self) -> str:
        return f"ErrorFeedback({self.codec!r}, decay={self.decay})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ErrorFeedback) and (self.codec, self.decay) == (other.codec, other.decay)

    @property
    def lossless(self) -> bool:
        """See Codec."""
        return self.codec.lossless

    @property
    def needs_receiver(self) -> bool:
        """See Codec."""
        return self.codec.needs_receiver

    @property
    def needs_whole(self) -> bool:
        """See Codec."""
        return self.codec.needs_whole

    def encode(self, tensors: Sequence[Tensor]) -> Packet:
        """See Codec."""
        residual = (
            self._residual if [e.shape for e in self._residual] == [t.shape for t in tensors] else map(_zeros, tensors)
        )
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
        """See Codec; x includes what was left out before."""
        return self._relative_error

    def state_dict(self) -> dict[str, Any]:
        """What was left out, and the inner codec's."""
        return {"residual": self._residual, "codec": self.codec.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Codec."""
        self._residual = list(state["residual"])
        self.codec.load_state_dict(state["codec"])

    def seed(self, seed: int) -> None:
        """See Codec."""
        self.codec.seed(seed)

    def set_budget(self, share: float) -> None:
        """See Codec."""
        self.codec.set_budget(share)

    def set_round(self, round: int) -> None:
        """See Codec."""
        self.codec.set_round(round)


def _zeros(like: Tensor) -> Tensor:
    """A residual of nothing yet."""
    return torch.zeros(like.shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
