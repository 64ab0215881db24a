import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflung.codecs import Dense, PacketError

shapes = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=4)


@given(shapes=shapes, dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), seed=st.integers(0, 99))
def test_dense_gives_back_every_value_rounded_to_its_dtype(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    packet = Dense(dtype).encode(tensors)
    assert packet.dtype == torch.uint8 and packet.is_contiguous()
    assert packet.numel() == 24 + sum(t.numel() for t in tensors) * dtype.itemsize
    for tensor, back in zip(tensors, Dense(dtype).decode(packet, tensors), strict=True):
        assert back.dtype == torch.float32 and torch.equal(back, tensor.to(dtype).float())


def test_non_contiguous_tensors_travel_in_their_logical_order() -> None:
    tensor = torch.arange(12.0).view(3, 4).T
    assert torch.equal(Dense().decode(Dense().encode([tensor]), [tensor])[0], tensor)


def damaged(packet: torch.Tensor, position: int) -> torch.Tensor:
    packet = packet.clone()
    packet[position] ^= 1
    return packet


def test_a_bad_packet_says_what_is_wrong_with_it() -> None:
    tensor = torch.randn(6)
    packet = Dense().encode([tensor])
    for wrong, what in [
        (packet[:10], "shorter"),
        (packet[:-1], "length"),
        (damaged(packet, 0), "magic"),
        (damaged(packet, 4), "version"),
        (damaged(packet, 6), "codec"),
        (damaged(packet, 30), "checksum"),
    ]:
        with pytest.raises(PacketError, match=what):
            Dense().decode(wrong, [tensor])
    with pytest.raises(PacketError, match="shapes"):
        Dense().decode(packet, [torch.randn(2, 3)])
    with pytest.raises(PacketError, match="dense payload"):
        Dense(torch.bfloat16).decode(packet, [tensor])


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(noise: bytes) -> None:
    packet = torch.frombuffer(bytearray(noise), dtype=torch.uint8) if noise else torch.empty(0, dtype=torch.uint8)
    with pytest.raises(PacketError):
        Dense().decode(packet, [torch.zeros(3)])
