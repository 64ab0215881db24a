"""A replica that several processes have parts of: pipeline stages, and shards of each."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

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

from farflung.config import Config
from farflung.networks import Traffic
from farflung.pipeline.boundaries import Boundary
from farflung.pipeline.division import Division, microbatches_of
from farflung.pipeline.groups import Groups
from farflung.pipeline.island import TEMPERATURE
from farflung.pipeline.parts import Part, own_of, persistent_buffers
from farflung.pipeline.routes import Routes, fixed_routes, random_routes
from farflung.pipeline.split import Piece
from farflung.pipeline.stages import RoutedStage
from farflung.scoped import quiet
from farflung.workloads import models
from farflung.workloads.data import Data

SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}


class Spread:
    """One process's part of a replica.

    Args:
        config: the settings.
        groups: the processes it works with.
        pieces: its pieces of the model, on their device, sharded or not.
        division: how the model is divided.
        data: where batches come from.
    """

    def __init__(
        self, config: Config, groups: Groups, pieces: list[Piece], division: Division, data: Data, device: torch.device
    ) -> None:
        self.layout, self.place = groups.layout, groups.place
        self.traffic = Traffic()
        self._config = config
        self._groups = groups
        self._pieces = pieces
        self._data = data
        self._device = device
        self._microbatches = microbatches_of(config)
        self._sequences = config.batch_size // config.shard
        self._count = len(division.spans)
        self._is_first, self._is_last = self.place.stage == 0, self.place.stage == config.stages - 1
        self._tied = self._embeddings() if division.tied and self._count > 1 else None
        buffers = {name: buffer for piece in pieces for name, buffer in persistent_buffers(piece.model).items()}
        self._part = Part(self._owned(), buffers)
        self.model: nn.Module = self._part
        self._stages = [self._stage(piece, division, number) for number, piece in enumerate(pieces)]
        self._schedule: Any = SCHEDULES[config.schedule](
            self._stages if config.schedule in ("interleaved", "zero-bubble") else self._stages[0],
            n_microbatches=self._microbatches,
            loss_fn=self._pieces[-1].loss,
        )

    def gradients(self, step: int) -> tuple[float, str]:
        """See Island. Unlike `Alone`, this takes a gradient that is not finite for a fault at once."""
        config = self._config
        self._part.drop_gradients()
        routes = self._routes(step)
        for stage in self._stages:
            stage.begin_step(routes, self._microbatches_at(stage.stage_index, routes, step))
            for parameter in stage.submod.parameters():
                parameter.grad = None
        losses: list[Tensor] = []
        # Its schedule would print its whole plan when a process is lost.
        with self._groups.naming_the_lost(), quiet("torch.distributed.pipelining.schedules"):
            given = (torch.cat(self._stages[0].tokens).to(self._device),) if self._is_first else ()
            labels = torch.cat(self._stages[-1].tokens).to(self._device) if self._is_last else None
            self._schedule.step(*given, target=labels, losses=losses, return_outputs=False)
            self._bring_tied_gradient()
            self._part.collect_gradients()
            facts = torch.zeros(3, dtype=torch.float64)
            facts[0] = sum(float(loss.detach()) for loss in losses) / (self._microbatches * config.shard)
            gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            facts[1] = float(nn.utils.get_total_norm(gradients)) ** 2 if gradients else 0.0
            facts[2] = float(any(stage.spoilt for stage in self._stages))
            loss, squares, spoilt = self.total(facts).tolist()
        fault = self._fault(loss, squares, spoilt)
        if fault:
            self._part.drop_gradients()
        elif config.clip:
            norm = torch.tensor(math.sqrt(squares), device=self._device)
            nn.utils.clip_grads_with_norm_(self.model.parameters(), config.clip, norm)
        return loss, fault

    def after_step(self) -> None:
        """The last stage's copy of tied embeddings follows the first stage's."""
        if self._tied is not None:
            with self._groups.naming_the_lost(), torch.no_grad():
                weight = own_of(self._tied)
                if self._is_first:
                    dist.send(weight.detach().cpu(), self._process_of(self._count - 1), group=self._groups.column)
                    self.traffic.sent(weight.nbytes)
                elif self._is_last:
                    weight.copy_(self._received(weight.shape, 0))
                    self.traffic.received(weight.nbytes)

    @torch.no_grad()
    def loss_of(self, sequences: Tensor) -> float:
        """See Island. Each shard takes a part of the sequences; where they do not divide, some compute one in vain."""
        size = self._sequences // self._microbatches
        shards, shard = self.layout.shards, self.place.shard
        numbers = [shard + shards * turn for turn in range(-(-len(sequences) // shards))]
        facts = torch.zeros(2, dtype=torch.float64)
        with self._groups.naming_the_lost(), self._evaluating():
            for turn in range(0, len(numbers), size):
                wanted = numbers[turn : turn + size]
                batch = sequences[[min(number, len(sequences) - 1) for number in wanted]].to(self._device)
                logits = self._forward(batch)
                counted = sum(number < len(sequences) for number in wanted)
                if logits is not None and counted:
                    loss = models.cross_entropy(self._pieces[-1].model, logits[:counted], batch[:counted])
                    facts += torch.tensor([float(loss) * counted, counted], dtype=torch.float64)
            total, count = self.total(facts).tolist()
        return float(total / count)

    @torch.no_grad()
    def continued(self, prompt: Tensor, length: int, end: int) -> list[int]:
        """See Island. Each new token takes a pass through all stages."""
        tokens = prompt[0].tolist()
        generator = torch.Generator().manual_seed(self._config.seed)
        with self._groups.naming_the_lost(), self._evaluating():
            while len(tokens) < length and (len(tokens) == prompt.shape[1] or tokens[-1] != end):
                logits = self._forward(torch.tensor([tokens], device=self._device))
                speaks = logits is not None and self.place.shard == 0
                scores = logits[0, -1].double().cpu() if speaks and logits is not None else self._no_scores()
                chances = torch.softmax(self.total(scores) / TEMPERATURE, dim=0)
                tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
        return tokens

    def total(self, values: Tensor) -> Tensor:
        """See Island."""
        with self._groups.naming_the_lost():
            return self._groups.total(values)

    def _embeddings(self) -> nn.Parameter | None:
        """The embeddings that the head is tied to: the first stage's, and the last stage's copy."""
        if not (self._is_first or self._is_last):
            return None
        weight: nn.Parameter = self._pieces[0 if self._is_first else -1].model.get_input_embeddings().weight
        return weight

    def _owned(self) -> dict[str, nn.Parameter]:
        """This process's parameters by their names in the whole model."""
        named = {name: p for piece in self._pieces for name, p in piece.model.named_parameters()}
        return {name: p for name, p in named.items() if self._is_first or p is not self._tied}

    def _stage(self, piece: Piece, division: Division, number: int) -> RoutedStage:
        index = self.place.stage + number * self._config.stages
        size = self._sequences // self._microbatches
        hidden = torch.empty(size, self._config.sequence_length, piece.model.config.hidden_size, device="meta")
        logits = torch.empty(size, self._config.sequence_length, piece.model.config.vocab_size, device="meta")
        tokens = torch.empty(size, self._config.sequence_length, dtype=torch.int64, device="meta")
        sums = [torch.empty(piece.routers.numbers, device="meta", requires_grad=True)] if piece.routers else []
        boundary = partial(Boundary, hidden.shape, division.codec, division.subspace, self._device)
        return RoutedStage(
            piece,
            index,
            self._count,
            (tokens,) if piece.span.first else (hidden.requires_grad_(), *sums),
            (logits.requires_grad_() if piece.span.last else hidden.requires_grad_(), *sums),
            self._groups.column,
            self._groups.everyone,
            self.place.replica,
            lambda replica, piece: self.layout.process(replica, piece % self.layout.stages, self.place.shard),
            boundary(),
            boundary(),
            self._device,
            self.traffic,
        )

    def _routes(self, step: int) -> Routes:
        if self._config.routes == "random":
            return random_routes(self.layout.replicas, self._config.seed, step)
        return fixed_routes(self.layout.replicas)

    def _microbatches_at(self, boundaries: int, routes: Routes, step: int) -> list[Tensor]:
        """The ids of each microbatch that comes to this replica's piece after so many boundaries."""
        origins = [routes.origin(self.place.replica, m, boundaries) for m in range(self._microbatches)]
        shares = {origin: self._share_of(origin, step) for origin in set(origins)}
        return [shares[origin][number] for number, origin in enumerate(origins)]

    def _share_of(self, replica: int, step: int) -> tuple[Tensor, ...]:
        """This shard's part of a replica's batch, in microbatches."""
        batch = self._data.batch(self._config.seed, replica, step, self._config.batch_size)
        return batch.tensor_split(self.layout.shards)[self.place.shard].tensor_split(self._microbatches)

    def _fault(self, loss: float, squares: float, spoilt: float) -> str:
        if not math.isfinite(loss):
            return f"loss is {loss}"
        if spoilt:
            return "what passes between the stages is not finite"
        return "" if math.isfinite(squares) else "the gradient is not finite"

    def _bring_tied_gradient(self) -> None:
        """Adds what the head's copy has got to the gradient of the embeddings that it is a copy of."""
        if self._tied is None:
            return
        if self._is_last:
            assert self._tied.grad is not None
            gradient = own_of(self._tied.grad)
            dist.send(gradient.cpu(), self._process_of(0), group=self._groups.column)
            self.traffic.sent(gradient.nbytes)
        elif self._is_first:
            assert self._tied.grad is not None
            gradient = own_of(self._tied.grad)
            self.traffic.received(gradient.nbytes)
            gradient.add_(self._received(gradient.shape, self._count - 1).to(gradient.device))

    def _received(self, shape: torch.Size, piece: int) -> Tensor:
        """Float32 values from the process that has a piece, on the CPU."""
        room = torch.empty(shape)
        dist.recv(room, self._process_of(piece), group=self._groups.column)
        return room

    def _forward(self, batch: Tensor) -> Tensor | None:
        """Sends a batch through all pieces, nothing left out between them; its logits, in the process that has them."""
        leaving: Tensor | None = None
        width = self._pieces[0].model.config.hidden_size
        for index in range(self.place.stage, self._count, self.layout.stages):
            shape = torch.Size((*batch.shape, width))
            entering = batch if index == 0 else self._received(shape, index - 1).to(self._device)
            leaving = self._pieces[index // self.layout.stages](entering)
            assert leaving is not None
            if index < self._count - 1:
                dist.send(leaving.detach().cpu().contiguous(), self._process_of(index + 1), group=self._groups.column)
                leaving = None
        return leaving

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        for piece in self._pieces:
            piece.eval()
        yield
        for piece in self._pieces:
            piece.train()
            for module in piece.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # what was gathered of weights that are about to change

    def _no_scores(self) -> Tensor:
        return torch.zeros(self._pieces[-1].model.config.vocab_size, dtype=torch.float64)

    def _process_of(self, piece: int) -> int:
        return self.layout.process(self.place.replica, piece % self.layout.stages, self.place.shard)
