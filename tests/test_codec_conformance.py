"""What every codec keeps to that settings can name: each row of the registry is tested, and some settings besides."""

from __future__ import annotations

import copy
import io
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import MESSAGE, quickly, resigned, tensors
from torch import Tensor

from farflung.codecs import (
    CODECS,
    BlockDCT,
    BlockFloat,
    Codec,
    ErrorFeedback,
    LowRank,
    Modulo,
    NotFiniteError,
    PacketError,
    Quantize,
    SplitCodec,
    Statistical,
    Threshold,
    TopK,
    Transform,
    codec_named,
)
from farflung.codecs.packets import _HEADER, MAGIC, VERSION
from farflung.errors import UserError

EXAMPLES = [example for row in CODECS.values() for example in row.examples]

CASES: dict[str, Callable[[], Codec]] = {
    **{name: lambda name=name: codec_named(name) for name in EXAMPLES},
    "int4, small blocks": lambda: Quantize(bits=4, block=32),
    "int4, stochastic": lambda: Quantize(bits=4, stochastic=True),
    "e3m0, small blocks": lambda: BlockFloat("e3m0", block=64),
    "topk, small chunks": lambda: TopK(share=0.1, chunk=64),
    "topk | int2": lambda: TopK(share=0.1, chunk=4096) | Quantize(bits=2),
    "threshold, renewed": lambda: Threshold(share=0.1, refresh=3),
    "threshold | int4": lambda: Threshold(share=0.1, refresh=3) | Quantize(bits=4),
    "topk | stat3": lambda: TopK(share=0.1, chunk=4096) | Statistical(bits=3),
    "lowrank, low": lambda: LowRank(rank=2),
    "lowrank | int4": lambda: LowRank(rank=3) | Quantize(bits=4),
    "block-dct | topk | int8": lambda: BlockDCT(chunk=8) | TopK(share=0.2, chunk=64) | Quantize(bits=8),
    "modulo3 in thirds": lambda: Modulo(bits=3, block=16, round_robin=3),
    "feedback with decay": lambda: ErrorFeedback(TopK(share=0.1, chunk=64) | Quantize(bits=2), decay=0.9),
    "split": lambda: SplitCodec(ErrorFeedback(LowRank(rank=2) | Quantize(bits=4)), Modulo(bits=4)),
}
every_codec = pytest.mark.parametrize("name", list(CASES))


def message(seed: int, size: float = 1.0) -> list[Tensor]:
    """What is divided in halves of the same shapes."""
    generator = torch.Generator().manual_seed(seed)
    return [size * torch.randn(shape, generator=generator) for shape in [(90, 70), (300,)] * 2]


def outlines(like: list[Tensor]) -> list[Tensor]:
    return [torch.empty(tensor.shape, device="meta") for tensor in like]


def tensors_in(state: Any) -> int:
    """Bytes of all tensors."""
    if isinstance(state, Tensor):
        return state.nbytes
    inside = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return sum(map(tensors_in, inside))


class Unnamed(Transform):
    """One of a user's own, which does not say what it is."""

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.reshape(-1).bfloat16() for tensor in tensors]

    def inverse(self, parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        return [part.float() for part in parts]


@pytest.mark.parametrize("make", [Unnamed, lambda: ErrorFeedback(Unnamed()), lambda: Unnamed() | Quantize(bits=4)])
def test_where_a_codec_lies_in_memory_is_no_part_of_what_it_is(make: Callable[[], Codec]) -> None:
    one, other = make(), make()
    decoded = other.decode(one.encode(message(0)), message(0))
    assert torch.equal(decoded[0], one.decode(other.encode(message(0)), message(0))[0])


@every_codec
@pytest.mark.parametrize(
    "seen", [lambda x: x[:, ::2], lambda x: x[0, ::2], lambda x: x.t(), lambda x: x[:1, :1].expand(9, 5)]
)
def test_how_tensors_lie_in_memory_does_not_matter(name: str, seen: Callable[[Tensor], Tensor]) -> None:
    tensors = [seen(tensor) for tensor in message(0)[::2] * 2]
    for codec in (CASES[name](), CASES[name]()):
        packets = [codec.encode(tensors), CASES[name]().encode([tensor.clone().contiguous() for tensor in tensors])]
        assert torch.equal(*packets)


@every_codec
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_what_is_no_usual_float_is_refused_in_one_line(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(UserError, match=f"holds a tensor of {dtype}; codecs carry torch.float32"):
        CASES[name]().encode([torch.ones(8, 8).to(dtype)] * 2)


@every_codec
def test_what_is_lost_is_what_traits_and_error_say(name: str) -> None:
    codec, sent = CASES[name](), message(0)
    packet = codec.encode(sent)
    error = codec.error_of(packet, sent)
    back = CASES[name]().decode(packet, sent)
    missing = float(torch.cat([(s - b).reshape(-1) for s, b in zip(sent, back, strict=True)]).norm())
    size = float(torch.cat([s.reshape(-1) for s in sent]).norm())
    assert (error < 1e-6) == (missing < 1e-6 * size) or name == "split"  # of which it is the first half's error
    if codec.traits.lossless:
        assert all(map(torch.equal, sent, back)) and error == 0
    elif codec.traits.needs_receiver:
        assert missing / size <= 1.1 * error
    else:
        assert missing / size == pytest.approx(error, abs=1e-6) and error < 1


@every_codec
def test_bytes_are_told_before(name: str) -> None:
    """To the byte where packets are of one length, whatever is in them; and the memory of what is kept."""
    codec, like = CASES[name](), outlines(message(0))
    expected = codec.nbytes(like)
    assert codec.nbytes(message(0)) == expected
    if codec.traits.fixed_length:
        for sent in (message(1), message(2, 0.0), message(3, 1e30), message(4, 1e-30), message(5)):
            packet = codec.encode(sent)
            assert packet.nbytes == expected
            codec.decode(packet, sent)
    else:
        found = [CASES[name]().encode(message(seed)).nbytes for seed in range(5)]
        assert sum(found) / 5 == pytest.approx(expected, rel=0.02)


@every_codec
def test_memory_is_told_before(name: str) -> None:
    codec = CASES[name]()
    for seed in range(3):
        sent = message(seed)
        codec.set_reference([tensor / 2 for tensor in sent])
        packet = codec.encode(sent)
        codec.decode(packet, sent)
        assert tensors_in(codec.state_dict()) == codec.state_nbytes(outlines(sent))
    remembers = codec.traits.remembers
    assert remembers or (codec.state_nbytes(outlines(sent)) == 0 and not codec.traits.feeds_back)


@every_codec
def test_one_that_remembers_nothing_makes_equal_packets_of_equal_messages(name: str) -> None:
    codec = CASES[name]()
    first = codec.encode(message(0))
    codec.encode(message(1))
    assert codec.traits.remembers or torch.equal(codec.encode(message(0)), first)


@every_codec
def test_packets_of_other_shapes_are_refused(name: str) -> None:
    packet = CASES[name]().encode(message(0))
    for other in (
        [t.mT.contiguous() if t.dim() > 1 else t for t in message(0)],
        message(0)[:2],
        [t.reshape(-1) for t in message(0)],
    ):
        with pytest.raises(PacketError):
            CASES[name]().decode(packet, other)


@pytest.mark.parametrize("one", EXAMPLES)
def test_any_two_work_together_or_are_refused_in_one_line(one: str) -> None:
    for other in EXAMPLES:
        try:
            codec = codec_named(f"{one}-{other}")
        except UserError as error:
            assert "\n" not in str(error) and f"codec '{one}-{other}'" in str(error)
            alone = [not codec_named(name).traits.composable for name in (one, other)]
            assert any(alone) or other in ("lowrank64", "block-dct", "rows")
            continue
        packet = codec.encode(MESSAGE)
        assert [t.shape for t in codec_named(f"{one}-{other}").decode(packet, MESSAGE)] == [t.shape for t in MESSAGE]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Modulo(bits=4) | Quantize(bits=4),
        lambda: Quantize(bits=4) | Modulo(bits=4),
        lambda: TopK() | Quantize(bits=8) | Modulo(bits=4),
        lambda: ErrorFeedback(Modulo(bits=4)),
        lambda: ErrorFeedback(SplitCodec(Quantize(bits=4), Modulo(bits=4))),
        lambda: ErrorFeedback(ErrorFeedback(Quantize(bits=4))),
        lambda: TopK() | ErrorFeedback(Quantize(bits=4)),  # type: ignore[operator]
        lambda: Quantize(bits=4) | SplitCodec(Quantize(bits=4), Quantize(bits=4)),  # type: ignore[operator]
    ],
)
def test_what_only_works_alone_is_refused_where_it_is_joined(make: Callable[[], Codec]) -> None:
    with pytest.raises(UserError, match=r"only works alone; [^\n]*$"):
        make()


@pytest.mark.parametrize("other", ["int4", 4, None, Quantize])
def test_only_codecs_are_joined(other: Any) -> None:
    for join in (lambda: Quantize(bits=4) | other, lambda: ErrorFeedback(other)):
        with pytest.raises(UserError, match=r"is no codec; give one, as farflung.codec_named makes it"):
            join()


def test_what_needs_whole_tensors_must_come_first() -> None:
    for first, second in itertools.product((Quantize(bits=8), TopK(), BlockDCT()), (LowRank(rank=4), BlockDCT())):
        with pytest.raises(UserError, match="must come first"):
            _ = first | second


@every_codec
@quickly
@given(message=tensors())
def test_what_comes_back_has_shape_and_dtype_is_finite_and_the_same_each_time(name: str, message: list[Tensor]) -> None:
    before = copy.deepcopy(message)
    codec = CASES[name]()
    packet = codec.encode(message)
    assert 0 <= codec.error_of(packet, message) < 1e3
    assert packet.dtype == torch.uint8 and packet.dim() == 1 and packet.is_contiguous()
    assert torch.equal(packet, CASES[name]().encode(message))
    back = CASES[name]().decode(packet, message)
    for tensor, was, decoded in zip(message, before, back, strict=True):
        assert torch.equal(tensor, was)
        assert decoded.shape == tensor.shape and decoded.dtype == tensor.dtype
        assert torch.isfinite(decoded).all()


@every_codec
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_never_travels_and_harms_nothing(name: str, value: float) -> None:
    codec = CASES[name]()
    good = [torch.randn(20, 10), torch.randn(20, 10)]
    codec.encode(good)
    before = copy.deepcopy(codec.state_dict())
    bad = [good[0].clone(), good[1]]
    bad[0][3, 3] = value
    with pytest.raises(NotFiniteError, match="NaN or infinity"):
        codec.encode(bad)
    assert repr(codec.state_dict()) == repr(before)
    assert codec.decode(codec.encode(good), good)[0].shape == (20, 10)


@every_codec
@quickly
@given(data=st.data())
def test_a_packet_that_was_cut_or_altered_is_refused(name: str, data: st.DataObject) -> None:
    packet = CASES[name]().encode(MESSAGE)
    with pytest.raises(PacketError):
        CASES[name]().decode(packet[: data.draw(st.integers(0, packet.numel() - 1))], MESSAGE)
    altered = packet.clone()
    altered[data.draw(st.integers(0, packet.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(PacketError, match=r"magic|version|codec|shapes hash|payload length|checksum"):
        CASES[name]().decode(altered, MESSAGE)


@every_codec
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_packet_with_a_right_checksum_and_wrong_content_is_refused_or_harmless(
    name: str, data: st.DataObject
) -> None:
    packet = CASES[name]().encode(MESSAGE).clone()
    payload = packet[_HEADER.size :]
    if data.draw(st.booleans()):
        for _ in range(data.draw(st.integers(1, 4))):
            payload[data.draw(st.integers(0, payload.numel() - 1))] = data.draw(st.integers(0, 255))
    else:
        noise = data.draw(st.binary(min_size=1, max_size=64))
        begin = data.draw(st.integers(0, payload.numel() - 1))
        end = min(begin + len(noise), payload.numel())
        payload[begin:end] = torch.frombuffer(bytearray(noise), dtype=torch.uint8)[: end - begin]
    try:
        back = CASES[name]().decode(resigned(packet), MESSAGE)
    except PacketError:
        return
    for tensor, decoded in zip(MESSAGE, back, strict=True):
        assert decoded.shape == tensor.shape and torch.isfinite(decoded).all()


@every_codec
@quickly
@given(noise=st.binary(max_size=200), signed=st.booleans())
def test_random_bytes_are_refused(name: str, noise: bytes, signed: bool) -> None:
    if signed:
        right = _HEADER.unpack(CASES[name]().encode(MESSAGE)[: _HEADER.size].numpy().tobytes())
        noise = _HEADER.pack(MAGIC, VERSION, right[2], right[3], len(noise), zlib.crc32(noise)) + noise
    packet = torch.frombuffer(bytearray(noise), dtype=torch.uint8) if noise else torch.empty(0, dtype=torch.uint8)
    with pytest.raises(PacketError):
        CASES[name]().decode(packet, MESSAGE)


@every_codec
def test_a_codec_goes_on_from_its_state_bit_for_bit(name: str) -> None:
    generator = torch.Generator().manual_seed(7)
    messages = [[torch.randn(20, 10, generator=generator), torch.randn(20, 10, generator=generator)] for _ in range(6)]
    codec = CASES[name]()
    codec.seed(5)
    for message in messages[:3]:
        codec.decode(codec.encode(message), message)
    file = io.BytesIO()
    torch.save(codec.state_dict(), file)
    file.seek(0)
    resumed = CASES[name]()
    resumed.seed(5)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for message in messages[3:]:
        packet = codec.encode(message)
        assert torch.equal(packet, resumed.encode(message))
        codec.decode(packet, message)
        resumed.decode(packet, message)
