"""The page to watch: what is followed line by line is what a whole reading gives, and a browser sees a replica die."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import signal
import socket
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import patience, until
from processes import SMALL, run_here, trained
from swarm import Swarm
from test_report import DEATH, SHORT, simulated
from warm import Python

from bench.speed.watch_page import CHROMIUM, DRAWN, made_run, needs
from farflung import Simulation
from farflung.events import RoundEvent, StepEvent, TextEvent, WarningEvent, line_of
from farflung.files import lock_holders
from farflung.pipeline import Island
from farflung.pipeline.assemble import assemble
from farflung.report import read_run
from farflung.report.facts import Facts
from farflung.report.rounds import Rounds
from farflung.report.watching import Followed, Visited, view
from farflung.report.watching.view import View
from farflung.settings import Settings
from farflung.training.writing import FIRST_S, Writing
from farflung.workloads import continuing

AXES = ("tokens", "bytes", "seconds", "steps")
WHAT = ("training", "validation", 0, 1)
COLOURS = "[getComputedStyle(document.body).backgroundColor, plots()[0].layout.font.color]"
BROWSER = pytest.mark.skipif(bool(needs()), reason=needs())


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two replicas, and 20 steps."""
    return trained(tmp_path_factory, *SHORT, "--method", "noloco", "--every", "5")


@pytest.fixture(scope="module")
def dead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose replica 1 dies between its steps 10 and 15."""
    return simulated(tmp_path_factory, DEATH, "--method", "noloco", "--every", "5", "--deadline", "3")


@pytest.fixture(autouse=True)
def looked_at_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "REFRESH_SECONDS", 0.0)


def lines(run: Facts) -> dict[str, Any]:
    wanted: Any = [("distance", "steps"), *((what, axis) for what in WHAT for axis in AXES)]
    return {f"{what} {axis}": [list(one) for one in run.line(what, axis)] for what, axis in wanted}


def copied(run: Path, folder: Path) -> Path:
    """The run's settings, in a folder without events."""
    (folder / "events").mkdir(parents=True)
    shutil.copy(run / "config.toml", folder)
    return folder


def grow(folder: Path, run: Path, seed: int, most: int = 4000) -> Iterator[None]:
    """Appends a run's events to a folder's, cut anywhere, now of one replica, now of another."""
    chance = random.Random(seed)
    rest = {path.name: path.read_bytes() for path in run.glob("events/*")}
    while rest:
        name = chance.choice(sorted(rest))
        size = chance.randint(1, most)
        with (folder / "events" / name).open("ab") as file:
            file.write(rest[name][:size])
        rest[name] = rest[name][size:]
        rest = {name: left for name, left in rest.items() if left}
        yield


@pytest.mark.parametrize("which", ["real", "dead"])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_followed_piece_by_piece_is_what_a_whole_reading_gives(
    which: str, seed: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run = request.getfixturevalue(which)
    folder = copied(run, tmp_path / "run")
    followed = Followed(folder)
    for _ in grow(folder, run, seed):
        followed.refresh()
        assert not followed.fault
    expected = lines(read_run(run))
    assert lines(followed) == expected and len(expected["training tokens"][0]) == 4
    assert followed.replicas == [0, 1] and (followed.state(followed.kept.replicas[1]) == "died") == (which == "dead")


def test_a_run_that_went_back_to_a_checkpoint_is_followed_anew(real: Path, tmp_path: Path) -> None:
    shutil.copytree(real, tmp_path / "run")
    followed = Followed(tmp_path / "run")
    followed.refresh()
    before = followed.generation
    for path in (tmp_path / "run").glob("events/*"):
        text = path.read_bytes()
        path.with_suffix(".tmp").write_bytes(b"".join(text.splitlines(keepends=True)[:4]))
        path.with_suffix(".tmp").replace(path)
    followed.refresh()
    assert lines(followed) == lines(read_run(tmp_path / "run")) and followed.generation != before


def test_of_a_long_run_lines_have_some_hundred_points_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    writers = made_run(tmp_path, replicas=2, lines=8000)
    followed, whole = Followed(tmp_path), read_run(tmp_path)
    followed.refresh()
    for axis in AXES:
        told = list(zip(*followed.line("training", axis), strict=True))
        every = list(zip(*whole.line("training", axis), strict=True))
        assert set(told) <= set(every) and 200 < len(told) < 1000 < len(every)
        assert told[0] == every[0] and every.index(told[-1]) >= len(every) - 2
    assert list(followed.line("distance", "steps")[1]) == list(whole.line("distance", "steps")[1])
    for writer in writers:
        writer.advance()
        writer.write()
    followed.refresh()
    assert followed.line("training", "steps")[0][-1] == writers[0].step


def points_of(figures: list[dict[str, Any]]) -> list[list[tuple[Any, Any]]]:
    return [[(list(trace["x"]), list(trace["y"])) for trace in figure["data"]] for figure in figures]


def figures_in(page: str) -> list[dict[str, Any]]:
    found = re.findall(r'<script type="application/json" class="figure">(.*?)</script>', page, re.DOTALL)
    return [json.loads(text) for text in found]


def test_a_page_that_takes_in_all_news_is_as_one_made_anew(real: Path, tmp_path: Path) -> None:
    folder = copied(real, tmp_path / "run")
    shown, epoch, since, figures = View([Followed(folder)]), "", 0, []
    kept = 0
    for _ in grow(folder, real, seed=5, most=600):
        have = [[len(trace["x"]) for trace in figure["data"]] for figure in figures]
        news = json.loads(json.dumps(shown.news(epoch, since, have)))
        since = news["since"]
        if news["epoch"] != epoch:
            page = shown.page()
            figures, epoch = figures_in(page), re.findall('data-epoch="(.*?)"', page)[0]
            continue
        kept += bool(news["points"])
        for number, traces in news["points"].items():
            for place, (xs, ys) in traces.items():
                figures[int(number)]["data"][int(place)]["x"] += xs
                figures[int(number)]["data"][int(place)]["y"] += ys
    assert kept and points_of(figures) == points_of(figures_in(View([Followed(folder)]).page()))
    assert shown.news(epoch, since, [[len(t["x"]) for t in f["data"]] for f in figures])["points"] == {}


def section(page: str, name: str) -> str:
    return re.findall(rf'<section id="{name}".*?</section>', page, re.DOTALL)[0]


def test_what_is_wrong_is_said_and_names_cannot_become_html(dead: Path, tmp_path: Path) -> None:
    shutil.copytree(dead, tmp_path / "<b>x")
    with (tmp_path / "<b>x" / "events" / "replica-0.jsonl").open("ab") as file:
        last = {"replica": 0, "at": 99.0, "step": 21}
        told: list[Any] = [
            WarningEvent(**last, message="odd <i>"),
            TextEvent(**last, text="<script>alert(1)</script>"),
            StepEvent(
                **last, tokens=1, bytes_sent=1, loss=math.nan, lr=0.1, tokens_per_second=1.0, rounds=1,
                seconds_blocked=50.0,
            ),
        ]  # fmt: skip
        file.write(b"".join(line_of(event) + b"\n" for event in told))
    (tmp_path / "<b>x" / "summary.json").unlink()
    page = View([Followed(tmp_path / "<b>x")]).page()
    warnings = section(page, "warnings")
    assert re.search("<b>replica 1</b> has died, at step 1[0-5]", warnings)
    assert "<b>replica 0</b> has a training loss that is not finite, at step 21" in warnings
    assert "step 21:</span> odd &lt;i&gt;" in warnings
    assert "&lt;script&gt;alert(1)" in section(page, "run-0-2") and "after step 21" in section(page, "run-0-2")
    assert "<b>x" not in page.partition("<script")[2] and "&lt;b&gt;x" in page


def test_a_folder_that_is_deleted_is_told_and_what_comes_in_its_place_is_followed(real: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(real, folder)
    page = View([followed := Followed(folder)])
    page.page()
    shutil.rmtree(folder)
    assert f"{folder} holds no events any more" in section(page.page(), "warnings")
    shutil.copytree(real, folder)
    assert "any more" not in page.page() and lines(followed) == lines(read_run(real))


def test_a_replica_that_writes_nothing_is_silent_and_the_others_lines_go_on(real: Path, tmp_path: Path) -> None:
    folder = copied(real, tmp_path / "run")
    events = {path.name: path.read_bytes().splitlines(keepends=True) for path in real.glob("events/*")}
    for name, text in events.items():
        (folder / "events" / name).write_bytes(b"".join(text[:6] if name == "replica-1.jsonl" else text[:-1]))
    followed = Followed(folder)
    followed.refresh()
    before = len(followed.line("training", "steps")[0])
    os.utime(folder / "events" / "replica-1.jsonl", (1, 1))
    followed.refresh()
    assert [followed.state(one) for one in followed.kept.replicas.values()] == ["trains", "silent"]
    assert len(followed.line("training", "steps")[0]) == 4 > before
    assert "is silent: it has written nothing for" in section(View([followed]).page(), "warnings")


def met(number: int, replica: int, group: list[int], outcome: str = "averaged") -> RoundEvent:
    times = {"started": 1.0, "finished": 1.5, "waited_from": 1.0, "landed": 1.5}
    return RoundEvent(
        replica=replica, step=20 * number, round=number, fragment=0, group=group, started_step=20 * number,
        outcome=outcome, bytes_sent=2_000_000, **times,
    )  # fmt: skip


def test_a_round_is_drawn_as_who_met_whom() -> None:
    rounds = Rounds()
    for number in range(1, 9):
        for replica, group in enumerate([[0, 3], [1, 2], [1, 2], [0, 3]]):
            rounds.add(met(number, replica, group))
    html = rounds.html(range(4), {})
    assert html.count("<figure>") == 6 and "round 8, after step 160: 2 pairs, 2.0 MB each, 0.50 s" in html
    assert html.index("round 8,") < html.index("round 3,") and "round 2," not in html
    first = html.partition("</figure>")[0]
    assert first.count("<line") == 4 and first.count("<circle") == 4  # a pair's line has two halves
    ends = re.findall(r'<line x1="(.*?)" y1="(.*?)" x2="(.*?)" y2="(.*?)"><title>0, 3:', first)
    assert [one[:2] for one in ends] == [("100.0", "22.0"), ("22.0", "100.0")] and len({one[2:] for one in ends}) == 1
    lost = Rounds()
    lost.add(met(1, 0, [], "peer lost"))
    lost.add(met(1, 1, [], "sat out"))
    html = lost.html(range(2), {})
    assert 'class="lost"' in html and 'class="out"' in html and "0 pairs" in html and "1 not averaged" in html


def test_peers_are_shown_as_a_ticket_lets_this_machine_see_them() -> None:
    row = {"name": "alice", "state": "trains", "step": 40, "behind": 0.0, "heard": 1.0}
    row |= {"loss": 2.5, "tokens_per_second": 90.0, "rounds": 2, "refused": 3}
    rows = [row, {**row, "name": "<i>bob", "state": "gone", "step": 30}]
    page = View([Visited("home", {"method": "noloco"}, lambda: rows)]).page()
    assert [figure["layout"]["xaxis"]["title"]["text"] for figure in figures_in(page)] == ["seconds"]
    peers = section(page, "run-0-0")
    assert "<th>refused</th>" in peers and "<td>alice</td><td>trains</td><td>40</td>" in peers
    assert "<b>&lt;i&gt;bob</b> is gone, since step 30" in section(page, "warnings")
    assert "1 peer in training" in section(page, "now") and "90 a second now" in section(page, "now")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["empty"], "empty holds no run: there are no events in it; give a folder that farflung train made"),
        (["nosuch"], "there is no nosuch; name a run folder"),
        ([], "no run is given; give at least one folder"),
        (["run", "--port", "70000"], "choose another with --port"),
        (["run/config.toml"], "run/config.toml"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    arguments: list[str],
    words: str,
    real: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(real, tmp_path / "run")
    (tmp_path / "empty").mkdir()
    assert run_here(monkeypatch, tmp_path, "watch", *arguments) == 2
    told = capsys.readouterr().err
    assert words in told and told.count("\n") == 1


def test_a_port_in_use_and_a_package_that_is_missing_are_told_with_the_remedy(
    real: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run_here(monkeypatch, real.parent, "watch", real.name, "--port", str(port)) == 2
    assert capsys.readouterr().err == (
        f"farflung: port {port} is in use; choose another with --port, or --port 0 for a free one\n"
    )
    for name in [name for name in sys.modules if name.startswith("farflung.report.watching")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("farflung.report.watching")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert run_here(monkeypatch, real.parent, "watch", real.name) == 2
    assert "install it with: pip install 'farflung[watch]'" in capsys.readouterr().err


def with_island(case: Any) -> None:
    """Calls something with a replica that one process has all of."""
    config = Settings.of(model="micro", replicas=1, sequence_length=16, max_tokens=100_000, network="simulated")
    workload, device = config.made_workload(), torch.device("cpu")

    def replica(network: Any) -> None:
        case(assemble(config.island, workload, network, config.mesh(), 0, config.network, device)[0])

    Simulation(1).run(replica)


def test_writing_changes_no_weight_and_no_random_number_of_training() -> None:
    def case(island: Island) -> None:
        before = {name: value.clone() for name, value in island.model.state_dict().items()}
        torch.manual_seed(3)
        state = torch.get_rng_state()
        writing = Writing(island, 0.02)
        assert writing.sample(torch.device("cpu")) == writing.sample(torch.device("cpu")) != ""
        assert torch.equal(torch.get_rng_state(), state) and island.model.training
        assert all(torch.equal(before[name], value) for name, value in island.model.state_dict().items())
        with torch.no_grad():
            for parameter in island.model.parameters():
                parameter.fill_(torch.nan)
        assert writing.sample(torch.device("cpu")) == "" and island.model.training
        assert torch.equal(torch.get_rng_state(), state)

    with_island(case)


def test_a_text_ends_where_it_is_once_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def case(island: Island) -> None:
        whole = island.sample()
        monkeypatch.setattr(continuing, "SAMPLE_S", 1e-9)
        cut = island.sample()
        assert len(cut) == 8 + 1 and whole.startswith(cut[:8]) and len(whole) > len(cut)

    with_island(case)


class Slow:
    """Something to sample from, which takes so many seconds on a clock of its own."""

    samples_beside = False

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds = 0.0, seconds

    def sample(self) -> str:
        self.now += self.seconds
        return "text"


@pytest.mark.parametrize("seconds", [0.1, 0.39, 3.0, 40.0])
def test_writing_takes_its_share_of_the_time_and_no_more(seconds: float) -> None:
    slow: Any = Slow(seconds)
    writing, first, spent = Writing(slow, 0.02, lambda: slow.now), True, 0.0
    while slow.now < 20_000:
        slow.now += 0.7  # a step
        if writing.due():
            assert slow.now >= FIRST_S and (first or spent + seconds <= 0.02 * slow.now)
            writing.sample(torch.device("cpu"))
            first, spent = False, spent + seconds
    assert 0.75 * 0.02 * 20_000 < spent <= 0.02 * slow.now
    never = Writing(slow, 0.0, lambda: slow.now)
    slow.now += 1e6
    assert not never.due()


def test_a_sample_that_others_make_keeps_nobody_from_training() -> None:
    """A head of a swarm had stood for two minutes, each time that the stages wrote a text for it."""
    slow: Any = Slow(5.0)
    slow.samples_beside, comes = True, threading.Event()
    slow.sample = lambda: comes.wait(60) and Slow.sample(slow)
    writing = Writing(slow, 0.02, lambda: slow.now)
    slow.now = FIRST_S
    assert writing.due() and writing.sample(torch.device("cpu")) == ""
    assert not writing.due()
    comes.set()
    until(writing.due)
    assert writing.sample(torch.device("cpu")) == "text"
    assert not writing.due()
    slow.now = 10 / 0.02
    assert writing.due()


@contextmanager
def served(*arguments: object) -> Iterator[str]:
    """The page's address while the command serves it."""
    process = Python("-m", "farflung", "watch", *arguments, "--port", 0)
    try:
        until(lambda: "watching at" in process.out.read_text() or process.poll() is not None)
        assert process.poll() is None, process.err.read_text()
        yield process.out.read_text().split("watching at ")[1].split(";")[0]
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(patience(30)) == 0, process.err.read_text()


def pid_of(folder: Path, replica: int) -> int:
    """The process that writes a replica's events."""
    inode = (folder / "events" / f"replica-{replica}.jsonl").stat().st_ino
    assert inode in (lock_holders() or ())
    found = re.findall(rf"FLOCK +ADVISORY +WRITE +(\d+) +\S+:{inode} ", Path("/proc/locks").read_text())
    return int(found[0])


@pytest.mark.slow
@BROWSER
def test_a_browser_sees_a_run_fill_the_page_and_a_replica_that_is_killed(real: Path, tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    folder, faults = tmp_path / "live", list[str]()
    training = Python(
        "-m", "farflung", "train", *SMALL, "--replicas", 2, "--every", 5, "--steps", 10**6, "--out", folder
    )
    try:
        until(lambda: len(list(folder.glob("events/*"))) == 2)
        with served(folder, real) as address, sync_playwright() as started:
            browser = started.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
            pages = []
            for width in (400, 1600):
                page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="light")
                page.on("console", lambda told: faults.append(told.text) if told.type == "error" else None)
                page.on("pageerror", lambda error: faults.append(str(error)))
                page.goto(address)
                pages.append((page, width))
            # The page lets no text become a program, so that what is waited for is asked from outside.
            for page, width in pages:
                until(lambda page=page: page.evaluate(DRAWN))
                until(lambda page=page: page.evaluate("document.querySelector('#run-0-1 line') !== null"))  # they met
                until(lambda page=page: page.evaluate("plots()[0].data[0].x.length > 3"))
                assert page.evaluate("document.documentElement.scrollWidth") == width
            for page, width in pages:
                before = page.evaluate(COLOURS)
                page.emulate_media(color_scheme="dark")
                until(lambda page=page, before=before: not set(page.evaluate(COLOURS)) & set(before))
                assert page.evaluate("document.documentElement.scrollWidth") == width
            os.kill(pid_of(folder, 1), signal.SIGKILL)
            for page, width in pages:
                until(lambda page=page: "replica 1 is dead" in page.inner_text("#warnings"))
                until(lambda page=page: "dead" in page.inner_text("#run-0-0"))
                assert page.evaluate("document.documentElement.scrollWidth") == width
            assert not faults
            browser.close()
    finally:
        training.kill()


def test_a_folder_of_runs_is_watched_as_its_runs(real: Path, tmp_path: Path) -> None:
    for name in ("one", "other"):
        shutil.copytree(real, tmp_path / "runs" / name)
    (tmp_path / "runs" / "none").mkdir()
    with served(tmp_path / "runs") as address, urllib.request.urlopen(f"{address}/now", timeout=patience(30)) as answer:
        now = answer.read().decode()
    assert set(re.findall(r"\b(one|other|none)\b", "".join(re.findall(r"<h2[^>]*>.*?</h2>", now)))) == {"one", "other"}


@pytest.mark.slow
def test_a_ticket_leads_to_the_peers_and_a_page_elsewhere_gets_nothing(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    try:
        swarm.invite("--as", "alice")
        with served(tmp_path / "run.ticket") as address:

            def now() -> str:
                with urllib.request.urlopen(f"{address}/now", timeout=patience(30)) as answer:
                    return str(answer.read().decode())

            until(lambda: "<td>alice</td><td>trains</td>" in now())
            until(lambda: figures_in(now())[0]["data"][0]["y"])  # it has told its loss
            other = urllib.request.Request(address, headers={"Host": "evil.example"})
            with pytest.raises(urllib.error.HTTPError, match="400"):
                urllib.request.urlopen(other, timeout=patience(30))
    finally:
        for process in swarm.processes:
            process.kill()
