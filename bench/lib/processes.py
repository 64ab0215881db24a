"""Processes of this machine."""

from __future__ import annotations

from pathlib import Path


def children(pid: int) -> list[int]:
    """Those that a process has begun."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
