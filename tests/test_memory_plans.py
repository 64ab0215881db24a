"""Plans of memory: their values."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.errors import UserError
from farflung.memory.plan import LayerCost, LayerPlan, Plan, Profile, from_json, to_json

SECONDS = st.floats(0, 1e6)
BYTES = st.integers(0, 10**15)
COSTS = st.builds(LayerCost, SECONDS, SECONDS, BYTES, BYTES, BYTES, BYTES, BYTES, SECONDS, SECONDS)
PROFILES = st.builds(Profile, st.lists(COSTS, max_size=3).map(tuple), COSTS, COSTS, SECONDS, SECONDS, BYTES)
LAYERS = st.builds(
    LayerPlan,
    st.sampled_from(["keep", "recompute", "move", "recompute-moved"]),
    st.sampled_from(["near", "moments-far", "optimizer-far", "weights-far"]),
)
PLANS = st.builds(Plan, st.lists(LAYERS, max_size=3).map(tuple), BYTES, BYTES, SECONDS)


@given(PROFILES, PLANS)
def test_what_is_kept_of_a_plan_is_the_plan(profile: Profile, plan: Plan) -> None:
    assert from_json(Profile, to_json(profile), "profile.json") == profile
    assert from_json(Plan, to_json(plan), "plan.json") == plan


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "plan.json is no JSON: .*; remove it"),
        ("[]", "plan.json: .* must be a table"),
        (json.dumps({"layers": [{"mode": "forget"}]}), "plan.json, layers 1: mode is 'forget'; it must be .*keep"),
        (json.dumps({"layers": [{"modes": "keep"}]}), "plan.json, layers 1: there is no setting 'modes'"),
        (json.dumps({"layers": []}), "plan.json: prefetch_bytes is missing"),
    ],
)
def test_a_file_that_holds_no_plan_is_told_in_a_line(text: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        from_json(Plan, text, "plan.json")
