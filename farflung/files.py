"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def beside(path: Path) -> Path:
    """Where to write a file before it is renamed: no other process, on whatever machine, writes there."""
    return path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")


def write_text(path: Path, text: str, private: bool = False) -> None:
    """Writes a text file beside its place and renames it; makes the folders that it lies in.

    A `private` one can be read by its owner alone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = beside(path)
    try:
        new.touch(mode=0o600 if private else 0o666)
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)  # on a full disk, what there is of it only takes up room
        raise
