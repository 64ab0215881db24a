"""Those that a run on the internet has to bear: a stranger without its secret, and a member that breaks every rule."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import torch
from hivemind.p2p import P2P, PeerID

from farflung.codecs import Dense
from farflung.networks.base import packet_of
from farflung.networks.internet import Identity, ListenAddress, Ticket
from farflung.networks.internet.contact.host import UNREACHABLE
from farflung.networks.internet.contact.peers import Peers
from farflung.networks.internet.contact.streams import PeerStream, RequestRefusedError
from farflung.networks.internet.transport import PacketTransport
from farflung.networks.peers.believing import sketches_of
from farflung.networks.peers.frames import encoded, read_frame, write_frame
from farflung.networks.peers.manifests import pieces_of
from farflung.networks.peers.packing import packed

AT_A_TIME = 32
"""Messages that a stranger has on the way at once."""


class Stranger:
    """One who knows where a run's peer is, and what its protocol is called, but not the secret."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.peer = ticket.addresses[0].rpartition("/p2p/")[2]
        self.chance = random.Random(0)

    async def __aenter__(self) -> Stranger:
        self.p2p = await P2P.create(
            initial_peers=list(self.ticket.addresses),
            host_maddrs=["/ip4/127.0.0.1/tcp/0"],
            nat_port_map=False,
            auto_nat=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.p2p.shutdown()

    async def send(self, content: bytes, wait_s: float = 5.0) -> bytes:
        """What the peer answers to some bytes, before it closes the stream."""
        answer = b""
        with contextlib.suppress(*UNREACHABLE):
            async with asyncio.timeout(wait_s):
                name = f"farflung/1/{self.ticket.run}"
                _, reader, writer = await self.p2p.call_binary_stream_handler(PeerID.from_base58(self.peer), name)
                with contextlib.closing(writer):
                    writer.write(content)
                    answer = await reader.read(1 << 16)
        return answer

    def message(self) -> bytes:
        """Random bytes, or a valid frame with some bytes changed."""
        chance = self.chance
        if chance.random() < 0.5:
            return chance.randbytes(chance.randrange(1, 400))
        frames = (
            {"kind": "hello", "nonce": chance.randbytes(16).hex()},
            {"kind": "packet", "run": self.ticket.run, "sender": 1, "to": 2, "key": "x", "size": 9, "signature": "00"},
            {"kind": "meet", "key": "round 1 of fragment 0", "wants": [1, 2], "shuns": [], "step": 1, "lineage": ""},
        )
        frame = bytearray(encoded(chance.choice(frames)))
        for _ in range(chance.randrange(1, 4)):
            frame[chance.randrange(len(frame))] = chance.randrange(256)
        return bytes(frame)

    async def bombard(self, messages: int) -> int:
        """Sends so many, some at a time; how many were answered with anything but a refusal."""
        left, heard = iter(range(messages)), 0

        async def work() -> None:
            nonlocal heard
            for _ in left:
                answer = await self.send(self.message(), 0.5)
                heard += bool(answer) and b"refused" not in answer and b"nonce" not in answer

        await asyncio.gather(*(work() for _ in range(AT_A_TIME)))
        return heard

    async def guess_the_secret(self) -> bytes:
        """Goes through the handshake with another secret."""
        name = f"farflung/1/{self.ticket.run}"
        _, reader, writer = await self.p2p.call_binary_stream_handler(PeerID.from_base58(self.peer), name)
        with contextlib.closing(writer):
            await write_frame(writer, {"kind": "hello", "nonce": "00" * 16})
            await read_frame(reader)
            await write_frame(writer, {"proof": hashlib.sha256(b"guess").hexdigest(), "about": {}})
            answer: bytes = await reader.read(1 << 16)
            return answer

    async def ask_for_peers(self) -> list[str]:
        """The peers that a daemon learns of by way of the run's, with libp2p's own means."""
        found = {self.peer}
        for _ in range(5):  # libp2p itself asks those that it is told of
            with contextlib.suppress(*UNREACHABLE):
                async with asyncio.timeout(5):
                    await self.p2p._client.connect(PeerID.from_base58(self.peer), [])
                    found |= {str(info.peer_id) for info in await self.p2p.list_peers()}
            await asyncio.sleep(0.5)
        return sorted(found - {self.peer})


class Liar:
    """A member that breaks every rule, but gives the hash of the run's settings; its key's file is made if need be."""

    def __init__(self, ticket: Ticket, key: Path, settings: str, listen: str = "127.0.0.1") -> None:
        info = {"version": "0", "settings": settings, "shapes": "", "host": "liar", "trains": False}
        self.ticket = ticket
        self.peers = Peers(ticket, Identity(key), ListenAddress(listen), info, lambda _: None)
        self.transport = PacketTransport(self.peers, 1 << 30, 5.0)
        self.peers.start(20)
        peer = ticket.addresses[0].rpartition("/p2p/")[2]
        found = self.peers.members.of_peer(peer)
        assert found is not None
        self.victim = found

    def header(self, **changes: Any) -> dict[str, Any]:
        """A packet's announcement, signed after the changes."""
        packet = {"to": self.victim.rank, "key": "lie", "size": 8, "digest": hashlib.sha256(bytes(8)).hexdigest()}
        return self.transport.announcement(packet | changes)

    def tells(self, frame: dict[str, Any], payload: bytes = b"", drip_s: float = 0.0) -> dict[str, Any]:
        """What the victim answers to a frame and what follows it: at once, or byte by byte `drip_s` seconds apart."""

        async def go() -> dict[str, Any]:
            async with asyncio.timeout(60), self.peers.stream(self.victim) as stream:
                await write_frame(stream.writer, frame)
                answer = await read_frame(stream.reader)
                if "refused" in answer or not payload:
                    return answer
                step = 1 if drip_s else len(payload)
                for begin in range(0, len(payload), step):
                    stream.writer.write(payload[begin : begin + step])
                    await stream.writer.drain()
                    await asyncio.sleep(drip_s)
                return await read_frame(stream.reader)

        return self._heard(go())

    def _heard(self, asking: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        try:
            return self.peers.background.run(asking, 90)
        except (*UNREACHABLE, RequestRefusedError) as error:
            return {"refused": str(error) or "the stream was closed"}

    def serve(self, manifest: dict[str, Any], content: bytes, sketched: bytes = b"") -> None:
        """Offers a state: these bytes, whatever it says of them; its sketches are those of other bytes, if given."""
        pieces = pieces_of([length for _, length in manifest["tensors"] if type(length) is int])

        async def answer(stream: PeerStream, head: dict[str, Any], rest: bytes) -> None:
            await write_frame(stream.writer, head)
            stream.writer.write(rest)
            await stream.writer.drain()
            await stream.reader.read(1)

        async def on_state(stream: PeerStream, _: Any) -> None:
            told = json.dumps(manifest).encode()
            await answer(stream, {"size": len(told)}, told)

        async def on_piece(stream: PeerStream, frame: Any) -> None:
            told = packed(memoryview(bytearray(content))[pieces[frame["number"]]])
            await answer(stream, {"size": len(told)}, told)

        async def on_sketch(stream: PeerStream, frame: Any) -> None:
            views = [memoryview(bytearray(sketched or content))[piece] for piece in pieces]
            told = sketches_of(views, frame["seed"]).numpy().tobytes()
            await answer(stream, {"size": len(told)}, told)

        self.peers.handlers.update(state=on_state, piece=on_piece, sketch=on_sketch)
        self.peers.info.update(trains=True, step=0)

    def spread(self, content: bytes) -> dict[str, Any]:
        """What the victim answers to news that are these bytes."""

        async def go() -> dict[str, Any]:
            async with asyncio.timeout(60), self.peers.stream(self.victim) as stream:
                await write_frame(stream.writer, {"kind": "news", "size": len(content)})
                stream.writer.write(content)
                return await read_frame(stream.reader)

        return self._heard(go())

    def close(self) -> None:
        """Leaves the run."""
        self.peers.close()


def manifest_of(content: bytes, tensors: Sequence[tuple[str, int]], **facts: Any) -> dict[str, Any]:
    """What a peer says of a state of these bytes and tensors."""
    digests = [hashlib.sha256(content[piece]).hexdigest() for piece in pieces_of([length for _, length in tensors])]
    return {"id": "a", "digests": digests, "tensors": tensors, "facts": {"step": 30, "until": 40, **facts}}


def poisoned(values: int, value: float) -> torch.Tensor:
    """A message of a float32 tensor all of one value, as its packet would be: NaN included."""
    packet = Dense().encode([torch.zeros(values)])
    packet[-4 * values :] = torch.full((values,), value).view(torch.uint8)
    packet[20:24] = packet_of(zlib.crc32(packet[24:].numpy().data).to_bytes(4, "little"))
    return packet


def as_a_stranger(ticket: Ticket, work: Callable[[Stranger], Awaitable[Any]]) -> Any:
    """What a stranger that knows the ticket's addresses brings home from some work."""

    async def go() -> Any:
        async with Stranger(ticket) as stranger:
            return await work(stranger)

    return asyncio.run(go())
