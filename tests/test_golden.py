"""What short seeded runs come to is what it was; see golden.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from golden import Trace, machine, real, recorded, simulated

pytestmark = pytest.mark.slow

CLOSE = 1e-4
"""Other processors round differently, and training makes more of it."""


@pytest.mark.parametrize(("make", "of_processes"), [(simulated, False), (real, True)], ids=["simulated", "real"])
def test_traces_are_what_they_were(make: Callable[[], dict[str, Trace]], of_processes: bool) -> None:
    held, made = recorded(), make()
    assert made.keys() == {name for name in held["traces"] if name.startswith("processes: ") == of_processes}
    exact = held["machine"] == machine()
    differ = [name for name, trace in made.items() if not same(trace, held["traces"].get(name), exact)]
    assert not differ, f"{len(differ)} of {len(made)} differ, first {differ[0]}: {made[differ[0]]}"


def same(one: Trace, other: Trace | None, exact: bool) -> bool:
    if other is None or one.keys() != other.keys() or (exact and one["hash"] != other["hash"]):
        return False
    near = all(one[name] == pytest.approx(other[name], rel=CLOSE, abs=CLOSE) for name in ("norms", "waves"))
    return near and all(one[name] == other[name] for name in one if name not in ("hash", "norms", "waves"))
