"""Does a run wait for data that is on another machine, and has no room on this one's disk?
Packed files of text are on an HTTP server, a process that sends no faster than a link would. A run reads them file by
file into a cache that holds a tenth of them: the share of its time without a batch, once its first file is there, and
the most that was in the cache, beside the same run on text that lies here. Takes ten minutes.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from bench.lib.store import Store
from bench.lib.table import Cell, Part, Table
from farflung.events import StepEvent
from farflung.report.read import read_run
from farflung.workloads import prepared, text

PIECE = 1 << 14
"""Bytes that the server sends at a time."""


@dataclass(frozen=True)
class Options:
    files: int = 100
    """On the server."""
    kilobytes: int = 200
    """Of text in each."""
    share: float = 0.1
    """Of all tokens, what the cache may hold."""
    rate_mbit: float = 1.0
    """What the server sends a second to each that asks."""
    replicas: tuple[int, ...] = (1, 2)
    """Of each run, with a process each."""
    epochs: float = 0.15
    """How much of the text is trained on."""
    model: str = "micro"
    """What is trained."""


SMOKE = Options(files=6, kilobytes=20, rate_mbit=20, replicas=(1,), epochs=0.5)
BATCH, LENGTH = 16, 128
TO_REACH = 0.02


def written(folder: Path, options: Options) -> Path:
    """The files: lines of the standard library in other orders, some of them a document."""
    lines = [line for document in text.documents("stdlib", "") for line in document.splitlines(keepends=True)]
    draw = random.Random(0)
    folder.mkdir(parents=True)
    for number in range(options.files):
        rows, size = [], 0
        while size < options.kilobytes << 10:
            document = "".join(draw.choices(lines, k=40))
            rows.append(json.dumps({"text": document}))
            size += len(document.encode())
        (folder / f"{number:04d}.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    return folder


class Slow(SimpleHTTPRequestHandler):
    """Sends files no faster than a link would."""

    rate = float("inf")

    def copyfile(self, source: Any, outputfile: Any) -> None:
        while piece := source.read(PIECE):
            outputfile.write(piece)
            time.sleep(len(piece) / self.rate)

    def log_message(self, *_: object) -> None: ...


def serve(folder: str, rate_mbit: str) -> None:
    """Serves a folder, and says at which port, until its input ends."""
    Slow.rate = float(rate_mbit) * 1e6 / 8
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Slow, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


@contextmanager
def served(folder: Path, rate_mbit: float) -> Iterator[str]:
    """The address of a folder on a server."""
    command = [sys.executable, "-m", __name__, str(folder), str(rate_mbit)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        yield f"http://127.0.0.1:{server.stdout.readline().strip()}/*.jsonl.gz"
        server.stdin.close()


def trained(options: Options, data: str, replicas: int, out: Path, cache: Path, *more: str) -> int:
    """Trains; the most bytes of tokens that were in the cache."""
    steps = max(5, round(options.epochs * options.files * (options.kilobytes << 10) / (BATCH * LENGTH * replicas)))
    shutil.rmtree(out, ignore_errors=True)
    shutil.rmtree(cache, ignore_errors=True)
    settings = {"model": options.model, "data": data, "replicas": replicas, "method": "local", "steps": steps}
    settings |= {"batch-size": BATCH, "sequence-length": LENGTH, "eval-sequences": 16, "eval-every": steps}
    settings |= {"log-every": 1, "checkpoint-every": steps, "out": out}
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "farflung", "train", *flags, *more]
    environment = {**os.environ, prepared.CACHE: str(cache), "OMP_NUM_THREADS": "1"}
    most = 0
    log = out.with_suffix(".log")
    with log.open("w") as told, subprocess.Popen(command, env=environment, stdout=told, stderr=told) as run:
        while run.poll() is None:
            most = max(most, _held(cache))
            time.sleep(0.1)
    if run.returncode:
        raise RuntimeError(log.read_text())
    return most


def _held(cache: Path) -> int:
    sizes = 0
    for path in cache.glob("shards/*/*.bin"):
        try:
            sizes += path.stat().st_size
        except FileNotFoundError:  # it is removed just now
            continue
    return sizes


def measured(out: Path, replicas: int) -> tuple[float, float, float]:
    """Tokens a second, the share of the time without a batch, and the longest wait, all after each one's first step."""
    run = read_run(out)
    tokens = waited = seconds = longest = 0.0
    for replica in range(replicas):
        first, *others = run.of(replica, StepEvent)
        tokens += (others[-1].tokens - first.tokens) / (others[-1].at - first.at)
        seconds += others[-1].at - first.at
        waits = [(event.spent or {}).get("batches", 0.0) for event in others]
        waited, longest = waited + sum(waits), max(longest, *waits)
    return tokens, waited / seconds, longest


def run(options: Options, store: Store) -> Iterator[Part]:
    folder = store.scratch / "far"
    shutil.rmtree(folder, ignore_errors=True)
    corpus = written(folder, options)
    tokens = options.files * options.kilobytes << 10
    room = options.share * tokens / 1e9

    def rows() -> Iterator[list[Cell]]:
        with served(corpus, options.rate_mbit) as address:
            for replicas in options.replicas:
                for where, data, more in (
                    ("here", str(corpus / "*.jsonl.gz"), ()),
                    ("far away", address, ("--data-room", f"{room:.9f}")),
                ):
                    out, cache = store.scratch / "run", store.scratch / "cache"
                    most = trained(options, data, replicas, out, cache, *more)
                    speed, waiting, longest = measured(out, replicas)
                    yield [where, float(replicas), speed, waiting, longest, most / 1e6 if more else None]

    columns = {"data": "", "replicas": ".0f", "tokens/s": ",.0f", "waited": ".1%", "longest wait s": ".2f"}
    columns |= {"most in the cache MB": ".2f"}
    title = f"{tokens / 1e6:.1f} MB of text, room for {room * 1e3:.2f} MB, a server of {options.rate_mbit:g} Mbit/s"
    yield Table(columns, rows(), f"{title}; to reach: at most {TO_REACH:.0%} of the time waited")


if __name__ == "__main__":
    serve(*sys.argv[1:])
