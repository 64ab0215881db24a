"""How fast are codecs on one core?
Gigabytes of float32 a second, encoding and decoding, of an example of every codec, beside the physical limit: copying
as much memory. Takes a few minutes; `topk` and `threshold` some ten seconds a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch

from bench.lib.store import Store
from bench.lib.table import Cell, Part, Table
from farflung.codecs import CODECS, codec_named

REPEATS, SIDE = 5, 1000


@dataclass(frozen=True)
class Options:
    parameters: int = 100_000_000
    """Float32 values of a message, in square matrices of a million."""
    codecs: tuple[str, ...] = tuple(example for row in CODECS.values() for example in row.examples)
    """What to measure."""


SMOKE = Options(parameters=1_000_000, codecs=("int4", "modulo4"))


def seconds(work: Callable[[], object]) -> float:
    """The median of processor seconds: other programs' turns on a shared core do not count."""
    taken = []
    for _ in range(REPEATS):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return median(taken)


def run(options: Options, store: Store) -> Iterator[Part]:
    torch.set_num_threads(1)
    message = list(torch.randn(max(1, options.parameters // SIDE**2), SIDE, SIDE))
    values = sum(tensor.numel() for tensor in message)
    gigabytes = 4e-9 * values
    target, source = torch.zeros(values), torch.randn(values)
    copied = gigabytes / seconds(lambda: target.copy_(source))

    def row(name: str) -> tuple[Cell, ...]:
        codec = codec_named(name)
        packet = codec.encode(message)
        encoded = gigabytes / seconds(lambda: codec.encode(message))
        decoded = gigabytes / seconds(lambda: codec.decode(packet, message))
        return name, encoded, encoded / copied, decoded, decoded / copied, 8 * packet.nbytes / values

    columns = {"codec": "", "encode GB/s": ".2f", "of memcpy": ".0%", "decode GB/s": ".2f", "of memcpy ": ".0%"}
    yield Table(
        columns | {"bits a value": ".3f"},
        map(row, options.codecs),
        f"{values:,} float32 values, one core; memcpy {copied:.2f} GB/s",
    )
