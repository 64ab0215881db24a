"""Ours beside torchft's DiLoCo and hivemind's averager and optimizer: loss, bytes sent and seconds at 100 Mbit/s.

    sudo python bench/others.py [--steps 200] [--every 20] [--rate-mbit 100] [--seeds 0 1]

Four real processes on hosts in network namespaces of this machine (see netlab.py), with the same model, data, batches,
inner optimizer and rounds. Their libraries go into environments of their own under runs/others. Results go to
bench/results/others.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tyro
from beside import CONTENDERS, REPLICAS
from netlab import NetLab
from recorded import RESULTS, SURROUNDINGS, write_runs

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parent / "runs" / "others"

NEEDED = ("torch", "transformers", "numpy", "safetensors", "tyro", "rich")
"""What a replica of ours needs, in the versions that are installed here."""

LIBRARIES = {"farflung": "", "torchft": "torchft==0.2.0", "hivemind": "hivemind==1.1.12"}


@dataclass(frozen=True)
class Options:
    steps: int = 200
    """Inner steps of each replica."""
    every: int = 20
    """Inner steps between rounds."""
    model: str = "tiny"
    """What is trained."""
    rate_mbit: float = 100.0
    """Each host's link, each way."""
    seeds: tuple[int, ...] = (0, 1)
    """One run of each for each."""


def python_of(library: str) -> str:
    """The interpreter of an environment that has a library; makes it if need be."""
    if not LIBRARIES[library]:
        return sys.executable
    folder = ENVIRONMENTS / library
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        print(f"making an environment for {library} in {folder}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        pins = [f"{name}=={version(name).partition('+')[0]}" for name in NEEDED]
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, *pins, LIBRARIES[library]], check=True)
        subprocess.run([*install, "--no-deps", "-e", str(HERE.parent)], check=True)
        (folder / "ready").touch()
    return str(python)


def run(contender: str, settings: dict[str, Any], rate: float) -> dict[str, Any]:
    """One run: the mean loss of the replicas, what all sent, and the slowest's seconds."""
    python = python_of(CONTENDERS[contender][0])
    with NetLab(REPLICAS, rate) as lab, tempfile.TemporaryDirectory() as scratch:
        first = lab.hosts[0].address
        outputs = lab.run_everywhere(
            lambda number: [
                *(python, str(HERE / "beside.py"), contender, str(number)),
                *(lab.hosts[number].address, json.dumps(settings), scratch),
            ],
            lambda number: {
                "RANK": str(number),
                "WORLD_SIZE": str(REPLICAS),
                "MASTER_ADDR": first,
                "MASTER_PORT": "29555",
                "OMP_NUM_THREADS": "1",
                "FIRST_ADDRESS": first,
                "HIVEMIND_LOGLEVEL": "ERROR",
            },
            timeout=900,
        )
    found = [json.loads(output.strip().splitlines()[-1]) for output in outputs]
    return {
        "loss": sum(each["loss"] for each in found) / REPLICAS,
        "losses": [each["loss"] for each in found],
        "bytes_sent": sum(each["bytes_sent"] for each in found),
        "seconds": max(each["seconds"] for each in found),
    }


def main(options: Options) -> None:
    path = RESULTS / "others.json"
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    common = {
        "model": options.model,
        "steps": options.steps,
        "every": options.every,
        "batch_size": 4,
        "sequence_length": 64,
        "max_tokens": 4_000_000,
        "lr": 3e-3,
    }
    print(f"{'':36} {'loss':>7} {'MB sent':>8} {'seconds':>8}")
    for seed in options.seeds:
        for contender, (library, _) in CONTENDERS.items():
            settings = {**common, "seed": seed}
            key = {"contender": contender, "settings": settings, "rate_mbit": options.rate_mbit}
            found = [kept["result"] for kept in runs if all(kept[name] == value for name, value in key.items())]
            if not found:
                found = [run(contender, settings, options.rate_mbit)]
                runs.append({**key, "result": found[0], "library": LIBRARIES[library], **SURROUNDINGS})
                write_runs(path, runs)
            result = found[0]
            print(
                f"{contender:36} {result['loss']:7.4f} {result['bytes_sent'] / 1e6:8.1f} {result['seconds']:8.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
