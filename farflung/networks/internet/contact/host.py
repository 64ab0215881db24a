"""This machine's libp2p host: where it listens, and streams to others."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils.multiaddr import Multiaddr

from farflung import scoped
from farflung.errors import UserError, counted
from farflung.networks.internet.contact.frames import plain
from farflung.networks.internet.contact.identity import Identity
from farflung.networks.listening import ListenAddress

UNREACHABLE = (OSError, EOFError, TimeoutError, ControlFailure, P2PDaemonError)
"""The errors of a call to a peer that is not there."""

LONGEST_ADDRESS = 512

SEEN = "farflung/seen/1"
"""The libp2p protocol in which a host tells a caller at which address it sees it."""
SEEN_SECONDS = 5.0

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
OnStream = Callable[[Any, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def leads_to(address: str, peer: str) -> bool:
    """Whether an address is one of libp2p's, that leads to a peer."""
    place, _, end = address.rpartition("/p2p/")
    try:
        return bool(place) and end == peer and len(address) <= LONGEST_ADDRESS and bool(Multiaddr(address))
    except ValueError:
        return False


def peers_at(addresses: Iterable[str]) -> list[str]:
    """The ids of the peers that addresses lead to, each once."""
    return list(dict.fromkeys(address.rpartition("/p2p/")[2] for address in addresses))


def is_global(address: str) -> bool:
    """Whether an address is one on the internet, and not one at a relay."""
    _, kind, place, *_ = [*address.split("/"), "", "", ""]
    known = kind.startswith("dns") or (kind in ("ip4", "ip6") and ipaddress.ip_address(place).is_global)
    return known and "/p2p-circuit" not in address


class Daemon(P2P):  # type: ignore[misc]
    """hivemind's daemon, that takes none but the given relays: it would wait three minutes for a choice of four."""

    @staticmethod
    def _make_process_args(*places: str, **options: Any) -> list[str]:
        if "trustedRelays" in options:
            options["relayDiscovery"] = False
        made: list[str] = P2P._make_process_args(*places, **options)
        return made


class NobodyAnswersError(UserError):
    """No peer is found at a ticket's addresses."""

    def __init__(self, addresses: Sequence[str]) -> None:
        super().__init__(
            f"the ticket leads to {counted(len(addresses), 'address')}, where nobody answers; ask a peer that is "
            "there for its newer ticket (RUN/run.ticket), see that this machine reaches it, or begin the run again "
            "here with: farflung join TICKET --first"
        )


class Host:
    """A libp2p daemon of this process's own; streams to it must ask for its protocol."""

    def __init__(self, local: ListenAddress, identity: Identity, protocol: str) -> None:
        self.p2p: Any = None
        self._local = local
        self._identity = identity
        self._protocol = protocol

    async def start(self, bootstrap: Sequence[str], on_stream: OnStream, deadline_s: float) -> list[str]:
        """Listens, and connects to peers at some addresses; where others can reach it. Raises UserError."""
        local = self._local
        check_address(local)
        try:
            await self._start_daemon(bootstrap, local.port, local.announce, deadline_s)
            visible = [str(address) for address in await self.p2p.get_visible_maddrs()]
            if local.listen == "0.0.0.0" and not local.announce and (seen := await self._seen_at(bootstrap, visible)):
                # A relay lets more than 128 KiB through only if it knows that it can be reached from outside, and asks
                # none about that but those who say that they are on the internet.
                await self.p2p.shutdown()
                places = [address.rpartition("/p2p/")[0] for address in visible]
                port = int(visible[0].partition("/tcp/")[2].partition("/")[0])
                await self._start_daemon(bootstrap, port, [*places, seen], deadline_s)
        except P2PDaemonError as error:
            if bootstrap:
                raise NobodyAnswersError(bootstrap) from error
            raise UserError(f"the libp2p daemon cannot start: {plain(str(error))}") from error
        await self.p2p.add_binary_stream_handler(SEEN, _tell_where_it_is_seen)
        await self.p2p.add_binary_stream_handler(self._protocol, on_stream)
        return [address for address in visible if local.listen.startswith("127.") or "/127.0.0.1/" not in address]

    async def _start_daemon(
        self, bootstrap: Sequence[str], port: int, announce: Sequence[str], deadline_s: float
    ) -> None:
        on_internet = self._local.listen == "0.0.0.0"
        levels = {} if "HIVEMIND_LOGLEVEL" in os.environ else {"GOLOG_LOG_LEVEL": "FATAL"}  # the daemon's
        with scoped.environment(**levels):
            self.p2p = await Daemon.create(
                initial_peers=list(bootstrap) or None,
                host_maddrs=[f"/ip4/{self._local.listen}/tcp/{port}"],
                announce_maddrs=list(announce) or None,
                identity_path=str(self._identity.path),
                check_if_identity_free=False,
                auto_nat=on_internet,
                nat_port_map=on_internet,
                use_auto_relay=on_internet and bool(bootstrap),
                trusted_relays=[address for address in bootstrap if on_internet and is_global(address)] or None,
                startup_timeout=deadline_s,
            )

    async def _seen_at(self, bootstrap: Sequence[str], own: Sequence[str]) -> str | None:
        """The address on the internet at which others see this host, if its own are none there."""
        if any(map(is_global, own)):
            return None
        for peer in peers_at(filter(is_global, bootstrap)):
            with contextlib.suppress(*UNREACHABLE):
                async with asyncio.timeout(SEEN_SECONDS):
                    _, reader, writer = await self.p2p.call_binary_stream_handler(PeerID.from_base58(peer), SEEN)
                    seen: str = (await reader.read(LONGEST_ADDRESS)).decode(errors="replace")
                    writer.close()
                if leads_to(f"{seen}/p2p/{self._identity.peer}", self._identity.peer) and is_global(seen):
                    return seen
        return None

    @contextlib.asynccontextmanager
    async def stream(self, peer: str, addresses: Sequence[str], deadline_s: float) -> AsyncIterator[Streams]:
        """A stream to a peer, who may be at some addresses. Raises one of UNREACHABLE."""
        async with asyncio.timeout(deadline_s):
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


async def _tell_where_it_is_seen(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(str(info.addr).encode())
    writer.close()


def check_address(local: ListenAddress) -> None:
    """Refuses a place that cannot be listened at; libp2p itself would share a port with another. Raises UserError."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((local.listen, local.port))
            probe.listen()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UserError(f"port {local.port} is in use on this machine; choose another with --port") from error
            reason = error.strerror or str(error)
            raise UserError(f"cannot listen at {local.listen}: {reason}; give an address of this machine") from error
        except OverflowError as error:
            raise UserError(f"port {local.port} is none; choose one below 65536 with --port") from error
