"""A peer's seat in a swarm: the stage that it serves, and who else serves which."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from farflung.pipeline.assemble import training
from farflung.pipeline.boundaries import Boundary
from farflung.pipeline.build import pieces_of
from farflung.pipeline.division import Division, division_of
from farflung.pipeline.settings import IslandSettings
from farflung.swarm.letters import Caller, FalseLetterError, Forward, LostError, Microbatch
from farflung.swarm.moves import Standing, standings
from farflung.swarm.peer import StagePeer
from farflung.swarm.processor import Pass, Processor
from farflung.swarm.routers import ThroughputRouter
from farflung.swarm.visits import Visits
from farflung.swarm.work import StageWork
from farflung.workloads.base import Divisible, Ids, held_out_of

if TYPE_CHECKING:
    from farflung.networks.internet import InternetNetwork, Peers
    from farflung.networks.peers.member import Member

T = TypeVar("T")

HELD_OUT = 1 << 20
"""The number of a microbatch of held-out samples; its step says which, and no stage learns from it."""
ROUTES_SECONDS = 1.0
"""How often a peer looks who serves the next stage."""
PASSES = 2
"""Of a microbatch through a stage: forward and back."""


class Seat:
    """What a peer of a swarm does for others' microbatches, and for its own where it is a head.

    Args:
        settings: the run's.
        network: on which it says which stage it serves.
        patience_s: the seconds that a stage may take for a microbatch at most.
    """

    def __init__(
        self,
        settings: IslandSettings,
        workload: Divisible,
        network: InternetNetwork,
        seed: int,
        device: torch.device,
        patience_s: float,
    ) -> None:
        self.settings, self.network = settings, network
        self.peers: Peers = network.peers
        self.stage, self.stages, self.parts = int(self.peers.info["stage"]), settings.stages, settings.parts
        self.samples = settings.batch_size // settings.parts
        """Of a microbatch."""
        self._held_out = list(_turns(workload, self.samples))
        self.learnt = threading.Event()
        """A microbatch has been learnt from."""
        self.weights = threading.Lock()
        """Held by what needs the weights as they are, or changes them."""
        self.steps_first = threading.Event()
        """Unset while a step is due that nothing is to be computed before."""
        self.steps_first.set()
        self.optimizer: torch.optim.Optimizer | None = None
        """That takes the steps, once it is known."""
        self.workload, self._batch_size, self.seed = workload, settings.batch_size, seed
        division = division_of(settings, workload, seed)
        (piece,) = pieces_of(settings, workload, division, self.stage, seed)
        self.model = training(piece.model, settings)
        before, after = self._boundaries(division, device)
        alone = int(settings.stepping != "synchronous")
        self.work = StageWork(piece.to(device), self._batch, None, before, after, alone)
        self._router = ThroughputRouter() if after else None
        self._processor = Processor(self._computed)
        entering, leaving = (end.room() if end else None for end in (before, after))
        _, output = workload.shapes(self.model, workload.example(self.samples))
        self._visits = Visits(self.peers, self.stage, self.stages, entering, leaving, self._served, word_s=patience_s)
        self._visits.scores = torch.empty(output[-1])
        self.traffic = self._visits.traffic
        """Of microbatches, on their way and back."""
        self.peer = StagePeer(
            *(self.stage, self.stages, self.work, self._processor, self._visits, self._router),
            patience_s,
            time.monotonic,
        )
        self._thread = ThreadPoolExecutor(1, "stage")
        self._busy_s, self._began = 0.0, time.monotonic()
        self.starts = True
        """Whether a head starts microbatches."""

    async def serve(self) -> None:
        """Begins to take microbatches and to hand them on."""
        self._began = time.monotonic()
        self._visits.open()
        background = self.peers.background
        await self.peers.announce(facts={**self.peers.info["facts"], "serves": 1.0})
        if self._router:
            background.keep("looking for the next stage", self._look_for_others)

    async def start_no_more(self) -> None:
        """Lets what a head has under way come to its end, for as long as one stage may take."""
        self.starts = False
        ends = time.monotonic() + self.peer.patience
        while self.peer.under_way and time.monotonic() < ends:
            await asyncio.sleep(0.05)

    @property
    def passes(self) -> int:
        """Those that it has computed."""
        return self._processor.computed

    def serving(self, stage: int) -> list[Member]:
        """The other peers that serve a stage."""
        return [one for one in self.peers.members.in_good_standing() if one.stage == stage and "serves" in one.facts]

    def everyone(self) -> list[Member]:
        """The other peers that serve some stage."""
        return [one for stage in range(self.stages) for one in self.serving(stage)]

    def standings(self) -> dict[int, Standing]:
        """What is known of all peers, this one among them, by their ranks."""
        own = (self.network.rank, self.stage, self.facts()["capacity"])
        there = [one for one in self.peers.members.in_good_standing() if one.shapes and one.stage < self.stages]
        return standings([own, *((one.rank, one.stage, one.facts.get("capacity", 0.0)) for one in there)])

    def facts(self) -> dict[str, float]:
        """What others should know of how it serves; microbatches a second."""
        computed, since = self._processor.computed / PASSES, time.monotonic() - self._began
        return {
            "queue": float(self._processor.queue),
            "capacity": computed / self._busy_s if self._busy_s else 0.0,
            "microbatches_per_second": computed / since if since else 0.0,
            "bypassed": float(sum(self.peer.struck.values())),
            "sent": float(self.network.traffic.bytes_sent + self.traffic.bytes_sent),
        }

    @property
    def held_out_sources(self) -> list[str]:
        """Of each microbatch of held-out samples, the source that it is of."""
        return [source for source, _ in self._held_out]

    async def held_out(self, turn: int) -> float:
        """The loss of one of these microbatches."""
        return await self.peer.start(Microbatch(turn, HELD_OUT), self.work.version, frozenset())

    async def scores(self, text: list[int]) -> Tensor:
        """Of what may follow a text, as the model is now: float32. Raises LostError."""
        name = Microbatch(0, HELD_OUT)
        forward = Forward(name, self.stage, self.work.version, frozenset(), text=tuple(text))
        found: Tensor = (await self.peer.through(forward)).packet
        if not found.isfinite().all():
            raise LostError("scores that are not finite")
        return found

    def _boundaries(self, division: Division, device: torch.device) -> tuple[Boundary | None, Boundary | None]:
        shape, _ = self.workload.shapes(self.model, self.workload.example(self.samples))
        ends = self.stage > 0, self.stage < self.stages - 1
        first, last = (Boundary(shape, division.codec, division.subspace, device) if end else None for end in ends)
        return first, last

    async def _served(self, forward: Forward, caller: Caller) -> None:
        number = forward.microbatch.number
        if number >= self.parts and not (number == HELD_OUT and forward.judged):
            raise FalseLetterError("a microbatch of which a step has not so many")
        await self.peer.serve(forward, caller)

    async def _computed(self, which: Pass, work: Callable[[], T]) -> T:
        def locked() -> T:
            self.steps_first.wait(self.peer.patience)
            with self.weights:
                began = time.monotonic()
                try:
                    return work()
                finally:
                    self._busy_s += time.monotonic() - began

        return await asyncio.get_running_loop().run_in_executor(self._thread, locked)

    async def _look_for_others(self) -> None:
        assert self._router is not None
        known = set[int]()
        while True:
            there = {one.rank for one in self.serving(self.stage + 1)}
            for rank in known - there:
                self._router.leave(rank)
            for rank in there:
                self._router.join(rank)
            known = there
            await asyncio.sleep(ROUTES_SECONDS)

    def _batch(self, microbatch: Microbatch) -> Tensor:
        """Its samples; a pure function of its name."""
        if microbatch.number == HELD_OUT:
            _, held_out = self._held_out[microbatch.step % len(self._held_out)]
            return self.workload.held_out_batch(held_out)
        ids = self.workload.sample_ids(self.seed, microbatch.stream, microbatch.step, self._batch_size)
        found: Tensor = self.workload.batch(np.array_split(ids, self.parts)[microbatch.number % self.parts])
        return found


def _turns(workload: Divisible, size: int) -> Iterator[tuple[str, Ids]]:
    """Microbatches of the held-out samples of each source, `size` in each: as many as are whole, and at least one."""
    for source, samples in held_out_of(workload).items():
        for turn in range(max(1, len(samples) // size)):
            yield source, samples.start + np.arange(turn * size, (turn + 1) * size) % len(samples)


def told(peers: Peers, **facts: Any) -> None:
    """Has others hear at once of what is new here."""
    peers.background.run(peers.announce(facts={**peers.info["facts"], **facts}), 60.0)
