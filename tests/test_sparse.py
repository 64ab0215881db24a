"""The sparse methods: DeMo and SparseLoCo against plain numpy from the papers' equations alone; thresholds."""

import copy
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from farflung import methods
from farflung.codecs import BlockDCT, ErrorFeedback, Quantize, Threshold, TopK
from farflung.inner import SignSGD
from farflung.networks import SimulatedNetwork, Simulation
from farflung.outer import Way, bytes_per_parameter

Array = NDArray[np.float64]
SHAPES = [(64,), (64, 64), (64, 64), (128,), (64, 128)]
MANY = 18
"""More replicas than any group that once had all packets."""


def cosines(size: int) -> Array:
    """The orthonormal DCT-II: row i is frequency i."""
    i, j = np.mgrid[:size, :size]
    return np.where(i == 0, np.sqrt(1 / size), np.sqrt(2 / size)) * np.cos(np.pi * i * (j + 0.5) / size)


def chunks_of(shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """Squares of 64 of a matrix, runs of 64 of a vector."""
    return [tuple(slice(64 * n, 64 * n + 64) for n in place) for place in np.ndindex(*(size // 64 for size in shape))]


def largest(values: Array, count: int) -> Array:
    """The values of the largest magnitudes; 0 elsewhere."""
    kept = np.zeros_like(values)
    places = np.argsort(-np.abs(values), axis=None)[:count]
    kept.flat[places] = values.flat[places]
    return kept


def spectrum(chunk: Array) -> Array:
    c = cosines(64)
    return c @ chunk @ c.T if chunk.ndim == 2 else c @ chunk


def fast_part(momentum: Array) -> Array:
    """DeMo's q: the inverse transform of the 32 largest coefficients of each chunk."""
    q, c = np.zeros_like(momentum), cosines(64)
    for chunk in chunks_of(momentum.shape):
        kept = largest(spectrum(momentum[chunk]), 32)
        q[chunk] = c.T @ kept @ c if kept.ndim == 2 else c.T @ kept
    return q


def sparse(values: Array, chunk: int, kept: int) -> Array:
    """The `kept` largest of each run of `chunk` values of a tensor."""
    flat = values.reshape(-1)
    runs = [largest(flat[begin : begin + chunk], kept) for begin in range(0, len(flat), chunk)]
    return np.concatenate(runs).reshape(values.shape)


def progress(rank: int, step: int) -> list[Array]:
    """What is fed to a replica in place of gradients: tensors of very different sizes."""
    draws = np.random.default_rng([rank, step])
    return [10.0 ** -(n % 3) * draws.standard_normal(shape) for n, shape in enumerate(SHAPES)]


def descended(
    method: methods.Method, replicas: int, steps: int, make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
) -> list[list[Tensor]]:
    """Where each replica's parameters end that begin at 0 and have `progress` for gradients."""

    def work(network: SimulatedNetwork) -> list[Tensor]:
        model = torch.nn.ParameterList([torch.zeros(shape) for shape in SHAPES])
        with method.attach(model, (optimizer := make(list(model))), network):
            for step in range(steps):
                for parameter, gradient in zip(model, progress(network.rank, step), strict=True):
                    parameter.grad = torch.from_numpy(gradient).float()
                optimizer.step()
        return [parameter.detach() for parameter in model]

    return Simulation(replicas).run(work)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, MANY])
def test_demo_is_the_papers_equations_at_any_number_of_replicas(replicas: int) -> None:
    """m ← 0.999·m + g; q the 32 largest frequencies of each chunk; m ← m - q; θ ← (1 - η·λ)·θ - η·sign(mean q)."""
    steps = 4
    seen = descended(methods.demo(), replicas, steps, lambda p: SignSGD(p, lr=0.5, weight_decay=0.1))
    momenta = [[np.zeros(shape) for shape in SHAPES] for _ in range(replicas)]
    weights, clear = [np.zeros(shape) for shape in SHAPES], [np.ones(shape, dtype=bool) for shape in SHAPES]
    for step in range(steps):
        total = [np.zeros(shape) for shape in SHAPES]
        for rank in range(replicas):
            momenta[rank] = [0.999 * m + g for m, g in zip(momenta[rank], progress(rank, step), strict=True)]
            fast = [fast_part(m) for m in momenta[rank]]
            momenta[rank] = [m - q for m, q in zip(momenta[rank], fast, strict=True)]
            total = [t + q for t, q in zip(total, fast, strict=True)]
        for weight, sure, q in zip(weights, clear, total, strict=True):
            weight[:] = (1 - 0.5 * 0.1) * weight - 0.5 * np.sign(q)
            sure &= np.abs(q) > 1e-4 * np.abs(q).max()  # float32 may see another sign of what is all but 0
    for parameters in seen:
        for parameter, weight, sure in zip(parameters, weights, clear, strict=True):
            assert sure.mean() > 0.99
            np.testing.assert_allclose(parameter.numpy()[sure], weight[sure], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [3, MANY])
def test_sparseloco_is_the_papers_equations_at_any_number_of_replicas(replicas: int) -> None:
    """e ← 0.95·e + Δ; the largest of each chunk of a tensor travel; φ ← φ - mean."""
    rounds, every = 4, 3
    codec = ErrorFeedback(TopK(share=8 / 512, chunk=512), decay=0.95)
    method = methods.sparseloco(every=every, codec=codec)
    seen = descended(method, replicas, rounds * every, lambda p: torch.optim.SGD(p, lr=1.0))
    anchors = [np.zeros(shape) for shape in SHAPES]
    owed = [[np.zeros(shape) for shape in SHAPES] for _ in range(replicas)]
    for round in range(rounds):
        total = [np.zeros(shape) for shape in SHAPES]
        for rank in range(replicas):
            deltas = [progress(rank, round * every + step) for step in range(every)]
            message = [0.95 * e + sum(d[n] for d in deltas) for n, e in enumerate(owed[rank])]
            sent = [sparse(m, 512, 8) for m in message]
            owed[rank] = [m - s for m, s in zip(message, sent, strict=True)]
            total = [t + s for t, s in zip(total, sent, strict=True)]
        anchors = [a - t / replicas for a, t in zip(anchors, total, strict=True)]
    for parameters in seen:
        for parameter, anchor in zip(parameters, anchors, strict=True):
            np.testing.assert_allclose(parameter.numpy(), anchor, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["demo", "sparseloco", "dynamic-threshold"])
def test_sparse_packets_go_to_everyone_unless_parts_are_asked_for(name: str) -> None:
    """N - 1 times the bytes that are listed; in parts, two messages at most and the headers."""

    def sent(averaging: Way) -> float:
        recipe = methods.RECIPES[name]
        method = recipe(averaging=averaging, **({"every": 1} if name == "sparseloco" else {}))

        def work(network: SimulatedNetwork) -> int:
            model = torch.nn.ParameterList([torch.zeros(1024, 256)])
            generator = torch.Generator().manual_seed(network.rank)
            with method.attach(model, (optimizer := torch.optim.SGD(model, lr=0.1)), network):
                model[0].grad = torch.randn(1024, 256, generator=generator)
                optimizer.step()
            return network.traffic.bytes_sent

        return max(Simulation(MANY).run(work)) / (1024 * 256 * bytes_per_parameter(method))

    assert sent("whole") == pytest.approx(MANY - 1, rel=0.06)
    assert sent("parts") < (MANY - 1) / 3


def test_demo_keeps_so_many_frequencies_of_each_chunk_of_each_tensor() -> None:
    """Whatever the tensors beside it: 32 of a vector's 64 and 32 of a matrix's 4096."""
    message = [torch.from_numpy(gradient).float() for gradient in progress(0, 0)]
    codec = BlockDCT(chunk=64) | TopK(share=32 / 4096, chunk=4096)
    packet = codec.encode(message)
    for tensor in codec.decode(packet, message):
        for chunk in chunks_of(tuple(tensor.shape)):
            found = spectrum(tensor.numpy()[chunk].astype(np.float64))
            assert (np.abs(found) > 1e-5 * np.abs(found).max()).sum() == 32
    chunks = sum(len(chunks_of(shape)) for shape in SHAPES)
    assert packet.nbytes <= chunks * 32 * (4 + 12 / 8) + 256  # a place takes at most 12 bits


def test_small_tensors_go_whole_and_take_no_places() -> None:
    """k of each chunk, or all of one that holds no more."""
    generator = torch.Generator().manual_seed(0)
    message = [torch.randn(size, generator=generator) for size in (5, 1, 82, 81, 30)] + [torch.tensor(3.0)]
    codec = TopK(share=0.02, chunk=4096)
    packet = codec.encode(message)
    for tensor, back in zip(message, codec.decode(packet, message), strict=True):
        assert torch.equal(tensor, back)
    values = sum(tensor.numel() for tensor in message)
    assert packet.nbytes <= 4 * values + 250
    many = [torch.randn(64, generator=generator) for _ in range(300)]
    assert codec.encode(many).nbytes <= 300 * 64 * 4 + 250


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_what_is_large_in_one_chunk_does_not_drown_what_is_small_in_the_next(bits: int) -> None:
    """Blocks of a later stage end where chunks do, so that each tensor errs in proportion to itself."""
    generator = torch.Generator().manual_seed(1)
    message = [torch.randn(size, generator=generator) * 10.0**-n for n, size in enumerate((100, 7, 100, 100, 7, 1))]
    for codec in (TopK(share=0.02) | Quantize(bits), BlockDCT() | TopK(share=32 / 4096) | Quantize(bits)):
        for tensor, back in zip(message, codec.decode(codec.encode(message), message), strict=True):
            assert (tensor - back).norm() < tensor.norm()


def test_tensors_smaller_than_a_chunk_are_transformed_by_themselves() -> None:
    """A chunk is no larger than its tensor, so nothing is spent on what fills it up."""
    message = [torch.randn(5), torch.tensor(2.0), torch.randn(3, 4), torch.randn(0, 4), torch.randn(8, 4)]
    codec = BlockDCT(chunk=64) | TopK(share=32 / 4096, chunk=4096)
    packet = codec.encode(message)
    assert packet.nbytes < 4 * (5 + 1 + 12 + 32) + 200
    for tensor, back in zip(message, codec.decode(packet, message), strict=True):
        torch.testing.assert_close(tensor, back)


def gradients(messages: int) -> Iterator[list[Tensor]]:
    """Noisy and decaying, with rows of different sizes and a jump; a vector that is 0 at first; small ones; ties."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.rand(80, 1, generator=generator) ** 4
    mean = torch.randn(80, 50, generator=generator)
    for number in range(messages):
        scale = (30.0 if number >= 250 else 1.0) / (1 + number / 20)
        matrix = scale * rows * (0.2 * mean + torch.randn(80, 50, generator=generator))
        late = scale * torch.randn(900, generator=generator) if number >= 5 else torch.zeros(900)
        small = scale * torch.randn(30, generator=generator)
        yield [matrix, late, small, torch.tensor(scale), torch.zeros(500), torch.full((400,), scale), torch.empty(0, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("decay", [1.0, 0.95])
def test_a_threshold_keeps_about_its_share_of_every_message(decay: float) -> None:
    """Under error feedback, which adds up what was left out; a tensor sends at least one value, and never a zero."""
    share, refresh, checked = 0.02, 60, 0
    codec = ErrorFeedback(Threshold(share=share, refresh=refresh), decay=decay)
    owed = [torch.zeros_like(tensor) for tensor in next(gradients(1))]
    for message in gradients(400):
        total = [decay * e + m for e, m in zip(owed, message, strict=True)]
        sent = codec.decode(codec.encode(message), message)
        owed = [t - s for t, s in zip(total, sent, strict=True)]
        for t, s in zip(total, sent, strict=True):
            there, kept, asked = int((t != 0).sum()), int((s != 0).sum()), max(share * t.numel(), 1)
            assert min(there, asked / 2.2) <= kept <= 2.2 * asked
            checked += kept > 0
    assert checked > 400 * 4


def test_values_that_are_all_equal_take_turns() -> None:
    """None is above the others, so the first go first; error feedback brings all of them in time."""
    codec = ErrorFeedback(Threshold(share=0.1))
    message = torch.ones(100)
    total = sum(codec.decode(codec.encode([message]), [message])[0] for _ in range(200))
    assert isinstance(total, Tensor) and total.min() >= 180 and total.max() <= 200


@pytest.mark.slow
@pytest.mark.parametrize("interruption", [1, 3, 130])
def test_thresholds_go_on_from_their_state_deep_in_a_run(interruption: int) -> None:
    codec, resumed = ErrorFeedback(Threshold(share=0.02, refresh=60)), ErrorFeedback(Threshold(share=0.02, refresh=60))
    for number, message in enumerate(gradients(200)):
        if number == interruption:
            resumed.load_state_dict(copy.deepcopy(codec.state_dict()))
        packet = codec.encode(message)
        assert number < interruption or torch.equal(packet, resumed.encode(message))
