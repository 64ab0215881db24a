"""This machine's libp2p host: where it listens, and streams to others."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils.multiaddr import Multiaddr

from farflung import scoped
from farflung.errors import UserError
from farflung.networks.internet.identity import Identity

UNREACHABLE = (OSError, EOFError, TimeoutError, ControlFailure, P2PDaemonError)
"""What a call to a peer may raise that is not there."""

LONGEST_ADDRESS = 512

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
OnStream = Callable[[Any, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True)
class Seat:
    """Where and how a peer listens.

    Args:
        listen: the address of the interface; 0.0.0.0 for all, and then help with NAT is sought, too.
        port: 0 takes a free one.
        announce: libp2p addresses to tell others instead of those found out.
        first: begins the swarm, or begins it again, without knocking anywhere.
    """

    listen: str = "0.0.0.0"
    port: int = 0
    announce: tuple[str, ...] = ()
    first: bool = False


def leads_to(address: str, peer: str) -> bool:
    """Whether an address is one of libp2p's, at which a peer may be knocked at."""
    place, _, end = address.rpartition("/p2p/")
    try:
        return bool(place) and end == peer and len(address) <= LONGEST_ADDRESS and bool(Multiaddr(address))
    except ValueError:
        return False


class NobodyAnswersError(UserError):
    """No peer is found at a ticket's addresses."""

    def __init__(self, addresses: Sequence[str]) -> None:
        super().__init__(
            f"none of the ticket's {len(addresses)} addresses answers; ask a peer that is there for its newer ticket "
            "(RUN/run.ticket), see that this machine reaches it, or begin the run again here with --first"
        )


class Host:
    """A libp2p daemon of this process's own.

    Args:
        seat: where it listens.
        identity: its key.
        protocol: what streams to it must ask for.
    """

    def __init__(self, seat: Seat, identity: Identity, protocol: str) -> None:
        self.p2p: Any = None
        self._seat = seat
        self._identity = identity
        self._protocol = protocol

    async def start(self, knocked: Sequence[str], on_stream: OnStream, deadline: float) -> list[str]:
        """Listens, and connects to peers at some addresses; where others can reach it. Raises UserError."""
        seat = self._seat
        check_place(seat)
        on_internet = seat.listen == "0.0.0.0"
        levels = {} if "HIVEMIND_LOGLEVEL" in os.environ else {"GOLOG_LOG_LEVEL": "FATAL"}  # the daemon's
        try:
            with scoped.environment(**levels):
                self.p2p = await P2P.create(
                    initial_peers=list(knocked) or None,
                    host_maddrs=[f"/ip4/{seat.listen}/tcp/{seat.port}"],
                    announce_maddrs=list(seat.announce) or None,
                    identity_path=str(self._identity.path),
                    check_if_identity_free=False,
                    auto_nat=on_internet,
                    nat_port_map=on_internet,
                    use_auto_relay=on_internet and bool(knocked),
                    startup_timeout=deadline,
                )
        except P2PDaemonError as error:
            if knocked:
                raise NobodyAnswersError(knocked) from error
            raise UserError(f"the libp2p daemon cannot start: {error}") from error
        await self.p2p.add_binary_stream_handler(self._protocol, on_stream)
        visible = [str(address) for address in await self.p2p.get_visible_maddrs()]
        return [address for address in visible if seat.listen.startswith("127.") or "/127.0.0.1/" not in address]

    @contextlib.asynccontextmanager
    async def stream(self, peer: str, addresses: Sequence[str], deadline: float) -> AsyncIterator[Streams]:
        """A stream to a peer, who may be at some addresses. Raises one of UNREACHABLE."""
        async with asyncio.timeout(deadline):
            try:
                _, reader, writer = await self._open(peer)
            except ControlFailure:
                # libp2p may not have heard of it yet, or have forgotten where it is.
                there = [address.rpartition("/p2p/")[0] for address in addresses if address.endswith(f"/p2p/{peer}")]
                await self.p2p._client.connect(PeerID.from_base58(peer), [Multiaddr(address) for address in there])
                _, reader, writer = await self._open(peer)
        try:
            yield reader, writer
        finally:
            writer.close()

    async def stop(self) -> None:
        """Ends the daemon."""
        if self.p2p is not None:
            await self.p2p.shutdown()

    async def _open(self, peer: str) -> Any:
        return await self.p2p.call_binary_stream_handler(PeerID.from_base58(peer), self._protocol)


def check_place(seat: Seat) -> None:
    """Refuses a place that cannot be listened at; libp2p itself would share a port with another. Raises UserError."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((seat.listen, seat.port))
            probe.listen()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UserError(f"port {seat.port} is in use on this machine; choose another with --port") from error
            reason = error.strerror or str(error)
            raise UserError(f"cannot listen at {seat.listen}: {reason}; give an address of this machine") from error
