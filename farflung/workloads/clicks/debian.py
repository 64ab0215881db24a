"""Pairs of Debian's packages: does the first depend on the second? A real log that each machine with apt can make."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from farflung.workloads import apt
from farflung.workloads.apt import Package
from farflung.workloads.clicks.log import Categories, ClickLog

FALSE = 3
"""Pairs that are no dependency, for each that is one."""
FLATTER = 0.75
"""Their second packages are drawn by popularity to this power."""

FACTS: dict[str, Callable[[Package], str]] = {
    "package": lambda package: package["Package"],
    "source": lambda package: package.get("Source", package["Package"]).split(" ")[0],
    "section": lambda package: package.get("Section", ""),
    "maintainer": lambda package: package.get("Maintainer", ""),
    "priority": lambda package: package.get("Priority", ""),
    "begins": lambda package: re.split("[-0-9.+]", package["Package"])[0],
    "ends": lambda package: package["Package"].rpartition("-")[2],
}
"""What is known of each of the two packages."""


def read(most: int | None) -> ClickLog:
    """The pairs that apt's lists name, and others that they do not, in random order. Raises UserError."""
    packages = apt.packages("Source", "Section", "Maintainer", "Priority")
    pairs = apt.pairs(packages)
    generator = np.random.default_rng(0)
    firsts = np.repeat(pairs[:, 0], FALSE)
    popularity = np.bincount(pairs[:, 1], minlength=len(packages)) ** FLATTER
    seconds = generator.choice(len(packages), len(firsts), p=popularity / popularity.sum())
    false = np.stack([firsts, seconds], axis=1)
    known = pairs @ (len(packages), 1)
    false = false[~np.isin(false @ (len(packages), 1), known)]
    both = np.concatenate([pairs, false])
    labels = np.arange(len(both)) < len(pairs)
    order = generator.permutation(len(both))[:most]
    return ClickLog("debian", labels[order].astype(np.float32), {}, _columns(list(packages.values()), both[order]))


def _columns(packages: Sequence[Package], pairs: NDArray[np.int64]) -> dict[str, Categories]:
    columns = {}
    for name, fact in FACTS.items():
        words, codes = np.unique([fact(package) for package in packages], return_inverse=True)
        for side, title in enumerate((name, f"needed {name}")):
            columns[title] = Categories(codes[pairs[:, side]], words.tolist())
    return columns
