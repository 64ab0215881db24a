"""Work among all members, whoever they are by now; at the end, among those left, who agree on who they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Set
from itertools import islice
from typing import NamedTuple, TypeVar

from farflung.networks.base import Group, Network, PeerLostError, packet_of, words_of

T = TypeVar("T")

LONGER = 2.0
"""A replica that lost another waits so many times as long for the rest, which may still be waiting for the same one."""


def among_members(network: Network, exchange: Callable[[Group], T]) -> T:
    """The result of an exchange among all members; tried again when members change meanwhile. Raises PeerLostError."""
    while True:
        group = network.members()
        try:
            return exchange(group)
        except PeerLostError:
            if network.members() == group:
                raise


class Agree(NamedTuple):
    """What this replica has come for, and what is told of what all that are left have, the same everywhere."""

    word: str
    hear: Callable[[Set[str]], object]


class Row(NamedTuple):
    """What one replica has found: the replicas that it reached, and a value of its own."""

    reached: list[int]
    word: str


def among_replicas_left(
    network: Network, work: Callable[[Group], T], seconds: float, key: str, agree: Agree | None = None
) -> tuple[Group, T]:
    """As `among_survivors`, of replicas; an island counts where all of its processes are left.

    All processes of all islands call it alike, each time with another key, and decide alike. Raises PeerLostError.
    """
    if (islands := network.islands) is None:
        return among_survivors(network, lambda group: group, work, seconds, key, agree)
    seats = iter(range(sum(map(len, islands.island_processes))))
    seated = [tuple(islice(seats, len(island))) for island in islands.island_processes]

    def replicas(group: Group) -> Group:
        return tuple(replica for replica, island in enumerate(seated) if set(island) <= set(group))

    def whole(group: Group) -> Group:
        return tuple(seat for replica in replicas(group) for seat in seated[replica])

    everyone = islands.everyone()
    group, result = among_survivors(everyone, whole, lambda group: work(replicas(group)), seconds, key, agree)
    return replicas(group), result


def among_survivors(
    network: Network,
    whole: Callable[[Group], Group],
    work: Callable[[Group], T],
    seconds: float,
    key: str = "survivors",
    agree: Agree | None = None,
) -> tuple[Group, T]:
    """The result of `work` among the replicas that are left, and their ranks; the same on all of them.

    Of those that reach each other, `whole` picks the members, with the same result everywhere. `agree` is told what
    they have come for before they work. When somebody is lost during the work, the rest do it again without. Every wait
    is about `seconds` long. Raises PeerLostError when this replica is not among them, or when the work fails though
    nobody has gone.
    """
    before: Group = ()
    word, attempt = agree.word if agree else "", 0
    result: tuple[T] | None = None
    fault = PeerLostError((), "some replicas could not end the run, though all can be reached")
    while True:
        attempt += 1
        candidates, patience = (before, LONGER) if before else (_living(network), 1.0)
        said = _reachable(network, candidates, f"{key} {attempt}", word, patience * seconds)
        group = whole(tuple(said))
        if network.rank not in group:
            lost = sorted(set(network.members()) - set(said)) or [network.rank]
            raise PeerLostError(
                lost, f"lost {', '.join(map(str, lost))} of {network.members()}, so the rest end without us"
            )
        if result and {said[rank] for rank in group} == {f"done {before}"}:
            return before, result[0]
        if group == before:
            raise fault
        before = group
        if agree and attempt == 1:
            agree.hear({said[rank] for rank in group})
        try:
            result, word = (work(group),), f"done {group}"
        except PeerLostError as error:
            result, word, fault = None, "lost", error


def _living(network: Network) -> Group:
    """The members, and those who are cut off where that is known: these learn that nobody here waits for them."""
    return tuple(sorted({*network.members(), *getattr(network, "cut_off", ())}))


def _reachable(network: Network, candidates: Group, key: str, word: str, seconds: float) -> dict[int, str]:
    """Those of the candidates who can all reach each other, in order, and each one's word; the same on all of them.

    Three times everyone sends everyone a note: a greeting, then whom the greetings have come from, then what the others
    have said of that; so one who was lost in between is lost to all, or to none.
    """
    own = Row(sorted(_notes(network, candidates, f"{key}, greeting", "", seconds)), word)
    rows = {network.rank: own}
    for turn in (1, 2):
        told = _notes(network, tuple(own.reached), f"{key}, {turn}", json.dumps(list(rows.items())), LONGER * seconds)
        for note in told.values():
            rows |= {rank: Row(*row) for rank, row in json.loads(note)}
    group = connected({rank: set(row.reached) for rank, row in rows.items()})
    return {rank: rows[rank].word for rank in group}


def connected(reached: Mapping[int, Set[int]]) -> Group:
    """The replicas that all reach each other, without those who have the fewest to talk to (of these, the last)."""
    left = set(reached)

    def company(rank: int) -> int:
        return sum(other in reached[rank] and rank in reached[other] for other in left)

    while left and company(last := min(left, key=lambda rank: (company(rank), -rank))) < len(left):
        left.remove(last)
    return tuple(sorted(left))


def _notes(network: Network, group: Group, key: str, note: str, seconds: float) -> dict[int, str]:
    """The notes of those who have sent theirs; each pair by itself, so that nobody's loss holds up the others."""
    packet = packet_of(b" " + note.encode())
    own = network.rank
    pairs = {other: tuple(sorted((own, other))) for other in group if other != own}
    pending = {other: network.exchange(packet, pair, f"{key}, {pair}") for other, pair in pairs.items()}
    ends, notes = network.now() + seconds, {own: note}
    for other, exchange in pending.items():
        try:
            notes[other] = words_of(exchange.wait(max(0.0, ends - network.now()))[other]).decode()[1:]
        except PeerLostError:
            continue
    return notes
