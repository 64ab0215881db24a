"""Which process of a run is which part of which replica: a mesh of replicas, stages and shards."""

from __future__ import annotations

from dataclasses import dataclass

from farflung.errors import UserError
from farflung.pipeline.settings import IslandSettings, IslandShape


@dataclass(frozen=True)
class MeshCoordinates:
    """Where one process is: its replica, its stage of the pipeline there, and its shard of that stage."""

    replica: int
    stage: int = 0
    shard: int = 0


@dataclass(frozen=True)
class Mesh:
    """How a run's processes are numbered: replica by replica, in each stage by stage, in each stage shard by shard.

    A replica's layers are divided among stages, each stage's parameters among shards; replicas may have unlike shapes.
    The `first` has that number; on an elastic network it is the only one that there is here.
    """

    shapes: tuple[IslandShape, ...]
    first: int = 0

    @classmethod
    def alike(cls, replicas: int, stages: int = 1, shards: int = 1) -> Mesh:
        """Replicas of one shape."""
        return cls((IslandShape(stages, shards),) * replicas)

    @property
    def replicas(self) -> int:
        """Copies of the model."""
        return len(self.shapes)

    @property
    def processes(self) -> int:
        """Processes of the run."""
        return sum(shape.processes for shape in self.shapes)

    @property
    def islands(self) -> tuple[tuple[int, ...], ...]:
        """The processes of each replica."""
        return tuple(self.island_group(MeshCoordinates(self.first + place)) for place in range(self.replicas))

    def shape(self, replica: int) -> IslandShape:
        """How a replica is divided."""
        return self.shapes[replica - self.first]

    def coordinates(self, process: int) -> MeshCoordinates:
        """Where a process is in the mesh."""
        replica, part = self.first, process
        while part >= self.shape(replica).processes:
            part -= self.shape(replica).processes
            replica += 1
        return MeshCoordinates(replica, *divmod(part, self.shape(replica).shards))

    def process(self, replica: int, stage: int = 0, shard: int = 0) -> int:
        """The number of a process."""
        before = sum(shape.processes for shape in self.shapes[: replica - self.first])
        return before + self.part(MeshCoordinates(replica, stage, shard))

    def part(self, coordinates: MeshCoordinates) -> int:
        """The number of a process within its island; 0 leads the replica."""
        return coordinates.stage * self.shape(coordinates.replica).shards + coordinates.shard

    def file_stem(self, coordinates: MeshCoordinates) -> str:
        """The name of a process's files, without their endings."""
        processes = self.shape(coordinates.replica).processes
        if processes == 1:
            return f"replica-{coordinates.replica}"
        return f"replica-{coordinates.replica}-part-{self.part(coordinates)}-of-{processes}"

    def describe(self, process: int) -> str:
        """The name of a process in messages."""
        coordinates = self.coordinates(process)
        shape = self.shape(coordinates.replica)
        stage = f"stage {coordinates.stage} of " if shape.stages > 1 else ""
        shard = f"shard {coordinates.shard} of " if shape.shards > 1 else ""
        return f"{shard}{stage}replica {coordinates.replica}"

    def island_group(self, coordinates: MeshCoordinates) -> tuple[int, ...]:
        """The processes of one replica."""
        first = self.process(coordinates.replica)
        return tuple(range(first, first + self.shape(coordinates.replica).processes))

    def pipeline_group(self, coordinates: MeshCoordinates) -> tuple[int, ...]:
        """The processes of one replica's pipeline with the same shard, by stage."""
        stages = range(self.shape(coordinates.replica).stages)
        return tuple(self.process(coordinates.replica, stage, coordinates.shard) for stage in stages)

    def shard_group(self, coordinates: MeshCoordinates) -> tuple[int, ...]:
        """The processes that hold one replica's stage together."""
        shards = range(self.shape(coordinates.replica).shards)
        return tuple(self.process(coordinates.replica, coordinates.stage, shard) for shard in shards)


def whole_replicas(processes: int, settings: IslandSettings) -> int:
    """How many replicas so many processes make. Raises UserError when they do not divide."""
    shapes = settings.shapes()
    count = sum(shape.processes for shape in shapes)
    if settings.islands and processes != count:
        raise UserError(
            f"islands {settings.islands} are {count} processes together, and {processes} are started; start {count}"
        )
    if processes % count:
        raise UserError(
            f"{processes} processes cannot be replicas of {settings.shapes()[0]}; "
            f"start a multiple of {count}, or choose other --stages and --shard"
        )
    return processes // count * len(shapes)
