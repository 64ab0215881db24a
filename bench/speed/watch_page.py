"""Is the page to watch there at once, and does it leave the machine to training?
A run folder of many replicas and lines is made; `farflung watch` is started on it, and a headless browser opens the
page as soon as there is an address. Then every replica writes a line a second, the page asks for news all the while,
and the server's processor time is taken. Wanted: paint within 2 s, less than 2 % of a core. Takes a minute or two.
"""

from __future__ import annotations

import base64
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.lib.store import Store
from bench.lib.table import Part, Table
from farflung.events import EvaluationEvent, Event, RoundEvent, StartEvent, StepEvent, line_of
from farflung.settings import Settings, settings_toml
from farflung.testing.waiting import until

CHROMIUM = Path("/usr/bin/chromium")
EVERY, LOG_EVERY, EVAL_EVERY = 50, 5, 500
"""Inner steps between rounds, lines on steps, and evaluations."""
STEP_S = 0.2
DRAWN = """() => {
    const wanted = document.querySelectorAll("script.figure").length;
    return wanted > 3 && document.querySelectorAll(".js-plotly-plot .main-svg").length >= wanted
        && document.querySelector("#now table") !== null;
}"""


@dataclass(frozen=True)
class Options:
    replicas: int = 64
    """Replicas of the run."""
    lines: int = 100_000
    """Lines of events that are there already."""
    seconds: float = 30
    """How long the page is watched while the run goes on."""
    openings: int = 3
    """How often the command is started anew and the page opened."""


SMOKE = Options(replicas=4, lines=400, seconds=2, openings=1)


def needs() -> str:
    """Why it cannot run here; "" where it can."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "needs playwright: pip install playwright"
    return "" if CHROMIUM.exists() else f"needs a browser: there is no {CHROMIUM}"


class Writer:
    """Writes the events of one replica, step by step."""

    def __init__(self, folder: Path, replica: int, replicas: int, steps: int) -> None:
        self._path = folder / "events" / f"replica-{replica}.jsonl"
        self._replica, self._replicas = replica, replicas
        self._random = np.random.default_rng(replica)
        self.step = 0
        self._told: list[Event] = [
            StartEvent(replica=replica, step=0, method="noloco", replicas=replicas, steps=steps, parameters=10**7)
        ]

    def advance(self) -> int:
        """Goes on to the next line about a step; returns how many lines it has come to."""
        self.step += LOG_EVERY
        at, loss = self.step * STEP_S, 2 + 4 * math.exp(-self.step / 2000) + 0.05 * float(self._random.normal())
        done: dict[str, Any] = {"tokens": self.step * 1024, "bytes_sent": self.step // EVERY * 40_000_000}
        common: dict[str, Any] = {"replica": self._replica, "at": at, "step": self.step}
        told: list[Event] = [
            StepEvent(
                **common, **done, loss=loss, lr=0.01, tokens_per_second=5000.0, rounds=self.step // EVERY,
                seconds_blocked=0.03 * at, peak_memory=2 * 10**9,
            )
        ]  # fmt: skip
        if self.step % EVERY == 0:
            number = self.step // EVERY
            partner = (number - self._replica) % self._replicas
            told.append(
                RoundEvent(
                    **common, round=number, fragment=0, group=sorted({self._replica, partner}), started_step=self.step,
                    started=at - 1.2, finished=at - 0.1, waited_from=at - 0.2, landed=at - 0.1, outcome="averaged",
                    bytes_sent=40_000_000,
                )
            )  # fmt: skip
        if self.step % EVAL_EVERY == 0:
            weights = self._random.normal(size=1024).astype("<f4").tobytes()
            sample = base64.b64encode(weights).decode()
            told.append(EvaluationEvent(**common, **done, score=loss + 0.1, sample=sample))
        self._told += told
        return len(told)

    def write(self) -> None:
        """Appends what it has come to."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(b"".join(line_of(event) + b"\n" for event in self._told))
        self._told.clear()


def made_run(folder: Path, replicas: int, lines: int) -> list[Writer]:
    """A run folder with about so many lines, and who goes on writing them."""
    writers = [Writer(folder, replica, replicas, steps=LOG_EVERY * lines) for replica in range(replicas)]
    count = len(writers)
    while count < lines:
        count += sum(writer.advance() for writer in writers)
    for writer in writers:
        writer.write()
    settings = Settings.of(replicas=replicas, method="noloco", every=EVERY, steps=LOG_EVERY * lines)
    (folder / "config.toml").write_text(settings_toml(settings))
    return writers


@contextmanager
def watching(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str, float]]:
    """The command on a folder, the page's address, and how long this took to come, in seconds."""
    began = time.monotonic()
    command = [sys.executable, "-m", "farflung", "watch", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        line = process.stdout.readline()
        yield process, line.split("watching at ")[1].split(";")[0], time.monotonic() - began
    finally:
        process.terminate()
        process.wait(30)


def processor_s(process: subprocess.Popen[str]) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def go_on(writers: list[Writer], over: threading.Event) -> None:
    """Every replica writes each second, until it is over."""
    while not over.wait(1.0):
        for writer in writers:
            writer.advance()
            writer.write()


def run(options: Options, store: Store) -> Iterator[Part]:
    with tempfile.TemporaryDirectory() as scratch:
        yield _measured(options, Path(scratch) / "run")


def _measured(options: Options, folder: Path) -> Table:
    from playwright.sync_api import sync_playwright

    writers = made_run(folder, options.replicas, options.lines)
    firsts, alls, starts, spent, share = [], [], [], [], 0.0
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        for opening in range(options.openings):
            with watching(folder) as (process, address, seconds):
                page = browser.new_page(viewport={"width": 1600, "height": 1000})
                began = time.monotonic()
                page.goto(address, wait_until="commit")
                until(lambda: page.evaluate(DRAWN), 60)  # noqa: B023
                alls.append(time.monotonic() - began)
                spent.append(processor_s(process))
                first = 'performance.getEntriesByName("first-contentful-paint")[0].startTime / 1000'
                firsts.append(page.evaluate(first))
                starts.append(seconds)
                if opening == options.openings - 1:
                    share = _share_of_a_core(process, writers, options.seconds)
                page.close()
        browser.close()
    rows = [
        ("the command, until it tells the address", f"{max(starts):.2f} s", ""),
        ("first paint, from opening the page", f"{max(firsts):.2f} s", "< 2 s"),
        ("all pictures drawn, from opening the page", f"{max(alls):.2f} s", "< 2 s"),
        ("the command's processor seconds until then", f"{max(spent):.2f} s", ""),
        (f"processor, over {options.seconds:g} s of a line a replica and second", f"{share:.2%} of a core", "< 2 %"),
    ]
    size = sum(path.stat().st_size for path in folder.glob("events/*")) / 1e6
    title = f"{options.replicas} replicas, {options.lines:,} lines ({size:.0f} MB); the slowest of {options.openings}"
    return Table({"what": "", "measured": "", "wanted": ""}, rows, title)


def _share_of_a_core(process: subprocess.Popen[str], writers: list[Writer], seconds: float) -> float:
    over = threading.Event()
    writing = threading.Thread(target=go_on, args=(writers, over))
    writing.start()
    time.sleep(min(3.0, seconds))  # what opening the page took is not counted
    before, began = processor_s(process), time.monotonic()
    while time.monotonic() - began < seconds:
        time.sleep(0.2)
    share = (processor_s(process) - before) / (time.monotonic() - began)
    over.set()
    writing.join()
    return share
