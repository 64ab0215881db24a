"""How much memory a process may take: what the user says, or what its device has."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

from farflung.errors import UserError
from farflung.memory.measure import in_use

MARGIN = 0.1
"""The part of a device's free memory that `auto` leaves alone."""
UNITS = {
    f"{letter}{binary}B": base**power
    for binary, base in (("", 1000), ("I", 1024))
    for power, letter in enumerate("KMGT", 1)
}
UNLIMITED = 1 << 60
THREADS = 1 << 28
"""Bytes of a limited address space that threads take without using them."""


def check_words(memory: str) -> None:
    """Raises UserError for what says no amount of memory."""
    if memory not in ("", "auto") and not _amount(memory):
        raise UserError(
            f"memory is {memory!r}; give an amount such as 16GB, a share of the device's up to 100%, or auto"
        )


def cap_of(memory: str, device: torch.device, processes: int) -> int:
    """The bytes that a process may take, of so many on this machine. Raises UserError for what says no amount."""
    check_words(memory)
    if memory == "auto":
        return in_use(device) + int((1 - MARGIN) * room(device) / (1 if device.type == "cuda" else processes))
    number, unit = _amount(memory) or (0.0, "KB")
    return int(number / 100 * total(device)) if unit == "%" else int(number * UNITS[unit])


def _amount(memory: str) -> tuple[float, str] | None:
    found = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+) ?(%|[KMGT]I?B)", memory.strip(), re.IGNORECASE)
    if not found:
        return None
    number, unit = float(found[1]), found[2].upper()
    return (number, unit) if 0 < number <= (100 if unit == "%" else UNLIMITED / UNITS[unit]) else None


def total(device: torch.device) -> int:
    """All of a device's memory, in bytes; of the machine's, what processes may have."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(machine, *(limit for limit, _ in _limits()))


def room(device: torch.device) -> int:
    """Bytes that this process can still take."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    return max(0, min(_free(), *(limit - taken for limit, taken in _limits())))


def _free() -> int:
    """What the machine has left, with what it would give up of files."""
    try:
        table = dict(line.split(":") for line in Path("/proc/meminfo").read_text("ascii").splitlines())
        return int(table["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _limits() -> Iterator[tuple[int, int]]:
    """Limits of this process, and what it has taken of each."""
    try:
        sizes = [int(word) * resource.getpagesize() for word in Path("/proc/self/statm").read_text("ascii").split()]
        taken = {resource.RLIMIT_AS: sizes[0] + THREADS, resource.RLIMIT_DATA: sizes[5]}
    except OSError:
        taken = {}
    for kind, size in taken.items():
        most, _ = resource.getrlimit(kind)
        yield (UNLIMITED if most == resource.RLIM_INFINITY else most), size
    group = Path("/sys/fs/cgroup")
    try:
        most_text, now = ((group / name).read_text("ascii").strip() for name in ("memory.max", "memory.current"))
        table = dict(line.split() for line in (group / "memory.stat").read_text("ascii").splitlines())
        files = int(table["inactive_file"]) + int(table["active_file"])  # they make room when need be
        yield (UNLIMITED if most_text == "max" else int(most_text)), int(now) - files
    except (OSError, ValueError, KeyError):
        yield UNLIMITED, 0
