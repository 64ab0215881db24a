"""The peers' directory: each keeps a record of itself, signed, in the DHT, and reads everybody's."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence

from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P, PeerID
from hivemind.proto.auth_pb2 import AccessToken
from hivemind.utils import get_dht_time
from hivemind.utils.auth import TokenAuthorizerBase

from farflung.networks.internet.frames import LARGEST_FRAME, Frame, FrameError, entry, number, parsed, reading
from farflung.networks.internet.guard import Guard
from farflung.networks.internet.identity import Identity, signed_by
from farflung.networks.internet.members import ALIVE_SECONDS, Member, member_of
from farflung.networks.internet.ticket import Ticket

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
    """Lets a peer's DHT node keep and believe only records that `Directory.write` makes: each peer's own, for a while.

    Args:
        key: under which the run's records are.
        guard: where the others are counted.
    """

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
    """This peer's access to the records of all."""

    def __init__(self, node: DHTNode, key: str, identity: Identity, guard: Guard) -> None:
        self._node = node
        self._key = key
        self._identity = identity
        self._guard = guard

    @classmethod
    async def open(
        cls, p2p: P2P, ticket: Ticket, identity: Identity, guard: Guard, addresses: Sequence[str]
    ) -> Directory:
        """Joins the DHT through known peers."""
        key = f"farflung {ticket.run}"
        node = await DHTNode.create(
            p2p=p2p,
            initial_peers=list(addresses) or None,
            authorizer=Authorizer(ticket),
            record_validator=Records(key, guard),
            ensure_bootstrap_success=False,
            strict=False,
            cache_locally=False,
            cache_nearest=0,
            reuse_get_requests=False,
        )
        # Peers may write into each other's caches, and a cache with one late record hides the storage with all.
        node.protocol.cache = node.protocol.storage
        return cls(node, key, identity, guard)

    async def write(self, info: Frame) -> None:
        """Renews this peer's record."""
        until = get_dht_time() + ALIVE_SECONDS
        text = json.dumps({**info, "until": until})
        record = {"about": text, "signature": self._identity.sign(text.encode())}
        await self._node.store(self._key, record, expiration_time=until, subkey=self._identity.peer)

    async def read(self) -> list[Member]:
        """Every other member's latest record; those that are forged are dropped and counted."""
        # No time is late enough to end the search (as infinity would be): a liar could say it.
        found = await self._node.get(self._key, sufficient_expiration_time=math.nan)
        if found is None or not isinstance(found.value, dict):
            return []
        members = []
        for peer, record in found.value.items():
            if peer != self._identity.peer:
                try:
                    members.append(member_in(record.value, peer)[0])
                except FrameError:
                    self._guard.refuse("forged record")
        return members

    async def introduce(self, member: Member) -> None:
        """Calls a peer that the DHT may have forgotten, as after a partition; both then know each other again."""
        await self._node.protocol.call_ping(PeerID.from_base58(member.peer))

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
