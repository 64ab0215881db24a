"""Steps that the peers of a real swarm all take together: see `farflung.swarm.synchronous`."""

from __future__ import annotations

import asyncio
import contextlib
import io
import time
from collections.abc import Collection, Mapping
from statistics import median_low
from typing import Any

import torch
from torch import Tensor

from farflung.errors import UserError
from farflung.hooks.trained import trainable
from farflung.networks import PeerLostError
from farflung.networks.peers.frames import FrameError, reading
from farflung.swarm.leading import Leader
from farflung.swarm.letters import LostError, Microbatch
from farflung.swarm.questions import Asked, Questions
from farflung.swarm.seat import Seat
from farflung.swarm.states import weights_in
from farflung.swarm.synchronous import Participant, Synchronous
from farflung.swarm.turns import Turns
from farflung.swarm.work import Learnt

LOOK_SECONDS = 0.2
"""How often a head looks whether it is to lead."""


class StepsTogether:
    """See Steps. One of the heads leads, by turns; a step takes one batch of the whole swarm's.

    Args:
        last: the run's last step.
    """

    def __init__(self, seat: Seat, last: int) -> None:
        self._seat, self._last = seat, last
        self._own = Synchronous(seat.peer, seat.work, self, self._take, self._fetch)
        self._questions = Questions(seat.peers, self._own, self._state, seat.samples, seat.parts, last)
        self._due: Learnt | None = None
        self._done: asyncio.Future[None] | None = None
        self._over = False

    async def serve(self) -> None:
        """See Steps."""
        self._questions.open()
        if not self._seat.stage:
            self._seat.peers.background.keep("leading steps", self._lead)

    def enough(self, over: bool) -> bool:
        """See Steps. One that has missed the last steps is done, too."""
        self._over = over
        return self._due is not None or self._seat.work.version >= self._last

    def take(self) -> Learnt | None:
        """See Steps."""
        due, self._due = self._due, None
        self._seat.work.take()  # it is a part of what is due
        return due

    def stepped(self) -> None:
        """See Steps."""
        if done := self._done:  # else none was taken
            self._seat.work.advance()
            done.get_loop().call_soon_threadsafe(done.set_result, None)
            self._done = None

    @property
    def at(self) -> int | None:
        """See Steps."""
        return self._last if self._over else self._seat.work.version

    def living(self) -> dict[int, Participant]:
        """See Members."""
        others: dict[int, Participant] = {one.rank: self._questions.of(one) for one in self._seat.everyone()}
        return {self._seat.network.rank: self._own, **others}

    async def _lead(self) -> None:
        """Leads whenever it is this head's turn."""
        seat, leading = self._seat, None
        turns = Turns(seat.stages * seat.peer.patience)
        own = seat.network.rank
        while True:
            heads = [own, *(one.rank for one in seat.serving(0))]
            turn = turns.leader(heads, self._reached(), time.monotonic()) == own
            if turn and leading is None:
                leading = asyncio.ensure_future(self._lead_all())
            if leading and (leading.done() or not turn):
                leading.cancel()
                await asyncio.wait([leading])
                if not leading.cancelled():
                    leading.result()
                leading = None
            await asyncio.sleep(LOOK_SECONDS)

    def _reached(self) -> int:
        """The step that the swarm has reached, as most say: one alone could lie, or be behind."""
        return median_low([self._seat.work.version, *(one.step for one in self._seat.everyone())])

    async def _lead_all(self) -> None:
        leader = Leader(self, self._seat.stages, self._seat.network.rank, self._seat.peer.patience)
        while (step := await leader.furthest()) < self._last:
            await leader.step(step, [Microbatch(step, number) for number in range(self._seat.parts)])
        await leader.bring_up(self._last)

    async def _take(self, learnt: Learnt) -> None:
        """Leaves the step to this peer's trainer."""
        self._done = done = asyncio.get_running_loop().create_future()
        self._due = learnt
        self._seat.learnt.set()
        await done

    def _state(self) -> tuple[int, bytes]:
        """The weights and their optimizer's state, and the version of them."""
        seat, content = self._seat, io.BytesIO()
        with seat.weights:
            assert seat.optimizer is not None
            torch.save({"model": dict(trainable(seat.model)), "optimizer": seat.optimizer.state_dict()}, content)
            return seat.work.version, content.getvalue()

    async def _fetch(self, version: int, givers: list[int]) -> None:
        """Takes a version of the weights. Raises LostError where no giver has it."""
        if not givers:
            await self._begin_anew(version)
            return
        living = self.living()
        for giver in givers:
            one = living.get(giver)
            if not isinstance(one, Asked):
                continue
            with contextlib.suppress(LostError):  # another may have it
                found, content = await one.state()
                if found == version:
                    with one.striking():
                        await asyncio.to_thread(self._load, version, content)
                    return
        raise LostError("nobody gives it the weights")

    async def _begin_anew(self, version: int) -> None:
        """Takes a copy of its stage that others keep, where it is later than what it has itself."""
        seat, found = self._seat, None
        with contextlib.suppress(PeerLostError, UserError):
            state = await seat.network.asked_for(seat.stage)
            if int(state.facts["step"]) > seat.work.version:
                found = weights_in(state.tensors, trainable(seat.model))
        with seat.weights, torch.no_grad():
            for name, weights in (found or {}).items():
                trainable(seat.model)[name].copy_(weights)
            seat.work.begin_at(version)

    def _load(self, version: int, content: bytes) -> None:
        seat = self._seat
        assert seat.optimizer is not None
        state = taken_state(content, trainable(seat.model), seat.optimizer)
        with seat.weights, torch.no_grad():
            seat.optimizer.load_state_dict(state["optimizer"])
            for name, one in trainable(seat.model).items():
                one.copy_(state["model"][name])
            seat.work.begin_at(version)


@reading("a mate's state")
def taken_state(content: bytes, weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A mate's "model" and "optimizer" as bytes, but for the optimizer's settings, which stay the own ones.

    Raises FrameError where its weights, or what its optimizer keeps of each, are not such as the own ones may be.
    """
    told = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    model = {name: _like(told["model"][name], [one.shape]) for name, one in weights.items()}
    kept = {
        number: {name: _like(value, [parameters[number].shape, torch.Size()]) for name, value in of.items()}
        for number, of in told["optimizer"]["state"].items()
    }
    return {"model": model, "optimizer": {"state": kept, "param_groups": optimizer.state_dict()["param_groups"]}}


def _like(value: Any, shapes: Collection[torch.Size]) -> Any:
    """What a mate has told. Raises FrameError where it is not finite, or has another shape than one of these."""
    tensor = torch.as_tensor(value)
    if tensor.shape not in shapes or not tensor.isfinite().all():
        raise FrameError("it does not fit")
    return value
