"""What a codec is: stages that make a packet of a message, and a message of a packet.

A codec is a chain of stages. Each stage makes smaller tensors of those it is given: floating ones, which the next
stage may make smaller still, and uint8 ones, which are finished. What is left at the end is the packet's payload.
Stages are given each tensor of a message as one row; between them, a matrix holds a chunk of a tensor in each row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from farflung.codecs.packets import Packet, PacketError, pack, unpack

_EXCESS = 16, 1 << 16
"""No stage makes more of a message than so many times its values, and so many; who says so lies."""


class NotFiniteError(ValueError):
    """A message holds NaN or infinity, which never travel."""


class Codec:
    """Turns the tensors of a message into a packet and back.

    A codec may remember things between its messages: every stream of messages needs a copy of its own, and what it
    remembers is in `state_dict`. Those that remember nothing leave the last six methods as they are. Who puts codecs
    to use asks what they can do (`lossless`, `needs_receiver`, `needs_whole`), never what they are.
    """

    @property
    def lossless(self) -> bool:
        """Whether each float32 value comes back as it was sent; such messages may be averaged without a codec."""
        return False

    @property
    def needs_receiver(self) -> bool:
        """Whether `decode` reads a packet by the receiver's own values, so that no two receivers read quite the same.

        Then `like` must hold them, and members of a group cannot end a round alike.
        """
        return False

    @property
    def needs_whole(self) -> bool:
        """Whether a message's tensors must come all together; else some of them may be a packet of their own."""
        return False

    def encode(self, tensors: Sequence[Tensor]) -> Packet:
        """The tensors as one packet, on their device. Raises NotFiniteError."""
        raise NotImplementedError

    def decode(self, packet: Packet, like: Sequence[Tensor]) -> list[Tensor]:
        """New tensors of the shapes and dtypes of `like`, which may also be the receiver's own. Raises PacketError."""
        raise NotImplementedError

    def error_of(self, packet: Packet, tensors: Sequence[Tensor]) -> float:
        """How much of a message its packet, just encoded, leaves out: |x - decode(packet)| / |x|, Euclidean norms."""
        decoded = self.decode(packet, tensors)
        missing = norm([tensor - sent for tensor, sent in zip(tensors, decoded, strict=True)])
        return missing / max(norm(tensors), 1e-30)

    def state_dict(self) -> dict[str, Any]:
        """What is remembered: tensors, numbers and containers of them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remembers what a `state_dict` says."""

    def seed(self, seed: int) -> None:
        """Gives a stream of random numbers its seed, where there is one."""

    def shrink_to(self, share: float) -> None:
        """Sends less from now on: `share` (0 to 1) of what the codec was made for, where it can."""

    def turn_to(self, round: int) -> None:
        """Says which round the next message is of; all members of its group say the same."""

    @property
    def wants_expectation(self) -> bool:
        """Whether `expect` would be of use before the next message."""
        return False

    def expect(self, tensors: Sequence[Tensor]) -> None:
        """Says what the next message would be like if it brought no news."""

    def expect_change(self, tensors: Sequence[Tensor]) -> None:
        """Says about how much each value of the next message may have moved away from the others' since the last."""


def norm(tensors: Sequence[Tensor]) -> float:
    """The Euclidean norm of all values together."""
    size = math.hypot(*(float(torch.linalg.vector_norm(tensor)) for tensor in tensors))
    if math.isfinite(size):
        return size
    # Squares of large values leave float32's range.
    return math.hypot(*(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for tensor in tensors))


class Stage(Codec):
    """One step of compression: a codec by itself, or joined to another with `|`."""

    @property
    def sees_shapes(self) -> bool:
        """Whether a message's tensors must come in their shapes; else each comes as one row."""
        return False

    def shrink(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Smaller tensors: floating ones that a later stage may shrink, and finished ones of bytes.

        Flat ones; or contiguous matrices, of floating numbers with a chunk in each row, which later stages keep apart.
        """
        raise NotImplementedError

    def restore(self, parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """What `shrink` was given, as far as it can be had back. Raises PacketError."""
        raise NotImplementedError

    def __or__(self, other: Stage | Chain) -> Chain:
        return Chain((self, *other.stages))

    @property
    def stages(self) -> tuple[Stage, ...]:
        """This one."""
        return (self,)

    def encode(self, tensors: Sequence[Tensor]) -> Packet:
        """See Codec."""
        return encode(self.stages, tensors)

    def decode(self, packet: Packet, like: Sequence[Tensor]) -> list[Tensor]:
        """See Codec."""
        return decode(self.stages, packet, like)


class Chain(Codec):
    """Stages one after the other: `LowRank(rank=64) | Quantize(bits=4)`."""

    def __init__(self, stages: tuple[Stage, ...]) -> None:
        self.stages = stages

    def __or__(self, other: Stage | Chain) -> Chain:
        return Chain((*self.stages, *other.stages))

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.stages))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chain) and self.stages == other.stages

    @property
    def lossless(self) -> bool:
        """See Codec."""
        return all(stage.lossless for stage in self.stages)

    @property
    def needs_receiver(self) -> bool:
        """See Codec."""
        return any(stage.needs_receiver for stage in self.stages)

    def encode(self, tensors: Sequence[Tensor]) -> Packet:
        """See Codec."""
        return encode(self.stages, tensors)

    def decode(self, packet: Packet, like: Sequence[Tensor]) -> list[Tensor]:
        """See Codec."""
        return decode(self.stages, packet, like)

    def state_dict(self) -> dict[str, Any]:
        """Each stage's."""
        return {str(number): stage.state_dict() for number, stage in enumerate(self.stages)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Codec."""
        for number, stage in enumerate(self.stages):
            stage.load_state_dict(state[str(number)])

    def seed(self, seed: int) -> None:
        """See Codec."""
        for number, stage in enumerate(self.stages):
            stage.seed(seed + number)

    def shrink_to(self, share: float) -> None:
        """See Codec."""
        for stage in self.stages:
            stage.shrink_to(share)

    def turn_to(self, round: int) -> None:
        """See Codec."""
        for stage in self.stages:
            stage.turn_to(round)

    @property
    def wants_expectation(self) -> bool:
        """See Codec."""
        return self.stages[0].wants_expectation

    def expect(self, tensors: Sequence[Tensor]) -> None:
        """See Codec: only the first stage sees messages."""
        self.stages[0].expect(tensors)


def encode(stages: Sequence[Stage], tensors: Sequence[Tensor]) -> Packet:
    """Runs a message through the stages, and packs what is left."""
    if not all(finite(tensor) for tensor in tensors):
        raise NotFiniteError("the message holds NaN or infinity; it was not sent")
    table: list[list[Tensor]] = []
    parts = _given(stages, tensors)
    for stage in stages:
        parts = [part.detach() for part in stage.shrink(parts)]
        table.append(parts)
    return pack(stages, tensors, table)


def decode(stages: Sequence[Stage], packet: Packet, like: Sequence[Tensor]) -> list[Tensor]:
    """Unpacks, and runs the stages backwards."""
    parts, table = unpack(stages, packet, like)
    times, more = _EXCESS
    most = times * sum(tensor.numel() for tensor in like) + more
    if any(sum(part.numel() for part in made) > most for made in table[:-1]):
        raise PacketError("packet has a table of more values than its codec makes of such tensors")
    try:
        for stage, wanted in zip(reversed(stages), [*reversed(table[:-1]), _given(stages, like)], strict=True):
            parts = stage.restore(parts, wanted)
    except PacketError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        # A packet is a stranger's word: whatever a stage stumbles over is the packet's fault.
        raise PacketError(f"packet cannot be read: {error}") from error
    if not all(finite(part) for part in parts):
        raise PacketError("packet holds values that are not finite")
    return [_fit(part.view(tensor.shape), tensor.dtype) for part, tensor in zip(parts, like, strict=True)]


def _given(stages: Sequence[Stage], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The message as the first stage wants to see it."""
    return [tensor.detach() if stages[0].sees_shapes else tensor.detach().reshape(-1) for tensor in tensors]


def _fit(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in `dtype`; what is beyond its range becomes its largest number."""
    if tensor.dtype == dtype:
        return tensor
    most = torch.finfo(dtype).max
    return tensor.to(dtype) if most > torch.finfo(tensor.dtype).max else tensor.clamp(-most, most).to(dtype)


def finite(tensor: Tensor) -> bool:
    """Whether no value is infinite or NaN, in one pass and without a temporary of the tensor's size."""
    # One value that is not finite makes a sum that is not; a finite sum, at a fifth of the time, settles it.
    return bool(torch.isfinite(tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32)))) or _all_finite(
        tensor
    )


def _all_finite(tensor: Tensor) -> bool:
    return tensor.numel() == 0 or bool(torch.isfinite(torch.stack(tensor.aminmax())).all())
