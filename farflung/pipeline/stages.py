"""A pipeline stage of torch's schedules that routes and encodes its microbatches itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward

from farflung.networks import Traffic
from farflung.pipeline.boundaries import Boundary
from farflung.pipeline.routes import Routes

ProcessOf = Callable[[int, int], int]
"""The process that has a piece (its number) of a replica."""


@dataclass
class Transport:
    """How microbatches reach a stage and leave it.

    Args:
        group: over which they travel.
        replica: this process's.
        before, after: the boundaries on both sides.
        traffic: counts what is sent and received.
    """

    group: dist.ProcessGroup
    replica: int
    process_of: ProcessOf
    before: Boundary
    after: Boundary
    traffic: Traffic


class RoutedStage(PipelineStage):
    """One piece of the model in torch's schedules; `routes` say with which replicas' pieces it exchanges.

    Sums that pieces hand on beside the hidden states travel as they are, in packets of their own.

    Args:
        piece, index, count: the piece, its number, and of how many.
        shapes: what goes in, and what comes out, shapes and dtypes only.
        pipeline_group: the processes of this replica's pipeline.
    """

    frees = False
    """Whether a sharded piece frees weights after each backward pass, to gather them once more for the next."""

    def __init__(
        self,
        piece: Any,
        index: int,
        count: int,
        shapes: tuple[tuple[Tensor, ...], tuple[Tensor, ...]],
        pipeline_group: dist.ProcessGroup,
        transport: Transport,
        device: torch.device,
    ) -> None:
        entering, leaving = shapes
        # Torch's own messages, with which stages agree, go from this device; and Gloo reads the host's memory alone.
        host = torch.device("cpu")
        super().__init__(piece, index, count, host, input_args=entering, output_args=leaving, group=pipeline_group)
        self._computes_on = device
        self.batches: list[Tensor] = []
        """The samples of each microbatch of the step."""
        self.routes: Routes
        self._transport = transport
        self._before, self._after = transport.before, transport.after
        self._sums = [torch.empty(piece.sums)] if piece.sums else []
        self._inbox: dict[tuple[str, int], list[Tensor]] = {}

    def begin_step(self, routes: Routes, batches: list[Tensor]) -> None:
        """Sets the next step's microbatches and their routes."""
        self.routes, self.batches = routes, batches
        self._before.spoilt = self._after.spoilt = False
        self._inbox.clear()

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Computes a microbatch, whose samples the piece gets as well."""
        self._computed = self.batches[fwd_chunk_id]
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *entering: Tensor) -> Any:
        """Calls the piece."""
        return self.submod(*entering, batch=self._computed)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Has a sharded piece share out its gradients layer by layer in a step's last backward pass, and not after it.

        So nobody holds all of them, nor all weights. What is summed up is the same.
        """
        last = last_backward and backward_type == "full"
        if not (isinstance(self.submod, FSDPModule) and (last or self.frees)):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        self.submod.set_is_last_backward(last)
        self.submod.set_reshard_after_backward(True)
        self.submod.set_requires_gradient_sync(last)
        return stage_backward(**bwd_kwargs), None

    @property
    def spoilt(self) -> bool:
        """Whether NaN or infinity was to be sent in this step."""
        return self._before.spoilt or self._after.spoilt

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receives a microbatch from the replica before on its route."""
        return [] if self.is_first else self._receive("forward", fwd_chunk_id, self._back(fwd_chunk_id), self._before)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends a microbatch on."""
        if self.is_last:
            return []
        (hidden, *sums), _ = self.fwd_cache[fwd_chunk_id]
        packet = self._after.pack(hidden, self.batches[fwd_chunk_id])
        return self._send("forward", fwd_chunk_id, self._onward(fwd_chunk_id), packet, sums)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receives the gradient from where the microbatch was sent to."""
        if self.is_last or not self.has_backward:
            return []
        return self._receive("backward", bwd_chunk_id, self._onward(bwd_chunk_id), self._after)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends the gradient to where the microbatch came from."""
        if self.is_first or not self.has_backward:
            return []
        gradient, *of_sums = self.bwd_cache.pop(bwd_chunk_id)
        assert gradient is not None
        packet = self._before.pack_gradient(gradient)
        return self._send("backward", bwd_chunk_id, self._back(bwd_chunk_id), packet, of_sums)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        packet, *sums = self._inbox.pop(("forward", fwd_chunk_id))
        entering = (self._before.unpack(packet, self.batches[fwd_chunk_id]), *(s.to(self._computes_on) for s in sums))
        return tuple(tensor.requires_grad_(self.has_backward) for tensor in entering)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor, ...]:
        packet, *of_sums = self._inbox.pop(("backward", bwd_chunk_id))
        return (self._after.unpack_gradient(packet), *(s.to(self._computes_on) for s in of_sums))

    def _onward(self, microbatch: int) -> int:
        replica = self.routes.onward(self._transport.replica, microbatch, self.stage_index)
        return self._transport.process_of(self.stage_index + 1, replica)

    def _back(self, microbatch: int) -> int:
        replica = self.routes.back(self._transport.replica, microbatch, self.stage_index - 1)
        return self._transport.process_of(self.stage_index - 1, replica)

    def _receive(self, way: str, microbatch: int, peer: int, boundary: Boundary) -> list[dist.P2POp]:
        rooms = self._inbox[way, microbatch] = [boundary.room(), *(torch.empty_like(sums) for sums in self._sums)]
        for room in rooms:
            self._transport.traffic.received(room.nbytes)
        return self._ops(dist.irecv, rooms, peer, way, microbatch)

    def _send(self, way: str, microbatch: int, peer: int, packet: Tensor, sums: Sequence[Any]) -> list[dist.P2POp]:
        packets = [packet, *(tensor.detach().cpu() for tensor in sums)]
        for tensor in packets:
            self._transport.traffic.sent(tensor.nbytes)
        return self._ops(dist.isend, packets, peer, way, microbatch)

    def _ops(self, op: Any, tensors: list[Tensor], peer: int, way: str, microbatch: int) -> list[dist.P2POp]:
        # Two boundaries may join the same two processes: the tag tells their messages apart.
        boundary = self.stage_index - (op is dist.irecv) if way == "forward" else self.stage_index - (op is dist.isend)
        first = 4 * (boundary * (self.chunks or 1) + microbatch) + 2 * (way == "backward")
        return [dist.P2POp(op, tensor, peer, self._transport.group, first + n) for n, tensor in enumerate(tensors)]
