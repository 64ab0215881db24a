"""Replicas as processes over torch.distributed: `torchrun` on one machine or many, Gloo or NCCL."""

from __future__ import annotations

import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store
from torch.distributed.distributed_c10d import _get_default_store

from farflung.errors import UserError
from farflung.networks.base import Combine, Finished, Group, Packets, Pending, mean_in_order
from farflung.networks.board import Board, connected_anew
from farflung.networks.torchrun import join
from farflung.networks.transfer import RealNetwork, Transfer
from farflung.networks.works import Work, end_all, in_thread
from farflung.renamed import Formerly

T = TypeVar("T")

CHUNK = 1 << 16
"""Elements that a reduction handles at a time: while one chunk is averaged, others are on the wire."""

IN_FLIGHT = 32
"""Chunks on the wire at a time in each phase: 8 MB of float32, about what one TCP connection keeps in flight."""

_GRACE_SECONDS = 0.5
"""Time after a passed deadline to find out who has delivered."""


class TorchNetwork(RealNetwork):
    """Processes of the default process group as replicas.

    Args:
        addresses: each process's name in error messages.
        store: where processes leave messages for each other; by default the process group's own.
        processes: the replicas' ranks in the process group, in order; by default all.
        board: where replicas leave each other words; by default one with another connection to the store.
    """

    relay, computed = Formerly("scatter_combine_gather"), Formerly("advance")
    elastic = near = None

    def __init__(
        self,
        addresses: Mapping[int, str] | None = None,
        store: Store | None = None,
        processes: Sequence[int] | None = None,
        board: Board | None = None,
    ) -> None:
        super().__init__()
        self.processes = tuple(range(dist.get_world_size()) if processes is None else processes)
        self.process = dist.get_rank()
        self.rank = self.processes.index(self.process)
        nccl = dist.get_backend() == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        self._members = tuple(range(len(self.processes)))
        self._addresses = addresses or {}
        self.island_processes: Sequence[Group] = ()
        self.store = store or _get_default_store()
        self.board: Board = board or Board(connected_anew(self.store), self.processes, self.process)

    @classmethod
    def from_env(cls, starting: float = 600.0) -> TorchNetwork:
        """Joins the process group that torchrun's environment variables describe, unless already in one.

        Raises UserError when the others do not come within `starting` seconds, or the port is in use.
        """
        if dist.is_initialized():
            return cls()
        addresses, store, another = join(starting)
        return cls(addresses, store, board=Board(another, range(dist.get_world_size()), dist.get_rank()))

    def among(self, processes: Sequence[int]) -> TorchNetwork:
        """The network of some of the processes, this one among them; the first is replica 0 there.

        Raises UserError where a process is not there, or given twice.
        """
        self._check_seats(processes)
        network = TorchNetwork(self._addresses, self.store, processes, self.board.among(processes))
        network._attachments = self._attachments  # both send under the same process group's keys
        return network

    def of_islands(self, islands: Sequence[Group]) -> TorchNetwork:
        """The network of replicas that are several processes each; these may have unlike layouts.

        Raises UserError where a process is not there, or in two islands, or this one is in none.
        """
        if empty := [replica for replica, island in enumerate(islands) if not island]:
            raise UserError(f"replica {empty[0]} is an island without processes; give each replica at least one")
        self._check_seats([process for island in islands for process in island])
        own = next(island for island in islands if self.process in island)
        network = self.among([island[own.index(self.process) % len(island)] for island in islands])
        network.island_processes = tuple(islands)
        return network

    def _check_seats(self, processes: Sequence[int]) -> None:
        """Raises UserError unless each is a process that has joined, and this one is there."""
        joined = dist.get_world_size()
        if unknown := [process for process in processes if process not in range(joined)]:
            raise UserError(
                f"process {unknown[0]} is none of the {joined} that have joined; give ranks from 0 to {joined - 1}"
            )
        if self.process not in processes:
            named = ", ".join(map(str, processes)) or "no processes"
            raise UserError(
                f"process {self.process} is none of {named}; name it there, or leave this out in processes that take "
                "no part"
            )
        if len(set(processes)) < len(processes):
            twice = next(process for process, seats in Counter(processes).items() if seats > 1)
            raise UserError(f"process {twice} is given twice, but it has one seat; name each process once")

    @property
    def islands(self) -> TorchNetwork | None:
        """See Network."""
        return self if self.island_processes else None

    def between(self, processes: Sequence[int]) -> TorchNetwork:
        """See IslandNetwork."""
        network = self.among(processes)
        network.traffic = self.traffic
        return network

    def everyone(self) -> TorchNetwork:
        """See IslandNetwork."""
        return self.among([process for island in self.island_processes for process in island])

    def members(self) -> Group:
        """Every rank, dead or alive: all must agree on the groups, and a dead partner fails at once."""
        return self._members

    def exchange(self, packet: Tensor, group: Group, key: str) -> Pending[Packets]:
        """See Network. Lengths travel first, then all packets at once, both directions of each link together."""
        if group == (self.rank,):
            return Finished({self.rank: packet}, self.now())

        def work(transfer: _Exchange[Packets]) -> Packets:
            transfer.delivered = self._swap_packets(dict.fromkeys(transfer.others, packet), transfer, key)
            return transfer.all_with(packet)

        return _Exchange(self, group, work)

    def all_to_all(self, packets: Packets, group: Group, key: str) -> Pending[Packets]:
        """See Network. Lengths travel first, as in `exchange`."""

        def work(transfer: _Exchange[Packets]) -> Packets:
            transfer.delivered = self._swap_packets(packets, transfer, key)
            return transfer.all_received()

        return _Exchange(self, group, work)

    def scatter_combine_gather(self, packets: Packets, group: Group, key: str, combine: Combine) -> Pending[Packets]:
        """See Network. Combines in the exchange's thread."""

        def work(transfer: _Exchange[Packets]) -> Packets:
            received = self._swap_packets(packets, transfer, f"{key}: parts")
            combined = combine({rank: received[rank] for rank in sorted(received)})
            transfer.delivered = self._swap_packets(dict.fromkeys(transfer.alive, combined), transfer, f"{key}: means")
            return transfer.all_with(combined)

        return _Exchange(self, group, work)

    def all_reduce(self, tensor: Tensor, group: Group, key: str) -> Pending[Tensor]:
        """See Network. Each member averages its part of each chunk, and sends it to the others."""
        if group == (self.rank,):
            return Finished(tensor, self.now())
        # Whoever calls with another size or dtype must not be taken for a partner: it would be averaged half.
        same = f"{key} of {tensor.numel()} {tensor.dtype}"
        return _Exchange(self, group, lambda transfer: self._all_reduce(tensor, transfer, same))

    def address(self, rank: int) -> str:
        """How to call a replica in a message."""
        return f"replica {rank} ({self.address_of(self.processes[rank])})"

    def address_of(self, process: int) -> str:
        """The host of a process, and its number there."""
        return self._addresses.get(process, "address unknown")

    def close(self) -> None:
        """Leaves the process group, once what is under way has ended."""
        if dist.is_initialized():
            end_all()
            dist.destroy_process_group()

    def _swap_packets(self, packets: Packets, transfer: _Exchange[Any], key: str) -> Packets:
        """Sends each of the living its packet and receives theirs; lengths travel first."""
        device = next((packet.device for packet in packets.values()), self.device)
        outgoing = {peer: packets[peer].to(self.device).contiguous() for peer in transfer.alive}
        sizes = {peer: torch.tensor([own.numel()], device=self.device) for peer, own in outgoing.items()}
        lengths = {peer: torch.zeros(1, dtype=torch.int64, device=self.device) for peer in transfer.alive}
        transfer.complete(self._swap(lengths, sizes, f"{key}: lengths"))
        inbox = {
            peer: torch.empty(int(lengths[peer]), dtype=torch.uint8, device=self.device) for peer in transfer.alive
        }
        transfer.complete(self._swap(inbox, {peer: outgoing[peer] for peer in transfer.alive}, f"{key}: packets"))
        return {peer: inbox[peer].to(device) for peer in transfer.alive}

    def _all_reduce(self, tensor: Tensor, transfer: _Exchange[Tensor], key: str) -> Tensor:
        buffer = tensor.to(self.device)
        collected = _ahead(self._collect(chunk, transfer, f"{key}: parts") for chunk in torch.split(buffer, CHUNK))
        handed_round = _ahead(self._hand_round(*parts, transfer, f"{key}: means") for parts in collected)
        for parts, averaged, works in handed_round:
            transfer.complete(works)
            for peer in transfer.alive:
                parts[peer].copy_(averaged[peer])
        if buffer is not tensor:
            tensor.copy_(buffer)
        transfer.raise_if_lost()
        return tensor

    def _collect(self, chunk: Tensor, transfer: _Exchange[Tensor], key: str) -> tuple[Packets, Packets, list[Work]]:
        """Starts sending each member its part of a chunk, and collecting everyone's values of the own part."""
        parts = dict(zip(transfer.group, chunk.tensor_split(len(transfer.group)), strict=True))
        inbox = {peer: torch.empty_like(parts[self.rank]) for peer in transfer.others}
        outgoing = {peer: parts[peer] for peer in transfer.others}
        return parts, inbox, self._swap(inbox, outgoing, key)

    def _hand_round(
        self, parts: Packets, inbox: Packets, works: list[Work], transfer: _Exchange[Tensor], key: str
    ) -> tuple[Packets, Packets, list[Work]]:
        """Averages the own part, and starts sending it to all for theirs."""
        transfer.complete(works)
        transfer.raise_if_lost()
        own = parts[self.rank]
        inbox[self.rank] = own
        own.copy_(mean_in_order([inbox[rank] for rank in transfer.group]))
        # Not received in place: a peer that dies half-way would leave torn numbers among the own values.
        averaged = {peer: torch.empty_like(parts[peer]) for peer in transfer.others}
        return parts, averaged, self._swap(averaged, dict.fromkeys(transfer.others, own), key)

    def _swap(self, incoming: Packets, outgoing: Packets, key: str) -> list[Work]:
        """Starts receiving and sending, receives first: Gloo needs them posted to use both directions of a link."""
        peers, posts = [], []
        for op, count, tensors in (
            (dist.irecv, self.traffic.received, incoming),
            (dist.isend, self.traffic.sent, outgoing),
        ):
            for peer, tensor in tensors.items():
                if tensor.numel():
                    count(tensor.nbytes)
                    peers.append(peer)
                    posts.append(dist.P2POp(op, tensor, self.processes[peer], tag=_tag(key, tensor)))
        if posts and self.device.type == "cuda":
            # NCCL would wait for each operation in turn; as one batch they run together.
            return [Work(peers[0], work) for work in dist.batch_isend_irecv(posts)]
        return [Work.of(post, peer) for post, peer in zip(posts, peers, strict=True)]


class _Exchange(Transfer[T]):
    """An exchange that runs in a thread of its own."""

    def __init__(self, network: TorchNetwork, group: Group, work: Callable[[_Exchange[T]], T]) -> None:
        super().__init__(network, group)
        self._awaited: list[Work] = []
        in_thread(lambda: self._run(work, network.device))

    @property
    def alive(self) -> list[int]:
        """The others that have not been lost."""
        return [rank for rank in self.others if rank not in self.lost]

    def complete(self, works: list[Work]) -> None:
        """Waits for sends and receives; who fails in one is lost, the rest goes on."""
        self._awaited = works
        for work in works:
            if work.failed():
                # Gloo's message begins with a source line and ends with advice for its own developers.
                self.lost.setdefault(work.peer, work.error.split("] ", 1)[-1].split(". ")[0])

    def late(self) -> list[int]:
        """Those with whom something is still under way; all others, where the exchange has not come to that."""
        if len(self.others) == 1:
            return self.others
        watches = [(work.peer, work.watch()) for work in self._awaited]
        ends = time.monotonic() + _GRACE_SECONDS
        for _, watch in watches:
            watch.join(max(0.0, ends - time.monotonic()))
        return sorted({peer for peer, watch in watches if watch.is_alive()}) or self.others

    def _run(self, work: Callable[[_Exchange[T]], T], device: torch.device) -> None:
        try:
            result = work(self)
            if device.type == "cuda":
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            self.fail(error)
        else:
            self.finish(result)


def _ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, made up to IN_FLIGHT ahead of when they are asked for."""
    made: deque[T] = deque()
    for item in items:
        made.append(item)
        if len(made) > IN_FLIGHT:
            yield made.popleft()
    yield from made


def _tag(key: str, tensor: Tensor) -> int:
    """A message tag from an exchange, its phase and the length: Gloo would end the process where two lengths differ."""
    return zlib.crc32(f"{key} {tensor.nbytes}".encode()) & 0x7FFFFFFF
