"""What stays of a peer that was stopped before its first step."""

from __future__ import annotations

from pathlib import Path

import pytest

from farflung.training.beginning import left_as_it_was


@pytest.mark.parametrize("ticket", [True, False])
def test_who_has_a_ticket_finds_a_peer_again_that_was_stopped_before_its_first_step(
    tmp_path: Path, ticket: bool
) -> None:
    """It comes back under the key to which the ticket leads; where there is none, nothing stays."""
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt), left_as_it_was(folder):
        (folder / "logs").mkdir(parents=True)
        for name in ("peer.key", "config.toml", *(["run.ticket"] if ticket else [])):
            (folder / name).write_text("x")
        raise KeyboardInterrupt
    assert [path.name for path in sorted(folder.glob("*"))] == (["peer.key", "run.ticket"] if ticket else [])
    assert folder.exists() == ticket
