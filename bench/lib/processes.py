"""Processes of this machine."""

from __future__ import annotations

from pathlib import Path


def children(pid: int) -> list[int]:
    """Those that a process has begun; of one that has ended, none."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
