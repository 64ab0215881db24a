"""What strangers and lying members can do to a run on the internet, and what it does to them.

    python bench/attacks.py [--messages 100000] [--out attacks]

Two real `farflung join` processes train on loopback; a third process attacks one of them, first without the run's
secret, then as a member. Messages are of random bytes, and valid ones with some bytes changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P, PeerID
from hivemind.utils import get_dht_time

from farflung.codecs import Dense
from farflung.events import RoundEvent, StepEvent, WarningEvent
from farflung.networks.base import Traffic
from farflung.networks.internet import Identity, ListenAddress, Ticket, read_ticket
from farflung.networks.internet.frames import encoded, read_frame, write_frame
from farflung.networks.internet.host import UNREACHABLE
from farflung.networks.internet.peers import Peers
from farflung.networks.internet.streams import RequestRefusedError
from farflung.networks.internet.transport import PacketTransport
from farflung.report.read import Run

AT_A_TIME = 32
PORT = 4650


@dataclass(frozen=True)
class Options:
    messages: int = 100_000
    """Random messages."""
    out: Path = Path("attacks")
    """Where run folders go."""


class Stranger:
    """One who knows where a run's peer is, and what its protocol is called, but not the secret."""

    def __init__(self, ticket: Ticket, seed: int = 0) -> None:
        self.ticket = ticket
        self.peer = ticket.addresses[0].rpartition("/p2p/")[2]
        self.chance = random.Random(seed)

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

    async def send(self, content: bytes, wait: float = 5.0) -> bytes:
        """What the peer answers to some bytes, before it closes the stream."""
        answer = b""
        with contextlib.suppress(*UNREACHABLE):
            async with asyncio.timeout(wait):
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
            {"kind": "meet", "key": "round 1 of fragment 0", "wants": [1, 2], "step": 1, "lineage": ""},
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
            return await reader.read(1 << 16)

    async def use_the_directory(self) -> tuple[bool, bool]:
        """Whether it can write and read the records of a run in the DHT, without a token."""
        node = await DHTNode.create(
            p2p=self.p2p, initial_peers=list(self.ticket.addresses), ensure_bootstrap_success=False, strict=False
        )
        key = f"farflung {self.ticket.run}"
        found = await node.get(key, latest=True)
        with contextlib.suppress(Exception):
            await node.protocol.call_store(
                PeerID.from_base58(self.peer), [node.node_id], [b"x"], get_dht_time() + 60, [False]
            )
        return found is not None, bool(node.protocol.routing_table.uid_to_peer_id)


class Liar:
    """A member that breaks every rule."""

    def __init__(self, ticket: Ticket, key: Path, settings: str) -> None:
        info = {"version": "0", "settings": settings, "shapes": "", "host": "liar", "trains": False}
        self.ticket = ticket
        self.peers = Peers(ticket, Identity(key), ListenAddress("127.0.0.1"), info, lambda _: None)
        self.transport = PacketTransport(self.peers, 1 << 30, 5.0, Traffic())
        self.peers.start(20)
        peer = ticket.addresses[0].rpartition("/p2p/")[2]
        found = self.peers.members.of_peer(peer)
        assert found is not None
        self.victim = found

    def header(self, **changes: Any) -> dict[str, Any]:
        """A packet's announcement, signed after the changes."""
        own = self.peers.info
        header = {
            "kind": "packet",
            "run": self.ticket.run,
            "sender": own["rank"],
            "session": own["session"],
            "to": self.victim.rank,
            "key": "lie",
            "size": 8,
            "digest": hashlib.sha256(bytes(8)).hexdigest(),
            **changes,
        }
        return {**header, "signature": self.peers.identity.sign(json.dumps(header, sort_keys=True).encode())}

    def tells(self, frame: dict[str, Any], payload: bytes = b"", drip: float = 0.0) -> dict[str, Any]:
        """What the victim answers to a frame and what follows it, `drip` seconds a byte."""

        async def go() -> dict[str, Any]:
            async with asyncio.timeout(60), self.peers.stream(self.victim) as stream:
                await write_frame(stream.writer, frame)
                answer = await read_frame(stream.reader)
                if "refused" in answer:
                    return answer
                for begin in range(0, len(payload), 1 if drip else max(len(payload), 1)):
                    stream.writer.write(payload[begin : begin + 1] if drip else payload)
                    await stream.writer.drain()
                    await asyncio.sleep(drip)
                return await read_frame(stream.reader) if payload else answer

        try:
            return self.peers.background.run(go(), 90)
        except (*UNREACHABLE, RequestRefusedError) as error:
            return {"refused": str(error) or "the stream was closed"}

    def close(self) -> None:
        self.peers.close()


def poisoned(values: int, value: float) -> torch.Tensor:
    """A message of a float32 tensor all of one value, as its packet would be: NaN included."""
    packet = Dense().encode([torch.zeros(values)])
    body = torch.full((values,), value).view(torch.uint8)
    packet[-4 * values :] = body
    payload = packet[24:].numpy()
    packet[20:24] = torch.frombuffer(bytearray(zlib.crc32(payload.data).to_bytes(4, "little")), dtype=torch.uint8)
    return packet


def as_a_stranger(ticket: Ticket, work: Callable[[Stranger], Awaitable[Any]]) -> Any:
    async def go() -> Any:
        async with Stranger(ticket) as stranger:
            return await work(stranger)

    return asyncio.run(go())


def memory(process: subprocess.Popen[Any]) -> float:
    """What a process holds, in MB."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def refusals(folder: Path) -> dict[str, int]:
    """What a peer says that it has refused."""
    run = Run(folder)
    run.refresh()
    steps = [event for replica in run.replicas for event in run.of(replica, StepEvent) if event.refused]
    return steps[-1].refused if steps else {}


def tell(what: str, measured: str, good: bool) -> None:
    print(f"{what:44} {measured:64} {'ok' if good else 'MISSED'}", flush=True)


def main(options: Options) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.out) as scratch:
        folder = Path(scratch)
        settings = {"model": "micro", "every": 50, "steps": 1_000_000, "eval_every": 100_000, "log_every": 10}
        first = Identity(folder / "a" / "peer.key").peer
        ticket = Ticket.new("attacked", settings).at((f"/ip4/127.0.0.1/tcp/{PORT}/p2p/{first}",))
        ticket.write(folder / "run.ticket")
        command = [sys.executable, "-m", "farflung", "join", str(folder / "run.ticket"), "--listen", "127.0.0.1"]
        peers = []
        try:
            for name, extra in (("a", ["--first", "--port", str(PORT)]), ("b", [])):
                out = ["--out", str(folder / name)]
                peers.append(
                    subprocess.Popen(
                        [*command, *out, *extra],
                        env={**os.environ, "OMP_NUM_THREADS": "1"},
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                    )
                )
                while not (folder / name / "run.ticket").exists():
                    time.sleep(0.2)
            time.sleep(20)
            attack(options, read_ticket(folder / "run.ticket"), folder, peers[0])
        finally:
            for peer in peers:
                peer.kill()
                peer.wait()


def attack(options: Options, ticket: Ticket, folder: Path, victim: subprocess.Popen[Any]) -> None:
    before, began = memory(victim), time.time()
    tell("a stranger asks for something", _short(as_a_stranger(ticket, lambda s: s.send(s.message()))), True)
    guess = as_a_stranger(ticket, lambda s: s.guess_the_secret())
    tell("a wrong secret", _short(guess), b"refused" in guess)
    found, _ = as_a_stranger(ticket, lambda s: s.use_the_directory())
    tell("a stranger reads the members' directory", "found them" if found else "finds nothing", not found)
    heard = as_a_stranger(ticket, lambda s: s.bombard(options.messages))
    took = time.time() - began
    tell(f"{options.messages} random messages, {took:.0f} s", f"{heard} answered otherwise than refused", heard == 0)
    lies(ticket, folder)
    time.sleep(10)
    run = Run(folder / "a")
    run.refresh()
    rounds = [event.outcome for replica in run.replicas for event in run.of(replica, RoundEvent)]
    steps = [event for replica in run.replicas for event in run.of(replica, StepEvent)]
    banned = [e.message for r in run.replicas for e in run.of(r, WarningEvent) if "banned" in e.message]
    tell("what the peer says of it", f"refused {refusals(folder / 'a')}", bool(refusals(folder / "a")))
    tell("the liar is banned, visibly", banned[-1] if banned else "no", bool(banned))
    grown = memory(victim) - before
    tell("its memory meanwhile", f"{before:.0f} MB, then {grown:+.0f} MB", grown < 100)
    averaged = rounds.count("averaged")
    tell(
        "its run meanwhile", f"{averaged} of {len(rounds)} rounds averaged, loss {steps[-1]['loss']:.3f}", averaged > 5
    )


def lies(ticket: Ticket, folder: Path) -> None:
    """What members try, each a new one: three lies and a peer is not listened to any more."""
    for number, (what, frames, payload, drip) in enumerate(
        (
            ("a forged sender", [{"sender": 12345}], b"", 0.0),
            ("a packet of 10 GB", [{"size": 10_000_000_000}], b"", 0.0),
            ("a packet of another run", [{"run": "0" * 16}], b"", 0.0),
            ("a packet that nobody awaits", [{}], b"", 0.0),
            ("three lies, and then the truth", [{"to": 1}, {"to": 2}, {"to": 3}, {}], b"", 0.0),
        )
    ):
        liar = Liar(ticket, folder / f"liar-{number}.key", ticket.settings_hash)
        answers = [liar.tells(liar.header(**changes), payload, drip) for changes in frames]
        liar.close()
        tell(what, _short(json.dumps(answers[-1]).encode()), "refused" in answers[-1])
    liar = Liar(ticket, folder / "liar.key", ticket.settings_hash)
    forged = {**liar.header(), "signature": "00" * 256}
    answer = liar.tells(forged)
    tell("a forged signature", _short(json.dumps(answer).encode()), "refused" in answer)
    answer = liar.tells({"kind": "meet", "key": "x", "wants": "everyone"})
    tell("a request that cannot be read", _short(json.dumps(answer).encode()), "refused" in answer)
    liar.close()


def _short(answer: bytes) -> str:
    return answer.decode(errors="replace").lstrip("\x00\x01").strip()[:64] or "no answer"


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
