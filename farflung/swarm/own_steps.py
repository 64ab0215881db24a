"""Steps that a peer takes by itself, with what it has learnt: as many as the heads take, whoever serves its stage."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from farflung.swarm.letters import Microbatch
from farflung.swarm.moves import share_under_way
from farflung.swarm.peer import IN_FLIGHT, under_way
from farflung.swarm.seat import Seat
from farflung.swarm.work import Learnt


class OwnSteps:
    """See Steps. Heads start microbatches all the time.

    Args:
        last: the run's last step.
        at_once: whether nothing is computed between the gradient that completes a step and the step.
    """

    def __init__(self, seat: Seat, last: int, at_once: bool) -> None:
        self._seat, self._last, self._at_once = seat, last, at_once
        self._waits = False
        self._streams: set[int] = set()
        """The heads whose microbatches the last step has learnt from."""
        self._taken, self._due = 0, 0.0
        """Microbatches that steps were taken with, and those that should have been, at the heads' pace."""
        seat.work.take_step = self._has_learnt

    async def serve(self) -> None:
        """See Steps."""
        seat = self._seat
        if seat.stage:
            return
        numbers = itertools.count()
        stream = int(seat.peers.info["session"], 16) >> 12  # one that comes back gives no name again
        each = 1 if self._at_once else IN_FLIGHT  # one, where a step follows each of them

        def most() -> int:
            return share_under_way(seat.standings(), seat.network.rank, seat.stages, each)

        async def start() -> None:
            name = Microbatch(*divmod(next(numbers), seat.parts), stream)
            await seat.peer.start(name, seat.work.version)

        seat.peers.background.keep("starting microbatches", lambda: under_way(start, most, lambda: seat.starts))

    def enough(self, over: bool) -> bool:
        """See Steps. The last step takes all that the heads have started."""
        self._waits = True
        learnt = list(self._seat.work.learnt.samples)
        if not learnt or over:
            return bool(learnt)
        last = self._seat.stage and self._seat.peers.info["step"] >= self._last - 1
        return not last and self._taken + len(learnt) >= self._due + self._share(learnt)

    def take(self) -> Learnt | None:
        """See Steps."""
        self._waits = False
        if done := self._seat.work.take():
            self._taken += len(done.samples)
            self._due += self._share(done.samples)
            self._streams = {one.stream for one in done.samples}
        return done

    def stepped(self) -> None:
        """See Steps."""
        self._seat.work.advance()
        self._seat.steps_first.set()

    @property
    def at(self) -> int | None:
        """See Steps."""
        return None

    def _has_learnt(self) -> None:
        if self._at_once and self._waits and self.enough(over=False):
            self._seat.steps_first.clear()
        self._seat.learnt.set()

    def _share(self, learnt: Iterable[Microbatch]) -> float:
        """Microbatches of a step that let this peer take as many steps as a head; in the mean, since none is half."""
        seat = self._seat
        if not seat.stage:
            return seat.parts
        streams = len(self._streams | {one.stream for one in learnt})
        heads = min(streams, max(1, len(seat.serving(0))))  # one of them may name as many streams as it likes
        return seat.parts * heads / (len(seat.serving(seat.stage)) + 1)
