"""Loops, models and optimizers other than our own: each is right, or refused in a line that says what to do."""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from problem import flat, inner_steps, small_model
from registered import METHODS, made
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from farflung import methods
from farflung.codecs import Codec, Dense, ErrorFeedback, Quantize, codec_named
from farflung.errors import UserError
from farflung.methods import Method
from farflung.networks import PeerLostError, SimulatedNetwork, Simulation
from farflung.outer import DisagreementError


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, width: int = 4) -> None:
    inputs = torch.randn(8, width, generator=torch.Generator().manual_seed(seed))
    (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# Several attachments on one network.


@pytest.mark.parametrize("delay", [0, 3])
def test_two_attachments_do_not_mix_their_messages(delay: int) -> None:
    """A GAN's two models, whose rounds overlap: each ends as it would alone."""

    def work(network: SimulatedNetwork, which: tuple[int, ...]) -> list[Tensor]:
        torch.manual_seed(5)
        models = [nn.Linear(4, 1), nn.Sequential(nn.Linear(4, 1))]
        with torch.no_grad():
            models[1][0].weight.mul_(3)  # type: ignore[index]
        optimizers = [sgd(model) for model in models]
        method = methods.diloco(every=3, delay=delay)
        attached = [method.attach(models[n], optimizers[n], network) for n in which]
        for number in range(12):
            for n in which:
                step(models[n], optimizers[n], 100 * network.rank + number)
        for outer in attached:
            outer.finish()
        return [flat(models[n]) for n in which]

    both = Simulation(2).run(lambda network: work(network, (0, 1)))
    for n in (0, 1):
        alone = Simulation(2).run(lambda network, n=n: work(network, (n,)))  # type: ignore[misc]
        for rank in (0, 1):
            assert torch.equal(both[rank][n], alone[rank][0])


def test_attaching_in_another_order_is_noticed() -> None:
    def work(network: SimulatedNetwork) -> None:
        torch.manual_seed(0)
        models: list[nn.Module] = [nn.Linear(4, 1), nn.Linear(4, 2)]
        for model in models if network.rank else reversed(models):
            optimizer = sgd(model)
            methods.diloco(every=2).attach(model, optimizer, network)
            step(model, optimizer, 0)

    with pytest.raises(DisagreementError, match=r"starts from other shapes than \d.* attach in the same order"):
        Simulation(2).run(work)


def test_a_second_attach_goes_on_after_the_first_has_ended() -> None:
    def work(network: SimulatedNetwork) -> tuple[Tensor, int]:
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with methods.diloco(every=3).attach(model, optimizer, network) as first:
            inner_steps(model, optimizer, network.rank, range(6))
        assert first.rounds == 2
        with methods.noloco(every=2).attach(model, optimizer, network) as second:
            inner_steps(model, optimizer, network.rank, range(6, 12))
            second.finish(average_weights=True)
        ended = flat(model)
        inner_steps(model, optimizer, 0, range(12, 14))
        assert second.step == 6  # nothing is hooked any more
        return ended, second.rounds

    seen = Simulation(2).run(work)
    assert torch.equal(seen[0][0], seen[1][0]) and seen[0][1] == 3


# The end.


def test_finish_leaves_all_with_the_mean_of_their_weights() -> None:
    ends: dict[int, Tensor] = {}

    def work(network: SimulatedNetwork) -> Tensor:
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with methods.noloco(every=4).attach(model, optimizer, network) as outer:
            inner_steps(model, optimizer, network.rank, range(10))
            ends[network.rank] = flat(model)
            outer.finish(average_weights=True)
        return flat(model)

    seen = Simulation(3).run(work)
    mean = torch.stack([ends[rank] for rank in range(3)]).mean(0)
    for weights in seen:
        assert torch.equal(weights, seen[0])
        torch.testing.assert_close(weights, mean, rtol=0, atol=1e-6)


def test_loops_of_unequal_length_end_together() -> None:
    """Replica 1 has a batch fewer, so that its partner's last round is lost; they still end with equal weights."""

    def work(network: SimulatedNetwork) -> tuple[Tensor, list[str]]:
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        outcomes: list[str] = []
        method = methods.noloco(every=4)
        with method.attach(
            model, optimizer, network, deadline_s=5, on_round=lambda round: outcomes.append(round.outcome)
        ) as outer:
            inner_steps(model, optimizer, network.rank, range(12 - network.rank))
            outer.finish(average_weights=True)
        return flat(model), outcomes

    one, other = Simulation(2).run(work)
    assert torch.equal(one[0], other[0])
    assert (one[1], other[1]) == (["averaged", "averaged", "peer lost"], ["averaged", "averaged"])


# Buffers.


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.register_buffer("seen", torch.tensor(True))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return out


@pytest.mark.parametrize("make", [lambda: methods.diloco(every=4), methods.ddp, lambda: methods.noloco(every=4)])
@pytest.mark.parametrize("buffers", ["end", "round"])
def test_statistics_are_averaged_at_the_end_and_on_demand(make: Callable[[], Method], buffers: Any) -> None:
    middle: list[list[Tensor]] = [[], []]

    def work(network: SimulatedNetwork) -> dict[str, Tensor]:
        model = Normed()
        optimizer = sgd(model)
        with make().attach(model, optimizer, network, buffers=buffers) as outer:
            for number in range(8 + 4 * network.rank):
                model.norm.running_mean.add_(network.rank) if number == 1 else None  # type: ignore[operator]
                if number < 8:
                    step(model, optimizer, 100 * network.rank + number)
                if number == 7:
                    if buffers == "end":
                        outer.average_buffers()
                    middle[network.rank] = [model.norm.running_mean.clone(), model.norm.running_var.clone()]  # type: ignore
                    model.eval()
                    model.norm.num_batches_tracked.add_(network.rank)  # type: ignore[operator]
                    model.train()
        return model.state_dict()

    one, other = Simulation(2).run(work)
    for here, there in zip(*middle, strict=True):
        assert torch.equal(here, there)
    for name in one:
        if "norm" in name and "weight" not in name and "bias" not in name:
            assert torch.equal(one[name], other[name]), name
    assert int(one["norm.num_batches_tracked"]) == 9  # the largest of 8 and 9


def test_means_of_statistics_are_means_and_what_is_not_finite_counts_for_nothing() -> None:
    def work(network: SimulatedNetwork) -> Tensor:
        model = Normed()
        optimizer = sgd(model)
        with methods.diloco(every=1).attach(model, optimizer, network):
            step(model, optimizer, 0)
            values = [1.0, 4.0, float("nan")]
            nn.init.constant_(model.norm.running_mean, values[network.rank])  # type: ignore[arg-type]
        assert isinstance(model.norm.running_mean, Tensor)
        return model.norm.running_mean

    for mean in Simulation(3).run(work):
        torch.testing.assert_close(mean, torch.full((8,), 2.5))


@pytest.mark.parametrize("what", ["norm.running_mean", "frozen", "seen"])
def test_buffers_and_frozen_weights_that_start_unequal_are_noticed(what: str) -> None:
    def work(network: SimulatedNetwork) -> None:
        model = Normed()
        model.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        if network.rank == 1:
            value = model.get_parameter(what) if what == "frozen" else model.get_buffer(what)
            value.data.copy_(~value if value.dtype == torch.bool else value + 1)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        methods.diloco(every=2).attach(model, optimizer, network)
        step(model, optimizer, 0)

    with pytest.raises(DisagreementError, match=f"starts from other values of {what} than"):
        Simulation(2).run(work)


# What is trained changes.


@pytest.mark.parametrize("make", [lambda: methods.diloco(every=2), methods.ddp])
@pytest.mark.parametrize("how", ["unfrozen", "added"])
def test_parameters_that_come_to_be_trained_later_are_told(make: Callable[[], Method], how: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    first = model[0].weight
    first.requires_grad_(how == "added")
    own = [p for p in model.parameters() if how == "unfrozen" or p is not first]
    optimizer = torch.optim.SGD(own, lr=0.1)
    told = r"0\.weight has come to be trained since attach; before that, call finish\(average_weights=True\) on all"
    with pytest.raises(UserError, match=told):  # noqa: SIM117
        with make().attach(model, optimizer, SimulatedNetwork.alone()):
            for number in range(6):
                if number == 3:
                    first.requires_grad_(True)
                    if how == "added":
                        optimizer.add_param_group({"params": [first]})
                step(model, optimizer, number)
    with make().attach(model, optimizer, SimulatedNetwork.alone()) as outer:
        for number in range(4):
            step(model, optimizer, number)
    assert outer.step == 4


def test_what_that_says_to_do_does() -> None:
    """With weights of their own, as leaving alone leaves them, replicas could not attach again."""

    def work(network: SimulatedNetwork) -> Tensor:
        model = small_model()
        first, *_, second = model.children()
        first.requires_grad_(False)
        optimizer = torch.optim.AdamW(second.parameters(), lr=1e-2)
        with methods.noloco(every=4).attach(model, optimizer, network) as outer:
            inner_steps(model, optimizer, network.rank, range(6))
            outer.finish(average_weights=True)
        first.requires_grad_(True)
        optimizer.add_param_group({"params": list(first.parameters())})
        with methods.noloco(every=4).attach(model, optimizer, network) as outer:
            inner_steps(model, optimizer, network.rank, range(6, 12))
            outer.finish(average_weights=True)
        return flat(model)

    one, other = Simulation(2).run(work)
    assert torch.equal(one, other)


def test_parameters_of_an_optimizer_that_was_not_given_are_told() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[1].parameters())]

    def train(given: Any) -> None:
        with methods.diloco(every=2).attach(model, given, SimulatedNetwork.alone()):
            for number in range(6):
                model(torch.randn(8, 4, generator=torch.Generator().manual_seed(number))).square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()

    with pytest.raises(UserError, match=r"0\.weight is trained, but none of the attached.*as a list"):
        train(optimizers[1])
    train(optimizers)


def test_an_optimizer_of_other_weights_than_the_models_is_refused() -> None:
    model = nn.Linear(4, 1).bfloat16()
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    with pytest.raises(UserError, match="AdamW trains parameters that the model does not have"):
        methods.diloco().attach(model, torch.optim.AdamW(masters), SimulatedNetwork.alone())


# Starting.


def test_a_late_start_is_waited_for_and_who_is_missing_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def work(network: SimulatedNetwork, late: float) -> str:
        model = small_model()
        optimizer = sgd(model)
        if network.rank == 2:
            pending = network.exchange(torch.zeros(1, dtype=torch.uint8), (0, 2), "nobody comes")
            with pytest.raises(PeerLostError):
                pending.wait(late)
        try:
            with methods.noloco(every=2).attach(model, optimizer, network, deadline_s=5, starting_s=100):
                inner_steps(model, optimizer, network.rank, range(2))
        except PeerLostError as lost:
            return f"{lost.ranks} {lost}"
        return "trained"

    with caplog.at_level(logging.WARNING, "farflung"):
        assert Simulation(3).run(lambda network: work(network, 60)) == ["trained"] * 3
    assert "replica 0 waits for replica 2 to start: 15 of 100 s" in caplog.text
    assert (
        Simulation(3)
        .run(lambda network: work(network, 150))[0]
        .startswith("(2,) replica 2 has not started within 100 s; see whether it is running")
    )


def test_weights_loaded_after_attach_are_where_training_starts_from() -> None:
    def work(network: SimulatedNetwork) -> Tensor:
        model, loaded = small_model(), small_model()
        with torch.no_grad():
            for parameter in loaded.parameters():
                parameter.add_(1)
        optimizer = sgd(model, lr=0.0)
        with methods.diloco(every=2, outer_momentum=0.0, outer_lr=0.5).attach(model, optimizer, network):
            model.load_state_dict(loaded.state_dict())
            inner_steps(model, optimizer, network.rank, range(4))
        return flat(model) - flat(loaded)

    for moved in Simulation(2).run(work):
        assert float(moved.abs().max()) < 1e-6


# States.


@pytest.mark.parametrize(
    "make",
    [
        lambda: methods.diloco(every=6, delay=4),
        lambda: methods.noloco(every=6, delay=4),
        lambda: methods.diloco(every=6, delay=4, codec=ErrorFeedback(Quantize(bits=4))),
    ],
)
def test_one_state_can_be_loaded_twice(make: Callable[[], Method]) -> None:
    """Saved in mid-delay; gone on from, and then gone on from again: the same bits."""

    def work(network: SimulatedNetwork) -> list[Tensor]:
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with make().attach(model, optimizer, network) as outer:
            inner_steps(model, optimizer, network.rank, range(14))
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), outer.state_dict()))
        ends = []
        for _ in range(2):
            model = small_model()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            with make().attach(model, optimizer, network) as outer:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(copy.deepcopy(saved[1]))
                outer.load_state_dict(saved[2])
                inner_steps(model, optimizer, network.rank, range(14, 30))
            ends.append(flat(model))
        return ends

    for once, again in Simulation(2).run(work):
        assert torch.equal(once, again)


# Refusals.


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"robust": "median"}, "only peers on the internet need it"),
        ({"robust": "medain"}, "robust is 'medain'; choose one of mean, median, clipped"),
        ({"buffers": "sometimes"}, "buffers is 'sometimes'; choose 'end' or 'round'"),
    ],
)
def test_options_that_have_no_effect_are_refused(options: dict[str, Any], complaint: str) -> None:
    model = small_model()
    with pytest.raises(UserError, match=complaint):
        methods.diloco().attach(model, sgd(model), SimulatedNetwork.alone(), **options)
    with pytest.raises(UserError, match="no optimizer"):
        methods.diloco().attach(model, [], SimulatedNetwork.alone())


# How an attachment begins and ends.


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (methods.diloco(every=5), methods.diloco(every=5, outer_lr=0.3), "outer optimizer: lr: 0.7|lr: 0.3"),
        (methods.noloco(every=5), methods.noloco(every=5, gamma=0.3), "outer optimizer: gamma: "),
        (methods.noloco(every=5), methods.diloco(every=5), "topology: .*"),
        (methods.noloco(every=5), methods.noloco(every=5, seed=1), "topology: seed: [01]"),
        (methods.diloco(every=5), methods.diloco(every=5, codec=Quantize(bits=8)), "codec: .*"),
        (methods.diloco(every=5), methods.diloco(every=4), "schedule: every: [45]"),
        (methods.diloco(every=5, delay=2), methods.diloco(every=5, delay=2, merge="mixed"), "merge: .*"),
        (methods.ddp(), methods.dynamic_threshold(), "codec: .*"),
        (methods.ddp(), methods.diloco(every=1), "outer optimizer: .*"),
    ],
)
def test_replicas_of_other_methods_do_not_start_together(one: Method, other: Method, words: str) -> None:
    def work(network: SimulatedNetwork) -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = sgd(model)
        with (other if network.rank else one).attach(model, optimizer, network):
            step(model, optimizer, network.rank)

    what, _, told = words.partition(": ")
    pattern = rf"starts from other {what} than \d: ({told}).* here, .* at replica \d; give all"
    with pytest.raises(DisagreementError, match=pattern):
        Simulation(2).run(work)


def test_a_users_own_codec_is_the_same_on_all_replicas() -> None:
    """Where an object lies in memory says nothing about it."""

    class Own(Codec):
        encode, decode = Dense(torch.bfloat16).encode, Dense(torch.bfloat16).decode

    def work(network: SimulatedNetwork) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = sgd(model)
        with methods.diloco(every=1, codec=Own()).attach(model, optimizer, network):
            step(model, optimizer, network.rank)
        return flat(model)

    first, second = Simulation(2).run(work)
    assert torch.equal(first, second)


def test_a_second_attachment_of_the_same_parameters_is_refused_while_the_first_holds_rounds() -> None:
    model = nn.Linear(4, 4)
    optimizer = sgd(model)
    network, site = SimulatedNetwork.alone(), SimulatedNetwork.alone()
    first = methods.diloco(every=5).attach(model, optimizer, network)
    with pytest.raises(UserError, match=r"attached to this network already, .* call finish\(\) of the first"):
        methods.noloco(every=5).attach(model, optimizer, network)
    with methods.ddp().attach(model, optimizer, site):  # within a site, beside rounds between sites
        step(model, optimizer, 0)
    first.finish()
    with methods.noloco(every=5).attach(model, optimizer, network):
        step(model, optimizer, 0)


def test_steps_after_the_end_and_an_end_without_steps_do_not_stay_silent() -> None:
    model = nn.Linear(4, 4)
    optimizer = sgd(model)
    network = SimulatedNetwork.alone()
    with pytest.warns(
        UserWarning, match=r"no step of the attached optimizers was seen; call optimizer.step\(\) itself"
    ):
        methods.diloco(every=5).attach(model, optimizer, network).finish()
    with methods.diloco(every=5).attach(model, optimizer, network) as outer:
        step(model, optimizer, 0)
        outer.finish()
        with pytest.warns(UserWarning, match=r"rounds have ended with finish\(\), .* attach again"):
            step(model, optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, optimizer, 2)  # after the with statement, training alone is what a user wants


@pytest.mark.parametrize("method", [methods.local(), methods.diloco(every=5), methods.noloco(every=5), methods.ddp()])
def test_weights_are_averaged_at_the_end_whenever_it_is_asked(method: Method) -> None:
    def work(network: SimulatedNetwork) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = sgd(model)
        seen = []
        with method.attach(model, optimizer, network) as outer:
            for number in range(7):
                step(model, optimizer, 100 * network.rank + number)
            outer.finish()
            outer.finish(average_weights=True)
            seen.append(flat(model))
        return seen

    first, second = Simulation(2).run(work)
    assert torch.equal(first[0], second[0])


def test_what_was_unfrozen_is_not_left_out_of_an_average() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with methods.diloco(every=5).attach(model, optimizer, SimulatedNetwork.alone()) as outer:
        step(model, optimizer, 0)
        model[0].requires_grad_(True)
        with pytest.raises(UserError, match=r"0.weight has come to be trained since attach"):
            outer.finish(average_weights=True)


@pytest.mark.parametrize("delay", [0, 4])
@pytest.mark.parametrize("how", ["spoil", "nan"])
def test_what_is_spoilt_after_the_last_round_does_not_end_a_run(how: str, delay: int) -> None:
    def work(network: SimulatedNetwork) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = sgd(model)
        with methods.diloco(every=5, delay=delay).attach(model, optimizer, network) as outer:
            for number in range(13):
                step(model, optimizer, 100 * network.rank + number)
            if network.rank == 1:
                with torch.no_grad():
                    model.weight.fill_(1e4 if how == "spoil" else float("nan"))
                if how == "spoil":
                    outer.spoil("a user's own check")
            outer.finish(average_weights=True)
        return flat(model)

    for weights in Simulation(2).run(work):
        assert torch.isfinite(weights).all() and float(weights.abs().max()) < 100


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_torchs_default_dtype_does_not_matter(name: str, dtype: torch.dtype) -> None:
    def work(network: SimulatedNetwork) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64, dtype=torch.float32) for _ in range(3)))
        optimizer = sgd(model)
        with made(name, every=3).attach(model, optimizer, network):
            for number in range(9):
                generator = torch.Generator().manual_seed(100 * network.rank + number)
                inputs = torch.randn(8, 64, generator=generator, dtype=torch.float32)
                model(inputs).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return flat(model)

    usual = Simulation(2).run(work)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        other = Simulation(2).run(work)
    finally:
        torch.set_default_dtype(before)
    for one, another in zip(usual, other, strict=True):
        torch.testing.assert_close(one, another, rtol=1e-6, atol=1e-7)


# What a user may get wrong, or write in words.


def test_a_codec_may_be_given_by_name() -> None:
    assert methods.noloco(codec="modulo4").codec == methods.noloco(codec=codec_named("modulo4")).codec
    assert methods.ddp(codec="ef-int4").codec == codec_named("ef-int4")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: methods.noloco(codec="modulo"), "there is no codec 'modulo'"),
        (lambda: methods.noloco(merge="kep"), "there is no merge 'kep'; there are: kept, dropped, mixed, eager"),
        (lambda: methods.diloco(every=2.5), "every is 2.5; it must be a whole number"),
    ],
)
def test_a_wrong_setting_is_told_in_a_line(wrong: Callable[[], Method], words: str) -> None:
    with pytest.raises(UserError, match=words):
        wrong()


def test_what_attach_is_given_is_looked_at() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UserError, match="was given a SGD for the model; give the model first"):
        methods.ddp().attach(sgd(model), model, SimulatedNetwork.alone())  # type: ignore[arg-type]
    with pytest.raises(UserError, match="was given a Linear for an optimizer"):
        methods.ddp().attach(model, model, SimulatedNetwork.alone())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "other", "unlike"),
    [
        (methods.noloco(), methods.diloco(), "topology: RandomGroups(size=2, seed=0), not Everyone()"),
        (methods.diloco(), methods.noloco(), "topology: Everyone(), not RandomGroups(size=2, seed=0)"),
        (methods.diloco(), methods.ddp(), "schedule: every: 50, not 1"),
        (methods.ddp(), methods.diloco(), "schedule: every: 1, not 50"),
        (methods.diloco(fragments=2), methods.diloco(), "schedule: fragments: 2, not 1"),
        # It went on with the old momentum, without a word.
        (methods.diloco(), methods.diloco(outer_momentum=0.3), "outer settings: momentum: 0.5, not 0.3"),
        (methods.noloco(outer_lr=0.5), methods.noloco(), "outer settings: lr: 0.5, not 0.7"),
    ],
)
def test_a_state_of_another_method_is_refused(one: Method, other: Method, unlike: str) -> None:
    model = small_model()
    with one.attach(model, sgd(model), SimulatedNetwork.alone()) as outer:
        state = outer.state_dict()
        outer._begun = True
    with other.attach(model, sgd(model), SimulatedNetwork.alone()) as outer:
        with pytest.raises(UserError) as error:
            outer.load_state_dict(state)
        assert str(error.value) == f"this state was saved with another {unlike}; attach that"
        outer._begun = True


def test_what_replicas_disagree_in_is_what_torchrun_prints_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(network: SimulatedNetwork) -> None:
        torch.manual_seed(network.rank)
        model = nn.Linear(4, 4)
        optimizer = sgd(model)
        with methods.noloco(every=4).attach(model, optimizer, network):
            step(model, optimizer, 0)

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(DisagreementError, match="seed every replica alike"):
        Simulation(2).run(work)
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(tmp_path / "error.json"))
    last = str(ChildFailedError("loop.py", {0: failure})).splitlines()[-2]
    assert re.match(r" +traceback : none is needed: replica \d starts from other weights than \d; seed every", last)


def test_torchrun_names_the_users_own_error_and_not_what_others_make_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the earliest, by whole seconds: that was of the other replica, whose partner had gone."""
    path, told = tmp_path / "error.json", list[str]()

    def work(network: SimulatedNetwork) -> None:
        model = nn.Linear(4, 4)
        optimizer = sgd(model)
        try:
            with methods.ddp().attach(model, optimizer, network):
                step(model, optimizer, 0)
                if network.rank == 1:
                    raise ZeroDivisionError("mine")
                step(model, optimizer, 1)
        except (ZeroDivisionError, PeerLostError):
            told.append(path.read_text())
            raise

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    with pytest.raises((ZeroDivisionError, PeerLostError)):
        Simulation(2).run(work)
    failures = {}
    for rank, text in enumerate(sorted(told, key=lambda text: "mine" in text)):
        (tmp_path / f"{rank}.json").write_text(text)
        failures[rank] = ProcessFailure(rank, pid=1, exitcode=1, error_file=str(tmp_path / f"{rank}.json"))
    rank, first = ChildFailedError("loop.py", failures).get_first_failure()
    assert (rank, first.message["message"]) == (1, "ZeroDivisionError: mine")
    assert 'raise ZeroDivisionError("mine")' in str(ChildFailedError("loop.py", failures))


def test_a_state_may_be_loaded_in_inference_mode_with_a_round_under_way() -> None:
    def work(network: SimulatedNetwork, load: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = sgd(model)
        with methods.diloco(every=4, delay=4).attach(model, optimizer, network) as outer:
            for number in range(14):
                step(model, optimizer, 100 * network.rank + number)
                if number == 6 and load:
                    with torch.inference_mode():
                        outer.load_state_dict(outer.state_dict())
        return flat(model)

    plain = Simulation(2).run(lambda network: work(network, False))
    loaded = Simulation(2).run(lambda network: work(network, True))
    assert all(torch.equal(one, other) for one, other in zip(plain, loaded, strict=True))
