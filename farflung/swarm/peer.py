"""A peer that serves one stage: what becomes of a microbatch, from its arrival until its gradient is kept."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Any, Protocol

from farflung.swarm.letters import Call, Caller, FalseLetterError, Forward, Gradient, LostError, Microbatch, Post
from farflung.swarm.processor import Pass, Processor
from farflung.swarm.routers import Router
from farflung.swarm.waits import Waits

IN_FLIGHT = 2
"""Microbatches under way for each peer that serves, so that none is idle."""
PAUSE_SECONDS = 1.0
"""Between two looks for somebody who serves the next stage, where nobody does; or whether one of them is late."""
MOST_REASONS = 32
"""Why others were passed by, in so many different words."""
LATELY = 32
"""Microbatches of which a peer knows how long the stages behind the next one took."""


class Work(Protocol):
    """What a stage computes."""

    def forward(self, forward: Forward) -> Any:
        """The packet for the next stage; of the last stage, None. Raises LostError; FalseLetterError for the packet."""
        ...

    def check(self, gradient: Gradient) -> None:
        """Raises FalseLetterError for what cannot be this stage's gradient."""
        ...

    def backward(self, forward: Forward, gradient: Gradient) -> Gradient:
        """What goes back, once the stage has learnt from a checked gradient. Raises LostError."""
        ...

    def take_back(self, forward: Forward) -> None:
        """Unlearns a microbatch whose gradient was not kept."""
        ...

    def forget(self, forward: Forward) -> None:
        """Nothing of a microbatch will be asked again."""
        ...


@dataclass
class StagePeer:
    """One peer. A microbatch visits it as a call that stays open until the head has said what becomes of it.

    So whatever breaks on a microbatch's way ends in one of two ways: its gradient is kept in every stage on its way, or
    it is taken back in each. A peer that dies takes what it had counted with it.

    Args:
        next_stage: chooses who is behind; None in the last stage.
        patience: seconds that one stage may take for a microbatch at most; a peer waits as long as `Waits` says for
            each stage behind it.
        now: the clock.
    """

    stage: int
    stages: int
    work: Work
    processor: Processor
    post: Post
    next_stage: Router | None
    patience: float
    now: Callable[[], float]
    struck: dict[str, int] = field(default_factory=dict)
    """How often somebody was passed by, by the reason."""
    _behind_lately: deque[float] = field(default_factory=lambda: deque([0.0], LATELY))
    """What those of the next stage say that they have waited. One alone is not believed: it could seem the quickest."""
    _serving: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._waits = Waits(self.patience)

    async def serve(self, forward: Forward, caller: Caller) -> None:
        """Takes a microbatch through this stage and those behind it, and its gradient back.

        Raises LostError for a packet that cannot be right. Cancelling it drops the microbatch.
        """
        serving = asyncio.ensure_future(self._served(forward, caller))
        if not forward.judged:
            self._serving.add(serving)
            serving.add_done_callback(self._serving.discard)
        await serving

    @property
    def under_way(self) -> int:
        """Microbatches of which it is not settled yet whether they are kept, a head's own among them."""
        return len(self._serving)

    async def drop_all(self) -> None:
        """Drops what is under way, here and behind."""
        for serving in (dropped := list(self._serving)):
            serving.cancel()
        if dropped:
            await asyncio.wait(dropped)

    async def _served(self, forward: Forward, caller: Caller) -> None:
        behind: Call | None = None
        learnt = kept = False

        def back() -> Gradient:
            nonlocal learnt
            given = self.work.backward(forward, gradient)
            learnt = not forward.judged
            return given

        try:
            packet = await self.processor.run(Pass.FORWARD, lambda: self.work.forward(forward))
            began = self.now()
            behind, gradient = await self._behind(forward, packet)
            waited = self.now() - began
            given = await self.processor.run(Pass.BACKWARD, back)
            await caller.give(replace(given, behind=waited))
            kept = await caller.kept()
        finally:
            if learnt and not kept:
                self.work.take_back(forward)
            if behind is not None and not kept:
                behind.drop()
            self.work.forget(forward)
        if kept and behind is not None:
            await behind.keep()

    async def start(self, microbatch: Microbatch, version: int, counts_in: frozenset[int] | None = None) -> float:
        """Takes a microbatch of this head's through all stages; its loss."""
        return (await self.through(Forward(microbatch, self.stage, version, counts_in))).loss

    async def through(self, forward: Forward) -> Gradient:
        """Takes what this head starts through all stages; what comes back."""
        head = _Head()
        await self.serve(forward, head)
        return head.gradient

    async def _behind(self, forward: Forward, packet: Any) -> tuple[Call | None, Gradient]:
        """Hands a microbatch on until somebody brings its gradient back."""
        if self.next_stage is None:
            return None, Gradient()
        onward = replace(forward, stage=self.stage + 1, packet=packet)
        tried: set[int] = set()
        stages_behind = self.stages - 1 - self.stage
        while True:
            peer = self._chosen(forward.microbatch, tried)
            if peer is None:
                tried.clear()
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            call, began = self.post.call(peer, onward), self.now()
            try:
                return call, await self._answer(peer, call, onward, stages_behind)
            except BaseException as error:
                call.drop(str(error) if isinstance(error, FalseLetterError) else "")
                if not isinstance(error, LostError | TimeoutError):
                    raise
                tried.add(peer)
                stages_behind *= 1 + isinstance(error, TimeoutError)  # all may be late, and will be later still
                self._pass_by(peer, error, self.now() - began)

    def _chosen(self, microbatch: Microbatch, tried: set[int]) -> int | None:
        """Who is next; those that are left out only where all are."""
        assert self.next_stage is not None
        peer = self.next_stage.choose(microbatch, tried | self._waits.left_out(self.now()))
        return peer if peer is not None or tried else self.next_stage.choose(microbatch)

    async def _answer(self, peer: int, call: Call, onward: Forward, stages_behind: int) -> Gradient:
        """The gradient. What is usual may come to be known meanwhile. Raises TimeoutError and LostError."""
        assert self.next_stage is not None
        began, answer = self.now(), asyncio.ensure_future(call.gradient())
        while not answer.done():
            left = began + stages_behind * self._waits.seconds(peer) - self.now()
            if left <= 0:
                raise TimeoutError
            await asyncio.wait([answer], timeout=min(left, PAUSE_SECONDS))
        gradient = answer.result()
        if onward.judged:
            return gradient
        took = self.now() - began
        self.work.check(gradient)
        self._waits.took(peer, took)
        self._behind_lately.append(gradient.behind)
        self.next_stage.observe(peer, max(took - median_low(self._behind_lately), took / self.stages))
        return gradient

    def _pass_by(self, peer: int, error: Exception, waited: float) -> None:
        """A peer that is gone is left out until it joins again; one that is late for a while, and gets less then."""
        assert self.next_stage is not None
        reason = "late" if isinstance(error, TimeoutError) else str(error)
        if len(self.struck) >= MOST_REASONS and reason not in self.struck:
            reason = "other reasons"  # the other one may have made up the words
        self.struck[reason] = self.struck.get(reason, 0) + 1
        self._waits.failed(peer, waited, self.now())
        if isinstance(error, TimeoutError):
            self.next_stage.observe(peer, waited)
        else:
            self.next_stage.leave(peer)


class _Head:
    """Who has started a microbatch: it keeps what comes back."""

    gradient = Gradient()

    async def give(self, gradient: Gradient) -> None:
        self.gradient = gradient

    async def kept(self) -> bool:
        return True


async def under_way(
    start: Callable[[], Any], most: Callable[[], int], goes_on: Callable[[], bool] = lambda: True
) -> None:
    """Keeps so many microbatches under way while it goes on, and then waits for the last ones."""
    running: set[asyncio.Task[Any]] = set()
    try:
        while running or goes_on():
            while goes_on() and len(running) < most():
                running.add(asyncio.ensure_future(start()))
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                with contextlib.suppress(LostError):
                    one.result()
    finally:
        for one in running:
            one.cancel()
