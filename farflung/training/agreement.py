"""What processes tell each other over the network of their rounds; checks that they have the same settings and data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farflung.errors import UserError
from farflung.networks import Network, among_members
from farflung.networks.base import by_island, fact_in, fact_packet
from farflung.settings import Settings, names_that_may_differ
from farflung.tables import BETWEEN_MACHINES


def all_gather_facts(network: Network, value: Any, key: str, deadline_s: float) -> dict[int, Any]:
    """The value (anything that JSON holds) of every replica that can be reached, by rank. Raises PeerLostError."""
    packet = fact_packet(value)
    packets = among_members(
        network, lambda group: network.exchange(packet, group, f"{key} of {group}").wait(deadline_s)
    )
    return {rank: fact_in(packet) for rank, packet in sorted(packets.items())}


def facts_of_replicas(network: Network, value: Any, key: str, deadline_s: float) -> list[Any]:
    """What each replica tells, in order: of an island, its first process. Raises PeerLostError."""
    if (islands := network.islands) is None:
        return list(all_gather_facts(network, value, key, deadline_s).values())
    told = all_gather_facts(islands.everyone(), value, key, deadline_s).values()
    return [island[0] for island in by_island(islands, told)]


def refuse_other_settings(network: Network, settings: Settings) -> None:
    """Compares the settings of all processes, but for what each machine chooses for itself.

    Raises UserError where one that must be equal is not, and PeerLostError.
    """
    free = names_that_may_differ(BETWEEN_MACHINES, settings)
    own = {name: value for name, value in settings.settled().flat().items() if name not in free}
    (one, first), *others = all_gather_facts(network, own, "settings", settings.network.starting).items()
    for other, theirs in others:
        for name, value in theirs.items():
            if value != first[name]:
                flag = "--" + name.replace("_", "-")
                raise UserError(
                    f"{flag} is {_said(first[name])} for process {one} and {_said(value)} for process {other}; "
                    "start all machines with the same settings"
                )


def other_data(network: Network, digest: str, deadline_s: float) -> bool:
    """Whether processes hold out other samples than each other, by their digests. Raises PeerLostError."""
    first, *others = all_gather_facts(network, digest, "held-out data", deadline_s).values()
    return any(other != first for other in others)


def refuse_changed_data(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compares what a checkpoint has told of data with what is told now, by their names. Raises UserError."""
    for name, told in before.items():
        if now.get(name, told) != told:
            raise UserError(f"data {name}: has changed since this run began; put back what it was, or begin a new run")


def _said(value: Any) -> str:
    return "unset" if value is None else str(value)
