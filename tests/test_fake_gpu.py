"""On a GPU nothing mixes devices, and nothing waits for the device but what must, by name: with fake tensors."""

from __future__ import annotations

import json

import pytest
from fake_gpu import CASES
from patience import patience
from processes import HERE
from warm import Python

pytestmark = pytest.mark.slow

ALLOWED: dict[str, dict[str, int]] = {
    **{name: {"sendable": 2} for name in CASES if name.startswith("outer")},  # whether each of two means may be used
    "values": {"finite": 1, "norm": 1},
    # What a packet says of itself decides how it is read.
    "codec lowrank64": {"LowRank.inverse": 2},
    "codec ef-lowrank64-int4": {"LowRank.inverse": 2},
    "codec modulo4": {"Modulo._read": 10},
    "codec modulo4x2": {"Modulo._read": 10},
    "codec rows": {"Rows.forward.<locals>.<listcomp>": 4, "pack_numbers.<locals>.<listcomp>": 4, "unpack_numbers": 2},
    "codec random0.5": {"Sampled.inverse": 2},
    "codec topk2": {"unpack_places": 4},
    "codec threshold1": {"Threshold._largest": 12, "Threshold.inverse": 4, "unpack_places": 2},  # sizes are unknown
}
"""How often each case may wait, and in which function, for two messages; the others never."""


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[dict[str, int], str]]:
    process = Python(HERE / "fake_gpu.py")
    out, errors = process.communicate(timeout=patience(60))
    assert process.returncode == 0, errors
    told: dict[str, tuple[dict[str, int], str]] = json.loads(out)
    return told


@pytest.mark.parametrize("name", CASES)
def test_nothing_mixes_devices_or_waits_but_what_must(name: str, found: dict[str, tuple[dict[str, int], str]]) -> None:
    waits, error = found[name]
    assert not error
    assert waits == ALLOWED.get(name, {})
