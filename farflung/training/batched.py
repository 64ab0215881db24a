"""What replicas that compute together must have in common."""

from __future__ import annotations

from farflung.errors import UserError
from farflung.settings import Settings


def check_batched(settings: Settings) -> None:
    """Refuses to compute replicas together that are not in one process, or are never at the same moment there."""
    if not settings.network.kind.simulate:
        raise UserError("batched_replicas is for replicas in one process; add --network simulated, or leave it out")
    if (precision := settings.island.precision) != "float32":
        raise UserError(f"batched_replicas computes in float32, and precision is {precision}; choose one of them")
    if getattr(settings.made_workload(), "holds_chats", False):
        raise UserError("batched_replicas needs batches of one shape, and chats are of unlike lengths; leave it out")
    if getattr(settings.workload, "document_mask", False):
        raise UserError("batched_replicas computes sequences as one document each; leave out document_mask, or it")
    if settings.island.compile:
        raise UserError("batched_replicas computes layers as they are; leave out compile, or batched_replicas")
    conditions = settings.network.simulated_conditions()
    if uneven := next(
        (n for n in ("speeds", "speed_sigma", "step_sigma", "slow_share") if getattr(conditions, n)), None
    ):
        raise UserError(
            f"batched_replicas needs replicas of one speed, and {uneven} is {getattr(conditions, uneven)}; choose "
            "other --conditions, or leave it out"
        )
