"""How does farflung compare with torchft's DiLoCo and with hivemind's averager and optimizer?
Loss, bytes on the wire and seconds of four real processes on hosts in network namespaces, links of 100 Mbit/s, with
the same model, data, batches, inner optimizer and rounds; their libraries, the baselines, go into environments of
their own, which needs the internet once. Takes about half an hour on two cores, as root.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

from bench.lib.contenders import CONTENDERS, REPLICAS
from bench.lib.environments import LIBRARIES, python_of
from bench.lib.runs import around
from bench.lib.store import ROOT, Result, Settings, Store
from bench.lib.table import Cell, Part, Table
from farflung.testing.hosts import NetLab, run_everywhere, torch_rendezvous, unavailable

needs = unavailable


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
    contenders: tuple[str, ...] = tuple(CONTENDERS)
    """Who trains."""


SMOKE = Options(steps=2, every=1, model="micro", seeds=(0,), contenders=("farflung noloco",))


def settings_of(options: Options, contender: str) -> Settings:
    """What one contender's run is kept under."""
    return {
        "contender": contender,
        "library": LIBRARIES[CONTENDERS[contender][0]],
        "rate_mbit": options.rate_mbit,
        "model": options.model,
        "steps": options.steps,
        "every": options.every,
        "batch_size": 4,
        "sequence_length": 64,
        "max_tokens": 4_000_000,
        "lr": 3e-3,
    }


def run(options: Options, store: Store) -> Iterator[Part]:
    def rows() -> Iterator[tuple[Cell, ...]]:
        for seed in options.seeds:
            for contender in options.contenders:
                settings = settings_of(options, contender)
                result = store.once(settings, seed, lambda: measured(settings, seed))  # noqa: B023
                yield contender, seed, result["loss"], result["bytes_sent"] / 1e6, result["seconds"]

    yield Table({"": "", "seed": "d", "loss": ".4f", "MB sent": ".1f", "seconds": ".1f"}, rows())


def measured(settings: Settings, seed: int) -> Result:
    """One run: the mean loss of the replicas, what all sent, and the slowest's seconds."""
    contender = settings["contender"]
    passed = {key: value for key, value in settings.items() if key not in ("contender", "library", "rate_mbit")}
    python = python_of(CONTENDERS[contender][0])
    with NetLab(REPLICAS, settings["rate_mbit"]) as lab, tempfile.TemporaryDirectory() as scratch:
        first = lab.hosts[0].address
        common = {**torch_rendezvous(REPLICAS, first), "FIRST_ADDRESS": first, "HIVEMIND_LOGLEVEL": "ERROR"}
        outputs = run_everywhere(
            lab.hosts,
            lambda number: [
                *(python, "-m", "bench.lib.contenders", contender, str(number)),
                *(lab.hosts[number].address, json.dumps(passed | {"seed": seed}), scratch),
            ],
            lambda number: {**common, "RANK": str(number), "PYTHONPATH": str(ROOT)},
            timeout_s=900,
        )
    found = [json.loads(output.strip().splitlines()[-1]) for output in outputs]
    return {
        "loss": sum(each["loss"] for each in found) / REPLICAS,
        "losses": [each["loss"] for each in found],
        "bytes_sent": sum(each["bytes_sent"] for each in found),
        "seconds": max(each["seconds"] for each in found),
    }


def tables(store: Store, options: Options) -> dict[str, list[Part]]:
    """What each has come to, over all seeds."""
    lines = []
    for name in dict.fromkeys(run["settings"]["contender"] for run in store.runs):
        found = [run for run in store.runs if run["settings"]["contender"] == name]
        results = [run["result"] for run in found]
        lines.append(
            (
                name,
                found[0]["settings"]["library"] or "this repository",
                around(result["loss"] for result in results),
                around((result["bytes_sent"] / 1e6 for result in results), 1),
                around((result["seconds"] for result in results), 1),
            )
        )
    return {"others": [Table(dict.fromkeys(("", "version", "loss", "MB on the wire", "seconds"), ""), lines)]}
