"""A peer of a swarm as its trainer sees it: a replica of one stage, whose microbatches come from other peers."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from farflung.errors import UserError
from farflung.hooks.trained import trainable
from farflung.networks import SharedState
from farflung.pipeline.island import Ledger
from farflung.pipeline.mesh import Mesh, MeshCoordinates
from farflung.swarm.copies import Copies
from farflung.swarm.letters import LostError, ledger_of
from farflung.swarm.moves import MoveError, Restlessness, Standing, Successors
from farflung.swarm.seat import Seat, told
from farflung.swarm.states import given
from farflung.swarm.work import Learnt
from farflung.workloads.base import Score

if TYPE_CHECKING:
    from farflung.networks.peers.member import Member

LOOK_SECONDS = 0.2
"""How often a peer that waits for others looks whether it still has to."""
LAST_STEP, JUDGED, LEAVES = 1.0, 2.0, 3.0
"""What a peer says of its end: it has taken its last step; has judged what came of them all; needs nobody any more."""
UNMANNED_SECONDS = 5.0
"""For so long a stage has nobody before another one's peer takes it over."""
AWAKE_SECONDS = 20.0
"""For so long a peer that stood still hears of the others before it believes that they are gone."""
LONGEST_EVALUATION_SECONDS = 24 * 3600.0
T = TypeVar("T")
LOST = (LostError, TimeoutError, asyncio.CancelledError)


@dataclass(frozen=True)
class End:
    """What ends a peer's training, or another's.

    Args:
        deadline_s: seconds after which others that do nothing are not waited for.
        stopping: whether this peer is asked to stop.
        copies: the folder for what it keeps of other stages, where their last peers are gone.
        copy_every: steps from one copy to the next.
        able: the stages that this peer has the memory for.
    """

    deadline_s: float
    stopping: Callable[[], bool]
    copies: Path
    copy_every: int
    able: Collection[int]


class Steps(Protocol):
    """When a peer takes its inner steps, and with what."""

    async def serve(self) -> None:
        """Begins, once microbatches are let in; a head sees to it that some are started."""
        ...

    def enough(self, over: bool) -> bool:
        """Whether a step can be taken; when training is `over`, the last one."""
        ...

    def take(self) -> Learnt | None:
        """What the step learns from; None where that is nothing."""
        ...

    def stepped(self) -> None:
        """The step was taken."""
        ...

    @property
    def at(self) -> int | None:
        """See Island."""
        ...


class SwarmIsland:
    """See Island. The trainer's inner steps are this peer's own, each with what the stage has learnt since the last.

    Between `gradients` and `after_step` nothing is computed here, since the weights change. A stage's peers take as
    many steps as the heads do, each with less where they are more.
    """

    def __init__(self, seat: Seat, end: End, pace: Steps) -> None:
        self._seat, self._network, self.settings, self.traffic = seat, seat.network, seat.settings, seat.traffic
        self._deadline_s, self._stopping = end.deadline_s, end.stopping
        self.model: nn.Module = seat.model
        rank = seat.network.rank
        self.mesh, self.coordinates = Mesh(Mesh.alike(1).shapes, rank), MeshCoordinates(rank)
        self.part_stem = Mesh(tuple(seat.settings.shapes())).file_stem(MeshCoordinates(0, seat.stage))
        self._copies = Copies(seat.network, seat.stages, end.copies, end.copy_every, self._keeps_copies)
        self._pace, self._able = pace, end.able
        self._restless = Restlessness(rank, seat.stages, time.monotonic())
        self._successors = Successors()
        self._serving = self._stepping = self._ended = False
        self._loss = math.nan
        self._judged: Score | None = None
        self._ledger: Ledger = ([], [])
        self._gives = self._give
        self._told: list[int] = []
        """The stages without anybody of which the user knows."""

    def gradients(self, step: int) -> tuple[float, str]:
        """See Island: those of what was learnt since the last step. Raises UserError where no head is there any more.

        Raises MoveError where this peer is to serve another stage, which nobody serves, or too few.
        When the heads have ended, the steps that are left change nothing; nor does that in which this peer is stopped.
        """
        if not self._serving:
            self._serving = True
            self._network.peers.background.run(self._serve(), self._deadline_s)
        self._move_if_better()
        enough = self._waited()
        self._give_if_asked()
        self._seat.weights.acquire()
        self._stepping = True
        self._network.tell_others(**self._seat.facts())
        if enough and (done := self._pace.take()):
            self._loss = done.losses / sum(done.samples.values())
            self._ledger = ledger_of(done.samples), ledger_of(done.taken_back)
            self._seat.work.fill(done)
            if self.settings.clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        return self._loss, ""

    waited_s = 0.0
    """See Island: its microbatches come by themselves."""

    def close(self) -> None:
        """See Island: `leave` does. One that fails in the midst of a step lets go of the weights, or threads wait."""
        if self._stepping:
            self._stepping = False
            self._seat.weights.release()

    def slow_link(self) -> str:
        """See Island."""
        return ""

    def after_step(self) -> None:
        """See Island. Microbatches go on, with the weights as they are now."""
        if self._stepping:
            self._pace.stepped()
            self._stepping = False
            self._seat.weights.release()

    def restored(self, step: int) -> None:
        """See Island."""
        self._seat.work.begin_at(step)

    def steps_with(self, optimizer: torch.optim.Optimizer) -> None:
        """See Island."""
        self._seat.optimizer = optimizer

    def gives_with(self, give: Callable[[], None]) -> None:
        """See Island."""
        self._gives = self._give if self._pace.at is not None else give  # what rounds would give is old without them

    @property
    def at(self) -> int | None:
        """See Island."""
        return self._pace.at

    def ledger(self) -> Ledger:
        """See Island."""
        told, self._ledger = self._ledger, ([], [])
        return told

    def stay(self) -> None:
        """See Island. A head waits until the others have taken their last steps, and judges what has come of them."""
        peers = self._network.peers
        peers.background.run(self._seat.start_no_more(), 2 * self._deadline_s)
        self._give()
        told(peers, ended=LAST_STEP)
        if self._seat.stage:
            self._wait_for(JUDGED, lambda: self._seat.serving(0))
        else:
            self._wait_for(LAST_STEP, self._seat.everyone)
        self._judged = self.evaluate() or Score(math.nan)  # nobody will judge it any more
        self._ended = True
        told(peers, ended=JUDGED)

    def leave(self) -> None:
        """See Island. Heads go first: until then the others give what they have learnt."""
        if self._seat.stage:
            self._wait_for(LEAVES, lambda: self._seat.serving(0))
        told(self._network.peers, ended=LEAVES)

    def evaluate(self) -> Score | None:
        """See Island. Heads have the held-out samples pass through the swarm; others know what heads say."""
        return self._judged if self._ended else self._judgement()

    def _judgement(self) -> Score | None:
        if self._seat.stage:
            heads = [one.facts for one in self._seat.serving(0)]
            told = [one["validation_loss"] for one in heads if "validation_loss" in one]
            self._judged = Score(median(told)) if told else self._judged
            return self._judged
        judged = self._network.peers.background.run(self._evaluated(), LONGEST_EVALUATION_SECONDS)
        if judged:
            self._network.tell_others(validation_loss=judged.value)
        return judged

    def sample(self) -> str:
        """See Island. A head asks the stages for each token, for as long as they answer."""
        ends = time.monotonic() + self._deadline_s * self._seat.stages

        def scores(batch: Tensor, pick: Callable[[Tensor], Tensor], numbers: int) -> Tensor:
            left = max(0.0, ends - time.monotonic())
            found = self._network.peers.background.run(self._scored(batch[0].tolist()), left)
            return pick(found[None, None]).double()

        try:
            return "" if self._seat.stage else self._seat.workload.sample_in_pieces(scores, self._seat.seed)
        except LOST:
            return ""

    samples_beside = True
    """See Island. A token takes as long as a microbatch, and a text of them minutes where passes take seconds."""

    def total(self, values: Tensor) -> Tensor:
        """See Island."""
        return values

    async def _serve(self) -> None:
        await self._seat.serve()
        await self._pace.serve()
        self._network.lend(self._copies.lent)
        self._network.peers.background.keep("keeping a copy of a stage", self._copies.go_on)

    def _keeps_copies(self) -> bool:
        """Whether this peer is the one of its stage that does: the last one by rank. The first one moves."""
        return all(one.rank < self._network.rank for one in self._seat.serving(self._seat.stage))

    def _waited(self) -> bool:
        """Waits for what the next step learns from; False where nothing will come. Raises UserError and MoveError."""
        began = manned = looked = time.monotonic()
        while not (enough := self._pace.enough(over := self._over())) and not over and not self._stopping():
            self._seat.learnt.clear()
            self._seat.learnt.wait(LOOK_SECONDS)
            self._give_if_asked()
            now = time.monotonic()
            if now > looked + UNMANNED_SECONDS:  # it stood still, and has missed what others said
                began, manned = now, now + AWAKE_SECONDS
            looked = now
            if not (unmanned := self._unmanned()):
                manned = now
                self._successors.clear()
            elif now > manned + UNMANNED_SECONDS:
                self._take_over(unmanned)
            if now > began + self._deadline_s:
                self._refuse_without_heads()
                began = now
        return enough

    def _unmanned(self) -> list[int]:
        """The stages that nobody serves, or is about to."""
        there = {self._seat.stage, *(one.stage for one in self._network.peers.members.in_good_standing() if one.shapes)}
        return [stage for stage in range(self.settings.stages) if stage not in there]

    def _move_if_better(self) -> None:
        """Raises MoveError where this peer helps most in another stage. What it has started comes to its end first."""
        if self._over():
            return
        stage = self._restless.stage(self._seat.standings(), time.monotonic())
        if stage is not None and stage in self._able:
            self._network.peers.background.run(self._seat.start_no_more(), 2 * self._deadline_s)
            raise MoveError(stage, "holds the others up")

    def _take_over(self, unmanned: list[int]) -> None:
        """Raises MoveError where this peer is to serve one of these stages: all who know the same peers agree."""
        rank, stages = self._network.rank, self.settings.stages
        there = {one.rank: one.stage for one in self._seat.everyone()} | {rank: self._seat.stage}
        peers = {one: Standing(stage) for one, stage in there.items()}
        move = self._successors.move(peers, stages, time.monotonic())
        if move and move.peer == rank and move.stage in unmanned and move.stage in self._able:
            raise MoveError(move.stage, "has nobody")
        if self._told != unmanned:
            self._told = unmanned
            numbers = " and ".join(map(str, unmanned))
            self._network.peers.tell(f"nobody serves stage {numbers}: training waits until somebody joins")

    def _over(self) -> bool:
        """Whether all heads have taken their last step."""
        known = [one for one in self._network.peers.members.all() if one.stage == 0 and _ended(one) >= LAST_STEP]
        return bool(self._seat.stage and known) and all(_ended(one) >= LAST_STEP for one in self._seat.serving(0))

    def _refuse_without_heads(self) -> None:
        if self._seat.stage and not self._seat.serving(0):
            raise UserError(
                f"no peer has served stage 0 for {self._deadline_s:.0f} s, so no microbatches are started; "
                "come back when some do"
            )

    def _give_if_asked(self) -> None:
        """So that those who begin do not wait for one that waits for them."""
        if self._network.wanted:
            self._gives()

    def _give(self) -> None:
        """Lets others have the weights as they are now."""
        step = int(self._network.peers.info["step"])
        facts = {"step": step, "until": step + 1, "history": ""}
        self._network.give(SharedState(given(trainable(self.model)), facts))

    def _wait_for(self, end: float, others: Callable[[], list[Member]]) -> None:
        """Waits for others to come so far, and gives its weights meanwhile; not for long where nothing comes."""
        done = -1
        while any(_ended(one) < end for one in others()) and not self._stopping():
            if self._network.wanted:
                self._give()
            if self._seat.passes != done:
                done, ends = self._seat.passes, time.monotonic() + self._deadline_s
            if time.monotonic() > ends:
                return
            time.sleep(LOOK_SECONDS)

    async def _evaluated(self) -> Score | None:
        """The means of what comes of all held-out samples, but for those lost on their way; None where all are."""
        room = asyncio.Semaphore(2 * self.settings.stages)

        async def one(turn: int) -> float:
            async with room:
                return await self._seat.held_out(turn)

        sources = self._seat.held_out_sources
        losses = await self._while_manned([one(turn) for turn in range(len(sources))])
        for lost in losses:
            if isinstance(lost, BaseException) and not isinstance(lost, LOST):
                raise lost
        sums: dict[str, tuple[float, int]] = {}
        for source, loss in zip(sources, losses, strict=True):
            if not isinstance(loss, BaseException):
                total, count = sums.get(source, (0.0, 0))
                sums[source] = total + loss, count + 1
        return Score.of(sums) if sums else None

    async def _scored(self, text: list[int]) -> Tensor:
        (found,) = await self._while_manned([self._seat.scores(text)])
        if isinstance(found, asyncio.CancelledError):
            raise LostError("a stage has nobody")  # raised as it is, it would cancel who asked
        if isinstance(found, BaseException):
            raise found
        return found

    async def _while_manned(self, asked: Sequence[Coroutine[Any, Any, T]]) -> list[T | BaseException]:
        """What comes of all that is asked of the stages, or how it was lost.

        Waits while some come and each stage has somebody: else this peer may have to serve another one.
        """
        running = [asyncio.ensure_future(one) for one in asked]
        left, came = set(running), time.monotonic()
        manned = came
        while left and not self._stopping():
            done, left = await asyncio.wait(left, timeout=LOOK_SECONDS)
            now = time.monotonic()
            came = now if done else came
            manned = manned if self._unmanned() else now
            if now > manned + UNMANNED_SECONDS or now > came + self._deadline_s * self.settings.stages:
                break
        for late in left:
            late.cancel()
        return await asyncio.gather(*running, return_exceptions=True)


def _ended(member: Member) -> float:
    return float(member.facts.get("ended", 0))
