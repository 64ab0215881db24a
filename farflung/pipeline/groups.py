"""The processes of one island: groups of torch.distributed, and who was lost when one fails."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from farflung.errors import UserError
from farflung.hooks.shared_memory import Parts
from farflung.hooks.swaps import Swaps
from farflung.networks import PeerLostError, TorchNetwork
from farflung.networks.base import packet_of
from farflung.networks.settings import NetworkSettings
from farflung.pipeline.mesh import Mesh

T = TypeVar("T")

DEADLINES_OF_A_STAGE = 2
"""A stage may wait this many deadlines for another, which itself may wait for a round."""

PROBE_BYTES, PROBES = 1 << 22, 3
"""How much shards exchange to measure their link, and how often; the best counts."""

SLOW_MBPS = 300.0
"""The links of a machine, or of a rack, carry more."""

NOTICE_SECONDS = 0.5
"""How long until connections show that a process on another machine has ended."""


class ProcessGroups:
    """The process groups that this process belongs to, made once all others have come as far.

    Args:
        network: of all processes of the run.
        waits: the longest wait for the others to start, and for a round.
        roaming: whether microbatches leave the island.
        device: what shards are gathered on.
        gateway: whether only the island's first process meets other replicas.

    Raises PeerLostError, and UserError where two shards would compute on one GPU.
    """

    def __init__(
        self,
        network: TorchNetwork,
        mesh: Mesh,
        waits: NetworkSettings,
        roaming: bool,
        device: torch.device,
        gateway: bool = False,
    ) -> None:
        self.mesh = mesh
        self.gateway = gateway
        self.coordinates = mesh.coordinates(network.process)
        self.shape = mesh.shape(self.coordinates.replica)
        self._network = network
        self._limit = timedelta(seconds=DEADLINES_OF_A_STAGE * waits.deadline)
        self._near = tuple(range(mesh.processes)) if roaming else mesh.island_group(self.coordinates)
        self._meet(waits.starting)
        self.island = self._group(mesh.island_group(self.coordinates))
        self.pipeline_group = self._group(mesh.pipeline_group(self.coordinates))
        self.everyone = self._group(self._near)
        shards = self.mesh.shard_group(self.coordinates)
        self._shards = {"cpu": self._group(shards)}
        _refuse_one_for_two(device, self._shards["cpu"])
        if device.type == "cuda":
            torch.cuda.set_device(device)  # FSDP works on the current one
            self._shards["cuda"] = self._group(shards, "nccl")
        self._device = device
        self._swaps = {kind: Swaps(group) for kind, group in self._shards.items()}
        self._swaps_of_all = Swaps(self.island)

    def shard_mesh(self) -> DeviceMesh:
        """The processes that hold this stage together, for FSDP."""
        return DeviceMesh.from_group(self._shards[self._device.type], self._device.type)

    def swap(self, outgoing: Parts, incoming: Parts, like: Tensor) -> None:
        """See Layout.swap: among the shards of this stage."""
        swaps = self._swaps.get(like.device.type, self._swaps["cpu"])  # where there is one, it swaps with itself
        swaps(outgoing, incoming, like)

    def swap_among_all(self, outgoing: Parts, incoming: Parts, like: Tensor) -> None:
        """See Layout.swap: among all processes of the island, through the host's memory."""
        self._swaps_of_all(outgoing, incoming, like[:0].cpu())

    def slow_link(self) -> str:
        """A warning where the shards of this stage are joined by a link that is measured to be slow; or ""."""
        shards = self.shape.shards
        if shards == 1:
            return ""
        values, seconds = torch.zeros(PROBE_BYTES // 4, device=self._device), []
        for _ in range(PROBES):
            began = time.monotonic()
            dist.all_reduce(values, group=self._shards[self._device.type])
            float(values[0])  # of a GPU, which would go on by itself
            seconds.append(time.monotonic() - began)
        mbps = 8e-6 * PROBE_BYTES * 2 * (shards - 1) / shards / min(seconds)
        if mbps > SLOW_MBPS:
            return ""
        return (
            f"the shards of stage {self.coordinates.stage} are joined by a slow link, {mbps:.0f} Mbit/s as measured, "
            "and all their weights cross it in every step; put --shard within a machine, --stages between machines"
        )

    def told(self, fact: T) -> list[T]:
        """What each of the island's processes tells, in their order."""
        facts: list[Any] = [None] * self.shape.processes
        dist.all_gather_object(facts, fact, group=self.island)
        return facts

    def told_by_shards(self, fact: T) -> list[T]:
        """What each of this stage's shards tells, in their order."""
        facts: list[Any] = [None] * self.shape.shards
        dist.all_gather_object(facts, fact, group=self._shards["cpu"])
        return facts

    def total(self, values: Tensor) -> Tensor:
        """The sum over the island of flat float64 values."""
        dist.all_reduce(values, group=self.island)
        return values

    @contextlib.contextmanager
    def naming_the_lost(self) -> Iterator[None]:
        """Turns an error inside into a PeerLostError that names the lost process, where one was lost."""
        try:
            yield
        except RuntimeError as error:
            # After a time-out Gloo closes all connections, which then no longer tell who is gone.
            late = _is_late(error)
            lost = self._others() if late else self._lost()
            if not lost:
                raise
            fault = self._fault(lost, late)
            raise PeerLostError(fault.ranks, self._first_cause(str(fault))) from error

    def _fault(self, processes: Sequence[int], late: bool) -> PeerLostError:
        """The error that some processes are lost, or that one of them has kept silent for too long."""
        names, limit = self._named(processes), self._limit.total_seconds()
        reason = f"lost {names}: a replica cannot train without all of its stages and shards"
        if late:
            reason = f"no word within {limit:g} s from one of: {names}; see which hangs, or raise the deadline"
        return PeerLostError(self._replicas_of(processes), reason)

    def _named(self, processes: Sequence[int]) -> str:
        return ", ".join(f"{self.mesh.describe(p)} ({self._network.address_of(p)})" for p in processes)

    def _replicas_of(self, processes: Sequence[int]) -> list[int]:
        return [self.mesh.coordinates(process).replica for process in processes]

    def _lost(self) -> list[int]:
        """The processes to which connections are broken; posting to them fails at once."""
        time.sleep(NOTICE_SECONDS)
        lost = []
        for process in self._others():
            try:
                dist.irecv(torch.empty(1), process, group=self.everyone, tag=1 << 30)
            except RuntimeError:
                lost.append(process)
        return lost

    def _others(self) -> list[int]:
        """The processes with which this one exchanges microbatches."""
        return [process for process in self._near if process != self._network.process]

    def _first_cause(self, reason: str) -> str:
        """The reason of the process that noticed first; the others leave because of it."""
        key = f"lost in replica {self.coordinates.replica}"
        try:
            return self._network.store.compare_set(key, "", reason).decode()
        except (dist.DistError, RuntimeError):  # the store's keeper may be the one that is lost
            return reason

    def _meet(self, seconds: float) -> None:
        """Waits until all have come so far: groups are made, and keep, within the time of a step."""
        pending = self._network.exchange(packet_of(b"here"), self._near, "process groups")
        try:
            pending.wait(seconds)
        except PeerLostError as lost:
            if pending.done():
                raise self._fault(lost.ranks, late=False) from lost
            names = self._named(lost.ranks)
            reason = f"not started within {seconds:g} s: {names}; see which hangs, or give it longer with --starting"
            raise PeerLostError(self._replicas_of(lost.ranks), reason) from lost

    def _group(self, processes: Sequence[int], backend: str = "gloo") -> dist.ProcessGroup:
        try:
            group = dist.new_group(
                list(processes), timeout=self._limit, backend=backend, use_local_synchronization=True
            )
        except RuntimeError as error:
            others = [process for process in processes if process != self._network.process]
            raise self._fault(others, _is_late(error)) from error
        assert isinstance(group, dist.ProcessGroup)
        return group


def _refuse_one_for_two(device: torch.device, shards: dist.ProcessGroup) -> None:
    """Raises UserError where two shards would compute on one GPU, which NCCL does not let them."""
    if device.type == "cpu" or shards.size() == 1:
        return
    told: list[Any] = [None] * shards.size()
    dist.all_gather_object(told, (socket.gethostname(), str(device)), group=shards)
    if twice := [seat for seat in told if told.count(seat) > 1]:
        raise UserError(
            f"{len(twice)} shards of one stage would share {twice[0][1]} of {twice[0][0]}, and each needs its own; "
            "give fewer with --shard, or compute with --device cpu"
        )


def _is_late(error: RuntimeError) -> bool:
    """Whether a wait was too long, as Gloo or torch's store say it."""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text
