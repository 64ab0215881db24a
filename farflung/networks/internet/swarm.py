"""This peer's place among the others: a libp2p host, in a thread of its own, that only members may talk to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import uvloop

from farflung.errors import UserError
from farflung.formats import PROTOCOL
from farflung.networks.internet.admission import (
    CLOCK_SECONDS,
    Admission,
    StrangerError,
    check_clock,
    disagreement,
    member_of,
)
from farflung.networks.internet.directory import Directory
from farflung.networks.internet.frames import Frame, FrameError, entry, number, plain, read_frame, write_frame
from farflung.networks.internet.guard import Guard
from farflung.networks.internet.host import UNREACHABLE, Host, NobodyAnswersError, Seat, Streams
from farflung.networks.internet.identity import Identity
from farflung.networks.internet.lines import PROMPT_SECONDS, Handler, Line, RequestRefusedError, accepted
from farflung.networks.internet.members import BEAT_SECONDS, Member, Members
from farflung.networks.internet.ticket import Ticket
from farflung.scoped import quiet

T = TypeVar("T")

KNOCKS = 2
"""How often a newcomer tries: a link may lose the first words, and a busy peer be slow to hear them."""


class Swarm:
    """A member of a run's swarm.

    `about` is what it says of itself: what others must agree to, and facts for those who look on.

    Args:
        ticket: the run's.
        identity: this peer's key.
        seat: where it listens.
        about: release of farflung, settings, shapes, host, trains; see `disagreement`.
        tell: told in one line what a user should know.
        listed: whether others are to know of it.
    """

    def __init__(
        self,
        ticket: Ticket,
        identity: Identity,
        seat: Seat,
        about: Frame,
        tell: Callable[[str], None],
        listed: bool = True,
    ) -> None:
        self.identity = identity
        self.members = Members()
        self.guard = Guard(tell)
        self.handlers: dict[str, Handler] = {}
        self.about: Frame = {
            "protocol": PROTOCOL.version,
            "rank": identity.rank,
            "public": identity.public,
            "session": os.urandom(8).hex(),
            "addresses": [],
            "beat": 0,
            "step": 0,
            "rate": 0.0,
            "facts": {},
            **about,
        }
        self._ticket = ticket
        self._seat = seat
        self._tell = tell
        self._listed = listed
        self._admission = Admission(ticket, identity)
        self._proven: dict[str, Member] = {}
        self._host = Host(seat, identity, f"farflung/1/{ticket.run}")
        self._loop = uvloop.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._quiet = contextlib.ExitStack()
        self._failure = ""
        self._clock_gap = time.time() - time.monotonic()
        self._leaving = False
        self._loop.set_exception_handler(self._unheard)
        self._thread = threading.Thread(target=self._loop.run_forever, name="swarm", daemon=True)

    def start(self, deadline: float) -> None:
        """Takes its place. Raises UserError."""
        if "HIVEMIND_LOGLEVEL" not in os.environ:
            self._quiet.enter_context(quiet("hivemind"))  # what concerns a user, farflung says
        self._thread.start()
        try:
            self.run(self._start(deadline), deadline + 30)
        except BaseException:
            self.close()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts work in the swarm's thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def look_after(self, work: asyncio.Future[Any] | Future[Any]) -> None:
        """Tells when work fails that nobody waits for."""
        work.add_done_callback(self._ended)

    def run(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Does work in the swarm's thread, and waits for it. Raises TimeoutError and what the work raises."""
        return self.submit(work).result(timeout)

    def close(self) -> None:
        """Leaves."""
        self._leaving = True
        with contextlib.suppress(Exception):
            self.run(self._stop(), 10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._quiet.close()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where this peer can be knocked at, and then where the others can, for tickets."""
        others = (address for member in self.members.all() if member.alive for address in member.addresses)
        return tuple(dict.fromkeys((*self.about["addresses"], *others)))

    @contextlib.asynccontextmanager
    async def line(self, member: Member) -> AsyncIterator[Line]:
        """A stream to a member, once both have proven that they are.

        Raises one of UNREACHABLE, and RequestRefusedError.
        """
        if member.peer not in self._proven:
            try:
                await self.greet(member.peer)
            except FrameError as error:
                self.guard.strike(member.peer, "bad greeting", str(error))
                raise RequestRefusedError(str(error)) from error
            except UserError as error:  # a peer that cannot be greeted is no reason to stop training
                raise RequestRefusedError(str(error)) from error
        async with self._stream(member.peer) as (reader, writer):
            yield Line(member, reader, writer)

    async def ask(self, member: Member, request: Frame, deadline: float = PROMPT_SECONDS) -> Frame:
        """A member's answer to a request. Raises as `line`, and RequestRefusedError."""
        async with asyncio.timeout(deadline), self.line(member) as line:
            await write_frame(line.writer, request)
            return accepted(await read_frame(line.reader))

    async def greet(self, peer: str) -> Member:
        """Proves membership to a peer, and has it prove its own. Raises as `line`, and UserError."""
        async with asyncio.timeout(PROMPT_SECONDS), self._stream(peer) as (reader, writer):
            ask = self._admission.ask()
            await write_frame(writer, ask)
            answer = await read_frame(reader)
            proof = self._admission.proof(ask, answer, peer)
            asked = time.time()
            await write_frame(writer, {"proof": proof, "about": self.about})
            about = accepted(await read_frame(reader))
            check_clock(number(about.get("time")), asked, time.time())
            return self._admit(about, peer)

    async def _start(self, deadline: float) -> None:
        knocked = () if self._seat.first else self._ticket.addresses
        for left in reversed(range(KNOCKS)):
            try:
                self.about["addresses"] = await self._host.start(knocked, self._on_stream, deadline)
                if knocked:
                    await self._knock(knocked)
                break
            except NobodyAnswersError:
                await self._host.stop()
                if not left:
                    raise
        self._directory = await Directory.open(self._host.p2p, self._ticket, self.identity, self.guard, knocked)
        await self._beat()
        self._spawn(self._keep_beating())

    async def _knock(self, addresses: Sequence[str]) -> None:
        """Greets the peers of the ticket; one that answers is enough. Raises UserError."""
        peers = dict.fromkeys(address.rpartition("/p2p/")[2] for address in addresses)
        answers = await asyncio.gather(
            *(self.greet(peer) for peer in peers if peer != self.identity.peer), return_exceptions=True
        )
        if any(isinstance(answer, Member) for answer in answers):
            return
        for answer in answers:
            if isinstance(answer, UserError):
                raise answer
            if isinstance(answer, RequestRefusedError):
                raise UserError(f"the run's peers refuse this one: {answer}") from answer
        if any("protocols not supported" in str(answer) or isinstance(answer, StrangerError) for answer in answers):
            raise UserError(
                "there are peers at the ticket's addresses, but not of this run, or its secret is another; "
                "ask for a new ticket"
            )
        raise NobodyAnswersError(addresses)

    def _stream(self, peer: str) -> AbstractAsyncContextManager[Streams]:
        member = self.members.of_peer(peer)
        return self._host.stream(peer, member.addresses if member else self._ticket.addresses, PROMPT_SECONDS)

    async def _on_stream(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = str(info.peer_id)
        if not self.guard.admit(peer):
            writer.close()
            return
        member = self._proven.get(peer)
        try:
            async with asyncio.timeout(PROMPT_SECONDS):
                frame = await read_frame(reader)
                if frame.get("kind") == "hello":
                    await self._answer_hello(peer, frame, reader, writer)
                    return
            if member is None:
                raise StrangerError("it has not proven that it is a member")
            handler = self.handlers.get(entry(frame, "kind", str))
            if handler is None:
                raise FrameError(f"there is no request {frame['kind']!r:.40}")
            await handler(Line(member, reader, writer), frame)
        except RequestRefusedError as refusal:
            await self._say(writer, {"refused": str(refusal)[:300]})
        except TimeoutError:
            self.guard.refuse("too slow")
        except UNREACHABLE:
            pass  # who has gone meanwhile is missed by those who wait for it
        except Exception as error:
            if member is None:
                self.guard.refuse("stranger")
            else:
                self.guard.strike(peer, "bad request", str(error))
            await self._say(writer, {"refused": str(error)[:300]})
        finally:
            self.guard.release(peer)
            writer.close()

    async def _answer_hello(
        self, peer: str, ask: Frame, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        answer = self._admission.answer(ask, peer)
        await write_frame(writer, answer)
        told = await read_frame(reader)
        self._admission.check(ask, answer, told.get("proof"), peer)
        about = entry(told, "about", dict)
        if why := disagreement(about, self.about):
            raise RequestRefusedError(why)
        self._admit(about, peer)
        await write_frame(writer, {**self.about, "time": time.time()})

    def _admit(self, about: Frame, peer: str) -> Member:
        member = member_of(about, peer)
        self._proven[peer] = member
        self.members.hear(member)
        return member

    @staticmethod
    async def _say(writer: asyncio.StreamWriter, frame: Frame) -> None:
        with contextlib.suppress(*UNREACHABLE):
            async with asyncio.timeout(PROMPT_SECONDS):
                await write_frame(writer, frame)

    async def _keep_beating(self) -> None:
        missed: dict[int, float] = {}
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            self._watch_the_clock()
            await self._beat()
            for member in self.members.missing():
                if time.monotonic() >= missed.get(member.rank, 0.0):
                    missed[member.rank] = time.monotonic() + 2 * BEAT_SECONDS
                    self._spawn(self._seek(member))

    async def _beat(self) -> None:
        """Tells the others of this peer, and hears of them; what fails is told once, and tried again at the next."""
        failure = ""
        self.about["beat"] += 1
        try:
            async with asyncio.timeout(4 * BEAT_SECONDS):
                if self._listed:
                    await self._directory.write(self.about)
                for member in await self._directory.read():
                    self.members.hear(member)
        except UNREACHABLE:
            pass  # the next one may reach them
        except Exception as error:
            failure = plain(f"this peer cannot tell others of itself, or hear of them: {error!r}")
        if failure and failure != self._failure:
            self._tell(failure)
        self._failure = failure

    async def _seek(self, member: Member) -> None:
        """Looks for one that has gone, at the addresses that it had: after a partition nobody else would."""
        with contextlib.suppress(*UNREACHABLE, RequestRefusedError, FrameError, UserError):
            await self.greet(member.peer)
            await self._directory.introduce(member)

    def _watch_the_clock(self) -> None:
        gap = time.time() - time.monotonic()
        if abs(gap - self._clock_gap) > CLOCK_SECONDS:
            moved = gap - self._clock_gap
            self._tell(f"this machine's clock has jumped by {moved:+.0f} s; set it right, or peers lose sight of it")
            self._clock_gap = gap

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.look_after(task)

    def _ended(self, work: asyncio.Future[Any] | Future[Any]) -> None:
        error = None if work.cancelled() else work.exception()
        if error and not self._leaving:
            self._tell(plain(f"a part of this peer's work has failed: {error!r}"))

    def _unheard(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Logs what has ended a task that nobody waits for, but not that the daemon has gone: who calls it is told."""
        error = context.get("exception")
        if not isinstance(error, UNREACHABLE) and not (error is None and self._leaving):
            loop.default_exception_handler(context)

    async def _stop(self) -> None:
        if hasattr(self, "_directory"):
            with contextlib.suppress(Exception):
                await self._directory.close()
        await self._host.stop()
        for _ in range(2):  # a task that is cancelled may begin others
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            for task in rest:
                task.cancel()
            if rest:
                await asyncio.wait(rest, timeout=1)
