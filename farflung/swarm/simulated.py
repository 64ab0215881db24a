"""A swarm in virtual time: peers with speeds, links, lives and deaths; with tensors, or with their seconds alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from farflung.swarm.letters import Call, Forward, Gradient, LostError
from farflung.swarm.peer import StagePeer
from farflung.swarm.processor import Pass, Processor

T = TypeVar("T")


@dataclass
class Links:
    """Every peer's own link, the same both ways; packets leave and come in one behind the other.

    Args:
        mbit: what each peer's link carries, in Mbit/s.
        packet_bytes: of the hidden states of a microbatch, or of their gradient.
    """

    mbit: Callable[[int], float]
    packet_bytes: float
    _sends_until: dict[int, float] = field(default_factory=dict)
    _receives_until: dict[int, float] = field(default_factory=dict)

    def seconds(self, sender: int, receiver: int, now: float) -> float:
        """How long a packet that is sent now is under way."""
        leaves = max(now, self._sends_until.get(sender, 0.0))
        comes = max(leaves, self._receives_until.get(receiver, 0.0))
        slowest = min(self.mbit(sender), self.mbit(receiver))
        there = comes + 8e-6 * self.packet_bytes / slowest
        self._sends_until[sender] = leaves + 8e-6 * self.packet_bytes / self.mbit(sender)
        self._receives_until[receiver] = there
        return there - now


@dataclass
class SimulatedPost:
    """Letters between the peers of one process, in virtual time.

    Args:
        seconds: how long a word is under way, from one peer to another.
        links: what packets take besides; None where they are as quick as words.
    """

    seconds: Callable[[int, int], float] = lambda sender, receiver: 0.0
    links: Links | None = None
    peers: dict[int, StagePeer] = field(default_factory=dict)
    """Those that live, by their numbers."""
    _tasks: dict[int, set[asyncio.Task[Any]]] = field(default_factory=dict)

    def of(self, sender: int) -> _Desk:
        """One peer's post."""
        return _Desk(self, sender)

    def spawn(self, peer: int, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts what ends when a peer dies."""
        task = asyncio.ensure_future(work)
        tasks = self._tasks.setdefault(peer, set())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    async def ask(self, sender: int, peer: int, question: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Has a peer answer. Raises LostError where it dies meanwhile."""
        await asyncio.sleep(self.seconds(sender, peer))
        if peer not in self.peers:
            raise LostError("gone")
        answering = self.spawn(peer, question())
        await asyncio.wait([answering])
        if answering.cancelled():
            raise LostError("gone")
        await asyncio.sleep(self.seconds(peer, sender))
        return answering.result()

    def kill(self, peer: int) -> None:
        """A peer is gone at once, with all that it had under way; nobody is told but by calls that break."""
        del self.peers[peer]
        for task in list(self._tasks.pop(peer, ())):
            task.cancel()


@dataclass
class _Desk:
    post: SimulatedPost
    sender: int

    def call(self, peer: int, forward: Forward) -> Call:
        return _Call(self.post, self.sender, peer, forward)


class _Call:
    """Both ends of a call: the `Call` of who made it, the `Caller` of who serves it."""

    def __init__(self, post: SimulatedPost, sender: int, receiver: int, forward: Forward) -> None:
        self._post, self._sender, self._receiver = post, sender, receiver
        loop = asyncio.get_running_loop()
        self._gradient: asyncio.Future[Gradient] = loop.create_future()
        self._word: asyncio.Future[bool] = loop.create_future()
        self._serving = post.spawn(receiver, self._serve(forward)) if receiver in post.peers else None
        if self._serving is None:
            self._gradient.set_exception(LostError("gone"))
        else:
            self._serving.add_done_callback(self._ended)

    async def gradient(self) -> Gradient:
        return await asyncio.shield(self._gradient)

    async def keep(self) -> None:
        try:
            await self._under_way()
        finally:
            self._say(self._sender in self._post.peers)

    def drop(self, false: str = "") -> None:
        self._say(False)
        if self._serving is not None and not self._gradient.done():
            self._serving.cancel()
        if not self._gradient.done():
            self._gradient.cancel()
        elif not self._gradient.cancelled():
            self._gradient.exception()  # was seen

    async def _serve(self, forward: Forward) -> None:
        await self._carried(self._sender, self._receiver)
        await self._post.peers[self._receiver].serve(forward, self)

    async def give(self, gradient: Gradient) -> None:
        await self._carried(self._receiver, self._sender)
        if self._sender not in self._post.peers or self._gradient.done():
            raise LostError("gone")
        self._gradient.set_result(gradient)

    async def kept(self) -> bool:
        return await self._word

    def _say(self, kept: bool) -> None:
        if not self._word.done():
            self._word.set_result(kept)

    def _ended(self, serving: asyncio.Task[None]) -> None:
        lost = None if serving.cancelled() else serving.exception()
        if lost is not None and not isinstance(lost, LostError):
            raise lost
        if not self._gradient.done():
            self._gradient.set_exception(LostError(str(lost) if lost else "gone"))

    async def _carried(self, sender: int, receiver: int) -> None:
        if self._post.links is not None:
            now = asyncio.get_running_loop().time()
            await asyncio.sleep(self._post.links.seconds(sender, receiver, now))
        await self._under_way()

    async def _under_way(self) -> None:
        await asyncio.sleep(self._post.seconds(self._sender, self._receiver))


def in_virtual_seconds(forward: float, backward: float) -> Processor:
    """A device that takes so many virtual seconds for a pass."""

    async def compute(which: Pass, work: Callable[[], T]) -> T:
        await asyncio.sleep(forward if which is Pass.FORWARD else backward)
        return work()

    return Processor(compute)


class TimeAlone:
    """The work of a stage in a simulation of time alone."""

    def __init__(self) -> None:
        self.learnt: list[Forward] = []

    def forward(self, forward: Forward) -> None:
        """See Work."""

    def check(self, gradient: Gradient) -> None:
        """See Work."""

    def backward(self, forward: Forward, gradient: Gradient) -> Gradient:
        """See Work."""
        self.learnt.append(forward)
        return gradient

    def take_back(self, forward: Forward) -> None:
        """See Work."""
        self.learnt.remove(forward)

    def forget(self, forward: Forward) -> None:
        """See Work."""
