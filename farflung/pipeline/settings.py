"""How one replica computes its gradients, and on how many processes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from farflung.errors import UserError, counted
from farflung.tables import AFTER_RESUME, BETWEEN_MACHINES, BETWEEN_PEERS, Checked, setting

PIECES_EACH = {"1f1b": 1, "gpipe": 1, "zero-bubble": 1, "interleaved": 2}
"""How many pieces of the model a process has, by the pipeline's schedule."""


MOST_TOGETHER = 200_000
"""Microbatches of a step that a swarm's peers take together: their names fit into one message."""
BETWEEN_STAGES = ("pipeline_schedule", "routes", "boundary")
"""Settings that only an island of several stages has."""


@dataclass(frozen=True)
class IslandShape:
    """The processes of one replica: stages, and shards of each."""

    stages: int = 1
    shards: int = 1

    @property
    def processes(self) -> int:
        """All of them."""
        return self.stages * self.shards

    def __str__(self) -> str:
        return f"{counted(self.stages, 'stage')} × {counted(self.shards, 'shard')}"


@dataclass(frozen=True)
class IslandSettings(Checked):
    """How one replica computes its gradients, and the processes that it is divided among."""

    batch_size: int = setting(8, least=1, may_differ=BETWEEN_PEERS)
    """Samples (sequences, for language) in one inner step of one replica."""
    microbatches: int | None = setting(None, least=1, may_differ=AFTER_RESUME | BETWEEN_PEERS)
    """Parts that a batch is computed in, one after the other; unset: twice the stages, or one for a single stage."""
    clip: float = setting(1.0, least=0)
    """Largest norm of a replica's gradient; 0 does not clip."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Number format that the model computes in; weights stay float32."""
    compile: bool = setting(False, may_differ=AFTER_RESUME | BETWEEN_MACHINES | BETWEEN_PEERS)
    """Compile the model's layers (torch.compile): slower to start, faster steps; the last bits differ (docs: Speed)."""
    batched_replicas: bool = setting(False, may_differ=AFTER_RESUME)
    """Simulated network: replicas compute their gradients together, as one batch of models; the same to rounding."""
    recompute: bool = False
    """Keep no layer's inner activations; compute them again in the backward pass."""
    memory: str = setting("", may_differ=AFTER_RESUME | BETWEEN_MACHINES | BETWEEN_PEERS)
    """Memory that each process is to fit into: 16GB, 40% (of the device's) or auto (docs: Memory)."""
    far_folder: str = setting("", may_differ=AFTER_RESUME | BETWEEN_MACHINES | BETWEEN_PEERS)
    """With --memory: a folder on a fast disk for what has no room near; unset: a GPU's goes to the host's memory."""
    stages: int = setting(1, least=1, may_differ=AFTER_RESUME | BETWEEN_PEERS)
    """Processes that the layers of one replica are divided among: a pipeline."""
    shard: int = setting(1, least=1, may_differ=AFTER_RESUME | BETWEEN_PEERS)
    """Processes that the parameters of each stage are divided among (FSDP); they share its batch."""
    swarm: bool = False
    """On the internet: each peer serves one stage, and each microbatch goes through a peer of every stage."""
    stepping: Literal["local", "synchronous", "asynchronous"] = "local"
    """A swarm's peers take each step by themselves, all together as one large batch would, or after each microbatch."""
    islands: str | None = setting(None, may_differ=AFTER_RESUME)
    """Stages x shards of each replica where they differ: "1x1 2x4"; replaces --replicas, --stages and --shard."""
    gateway: bool = setting(False, may_differ=BETWEEN_PEERS)
    """On the internet: a replica's first process exchanges for all of them, at one port, and keeps all anchors."""
    pipeline_schedule: Literal["1f1b", "gpipe", "interleaved", "zero-bubble"] = setting(
        "1f1b", may_differ=AFTER_RESUME | BETWEEN_PEERS, formerly="schedule"
    )
    """The order in which stages compute microbatches."""
    routes: Literal["fixed", "random"] = "fixed"
    """Whether a microbatch stays in its replica, or goes to a random replica's next stage each time."""
    boundary: str = setting("float32", may_differ=AFTER_RESUME | BETWEEN_PEERS)
    """What crosses from stage to stage: float32, bfloat16, int8, int4, topk10, subspace32 (docs: A pipeline)."""
    offload: bool = setting(False, may_differ=BETWEEN_MACHINES)
    """Keep weights and the state of both optimizers on the CPU; the device holds only what it is computing with."""

    def shapes(self) -> list[IslandShape]:
        """The shapes of the replicas that `islands` names; where it names none, of any replica. Raises UserError."""
        if self.islands is None:
            return [IslandShape(self.stages, self.shard)]
        if self.stages > 1 or self.shard > 1:
            raise UserError("islands says the stages and shards of each replica; leave out --stages and --shard")
        found = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", word) for word in re.split(r"[\s,]+", self.islands.strip())]
        if not all(found):
            raise UserError(f"islands is {self.islands!r}; give stages x shards of each replica, such as '1x1 2x4'")
        return [IslandShape(*map(int, one.groups())) for one in found if one]

    def of(self, shape: IslandShape) -> IslandSettings:
        """The settings of an island of some shape; one stage has no boundary."""
        usual = IslandSettings()
        alone = {name: getattr(usual, name) for name in BETWEEN_STAGES} if self.islands and shape.stages == 1 else {}
        return replace(self, islands=None, stages=shape.stages, shard=shape.shards, **alone)

    @property
    def processes(self) -> int:
        """Processes of one replica, where all are alike; of a swarm, of one peer."""
        return 1 if self.swarm else self.stages * self.shard

    @property
    def divided(self) -> bool:
        """Whether some replica is several processes that start together; the stages of a swarm do not."""
        return not self.swarm and any(shape.processes > 1 for shape in self.shapes())

    @property
    def parts(self) -> int:
        """Microbatches that a process's share of a batch is computed in."""
        return self.microbatches or (2 * self.stages if self.stages > 1 and self.stepping != "asynchronous" else 1)

    @property
    def unplanned(self) -> str:
        """What of these settings no plan of memory is made for yet; "" where nothing is."""
        unfit = {
            f"pipeline_schedule {self.pipeline_schedule}": self.pipeline_schedule not in ("1f1b", "gpipe"),
            "swarm": self.swarm,
            "offload": self.offload,
            "recompute": self.recompute,
        }
        return next((name for name, chosen in unfit.items() if chosen), "")

    def in_flight(self, stage: int) -> int:
        """Microbatches whose forward passes wait for their backward passes, at most; of one piece in each process."""
        return self.parts if self.pipeline_schedule == "gpipe" else min(self.parts, self.stages - stage)

    @property
    def pieces(self) -> int:
        """Pieces that a model is cut into."""
        return self.stages * PIECES_EACH[self.pipeline_schedule]
