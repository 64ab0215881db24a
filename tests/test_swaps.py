"""Real processes that swap: through the memory that they share as in messages, and what happens where they cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import run_replicas
from torch_swap import DTYPES, SIZES, parts

pytestmark = pytest.mark.slow

COUNT = 3


@pytest.mark.parametrize("case", ["room", "no room"])
def test_swaps_are_the_same_bit_for_bit_whether_or_not_there_is_memory_to_share(case: str, tmp_path: Path) -> None:
    for own, seen in enumerate(run_replicas(COUNT, case, "", tmp_path, script="torch_swap.py")):
        sent = [parts(n, own, dtype, size) for size in SIZES for dtype in DTYPES for n in range(COUNT)]
        expected = [part for some in sent for part in some]
        for way in ("found", "messages"):
            assert len(expected) == len(seen[way]) > 50
            assert all(torch.equal(one, other) for one, other in zip(seen[way], expected, strict=True))
        assert seen["memory"] == (case == "room")
        assert not seen["files"]


def test_a_death_in_the_midst_of_a_swap_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    seen = run_replicas(COUNT, "death", "", tmp_path, frozenset({1}), script="torch_swap.py")
    assert seen[1] is None
    for process in (0, 2):
        assert seen[process]["error"] and not seen[process]["files"]
