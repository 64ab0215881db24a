"""What takes long to make, kept in the user's cache folder by a hash of what it is made of."""

from __future__ import annotations

import contextlib
import hashlib
import json
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farflung.files import replacing
from farflung.workloads.prepared import cache

VERSION = 1
"""Of what is made; another one when it is made otherwise."""
Arrays = Mapping[str, NDArray[Any]]


def kept(what: str, of: object, make: Callable[[], Arrays]) -> Arrays:
    """The arrays that `make` gives, or those that it gave before for the same; `of` is anything that JSON takes.

    Two processes may make them at the same time: each writes a whole file, and the last one stays.
    """
    key = hashlib.sha256(json.dumps([VERSION, what, of]).encode()).hexdigest()[:32]
    path = cache() / "graphs" / f"{what}-{key}.npz"
    with contextlib.suppress(OSError, ValueError, zipfile.BadZipFile, EOFError), np.load(path) as found:
        return dict(found)
    made = make()
    with contextlib.suppress(OSError), replacing(path) as file:  # without room it is made again each time
        np.savez_compressed(file, allow_pickle=False, **made)
    return made


def checksum(paths: Iterable[Path]) -> str:
    """A hash of files' names and of what they hold."""
    found = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            found.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return found.hexdigest()
