"""What do DiLoCoX's islands gain on a slow link, over all-reduce every step on it?
Two hosts of two pipeline stages each in network namespaces: inside a host its own loopback, between them 20 Mbit/s;
the baseline is ddp on the same link. Takes some ten minutes, as root.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from bench.lib.store import Store
from bench.lib.table import Part, Table
from bench.lib.training import Finished, flags
from farflung.events import RoundEvent
from farflung.report.read import read_run
from farflung.testing.hosts import NetLab, free_port, run_everywhere, unavailable

needs = unavailable


@dataclass(frozen=True)
class Options:
    model: str = "small"
    """What is trained."""
    steps: int = 200
    """Inner steps with dilocox."""
    synchronous_steps: int = 6
    """Inner steps with all-reduce; 0 leaves it out."""
    every: int = 50
    """Inner steps between dilocox's rounds."""
    rate_mbit: float = 20.0
    """The link between the islands, each way."""
    batch_size: int = 4
    """Sequences in one inner step of one island."""
    sequence_length: int = 64
    """Tokens in one of them."""
    warmup: int = 10
    """Steps in which dilocox's learning rate rises."""


SMOKE = Options("micro", steps=6, synchronous_steps=0, every=2, rate_mbit=100, sequence_length=16, warmup=1)


def trained(options: Options, store: Store, method: str, **settings: object) -> Finished:
    """Two hosts, two processes each, started as one would with torchrun."""
    folder = store.scratch / method
    shutil.rmtree(folder, ignore_errors=True)
    common = {"model": options.model, "method": method, "stages": 2, "microbatches": 2, "out": folder}
    common |= {"batch_size": options.batch_size, "sequence_length": options.sequence_length, "log_every": 1}
    common |= {"eval_every": 100_000, "eval_sequences": 8, "checkpoint_every": 0, "deadline": 600}
    with NetLab(2, options.rate_mbit) as lab:
        torchrun = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", lab.hosts[0].address]
        torchrun += ["--master-port", str(free_port())]
        train = ["-m", "farflung", "train", *flags(common | settings)]
        command = [sys.executable, "-m", "torch.distributed.run", *torchrun]
        run_everywhere(
            lab.hosts,
            lambda host: [*command, "--node-rank", str(host), *train],
            lambda host: {"OMP_NUM_THREADS": "1"},
            timeout_s=1800,
        )
    return Finished(read_run(folder))


def run(options: Options, store: Store) -> Iterator[Part]:
    found = {
        "dilocox": (
            trained(options, store, "dilocox", steps=options.steps, every=options.every, warmup=options.warmup),
            options.steps,
        ),
    }
    if options.synchronous_steps:
        synchronous = trained(options, store, "ddp", steps=options.synchronous_steps)
        found["ddp"] = synchronous, options.synchronous_steps
    overlapped = found["dilocox"][0]
    yield f"{options.model}: 2 islands × 2 stages, {options.rate_mbit:g} Mbit/s between the islands"
    yield f"{overlapped.summary['parameters']:,} parameters, of which each process trains half"
    yield Table(
        {"": "", "tokens/s": ".1f", "sent by all, MB a step": ".3f"},
        [
            (name, finished.tokens_per_second, finished.summary["bytes_sent"] / steps / 1e6)
            for name, (finished, steps) in found.items()
        ],
    )
    if options.synchronous_steps:
        ratio = overlapped.tokens_per_second / synchronous.tokens_per_second
        yield f"{ratio:.1f} times the tokens a second of all-reduce every step"
    rounds = [event for events in overlapped.processes(RoundEvent) for event in events]
    # The last one is landed at once, since the run is over.
    landed = [event for event in rounds if event.step < options.steps and event.group]
    exchange = sum(event.finished - event.started for event in landed)
    blocked = sum(max(0.0, event.finished - event.waited_from) for event in landed)
    yield f"{len(landed)} rounds of single stages: {exchange:.1f} s of exchange, {blocked:.2f} s of them waited for:"
    yield f"{1 - blocked / exchange:.1%} hidden; loss {overlapped.losses[0]:.3f} to {overlapped.losses[-1]:.3f}"
