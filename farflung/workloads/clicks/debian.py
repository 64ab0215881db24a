"""Pairs of Debian's packages: does the first depend on the second? A real log that each machine with apt can make."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from farflung.errors import UserError
from farflung.workloads.clicks.log import Categories, ClickLog

FIELDS = ("Depends", "Pre-Depends", "Recommends", "Suggests")
FALSE = 3
"""Pairs that are no dependency, for each that is one."""
FLATTER = 0.75
"""Their second packages are drawn by popularity to this power."""
PATIENCE_S = 120.0
REMEDY = "run apt-get update first, on a machine with Debian or one of its kin"

Package = dict[str, str]

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
    packages = _packages()
    pairs = _pairs(packages)
    if not len(pairs):
        raise UserError(f"data is debian, but no package in apt's lists depends on another; {REMEDY}")
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
    return ClickLog("debian", labels[order].astype(np.float32), {}, _columns(packages, both[order]))


def _columns(packages: Sequence[Package], pairs: NDArray[np.int64]) -> dict[str, Categories]:
    columns = {}
    for name, fact in FACTS.items():
        words, codes = np.unique([fact(package) for package in packages], return_inverse=True)
        for side, title in enumerate((name, f"needed {name}")):
            columns[title] = Categories(codes[pairs[:, side]], words.tolist())
    return columns


def _packages() -> list[Package]:
    """All packages that apt knows of, by name."""
    try:
        command = ["apt-cache", "dumpavail"]
        text = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"data is debian, and apt-cache cannot be asked: {error}; {REMEDY}") from error
    found = {}
    for stanza in text.split("\n\n"):
        fields = dict(re.findall(r"^([A-Z][A-Za-z-]*): (.*)$", stanza, re.MULTILINE))
        if "Package" in fields:
            found[fields["Package"]] = fields
    if not found:
        raise UserError(f"data is debian, and apt has no lists of packages; {REMEDY}")
    return [found[name] for name in sorted(found)]


def _pairs(packages: Sequence[Package]) -> NDArray[np.int64]:
    """(pairs, 2): a package, and one that it names; each once."""
    numbers = {package["Package"]: number for number, package in enumerate(packages)}
    pairs = {
        (number, numbers[other])
        for number, package in enumerate(packages)
        for field in FIELDS
        for other in re.findall(r"(?:^|[,|]) *([a-z0-9][a-z0-9+.-]*)", package.get(field, ""))
        if other in numbers
    }
    return np.array(sorted(pairs), np.int64).reshape(-1, 2)
