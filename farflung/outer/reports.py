"""What a session tells of its rounds: to whoever listens, and of lost ones in the log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from farflung.networks import Network
from farflung.networks.torchrun import log
from farflung.outer.outcomes import Round

LOST = (
    "replica %d: round %d was lost: %s. Training goes on; outer.lost_rounds counts such rounds, and later ones of the "
    "same replicas are not told again"
)


class Reports:
    """Counts one replica's rounds, and tells of each.

    Args:
        network: the replica's seat.
        on_round: who is told first; `listeners` has others, too. Without one, lost rounds go to the log.
    """

    def __init__(self, network: Network, on_round: Callable[[Round], None] | None) -> None:
        self.held = self.lost = 0
        self.listeners = [on_round] if on_round else []
        self._network = network
        self._bytes_told = network.traffic.bytes_sent
        self._logs = on_round is None
        self._missed: set[int] = set()

    def tell(self, round: Round) -> None:
        """Tells of a round that was applied; the log hears of a lost one once for each member that was missing."""
        before, self._bytes_told = self._bytes_told, self._network.traffic.bytes_sent
        round = replace(round, bytes_sent=self._bytes_told - before)
        self.held += round.held
        self.lost += round.lost
        own = self._network.rank
        if self._logs and round.lost and not self._missed.issuperset(missing := round.missing or (own,)):
            self._missed.update(missing)
            log.warning(LOST, own, round.round, round.reason)
        for listener in self.listeners:
            listener(round)

    def state_dict(self) -> dict[str, Any]:
        """The counts, and the bytes that no round has told of yet."""
        untold = self._network.traffic.bytes_sent - self._bytes_told
        return {"rounds": self.held, "lost_rounds": self.lost, "untold_bytes": untold}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`; those of earlier releases have held rounds alone."""
        self.held, self.lost = state["rounds"], state.get("lost_rounds", 0)
        self._bytes_told = self._network.traffic.bytes_sent - state.get("untold_bytes", 0)
