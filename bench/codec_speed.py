"""How fast codecs are on one core, as gigabytes of float32 a second and as a share of copying memory.

python bench/codec_speed.py [--parameters 100000000]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import tyro

from farflung.codecs import CODECS, codec_named

REPEATS = 5


@dataclass(frozen=True)
class Options:
    parameters: int = 100_000_000
    """Float32 values of a message, in square matrices of a million."""
    codecs: tuple[str, ...] = tuple(example for row in CODECS.values() for example in row.examples)
    """What to measure; topk and threshold take some ten seconds a row."""


def seconds(work: Callable[[], object]) -> float:
    """The median of processor seconds: other programs' turns on a shared core do not count."""
    taken = []
    for _ in range(REPEATS):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return median(taken)


def main(options: Options) -> None:
    torch.set_num_threads(1)
    side = 1000
    message = list(torch.randn(options.parameters // side**2, side, side))
    gigabytes = 4e-9 * options.parameters
    target = torch.zeros(options.parameters)
    source = torch.randn(options.parameters)
    copied = gigabytes / seconds(lambda: target.copy_(source))
    print(f"{options.parameters:,} float32 values, one core; memcpy {copied:.2f} GB/s")
    print(
        f"{'codec':16} {'encode GB/s':>11} {'of memcpy':>9} {'decode GB/s':>11} {'of memcpy':>9} {'bits a value':>12}"
    )
    for name in options.codecs:
        codec = codec_named(name)
        packet = codec.encode(message)
        encoded = gigabytes / seconds(lambda codec=codec: codec.encode(message))
        decoded = gigabytes / seconds(lambda codec=codec, packet=packet: codec.decode(packet, message))
        bits = 8 * packet.nbytes / options.parameters
        print(
            f"{name:16} {encoded:11.2f} {encoded / copied:11.0%} {decoded:11.2f} {decoded / copied:11.0%} {bits:11.3f}"
        )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
