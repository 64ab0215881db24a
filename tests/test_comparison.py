"""Which run a report says is better, and when it says that runs cannot be compared; and pages with plotly elsewhere."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from farflung.report import html, read_run, write_report
from farflung.report.comparison import best_of, bits_per_byte, cautions, scores, verdict
from farflung.report.figures import loss_figure


def run_of(folder: Path, loss: float, length: float | None = None, tokens: int = 100, **settings: Any) -> Path:
    """A run of one replica that has been judged once, as its folder tells of it."""
    (folder / "events").mkdir(parents=True)
    told = {"tokenizer": "bytes", "data": "stdlib", "workload": "language", **settings}
    (folder / "config.toml").write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in told.items()))
    common = {"replica": 0, "at": 1.0, "step": 5, "tokens": tokens, "bytes_sent": 7}
    start = {
        "event": "start",
        "replicas": 1,
        "steps": 5,
        "method": "local",
        "measure": settings.get("measure", "nats a token"),
    }
    lines = [
        start | {"step": 0} | ({"bytes_per_unit": length} if length else {}),
        {"event": "step", "loss": loss, "lr": 0.1, "tokens_per_second": 1.0, "rounds": 0, "seconds_blocked": 0.0}
        | common,
        {"event": "evaluation", "validation_loss": loss, "sample": ""} | common,
        {"event": "end", "step": 5, "reason": "finished"},
    ]
    (folder / "events" / "replica-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_lower_loss_is_better_and_a_line_says_by_how_much(tmp_path: Path) -> None:
    runs = [read_run(run_of(tmp_path / name, loss)) for name, loss in (("a", 2.0), ("b", 1.5), ("c", 3.0))]
    assert best_of(runs) == 1 and not cautions(runs)
    assert "<b>b</b> has the lowest validation loss: 1.5000 nats a token, 25.0% below a.</p>" in verdict(runs)
    assert verdict(runs[:1]) == "" and best_of(runs[:1]) is None
    write_report([run.folder for run in runs], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.count("lowest loss") == 1 and re.search(r"</span>b<br><span class=\"best\">lowest loss", page)


@pytest.mark.parametrize(("method", "ranked"), [("noloco", False), ("local", True)])
def test_a_run_without_the_rounds_of_its_method_is_not_ranked(method: str, ranked: bool, tmp_path: Path) -> None:
    runs = [read_run(run_of(tmp_path / name, loss)) for name, loss in (("met", 2.0), ("apart", 1.0))]
    for run, rounds in zip(runs, (4, 0), strict=True):
        run.summary = run.results() | {"replicas": 2, "rounds": rounds, "method": method}
    assert best_of(runs) == (1 if ranked else None)
    assert ("No round was held in apart: the replicas trained alone there" in verdict(runs)) is not ranked
    assert html._sent({"bytes_sent": 432, "rounds": 0}) == "432 B, for the start alone: no round was held"


def test_unequal_work_is_told(tmp_path: Path) -> None:
    runs = [
        read_run(run_of(tmp_path / name, loss, tokens=tokens))
        for name, loss, tokens in (("a", 2.0, 100), ("b", 1.5, 4000))
    ]
    assert "but not after the same tokens: a 100, b 4,000.</p>" in verdict(runs)


def test_losses_of_different_tokenizers_are_compared_by_bits_a_byte(tmp_path: Path) -> None:
    """Of a loss of 4 nats for tokens of 4 bytes and one of 2 nats a byte, the larger is the better one."""
    long = read_run(run_of(tmp_path / "long", 4.0, 4.0, tokenizer="bpe"))
    short = read_run(run_of(tmp_path / "short", 2.0))
    assert bits_per_byte(long, 4.0) == pytest.approx(1 / math.log(2))
    assert scores([long, short]) == pytest.approx([1 / math.log(2), 2 / math.log(2)])
    assert best_of([long, short]) == 0
    (line,) = cautions([long, short])
    assert "only bits a byte can be compared: a token has 4.00 bytes in long, 1.00 bytes in short" in line
    figure = loss_figure([long, short], "tokens")
    assert figure.layout.yaxis.title.text == "loss, bits a byte"
    validation = {line.name: list(line.y) for line in figure.data if "validation" in line.name}
    assert validation["long, validation"] == pytest.approx([1 / math.log(2)])
    unknown = read_run(run_of(tmp_path / "unknown", 4.0, tokenizer="another"))
    assert best_of([unknown, short]) is None and "different tokenizers and cannot be compared" in verdict(
        [unknown, short]
    )
    assert loss_figure([unknown, short], "tokens").layout.yaxis.title.text == "loss, nats a token"


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"data": "mine.txt"}, "different held-out samples (see data)"),
        ({"measure": "loss"}, "measured in different things"),
    ],
)
def test_runs_that_were_judged_otherwise_are_not_ranked(other: dict[str, Any], words: str, tmp_path: Path) -> None:
    runs = [read_run(run_of(tmp_path / "a", 2.0)), read_run(run_of(tmp_path / "b", 1.0, **other))]
    assert best_of(runs) is None and words in verdict(runs) and "lowest" not in verdict(runs)


def test_small_reports_share_one_file_beside_their_run_folders(tmp_path: Path) -> None:
    runs = [run_of(tmp_path / "runs" / name, 2.0) for name in ("a", "b")]
    for run in runs:
        write_report([run], run / "report.html", small=True)
    (shared,) = (tmp_path / "runs").glob("plotly-*.min.js")
    assert shared.stat().st_size > 1_000_000
    for run in runs:
        page = (run / "report.html").read_text()
        assert len(page) < 200_000 and f'<script src="../{shared.name}"' in page
    write_report(runs, tmp_path / "both.html", small=True)
    (beside,) = tmp_path.glob("plotly-*.min.js")
    assert f'<script src="{beside.name}"' in (tmp_path / "both.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("small", [False, True])
def test_a_browser_draws_all_pictures_and_wide_tables_scroll_within_a_narrow_page(small: bool, tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    if not Path("/usr/bin/chromium").exists():
        pytest.skip("there is no chromium here")
    runs = [run_of(tmp_path / f"a-run-of-some-name-{number}", 2.0 + number) for number in range(5)]
    write_report(runs, tmp_path / "report.html", small=small)
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 420, "height": 900})
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(f"file://{tmp_path}/report.html")
        count = page.evaluate("document.querySelectorAll('script.figure').length")
        page.wait_for_function(f"document.querySelectorAll('.js-plotly-plot').length === {count}")
        assert count > 4 and not faults
        assert page.evaluate("document.documentElement.scrollWidth") == 420
        assert page.evaluate("document.querySelectorAll('.wide.scrolls:not(.ended)').length") > 0
        browser.close()
