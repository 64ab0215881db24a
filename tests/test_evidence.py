"""The tables of evidence: searching, keeping results, and that the page says what the results say."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.lib import evidence
from bench.lib.plots import name_points, plt
from bench.lib.runs import Runs
from bench.lib.search import Axis, Point, compass
from bench.lib.store import Store
from bench.quality import length, transfer
from bench.quality.frontier import on_frontier
from bench.quality.scaling import Gaps

AXES = [Axis("lr", step=2.0), Axis("momentum", step=0.2, factor=False, most=0.95)]


@given(lr=st.floats(1e-4, 1.0), momentum=st.floats(0.0, 0.95), start=st.floats(1e-3, 0.1), budget=st.integers(1, 40))
def test_the_search_keeps_to_its_budget_and_never_ends_worse_than_it_began(
    lr: float, momentum: float, start: float, budget: int
) -> None:
    tried: list[Point] = []

    def loss(point: Point) -> float:
        tried.append(point)
        return math.log2(point["lr"] / lr) ** 2 + (5 * (point["momentum"] - momentum)) ** 2

    found = compass(loss, {"lr": start, "momentum": 0.5}, AXES, budget)
    assert len(tried) <= budget and len({tuple(point.values()) for point in tried}) == len(tried)
    assert loss(found) == min(map(loss, list(tried)))
    assert all(0 <= point["momentum"] <= 0.95 for point in tried)


def test_the_loss_at_a_runs_end_is_of_the_average_where_there_was_one_and_a_diverged_run_has_none() -> None:
    own, mean = {"validation_loss": 2.0}, {"validation_loss_averaged": 1.0}
    kept = {0: {**own, **mean, "rounds": 3}, 1: {**own, **mean, "rounds": 0}, 2: {"validation_loss": None}}
    assert {seed: one["validation_loss"] for seed, one in length.finite(kept).items()} == {0: 1.0, 1: 2.0}


def test_the_search_finds_a_known_minimum() -> None:
    found = compass(
        lambda p: math.log2(p["lr"] / 0.02) ** 2 + (5 * (p["momentum"] - 0.9)) ** 2,
        {"lr": 0.0025, "momentum": 0.5},
        AXES,
        budget=40,
    )
    assert found["lr"] == pytest.approx(0.02, rel=0.01) and found["momentum"] == pytest.approx(0.9)


@pytest.mark.slow
def test_a_run_is_made_once_and_kept(tmp_path: Path) -> None:
    common = {"model": "micro", "replicas": 2, "batch_size": 2, "sequence_length": 16, "max_tokens": 50_000}
    common |= {"eval_sequences": 4, "warmup": 1, "eval_every": 2, "log_every": 2}
    settings = {"method": "noloco", "every": 2}
    common |= {"steps": 4}
    store = Store("table", tmp_path)
    with Runs(store, common) as runs:
        first = runs.start(settings, 0).result(120)
        assert runs.start(settings, 0) is runs.start(settings, 0)
    store.choose("row", settings)
    kept = json.loads((tmp_path / "table.json").read_text())
    (run,) = kept["runs"]
    assert kept["chosen"] == {"row": settings} and run["seed"] == 0 and run["versions"]["torch"]
    assert run["settings"] == common | settings
    assert first["rounds"] == 2 and set(first["losses"]) == {2, 4} and first["losses"][4] == first["validation_loss"]

    again = Store("table", tmp_path)
    with Runs(again, common) as runs:
        result = runs.start(settings, 0)
        assert result.done() and result.result()["validation_loss"] == first["validation_loss"]
        assert runs.results(settings).keys() == {0} and not runs.results({"method": "ddp"})
    assert again.chosen_as("row") == settings
    with pytest.raises(SystemExit, match="no tuned 'other' yet"):
        again.chosen_as("other")


@given(st.lists(st.tuples(st.floats(1, 5), st.floats(0, 100)), min_size=1, max_size=12))
def test_the_frontier_is_what_nothing_beats(points: list[tuple[float, float]]) -> None:
    losses = {str(number): [loss] for number, (loss, _) in enumerate(points)}
    cost = {str(number): cost for number, (_, cost) in enumerate(points)}
    best = on_frontier(losses, cost)
    assert str(min(range(len(points)), key=lambda n: points[n])) in best
    for number, (loss, price) in enumerate(points):
        beaten = any(other < loss and theirs <= price for other, theirs in points)
        assert (str(number) in best) is not beaten


def test_names_in_a_picture_cover_no_point_and_no_other_name() -> None:
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    points = {"one": (1.0, 1.0), "its twin": (1.0, 1.01), "near": (1.1, 1.0), "far": (9.0, 2.0), "low": (5.0, 0.0)}
    axes.scatter(*zip(*points.values(), strict=True))
    name_points(axes, points)
    boxes = [text.get_window_extent() for text in axes.texts]
    assert {text.get_text() for text in axes.texts} == points.keys()
    assert all(box.count_overlaps(boxes) == 1 for box in boxes)  # itself
    assert not any(box.contains(*point) for box in boxes for point in axes.transData.transform([*points.values()]))
    plt.close(figure)


def test_a_point_in_a_crowd_has_a_name_too() -> None:
    figure, axes = plt.subplots(figsize=(2, 2), layout="constrained")
    points = {f"one of too many, {number}": (1.0, 1.0) for number in range(30)}
    axes.scatter(*zip(*points.values(), strict=True))
    name_points(axes, points)
    assert [text.get_text() for text in axes.texts] == [*points]
    plt.close(figure)


def test_a_gap_that_grows_as_log_n_is_predicted_exactly() -> None:
    exact = Gaps("", "", [(n, 3 + 2 * math.log2(n)) for n in (4, 8, 16, 32) for _ in range(2)])
    assert exact.predicted(256) == pytest.approx((19, 19, 19))
    noisy = Gaps("", "", [(n, 3 + 2 * math.log2(n) + off) for n in (4, 8, 16, 32) for off in (-1, 1)])
    guess, low, high = noisy.predicted(256)
    assert guess == pytest.approx(19) and 15 < low < 18.5 and 19.5 < high < 23


@pytest.mark.slow
def test_the_page_is_what_the_results_say() -> None:
    page, tables = evidence.PAGE.read_text(), evidence.all_tables()
    assert evidence.filled(page, tables) == page, "run python -m bench evidence"
    assert all(f"<!-- table: {name} -->" in page for name in tables)


def test_rankings_are_compared_on_the_rows_that_both_have() -> None:
    small, large = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}, {"d": 7.0, "b": 6.0, "a": 5.0}
    assert transfer.spearman(small, large) == pytest.approx(1)
    assert transfer.spearman(large, {"a": 3.0, "b": 2.0, "d": 1.0, "e": 0.0}) == pytest.approx(-1)
    assert transfer.spearman({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 3, "c": 2}) == pytest.approx(0.5)
    assert math.isnan(transfer.spearman(small, {"a": 1.0}))
