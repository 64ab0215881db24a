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

IN_FLIGHT = 2
"""Microbatches that a head has under way for each stage, so that none is idle."""
PAUSE_SECONDS = 1.0
"""Between two looks for somebody who serves the next stage, where nobody does."""
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
        patience: seconds that one stage may take for a microbatch; a peer waits so long for each stage behind it.
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
    under_way: int = 0
    """Microbatches of which it is not settled yet whether they are kept, a head's own among them."""
    _behind_lately: deque[float] = field(default_factory=lambda: deque([0.0], LATELY))
    """What those of the next stage say that they have waited. One alone is not believed: it could seem the quickest."""

    async def serve(self, forward: Forward, caller: Caller) -> None:
        """Takes a microbatch through this stage and those behind it, and its gradient back.

        Raises LostError for a packet that cannot be right. Cancelling it drops the microbatch.
        """
        self.under_way += 1
        try:
            await self._served(forward, caller)
        finally:
            self.under_way -= 1

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
        patience = self.patience * (self.stages - 1 - self.stage)
        while True:
            peer = self.next_stage.choose(forward.microbatch, tried)
            if peer is None:
                tried.clear()
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            call = self.post.call(peer, onward)
            try:
                return call, await self._answer(peer, call, onward, patience)
            except BaseException as error:
                call.drop(str(error) if isinstance(error, FalseLetterError) else "")
                if not isinstance(error, LostError | TimeoutError):
                    raise
                tried.add(peer)
                patience *= 1 + isinstance(error, TimeoutError)  # all may be late, and will be later still
                self._pass_by(peer, error)

    async def _answer(self, peer: int, call: Call, onward: Forward, patience: float) -> Gradient:
        assert self.next_stage is not None
        began = self.now()
        async with asyncio.timeout(patience):
            gradient = await call.gradient()
        if onward.judged:
            return gradient
        took = self.now() - began
        self.work.check(gradient)
        self._behind_lately.append(gradient.behind)
        self.next_stage.observe(peer, max(took - median_low(self._behind_lately), took / self.stages))
        return gradient

    def _pass_by(self, peer: int, error: Exception) -> None:
        """A peer that is gone is left out until it joins again; one that is late is asked again next time."""
        assert self.next_stage is not None
        reason = "late" if isinstance(error, TimeoutError) else str(error)
        self.struck[reason] = self.struck.get(reason, 0) + 1
        if isinstance(error, TimeoutError):
            self.next_stage.observe(peer, self.patience)
        else:
            self.next_stage.leave(peer)


class _Head:
    """Who has started a microbatch: it keeps what comes back."""

    gradient = Gradient()

    async def give(self, gradient: Gradient) -> None:
        self.gradient = gradient

    async def kept(self) -> bool:
        return True


async def under_way(start: Callable[[], Any], most: int, goes_on: Callable[[], bool] = lambda: True) -> None:
    """Keeps so many microbatches under way while it goes on, and then waits for the last ones."""
    running: set[asyncio.Task[Any]] = set()
    try:
        while running or goes_on():
            while goes_on() and len(running) < most:
                running.add(asyncio.ensure_future(start()))
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                with contextlib.suppress(LostError):
                    one.result()
    finally:
        for one in running:
            one.cancel()
