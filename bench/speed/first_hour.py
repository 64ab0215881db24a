"""How long does a newcomer wait for farflung's first answers?
Seconds of real processes, each started anew, beside the limits that they are to keep on two idle cores: help, a
mistake, the first step of the smallest model, and the export of a small one. Takes two minutes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.lib.store import Store
from bench.lib.table import Part, Table
from farflung.files import event_files

LONGEST_S = 120


@dataclass(frozen=True)
class Options:
    repeats: int = 3
    """Starts of each command that only tells something; training and exporting are started once."""
    replicas: int = 4
    """Replicas that train."""


SMOKE = Options(repeats=1, replicas=1)


IMPORTED = ("-c", "import torch; from transformers import LlamaForCausalLM")
FARFLUNG = ("-m", "farflung")


def seconds(*arguments: str, code: int = 0, program: tuple[str, ...] = FARFLUNG) -> float:
    """Of a command, from its start to its end."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, *program, *arguments], capture_output=True, timeout=LONGEST_S)
    assert done.returncode == code, done.stderr.decode()
    return time.monotonic() - began


def until_first_step(folder: Path, model: str, replicas: int) -> float:
    """Seconds from the start of training to the first step that all events tell of."""
    settings = f"--model {model} --replicas {replicas} --steps 1 --log-every 1 --out {folder}"
    command = [sys.executable, "-m", "farflung", "train", *settings.split()]
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        taken = 0.0
        while process.poll() is None and time.monotonic() - began < LONGEST_S:
            stepped = [path for path in event_files(folder) if '"event": "step"' in path.read_text()]
            if not taken and len(stepped) == replicas:
                taken = time.monotonic() - began
            time.sleep(0.05)
        process.terminate()
    assert taken, f"no step within {LONGEST_S} s; see {folder / 'logs'}"
    return taken


def run(options: Options, store: Store) -> Iterator[Part]:
    def told(*arguments: str, code: int = 0) -> float:
        return median(seconds(*arguments, code=code) for _ in range(options.repeats))

    def first_step() -> float:
        with tempfile.TemporaryDirectory() as folder:
            return until_first_step(Path(folder) / "run", "micro", options.replicas)

    def exported() -> float:
        with tempfile.TemporaryDirectory() as folder:
            until_first_step(Path(folder) / "run", "tiny", 1)
            return seconds("export", f"{folder}/run", f"{folder}/model")

    seconds(program=IMPORTED)  # so that its files are in memory
    asked: dict[str, tuple[float | None, Callable[[], float]]] = {
        "farflung --help": (0.7, lambda: told("--help")),
        "farflung train --help": (0.7, lambda: told("train", "--help")),
        "farflung train --methd x": (0.7, lambda: told("train", "--methd", "x", code=2)),
        "import of torch and a Llama": (None, lambda: seconds(program=IMPORTED)),
        "first step of micro": (8.0, first_step),
        "export of tiny": (6.0, exported),
    }
    rows = [(what, measure(), limit) for what, (limit, measure) in asked.items()]
    yield Table({"": "", "seconds": ".2f", "limit": ".1f"}, rows, f"{options.replicas} replicas; two idle cores")
