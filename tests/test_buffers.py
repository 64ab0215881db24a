"""What a model keeps besides what is trained: buffers of all kinds, and frozen weights that the loop moves itself."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problem import flat, inner_steps, loss_of, small_model
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from farflung import methods
from farflung.errors import UserError
from farflung.hooks import digests
from farflung.hooks.digests import BLOCK, ROW, digest
from farflung.methods import Method
from farflung.networks import Conditions, SimulatedNetwork, Simulation
from farflung.networks.simulator.conditions import Cut, Death
from farflung.outer import DisagreementError, Round

LOOPS = [lambda: methods.diloco(every=4), lambda: methods.noloco(every=4), methods.ddp]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)


def with_buffer(buffer: Tensor) -> nn.Module:
    model = small_model()
    model.register_buffer("extra", buffer)
    return model


def ended(make: Callable[[int], nn.Module], change: Callable[[nn.Module, int], None], replicas: int = 2) -> list[Any]:
    """The models of replicas that trained a round, changed something themselves, and ended."""

    def work(network: SimulatedNetwork) -> nn.Module:
        model = make(network.rank)
        optimizer = sgd(model)
        with methods.diloco(every=2).attach(model, optimizer, network, deadline_s=5):
            inner_steps(model, optimizer, network.rank, range(2))
            with torch.no_grad():
                change(model, network.rank)
        return model

    return Simulation(replicas).run(work)


# Means.


class Spectral(nn.Module):
    """Two layers whose weights are divided by their largest singular values, which buffers keep the vectors of."""

    def __init__(self, old: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        norm: Any = torch.nn.utils.spectral_norm if old else parametrizations.spectral_norm
        self.layers = nn.Sequential(norm(nn.Linear(6, 16)), nn.Tanh(), norm(nn.Linear(16, 1)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


@pytest.mark.slow
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("finish", [False, True])
@pytest.mark.parametrize("make", [lambda: methods.diloco(every=10), lambda: methods.noloco(every=10)])
def test_spectral_norm_evaluates_as_well_as_before(make: Callable[[], Method], finish: bool, old: bool) -> None:
    def work(network: SimulatedNetwork) -> tuple[list[float], dict[str, Tensor]]:
        model = Spectral(old)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        losses = []
        with make().attach(model, optimizer, network) as outer:
            inner_steps(model, optimizer, network.rank, range(37))
            losses.append(evaluated(model))
            if finish:
                outer.finish(average_weights=True)
            else:
                outer.average_buffers()
            losses.append(evaluated(model))
        return losses, dict(model.named_buffers())

    def evaluated(model: nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            losses = [float(loss_of(model, 9, number)) for number in range(20)]
        model.train()
        return sum(losses) / len(losses)

    (losses, one), (_, other) = seen = Simulation(2).run(work)
    for losses, _ in seen:
        assert losses[1] < 1.2 * losses[0] + 0.05
    for name in one:
        assert torch.equal(one[name], other[name])
        torch.testing.assert_close(one[name].norm(), torch.tensor(1.0))


def test_means_that_cancel_stay_means_where_nothing_says_otherwise() -> None:
    """BatchNorm's means may be opposite; rows of unit length, as in a queue of keys, are taken from one replica."""
    keys = [nn.functional.normalize(torch.randn(5, 7, generator=torch.Generator().manual_seed(r))) for r in range(2)]

    def make(rank: int) -> nn.Module:
        model = small_model()
        model.register_buffer("mean", torch.zeros(4))
        model.register_buffer("queue", torch.zeros(5, 7))
        return model

    def change(model: Any, rank: int) -> None:
        model.mean.copy_(torch.tensor([3.0, -1.0, 2.0, 0.5]) * (-1) ** rank)
        model.queue.copy_(keys[rank])

    for model in ended(make, change):
        assert torch.equal(model.mean, torch.zeros(4))
        torch.testing.assert_close(model.queue, keys[0], rtol=1e-6, atol=0)


def test_unit_vectors_of_a_spoilt_replica_are_not_taken() -> None:
    vectors = torch.eye(3)

    def change(model: Any, rank: int) -> None:
        model.extra.copy_(vectors[rank] if rank else torch.full((3,), float("nan")))

    for model in ended(lambda rank: with_buffer(torch.tensor([0.6, 0.8, 0])), change, replicas=3):
        torch.testing.assert_close(model.extra, vectors[1])


def test_complex_buffers_are_averaged_as_complex_and_equal_ones_are_not_touched() -> None:
    frequencies = torch.polar(torch.ones(4), torch.arange(4.0) * 0.7)

    def make(rank: int) -> nn.Module:
        model = with_buffer(frequencies.clone())
        model.register_buffer("moving", frequencies.clone())
        return model

    versions: list[int] = [0, 0]

    def change(model: Any, rank: int) -> None:
        model.moving.mul_(2 + 3j if rank else 4 - 1j)
        versions[rank] = model.extra._version

    for rank, model in enumerate(ended(make, change)):
        assert torch.equal(model.extra, frequencies)
        assert model.extra._version == versions[rank]
        torch.testing.assert_close(model.moving, frequencies * (3 + 1j))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_buffers_of_few_bits_are_averaged_and_restored(dtype: torch.dtype) -> None:
    for model in ended(
        lambda rank: with_buffer(torch.ones(4).to(dtype)),
        lambda model, rank: model.extra.copy_(torch.full((4,), 1.0 + rank)),  # type: ignore[operator, union-attr]
    ):
        assert model.extra.float().tolist() == [1.5] * 4


def test_expanded_buffers_are_averaged_where_they_lie() -> None:
    def change(model: Any, rank: int) -> None:
        model.extra[0].add_(rank)

    for model in ended(lambda rank: with_buffer(torch.arange(4.0).expand(3, -1)), change):
        assert model.extra.tolist() == [[0.5, 1.5, 2.5, 3.5]] * 3


@pytest.mark.parametrize("kind", ["sparse_coo", "sparse_csr"])
def test_buffers_that_cannot_be_compared_are_refused_by_name(kind: str) -> None:
    eye = torch.eye(4)
    model = with_buffer(eye.to_sparse() if kind == "sparse_coo" else eye.to_sparse_csr())
    network = SimulatedNetwork.alone()
    with pytest.raises(UserError, match=rf"extra is {kind}.*persistent=False"):
        methods.diloco().attach(model, sgd(model), network)
    model = small_model()
    model.register_buffer("extra", eye.to_sparse(), persistent=False)
    methods.diloco().attach(model, sgd(model), network)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(6, 2), nn.LazyBatchNorm1d()),
        nn.Sequential(nn.LazyLinear(2)),
        with_buffer(torch.ones(2, device="meta")),
    ],
)
def test_what_has_no_values_yet_is_refused_by_name(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UserError, match=r"(1\.weight|0\.weight|extra) has no values yet; run the model on a batch"):
        methods.diloco().attach(model, optimizer, SimulatedNetwork.alone())


def test_a_scripted_model_with_statistics_is_trained() -> None:
    def work(network: SimulatedNetwork) -> Tensor:
        torch.manual_seed(0)
        model = torch.jit.script(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
        optimizer = sgd(model)
        with methods.diloco(every=2).attach(model, optimizer, network):
            inner_steps(model, optimizer, network.rank, range(3))
        return dict(model.named_buffers())["1.running_mean"]

    one, other = Simulation(2).run(work)
    assert torch.equal(one, other)


@pytest.mark.parametrize("replicas", [2, 3])
def test_buffers_that_grow_apart_are_told_by_name_at_once(replicas: int) -> None:
    def change(model: Any, rank: int) -> None:
        model.extra = torch.ones(4 + rank // 2 + (replicas == 2) * rank)

    with pytest.raises(UserError, match=r"extra has other sizes on replica .*persistent=False"):
        ended(lambda rank: with_buffer(torch.ones(4)), change, replicas)


# The digest.


@given(st.data())
def test_the_digest_sees_every_exchange_of_two_values(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.bool, torch.bfloat16, torch.float32, torch.float64, torch.complex64]))
    words = data.draw(st.sampled_from([5, ROW + 3, 3 * ROW]))
    values = torch.zeros(words).to(dtype)
    ones = data.draw(st.sets(st.integers(0, words - 1), min_size=1, max_size=4))
    values[list(ones)] = 1
    one = data.draw(st.sampled_from(sorted(ones)))
    other = data.draw(st.integers(0, words - 1).filter(lambda place: place not in ones))
    swapped = values.clone()
    swapped[[one, other]] = values[[other, one]]
    assert not torch.equal(digest([swapped]), digest([values]))
    assert torch.equal(digest([swapped.clone()]), digest([swapped]))


def test_the_digest_is_the_sum_that_its_definition_says() -> None:
    """Against whole numbers of Python's; the last block has no whole row."""

    def weight(place: int) -> int:
        z = place * 0x9E3779B97F4A7C15 % 2**64
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            z = (z ^ (signed(z) >> shift)) * factor % 2**64
        return (z ^ (signed(z) >> 31)) | 1

    def signed(z: int) -> int:
        z %= 2**64
        return z - 2**64 if z >= 2**63 else z

    size = BLOCK + ROW + 11
    words = torch.randint(-(2**31), 2**31, (size,), generator=torch.Generator().manual_seed(0)).int()
    columns = [weight(place) for place in range(1, ROW + 1)]
    total = 0
    for row, begin in enumerate(range(0, size, ROW)):
        part = sum(word * column for word, column in zip(words[begin : begin + ROW].tolist(), columns, strict=False))
        total += part * weight(ROW + 1 + row)
    assert int(digest([words.view(torch.float32)])[1]) == signed(total)


def test_the_digest_sees_rows_blocks_tensors_and_shapes_in_another_order() -> None:
    big = torch.randn(2 * BLOCK + 5, generator=torch.Generator().manual_seed(1))
    a, b = torch.arange(6.0), torch.arange(6.0) + 1
    pairs = [
        ([big], [torch.cat([big[BLOCK : 2 * BLOCK], big[:BLOCK], big[2 * BLOCK :]])]),
        ([big[: 2 * ROW]], [big[: 2 * ROW].roll(ROW)]),
        ([a, b], [b, a]),
        ([a.view(2, 3)], [a.view(3, 2)]),
        ([a], [-a]),
        ([torch.tensor([1.0, -1.0])], [torch.tensor([-1.0, 1.0])]),
    ]
    for one, other in pairs:
        assert not torch.equal(digest(one), digest(other))
    # The same values, however they lie in memory.
    assert torch.equal(digest([big.double().repeat_interleave(2)[::2]]), digest([big.double()]))
    assert torch.equal(digest([a.view(2, 3).t().contiguous().t()]), digest([a.view(2, 3)]))


@pytest.mark.parametrize("device_block", [ROW, 2 * ROW, 1024 * ROW])
def test_the_digest_is_the_same_however_much_is_looked_at_in_one_go(
    device_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [ROW - 1, ROW, ROW + 1, BLOCK, 2 * BLOCK, 2 * BLOCK + 7]
    tensors = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in sizes]
    expected = [digest([tensor]) for tensor in tensors]
    monkeypatch.setattr(digests, "BLOCK", device_block)
    with torch.device("meta"):  # a user's default device is no matter
        assert all(torch.equal(digest([t]), told) for t, told in zip(tensors, expected, strict=True))


@pytest.mark.parametrize("kind", ["permuted rows", "randperm", "pruning"])
def test_starts_with_values_in_other_places_are_noticed(kind: str) -> None:
    def work(network: SimulatedNetwork) -> None:
        model = small_model()
        generator = torch.Generator().manual_seed(network.rank)
        if kind == "randperm":
            model.register_buffer("order", torch.randperm(8, generator=generator))
        elif kind == "pruning":
            torch.manual_seed(network.rank)
            prune.random_unstructured(model[0], "weight", 0.5)  # type: ignore[index, arg-type]
        else:
            rows = model[0].weight  # type: ignore[index]
            rows.data = rows.data[torch.randperm(8, generator=generator)]  # type: ignore[index, union-attr, operator]
        optimizer = sgd(model)
        with methods.diloco(every=2).attach(model, optimizer, network):
            inner_steps(model, optimizer, network.rank, range(2))

    complaint = {"permuted rows": "weights", "randperm": "values of order", "pruning": r"values of 0\.weight_mask"}
    with pytest.raises(DisagreementError, match=f"starts from other {complaint[kind]} than"):
        Simulation(2).run(work)


# What is loaded after attach.


class Kept(nn.Module):
    """A model with moving statistics, a random permutation, a queue that the first batch fills, and frozen weights."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 1)
        self.register_buffer("order", torch.randperm(6))
        self.register_buffer("queue", torch.randn(4, 6))
        for buffer in (self.norm.running_mean, self.norm.running_var):
            buffer.uniform_(1, 2)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.queue.copy_(x.detach())  # type: ignore[operator]
        out: Tensor = self.head(self.norm(self.frozen(x[:, self.order])))  # type: ignore[index]
        return out


def trained(model: nn.Module, rank: int, steps: range, optimizer: torch.optim.Optimizer, nan_at: int = -1) -> None:
    for step in steps:
        loss = loss_of(model, rank, step)
        (loss * float("nan") if step == nan_at else loss).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("make", LOOPS)
def test_replicas_of_unlike_seeds_may_load_one_checkpoint_after_attach(make: Callable[[], Method]) -> None:
    checkpoint = Kept(99).state_dict()

    def work(network: SimulatedNetwork) -> int:
        model = Kept(network.rank)
        optimizer = sgd(model)
        with make().attach(model, optimizer, network) as outer:
            model.load_state_dict(checkpoint)
            trained(model, network.rank, range(5), optimizer)
        return outer.step

    assert Simulation(2).run(work) == [5, 5]


@pytest.mark.parametrize(
    ("what", "how"),
    [("frozen.weight", "loaded"), ("frozen.weight", "written"), ("order", "loaded"), ("norm.running_mean", "loaded")],
)
def test_what_one_replica_changes_after_attach_is_noticed(what: str, how: str) -> None:
    def work(network: SimulatedNetwork) -> None:
        model = Kept(1)
        optimizer = sgd(model)
        with methods.diloco(every=4).attach(model, optimizer, network):
            if network.rank:
                changed = copy.deepcopy(model.state_dict())
                changed[what] = changed[what].flip(0)
                if how == "loaded":
                    model.load_state_dict(changed)
                else:
                    model.state_dict()[what].copy_(changed[what])
            trained(model, network.rank, range(2), optimizer)

    with pytest.raises(DisagreementError, match=f"starts from other values of {what} than"):
        Simulation(2).run(work)


@pytest.mark.parametrize("make", LOOPS)
@pytest.mark.parametrize("nan_at", [0, 2])
def test_a_first_recovery_goes_back_to_what_was_loaded(make: Callable[[], Method], nan_at: int) -> None:
    """The spoilt replica's statistics are those that were loaded, moved by at most the batches that were sound."""
    loaded = Kept(99)
    with torch.no_grad():
        loaded.norm.running_mean.fill_(300.0)  # type: ignore[union-attr]

    def work(network: SimulatedNetwork) -> Tensor:
        model = Kept(0)
        model.norm.momentum = 0.01
        optimizer = sgd(model)
        make_spoilt = lambda m, x: (x[0] * float("nan"),)  # noqa: E731
        with make().attach(model, optimizer, network):
            model.load_state_dict(loaded.state_dict())
            for step in range(4):
                hook = model.norm.register_forward_pre_hook(make_spoilt) if step == nan_at and network.rank else None
                trained(model, network.rank, range(step, step + 1), optimizer)
                if hook:
                    hook.remove()
            assert isinstance(model.norm.running_mean, Tensor)
            return model.norm.running_mean.clone()

    for mean in Simulation(2).run(work):
        assert float(mean.min()) > 280


def test_copies_of_an_attached_model_have_nothing_to_do_with_it() -> None:
    model, loaded = Kept(0), Kept(0)
    optimizer = sgd(model)
    with methods.diloco(every=2).attach(model, optimizer, SimulatedNetwork.alone()):
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            twin.load_state_dict(Kept(5).state_dict())
            torch.save(twin, io.BytesIO())
        loss_of(model, 0, 0).backward()  # changes buffers
        nn.init.constant_(model.head.weight, float("nan"))
    for (name, value), expected in zip(model.named_buffers(), loaded.buffers(), strict=True):
        assert torch.equal(value, expected), f"{name} went back to what a copy has loaded"


# Frozen weights that move.


class Teaching(nn.Module):
    """BYOL's kind: a frozen teacher beside the student, a moving average of it."""

    def __init__(self) -> None:
        super().__init__()
        self.student = small_model()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.base = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.student(x)
        return out

    def follow(self) -> None:
        for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            own.data.mul_(0.9).add_(other.detach(), alpha=0.1)


@pytest.mark.parametrize("make", LOOPS)
@pytest.mark.parametrize("buffers", ["end", "round"])
def test_frozen_weights_that_the_loop_moves_are_averaged(make: Callable[[], Method], buffers: Any) -> None:
    before: dict[int, Tensor] = {}
    middle: dict[int, Tensor] = {}

    def work(network: SimulatedNetwork) -> tuple[Tensor, int]:
        torch.manual_seed(3)
        model = Teaching()
        optimizer = sgd(model)
        with make().attach(model, optimizer, network, buffers=buffers) as outer:
            version = model.base.weight._version
            for step in range(10):
                trained(model, network.rank, range(step, step + 1), optimizer)
                model.follow()
                if step == 6:
                    outer.average_buffers()
                    middle[network.rank] = flat(model.teacher)
            before[network.rank] = flat(model.teacher)
        return flat(model.teacher), model.base.weight._version - version

    (one, written), (other, _) = Simulation(2).run(work)
    assert torch.equal(one, other) and torch.equal(middle[0], middle[1])
    torch.testing.assert_close(one, (before[0] + before[1]) / 2)
    assert written == 0


@pytest.mark.parametrize("make", LOOPS)
@pytest.mark.parametrize("nan_at", [2, 6])
def test_a_moving_teacher_is_restored_with_its_student(make: Callable[[], Method], nan_at: int) -> None:
    """In the first round, before anything was offered, as well as later; the replica spoilt its teacher, too."""

    def work(network: SimulatedNetwork) -> Tensor:
        torch.manual_seed(3)
        model = Teaching()
        optimizer = sgd(model)
        with make().attach(model, optimizer, network):
            for step in range(10):
                if step == nan_at and network.rank:
                    model.teacher[0].weight.data.fill_(float("nan"))  # type: ignore[index, union-attr, operator]
                trained(model, network.rank, range(step, step + 1), optimizer, nan_at if network.rank else -1)
                model.follow()
            return flat(model)

    one, other = Simulation(2).run(work)
    assert bool(torch.isfinite(one).all() and torch.isfinite(other).all())


@pytest.mark.parametrize("make", [lambda: methods.diloco(every=10), lambda: methods.noloco(every=10)])
@pytest.mark.parametrize(
    ("conditions", "fewer"),
    [
        (Conditions(step_ms=100, latency_ms=500, cuts=(Cut((0, 3), 4.13, 12.92), Cut((1,), 17, 20))), 0),
        (Conditions(step_ms=100, speeds=(0.7, 1, 1, 0.5), deaths=(Death(1, 5.5),)), 0),
        (Conditions(step_ms=100), 80),
    ],
    ids=["cuts", "a death", "fewer batches"],
)
def test_nobody_waits_a_deadline_for_the_buffers_of_one_that_does_not_come(
    make: Callable[[], Method], conditions: Conditions, fewer: int
) -> None:
    def work(network: SimulatedNetwork) -> list[Round]:
        model, rounds = small_model(), list[Round]()
        model.append(nn.BatchNorm1d(1))  # type: ignore[operator]
        optimizer = sgd(model)
        with make().attach(model, optimizer, network, buffers="round", on_round=rounds.append):
            inner_steps(model, optimizer, network.rank, range(200 - fewer * (network.rank == 2)))
        return rounds

    for rounds in filter(None, Simulation(4, conditions).run(work)):
        assert max(round.landed - round.started for round in rounds) < 20
        if not fewer:
            assert not any(round.lost for round in rounds[-3:]), [(one.round, one.reason) for one in rounds]
