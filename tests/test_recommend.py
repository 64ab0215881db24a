"""`farflung recommend`: its table is what benches have kept, and its answers obey what links must obey."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from statistics import mean
from typing import Any

import pytest

from bench.lib import recommended
from farflung.errors import UserError
from farflung.planner import recommend as room
from farflung.planner.lengths import Lengths
from farflung.planner.options import RecommendOptions
from farflung.planner.recommend import growth_of, measured, recommend, told
from farflung.settings import Settings


def options(**changes: Any) -> RecommendOptions:
    return RecommendOptions(**{"link": "100mbps", "params": 1e7, "step_ms": 500.0, "replicas": 4} | changes)


def test_the_packages_table_is_what_the_kept_results_say() -> None:
    assert measured() == json.loads(json.dumps(recommended.made()))


def test_gaps_are_those_of_the_page_of_evidence() -> None:
    page = (recommended.ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    best = next(row for row in measured()["rows"] if row["settings"].get("every_final"))
    (line,) = re.findall(r"\| \+ rounds that grow rarer, or more frequent \|.*", page)
    assert f"+{mean(best['gaps']):.1f} ±" in line.split("|")[5]
    for row in measured()["rows"] + measured()["longer"]:
        assert f"\n## {row['table']}\n" in page


FOUR_TIMES_AS_LONG = {"100": [9.0, 11.0], "400": [4.0, 6.0]}


@pytest.mark.parametrize(
    ("steps", "middle"),
    [(1, 0.10), (100, 0.10), (200, 0.075), (400, 0.05), (1600, 0.05)],
    ids=["shorter", "the shortest", "half the way of logarithms", "the longest", "longer"],
)
def test_a_gap_between_two_lengths_is_on_a_line_of_logarithms_and_beyond_them_that_of_the_nearest(
    steps: int, middle: float
) -> None:
    gap, spread = Lengths([FOUR_TIMES_AS_LONG]).gap(FOUR_TIMES_AS_LONG, steps), 2 * 2**0.5 / 100
    assert gap.middle == pytest.approx(middle) and gap.most == pytest.approx(middle + spread)
    # Four times as long, a power law through 10 and 5 has halved it again.
    assert gap.least == pytest.approx((middle - spread) * (0.5 if steps == 1600 else 1))


def test_a_length_of_one_seed_has_the_deviation_of_the_one_before_it() -> None:
    row = FOUR_TIMES_AS_LONG | {"1600": [3.0]}
    gap, spread = Lengths([row]).gap(row, 1600), 2 * 2**0.5 / 100
    assert (gap.middle, gap.least, gap.most) == pytest.approx((0.03, 0.03 - spread, 0.03 + spread))


def test_a_row_closes_in_runs_longer_than_its_own_as_those_that_were_measured_at_its_longest_and_beyond() -> None:
    rows: list[dict[str, list[float]]] = [
        {"100": [10.0, 10.0], "400": [8.0, 8.0], "1600": [4.0, 4.0]},  # halves
        {"400": [20.0, 20.0], "1600": [18.0, 18.0]},  # was not there at 100
        {"400": [5.0, 5.0]},  # says nothing of longer runs
        {"1600": [1.0, 1.0], "6400": [0.1, 0.1]},  # was not there at 400
    ]
    gap = Lengths(rows).gap({"100": [19.0, 21.0], "400": [9.0, 11.0]}, 1600)
    spread = 2 * 2**0.5 / 100
    assert gap.middle == pytest.approx(0.10 * (0.5 + 0.9) / 2)
    assert (gap.least, gap.most) == pytest.approx(((0.10 - spread) * 0.5, (0.10 + spread) * 0.9))
    assert Lengths(rows).gap({"100": [20.0, 20.0]}, 400).middle == pytest.approx(0.20 * 0.8)


def test_replicas_that_never_meet_have_the_gap_of_the_longest_run_also_where_that_is_of_one_seed() -> None:
    page = (recommended.ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    (gap,) = re.findall(r"\| 3200 \| replicas that never meet \| [\d.]+ \| \+([\d.]+) % \|", page)
    candidates = recommend(options(params=1e9, step_ms=800.0, steps=3200))
    assert f"{candidates[0].most:.1%}" == f"{float(gap):.1f}%"


def test_a_gap_that_has_closed_altogether_is_not_logged_and_nothing_closes_as_one_that_was_none() -> None:
    row = {"100": [9.0, 11.0], "400": [-1.0, 1.0]}
    assert Lengths([row]).gap(row, 1600).middle == 0
    closed = {"400": [-1.0, 1.0], "1600": [2.0, 2.0]}
    assert Lengths([row, closed]).gap(row, 1600).middle == 0


def test_longer_runs_promise_smaller_gaps_and_say_how_they_are_known() -> None:
    known = [recommend(options(steps=steps)) for steps in (200, 400, 800, 10**6)]
    best = [found[0].expected for found in known]
    assert best == sorted(best, reverse=True) and best[0] > best[2]
    texts = [told(found, options(steps=steps)) for found, steps in zip(known, (200, 400, 800, 10**6), strict=True)]
    assert "say yours, --steps 10000" in texts[0] and "No run was longer" not in texts[2]
    assert "in a run of 1,000,000 steps" in texts[3] and "No run was longer than" in texts[3]


def test_rounds_that_come_after_the_runs_end_promise_no_more_than_replicas_that_never_meet() -> None:
    chosen = options(params=1e9, step_ms=800.0, steps=500)
    found = recommend(chosen)
    over = [one for one in found if one.settings["every"] > 500 and "fragments" not in one.settings]
    assert over and all(one.first > 500 and one.least == one.expected == one.most for one in over)
    assert found[0].first <= 500 and "before its first round" not in told(found, chosen)
    short = options(params=1e9, step_ms=800.0, steps=5)
    candidates = recommend(short)
    text = told(candidates, short)
    assert f"before its first round, which comes after step {candidates[0].first:,}:" in text
    assert "the least as if rarer rounds cost nothing" not in text


@pytest.mark.parametrize(("steps", "measured_every"), [(200, 20), (10_000, 8)], ids=["the rarest", "the longest"])
def test_no_two_rows_are_the_same_command(steps: int, measured_every: int) -> None:
    found = recommend(options(params=1e9, step_ms=800.0, steps=steps))
    assert len({one.flags for one in found}) == len(found)
    (rare,) = [one for one in found if one.settings.keys() == {"method", "every"} and "noloco" in one.flags]
    assert rare.factor == pytest.approx(rare.settings["every"] / measured_every, rel=1e-3)


def test_the_readmes_command_is_answered_by_a_run_whose_replicas_meet() -> None:
    readme = (recommended.ROOT / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"`farflung recommend ([^`]+)`", readme)
    words = shlex.split(command)
    flags = {flag.removeprefix("--").replace("-", "_"): value for flag, value in zip(*[iter(words)] * 2, strict=True)}
    chosen = RecommendOptions(
        flags["link"], float(flags["params"]), float(flags["step_ms"]), replicas=int(flags["replicas"])
    )
    best = recommend(chosen)[0]
    assert best.first <= chosen.steps / 10 and f"--steps {chosen.steps}" in told([best], chosen)


def test_a_low_rank_is_as_large_a_part_of_a_wider_model_as_it_was_of_the_measured_one() -> None:
    of_low_rank = [row["settings"]["codec"] for row in measured()["longer"] if "lowrank" in str(row["settings"])]
    (rank,) = {int(re.findall(r"lowrank(\d+)", codec)[0]) for codec in of_low_rank}
    shares = []
    for wider in (1, 2, 20):  # a matrix that is twice as wide has four times the values, and there are twice as many
        params = measured()["parameters"] * wider**3
        found = recommend(options(link="1000gbps", params=params))
        one = next(one for one in found if one.settings["method"] == "dilocox")
        (wide,) = re.findall(r"ef-lowrank(\d+)-int4", one.settings["codec"])
        assert int(wide) == pytest.approx(rank * wider, rel=0.01)  # sides are whole numbers
        shares.append(one.sent / params)
    assert shares == pytest.approx([shares[-1]] * 3, rel=0.25)  # in small matrices the codec's scales weigh more


def test_a_row_that_was_measured_in_longer_runs_alone_is_known_from_the_shortest_of_them_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table, plain = measured(), options(link="1000gbps", params=1e5)
    settings = {"method": "diloco", "every": 8}

    def gaps_at(steps: int) -> dict[str, float]:
        return {one.flags: one.middle for one in recommend(replace(plain, steps=steps))}

    short, longer = gaps_at(200), gaps_at(800)
    others = [row for row in table["longer"] if row["settings"] != settings]
    own = {"table": "Longer runs", "settings": settings, "gaps": {"800": [3.0, 5.0], "3200": [2.0, 2.0]}}
    monkeypatch.setattr(room, "measured", lambda: table | {"longer": [*others, own]})
    assert gaps_at(200) == short
    known = gaps_at(800)
    assert known.pop("--method diloco --every 8") == pytest.approx(0.04)
    assert "--method diloco --every 20" in short and "--method diloco --every 20" not in known
    assert known.items() <= longer.items()  # it says nothing of how the others have closed


def test_who_wants_to_wait_for_next_to_nothing_gets_what_never_waits_or_is_told() -> None:
    assert {one.computing for one in recommend(options(wait=1e-300, step_ms=5e4))} == {1.0}
    with pytest.raises(UserError, match="too slow for"):
        recommend(options(wait=1e-300, params=1e9, step_ms=1.0))


def test_it_says_that_gaps_are_larger_with_more_replicas_than_were_measured() -> None:
    page = (recommended.ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    (rows,) = re.findall(r"<!-- table: long scaling -->(.*?)<!-- end -->", page, re.DOTALL)
    slopes = [float(slope) for slope in re.findall(r"\n\| (?:diloco|noloco) \|.* \+(\S+) \|", rows)]
    added = {"200": sorted(slopes[:2]), "800": sorted(slopes[2:])}
    assert measured()["doubling"] == added and len(slopes) == 4
    for replicas, larger in ((8, False), (16, True)):
        chosen = options(replicas=replicas)
        text = told(recommend(chosen), chosen)
        told_of = ", ".join(f"{least:.1f} to {most:.1f} in {n} steps" for n, (least, most) in added.items())
        assert (f"for each doubling, up to 32: {told_of} (one seed)" in text) is larger


def test_gaps_grow_as_those_of_one_method_at_two_distances() -> None:
    def row(method: str, every: int, gap: float, **more: Any) -> dict[str, Any]:
        return {"settings": {"method": method, "every": every, **more}, "gaps": [gap, gap]}

    rows = [row("a", 2, 3.0), row("a", 8, 6.0), row("b", 5, 1.0), row("a", 99, 1.0, codec="int4")]
    assert growth_of(rows) == pytest.approx(0.5)


def test_faster_links_let_rounds_be_as_frequent_and_promise_no_more() -> None:
    slow, fast = recommend(options(link="20mbps")), recommend(options(link="1gbps"))
    assert min(one.expected for one in fast) <= min(one.expected for one in slow)
    for found in (slow, fast):
        assert [one.middle for one in found] == sorted(one.middle for one in found)
        for one in found:
            assert one.computing >= 0.9 and one.factor >= 1
            assert one.least <= one.expected <= one.most
    assert mean(one.factor for one in fast) < mean(one.factor for one in slow)
    alone = mean(measured()["alone"]) / 100
    assert all(one.least < alone for one in slow if one.first <= options().steps)
    assert not any(one.settings["method"] == "nolocox" for one in recommend(options(link="20mbps", steps=200)))


def test_what_fits_without_change_has_the_measured_gap() -> None:
    best = recommend(options(link="10gbps", step_ms=5000.0, params=1e5))[0]
    assert best.settings == {"method": "ddp"} and (best.least, best.expected, best.most) == (0, 0, 0)


def test_rows_of_which_the_same_gap_is_shown_are_ordered_by_more_than_that_and_it_says_so() -> None:
    chosen = options(link="20mbps", params=1e9)
    candidates = recommend(chosen)
    assert {one.expected for one in candidates} == {one.most for one in candidates} and len(candidates) > 2
    assert [one.middle for one in candidates] == sorted(one.middle for one in candidates)
    assert "rows that would be more come in the order of how much more" in told(candidates, chosen)
    head, *lines = told(candidates, chosen).splitlines()
    assert {"gap", "from", "to"} <= {*head.split()}  # and so the lines call them
    assert any("gap: as gaps grew" in line and "from: as if" in line and "to: as of" in line for line in lines)
    near = options(link="10gbps", step_ms=5000.0, params=1e5)
    assert "in the order of how much more" not in told(recommend(near), near)


def test_its_command_is_one_that_train_takes_and_it_tells_how_thin_the_evidence_is() -> None:
    chosen = options(link="20mbps", steps=900)
    candidates = recommend(chosen)
    text = told(candidates, chosen)
    (command,) = re.findall(r"^take: farflung train (.*)$", text, flags=re.MULTILINE)
    words = shlex.split(command)
    given = {flag.removeprefix("--").replace("-", "_"): value for flag, value in zip(*[iter(words)] * 2, strict=True)}
    settings = Settings.of(**{name: int(value) if value.isdigit() else value for name, value in given.items()})
    assert settings.method().schedule.every == candidates[0].settings["every"]
    assert settings.run.steps == 900
    assert "were not measured" in text and "evidence is thin" in text and "docs/evidence.md" in text
    assert not any(len(line) > 300 for line in text.splitlines())


def test_it_tells_of_how_many_parameters_the_evidence_is_also_where_that_is_more() -> None:
    small, large = (told(recommend(one), one) for one in (options(params=1e3, link="10gbps"), options(params=1e9)))
    assert "(133 times more than yours)" in small and "(7,494 times fewer than yours)" in large


@pytest.mark.parametrize("link", ["fast", "100", "0mbps", "-1mbps", "100 mb", ""])
def test_a_link_that_is_none_is_refused(link: str) -> None:
    with pytest.raises(UserError, match=f"link is {link!r}; give a bandwidth such as 100mbps"):
        options(link=link)
    assert (options(link="1.5 Gbit/s").mbps, options(link="250kbps").mbps) == (1500, 0.25)


def test_links_that_are_too_slow_for_anything_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "RAREST", 100)
    with pytest.raises(UserError, match=r"too slow for 1e\+09 parameters.*100 steps apart; train a smaller model"):
        recommend(options(params=1e9))
