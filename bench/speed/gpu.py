"""What does a CUDA device make of it: training, rounds, codecs?
Tokens/s and model FLOP utilisation of whole runs, in both precisions and with offload; an outer step beside copying
its bytes; codecs in GB/s; rounds between processes; and the share of its time that such a replica would wait for
rounds over 100 Mbit/s, simulated. Needs a CUDA device; rounds over NCCL need two. Takes ten minutes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.lib.store import Store
from bench.lib.table import Cell, Part, Table
from bench.lib.training import train
from farflung import methods
from farflung.codecs import codec_named
from farflung.networks import Conditions, SimulatedNetwork, TorchNetwork
from farflung.outer import message_bytes
from farflung.planner.architecture import architecture_of
from farflung.planner.timing import Timer
from farflung.testing.hosts import LOOPBACK, torch_everywhere

PEAKS = {"A100": 312.0, "H100": 989.0, "H200": 989.0, "L40": 181.0, "4090": 165.0}
"""Dense bfloat16 TFLOP/s of cards, by a part of their names."""
PASSES, REPEATS = 9, 7
"""Of the bytes of a message in an outer step; and how often something is measured."""
CODECS_BESIDE = ("float32", "modulo4")
"""What rounds beside training send."""
EVERY, ROUNDS_BESIDE, MATRICES = 40, 3, 100
"""Steps between rounds beside training; rounds measured; products of matrices in a step."""


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = ("llama-125m", "llama-1.3b")
    """What to train."""
    batch_size: int = 16
    """Sequences of an inner step."""
    sequence_length: int = 1024
    """Tokens of each."""
    steps: int = 24
    """Inner steps of each run."""
    parameters: int = 500_000_000
    """Float32 values of a message."""
    codecs: tuple[str, ...] = ("bfloat16", "int8", "int4", "ef-int4", "topk2", "modulo4")
    """What to measure of them."""
    methods: tuple[str, ...] = ("diloco", "noloco", "streaming-diloco", "dilocox")
    """Whose waits to simulate."""


SMOKE = Options(models=("micro",), batch_size=2, sequence_length=32, steps=4, parameters=1_000_000, codecs=("int4",))


def needs() -> str:
    """Why this machine cannot run it."""
    return "" if torch.cuda.is_available() else "there is no CUDA device on this machine"


def seconds(work: Callable[[], object]) -> float:
    """The median time of some work on the device, which is idle before and after."""
    taken = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


def training(options: Options, store: Store, model: str, ways: dict[str, Any]) -> tuple[float, float]:
    """Tokens/s of a run, and its share of the device's peak; the latter is NaN for unknown cards."""
    shape: dict[str, Any] = {
        "batch_size": options.batch_size,
        "sequence_length": options.sequence_length,
        "steps": options.steps,
    }
    shape |= {"method": "local", "replicas": 1, "device": "cuda", "log_every": 1, "eval_every": options.steps}
    quiet = {"checkpoint_every": 0, "text_share": 0, "max_tokens": 4_000_000, "eval_sequences": 2}
    rate = train(store.scratch / "run", model=model, inner="muon", **shape, **quiet, **ways).tokens_per_second
    kind = architecture_of(model, options.sequence_length)
    flops = rate * kind.flops_per_token(kind.spans(1)[0], options.sequence_length)
    peaks = (peak for name, peak in PEAKS.items() if name in torch.cuda.get_device_name())
    return rate, flops / (1e12 * next(peaks, float("nan")))


def outer_step(parameters: int) -> tuple[float, float]:
    """Seconds of a round of one replica alone, and of copying the bytes that it must touch."""
    model = nn.ParameterList([nn.Parameter(torch.randn(parameters // 100, device="cuda")) for _ in range(100)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with methods.noloco(every=1).attach(model, optimizer, SimulatedNetwork.alone()):
        optimizer.step()
        taken = seconds(optimizer.step)
    source, target = torch.randn(2, parameters, device="cuda")
    return taken, seconds(lambda: target.copy_(source)) * PASSES / 2


def codecs(options: Options) -> Iterator[tuple[Cell, ...]]:
    """Gigabytes of a message a second, encoded to the host's memory and decoded from there."""
    message = list(torch.randn(max(1, options.parameters // 10**6), 1000, 1000, device="cuda"))
    gigabytes = 4e-9 * sum(tensor.numel() for tensor in message)
    for name in options.codecs:
        codec = codec_named(name)
        packet = codec.encode(message)
        rates = (lambda: codec.encode(message), lambda: codec.decode(packet, message))  # noqa: B023
        yield name, *(gigabytes / seconds(work) for work in rates)


def process(backend: str, parameters: int) -> None:
    """One of two replicas: prints the seconds of a round, and what rounds beside steps add to these."""
    dist.init_process_group(backend)
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    model = nn.ParameterList([nn.Parameter(torch.ones(parameters // 100, device="cuda")) for _ in range(100)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with methods.noloco(every=1).attach(model, optimizer, TorchNetwork()):
        optimizer.step()
        told = {"alone": seconds(optimizer.step)}
    works = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for codec in CODECS_BESIDE:
        method = methods.noloco(every=EVERY, delay=EVERY - 1, codec=codec)
        ways: list[Callable[[], Any]] = [nullcontext, lambda: method.attach(model, optimizer, TorchNetwork())]  # noqa: B023
        without, beside = (steps_with(way, optimizer, works) for way in ways)
        told[codec] = (beside - without) / ROUNDS_BESIDE
    print(json.dumps(told))
    dist.destroy_process_group()


def steps_with(way: Callable[[], Any], optimizer: torch.optim.Optimizer, works: torch.Tensor) -> float:
    """The seconds of steps on both devices of some 30 ms, in which so many rounds start and are applied."""

    def steps(count: int) -> None:
        for _ in range(count):
            for _ in range(MATRICES):
                torch.mm(works, works)
            optimizer.step()

    with way():
        steps(EVERY + 1)  # the first round, whose buffers are new
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        steps(EVERY * ROUNDS_BESIDE)
        torch.cuda.synchronize()
        return time.perf_counter() - began


def rounds(options: Options, backend: str) -> tuple[Cell, ...]:
    """Two processes' rounds over a backend, of a tenth of the parameters."""
    values = options.parameters // 10
    arguments = ["-m", __name__, backend, str(values)]
    told = [json.loads(text.strip().splitlines()[-1]) for text in torch_everywhere([LOOPBACK] * 2, arguments, 300)]
    taken, *added = (max(one[name] for one in told) for name in ("alone", *CODECS_BESIDE))
    return backend, taken, 4e-9 * values / taken, *added


def waiting(name: str, model: str, step: float) -> float:
    """The share of its time that one of eight replicas waits for rounds over 100 Mbit/s."""
    method = methods.RECIPES[name](every=50)
    cells = architecture_of(model).cells
    conditions = Conditions(bandwidth_mbps=100, latency_ms=20, step_ms=1000 * step)
    timing = Timer(method, lambda members: message_bytes(method, cells, members), conditions, 8, 10, 1e9).run()
    return timing.blocked / (timing.blocked + timing.computed)


def run(options: Options, store: Store) -> Iterator[Part]:
    yield f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}, torch {torch.__version__}"
    steps: dict[str, float] = {}

    def row(model: str, name: str, ways: dict[str, object]) -> tuple[Cell, ...]:
        rate, share = training(options, store, model, ways)
        steps[model] = min(steps.get(model, 1e9), options.batch_size * options.sequence_length / rate)
        return f"{model}, {name}", rate, share

    ways: dict[str, dict[str, object]] = {"float32": {}, "bfloat16": {"precision": "bfloat16"}}
    ways["bfloat16, offload"] = ways["bfloat16"] | {"offload": True}
    rows = (row(model, *way) for model in options.models for way in ways.items())
    yield Table({"training": "", "tokens/s": ",.0f", "MFU": ".1%"}, rows)
    taken, copying = outer_step(options.parameters)
    yield f"outer step of {options.parameters:,} values: {taken:.4f} s, {taken / copying:.2f} × copying its bytes"
    yield Table({"codec": "", "encode GB/s": ".2f", "decode GB/s": ".2f"}, codecs(options))
    backends = ["gloo", *(["nccl"] if torch.cuda.device_count() > 1 else [])]
    adds = {f"{name} beside steps adds, s": ".4f" for name in CODECS_BESIDE}
    columns = {"rounds over": "", "seconds": ".3f", "GB/s": ".2f", **adds}
    yield Table(columns, (rounds(options, one) for one in backends))
    waits = ((f"{n}, {m}", waiting(n, m, s)) for m, s in steps.items() for n in options.methods)
    yield Table({"8 replicas, every 50, 100 Mbit/s": "", "waiting": ".1%"}, waits)


if __name__ == "__main__":
    process(sys.argv[1], int(sys.argv[2]))
