"""A replica that several processes have parts of: pipeline stages, and shards of each."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from farflung.hooks.embedded import table_names
from farflung.hooks.shards import own_of
from farflung.inner import MuonAdamW
from farflung.networks import Traffic
from farflung.pipeline.ahead import Ahead
from farflung.pipeline.boundaries import Boundary
from farflung.pipeline.compiling import eagerly
from farflung.pipeline.division import Division
from farflung.pipeline.groups import ProcessGroups
from farflung.pipeline.island import Island
from farflung.pipeline.layout import IslandLayout
from farflung.pipeline.local_model import LocalModel, persistent_buffers
from farflung.pipeline.routes import Routes, fixed_routes, random_routes
from farflung.pipeline.settings import IslandSettings
from farflung.pipeline.stages import RoutedStage, Transport
from farflung.scoped import quiet
from farflung.workloads.base import Divisible, Score, held_out_of

T = TypeVar("T")

SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}


@dataclass
class DividedIsland(Island):
    """One process's part of a replica: `pieces` of the model, sharded or not, on their device.

    `seed` is that of batches, routes and samples.
    """

    settings: IslandSettings
    groups: ProcessGroups
    pieces: list[Any]
    division: Division
    workload: Divisible
    seed: int
    device: torch.device
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        self.mesh, self.coordinates = self.groups.mesh, self.groups.coordinates
        settings, division, pieces = self.settings, self.division, self.pieces
        self._microbatches = settings.parts
        self._samples = settings.batch_size // settings.shard
        self._count = len(division.spans)
        self._is_first, self._is_last = self.coordinates.stage == 0, self.coordinates.stage == settings.stages - 1
        self._tied = self._embeddings() if division.tied and self._count > 1 else None
        buffers = {name: buffer for piece in pieces for name, buffer in persistent_buffers(piece.model).items()}
        self._lies = self._layout()
        own_tables = [name for piece in pieces for name in table_names(piece.model)]
        tables = {name for names in self.told(own_tables) for name in names}
        self._part = LocalModel(self._owned(), buffers, self._lies, tables)
        self.model: nn.Module = self._part
        self._stages = [self._stage(piece, number) for number, piece in enumerate(pieces)]
        self._schedule: Any = SCHEDULES[settings.pipeline_schedule](
            self._stages if settings.pipeline_schedule in ("interleaved", "zero-bubble") else self._stages[0],
            n_microbatches=self._microbatches,
            loss_fn=self.pieces[-1].loss,
        )
        self._ahead = Ahead(self._prepared, getattr(self.workload, "let_go", lambda: None))

    @property
    def waited_s(self) -> float:
        """See Island."""
        return self._ahead.waited_s

    def close(self) -> None:
        """See Island."""
        self._ahead.close()

    def gradients(self, step: int) -> tuple[float, str]:
        """See Island. Unlike in `WholeIsland`, a gradient that is not finite is a fault."""
        settings = self.settings
        self._part.drop_gradients()
        routes, batches = self._ahead.at(step)
        for stage, own in zip(self._stages, batches, strict=True):
            stage.begin_step(routes, own)
            for parameter in stage.submod.parameters():
                parameter.grad = None
        losses: list[Tensor] = []
        # Its schedule would print its whole plan when a process is lost.
        with self.groups.naming_the_lost(), quiet("torch.distributed.pipelining.schedules"):
            given = (torch.cat(self._stages[0].batches).to(self.device),) if self._is_first else ()
            labels = torch.cat(self._stages[-1].batches).to(self.device) if self._is_last else None
            self._schedule.step(*given, target=labels, losses=losses, return_outputs=False)
            self._bring_tied_gradient()
            self._part.collect_gradients()
            facts = torch.zeros(3, dtype=torch.float64)
            facts[0] = sum(float(loss.detach()) for loss in losses) / (self._microbatches * settings.shard)
            gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            facts[1] = float(nn.utils.get_total_norm(gradients)) ** 2 if gradients else 0.0
            facts[2] = float(any(stage.spoilt for stage in self._stages))
            loss, squares, spoilt = self.total(facts).tolist()
        fault = self._fault(loss, squares, spoilt)
        if fault:
            self._part.drop_gradients()
        elif settings.clip:
            norm = torch.tensor(math.sqrt(squares), device=self.device)
            nn.utils.clip_grads_with_norm_(self.model.parameters(), settings.clip, norm)
        return loss, fault

    @property
    def in_flight(self) -> int:
        """See IslandSettings.in_flight."""
        return self.settings.in_flight(self.coordinates.stage)

    @property
    def rows(self) -> dict[nn.Parameter, nn.Parameter]:
        """Of sharded parameters what is stepped here; none where this process has all of its stage."""
        return self._part.rows

    def told_by_shards(self, fact: T) -> list[T]:
        """What each of this stage's shards tells. Raises PeerLostError."""
        with self.groups.naming_the_lost():
            return self.groups.told_by_shards(fact)

    def told(self, fact: T) -> list[T]:
        """What each of the replica's processes tells. Raises PeerLostError."""
        with self.groups.naming_the_lost():
            return self.groups.told(fact)

    def layers(self) -> list[nn.Module]:
        """This process's layers of the model, in their order."""
        spans = ((piece, piece.span) for piece in self.pieces)
        return [layer for piece, span in spans for layer in self.workload.layers(piece.model)[span.begin : span.end]]

    def rehearsal(self, step: int) -> Callable[[], Tensor]:
        """What computes a loss with this process's piece alone, of a microbatch like those that come to it."""
        (piece,), batch = self.pieces, self._microbatches_at(0, fixed_routes(self.mesh.replicas), step)[0]
        batch = batch.to(self.device)
        shape, _ = self.workload.shapes(piece.model, batch)
        entering = batch if piece.span.first else torch.ones(shape, device=self.device, requires_grad=True)

        def loss() -> Tensor:
            leaving = piece(entering, batch=batch)
            if piece.span.last:
                found: Tensor = piece.loss(leaving, batch)
                return found
            return torch.cat([out.flatten() for out in (leaving if isinstance(leaving, tuple) else (leaving,))]).sum()

        return loss

    def slow_link(self) -> str:
        """See Island."""
        with self.groups.naming_the_lost():
            return self.groups.slow_link()

    def after_step(self) -> None:
        """The last stage's copy of tied embeddings follows the first stage's."""
        if self._tied is not None:
            with self.groups.naming_the_lost(), torch.no_grad():
                weight = own_of(self._tied)
                if self._is_first:
                    self._send(weight, self._count - 1)
                    self.traffic.sent(weight.nbytes)
                else:
                    weight.copy_(self._received(weight.shape, 0))
                    self.traffic.received(weight.nbytes)

    def steps_with(self, optimizer: torch.optim.Optimizer) -> None:
        """See Island: what needs whole matrices finds the other rows of its own among the shards of this stage."""
        if isinstance(optimizer, MuonAdamW) and self.settings.shard > 1:
            optimizer.lie_in(self._lies.within_stage())

    @torch.no_grad()
    def evaluate(self) -> Score:
        """See Island."""
        sources = held_out_of(self.workload)
        with self.groups.naming_the_lost(), self._evaluating():
            facts = [self._judged(numbers) for numbers in sources.values()]
            losses, counts = self.total(torch.cat(facts)).view(-1, 2).T.tolist()
        return Score.of(dict(zip(sources, zip(losses, counts, strict=True), strict=True)))

    def _judged(self, samples: range) -> Tensor:
        """The sum of the losses of some held-out samples that this process has, and how many these are; float64.

        Each shard takes a part of the samples; the last ones may take one that does not count.
        """
        size, shards = self._samples // self._microbatches, self.settings.shard
        numbers = [samples.start + self.coordinates.shard + shards * turn for turn in range(-(-len(samples) // shards))]
        facts = torch.zeros(2, dtype=torch.float64)
        for turn in range(0, len(numbers), size):
            wanted = numbers[turn : turn + size]
            ids = np.array([min(number, samples.stop - 1) for number in wanted])
            batch = self.workload.held_out_batch(ids).to(self.device)
            output = self._forward(batch)
            counted = sum(number in samples for number in wanted)
            if output is not None and counted:
                loss = self.pieces[-1].loss(output[:counted], batch[:counted])
                facts += torch.tensor([float(loss) * counted, counted], dtype=torch.float64)
        return facts

    @torch.no_grad()
    def sample(self) -> str:
        """See Island."""
        with self.groups.naming_the_lost(), self._evaluating():
            return self.workload.sample_in_pieces(self._picked, self.seed)

    def _picked(self, batch: Tensor, pick: Callable[[Tensor], Tensor], numbers: int) -> Tensor:
        """What `pick` takes of the model's output for a batch, in all processes; see Forward."""
        output = self._forward(batch.to(self.device))
        if output is None or self.coordinates.shard:
            return self.total(torch.zeros(numbers, dtype=torch.float64))
        return self.total(pick(output).double().cpu())

    def total(self, values: Tensor) -> Tensor:
        """See Island."""
        with self.groups.naming_the_lost():
            return self.groups.total(values)

    def _embeddings(self) -> nn.Parameter | None:
        """The embeddings that the head is tied to: the first stage's, and the last stage's copy."""
        if not (self._is_first or self._is_last):
            return None
        return self.workload.tied_weight(self.pieces[0 if self._is_first else -1].model)

    def _layout(self) -> IslandLayout:
        """How this process's parameters lie in the replica: those of its pieces, among all pieces in their order."""
        own, shapes = self._owned(), {}
        for number, piece in enumerate(self.pieces):
            names = [name for name, _ in piece.model.named_parameters() if name in own]
            shapes[self._index(number)] = {name: tuple(own[name].shape) for name in names}
        told = self.told(shapes)
        pieces = sorted((index, named) for process in told for index, named in process.items())
        outline = {name: shape for _, named in pieces for name, shape in named.items()}
        owned = [{name for named in process.values() for name in named} for process in told]
        return IslandLayout(self.groups, outline, owned, self.groups.gateway)

    def _owned(self) -> dict[str, nn.Parameter]:
        """This process's parameters by their names in the whole model."""
        named = {name: p for piece in self.pieces for name, p in piece.model.named_parameters()}
        return {name: p for name, p in named.items() if self._is_first or p is not self._tied}

    def _index(self, number: int) -> int:
        """The place of one of this process's pieces among all."""
        return self.coordinates.stage + number * self.settings.stages

    def _stage(self, piece: Any, number: int) -> RoutedStage:
        index = self._index(number)
        batch = self.workload.example(self._samples // self._microbatches)
        hidden, output = (torch.empty(shape, device="meta") for shape in self.workload.shapes(piece.model, batch))
        sums = [torch.empty(piece.sums, device="meta", requires_grad=True)] if piece.sums else []
        boundary = partial(Boundary, hidden.shape, self.division.codec, self.division.subspace, self.device)
        entering = (batch,) if piece.span.first else (hidden.requires_grad_(), *sums)
        leaving = (output.requires_grad_() if piece.span.last else hidden.requires_grad_(), *sums)
        replica, everyone = self.coordinates.replica, self.groups.everyone
        transport = Transport(everyone, replica, self._process_of, boundary(), boundary(), self.traffic)
        group = self.groups.pipeline_group
        stage = RoutedStage(piece, index, self._count, (entering, leaving), group, transport, self.device)
        stage.frees = bool(self.settings.memory)
        return stage

    def _prepared(self, step: int) -> tuple[Routes, list[list[Tensor]]]:
        """A step's routes, and the microbatches of each of this process's pieces."""
        routes = self._routes(step)
        return routes, [self._microbatches_at(stage.stage_index, routes, step) for stage in self._stages]

    def _routes(self, step: int) -> Routes:
        random, replicas = self.settings.routes == "random", self.mesh.replicas
        routes = random_routes(replicas, self.seed, step) if random else fixed_routes(replicas)
        return replace(routes, first=self.mesh.first)

    def _microbatches_at(self, boundaries: int, routes: Routes, step: int) -> list[Tensor]:
        """Each microbatch that comes to this replica's piece after so many boundaries."""
        origins = [routes.origin(self.coordinates.replica, m, boundaries) for m in range(self._microbatches)]
        shares = {origin: self._share_of(origin, step) for origin in set(origins)}
        return [shares[origin][number] for number, origin in enumerate(origins)]

    def _share_of(self, replica: int, step: int) -> tuple[Tensor, ...]:
        """This shard's part of a replica's batch, in microbatches."""
        ids = self.workload.sample_ids(self.seed, replica, step, self.settings.batch_size)
        own = np.array_split(ids, self.settings.shard)[self.coordinates.shard]
        batch: Tensor = self.workload.batch(own)
        return batch.tensor_split(self._microbatches)

    def _fault(self, loss: float, squares: float, spoilt: float) -> str:
        if not math.isfinite(loss):
            return f"loss is {loss}"
        if spoilt:
            return "what passes between the stages is not finite"
        return "" if math.isfinite(squares) else "the gradient is not finite"

    def _bring_tied_gradient(self) -> None:
        """Adds the gradient of the head's copy to that of the embeddings."""
        if self._tied is None:
            return
        assert self._tied.grad is not None
        gradient = own_of(self._tied.grad)
        if self._is_last:
            self._send(gradient, 0)
            self.traffic.sent(gradient.nbytes)
        else:
            self.traffic.received(gradient.nbytes)
            gradient.add_(self._received(gradient.shape, self._count - 1).to(gradient.device))

    def _send(self, values: Tensor, piece: int) -> None:
        dist.send(values.detach().cpu().contiguous(), self._process_of(piece), group=self.groups.pipeline_group)

    def _received(self, shape: torch.Size, piece: int) -> Tensor:
        """Float32 values from the process that has a piece, on the CPU."""
        room = torch.empty(shape, dtype=torch.float32)
        dist.recv(room, self._process_of(piece), group=self.groups.pipeline_group)
        return room

    def _forward(self, batch: Tensor) -> Tensor | None:
        """Sends a batch through all pieces, uncompressed; its output, in the process of the last piece."""
        leaving: Tensor | None = None
        shape, _ = self.workload.shapes(self.pieces[0].model, batch)
        for index in range(self.coordinates.stage, self._count, self.settings.stages):
            entering = batch if index == 0 else self._received(shape, index - 1).to(self.device)
            leaving = self.pieces[index // self.settings.stages](entering, batch=batch)
            assert leaving is not None
            if index < self._count - 1:
                self._send(leaving, index + 1)
                leaving = None
        return leaving

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        for piece in self.pieces:
            piece.eval()
        with eagerly(self.settings.compile):
            yield
        for piece in self.pieces:
            piece.train()
            for module in piece.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # what was gathered of weights that are about to change

    def _process_of(self, piece: int, replica: int | None = None) -> int:
        """The process that has a piece, of this replica or of another."""
        replica = self.coordinates.replica if replica is None else replica
        return self.mesh.process(replica, piece % self.settings.stages, self.coordinates.shard)
