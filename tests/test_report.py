"""The report room reads a run folder, also one that is being written."""

import base64
import io
import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import patience, until
from rich.console import Console

from farflung.errors import UserError
from farflung.events import EvaluationEvent
from farflung.report import read_run, watch, write_report
from farflung.report.figures import ROUNDS_SHOWN, adaptation_figure, compression_figure, loss_figure, timeline_figure
from farflung.report.live import nbytes, plain_line, table
from farflung.report.read import EventReader


def line(event: str, replica: int, at: float, step: int, **values: Any) -> str:
    return json.dumps({"event": event, "replica": replica, "at": at, "step": step, **values}) + "\n"


def sample(values: list[float]) -> str:
    return base64.b64encode(np.array(values, dtype="<f4").tobytes()).decode()


def evaluation(replica: int, step: int, loss: float | None) -> str:
    weights = sample([replica * step, 1.0, 2.0, 3.0])
    return line("evaluation", replica, step, step, tokens=1, bytes_sent=1, validation_loss=loss, sample=weights)


def make_run(folder: Path, network: str = "torch", name: str = "<b>bold</b>") -> Path:
    (folder / "events").mkdir(parents=True)
    (folder / "config.toml").write_text(f'method = "noloco"\nnetwork = "{network}"\nseed = {len(network)}\n')
    for replica in (0, 1):
        text = line("start", replica, 0, 0, method="noloco", steps=20, replicas=2)
        for step in (10, 20):
            text += line(
                "step",
                replica,
                step / 10 + replica / 100,
                step,
                tokens=step * 100,
                loss=5 - step / 10 + replica,
                lr=0.1,
                tokens_per_second=1000.0,
                rounds=step // 10,
                bytes_sent=step * 1_000_000,
                seconds_blocked=0.5,
            )
            text += line(
                "round", replica, step / 10, step, round=step // 10, fragment=0, group=[0, 1], started_step=step,
                started=step / 10 - 0.3, finished=step / 10 - 0.1, waited_from=step / 10 - 0.2, landed=step / 10,
                bytes_sent=10_000_000, outcome="averaged", reason="",
            )  # fmt: skip
            text += line(
                "evaluation", replica, step / 10, step, tokens=step * 100, bytes_sent=step * 1_000_000,
                validation_loss=4.0 - step / 20 + replica / 2, sample=sample([replica * step, 1.0, 2.0, 3.0]),
            )  # fmt: skip
        text += line("warning", replica, 2, 20, message=f"odd {name}")
        (folder / "events" / f"replica-{replica}.jsonl").write_text(text)
    summary = {
        "method": "noloco", "replicas": 2, "steps": 20, "parameters": 1234567, "tokens": 4000,
        "validation_loss": 3.25, "validation_loss_averaged": 3.125, "validation_loss_per_replica": [3.0, 3.5],
        "bytes_sent": 40_000_000, "ddp_bytes": 1_200_000_000, "rounds": 2, "seconds": 2.0, "seconds_blocked": 0.5,
        "weight_spread": 0.01, "sample": f"def f():\n    {name}",
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_the_spread_is_the_deviation_from_the_mean(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run"))
    # Two replicas differ in one of four weights, by the step: deviations of step/2 in a quarter of the values.
    assert run.spread() == pytest.approx({10: 5 / 2, 20: 10 / 2})


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(line("end", 0, 1, 1, reason="") + '{"event": "en')
    reader = EventReader(path)
    assert [event.step for event in reader.read()] == [1]
    with path.open("a") as file:
        file.write('d", "step": 2, "reason": ""}\n')
    assert [event.step for event in reader.read()] == [2]
    assert reader.read() == []


def test_a_run_that_went_back_to_a_checkpoint_is_read_anew(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    run = read_run(folder)
    path = folder / "events" / "replica-0.jsonl"
    beside = path.with_suffix(".tmp")
    beside.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    beside.replace(path)
    run.refresh()
    assert [event.kind for event in run.events[0]] == ["start", "step"]
    assert len(run.events[1]) > 2


def test_a_file_that_was_cut_in_place_is_read_anew(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    run = read_run(folder)
    path = folder / "events" / "replica-0.jsonl"
    with path.open("r+") as file:
        file.truncate(len(path.read_text().splitlines(keepends=True)[0]))
    run.refresh()
    assert [event.kind for event in run.events[0]] == ["start"]


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


def test_the_table_has_each_replicas_latest_state(tmp_path: Path) -> None:
    rows = [
        re.findall(r"[\w.,]+(?: \w+)?", row) for row in text_of(table(read_run(make_run(tmp_path / "r")))).splitlines()
    ]
    assert ["0", "20", "3.0000", "3.0000", "1,000", "2", "20.0 MB", "0.5 s"] in rows
    assert ["1", "20", "4.0000", "3.5000", "1,000", "2", "20.0 MB", "0.5 s"] in rows


def test_the_plain_log_has_no_boxes_and_says_everything_once(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    finished = threading.Event()
    finished.set()
    out = io.StringIO()
    watch(folder, finished, Console(file=out, force_terminal=False))
    lines = out.getvalue().splitlines()
    assert "step 10 · validation loss 3.7500 · spread 2.5" in lines
    assert lines.count("step 20 · validation loss 3.2500 · spread 5") == 1
    assert "warning: replica 1: odd <b>bold</b>" in lines
    assert lines[-1] == "step 20/20 · loss 3.5000 · 2,000 tokens/s · sent 40.0 MB · blocked 0.5 s · spread 5"
    assert lines[-1] == plain_line(read_run(folder))


def test_the_plain_log_of_a_growing_run_is_in_order_and_each_twentieth_of_it(tmp_path: Path) -> None:
    folder, finished, out = tmp_path / "run", threading.Event(), io.StringIO()
    (folder / "events").mkdir(parents=True)
    path = folder / "events" / "replica-0.jsonl"
    path.write_text(line("start", 0, 0, 0, method="noloco", steps=400, replicas=1))
    view = threading.Thread(target=watch, args=(folder, finished, Console(file=out), 0.001))
    view.start()
    for step in range(10, 60, 10):
        shown = {"tokens": 1, "lr": 0.1, "tokens_per_second": 1, "rounds": 0, "bytes_sent": 0, "seconds_blocked": 0}
        with path.open("a") as file:
            file.write(line("step", 0, step, step, loss=2.0, **shown))
        if step % 20 == 0:
            until(lambda step=step: f"step {step}/400" in out.getvalue())
    with path.open("a") as file:
        file.writelines(evaluation(0, step, 3.0) for step in range(1, 50))
    finished.set()
    view.join(timeout=patience(20))
    lines = out.getvalue().splitlines()
    steps = [text.split(" · ")[0] for text in lines if "/400" in text]
    assert steps == ["step 20/400", "step 40/400", "step 50/400"]
    assert [int(text.split()[1]) for text in lines if "validation" in text] == list(range(1, 50))


def test_a_run_that_diverged_is_shown_as_such(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    with (folder / "events" / "replica-0.jsonl").open("a") as file:
        file.write(evaluation(0, 30, None))
    with (folder / "events" / "replica-1.jsonl").open("a") as file:
        file.write(evaluation(1, 30, 3.0))
    (folder / "summary.json").unlink()
    finished, out = threading.Event(), io.StringIO()
    finished.set()
    watch(folder, finished, Console(file=out))
    assert "step 30 · validation loss not finite" in out.getvalue()
    assert "not finite" in text_of(table(read_run(folder)))
    write_report([folder], folder / "report.html")
    assert "not finite, 3.0000" in (folder / "report.html").read_text()


@pytest.mark.parametrize("terminal", [True, False])
def test_watching_begins_before_there_is_anything_to_see(tmp_path: Path, terminal: bool) -> None:
    finished = threading.Event()
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=140)
    view = threading.Thread(target=watch, args=(tmp_path / "run", finished, console, 0.01))
    view.start()
    make_run(tmp_path / "run")
    finished.set()
    view.join(timeout=patience(20))
    assert not view.is_alive()
    assert "20/20" in out.getvalue() and ("noloco" in out.getvalue()) == terminal


def test_the_figures_hold_the_numbers(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run"))
    for axis, xs in (("tokens", (2000, 4000)), ("bytes", (20.0, 40.0)), ("seconds", (1.0, 2.0))):
        validation = loss_figure([run], axis).data[-1]
        assert validation.name == "run, validation" and validation.x == pytest.approx(xs)
        assert validation.y == pytest.approx((3.75, 3.25))
    compute, exchange, waiting = timeline_figure(run).data
    assert sum(waiting.x) == pytest.approx(4 * 0.2) and sum(exchange.x) == pytest.approx(4 * 0.2)
    assert sum(compute.x) == pytest.approx(2 * 2 - 4 * 0.2)


def test_a_long_run_shows_its_last_rounds_from_where_the_one_before_landed(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    times = [(float(number), number + 0.5) for number in range(1, ROUNDS_SHOWN + 11)]
    (folder / "events" / "replica-0.jsonl").write_text(
        line("start", 0, 0, 0, method="noloco", steps=20, replicas=2)
        + "".join(
            line(
                "round",
                0,
                end,
                1,
                round=1,
                fragment=0,
                group=[0, 1],
                started_step=1,
                started=at,
                finished=end,
                waited_from=at,
                landed=end,
                bytes_sent=1,
                outcome="peer lost",
            )
            for at, end in times
        )
    )
    compute, exchange, _ = timeline_figure(read_run(folder)).data
    assert exchange.y.count("replica 0, link") == ROUNDS_SHOWN and compute.base[0] == 10.5
    write_report([folder], folder / "report.html")
    page = (folder / "report.html").read_text()
    assert f"The last {ROUNDS_SHOWN} rounds" in page and f"peer lost {ROUNDS_SHOWN + 10}, averaged 2" in page


def test_compression_and_adaptation_have_their_pictures_where_there_are_any(tmp_path: Path) -> None:
    plain, adapting = make_run(tmp_path / "plain"), make_run(tmp_path / "adapting")
    for replica in (0, 1):
        path = adapting / "events" / f"replica-{replica}.jsonl"
        with path.open("a") as file:
            for number, (rank, every, nbytes) in enumerate([(40.0, 20, 1000), (30.0, 15, 750)], start=3):
                file.write(
                    line(
                        "round",
                        replica,
                        number,
                        10 * number,
                        round=number,
                        fragment=0,
                        group=[0, 1],
                        started_step=10 * number,
                        started=number,
                        finished=number,
                        waited_from=number,
                        landed=number,
                        bytes_sent=nbytes,
                        outcome="averaged",
                        reason="",
                        compression_error=0.1 * number + replica / 10,
                        effective_rank=rank,
                        share=rank / 40,
                        every=every,
                    )
                )
    write_report([plain], tmp_path / "plain.html")
    write_report([adapting], tmp_path / "adapting.html")
    for title in ("<h2>Compression</h2>", "<h2>Adaptation</h2>"):
        assert title not in (tmp_path / "plain.html").read_text()
        assert title in (tmp_path / "adapting.html").read_text()
    run = read_run(adapting)
    (errors,) = compression_figure([run]).data
    assert list(errors.x) == [10, 20, 30, 40] and list(errors.y) == pytest.approx([0, 0, 0.35, 0.45])
    lines = {line.name: (list(line.x), list(line.y)) for line in adaptation_figure(run).data}
    assert lines["effective rank"] == ([30, 40], [100.0, 75.0])
    assert lines["steps between rounds"] == ([30, 40], [100.0, 75.0])


def test_the_report_is_one_whole_file_that_needs_no_network(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    write_report([make_run(tmp_path / "one"), make_run(tmp_path / "two", network="simulated")], out)
    page = out.read_text(encoding="utf-8")
    own = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"<(script|img|iframe)[^>]+src=|<link[^>]+href=|@import", own)
    assert "3.1250" in own and "1.2 GB (30 times as much)" in own and "0.5 s (25.0%)" in own
    assert "Virtual time on the simulated network: two." in own
    assert "<b>bold</b>" not in own and "&lt;b&gt;bold" in own
    assert "Plotly.newPlot" in page and page.count("<section>") == 5 + 2 + 2 + 2 + 1
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["report.html"]


def test_a_run_under_way_has_a_report_too(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "summary.json").unlink()
    write_report([folder], folder / "report.html")
    page = (folder / "report.html").read_text()
    assert "run has not ended" in page and "40.0 MB" in page and "3.0000, 3.5000" in page and "0.5 s (24.9%)" in page


def test_a_replica_that_has_written_nothing_and_a_run_of_no_time_have_a_report(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "events" / "replica-1.jsonl").write_text('{"event": "sta')
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"seconds": 0.0, "seconds_blocked": 0.0}))
    (folder / "config.toml").write_text('method = "nol')
    write_report([folder], folder / "report.html")
    assert read_run(folder).replicas == [0] and "<td>0.0 s</td>" in (folder / "report.html").read_text()


def test_bytes_for_people() -> None:
    assert [nbytes(n) for n in (0, 999, 1000, 12_345_678, 5e13)] == ["0 B", "999 B", "1.0 kB", "12.3 MB", "50.0 TB"]


def test_the_curves_go_on_when_a_replica_has_died(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    events = run / "events" / "replica-1.jsonl"
    kept = [text for text in events.read_text().splitlines(keepends=True) if json.loads(text)["step"] <= 10]
    events.write_text("".join(kept) + line("end", 1, 1.5, 15, reason="died"))
    read = read_run(run)
    assert read.died() == {1: 15} and read.alive == [0]
    assert [(step, len(events)) for step, events in read.by_step(EvaluationEvent).items()] == [(10, 2), (20, 1)]
    training = loss_figure([read], "tokens").data[0]
    # The dead one's tokens stay counted.
    assert list(training.x) == [2000, 3000] and list(training.y) == [4.5, 3.0]
    assert plain_line(read).startswith("step 20/20 · loss 3")
    assert "sent 30" in plain_line(read)
