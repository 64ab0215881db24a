"""How one replica computes its gradients, and on how many processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from farflung.tables import AFTER_RESUME, BETWEEN_MACHINES, Checked, setting

PIECES_EACH = {"1f1b": 1, "gpipe": 1, "zero-bubble": 1, "interleaved": 2}
"""How many pieces of the model a process has, by the pipeline's schedule."""


@dataclass(frozen=True)
class IslandSettings(Checked):
    """How one replica computes its gradients, and the processes that it is divided among."""

    batch_size: int = setting(8, least=1)
    """Samples (sequences, for language) in one inner step of one replica."""
    microbatches: int | None = setting(None, least=1, may_differ=AFTER_RESUME)
    """Parts that a batch is computed in, one after the other; unset: twice the stages, or one for a single stage."""
    clip: float = setting(1.0, least=0)
    """Largest norm of a replica's gradient; 0 does not clip."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Number format that the model computes in; weights stay float32."""
    recompute: bool = False
    """Keep no layer's inner activations; compute them again in the backward pass."""
    stages: int = setting(1, least=1, may_differ=AFTER_RESUME)
    """Processes that the layers of one replica are divided among: a pipeline."""
    shard: int = setting(1, least=1, may_differ=AFTER_RESUME)
    """Processes that the parameters of each stage are divided among (FSDP); they share its batch."""
    pipeline_schedule: Literal["1f1b", "gpipe", "interleaved", "zero-bubble"] = setting(
        "1f1b", may_differ=AFTER_RESUME, formerly="schedule"
    )
    """The order in which stages compute microbatches."""
    routes: Literal["fixed", "random"] = "fixed"
    """Whether a microbatch stays in its replica, or goes to a random replica's next stage each time."""
    boundary: str = setting("float32", may_differ=AFTER_RESUME)
    """How hidden states are sent between stages: float32, bfloat16, int8, int4, topk10, subspace32 ... (see the
    README)."""
    offload: bool = setting(False, may_differ=BETWEEN_MACHINES)
    """Keep weights and the state of both optimizers on the CPU; the device holds only what it is computing with."""

    @property
    def processes(self) -> int:
        """Processes of one replica."""
        return self.stages * self.shard

    @property
    def parts(self) -> int:
        """Microbatches that a process's share of a batch is computed in."""
        return self.microbatches or (2 * self.stages if self.stages > 1 else 1)

    @property
    def pieces(self) -> int:
        """Pieces that a model is cut into."""
        return self.stages * PIECES_EACH[self.pipeline_schedule]
