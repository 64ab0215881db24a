"""DiLoCoX's islands: two hosts of two stages each, joined by a slow link; beside all-reduce every step on that link.

    python bench/islands.py [--steps 200] [--rate-mbit 20] [--out runs/bench-islands]

Real processes in network namespaces (see netlab.py): inside a host its own loopback, between them `rate-mbit` each way.
Needs root.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from netlab import NetLab
from real import Finished, flags

from farflung.events import RoundEvent
from farflung.report.read import read_run


@dataclass(frozen=True)
class Options:
    model: str = "small"
    """What is trained."""
    steps: int = 200
    """Inner steps with dilocox."""
    synchronous_steps: int = 6
    """Inner steps with all-reduce."""
    every: int = 50
    """Inner steps between dilocox's rounds."""
    rate_mbit: float = 20.0
    """The link between the islands, each way."""
    batch_size: int = 4
    """Sequences in one inner step of one island."""
    sequence_length: int = 64
    """Tokens in one of them."""
    out: Path = Path("runs/bench-islands")
    """Where the run folders go."""


def run(options: Options, method: str, **settings: object) -> Finished:
    """Two hosts, two processes each, started as one would with torchrun."""
    folder = options.out / method
    shutil.rmtree(folder, ignore_errors=True)
    common = {"model": options.model, "method": method, "stages": 2, "microbatches": 2, "out": folder}
    common |= {"batch_size": options.batch_size, "sequence_length": options.sequence_length, "log_every": 1}
    common |= {"eval_every": 100_000, "eval_sequences": 8, "checkpoint_every": 0, "deadline": 600}
    with NetLab(2, options.rate_mbit) as lab:

        def command(host: int) -> list[str]:
            torchrun = ["--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(host)]
            torchrun += ["--master-addr", lab.hosts[0].address, "--master-port", "29555"]
            train = ["-m", "farflung", "train", *flags(common | settings)]
            return [sys.executable, "-m", "torch.distributed.run", *torchrun, *train]

        lab.run_everywhere(command, lambda host: {"OMP_NUM_THREADS": "1"}, timeout=1800)
    return Finished(read_run(folder))


def main(options: Options) -> None:
    print(f"{options.model}: 2 islands × 2 stages, {options.rate_mbit:g} Mbit/s between the islands")
    overlapped = run(options, "dilocox", steps=options.steps, every=options.every, warmup=10)
    synchronous = run(options, "ddp", steps=options.synchronous_steps)
    rounds = [event for events in overlapped.processes(RoundEvent) for event in events]
    # The last one is landed at once, since the run is over.
    landed = [event for event in rounds if event.step < options.steps and event.group]
    exchange = sum(event.finished - event.started for event in landed)
    blocked = sum(max(0.0, event.finished - event.waited_from) for event in landed)
    parameters = overlapped.summary["parameters"]
    print(f"{parameters:,} parameters, of which each process trains half\n")
    print(f"{'':8} {'tokens/s':>9} {'sent by all, MB a step':>23}")
    for name, finished, steps in (
        ("dilocox", overlapped, options.steps),
        ("ddp", synchronous, options.synchronous_steps),
    ):
        sent = finished.summary["bytes_sent"] / steps / 1e6
        print(f"{name:8} {finished.tokens_per_second:9.1f} {sent:23.3f}")
    ratio = overlapped.tokens_per_second / synchronous.tokens_per_second
    print(f"\n{ratio:.1f} times the tokens a second of all-reduce every step")
    print(f"{len(landed)} rounds of single stages: {exchange:.1f} s of exchange, {blocked:.2f} s of them waited for:")
    print(f"{1 - blocked / exchange:.1%} hidden; loss {overlapped.losses[0]:.3f} to {overlapped.losses[-1]:.3f}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
