"""The agreement at the start: all replicas are there, and start from the same."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from farflung.hooks.layouts import Layout
from farflung.networks import Group, Network, PeerLostError, Pending
from farflung.networks.base import packet_of, words_of
from farflung.networks.torchrun import REMINDER_SECONDS, log

T = TypeVar("T")

BYTES = 4
"""Bytes that are sent of each fact's hash."""


class DisagreementError(RuntimeError):
    """The replicas, or the processes of one, do not start from the same weights and settings."""


WITHIN = "give all processes of a replica the same method and settings"
SETTING = "give all replicas the same method and settings"
STATE = (
    "seed every replica alike before making the model, or load the same weights into all, and attach in the same order "
    "everywhere"
)
SETTING_IN_TEXT = re.compile(r"'?(\w+)'?(?:=|: )([^,(){}\[\]]+)")
"""A setting and its value, as texts of methods and optimizers have them."""

RUN_STEPS = re.compile(r", steps=\d+")
"""How long the run is, as texts of schedules have it."""


class Fact(NamedTuple):
    """Something that must be equal on all replicas; in a DisagreementError, its name and the remedy."""

    what: str
    told: tuple[str, ...]
    """Values to compare; replicas agree when all have the same value in one of these places."""
    remedy: str = STATE


def agree_on_start(network: Network, group: Group, key: str, facts: Sequence[Fact], seconds: float) -> None:
    """Waits for a group of replicas, at most so many seconds, and compares what they start from.

    How many facts there are may depend on the earlier ones. Raises DisagreementError, and PeerLostError when somebody
    does not come.
    """
    hashes = b"".join(hashlib.sha256(value.encode()).digest()[:BYTES] for fact in facts for value in fact.told)
    packets = all_there(network, network.exchange(packet_of(hashes), group, key), seconds)
    told = {rank: words_of(packet) for rank, packet in packets.items()}
    end = 0
    for fact in facts:
        places = [slice(end + way * BYTES, end + (way + 1) * BYTES) for way in range(len(fact.told))]
        end += len(fact.told) * BYTES
        if all(len({words[place] for words in told.values()}) > 1 for place in places):
            others = [rank for rank, words in told.items() if any(words[p] != told[network.rank][p] for p in places)]
            values = _values(network, group, f"{key}, in words", fact, seconds) if fact.remedy == SETTING else {}
            raise DisagreementError(_described(network.rank, fact, others, values))


def agree_within(layout: Layout, replica: int, settings: Mapping[str, str]) -> None:
    """Compares what the processes of a replica are given, in words by name; all of them call this alike.

    Raises DisagreementError, in all of them.
    """
    first, *others = layout.told(dict(settings))
    for process, theirs in enumerate(others, start=1):
        for what, value in first.items():
            if theirs[what] != value:
                raise DisagreementError(
                    f"process {process} of replica {replica} is given another {what} than its process 0: "
                    f"{told_apart(theirs[what], value)}; {WITHIN}"
                )


def told_apart(one: str, other: str) -> str:
    """In what one text of settings is not as the other: setting by setting, or the whole texts where more differs."""
    named = ", ".join(f"{name}: {own}, not {theirs}" for name, own, theirs in differences(one, other))
    return named or f"{one}, not {other}"


def choices_apart(saved: Mapping[str, str], own: Mapping[str, str]) -> str:
    """The first of a session's choices that is another one in a state, with how they differ; "" for none.

    How many steps a run has is no choice: one that goes on may become longer.
    """
    for what, value in own.items():
        before, now = (RUN_STEPS.sub("", one) if what == "schedule" else one for one in (saved.get(what, value), value))
        if before != now:
            return f"{what}: {told_apart(before, now)}"
    return ""


def differences(one: str, other: str) -> list[tuple[str, str, str]]:
    """The settings in which two texts of the same ones differ, each with both values; none where more differs."""
    if SETTING_IN_TEXT.sub(r"\1", one) != SETTING_IN_TEXT.sub(r"\1", other):
        return []
    pairs = zip(SETTING_IN_TEXT.findall(one), SETTING_IN_TEXT.findall(other), strict=True)
    return [(name, value, theirs) for (name, value), (_, theirs) in pairs if value != theirs]


def _values(network: Network, group: Group, key: str, fact: Fact, seconds: float) -> dict[int, str]:
    """Each replica's value of a fact that differs; all of the group call this together."""
    packets = network.exchange(packet_of(fact.told[0].encode()), group, key).wait(seconds)
    return {rank: words_of(packet).decode() for rank, packet in packets.items()}


def _described(own: int, fact: Fact, others: Sequence[int], values: Mapping[int, str]) -> str:
    """Which replicas differ from this one, their values if known, and the remedy."""
    unlike = next((rank for rank in others if values and values[rank] != values[own]), None)
    said = ""
    if unlike is not None:
        named = differences(values[own], values[unlike])
        told = ", ".join(f"{name}: {here} here, {there} at replica {unlike}" for name, here, there in named)
        said = f": {told or f'{values[own]} here, {values[unlike]} at replica {unlike}'}"
    return f"replica {own} starts from other {fact.what} than {', '.join(map(str, others))}{said}; {fact.remedy}"


def all_there(network: Network, pending: Pending[T], seconds: float) -> T:
    """The result of an exchange in which replicas start; says now and then who is missing. Raises PeerLostError."""
    began = network.now()
    while True:
        waited = network.now() - began
        try:
            return pending.wait(min(REMINDER_SECONDS, seconds - waited))
        except PeerLostError as lost:
            missing = ", ".join(map(str, lost.ranks))
            waited = network.now() - began
            if pending.done():
                raise
            if waited >= seconds:
                raise PeerLostError(
                    lost.ranks,
                    f"replica {missing} has not started within {seconds:g} s; see whether it is running and can be "
                    "reached, or give it longer with starting_s= of attach, or --starting",
                ) from None
            log.warning(
                "replica %d waits for replica %s to start: %.0f of %g s", network.rank, missing, waited, seconds
            )
