"""Debian's packages as apt knows them: real data that each machine with apt has, or can get."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from farflung.errors import UserError

DEPENDENCIES = ("Depends", "Pre-Depends", "Recommends", "Suggests")
PATIENCE_S = 600.0
REMEDY = "run apt-get update first, on a machine with Debian or one of its kin"

Package = Mapping[str, str]
"""Some fields of a package, by their names."""


def packages(*fields: str) -> dict[str, Package]:
    """All packages by name, in order, with these fields and their dependencies. Raises UserError for none."""
    try:
        command = ["apt-cache", "dumpavail"]
        text = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"data is debian, and apt-cache cannot be asked: {error}; {REMEDY}") from error
    wanted = re.compile(rf"^({'|'.join(('Package', *fields, *DEPENDENCIES))}): (.*)$", re.MULTILINE)
    stanzas = (dict(wanted.findall(stanza)) for stanza in text.split("\n\n"))
    found = {stanza["Package"]: stanza for stanza in stanzas if "Package" in stanza}
    if not found:
        raise UserError(f"data is debian, and apt has no lists of packages; {REMEDY}")
    return dict(sorted(found.items()))


def pairs(found: Mapping[str, Package]) -> NDArray[np.int64]:
    """(pairs, 2): the numbers of a package and of another that it names, alternatives too; each once, in order.

    Raises UserError where there are none.
    """
    numbers = {name: number for number, name in enumerate(found)}
    named = {
        (number, numbers[other])
        for number, package in enumerate(found.values())
        for field in DEPENDENCIES
        for other in re.findall(r"(?:^|[,|]) *([a-z0-9][a-z0-9+.-]*)", package.get(field, ""))
        if other in numbers and numbers[other] != number
    }
    if not named:
        raise UserError(f"data is debian, but no package in apt's lists depends on another; {REMEDY}")
    return np.array(sorted(named), np.int64)
