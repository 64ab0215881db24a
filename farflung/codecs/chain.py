"""Codecs made of transforms.

Each transform makes smaller tensors of those it is given: floating ones, which the next may make smaller still, and
uint8 ones, which are finished. What is left at the end is the packet's payload. Transforms are given each tensor of a
message as one row; between them, a matrix holds a chunk of a tensor in each row.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from farflung.codecs.base import Codec, Compound, NotFiniteError
from farflung.codecs.packets import HOST, Packet, PacketError, pack, packed_nbytes, unpack
from farflung.codecs.values import check_floating, finite, fit
from farflung.errors import UserError
from farflung.renamed import Formerly

_EXCESS = 16, 1 << 16
"""No transform makes more of a message than so many times its values, and so many; who says so lies."""


class Transform(Codec):
    """One step of compression: a codec by itself, or joined to another with `|`."""

    shrink, restore = Formerly("forward"), Formerly("inverse")

    @property
    def sees_shapes(self) -> bool:
        """Whether a message's tensors must come in their shapes; else each comes as one row."""
        return False

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Smaller tensors: floating ones that a later transform may shrink, and finished ones of bytes.

        Flat ones; or contiguous matrices, of floating numbers with a chunk in each row, which later ones keep apart.
        """
        raise NotImplementedError(f"{type(self).__name__} has no forward; define it")

    def inverse(self, parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """What `forward` was given, as far as it can be had back. Raises PacketError."""
        raise NotImplementedError(f"{type(self).__name__} has no inverse; define it")

    def outline(self, like: Sequence[Tensor]) -> list[Tensor]:
        """What `forward` makes of such tensors, without memory: its shapes and dtypes, at least about.

        Those that remember something, or whose sizes depend on values, say so themselves.
        """
        return self.forward([tensor.to("meta") for tensor in like])

    def __or__(self, other: Codec) -> Chain:
        return join(self, other)

    def encode(self, tensors: Sequence[Tensor]) -> Packet:
        """See Codec."""
        return Chain((self,)).encode(tensors)

    def decode(self, packet: Packet, like: Sequence[Tensor]) -> list[Tensor]:
        """See Codec."""
        return Chain((self,)).decode(packet, like)

    def nbytes(self, like: Sequence[Tensor]) -> int:
        """See Codec."""
        return Chain((self,)).nbytes(like)


class Chain(Compound):
    """Transforms one after the other: `LowRank(rank=64) | Quantize(bits=4)`. Raises UserError."""

    stages = Formerly("transforms")

    def __init__(self, transforms: Sequence[Transform]) -> None:
        self.parts = self.transforms = tuple(transforms)
        for place, transform in enumerate(self.transforms):
            if place and transform.sees_shapes:
                raise UserError(f"{transform!r} needs whole tensors, so that it must come first; put it there")

    def __or__(self, other: Codec) -> Chain:
        return join(self, other)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.transforms))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chain) and self.transforms == other.transforms

    def encode(self, tensors: Sequence[Tensor]) -> Packet:
        """See Codec."""
        check_floating(tensors)
        if not finite(*tensors):
            raise NotFiniteError("the message holds NaN or infinity; it was not sent")
        table: list[list[Tensor]] = []
        parts = self._given(tensors)
        for transform in self.transforms:
            parts = [part.detach() for part in transform.forward(parts)]
            table.append(parts)
        return pack(self.transforms, tensors, table)

    def decode(self, packet: Packet, like: Sequence[Tensor]) -> list[Tensor]:
        """See Codec."""
        parts, table = unpack(self.transforms, packet, like, like[0].device if like else HOST)
        times, more = _EXCESS
        most = times * sum(tensor.numel() for tensor in like) + more
        if any(sum(part.numel() for part in made) > most for made in table[:-1]):
            raise PacketError("packet's table has more values than its codec makes of such tensors")
        wanted = [*reversed(table[:-1]), self._given(like)]
        try:
            for transform, before in zip(reversed(self.transforms), wanted, strict=True):
                parts = transform.inverse(parts, before)
        except PacketError:
            raise
        except (RuntimeError, ValueError, IndexError) as error:
            # A packet is a stranger's word: whatever a transform stumbles over is the packet's fault.
            raise PacketError(f"packet cannot be read: {error}") from error
        if not finite(*parts):
            raise PacketError("packet holds values that are not finite")
        return [fit(part.view(tensor.shape), tensor.dtype) for part, tensor in zip(parts, like, strict=True)]

    def nbytes(self, like: Sequence[Tensor]) -> int:
        """See Codec."""
        return packed_nbytes(self._outlines(like))

    def state_nbytes(self, like: Sequence[Tensor]) -> int:
        """See Codec."""
        given = [self._given(like), *self._outlines(like)[:-1]]
        return sum(transform.state_nbytes(parts) for transform, parts in zip(self.transforms, given, strict=True))

    def _outlines(self, like: Sequence[Tensor]) -> list[list[Tensor]]:
        table: list[list[Tensor]] = []
        parts = self._given(like)
        for transform in self.transforms:
            parts = transform.outline(parts)
            table.append(parts)
        return table

    def _given(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The message as the first transform wants to see it."""
        shaped = self.transforms[0].sees_shapes
        return [tensor.detach() if shaped else tensor.detach().reshape(-1) for tensor in tensors]

    def seed(self, seed: int) -> None:
        """See Codec."""
        for number, transform in enumerate(self.transforms):
            transform.seed(seed + number)

    @property
    def wants_reference(self) -> bool:
        """See Codec."""
        return self.transforms[0].wants_reference

    def set_reference(self, tensors: Sequence[Tensor]) -> None:
        """See Codec: only the first transform sees messages."""
        self.transforms[0].set_reference(tensors)


def join(one: Codec, other: Codec) -> Chain:
    """Both, one after the other. Raises UserError for what cannot be joined."""
    return Chain((*_transforms(one), *_transforms(other)))


def _transforms(codec: Codec) -> tuple[Transform, ...]:
    check_composable(codec)
    if isinstance(codec, Chain):
        return codec.transforms
    if not isinstance(codec, Transform):
        raise UserError(f"{codec!r} is no Transform, which alone can be joined to others; use it alone")
    return (codec,)


def check_composable(codec: Codec) -> None:
    """Refuses to join a codec to others, or to feed it back, where that cannot be. Raises UserError."""
    if not isinstance(codec, Codec):
        raise UserError(f"{codec!r} is no codec; give one, as farflung.codec_named makes it of a name")
    if not codec.traits.composable:
        raise UserError(f"{codec!r} only works alone; leave out what it is joined to")
