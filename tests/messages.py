"""Messages for codecs: tensors of awkward shapes, layouts, dtypes and values; and packets that say what we want."""

from __future__ import annotations

import zlib

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from farflung.codecs.packets import _HEADER

quickly = settings(max_examples=25, deadline=None)

shapes = st.sampled_from([(), (0,), (0, 3), (1,), (1, 1), (7,), (5, 9), (40, 30), (2, 3, 4), (300,)])
values = st.sampled_from(["normal", "zeros", "huge", "tiny", "denormal", "mixed", "same"])
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


@st.composite
def tensors(draw: st.DrawFn) -> list[Tensor]:
    """None, two or four tensors of awkward shapes, layouts, dtypes and values."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    made = []
    for _ in range(draw(st.sampled_from([0, 2, 4]))):
        tensor = torch.randn(draw(shapes), generator=generator)
        kind = draw(values)
        scale = {"huge": 5e37, "tiny": 1e-20, "denormal": 1e-43, "zeros": 0.0}.get(kind, 1.0)
        tensor = torch.full_like(tensor, 3e38) if kind == "same" else tensor * scale
        if kind == "mixed" and tensor.numel():
            tensor.view(-1)[:: max(tensor.numel() // 3, 1)] = 1e30
        if tensor.dim() == 2 and draw(st.booleans()):
            tensor = tensor.T
        made.append(tensor.to(draw(dtypes)))
    return made


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0).double(), *(tensor.reshape(-1).double() for tensor in tensors)])


MESSAGE = [
    torch.randn(12, 9, generator=torch.Generator().manual_seed(6)),
    torch.randn(12, 9),
    torch.randn(70),
    torch.zeros(3),
]


def resigned(packet: Tensor) -> Tensor:
    """The packet with the length and checksum that fit its payload."""
    magic, version, codec, shapes, _, _ = _HEADER.unpack(packet[: _HEADER.size].numpy().tobytes())
    payload = packet[_HEADER.size :].numpy().tobytes()
    header = _HEADER.pack(magic, version, codec, shapes, len(payload), zlib.crc32(payload))
    return torch.frombuffer(bytearray(header + payload), dtype=torch.uint8)
