"""A peer of a swarm as its trainer sees it: a replica of one stage, whose microbatches come from other peers."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import mean
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from farflung.errors import UserError
from farflung.networks import Traffic
from farflung.pipeline import Mesh
from farflung.pipeline.assemble import training
from farflung.pipeline.boundaries import Boundary
from farflung.pipeline.build import pieces_of
from farflung.pipeline.division import division_of
from farflung.pipeline.mesh import MeshCoordinates
from farflung.pipeline.settings import IslandSettings
from farflung.swarm.letters import Caller, Forward, LostError, Microbatch
from farflung.swarm.peer import StagePeer, under_way
from farflung.swarm.processor import Pass, Processor
from farflung.swarm.routers import ThroughputRouter
from farflung.swarm.visits import Visits
from farflung.swarm.work import StageWork
from farflung.workloads.base import Divisible

if TYPE_CHECKING:
    from farflung.networks.internet import InternetNetwork

T = TypeVar("T")

HELD_OUT = 1 << 20
"""The number of a microbatch of held-out samples; its step says which, and no stage learns from it."""
LOOK_SECONDS = 0.2
"""How often a peer that waits for microbatches looks whether it still has to."""
ROUTES_SECONDS = 1.0
"""How often a peer looks who serves the next stage."""


class SwarmIsland:
    """See Island. The trainer's inner steps are this peer's own, each with what the stage has learnt since the last.

    A head (a peer of stage 0) has microbatches of its own stream under way all the time, two for each stage. Between
    `gradients` and `after_step` nothing is computed here, since the weights change.

    Args:
        network: on which it says which stage it serves.
        waits: the run's last step, and the seconds that a stage may take for a microbatch.
    """

    def __init__(
        self,
        settings: IslandSettings,
        workload: Divisible,
        network: InternetNetwork,
        seed: int,
        device: torch.device,
        waits: tuple[int, float],
    ) -> None:
        self.settings, self.traffic = settings, Traffic()
        self.mesh, self.coordinates = Mesh(Mesh.alike(1).shapes, network.rank), MeshCoordinates(network.rank)
        self._workload, self._network, self._seed = workload, network, seed
        self._steps, self._deadline_s = waits
        self._peers, self.stage = network.peers, int(network.peers.info["stage"])
        divided = IslandSettings(**{**vars(settings), "swarm": 0, "stages": settings.swarm})
        if settings.batch_size % divided.parts:
            raise UserError(
                f"batch_size {settings.batch_size} cannot be cut into {divided.parts} microbatches; give a "
                f"--batch-size that is a multiple of {divided.parts}, or --microbatches"
            )
        division = division_of(divided, workload, seed)
        if division.tied:
            raise UserError("the model's head is its embeddings, which stages of a swarm do not share; choose another")
        piece = pieces_of(divided, workload, division, self.stage, seed)[0].to(device)
        self.model: nn.Module = training(piece.model, settings)
        self._size = settings.batch_size // divided.parts
        shape, _ = workload.shapes(piece.model, workload.example(self._size))
        ends = self.stage > 0, self.stage < settings.swarm - 1
        before, after = (Boundary(shape, division.codec, division.subspace, device) if end else None for end in ends)
        self._parts = divided.parts
        self._work = StageWork(piece, self._batch, None, before, after, alone=1)
        self._router = ThroughputRouter() if after else None
        entering, leaving = (end.room() if end else None for end in (before, after))
        self._visits = Visits(self._peers, self.stage, settings.swarm, entering, leaving, self._served)
        processor = Processor(self._computed)
        self._peer = StagePeer(
            *(self.stage, settings.swarm, self._work, processor, self._visits, self._router),
            self._deadline_s,
            time.monotonic,
        )
        self._thread = ThreadPoolExecutor(1, "stage")
        self._weights = threading.Lock()
        """Held by what needs the weights as they are, or changes them."""
        self._came = threading.Event()
        """A microbatch has been learnt from."""
        self._work.take_step = self._came.set
        self._serving = self._stepping = False
        self._loss = math.nan
        self._taken, self._due = 0, 0.0
        """Microbatches that steps were taken with, and those that should have been, at the heads' pace."""

    def gradients(self, step: int) -> tuple[float, str]:
        """See Island: those of what was learnt since the last step. Raises UserError where no head is there any more.

        A stage's peers take as many steps as the heads do, each with less where they are more. When the heads have
        ended, the steps that are left change nothing.
        """
        if not self._serving:
            self._serve(step)
        began = time.monotonic()
        while not (learnt := self._enough()) and not self._over():
            self._came.clear()
            self._came.wait(LOOK_SECONDS)
            if time.monotonic() > began + self._deadline_s:
                self._refuse_without_heads()
                began = time.monotonic()
        self._weights.acquire()
        self._stepping = True
        if learnt:
            done = self._work.learnt
            self._loss = done.losses / sum(done.samples.values())
            self._taken += len(done.samples)
            self._due += self._share()
            self._work.fill(done)
            if self.settings.clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        return self._loss, ""

    def slow_link(self) -> str:
        """See Island."""
        return ""

    def after_step(self) -> None:
        """See Island. Microbatches go on, with the weights as they are now."""
        if self._stepping:
            self._work.advance()
            self._stepping = False
            self._weights.release()

    def stay(self) -> None:
        """See Island. The heads, which end last, still need the other stages."""
        ends = time.monotonic() + self._deadline_s
        while self.stage and not self._over() and time.monotonic() < ends:
            time.sleep(LOOK_SECONDS)
            if self._serving_stage(0):
                ends = time.monotonic() + self._deadline_s

    def evaluate(self) -> float:
        """See Island. Heads have the held-out samples pass through the swarm; others know what heads say."""
        if self.stage:
            told = [one.facts["loss"] for one in self._serving_stage(0) if "loss" in one.facts]
            return mean(told) if told else math.nan
        try:
            return self._peers.background.run(self._evaluated(), 4 * self._deadline_s)
        except TimeoutError:
            return math.nan

    def sample(self) -> str:
        """See Island. No peer has all of the model."""
        return ""

    def total(self, values: Tensor) -> Tensor:
        """See Island."""
        return values

    def _serve(self, step: int) -> None:
        """Begins to take and to hand on microbatches."""
        self._serving = True
        self._visits.open()
        background = self._peers.background
        if self._router:
            background.keep("looking for the next stage", self._look_for_others)
        if self.stage == 0:
            numbers = itertools.count(step * self._parts)
            start = lambda: self._start(next(numbers))  # noqa: E731
            background.keep("starting microbatches", lambda: under_way(self._peer, start, 2 * self.settings.swarm))

    async def _start(self, number: int) -> None:
        await self._peer.start(Microbatch(*divmod(number, self._parts), self._network.rank), self._work.version)

    async def _served(self, forward: Forward, caller: Caller) -> None:
        await self._peer.serve(forward, caller)

    async def _computed(self, which: Pass, work: Callable[[], T]) -> T:
        def locked() -> T:
            with self._weights:
                return work()

        return await asyncio.get_running_loop().run_in_executor(self._thread, locked)

    async def _look_for_others(self) -> None:
        assert self._router is not None
        known = set[int]()
        while True:
            there = {one.rank for one in self._serving_stage(self.stage + 1)}
            for rank in known - there:
                self._router.leave(rank)
            for rank in there:
                self._router.join(rank)
            known = there
            await asyncio.sleep(ROUTES_SECONDS)

    def _serving_stage(self, stage: int) -> list[Any]:
        """The peers that serve a stage."""
        return [one for one in self._peers.members.in_good_standing() if one.stage == stage and one.shapes]

    def _enough(self) -> bool:
        """Whether the stage has learnt enough for its next step."""
        learnt = len(self._work.learnt.samples)
        return learnt > 0 and self._taken + learnt >= self._due + self._share()

    def _share(self) -> float:
        """Microbatches of a step that let this peer take as many steps as a head; in the mean, since none is half."""
        heads, mates = self._serving_stage(0), self._serving_stage(self.stage)
        return self._parts * max(1, len(heads)) / (len(mates) + 1) if self.stage else self._parts

    def _over(self) -> bool:
        """Whether the heads have come to their last step, and left."""
        ended = any(one.step >= self._steps for one in self._peers.members.all() if one.stage == 0 and one.shapes)
        return self.stage > 0 and ended and not self._serving_stage(0)

    def _refuse_without_heads(self) -> None:
        if self.stage and not self._serving_stage(0):
            raise UserError(
                f"no peer has served stage 0 for {self._deadline_s:.0f} s, so no microbatches are started; "
                "come back when some do"
            )

    def _batch(self, microbatch: Microbatch) -> Tensor:
        """Its samples; a pure function of its name."""
        if microbatch.number == HELD_OUT:
            begin = microbatch.step * self._size
            return self._workload.held_out_batch(np.arange(begin, begin + self._size) % self._workload.held_out)
        ids = self._workload.sample_ids(self._seed, microbatch.stream, microbatch.step, self.settings.batch_size)
        found: Tensor = self._workload.batch(np.array_split(ids, self._parts)[microbatch.number % self._parts])
        return found

    async def _evaluated(self) -> float:
        turns = range(max(1, self._workload.held_out // self._size))
        room = asyncio.Semaphore(2 * self.settings.swarm)

        async def one(turn: int) -> float:
            async with room:
                return await self._peer.start(Microbatch(turn, HELD_OUT), self._work.version, frozenset())

        losses = await asyncio.gather(*map(one, turns), return_exceptions=True)
        for lost in losses:
            if isinstance(lost, BaseException) and not isinstance(lost, LostError):
                raise lost
        found = [loss for loss in losses if not isinstance(loss, BaseException)]
        return mean(found) if found else math.nan
