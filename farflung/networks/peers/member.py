"""What a peer says of itself: a record that it signs, and that others may hand on."""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from dataclasses import dataclass, field
from typing import Any

from farflung.networks.peers.addresses import LONGEST_ADDRESS, MOST_ADDRESSES, leads_to
from farflung.networks.peers.frames import Frame, FrameError, entry, number, reading, whole
from farflung.networks.peers.identity import Identity, rank_of, signed_by

BEAT_SECONDS = 5.0
"""How often a peer tells another one of itself and others: most of what it costs to be known."""
UNSURE_SECONDS = 3.0
"""By so much, what was heard may be older than it seems."""
CLOCK_SECONDS = 2.5
"""Clocks of peers may differ by so much: a record says when it was signed."""
FRESH_SECONDS = 600.0
"""Older records are no news."""
CAUTION = 0.8
"""The part of a peer's expected steps since it was last heard that is counted on."""
STALLED_SECONDS, STALLED_STEPS = 60.0, 20.0
"""Who makes no step in so long, and in the time of so many of its steps, is not waited for."""
FASTER = 32.0
"""How many times as fast as this peer another one may seem, unless most of three or more say so."""
ALIVE_SECONDS = 20.0
"""A member that was not heard for so long counts as gone."""

FACTS = (
    *("loss", "tokens_per_second", "rounds", "refused", "processes", "held_up_s", "alone"),
    *("observes", "observed", "core_only", "requests"),
    *("queue", "capacity", "microbatches_per_second", "sent", "bypassed", "validation_loss"),
    *("settled", "serves", "ended"),
)
"""The facts that a peer publishes, all numbers; those of the last two lines of a swarm's stage."""
LARGEST_FACT = 1e15
FASTEST, FURTHEST = 1e6, 1 << 40
"""Steps a second, and steps, that nobody has."""
LAST_RANK = (1 << 52) - 1
MOST_DOORS = MOST_STAGES = 256
LARGEST_RECORD = 1 << 12
LONGEST_WORD = 64
"""Letters of a session, of a machine's name and of a model's shapes."""


@dataclass
class Member:
    """A peer, and the latest that it has said of itself."""

    peer: str
    rank: int
    session: str
    host: str
    addresses: tuple[str, ...]
    began: float = 0.0
    """When its session did, by its own clock, in seconds since 1970."""
    signed_at: float = 0.0
    """When it said so, by its own clock."""
    listed: bool = True
    step: int = 0
    rate: float = 0.0
    trains: bool = True
    shapes: str = ""
    stage: int = 0
    """The part of the model that it holds; rounds and states are for those that hold the same."""
    facts: dict[str, Any] = field(default_factory=dict)
    doors: int = 0
    """Processes with connections of their own, of an island that has some."""
    door_of: int | None = None
    """The rank of the island whose process it is; it is none itself."""
    record: Frame = field(default_factory=dict)
    """What it has signed."""
    heard: float = field(default_factory=time.monotonic)
    """When it said so, by this machine's clock that never jumps."""
    lasts: float = ALIVE_SECONDS
    """How long it counts as there after that."""
    moved: float = field(default_factory=time.monotonic)
    """When its step last grew."""
    believed: float = math.inf
    """The step that it has reached at most, if it is not much faster than this peer."""
    believed_at: float = field(default_factory=time.monotonic)
    """Since when, by this machine's clock alone: what others say of time earns nobody a step."""
    proven: bool = False
    """Whether this peer has spoken with it, and not only heard of it."""
    teller: str = ""
    """Who has told of it first, by libp2p id."""
    failed: bool = False
    sees: str = ""
    """The address at which it has just seen this peer, as it says."""

    @property
    def alive(self) -> bool:
        """Whether it is believed to be there."""
        return not self.failed and time.monotonic() - self.heard < self.lasts

    @property
    def described(self) -> str:
        """Its name in messages."""
        return f"{self.host} ({self.peer[-3:]})"

    @property
    def stalled(self) -> bool:
        """Whether it trains no more, though it may say so: its latest news tells of the same step as long before."""
        longest = max(STALLED_SECONDS, STALLED_STEPS / self.rate) if self.rate else STALLED_SECONDS
        return self.heard - self.moved > longest

    def step_now(self, caution: float = CAUTION) -> float:
        """The step that it has reached at least, by its last record; is likely at, with a caution of 1."""
        return self.step + caution * self.rate * (time.monotonic() - self.heard)

    def step_at_most(self) -> float:
        """The step that it may have reached; its rate may be unknown."""
        if not self.rate:
            return math.inf
        return self.step + 1 + self.rate * (time.monotonic() - self.heard + UNSURE_SECONDS) / CAUTION

    def arrives(self, goal: int, seconds: float) -> bool:
        """Whether it has not passed a step yet, and can reach it within so many seconds."""
        elapsed = time.monotonic() - self.heard + UNSURE_SECONDS + seconds
        return not self.stalled and arrives(self.step, self.rate, goal, elapsed)


def arrives(step: int, rate: float, goal: int, seconds: float) -> bool:
    """Whether one that was at a step, and may be at the end of the next, can be at a later one in so many seconds."""
    return step <= goal and (rate == 0 or step + 1 + rate * seconds / CAUTION >= goal)


def signed(identity: Identity, info: Frame) -> Frame:
    """A record of what a peer says of itself now."""
    about = {**info, "peer": identity.peer, "time": time.time()}
    return {"about": about, "signature": identity.sign(_text(about))}


@reading("what a peer says of itself")
def member_in(record: Frame, age: float = 0.0) -> Member:
    """The member that a record tells of, which is some seconds old. Raises FrameError when its peer has not signed it.

    Its age is believed as far as the time at which it was signed allows.
    """
    about, signature = entry(record, "about", dict), entry(record, "signature", str)
    peer, text = entry(about, "peer", str), _text(about)
    if len(text) > LARGEST_RECORD or not signed_by(peer, signature, text):
        raise FrameError("a record is not signed by its peer, or too long")
    if not all(map(_flat, about.values())):
        raise FrameError("a record holds what no peer says of itself")
    signed_s = number(about.get("time"))
    by_clock = time.time() - signed_s
    if not -2 * CLOCK_SECONDS < by_clock < FRESH_SECONDS:
        raise FrameError("a record is too old, or of a time that is still to come")
    return Member(
        peer=peer,
        rank=rank_of(peer),
        session=entry(about, "session", str)[:LONGEST_WORD],
        host=re.sub(r"[^\w.-]", "?", entry(about, "host", str)[:LONGEST_WORD]),
        addresses=addresses_in(entry(about, "addresses", list), peer),
        began=number(about.get("began")),
        signed_at=signed_s,
        listed=entry(about, "listed", bool),
        step=whole(about.get("step"), FURTHEST),
        rate=number(about.get("rate"), most=FASTEST),
        trains=entry(about, "trains", bool),
        shapes=entry(about, "shapes", str)[:LONGEST_WORD],
        stage=whole(about.get("stage", 0), MOST_STAGES),
        facts=_facts_in(entry(about, "facts", dict)),
        doors=whole(about.get("doors", 0), MOST_DOORS),
        door_of=None if about.get("door_of") is None else whole(about["door_of"], LAST_RANK),
        record={"about": about, "signature": signature},
        heard=time.monotonic() - min(max(age, by_clock - 2 * CLOCK_SECONDS), by_clock + 2 * CLOCK_SECONDS),
    )


def addresses_in(told: list[Any], peer: str) -> tuple[str, ...]:
    """The addresses that are said to lead to a peer. Raises FrameError."""
    if len(told) > MOST_ADDRESSES or not all(_is_place(one) and leads_to(one, peer) for one in told):
        raise FrameError("an address that is said to lead to a peer does not")
    return tuple(told)


def _is_place(told: object) -> bool:
    """Whether something may be an address; `leads_to` remembers what it is asked of."""
    return isinstance(told, str) and len(told) <= LONGEST_ADDRESS


def _flat(value: object) -> bool:
    """Whether nothing lies deeper than in one list or table: who hands a record on must be able to read it."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not any(isinstance(part, (dict, list)) for part in parts)


def _facts_in(told: Frame) -> dict[str, float]:
    facts = {}
    for name in FACTS:
        with contextlib.suppress(FrameError):
            number(told.get(name), -LARGEST_FACT, LARGEST_FACT)
            facts[name] = told[name]
    return facts


def _text(about: Frame) -> bytes:
    """What is signed: the same for all who have the same record."""
    return json.dumps(about, sort_keys=True, separators=(",", ":")).encode()
