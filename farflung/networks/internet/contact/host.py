"""This machine's libp2p host: where it listens, and streams to others."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import ipaddress
import os
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from itertools import accumulate
from typing import Any

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure

from farflung import scoped
from farflung.errors import UserError
from farflung.networks.listening import ListenAddress
from farflung.networks.peers.addresses import MOST_ADDRESSES, MOST_LETTERS, at_relay, is_global, leads_to, readable
from farflung.networks.peers.frames import plain
from farflung.networks.peers.identity import Identity

UNREACHABLE = (OSError, EOFError, TimeoutError, ControlFailure, P2PDaemonError)
"""The errors of a call to a peer that is not there."""

PORT_SECONDS = 40.0
"""How long a port that is in use is waited for."""
TCP = re.compile(r"/ip[46]/[^/]+/tcp/[1-9][0-9]*")
"""An address on the internet that names no other protocol."""
ANNOUNCED = re.compile(r"/(ip[46]|dns[46]?)/[^/]+/tcp/[1-9][0-9]*")
"""What a user may have others told in place of the addresses that are found."""
RELAYS = 4
"""Relays at most that a host keeps."""

TURN_SECONDS = 0.05
"""How often one that waits to start its daemon looks whether it may."""

_STARTING = threading.Lock()

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
OnStream = Callable[[Any, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def text_of(address: Any) -> str:
    """An address that the daemon has told; "" for one that hivemind cannot read."""
    try:
        return str(address)
    except (ValueError, EOFError):
        return ""


class Daemon(P2P):  # type: ignore[misc]
    """hivemind's daemon, that takes none but the given relays: it would wait three minutes for a choice of four."""

    @staticmethod
    def _make_process_args(*places: str, **options: Any) -> list[str]:
        if "trustedRelays" in options:
            options["relayDiscovery"] = False
        made: list[str] = P2P._make_process_args(*places, **options)
        return made


class PortInUseError(UserError):
    """Another program listens at the port."""

    def __init__(self, port: int) -> None:
        super().__init__(f"port {port} is in use on this machine; choose another with --port")


class Host:
    """A libp2p daemon of this process's own; streams to it must ask for its protocol.

    A daemon that dies is started again at its port. Its relays hand streams on to it, if it cannot be called.
    """

    def __init__(self, local: ListenAddress, identity: Identity, protocol: str) -> None:
        self.p2p: Any = None
        self._local = local
        self._identity = identity
        self._protocol = protocol
        self._on_internet = local.listen == "0.0.0.0"
        self._relays: list[str] = []
        self._own: list[str] = []
        """Its addresses when it was started."""
        self._announced = list(local.announce)

    async def start(self, on_stream: OnStream, deadline_s: float) -> None:
        """Listens. Raises UserError."""
        local = self._local
        self._check_announced()
        await _free(local, min(deadline_s, PORT_SECONDS))
        levels = {} if "HIVEMIND_LOGLEVEL" in os.environ else {"GOLOG_LOG_LEVEL": "FATAL"}  # the daemon's
        try:
            with scoped.environment(**levels):
                self.p2p = await _started(
                    host_maddrs=[f"/ip4/{local.listen}/tcp/{local.port}"],
                    announce_maddrs=self._announced or None,
                    identity_path=str(self._identity.path),
                    # It finds nobody by itself, and tells strangers of nobody.
                    dht_mode="client",
                    auto_nat=self._on_internet,
                    nat_port_map=self._on_internet,
                    use_auto_relay=bool(self._relays),
                    trusted_relays=self._relays or None,
                    startup_timeout=deadline_s,
                )
            await self.p2p.add_binary_stream_handler(self._protocol, on_stream)
            if self._announced == list(local.announce):
                self._own = await self._visible()
        except UNREACHABLE as error:
            await self.stop()  # or what has begun and does not answer would not be seen to be dead
            raise UserError(f"the libp2p daemon cannot start: {plain(str(error))}") from error
        self._local = dataclasses.replace(local, port=local.port or _port_in(self._own))

    def _check_announced(self) -> None:
        """Refuses to announce what the daemon cannot read, or leads nobody here. Raises UserError."""
        own = self._identity.peer
        for address in self._local.announce:
            if not (ANNOUNCED.fullmatch(address) and leads_to(f"{address}/p2p/{own}", own)):
                raise UserError(
                    f"announce is {address!r}, which leads nobody here; give this machine's address and port, such as "
                    "/ip4/203.0.113.7/tcp/4001 or /dns4/gpu.example.org/tcp/4001"
                )

    async def addresses(self) -> list[str]:
        """Where others can reach it now, the most useful first; at relays, too, once these have taken it."""
        known = dict.fromkeys((*self._own, *await self._visible()))
        here = [address for address in known if self._local.listen.startswith("127.") or "/127.0.0.1/" not in address]
        told = sorted(here, key=lambda address: (not is_global(address), not at_relay(address)))[:MOST_ADDRESSES]
        return [address for address, room in zip(told, accumulate(map(len, told)), strict=True) if room <= MOST_LETTERS]

    async def takes_relays(self, members: Collection[str]) -> bool:
        """Takes those that it has called on the internet as relays, from its next start on; whether there are any.

        Others that do not answer would be waited for. Raises one of UNREACHABLE.
        """
        if self._on_internet:
            connected = {str(one.peer_id): one.addrs for one in await self.p2p.list_peers()}
            places = [f"{text_of(at)}/p2p/{peer}" for peer in members for at in connected.get(peer, [])[:1]]
            self._relays = [place for place in places if is_global(place)][:RELAYS]
        return bool(self._relays)

    def appears(self, seen: str) -> bool:
        """Takes an address at which another one sees it, to announce it from its next start on; whether that is of use.

        A relay lets more than 128 KiB through only if it knows that it can be called, and asks none about that but
        those who say that they are on the internet.
        """
        own = self._identity.peer
        hidden = not self._announced and not any(map(is_global, self._own))
        # The daemon would not start with an address that is none: who says where it is seen may lie.
        if not hidden or not leads_to(f"{seen}/p2p/{own}", own) or not TCP.fullmatch(seen) or not is_global(seen):
            return False
        self._announced = [*(address.rpartition("/p2p/")[0] for address in self._own), seen]
        return True

    async def _visible(self) -> list[str]:
        _, places = await self.p2p._client.identify()  # get_visible_maddrs refuses to answer when there are none
        own = self._identity.peer
        return [address for place in places if leads_to(address := f"{text_of(place)}/p2p/{own}", own)]

    async def dies(self) -> None:
        """Waits until the daemon has died."""
        await self.p2p._child.wait()

    @contextlib.asynccontextmanager
    async def stream(self, peer: str, addresses: Sequence[str], deadline_s: float) -> AsyncIterator[Streams]:
        """A stream to a peer, who may be at some addresses. Raises one of UNREACHABLE."""
        async with asyncio.timeout(deadline_s):
            there = [address.rpartition("/p2p/")[0] for address in addresses if address.endswith(f"/p2p/{peer}")]
            # Does nothing if they are connected; else, libp2p alone would try where the peer was long ago.
            await self.p2p._client.connect(PeerID.from_base58(peer), [readable(address) for address in there])
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


async def _started(**options: Any) -> Any:
    """A daemon; one is started after the other, since uvloop's loops may not start processes at the same time."""
    while not _STARTING.acquire(blocking=False):  # a thread that waits for it would take it for one that has gone
        await asyncio.sleep(TURN_SECONDS)
    try:
        starting = asyncio.ensure_future(Daemon.create(**options))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            with contextlib.suppress(*UNREACHABLE):
                await (await starting).shutdown()
            raise
    finally:
        _STARTING.release()


def _port_in(addresses: Iterable[str]) -> int:
    """The TCP port that a host listens at; 0 if its addresses do not say."""
    ports = [address.split("/")[4] for address in addresses if address.startswith("/ip4/")]
    return int(ports[0]) if ports and ports[0].isdigit() else 0


async def _free(local: ListenAddress, seconds: float) -> None:
    """Waits for a port that a daemon is about to leave: that of one who was killed does so a little later."""
    ends = time.monotonic() + seconds
    while True:
        try:
            check_address(local)
            return
        except PortInUseError:
            if time.monotonic() > ends:
                raise
            await asyncio.sleep(0.5)


def check_address(local: ListenAddress) -> None:
    """Refuses a place that cannot be listened at; libp2p itself would share a port with another. Raises UserError."""
    try:
        ipaddress.IPv4Address(local.listen)
    except ValueError as error:
        raise UserError(
            f"listen is {local.listen!r}, which is no IPv4 address; give one of this machine's, or 0.0.0.0 for all"
        ) from error
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((local.listen, local.port))
            probe.listen()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUseError(local.port) from error
            reason = error.strerror or str(error)
            raise UserError(f"cannot listen at {local.listen}: {reason}; give an address of this machine") from error
        except OverflowError as error:
            raise UserError(f"port {local.port} is none; choose one below 65536 with --port") from error
