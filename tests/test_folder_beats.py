"""What a peer in a folder says of itself between its beats: others may not wait for these."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from folder_seats import seats
from patience import until

from farflung.networks.folder import presence

NEVER = 1e6


def test_who_comes_right_after_the_first_step_knows_that_the_run_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it trains a first round of its own, and takes no state."""
    monkeypatch.setattr(presence, "BEAT_SECONDS", NEVER)
    with seats((tmp_path / "store").as_uri(), tmp_path, 0) as run:
        first = run.sit("first", trains=False)
        newcomer = run.sit("newcomer", trains=False)
        assert newcomer.behind(0) is None
        first.paced(1, 10)

        def behind() -> bool:
            newcomer.peers.look(time.monotonic())
            return bool(newcomer.behind(0))

        until(behind, 10)
