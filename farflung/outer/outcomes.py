"""How rounds end, and what is reported of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from farflung.networks import Group

LEFT_OVER = "no partner was left for this replica in this round"


class Outcome(StrEnum):
    """How a round ended for a replica."""

    AVERAGED = "averaged"
    SAT_OUT = "sat out"
    """Nobody was there to average with."""
    PEER_LOST = "peer lost"
    """Somebody's message is missing or unusable."""
    NO_PROGRESS = "no progress offered"
    """This replica's own training was spoilt, so it has offered its anchor."""
    BEHIND = "behind"
    """This replica's anchors differ from the others', so it downloads theirs."""


@dataclass
class Result:
    """What an exchange came to; see Round, too."""

    mean: Tensor
    """Of the group's messages, or this replica's own message if a peer is lost."""
    group: Group
    outcome: Outcome = Outcome.AVERAGED
    reason: str = ""
    compression_error: float = 0.0
    apart: tuple[str, ...] = ()
    """The names of the columns in which anchors differ that should be equal."""
    host: int | None = None
    """Who says that this replica is behind."""
    missing: Group = ()
    """Who did not deliver."""

    def note(self, outcome: Outcome, reason: str) -> None:
        """Sets another outcome; earlier reasons are kept, each once."""
        self.outcome = outcome
        if reason not in self.reason:
            self.reason = "; ".join(filter(None, (self.reason, reason)))

    def lacks_progress(self, fault: str) -> None:
        """Says why this replica had no progress to offer."""
        self.reason = "; ".join(filter(None, (fault, self.reason)))
        if self.outcome in (Outcome.AVERAGED, Outcome.SAT_OUT):
            self.outcome = Outcome.NO_PROGRESS


@dataclass(frozen=True)
class Round:
    """What happened in one round of one replica. Times are seconds on the network's clock.

    The exchange ran from `started` to `finished`; the replica stood waiting from `waited_from` to `landed`.
    `group` is empty when the replica sat out. `compression_error` is the size of what its packet left out, as a part of
    the message's: 0 where nothing is lost, and more than 1 where a coarse grid errs by more than the values amount to.
    `missing` are the ranks of those who did not deliver, and `bytes_sent` what this replica has sent since the round
    before. An adapting loop tells the averaged message's `effective_rank`, and what it has decided for the next round:
    which `share` of its first rank the codec may have, and `every`, the steps until then.
    """

    round: int
    fragment: int
    group: Group
    started_step: int
    step: int
    started: float
    finished: float
    waited_from: float
    landed: float
    outcome: Outcome
    reason: str = ""
    compression_error: float = 0.0
    effective_rank: float | None = None
    share: float | None = None
    every: int | None = None
    missing: Group = ()
    bytes_sent: int = 0

    @property
    def held(self) -> bool:
        """Whether it was held with others."""
        return bool(self.group) and not self.lost

    @property
    def lost(self) -> bool:
        """Whether some member's message was missing or unusable."""
        return self.outcome == Outcome.PEER_LOST

    @property
    def seconds(self) -> float:
        """How long its exchange took, while this replica trained or waited."""
        return self.finished - self.started
