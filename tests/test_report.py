"""The report room reads what short real runs have written, also while they write; and what became of such files."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import patience, until
from processes import SMALL, run_here, trained
from rich.console import Console

from farflung.errors import UserError
from farflung.events import EvaluationEvent
from farflung.report import html, peers, read_run, watch, write_report
from farflung.report.figures import (
    ROUNDS_SHOWN,
    adaptation_figure,
    compression_figure,
    consensus_figure,
    loss_figure,
    timeline_figure,
)
from farflung.report.live import plain_line, table
from farflung.report.numbers import nbytes, shares
from farflung.report.read import EventReader, Run

SHORT = [*SMALL, "--network", "simulated", "--replicas", "2", "--steps", "20"]
WORLD = "step_ms = 1000\nbandwidth_mbps = 8\nlatency_ms = 50\n"
CUT = f"{WORLD}[[cuts]]\nreplicas = [1]\nfrom_s = 5.3\nuntil_s = 9\n"
DEATH = f"{WORLD}[[deaths]]\nreplica = 1\nat_s = 15.5\n"

Line = dict[str, Any]


def simulated(tmp_path_factory: pytest.TempPathFactory, world: str, *arguments: str) -> Path:
    conditions = tmp_path_factory.mktemp("world") / "world.toml"
    conditions.write_text(world)
    return trained(tmp_path_factory, *SHORT, "--conditions", str(conditions), *arguments)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two replicas, whose first round is lost to a cut; evaluated after steps 10 and 20."""
    return simulated(tmp_path_factory, CUT, "--method", "noloco", "--every", "5", "--delay", "2", "--deadline", "1")


@pytest.fixture(scope="module")
def adapting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose rounds are compressed, and come more often as it goes on."""
    return simulated(tmp_path_factory, WORLD, "--method", "dilocox", "--every", "4")


@pytest.fixture(scope="module")
def dead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose replica 1 dies between its steps 10 and 15."""
    return simulated(tmp_path_factory, DEATH, "--method", "noloco", "--every", "5", "--deadline", "3")


@pytest.fixture
def run(real: Path, tmp_path: Path) -> Path:
    """A copy of the run, to change."""
    shutil.copytree(real, tmp_path / "run")
    return tmp_path / "run"


def path_of(folder: Path, replica: int) -> Path:
    return folder / "events" / f"replica-{replica}.jsonl"


def lines_of(folder: Path, replica: int, kind: str = "") -> list[Line]:
    """What a replica has written, of one kind or all, as plain JSON."""
    lines = [json.loads(text) for text in path_of(folder, replica).read_text().splitlines()]
    return [line for line in lines if kind in ("", line["event"])]


def both(folder: Path, kind: str, step: int) -> list[Line]:
    """The lines of both replicas."""
    return [line for replica in (0, 1) for line in lines_of(folder, replica, kind) if line["step"] == step]


def text(*lines: Line) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def like(line: Line, **changes: Any) -> Line:
    """A line as one that a run has written, but for some of its values."""
    assert changes.keys() <= line.keys()
    return {**line, **changes}


def summary_of(folder: Path, **changes: Any) -> Line:
    """The summary, after some changes to it."""
    path = folder / "summary.json"
    path.write_text(json.dumps(like(json.loads(path.read_text()), **changes)))
    summary: Line = json.loads(path.read_text())
    return summary


def mean(lines: list[Line], value: str) -> float:
    return sum(line[value] for line in lines) / len(lines)


def consensus_distance(folder: Path, step: int) -> float:
    """Half of the distance between two is each one's from their mean."""
    one, other = (
        np.frombuffer(base64.b64decode(line["sample"]), dtype="<f4").astype(float)
        for line in both(folder, "evaluation", step)
    )
    return float(np.sqrt(np.mean(((one - other) / 2) ** 2)))


def test_the_consensus_distance_is_the_deviation_from_the_mean(real: Path) -> None:
    expected = {step: consensus_distance(real, step) for step in (10, 20)}
    assert min(expected.values()) > 0
    assert read_run(real).consensus_distance() == pytest.approx(expected)


def test_half_a_line_waits_for_its_other_half(real: Path, tmp_path: Path) -> None:
    first, second = path_of(real, 0).read_text().splitlines(keepends=True)[:2]
    path = tmp_path / "events.jsonl"
    path.write_text(first + second[:30])
    reader = EventReader(path)
    assert [event.kind for event in reader.read()] == ["start"]
    with path.open("a") as file:
        file.write(second[30:])
    assert [event.kind for event in reader.read()] == [json.loads(second)["event"]]
    assert reader.read() == []


def test_a_run_that_went_back_to_a_checkpoint_is_read_anew(run: Path) -> None:
    read = read_run(run)
    path = path_of(run, 0)
    beside = path.with_suffix(".tmp")
    beside.write_text(text(*lines_of(run, 0)[:2]))
    beside.replace(path)
    read.refresh()
    assert [event.kind for event in read.events[0]] == [line["event"] for line in lines_of(run, 0)[:2]]
    assert len(read.events[1]) == len(lines_of(run, 1)) > 10


def test_a_file_that_was_cut_in_place_is_read_anew(run: Path) -> None:
    read = read_run(run)
    path = path_of(run, 0)
    with path.open("r+") as file:
        file.truncate(len(path.read_text().splitlines(keepends=True)[0]))
    read.refresh()
    assert [event.kind for event in read.events[0]] == ["start"]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        read_run(tmp_path)
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "replica-0.jsonl").write_text('{"event": "sta')
    with pytest.raises(UserError, match="holds no run") as error:
        read_run(tmp_path)
    assert "\n" not in str(error.value)


def text_of(renderable: Any) -> str:
    console = Console(width=140, file=io.StringIO())
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_has_each_replicas_latest_state(real: Path) -> None:
    rows = [re.findall(r"[\w.,]+(?: \w+)?", row) for row in text_of(table(read_run(real))).splitlines()]
    for replica, (last, evaluated) in enumerate(zip(both(real, "step", 20), both(real, "evaluation", 20), strict=True)):
        told = [f"{last['loss']:.4f}", f"{evaluated['score']:.4f}", f"{last['tokens_per_second']:,.0f}"]
        told += [str(last["rounds"]), nbytes(last["bytes_sent"]), f"{last['seconds_blocked']:.1f} s"]
        assert [str(replica), "20", *told] in rows


def watched(run: Run) -> list[str]:
    """What is said of a run that has ended, where there is no terminal."""
    finished, out = threading.Event(), io.StringIO()
    finished.set()
    watch(run, finished, Console(file=out, force_terminal=False))
    return out.getvalue().splitlines()


def test_the_plain_log_has_no_boxes_and_says_everything_once(run: Path) -> None:
    (warning,) = lines_of(run, 1, "warning")
    odd = like(warning, message="odd <b>bold</b>")
    path_of(run, 1).write_text(path_of(run, 1).read_text().replace(text(warning), text(odd)))
    lines = watched(Run(run))
    for step in (10, 20):
        loss = mean(both(run, "evaluation", step), "score")
        assert (
            lines.count(
                f"step {step} · validation loss {loss:.4f} · consensus distance {consensus_distance(run, step):.3g} "
                "(of sampled weights)"
            )
            == 1
        )
    assert "warning: replica 1: odd <b>bold</b>" in lines
    last = both(run, "step", 20)
    (state,) = (line for line in lines if line.startswith("step 20/20 "))
    assert state == (
        f"step 20/20 · loss {mean(last, 'loss'):.4f} · {2 * mean(last, 'tokens_per_second'):,.0f} tokens/s · "
        f"sent by all {nbytes(2 * mean(last, 'bytes_sent'))} · blocked {mean(last, 'seconds_blocked'):.1f} s"
    )
    assert state == plain_line(read_run(run))
    assert lines[lines.index(state) + 1].startswith("step 20 · validation loss"), "judged after it was trained"


def test_the_log_and_report_of_one_of_two_machines_say_whose_they_are(run: Path) -> None:
    path_of(run, 1).unlink()
    sent, lines = nbytes(lines_of(run, 0, "step")[-1]["bytes_sent"]), watched(Run(run))
    (state,) = (line for line in lines if line.startswith("step 20/20 · on this machine 1 of 2 replicas · loss "))
    assert f"· sent {sent} ·" in state
    assert any(line.startswith("step 20 · on this machine 1 of 2 replicas · validation loss ") for line in lines)
    write_report([run], run / "report.html")
    assert "1 of 2 replicas have their events in this folder" in (run / "report.html").read_text()


def test_the_plain_log_of_replicas_that_are_started_again_names_them(real: Path, tmp_path: Path) -> None:
    """Each goes on by itself; its file is then another, which begins as the old one did."""
    begun, (evaluated, *_) = lines_of(real, 0, "start")[0], lines_of(real, 0, "evaluation")
    folder, finished, out = tmp_path / "run", threading.Event(), io.StringIO()
    (folder / "config.toml").parent.mkdir()
    (folder / "config.toml").write_text("independent = true\n")
    path = path_of(folder / "replica-1", 0)
    path.parent.mkdir(parents=True)
    kept = text(begun, like(evaluated, at=1, step=10))
    path.write_text(kept + text(like(evaluated, at=2, step=20)))
    read = Run(folder)
    read.refresh()
    view = threading.Thread(target=watch, args=(read, finished, Console(file=out), 0.001))
    view.start()
    again = like(begun, at=2, step=10, resumed=True)
    new = path.with_suffix(".new")
    new.write_text(kept + text(again, like(evaluated, at=3, step=20)))
    new.replace(path)
    until(lambda: "step 20" in out.getvalue())
    finished.set()
    view.join(timeout=patience(20))
    told = [line.split(" · ")[0] for line in out.getvalue().splitlines()]
    assert told == ["replica 1: goes on from step 10", "step 20"]


def test_the_plain_log_of_a_growing_run_is_in_order_and_each_twentieth_of_it(real: Path, tmp_path: Path) -> None:
    (begun, *_), (trains, *_), (evaluated, *_) = (lines_of(real, 0, kind) for kind in ("start", "step", "evaluation"))
    folder, finished, out = tmp_path / "run", threading.Event(), io.StringIO()
    (folder / "events").mkdir(parents=True)
    path = path_of(folder, 0)
    path.write_text(text(like(begun, steps=400, replicas=1)))
    view = threading.Thread(target=watch, args=(Run(folder), finished, Console(file=out), 0.001))
    view.start()
    for step in range(10, 60, 10):
        with path.open("a") as file:
            file.write(text(like(trains, at=step, step=step)))
        if step % 20 == 0:
            until(lambda step=step: f"step {step}/400" in out.getvalue())
    with path.open("a") as file:
        file.write(text(*(like(evaluated, at=step, step=step) for step in range(1, 50))))
    finished.set()
    view.join(timeout=patience(20))
    lines = out.getvalue().splitlines()
    assert [line.split(" · ")[0] for line in lines if "/400" in line] == ["step 20/400", "step 40/400", "step 50/400"]
    assert [int(line.split()[1]) for line in lines if "validation" in line] == list(range(1, 50))


def test_the_plain_log_tells_the_first_plan_of_memory_and_what_it_took(real: Path, tmp_path: Path) -> None:
    (begun, *_), (trains, *_) = (lines_of(real, 0, kind) for kind in ("start", "step"))
    planned = {
        "event": "memory",
        "replica": 0,
        "at": 1,
        "step": 0,
        "plan": "of 2 layers, 2 keep what they save",
        "cap": 10**9,
    }
    planned |= {"predicted_bytes": 9 * 10**8, "predicted_seconds": 1.5}
    folder = tmp_path / "run"
    (folder / "events").mkdir(parents=True)
    for replica in range(2):
        lines = [begun, planned, trains, planned | {"at": 9, "measured_bytes": 8 * 10**8, "measured_seconds": 1.6}]
        path_of(folder, replica).write_text(text(*(like(line, replica=replica) for line in lines)))
    told = [line for line in watched(Run(folder)) if line.startswith("memory: ")]
    plan = "memory: of 2 layers, 2 keep what they save; 900.0 MB of 1.0 GB"
    assert told == [f"{plan}, 1.5 s a step", f"{plan} (measured: 800.0 MB), 1.5 s a step (measured: 1.6 s)"]


def test_what_is_read_late_is_told_once_and_nothing_else_again(real: Path, tmp_path: Path) -> None:
    """The replicas' clocks began at other moments, so that what one of them writes later may lie before."""
    (begun, *_), (trains, *_), (evaluated, *_) = (lines_of(real, 0, kind) for kind in ("start", "step", "evaluation"))
    (warned,) = lines_of(real, 1, "warning")
    folder, finished, out = tmp_path / "run", threading.Event(), io.StringIO()
    (folder / "events").mkdir(parents=True)
    for replica in range(2):
        path_of(folder, replica).write_text(text(*(like(line, replica=replica) for line in (begun, trains, evaluated))))
    with path_of(folder, 0).open("a") as file:
        file.write(text(like(warned, replica=0, at=5, message="of a run before")))
    run = Run(folder)
    run.refresh()
    view = threading.Thread(target=watch, args=(run, finished, Console(file=out), 0.001))
    view.start()
    for replica, at in ((0, 9), (1, 3), (0, 20)):
        with path_of(folder, replica).open("a") as file:
            file.write(text(like(warned, replica=replica, at=at, message=f"at {at}")))
        until(lambda at=at: f": at {at}" in out.getvalue())
    finished.set()
    view.join(timeout=patience(20))
    told = [line for line in out.getvalue().splitlines() if line.startswith("warning") or "validation" in line]
    assert told == ["warning: replica 0: at 9", "warning: replica 1: at 3", "warning: replica 0: at 20"]


def test_a_run_that_diverged_is_shown_as_such(run: Path) -> None:
    for replica, loss in enumerate((None, 3.0)):
        with path_of(run, replica).open("a") as file:
            file.write(text(like(lines_of(run, replica, "evaluation")[-1], step=30, score=loss)))
    (run / "summary.json").unlink()
    assert any(line.startswith("step 30 · validation loss not finite") for line in watched(Run(run)))
    assert "not finite" in text_of(table(read_run(run)))
    write_report([run], run / "report.html")
    assert "not finite, 3.0000" in (run / "report.html").read_text()


@pytest.mark.parametrize("terminal", [True, False])
def test_watching_begins_before_there_is_anything_to_see(real: Path, tmp_path: Path, terminal: bool) -> None:
    finished = threading.Event()
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=140)
    view = threading.Thread(target=watch, args=(Run(tmp_path / "run"), finished, console, 0.01))
    view.start()
    shutil.copytree(real, tmp_path / "run")
    finished.set()
    view.join(timeout=patience(20))
    assert not view.is_alive()
    assert "20/20" in out.getvalue() and ("noloco" in out.getvalue()) == terminal


def test_the_figures_hold_the_numbers(real: Path) -> None:
    read = read_run(real)
    evaluated = [both(real, "evaluation", step) for step in (10, 20)]
    ats = [max(line["at"] for line in lines) for lines in evaluated]
    tokens, sent = ([2 * mean(lines, value) for lines in evaluated] for value in ("tokens", "bytes_sent"))
    assert tokens == [2 * 10 * 32, 2 * 20 * 32]
    for axis, xs in (("tokens", tokens), ("bytes", [count / 1e6 for count in sent]), ("seconds", ats)):
        (validation,) = (line for line in loss_figure([read], axis).data if line.name == "run, validation")
        assert validation.x == pytest.approx(xs)
        assert validation.y == pytest.approx([mean(lines, "score") for lines in evaluated])
    compute, exchange, waiting = timeline_figure(read).data
    rounds = lines_of(real, 0, "round") + lines_of(real, 1, "round")
    waited = sum(round["landed"] - round["waited_from"] for round in rounds)
    assert len(rounds) == 8 and sum(waiting.x) == pytest.approx(waited)
    assert sum(exchange.x) == pytest.approx(sum(round["finished"] - round["started"] for round in rounds))
    lasted = sum(lines_of(real, replica)[-1]["at"] for replica in (0, 1))
    assert waited > 1 and sum(compute.x) == pytest.approx(lasted - waited)


def test_a_long_run_shows_its_last_rounds_from_where_the_one_before_landed(run: Path) -> None:
    begun, (lost, *others) = lines_of(run, 0)[0], lines_of(run, 0, "round")
    assert lost["outcome"] == "peer lost" and {other["outcome"] for other in others} == {"averaged"}
    times = [(float(number), number + 0.5) for number in range(1, ROUNDS_SHOWN + 11)]
    many = [like(lost, at=end, started=at, finished=end, waited_from=at, landed=end) for at, end in times]
    path_of(run, 0).write_text(text(begun, *many))
    compute, exchange, _ = timeline_figure(read_run(run)).data
    assert exchange.y.count("replica 0, link") == ROUNDS_SHOWN and compute.base[0] == 10.5
    write_report([run], run / "report.html")
    page = (run / "report.html").read_text()
    assert f"The last {ROUNDS_SHOWN} rounds" in page and f"peer lost {ROUNDS_SHOWN + 11}, averaged 3" in page


@pytest.mark.slow
def test_compression_and_adaptation_have_their_pictures_where_there_are_any(
    real: Path, adapting: Path, tmp_path: Path
) -> None:
    for folder, has in ((real, False), (adapting, True)):
        write_report([folder], tmp_path / "report.html")
        page = (tmp_path / "report.html").read_text()
        assert ("<h2>Compression</h2>" in page) == ("<h2>Adaptation</h2>" in page) == has
    steps = [round["started_step"] for round in lines_of(adapting, 0, "round")]
    rounds = [[r for n in (0, 1) for r in lines_of(adapting, n, "round") if r["started_step"] == s] for s in steps]
    assert len(steps) > 3 and {len(each) for each in rounds} == {2}
    read = read_run(adapting)
    (errors,) = compression_figure([read]).data
    assert list(errors.x) == steps
    assert list(errors.y) == pytest.approx([mean(each, "compression_error") for each in rounds]) and max(errors.y) > 0
    shown = {line.name: line for line in adaptation_figure(read).data}
    for value, name in (("effective_rank", "effective rank"), ("every", "steps between rounds")):
        means = [mean(each, value) for each in rounds]
        assert list(shown[name].x) == steps
        assert list(shown[name].y) == pytest.approx([100 * value / means[0] for value in means])


@pytest.mark.slow
def test_the_report_is_one_whole_file_that_needs_no_network(run: Path, adapting: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    summary = summary_of(run, sample="def f():\n    <b>bold</b>", ddp_bytes=30 * summary_of(run)["bytes_sent"])
    write_report([run, adapting], out)
    page = out.read_text(encoding="utf-8")
    own = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"<(script|img|iframe)[^>]+src=|<link[^>]+href=|@import", own)
    assert f"{summary['validation_loss_averaged']:.4f}" in own
    assert f"{nbytes(summary['ddp_bytes'])} (30 times as much)" in own
    blocked, seconds = summary["seconds_blocked"], summary["seconds"]
    assert f"{blocked:.1f} s ({100 * blocked / seconds:.1f}%)" in own
    assert "Virtual time on the simulated network" in own
    assert "<b>bold</b>" not in own and "&lt;b&gt;bold" in own
    # Results, settings, losses, distance, compression, adaptation; timelines, rounds and samples of both; warnings of
    # one.
    assert "Plotly.newPlot" in page and page.count("<section>") == 2 + 3 + 1 + 1 + 1 + 2 + 2 + 2 + 1
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["report.html"]


def test_a_report_says_which_weights_and_which_defaults_and_shows_a_single_point(run: Path) -> None:
    for replica in (0, 1):
        first = [line for line in lines_of(run, replica) if line["step"] <= 10]
        path_of(run, replica).write_text(text(*first))
    settings = html._settings([read_run(run)])
    (run / "config.toml").write_text('method = "noloco"\n')
    other = read_run(run)
    assert "method's default" not in settings
    for figure in (loss_figure([other], "tokens"), consensus_figure([other])):
        assert all("markers" in trace.mode for trace in figure.data if len(trace.x) == 1)
    assert "(of all weights)" in html._results([other])
    (run / "summary.json").unlink()
    assert "(of sampled weights)" in html._results([read_run(run)])
    assert (html._setting(other, "gamma"), html._setting(other, "adapt")) == ("method's default", "unset")


def peer_row(name: str, **facts: Any) -> peers.Row:
    told = {"step": 123456, "behind": 12.0, "loss": 10.1234, "tokens_per_second": 1234567.0, "rounds": 2469}
    return {"name": name, "state": "trains", "heard": 3.2, **told, **facts}


def test_status_is_readable_on_a_narrow_terminal() -> None:
    silent = {"name": "node", "state": "bootstrap", "step": 0, "behind": 0.0, "heard": 1.0}
    rows = [silent, peer_row("a-machine-with-a-long-name.example.org", refused=3), peer_row("bob", state="gone")]
    out = io.StringIO()
    Console(file=out, width=80).print(peers.table(rows))
    title, headings, *lines = out.getvalue().splitlines()
    assert title.strip() == "1 peer in training · 1,234,567 tokens/s"
    assert headings.split() == [
        *("peer", "state", "step", "behind", "loss", "tokens/s", "rounds", "heard", "refused"),
    ]
    assert "…" not in out.getvalue() and max(map(len, out.getvalue().splitlines())) <= 80
    assert [line.split()[1] for line in lines if " ago" in line] == ["trains", "gone", "bootstrap"]


@pytest.mark.parametrize("state", ["trains", "begins", "gone", "bootstrap"])
def test_status_says_that_a_run_may_be_over(state: str) -> None:
    shown = peers.table([peer_row("bob", state=state)])
    assert ("nobody trains now: the run may be over" in str(shown.caption)) is (state in ("gone", "bootstrap"))
    assert not peers.table([], "other peer").caption


def test_status_says_why_a_peer_was_alone() -> None:
    why = "all others who came to this round had found partners"
    out = io.StringIO()
    rows = [peer_row("alice", alone=""), peer_row("bob", alone=why), peer_row("carol", state="gone", alone=why)]
    Console(file=out, width=80).print(peers.table(rows))
    assert [line.strip() for line in out.getvalue().splitlines() if why in line] == [f"bob: {why}"]


def test_status_says_who_holds_the_core_only() -> None:
    out = io.StringIO()
    Console(file=out, width=120).print(peers.table([peer_row("alice"), peer_row("bob", core_only=1.0)]))
    title, headings, *lines = out.getvalue().splitlines()
    assert title and headings.rstrip().endswith("core only")
    assert [line.rstrip().endswith("yes") for line in lines] == [False, True]


def test_status_in_a_pipe_cuts_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    swarms = {"stages": 4, "stage": 1, "queue": 3.0, "microbatches_per_second": 12.5, "sent": 2.5e6}
    swarms |= {"processes": 2, "refused": 1, "bypassed": 4}
    peers.show(lambda: [peer_row("a-name-of-its-own", **swarms)], threading.Event(), once=True)
    told = capsys.readouterr().out.splitlines()
    (row,) = (line for line in told if "a-name-of-its-own" in line)
    assert (
        len(row.split()) == 18
        and "2.5 MB" in row
        and "stage" in told[1]
        and {"microbatches/s", "processes", "refused", "bypassed"} <= {*told[1].split()}
    )


@pytest.mark.parametrize("terminal", [False, True])
def test_the_live_view_of_a_peer_shows_the_others(run: Path, terminal: bool) -> None:
    config = run / "config.toml"
    config.write_text(re.sub('network = ".*"', 'network = "internet"', config.read_text()))
    for path in run.glob("events/replica-1*"):
        path.unlink()
    out, finished, rows = io.StringIO(), threading.Event(), [peer_row("bob"), peer_row("carol", loss=9.5)]
    finished.set()
    watch(Run(run), finished, Console(file=out, force_terminal=terminal, width=80), others=lambda: rows)
    told = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert all(word in told for word in ("2 other peers", "bob", "carol", "123456", "10.1234", "9.5000"))
    assert ("this peer" in told) == terminal and not re.search("consensus distance|replica [0-9]+:", told)


def test_of_many_other_peers_a_line_names_some() -> None:
    rows = [peer_row(name) for name in ("eve", "dan", "carol", "bob")] + [peer_row("left", state="gone")]
    assert peers.line(rows) == (
        "4 other peers · bob at step 123456, loss 10.1234 · carol at step 123456, loss 10.1234 · "
        "dan at step 123456, loss 10.1234 · 1 more"
    )
    assert peers.last_told(rows)[-1] == "left   step 123456, loss 10.1234, 2469 rounds, gone"


def test_a_run_under_way_has_a_report_too(run: Path) -> None:
    (run / "summary.json").unlink()
    write_report([run], run / "report.html")
    page = (run / "report.html").read_text()
    losses = [f"{line['score']:.4f}" for line in both(run, "evaluation", 20)]
    assert "run has not ended" in page and ", ".join(losses) in page
    last = both(run, "step", 20)
    blocked, seconds = mean(last, "seconds_blocked"), max(line["at"] for line in last)
    assert nbytes(2 * mean(last, "bytes_sent")) in page
    assert f"{blocked:.1f} s ({100 * blocked / seconds:.1f}%)" in page


def test_a_swarms_peer_under_way_tells_the_runs_stages_and_what_crosses_between_them(run: Path) -> None:
    (run / "summary.json").unlink()
    (run / "config.toml").write_text('method = "local"\nswarm = true\nstages = 4\n')
    for replica in range(2):
        told = [
            line | ({"boundary_bytes": 1_250_000} if line["event"] == "step" else {}) for line in lines_of(run, replica)
        ]
        path_of(run, replica).write_text("".join(f"{json.dumps(line)}\n" for line in told))
    write_report([run], run / "report.html")
    page = (run / "report.html").read_text()
    assert "<td>stages × shards of a replica</td><td>4 × 1</td>" in page
    assert f"<td>from stage to stage</td><td>{nbytes(2_500_000)}</td>" in page


def test_a_replica_that_has_written_nothing_and_a_run_of_no_time_have_a_report(run: Path) -> None:
    path_of(run, 1).write_text('{"event": "sta')
    summary_of(run, seconds=0.0, seconds_blocked=0.0)
    (run / "config.toml").write_text('method = "nol')
    write_report([run], run / "report.html")
    assert read_run(run).replicas == [0] and "<td>0.0 s</td>" in (run / "report.html").read_text()


def test_bytes_for_people() -> None:
    assert [nbytes(n) for n in (0, 999, 1000, 12_345_678, 5e13)] == ["0 B", "999 B", "1.0 kB", "12.3 MB", "50.0 TB"]


@pytest.mark.slow
def test_the_curves_go_on_when_a_replica_has_died(dead: Path) -> None:
    (end,) = lines_of(dead, 1, "end")
    assert end["reason"] == "died" and 10 < end["step"] < 15
    read = read_run(dead)
    assert read.died() == {1: end["step"]} and read.alive == [0]
    assert [(step, len(events)) for step, events in read.by_step(EvaluationEvent).items()] == [(10, 2), (20, 1)]
    training = loss_figure([read], "tokens").data[0]
    living, gone = lines_of(dead, 0, "step"), lines_of(dead, 1, "step")
    assert [line["step"] for line in gone] == [5, 10]
    # The dead one's tokens stay counted.
    counted = [*gone, gone[-1], gone[-1]]
    assert list(training.x) == [one["tokens"] + other["tokens"] for one, other in zip(living, counted, strict=True)]
    assert list(training.y) == pytest.approx([mean(both(dead, "step", step), "loss") for step in (5, 10, 15, 20)])
    assert plain_line(read).startswith(f"step 20/20 · loss {living[-1]['loss']:.4f}")
    assert f"sent by all {nbytes(living[-1]['bytes_sent'] + gone[-1]['bytes_sent'])}" in plain_line(read)


def test_a_folder_of_runs_is_reported_as_its_runs(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, run.with_name("other"))
    (run.with_name("none")).mkdir()
    assert run_here(monkeypatch, run.parent, "report", ".", "--out", "both.html") == 0
    assert capsys.readouterr().out == "farflung: report of 2 runs in both.html\n"
    page = (run.parent / "both.html").read_text()
    assert "other" in page and "none" not in re.findall(r"<th[^>]*>([^<]*)", page)


def test_what_time_went_to_is_said_in_words() -> None:
    spent = {"gradients": 6.0, "others": 2.0, "batches": 1.5, "rest": 0.5, "texts": 0.0}
    assert shares(spent) == "gradients 60%, waiting for others 20%, waiting for data 15%, all else 5%"
