"""Runs that are judged by a figure which is no loss, with a sample that is a picture, of a class of the user's own."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import struct
import threading
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from own_workload import Guess, GuessSettings
from processes import run_here
from rich.console import Console

from farflung.cli.results import tell_result
from farflung.errors import UserError
from farflung.events import EvaluationEvent
from farflung.figure import LOSS, Figure, figure_of
from farflung.pipeline.island import WholeIsland
from farflung.pipeline.settings import IslandSettings
from farflung.report import read_run
from farflung.report.comparison import best_of, verdict
from farflung.report.facts import more_figures
from farflung.report.live import watch
from farflung.report.page import page
from farflung.report.read import Run
from farflung.report.watching.followed import Followed
from farflung.settings import Settings
from farflung.training import checkpoint
from farflung.training.export import export
from farflung.workloads.base import Picture, Score
from farflung.workloads.dealing import ALL
from farflung.workloads.registry import WORKLOADS

PNG = Guess(GuessSettings(), ALL).sample(None, 0, torch.device("cpu")).png
MODULE = Path(__file__).parent / "own_workload.py"
SMALL = ("--workload", "own_workload:Guess", "--network", "simulated", "--replicas", "2", "--every", "2")
SMALL += ("--steps", "8", "--eval-every", "2", "--checkpoint-every", "2", "--keep-checkpoints", "1", "--log-every", "2")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose score rises and falls again: its best is that after six steps."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_workload.py").write_text(MODULE.read_text())
    with pytest.MonkeyPatch.context() as patch:
        assert run_here(patch, folder, "train", *SMALL, "--out", "run") == 0
    return folder / "run"


def test_the_last_lines_tell_of_the_figure(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tell_result(run)
    told = "right answers 0.5000 (mean of the replicas), 0.5000 with their weights averaged, spread 0.2500"
    assert told in capsys.readouterr().out


def test_events_and_summary_go_by_the_workloads_figure(run: Path) -> None:
    scores = [event.score for event in read_run(run).of(0, EvaluationEvent)]
    assert scores == [0.25, 0.5, 0.75, 0.5]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["right_answers"] == summary["right_answers_averaged"] == 0.5
    assert summary["right_answers_per_replica"] == [0.5, 0.5] and "validation_loss" not in summary
    assert summary["others_averaged"] == {"spread": 0.25}
    assert (run / "sample.png").read_bytes() == _png()


def test_the_checkpoint_that_is_kept_and_exported_has_the_most(run: Path, tmp_path: Path) -> None:
    kept = set(checkpoint.whole_steps(run))
    assert 6 in kept and not kept & {2, 4}
    assert export(run, tmp_path / "model", best=True).endswith("at step 6, the best: right answers 0.7500")


def test_of_scores_that_are_not_finite_none_is_the_best(run: Path, tmp_path: Path) -> None:
    spoilt = tmp_path / "spoilt"
    shutil.copytree(run, spoilt)
    for path in spoilt.rglob("*.jsonl"):
        path.write_text(re.sub(r'"score": [0-9.]+', '"score": NaN', path.read_text()))
    with pytest.raises(UserError, match=r"no right answers of .*spoilt is finite, so that none is the best; leave out"):
        export(spoilt, tmp_path / "model", best=True)


def test_report_and_page_show_the_figure_and_the_picture(run: Path) -> None:
    page = (run / "report.html").read_text().split("</script>", 1)[-1]
    assert "Right answers against guesses" in page and "validation loss" not in page
    png = base64.b64encode(_png()).decode()
    assert f'src="data:image/png;base64,{png}"' in page and "a &lt;dot&gt;" in page
    followed = Followed(run)
    followed.refresh()
    shown = followed.shown()
    assert shown.facts["right answers"] == "0.5000" and png in shown.sections["What the model makes"]
    # The figures beside it, which the report's table has, too: 0.25 for both replicas.
    assert shown.facts["spread"] == "0.2500"


def test_more_figures_are_the_means_of_those_that_are_told() -> None:
    def told(**others: float | None) -> EvaluationEvent:
        return EvaluationEvent(step=1, tokens=1, bytes_sent=0, score=0.5, others=others or None, sample="")

    found = more_figures([told(hits=0.25, far=None), told(hits=0.75, far=3.0), told(), told(spoilt=None)])
    assert found == {"hits": 0.5, "far": 3.0}


def test_the_terminal_tells_them_in_its_lines(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = io.StringIO()
    ended = threading.Event()
    ended.set()
    watch(Run(run), ended, Console(file=told, force_terminal=False, width=200))
    assert "right answers 0.7500 · spread 0.2500 · consensus distance" in told.getvalue()


def _png() -> bytes:
    """What the workload's sample is: one black pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0\0")) + chunk(b"IEND", b"")


def test_of_two_runs_the_one_with_more_is_better(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "events").mkdir(parents=True)
    (other / "config.toml").write_text((run / "config.toml").read_text())
    for path in (run / "events").glob("*.jsonl"):
        (other / "events" / path.name).write_text(path.read_text().replace('"score": 0.5', '"score": 0.625'))
    runs = [read_run(run), read_run(other)]
    assert best_of(runs) == 1
    assert "has the highest right answers: 0.6250, 25.0% above run" in verdict(runs)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere_at_all:Mine", "the workload 'nowhere_at_all:Mine' cannot be loaded (ModuleNotFoundError"),
        ("json:loads", "which is no farflung.workloads.Workload"),
        ("json:Nothing", "AttributeError"),
        (":", "cannot be loaded"),
    ],
)
def test_what_is_no_workload_is_refused_in_a_line(name: str, words: str) -> None:
    with pytest.raises(UserError) as raised:
        Settings.of(workload=name)
    assert words in str(raised.value) and "\n" not in str(raised.value)
    assert name not in WORKLOADS


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1), st.booleans())
def test_the_best_is_the_most_or_the_least(values: list[float], more: bool) -> None:
    figure = Figure("link MRR", more_is_better=more)
    assert figure.best(values) == (max(values) if more else min(values))


def test_names_of_figures() -> None:
    assert Figure("link MRR").key == "link_mrr" and LOSS.key == "validation_loss"
    assert LOSS.key_of_sources == "validation_losses" and Figure("AUC").key_of_sources == "aucs"
    with pytest.raises(UserError, match="give it a name of letters"):
        Figure("?").checked()


def test_no_figure_takes_the_name_of_another_number_of_a_run(run: Path) -> None:
    own = {"right_answers", "right_answers_averaged", "right_answers_per_replica"}
    for key in json.loads((run / "summary.json").read_text()).keys() - own:
        with pytest.raises(UserError, match=f"a run has another {key}; rename it"):
            Figure(key).checked()
    with pytest.raises(UserError, match="has another step;"):
        Figure("step").checked()


@pytest.mark.parametrize("judged_by", ["AUC", None, ("AUC", "", True)])
def test_what_is_no_figure_is_told(judged_by: Any) -> None:
    with pytest.raises(UserError, match=r"judged_by of the workload SimpleNamespace is .*; make it a farflung"):
        figure_of(SimpleNamespace(judged_by=judged_by, measure="nats"))


@pytest.mark.parametrize("value", [np.float32(0.5), torch.tensor(0.5), 0.5])
def test_a_score_is_of_plain_numbers(value: Any) -> None:
    for found in (value, Score(value, others={"spread": value})):
        score = Score.given(found)
        assert type(score.value) is float and score.value == 0.5
        assert all(type(other) is float for other in score.others.values())


@pytest.mark.parametrize("found", [None, "good", torch.ones(2), Score(0.5, others={"x": None})])
def test_a_score_that_is_no_number_is_told(found: Any) -> None:
    with pytest.raises(UserError, match=r"evaluate has given .*; let it return a number"):
        Score.given(found)


@pytest.mark.parametrize(("text", "shown"), [("a\ud800b", "a\ufffdb"), ("\ud83d\ude00", "\U0001f600"), ("é\n", "é\n")])
def test_a_sample_is_text_that_a_page_can_hold(text: str, shown: str) -> None:
    assert Picture.or_text(text) == shown
    assert Picture.or_text(Picture(PNG, text)) == Picture(PNG, shown)
    assert "a?b" in page("a\ud800b", [], "")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loss": lambda *_: 1.0}, r"loss is 1\.0; let it return the mean"),
        ({"loss": lambda *_: torch.ones(2)}, r"loss is a tensor of \(2,\); let it return the mean"),
        ({"sample": lambda *_: None}, "sample is None; let it return text, or a Picture"),
        (
            {"sample": lambda *_: Picture(b"\xff\xd8\xff\xe0 and so on")},
            r"a Picture of b'\\xff.*, which is no whole PNG",
        ),
        (
            {"sample": lambda *_: Picture(PNG[:-9], "cut off")},
            "which is no whole PNG file; give the bytes that Pillow's",
        ),
        ({"sample": lambda *_: Picture(cast(Any, "a.png"))}, "a Picture of a str, which is no whole PNG file"),
        (
            {"sample": lambda *_: Picture(PNG, cast(Any, None))},
            r"sample is Picture\(.*; let it return text, or a Picture",
        ),
    ],
)
def test_what_a_workload_returns_is_looked_at(change: dict[str, Any], words: str) -> None:
    workload: Any = type("Changed", (Guess,), change)(GuessSettings(), ALL)
    nowhere: Any = None
    island = WholeIsland(IslandSettings(), workload, workload.build(0), nowhere, nowhere, 0, torch.device("cpu"))
    with pytest.raises(UserError, match=words):
        island.loss(torch.ones(1, 1)) if "loss" in change else island.sample()


BROKEN = """
class Broken(Guess):
    def sample(self, model, seed, device):
        raise RuntimeError("no picture")
"""


@pytest.mark.slow
def test_a_sample_that_cannot_be_made_costs_no_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text(MODULE.read_text() + BROKEN)
    alone = ("--network", "torch", "--replicas", "1", "--method", "local", "--steps", "4", "--text-share", "0")
    assert run_here(monkeypatch, tmp_path, "train", "--workload", "broken:Broken", *alone, "--out", "run") != 0
    assert "no picture" in capfd.readouterr().err
    assert checkpoint.average_of(tmp_path / "run").is_file()
