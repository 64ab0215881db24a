"""Two texts that nobody takes for each other, and a mixture of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from farflung.mixtures.folder import Mixture
from farflung.mixtures.settings import SplitSettings
from farflung.mixtures.split import split
from farflung.networks import Network, SimulatedNetwork

LENGTH, PREFIX = 32, 8


def write_texts(folder: Path) -> tuple[str, str]:
    """Words without a digit, and sums without a letter; the paths of both."""
    chance = random.Random(0)
    words = ["".join(chance.choices("aeiouklmn", k=5)) for _ in range(40)]
    paths = folder / "words.txt", folder / "sums.txt"
    paths[0].write_text(" ".join(chance.choices(words, k=6000)))
    paths[1].write_text("".join(f"{chance.randrange(1000)}+{chance.randrange(1000)};" for _ in range(4500)))
    return str(paths[0]), str(paths[1])


def settings(folder: Path, out: str = "mix", **changed: Any) -> SplitSettings:
    paths = write_texts(folder)
    small = {"sequence_length": LENGTH, "prefix": PREFIX, "rounds": 3, "router_sequences": 256, "experts": 2}
    return SplitSettings(**{"data": paths, "out": folder / out, **small, **changed})


def make(folder: Path, network: Network | None = None, **changed: Any) -> Mixture:
    return split(settings(folder, **changed), network or SimulatedNetwork.alone(), lambda _: None)
