"""Which expert gets a sequence: against the rule taken one sequence at a time, and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from farflung.errors import UserError
from farflung.mixtures.seats import balanced_assignment, purity, table_of
from farflung.mixtures.split import refuse_collapsed


def one_at_a_time(scores: list[list[float]]) -> list[int]:
    experts = range(len(scores[0]))
    seats = dict.fromkeys(experts, -(-len(scores) // len(scores[0])))
    found = [-1] * len(scores)
    for row in sorted(range(len(scores)), key=lambda row: -max(scores[row])):
        chosen = max((expert for expert in experts if seats[expert]), key=lambda expert: scores[row][expert])
        seats[chosen] -= 1
        found[row] = chosen
    return found


# Few values, so that many are equal.
SCORES = st.tuples(st.integers(1, 40), st.integers(2, 5)).flatmap(
    lambda shape: arrays(np.float16, shape, elements=st.integers(-6, 0).map(float))
)


@given(SCORES)
def test_the_best_score_comes_first_and_takes_its_best_seat(scores: np.ndarray) -> None:
    found = balanced_assignment(scores)
    assert found.tolist() == one_at_a_time(scores.tolist())
    assert np.bincount(found).max() <= -(-len(scores) // scores.shape[1])


def test_purity_is_the_share_of_the_largest_source_of_each_expert() -> None:
    experts, sources = np.array([0, 0, 0, 1, 1, 1]), np.array([0, 0, 1, 2, 2, 2])
    assert table_of(experts, sources).tolist() == [[2, 1, 0], [0, 0, 3]]
    assert purity(experts, sources) == pytest.approx(5 / 6)


def test_routers_that_collapse_are_refused() -> None:
    scores = np.zeros((100, 4))
    scores[np.arange(100), np.repeat([0, 1, 2, 3], [49, 46, 3, 2])] = 1
    with pytest.raises(
        UserError, match="collapsed: 2 of 100 sequences would choose expert 3, where 25 are an even"
    ) as e:
        refuse_collapsed(scores)
    assert "\n" not in str(e.value)
    scores[:3, 3] = 2
    refuse_collapsed(scores)
