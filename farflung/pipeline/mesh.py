"""Which process of a run is which part of which replica: a mesh of replicas, stages and shards."""

from __future__ import annotations

from dataclasses import dataclass

from farflung.errors import UserError
from farflung.pipeline.settings import IslandSettings


@dataclass(frozen=True)
class MeshCoordinates:
    """Where one process is: its replica, its stage of the pipeline there, and its shard of that stage."""

    replica: int
    stage: int = 0
    shard: int = 0


@dataclass(frozen=True)
class Mesh:
    """How a run's processes are numbered: replica by replica, in each stage by stage, in each stage shard by shard.

    A replica's layers are divided among stages, each stage's parameters among shards.
    """

    replicas: int
    stages: int = 1
    shards: int = 1

    @property
    def island(self) -> int:
        """Processes of one replica."""
        return self.stages * self.shards

    @property
    def processes(self) -> int:
        """Processes of the run."""
        return self.replicas * self.island

    def coordinates(self, process: int) -> MeshCoordinates:
        """Where a process is in the mesh."""
        replica, part = divmod(process, self.island)
        return MeshCoordinates(replica, *divmod(part, self.shards))

    def process(self, replica: int, stage: int = 0, shard: int = 0) -> int:
        """The number of a process."""
        return replica * self.island + stage * self.shards + shard

    def part(self, coordinates: MeshCoordinates) -> int:
        """The number of a process within its island; 0 leads the replica."""
        return coordinates.stage * self.shards + coordinates.shard

    def file_stem(self, coordinates: MeshCoordinates) -> str:
        """The name of a process's files, without their endings."""
        if self.island == 1:
            return f"replica-{coordinates.replica}"
        return f"replica-{coordinates.replica}-part-{self.part(coordinates)}-of-{self.island}"

    def describe(self, process: int) -> str:
        """The name of a process in messages."""
        coordinates = self.coordinates(process)
        stage = f"stage {coordinates.stage} of " if self.stages > 1 else ""
        shard = f"shard {coordinates.shard} of " if self.shards > 1 else ""
        return f"{shard}{stage}replica {coordinates.replica}"

    def data_parallel_group(self, coordinates: MeshCoordinates) -> tuple[int, ...]:
        """The processes that hold the same part of every replica, and hold rounds together."""
        return tuple(self.process(replica, coordinates.stage, coordinates.shard) for replica in range(self.replicas))

    def island_group(self, coordinates: MeshCoordinates) -> tuple[int, ...]:
        """The processes of one replica."""
        return tuple(range(self.process(coordinates.replica), self.process(coordinates.replica + 1)))

    def pipeline_group(self, coordinates: MeshCoordinates) -> tuple[int, ...]:
        """The processes of one replica's pipeline with the same shard, by stage."""
        return tuple(self.process(coordinates.replica, stage, coordinates.shard) for stage in range(self.stages))

    def shard_group(self, coordinates: MeshCoordinates) -> tuple[int, ...]:
        """The processes that hold one replica's stage together."""
        return tuple(self.process(coordinates.replica, coordinates.stage, shard) for shard in range(self.shards))


def whole_replicas(processes: int, settings: IslandSettings) -> int:
    """How many replicas so many processes make. Raises UserError when they do not divide."""
    island = settings.processes
    if processes % island:
        raise UserError(
            f"{processes} processes cannot be replicas of {settings.stages} stages × {settings.shard} shards; "
            f"start a multiple of {island}, or choose other --stages and --shard"
        )
    return processes // island
