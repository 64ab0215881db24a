"""Levels that lie where the values do, against a reference in plain Python, and what the paper says of them."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from messages import quickly, tensors
from torch import Tensor

from farflung.codecs import Codec, ErrorFeedback, Quantize, Statistical, codec_named
from farflung.errors import UserError


def reference(values: list[float], bits: int) -> list[float]:
    """Each value's bin of width 6σ/2^b around the mean, then the mean of the bin."""
    mean, width = statistics.fmean(values), 6 * statistics.pstdev(values) / 2**bits
    edges = [mean + width * number for number in range(1 - 2 ** (bits - 1), 2 ** (bits - 1))]
    bins = [sum(edge <= value for edge in edges) for value in values]
    inside = {one: statistics.fmean(v for v, b in zip(values, bins, strict=True) if b == one) for one in set(bins)}
    return [inside[one] for one in bins]


def sent(codec: Codec, *message: Tensor) -> list[Tensor]:
    return codec.decode(codec.encode(message), message)


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("shape", [(500,), (31, 17), (5,)])
def test_each_value_becomes_the_mean_of_its_bin(bits: int, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(bits)) ** 3 + 0.2
    (back,) = sent(Statistical(bits), x)
    torch.testing.assert_close(back, torch.tensor(reference(x.flatten().tolist(), bits)).view(shape))


def test_a_known_answer() -> None:
    """Mean 0, deviation 1, bins of 1.5: from -1.5 and from 1.5 on the values are the outer bins'."""
    x = torch.tensor([-2.0, -1.0, -1.0, 0.0, 0.0, 1.0, 1.0, 2.0]) / math.sqrt(1.5)
    expected = torch.tensor([-2.0, -1.0, -1.0, 0.5, 0.5, 0.5, 0.5, 2.0]) / math.sqrt(1.5)
    torch.testing.assert_close(sent(Statistical(2), x)[0], expected)


@quickly
@given(message=tensors(), bits=st.sampled_from([2, 3]))
def test_means_are_kept_and_what_is_lost_is_orthogonal(message: list[Tensor], bits: int) -> None:
    """A bin's mean is its values' conditional expectation: x' has the mean of x, and |x|² = |x'|² + |x - x'|²."""
    for x, back in zip(message, sent(Statistical(bits), *message), strict=True):
        if not x.numel() or x.dtype == torch.bfloat16:
            continue
        size = x.double().abs().max().clamp(min=1e-300)
        one, other = x.double() / size, back.double() / size
        assert torch.allclose(other.mean(), one.mean(), atol=1e-5) or size < 1e-38
        assert size < 1e-38 or torch.allclose(
            other.square().mean() + (one - other).square().mean(), one.square().mean(), rtol=1e-3, atol=1e-7
        )


def test_tensors_have_levels_of_their_own() -> None:
    large, small = torch.randn(200), torch.randn(200) * 1e-6
    assert torch.equal(sent(Statistical(2), large, small)[1], sent(Statistical(2), small)[0])


def test_it_loses_less_than_an_even_grid_of_as_many_bits() -> None:
    """Of normal values, 2 even bits for each block of 128 lose 0.56 of their norm, and these 0.40."""
    x = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0))
    errors = [float((sent(codec, x)[0] - x).norm() / x.norm()) for codec in (Statistical(2), Quantize(bits=2))]
    assert errors[0] < 0.45 < errors[1]
    assert Statistical(2).nbytes([x]) < Quantize(bits=2).nbytes([x])


def test_names_and_bits() -> None:
    assert codec_named("ef-stat2") == ErrorFeedback(Statistical(bits=2))
    with pytest.raises(UserError, match="codec 'stat5': Statistical has bits=5; choose 2 or 3"):
        codec_named("stat5")
