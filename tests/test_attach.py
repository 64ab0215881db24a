"""What attach is given: options by their names, old ones too, and the inner optimizer that a method is about."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from problem import flat, inner_steps, small_model

from farflung import methods
from farflung.codecs import Quantize
from farflung.errors import UserError
from farflung.inner import Inner, SignSGD
from farflung.methods import Method
from farflung.networks import SimulatedNetwork, Simulation
from farflung.outer import Adapt, Drop, Everyone, Schedule, Session


def attached(method: Method, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> Session:
    model = small_model()
    optimizer = kind(model.parameters(), lr=1e-2)  # type: ignore[call-arg]
    with method.attach(model, optimizer, SimulatedNetwork.alone(), **options) as session:
        inner_steps(model, optimizer, 0, range(2))
    return session


def test_old_names_of_options_work_and_warn() -> None:
    with pytest.warns(DeprecationWarning, match="attach's deadline is called deadline_s now") as told:
        assert attached(methods.noloco(every=1), deadline=7).deadline_s == 7
    assert told[0].filename == __file__


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"deadlin_s": 3}, "attach has no option 'deadlin_s'; did you mean 'deadline_s'?"),
        ({"buffers": "never"}, "buffers is 'never'; choose 'end' or 'round'"),
        ({"robust": "modal"}, "robust is 'modal'; choose one of mean, median, clipped"),
        ({"deadline_s": None}, "deadline_s is None; give seconds, more than 0"),
        ({"deadline_s": -1}, "deadline_s is -1; give seconds, more than 0"),
        ({"deadline_s": float("nan")}, "deadline_s is nan; give seconds, more than 0"),
        ({"deadline_s": 5, "deadline": 6}, "deadline_s is given twice, once by its old name; remove one"),
        ({"starting_s": "5"}, "starting_s is '5'; give seconds, more than 0"),
        ({"on_round": 5}, "on_round is 5; give a function"),
        ({"outer_device": "nonsense"}, "outer_device is 'nonsense', which this machine does not have"),
        ({"outer_device": [5]}, "outer_device is [5], which this machine does not have"),
        ({"robust": "median"}, "only peers on the internet need it; leave it out"),
    ],
)
def test_options_that_cannot_be_are_refused_in_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as refused:
        attached(methods.noloco(every=1), **options)
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (None, "is None, which is no farflung Network: it lacks advance, all_reduce"),
        (Simulation(2), "which is no farflung Network: it lacks advance"),
        (SimulatedNetwork, "which is no farflung Network: it is a class; make one of it"),
    ],
)
def test_what_is_no_network_is_refused_in_one_line(network: Any, words: str) -> None:
    model = small_model()
    with pytest.raises(UserError, match=words):
        methods.diloco().attach(model, torch.optim.SGD(model.parameters()), network)


def test_an_optimizer_that_is_given_twice_is_refused() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(UserError, match="attach was given an optimizer twice"):
        methods.ddp().attach(model, [optimizer, optimizer], SimulatedNetwork.alone())


@pytest.mark.parametrize("odd", [lambda one: one.to(torch.float8_e4m3fn), lambda one: one.to_sparse()])
@pytest.mark.parametrize("make", [methods.diloco, methods.ddp])
def test_parameters_that_no_round_can_carry_are_refused(
    odd: Callable[[torch.Tensor], torch.Tensor], make: Callable[[], Method]
) -> None:
    model = torch.nn.ParameterDict({"odd": torch.nn.Parameter(odd(torch.zeros(3, 3)))})
    with pytest.raises(UserError, match=r"odd is of torch.(float8_e4m3fn|sparse_coo), which no round can carry"):
        make().attach(model, torch.optim.SGD(model.parameters()), SimulatedNetwork.alone())


THEIRS = torch.optim.SGD


class BeforeTopology:
    """As 0.1.0 asked for it."""

    alike = True

    def groups(self, members: Any, round: str) -> Any: ...


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"schedule": 5, "outer": THEIRS}, "schedule is 5; give a farflung.outer.Schedule"),
        ({"adapt": True, "outer": THEIRS}, "adapt is True; give a farflung.outer.Adapt"),
        ({"codec": 5, "outer": THEIRS}, "5 is no codec; give one, or a name"),
        ({"codec": Quantize, "outer": THEIRS}, "is no codec; give one, or a name"),
        ({"codec": "inty5", "outer": THEIRS}, "there is no codec 'inty5'"),
        ({"merge": "keep", "outer": THEIRS}, "there is no merge 'keep'"),
        ({"merge": 3, "outer": THEIRS}, "merge is 3, which is no farflung Merge: it lacks eager"),
        ({"topology": BeforeTopology(), "outer": THEIRS}, "which is no farflung Topology: it lacks identical"),
        ({"topology": Everyone, "outer": THEIRS}, "which is no farflung Topology: it is a class; make one of it"),
        ({"averaging": "hole", "outer": THEIRS}, "averaging is 'hole'; choose one of whole, parts"),
        ({"outer": "SGD"}, "outer is 'SGD'; give what makes an optimizer"),
        ({}, "without `outer` averages gradients at every step, and yet it is given Schedule(every=50"),
        ({"schedule": Schedule(every=None)}, "averages gradients at every step"),
        ({"schedule": Schedule(every=1), "merge": "dropped"}, "averages gradients at every step"),
        ({"schedule": Schedule(every=1), "adapt": Adapt()}, "averages gradients at every step"),
    ],
)
def test_choices_that_are_none_are_refused_in_one_line(choices: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)) as refused:
        Method(**{"schedule": Schedule(every=50), **choices})
    assert "\n" not in str(refused.value)


def test_names_of_codecs_and_merges_do() -> None:
    method = Method(Schedule(every=3), codec="int4", merge="dropped", outer=THEIRS)  # type: ignore[arg-type]
    assert (method.codec, method.merge) == (Quantize(bits=4), Drop())


def test_a_method_that_is_another_one_with_another_inner_optimizer_says_so() -> None:
    with pytest.warns(UserWarning, match="published with SignSGD, and is another one with AdamW; give attach farflung"):
        attached(methods.demo())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attached(methods.demo(), SignSGD)
        made_by_a_function = Inner(lambda named, **settings: torch.optim.SGD(named, **settings), lr=0.1)
        attached(replace(methods.diloco(every=1), inner=made_by_a_function))
        attached(methods.diloco(every=1))


def trained_a_little(method: Method, model: torch.nn.Module, steps: int = 4, state: Any = None) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with method.attach(model, optimizer, SimulatedNetwork.alone()) as session:
        if state:
            session.load_state_dict(state)
        inner_steps(model, optimizer, 0, range(steps))
        return session.state_dict()


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        (lambda: trained_a_little(methods.diloco(every=3), torch.nn.Linear(6, 1)), "another model: it has no 0.weight"),
        (
            lambda: trained_a_little(methods.diloco(every=10), small_model()),
            "with another schedule: every: 10, not 3; attach",
        ),
        (lambda: trained_a_little(methods.diloco(every=3, codec="int8"), small_model()), "another codec: Quantize"),
        (lambda: trained_a_little(methods.ddp(), small_model()), "another schedule"),
        (lambda: {"step": 4, "rounds": 1}, "farflung 0.1.0 is the last that does"),
        (lambda: trained_a_little(methods.diloco(every=3), small_model()) | {"format": 99}, "is newer than farflung"),
    ],
)
def test_a_state_that_is_refused_changes_nothing(saved: Any, words: str) -> None:
    model, other = small_model(), small_model()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other)]
    state = saved()
    with (
        methods.diloco(every=3).attach(model, optimizers[0], SimulatedNetwork.alone()) as session,
        methods.diloco(every=3).attach(other, optimizers[1], SimulatedNetwork.alone()),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            session.load_state_dict(state)
        assert session.step == session.rounds == 0
        for one, optimizer in zip((model, other), optimizers, strict=True):
            inner_steps(one, optimizer, 0, range(7))
    assert torch.equal(flat(model), flat(other))
