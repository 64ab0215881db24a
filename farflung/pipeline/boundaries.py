"""What crosses from one stage to the next and back: hidden states forward, their gradients backward, encoded."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from farflung.codecs import CODECS, Codec, NotFiniteError, codec_named
from farflung.errors import UserError
from farflung.workloads.base import Coordinates


class Boundary:
    """The packets of one boundary. All have one length, so that a receiver can make room before they come.

    Args:
        shape: of a microbatch's hidden states: (…, width).
        codec: how numbers become bytes; a lossless one is left out.
        subspace: if given, hidden states travel as their coordinates in it.
        device: where unpacked tensors are wanted.
    """

    def __init__(
        self, shape: torch.Size, codec: Codec, subspace: Coordinates | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self._subspace = subspace
        self._device = torch.device(device)
        self._like = torch.empty(*shape[:-1], subspace.rank if subspace else shape[-1], dtype=torch.float32)
        self._codec = None if codec.traits.lossless else codec
        self._room = self._like
        if self._codec:
            self._room = torch.empty(self._codec.nbytes([self._like]), dtype=torch.uint8)
        self.spoilt = False
        """Whether NaN or infinity was to be sent; zeros went in its place."""

    @property
    def nbytes(self) -> int:
        """Bytes of one packet."""
        return self._room.nbytes

    def room(self) -> Tensor:
        """Memory to receive a packet into."""
        return torch.empty_like(self._room)

    def pack(self, hidden: Tensor, batch: Tensor) -> Tensor:
        """Encodes the hidden states of a batch."""
        return self._packed(self._subspace.coordinates(hidden, batch) if self._subspace else hidden)

    def unpack(self, packet: Tensor, batch: Tensor) -> Tensor:
        """Decodes the hidden states of a batch."""
        numbers = self._unpacked(packet)
        return self._subspace.hidden(numbers, batch) if self._subspace else numbers

    def pack_gradient(self, gradient: Tensor) -> Tensor:
        """Encodes a gradient."""
        return self._packed(gradient @ self._subspace.basis_on(gradient.device) if self._subspace else gradient)

    def unpack_gradient(self, packet: Tensor) -> Tensor:
        """Decodes a gradient."""
        numbers = self._unpacked(packet)
        return numbers @ self._subspace.basis_on(numbers.device).T if self._subspace else numbers

    def _packed(self, numbers: Tensor) -> Tensor:
        numbers = numbers.detach().contiguous()
        if self._codec is None:
            return numbers.cpu()
        try:
            return self._codec.encode([numbers])
        except NotFiniteError:
            self.spoilt = True
            return self._codec.encode([torch.zeros_like(numbers)])

    def _unpacked(self, packet: Tensor) -> Tensor:
        if self._codec is None:
            return packet.to(self._device)
        return self._codec.decode(packet, [self._like.to(self._device)])[0]


def boundary_named(name: str) -> tuple[int, Codec]:
    """The rank of the subspace (0 for none) and the codec of a setting such as `subspace32-int8`. Raises UserError."""
    found = re.fullmatch(r"subspace(\d+)(?:-(.+))?", name)
    rank, rest = (int(found[1]), found[2] or "float32") if found else (0, name)
    if found and not rank:
        raise UserError(f"boundary is {name!r}; a subspace needs at least 1 dimension")
    try:
        codec = codec_named(rest)
    except UserError as error:
        raise UserError(f"boundary is {name!r}; choose one of {boundary_names()}") from error
    if not _is_plain(codec):
        raise UserError(
            f"boundary {name!r} remembers or measures its messages, but packets between stages must all be alike; "
            f"choose one of {boundary_names()}"
        )
    return rank, codec


def boundary_names() -> str:
    """What can be written, in one line."""
    examples = (example for _, row in CODECS.usable() for example in row.examples)
    plain = [example for example in examples if _is_plain(codec_named(example))]
    return f"{', '.join(plain)}, subspace32 (numbers a token); joined with -, as in topk10-int8 or subspace32-int8"


def _is_plain(codec: Codec) -> bool:
    """Whether all packets have one length and depend on nothing but their message."""
    traits = codec.traits
    return traits.fixed_length and not traits.remembers and not traits.needs_receiver
