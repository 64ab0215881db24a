"""What stays of a peer that was stopped before its first step."""

from __future__ import annotations

from pathlib import Path

import pytest

from farflung.errors import UserError
from farflung.networks.peers.ticket import Ticket
from farflung.training.beginning import left_as_it_was
from farflung.training.own_ticket import with_newer_addresses


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


def test_who_begins_another_run_in_a_peers_folder_is_told_how_the_one_there_goes_on(tmp_path: Path) -> None:
    """As with the command that had begun it, which begins a new one each time."""
    Ticket.new("same", {}).write(tmp_path / "run.ticket")
    goes_on = f"farflung join {tmp_path}/run.ticket --out {tmp_path}"
    with pytest.raises(UserError, match=rf"holds another run \(same\), which goes on with: {goes_on}; choose another"):
        with_newer_addresses(Ticket.new("same", {}), tmp_path / "run.ticket")
