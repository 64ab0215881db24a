"""Short seeded runs of every method, codec and network, boiled down to a few numbers each: what a redesign must keep.

    python tests/golden.py    writes golden.json beside it

A trace has a hash of all replicas' weights, which holds on machines like the one it was made on; numbers that tell the
weights to within rounding elsewhere; the bytes that each replica sent; and what became of its rounds.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import platform
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from patience import measure
from problem import Result, replica
from processes import run_together
from registered import METHODS

from farflung import methods
from farflung.codecs import codec_named
from farflung.methods import Method
from farflung.networks import Conditions, Network, Simulation, TorchNetwork

FILE = Path(__file__).with_name("golden.json")
CPUS = Path("/proc/cpuinfo")

Trace = dict[str, Any]

STEPS, EVERY = 22, 4

CODECS = (
    *("float32", "bfloat16", "float16", "int8", "int4", "e4m3", "e3m0", "block-dct", "topk5", "threshold5"),
    *("ef-int2", "ef-int4", "ef-e3m0", "ef-topk5-int2", "ef-threshold5", "ef-lowrank2-int4", "ef-block-dct-topk5"),
    *("stat3", "ef-stat2"),
)
MODULO = ("modulo3x2", "modulo4", "modulo4x2")


def cases() -> dict[str, tuple[Callable[[], Method], int]]:
    """How each method is made, and the number of replicas, by name."""
    found: dict[str, tuple[Callable[[], Method], int]] = {}

    def add(recipe: str, replicas: int, **settings: Any) -> None:
        words = [recipe, *(f"{name}={value}" for name, value in settings.items()), f"replicas={replicas}"]
        found[" ".join(words)] = partial(_made, recipe, settings), replicas

    for recipe in METHODS:
        every = {} if recipe in ("ddp", "local", "demo", "dynamic-threshold", "sparta") else {"every": EVERY}
        for replicas in (2, 3, 5):
            add(recipe, replicas, **every)
    for codec in CODECS:
        for replicas in (2, 3):
            add("diloco", replicas, every=EVERY, codec=codec)
        add("noloco", 4, every=EVERY, codec=codec)
        add("ddp", 3, codec=codec)
    for codec in MODULO:
        add("noloco", 4, every=EVERY, codec=codec)
        add("noloco", 5, every=EVERY, codec=codec, group_size=3)
        add("nolocox", 4, every=EVERY, codec=codec)
    for recipe, codecs in (("diloco", ("float32", "ef-int4")), ("noloco", ("float32", "bfloat16", "modulo4"))):
        kept = itertools.product(("kept", "dropped", "mixed"), (2, EVERY), (1, 2))
        for merge, delay, fragments in (*kept, ("eager", EVERY, 1), ("eager", EVERY, 2)):
            for codec in codecs:
                add(recipe, 3, every=EVERY, delay=delay, fragments=fragments, merge=merge, codec=codec)
    add("diloco", 4, every=EVERY, group_size=2)
    add("demo", 3, averaging="parts")
    add("sparseloco", 3, every=EVERY, averaging="parts")
    return found


def _made(recipe: str, settings: dict[str, Any]) -> Method:
    if "codec" in settings:
        settings = {**settings, "codec": codec_named(settings["codec"])}
    return methods.RECIPES[recipe](**settings)


def simulated() -> dict[str, Trace]:
    """Every case on the simulated network; two with links and speeds that differ, so that rounds take their time."""
    traces = {}
    for name, (make, replicas) in cases().items():
        traces[f"simulated: {name}"] = trace(Simulation(replicas).run(replica(make, STEPS)))
    for name in ("diloco every=4 replicas=3", "noloco every=4 codec=modulo4 replicas=4"):
        make, replicas = cases()[name]
        conditions = Conditions(bandwidth_mbps=1, latency_ms=30, step_ms=5, speed_sigma=0.3, step_sigma=0.2, seed=1)
        results = Simulation(replicas, conditions).run(replica(make, STEPS))
        times = [round(result.outer.network.now(), 9) for result in results]
        traces[f"slow links: {name}"] = {**trace(results), "seconds": times}
    return traces


PROCESSES = (
    *("ddp replicas=3", "diloco every=4 replicas=3", "noloco every=4 replicas=3", "demo replicas=3"),
    *("sparseloco every=4 replicas=3", "diloco every=4 codec=ef-int4 replicas=3"),
    "noloco every=4 delay=2 fragments=2 merge=kept codec=modulo4 replicas=3",
    "diloco every=4 delay=4 fragments=1 merge=eager codec=float32 replicas=3",
)


def real() -> dict[str, Trace]:
    """Some cases between three processes, over torch.distributed."""
    with tempfile.TemporaryDirectory() as folder:
        run_together(3, __file__, folder)
        seen = [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(3)]
    return {f"processes: {name}": trace([results[name] for results in seen]) for name in PROCESSES}


def one_process(network: Network) -> dict[str, Result]:
    """What one of the processes comes to."""
    results = {}
    for name in PROCESSES:
        before = network.traffic.bytes_sent
        result = replica(cases()[name][0], STEPS)(network)
        results[name] = Result(result.weights, result.rounds, network.traffic.bytes_sent - before)  # type: ignore[arg-type]
    return results


def trace(results: list[Result]) -> Trace:
    """A run in short."""
    weights = torch.stack([result.weights for result in results]).double()
    waves = torch.cos(torch.arange(1, weights.shape[1] + 1, dtype=torch.float64))
    return {
        "hash": _hash(weights.numpy().tobytes()),
        "norms": [float(f"{value:.9g}") for value in weights.norm(dim=1).tolist()],
        "waves": [float(f"{value:.9g}") for value in (weights @ waves).tolist()],
        "bytes": [r.outer if isinstance(r.outer, int) else r.outer.network.traffic.bytes_sent for r in results],
        "outcomes": dict(sorted(Counter(r.outcome for x in results for r in x.rounds).items())),
        "rounds": _hash(str([[(r.group, r.started_step, r.step) for r in x.rounds] for x in results]).encode()),
    }


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def machine() -> str:
    """What bits depend on: processors of two makers round otherwise though they can do the same."""
    found = re.search(r"model name\s*: (.*)", CPUS.read_text()) if CPUS.exists() else None
    processor = found[1] if found else platform.processor()
    return f"{processor} {torch.backends.cpu.get_cpu_capability()} torch {torch.__version__}"


def recorded() -> dict[str, Any]:
    """What golden.json holds."""
    held: dict[str, Any] = json.loads(FILE.read_text())
    return held


def main() -> None:
    if len(sys.argv) > 1:
        torch.set_num_threads(1)
        network = TorchNetwork.from_env(starting=120)
        torch.save(one_process(network), Path(sys.argv[1]) / f"{network.rank}.pt")
        return
    measure()
    held = {"machine": machine(), "traces": {**simulated(), **real()}}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in held["traces"].items())
    FILE.write_text(f'{{"machine": {json.dumps(held["machine"])}, "traces": {{\n{lines}\n}}}}\n')
    print(f"{len(held['traces'])} traces")


if __name__ == "__main__":
    main()
