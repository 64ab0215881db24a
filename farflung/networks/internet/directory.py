"""The peers' directory: each keeps a record of itself, signed, in the DHT, and reads everybody's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P, PeerID
from hivemind.proto.auth_pb2 import AccessToken
from hivemind.utils import get_dht_time
from hivemind.utils.auth import TokenAuthorizerBase

from farflung.networks.internet.admission import member_of
from farflung.networks.internet.frames import Frame, FrameError
from farflung.networks.internet.guard import Guard
from farflung.networks.internet.identity import Identity, signed_by
from farflung.networks.internet.members import ALIVE_SECONDS, Member
from farflung.networks.internet.ticket import Ticket

FOREVER = "9999-12-31T00:00:00"


class Authorizer(TokenAuthorizerBase):  # type: ignore[misc]
    """Lets only those read and write the DHT who know the run's secret: they sign their own tokens with it."""

    def __init__(self, ticket: Ticket) -> None:
        super().__init__()
        self._ticket = ticket

    async def get_token(self) -> AccessToken:
        """A token for this peer's key."""
        key = self.local_public_key.to_bytes()
        proof = self._ticket.proof("dht", key.hex())
        return AccessToken(username="", public_key=key, expiration_time=FOREVER, signature=proof.encode())

    def is_token_valid(self, access_token: AccessToken) -> bool:
        """Whether one who knows the secret has made it."""
        proof = access_token.signature.decode(errors="replace")
        return self._ticket.proves(proof, "dht", access_token.public_key.hex())

    def does_token_need_refreshing(self, access_token: AccessToken) -> bool:
        """Never: the secret does not change."""
        return False


class Directory:
    """This peer's access to the records of all."""

    def __init__(self, node: DHTNode, ticket: Ticket, identity: Identity, guard: Guard) -> None:
        self._node = node
        self._key = f"farflung {ticket.run}"
        self._identity = identity
        self._guard = guard

    @classmethod
    async def open(
        cls, p2p: P2P, ticket: Ticket, identity: Identity, guard: Guard, addresses: Sequence[str]
    ) -> Directory:
        """Joins the DHT by way of peers that are there."""
        node = await DHTNode.create(
            p2p=p2p,
            initial_peers=list(addresses) or None,
            authorizer=Authorizer(ticket),
            ensure_bootstrap_success=False,
            strict=False,
        )
        return cls(node, ticket, identity, guard)

    async def write(self, about: Frame) -> None:
        """Renews this peer's record."""
        text = json.dumps(about)
        record = {"about": text, "signature": self._identity.sign(text.encode())}
        until = get_dht_time() + ALIVE_SECONDS
        await self._node.store(self._key, record, expiration_time=until, subkey=self._identity.peer)

    async def read(self) -> list[Member]:
        """Every other member's latest record; those that are forged are dropped and counted."""
        found = await self._node.get(self._key, latest=True)
        if found is None or not isinstance(found.value, dict):
            return []
        members = []
        for peer, entry in found.value.items():
            if peer != self._identity.peer:
                try:
                    members.append(_member_in(entry.value, peer))
                except (FrameError, ValueError, KeyError, TypeError):
                    self._guard.refuse("forged record")
        return members

    async def introduce(self, member: Member) -> None:
        """Calls on a peer that the DHT may have forgotten, as after a partition; both then know each other again."""
        await self._node.protocol.call_ping(PeerID.from_base58(member.peer))

    async def close(self) -> None:
        """Leaves the DHT."""
        await asyncio.wait_for(self._node.shutdown(), timeout=5)


def _member_in(record: Frame, peer: str) -> Member:
    about = json.loads(record["about"])
    member = member_of(about, peer)
    if not signed_by(member.public, record["signature"], record["about"].encode()):
        raise FrameError("a record is not signed by its peer")
    return member
