"""The directory of peers in the DHT: each renews a signed record of itself, reads all, and seeks who has gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P, PeerID
from hivemind.proto.auth_pb2 import AccessToken
from hivemind.utils import get_dht_time
from hivemind.utils.auth import TokenAuthorizerBase

from farflung.errors import UserError
from farflung.networks.internet.contact.frames import (
    LARGEST_FRAME,
    Frame,
    FrameError,
    entry,
    number,
    parsed,
    plain,
    reading,
)
from farflung.networks.internet.contact.guard import Guard
from farflung.networks.internet.contact.handshake import CLOCK_SECONDS
from farflung.networks.internet.contact.host import UNREACHABLE
from farflung.networks.internet.contact.identity import signed_by
from farflung.networks.internet.contact.members import ALIVE_SECONDS, BEAT_SECONDS, Member, member_of
from farflung.networks.internet.contact.streams import RequestRefusedError
from farflung.networks.internet.contact.ticket import Ticket

if TYPE_CHECKING:
    from farflung.networks.internet.contact.peers import Peers

FOREVER = "9999-12-31T00:00:00"
FURTHEST_AHEAD = 2 * ALIVE_SECONDS
"""Seconds for which a record may be good at most: clocks need not agree to the second."""


class Authorizer(TokenAuthorizerBase):  # type: ignore[misc]
    """Lets only peers with the run's secret read and write the DHT: they sign their own tokens with it."""

    def __init__(self, ticket: Ticket) -> None:
        super().__init__()
        self._ticket = ticket

    async def get_token(self) -> AccessToken:
        """A token for this peer's key."""
        key = self.local_public_key.to_bytes()
        proof = self._ticket.proof("dht", key.hex())
        return AccessToken(username="", public_key=key, expiration_time=FOREVER, signature=proof.encode())

    def is_token_valid(self, access_token: AccessToken) -> bool:
        """Whether it was made with the secret."""
        proof = access_token.signature.decode(errors="replace")
        return self._ticket.proves(proof, "dht", access_token.public_key.hex())

    def does_token_need_refreshing(self, access_token: AccessToken) -> bool:
        """Never: the secret does not change."""
        return False


class Records(RecordValidatorBase):  # type: ignore[misc]
    """Lets a peer's DHT node keep and believe only records that `Directory` writes: each peer's own, for a while."""

    def __init__(self, key: str, guard: Guard) -> None:
        self._key = DHTID.generate(source=key).to_bytes()
        self._guard = guard

    def validate(self, record: DHTRecord) -> bool:
        """Whether a record is its peer's own, and ends when that says it does."""
        try:
            self._check(record)
        except FrameError:
            self._guard.refuse("forged record")
            return False
        return True

    @reading("a record")
    def _check(self, record: DHTRecord) -> None:
        if record.key != self._key or len(record.value) > LARGEST_FRAME:
            raise FrameError("a record is none of a peer's")
        loads = DHTProtocol.serializer.loads
        _, until = member_in(loads(record.value), loads(record.subkey))
        if record.expiration_time != until or until > get_dht_time() + FURTHEST_AHEAD:
            raise FrameError("a record is to last longer than its peer says, or than any may")


class Directory:
    """This peer's access to the records of all, which are under one key; its methods run in the peers' thread."""

    def __init__(self, peers: Peers, node: DHTNode, key: str, listed: bool) -> None:
        self._peers = peers
        self._node = node
        self._key = key
        self._listed = listed
        self._failure = ""
        self._clock_gap = time.time() - time.monotonic()

    @classmethod
    async def open(cls, peers: Peers, p2p: P2P, addresses: Sequence[str], listed: bool) -> Directory:
        """Joins the DHT through known peers."""
        key = f"farflung {peers.ticket.run}"
        node = await DHTNode.create(
            p2p=p2p,
            initial_peers=list(addresses) or None,
            authorizer=Authorizer(peers.ticket),
            record_validator=Records(key, peers.guard),
            ensure_bootstrap_success=False,
            strict=False,
            cache_locally=False,
            cache_nearest=0,
            reuse_get_requests=False,
        )
        # Peers may write into each other's caches, and a cache with one late record hides the storage with all.
        node.protocol.cache = node.protocol.storage
        return cls(peers, node, key, listed)

    async def beat(self) -> None:
        """Publishes this peer's record, and reads the others'; tells a failure once, and the next beat tries again."""
        failure = ""
        self._peers.info["beat"] += 1
        try:
            async with asyncio.timeout(4 * BEAT_SECONDS):
                if self._listed:
                    await self._write()
                for member in await self.read():
                    self._peers.members.hear(member)
        except UNREACHABLE:
            pass  # the next one may reach them
        except Exception as error:
            failure = plain(f"this peer cannot tell others of itself, or hear of them: {error!r}")
        if failure and failure != self._failure:
            self._peers.tell(failure)
        self._failure = failure

    async def go_on(self) -> None:
        """Beats for ever."""
        sought: dict[int, float] = {}
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            self._watch_the_clock()
            await self.beat()
            for member in self._peers.members.missing():
                if time.monotonic() >= sought.get(member.rank, 0.0):
                    sought[member.rank] = time.monotonic() + 2 * BEAT_SECONDS
                    self._peers.background.spawn(self._seek(member))

    async def _seek(self, member: Member) -> None:
        """Calls a lost peer at its old addresses: after a partition nobody else would."""
        with contextlib.suppress(*UNREACHABLE, RequestRefusedError, FrameError, UserError):
            await self._peers.handshake(member.peer)
            # The DHT may have forgotten it, as after a partition; both then know each other again.
            await self._node.protocol.call_ping(PeerID.from_base58(member.peer))

    def _watch_the_clock(self) -> None:
        gap = time.time() - time.monotonic()
        if abs(gap - self._clock_gap) > CLOCK_SECONDS:
            moved = gap - self._clock_gap
            self._peers.tell(
                f"this machine's clock has jumped by {moved:+.0f} s; set it right, or peers lose sight of it"
            )
            self._clock_gap = gap

    async def _write(self) -> None:
        """Renews this peer's record."""
        identity, until = self._peers.identity, get_dht_time() + ALIVE_SECONDS
        text = json.dumps({**self._peers.info, "until": until})
        record = {"about": text, "signature": identity.sign(text.encode())}
        await self._node.store(self._key, record, expiration_time=until, subkey=identity.peer)

    async def read(self) -> list[Member]:
        """Every other member's latest record; those that are forged are dropped and counted."""
        # No time is late enough to end the search (as infinity would be): a liar could say it.
        found = await self._node.get(self._key, sufficient_expiration_time=math.nan)
        if found is None or not isinstance(found.value, dict):
            return []
        members = []
        for peer, record in found.value.items():
            if peer != self._peers.identity.peer:
                try:
                    members.append(member_in(record.value, peer)[0])
                except FrameError:
                    self._peers.guard.refuse("forged record")
        return members

    async def close(self) -> None:
        """Leaves the DHT."""
        await asyncio.wait_for(self._node.shutdown(), timeout=5)


@reading("a record")
def member_in(record: Frame, peer: str) -> tuple[Member, float]:
    """A record's member, and when it expires. Raises FrameError when its peer has not written it."""
    text = entry(record, "about", str)
    info = parsed(text)
    member = member_of(info, peer)
    if not signed_by(member.public, entry(record, "signature", str), text.encode()):
        raise FrameError("a record is not signed by its peer")
    return member, number(info.get("until"))
