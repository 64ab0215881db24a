"""What attach is given: options by their names, old ones too, and the inner optimizer that a method is about."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from problem import inner_steps, small_model

from farflung import methods
from farflung.errors import UserError
from farflung.inner import Inner, SignSGD
from farflung.methods import Method
from farflung.networks import SimulatedNetwork
from farflung.outer import Session


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
        ({"robust": "median"}, "only peers on the internet need it; leave it out"),
    ],
)
def test_options_that_cannot_be_are_refused_in_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as refused:
        attached(methods.noloco(every=1), **options)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_a_method_that_is_another_one_with_another_inner_optimizer_says_so() -> None:
    with pytest.warns(UserWarning, match="published with SignSGD, and is another one with AdamW; give attach farflung"):
        attached(methods.demo())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attached(methods.demo(), SignSGD)
        made_by_a_function = Inner(lambda named, **settings: torch.optim.SGD(named, **settings), lr=0.1)
        attached(replace(methods.diloco(every=1), inner=made_by_a_function))
        attached(methods.diloco(every=1))
