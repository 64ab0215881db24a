"""What is told of a round."""

from __future__ import annotations

from dataclasses import dataclass

from farflung.networks import Group


@dataclass(frozen=True)
class Round:
    """What happened in one round of one replica. Times are seconds on the network's clock.

    The exchange ran from `started` to `finished`; the replica stood waiting from `waited_from` to `landed`.
    `group` is empty when the replica sat out. `outcome` is one of averaged, sat out, peer lost, no progress offered,
    behind.
    `compression_error` is the part of the message, 0 to 1, that its packet left out. An adapting loop tells the
    averaged message's `effective_rank`, and what it has decided for the next round: which `share` of its first rank
    the codec may have, and `every`, the steps until then.
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
    outcome: str
    reason: str = ""
    compression_error: float = 0.0
    effective_rank: float | None = None
    share: float | None = None
    every: int | None = None
