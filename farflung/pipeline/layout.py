"""Which process of a run is which part of which replica."""

from __future__ import annotations

from dataclasses import dataclass

from farflung.errors import UserError
from farflung.pipeline.settings import IslandSettings


@dataclass(frozen=True)
class Place:
    """One process's place: its replica, its stage of the pipeline there, and its shard of that stage."""

    replica: int
    stage: int = 0
    shard: int = 0


@dataclass(frozen=True)
class Layout:
    """How a run's processes are laid out: replica by replica, in each stage by stage, in each of these its shards.

    Args:
        replicas: islands.
        stages: processes that a replica's layers are divided among.
        shards: processes that each stage's parameters are divided among.
    """

    replicas: int
    stages: int = 1
    shards: int = 1

    @classmethod
    def of(cls, settings: IslandSettings, replicas: int) -> Layout:
        """The layout of so many replicas with these settings."""
        return cls(replicas, settings.stages, settings.shard)

    @property
    def island(self) -> int:
        """Processes of one replica."""
        return self.stages * self.shards

    @property
    def processes(self) -> int:
        """Processes of the run."""
        return self.replicas * self.island

    def place(self, process: int) -> Place:
        """Where a process belongs."""
        replica, part = divmod(process, self.island)
        return Place(replica, *divmod(part, self.shards))

    def process(self, replica: int, stage: int = 0, shard: int = 0) -> int:
        """The process at a place."""
        return replica * self.island + stage * self.shards + shard

    def part(self, place: Place) -> int:
        """The number of a place within its island; 0 speaks for the replica."""
        return place.stage * self.shards + place.shard

    def seat(self, place: Place) -> str:
        """What a place's files are called."""
        if self.island == 1:
            return f"replica-{place.replica}"
        return f"replica-{place.replica}-part-{self.part(place)}-of-{self.island}"

    def describe(self, process: int) -> str:
        """How a process is called in messages."""
        place = self.place(process)
        stage = f"stage {place.stage} of " if self.stages > 1 else ""
        shard = f"shard {place.shard} of " if self.shards > 1 else ""
        return f"{shard}{stage}replica {place.replica}"

    def peers(self, place: Place) -> tuple[int, ...]:
        """The processes that hold the same part of every replica: those that rounds are held with."""
        return tuple(self.process(replica, place.stage, place.shard) for replica in range(self.replicas))

    def island_of(self, place: Place) -> tuple[int, ...]:
        """The processes of one replica."""
        return tuple(range(self.process(place.replica), self.process(place.replica + 1)))

    def column(self, place: Place) -> tuple[int, ...]:
        """The processes of one replica's pipeline that hold the same shard, by stage."""
        return tuple(self.process(place.replica, stage, place.shard) for stage in range(self.stages))

    def shards_of(self, place: Place) -> tuple[int, ...]:
        """The processes that hold one replica's stage together."""
        return tuple(self.process(place.replica, place.stage, shard) for shard in range(self.shards))


def replicas_of(processes: int, settings: IslandSettings) -> int:
    """How many replicas so many processes make. Raises UserError when they do not divide."""
    island = settings.processes
    if processes % island:
        raise UserError(
            f"{processes} processes cannot be replicas of {settings.stages} stages × {settings.shard} shards; "
            f"start a multiple of {island}, or choose other --stages and --shard"
        )
    return processes // island
