"""What a run folder's `events/*.jsonl` hold: one JSON object a line, and each kind of line as a dataclass.

A process of a replica writes them (training/events.py); live view and report read them. A line has its kind as `event`,
and the fields of that kind. Fields that are None are left out, and numbers that are not finite are written as null.
A reader takes null for NaN where a number must be. It leaves out kinds and fields that it does not know, so that newer
releases may add some; and lines with values of other types, which it counts.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from farflung import formats
from farflung.figure import LOSS, Figure
from farflung.formats import EVENTS


@dataclass(frozen=True, kw_only=True)
class Event:
    """What all lines have."""

    kind: ClassVar[str]
    replica: int = 0
    """Whose line it is; on the internet, the peer's rank. The log knows it, and when it was written."""
    at: float = 0.0
    """Seconds since the run began, on the network's clock: virtual ones where the network is simulated."""
    step: int
    """Inner steps that the replica had done."""


@dataclass(frozen=True, kw_only=True)
class ProgressEvent(Event):
    """What a replica has done so far; of an island, all of its processes together."""

    tokens: int
    """Tokens that it has trained on."""
    bytes_sent: int
    """Bytes that it has sent in rounds."""


@dataclass(frozen=True, kw_only=True)
class StartEvent(Event):
    """A process begins the run, or goes on with it. With it goes the version of this format."""

    kind = "start"
    method: str
    """The method's name."""
    replicas: int
    """Replicas that the run has; on the internet 1."""
    steps: int
    """Inner steps that the run is to have."""
    parameters: int = 0
    """Values in the replica's parameters."""
    own_parameters: int = 0
    """Those of them that this process holds."""
    stage: int = 0
    stages: int = 1
    """Which of the replica's stages the process is, from 0, and of how many."""
    shard: int = 0
    shards: int = 1
    """Which shard of its stage the process is, from 0, and of how many."""
    network: str = ""
    """As in the settings: torch, simulated or internet."""
    host: str = ""
    """The machine's name."""
    device: str = ""
    """What torch calls the device."""
    tokens_per_step: int = 0
    """Units that the replica trains on in one inner step."""
    units: str = "tokens"
    """What is counted of the workload's samples; `tokens` of all events are these."""
    measure: str = "nats a token"
    """What training losses are measured in."""
    judged_by: str = LOSS.name
    """The name of the figure that the run is judged by."""
    judged_in: str | None = None
    """What that figure is measured in, "" for nothing; None: what losses are."""
    more_is_better: bool = False
    """Whether more of that figure is better."""
    bytes_per_unit: float | None = None
    """Of text: the bytes that a unit stands for, on average over the held-out samples."""
    resumed: bool = False
    """Whether it goes on with a run that had begun before."""
    clock: float | None = None
    """On the internet, the wall clock's Unix time in seconds."""

    @property
    def figure(self) -> Figure:
        """What the run is judged by."""
        unit = self.measure if self.judged_in is None else self.judged_in
        return Figure(self.judged_by, unit, self.more_is_better)


@dataclass(frozen=True, kw_only=True)
class StepEvent(ProgressEvent):
    """An inner step, each `log_every` of them."""

    kind = "step"
    loss: float | None
    """Training loss of this step, in nats a token, before it was taken; None when it is not finite."""
    lr: float
    """Learning rate of the inner optimizer."""
    tokens_per_second: float
    """Since the line before, without the time of evaluations and checkpoints."""
    rounds: int
    """Rounds with others so far."""
    boundary_bytes: int = 0
    """Bytes sent from stage to stage so far."""
    seconds_blocked: float
    """Seconds so far that the replica stood waiting for others; of an island, the mean of its processes."""
    refused: dict[str, int] | None = None
    """On the internet, what this peer has refused so far, by why."""
    requests: int | None = None
    """Of the folder where peers meet, so far; `bytes_sent` is what was written to it."""
    mfu: float | None = None
    """Model FLOP utilisation since the line before: the share, 0 to 1, of what the devices compute at best."""
    spent: dict[str, float] | None = None
    """Where the process's seconds since the line before went: gradients, optimizer, batches, others, and so on."""
    peak_memory: int | None = None
    """The most bytes that the process has held so far: of its GPU, or else of the machine's memory."""


@dataclass(frozen=True, kw_only=True)
class LearntEvent(Event):
    """A peer of a swarm has taken a step with these microbatches: each is counted once in a stage."""

    kind = "learnt"
    microbatches: Sequence[Sequence[int]]
    """Lists of a stream, a step, and the numbers of its microbatches."""
    unlearnt: Sequence[Sequence[int]] | None = None
    """Likewise: those that an earlier step had learnt from, and that were lost on their way back."""


@dataclass(frozen=True, kw_only=True)
class RoundEvent(Event):
    """A round has ended, and its result is applied. Its moments are seconds as `at` is."""

    kind = "round"
    round: int
    """Its number, from 1."""
    fragment: int
    """The fragment that was exchanged, from 0."""
    group: Sequence[int]
    """The ranks of those who took part; empty when this replica sat out."""
    started_step: int
    """The inner step after which it began."""
    started: float
    finished: float
    """When its exchange began, and ended."""
    waited_from: float
    landed: float
    """From when until when the replica stood waiting for it."""
    outcome: str
    """averaged, sat out, peer lost, no progress offered, or behind."""
    reason: str = ""
    """Why it was not averaged, in words."""
    bytes_sent: int
    """Bytes that this process has sent since its round before."""
    compression_error: float = 0.0
    """The norm of what its packet left out, as a part of the message's; it can be more than 1."""
    effective_rank: float | None = None
    """Of an adapting run: the effective rank of the averaged message."""
    share: float | None = None
    """Of an adapting run: the share, 0 to 1, of its first rank that the codec may have in the next round."""
    every: int | None = None
    """Of an adapting run: inner steps until the next round."""


@dataclass(frozen=True, kw_only=True)
class EvaluationEvent(ProgressEvent):
    """The weights were judged by held-out samples, each `eval_every` inner steps."""

    kind = "evaluation"
    score: float | None
    """The figure that the run is judged by, such as its validation loss; None when it is not finite."""
    scores: dict[str, float | None] | None = None
    """The same of each source of a mixture by its name."""
    others: dict[str, float | None] | None = None
    """More figures of the workload, by their names."""
    sample: str
    """Some of the replica's weights, always the same ones: float32, little-endian, base64."""

    def __post_init__(self) -> None:
        """Raises ValueError for a sample that is none."""
        if len(self.weights) % 4:
            raise ValueError("the sample is no float32 numbers")

    @property
    def weights(self) -> bytes:
        """The sample's bytes."""
        return base64.b64decode(self.sample, validate=True)


@dataclass(frozen=True, kw_only=True)
class TextEvent(Event):
    """What the model made as its weights were then, to look at."""

    kind = "text"
    text: str
    """Of a picture, what is under it."""
    picture: str | None = None
    """A picture as PNG, base64."""


@dataclass(frozen=True, kw_only=True)
class CheckpointEvent(Event):
    """A checkpoint was written."""

    kind = "checkpoint"
    seconds: float
    """How long that took."""
    delayed: float | None = None
    """Seconds of it that the step waited for; None in a loop of one's own, which waits for all of it."""


@dataclass(frozen=True, kw_only=True)
class JoinedEvent(Event):
    """On the internet, a peer has taken the others' state and trains with them."""

    kind = "joined"
    seconds: float
    """How long that took."""


@dataclass(frozen=True, kw_only=True)
class MemoryEvent(Event):
    """A process has planned how to fit its steps into its memory; or it has measured some of them."""

    kind = "memory"
    plan: str
    """What becomes of its layers, in words."""
    cap: int
    """Bytes that it may take."""
    predicted_bytes: int
    predicted_seconds: float
    """The most that it takes at a time, and how long a step takes, as predicted."""
    measured_bytes: int | None = None
    measured_seconds: float | None = None
    """Those measured; None before."""


@dataclass(frozen=True, kw_only=True)
class WarningEvent(Event):
    """What the user should know."""

    kind = "warning"
    message: str
    """One line."""


@dataclass(frozen=True, kw_only=True)
class EndEvent(Event):
    """The process trains no more."""

    kind = "end"
    reason: str
    """finished, stopped, or died (of a simulated replica)."""


_KINDS: dict[str, type[Event]] = {
    kind.kind: kind
    for kind in (
        *(StartEvent, StepEvent, LearntEvent, RoundEvent, EvaluationEvent, TextEvent),
        *(CheckpointEvent, JoinedEvent, MemoryEvent, WarningEvent, EndEvent),
    )
}


def _plain_types(hint: Any) -> frozenset[type] | None:
    """The types that JSON gives for a field of plain values; None where what is inside counts, too."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) is types.UnionType else (hint,)
    if not all(isinstance(kind, type) for kind in kinds):
        return None
    return frozenset({*kinds, int} if float in kinds else kinds)


_TYPES: dict[type[Event], dict[str, tuple[Any, frozenset[type] | None]]] = {
    kind: {
        field.name: (hint := typing.get_type_hints(kind)[field.name], _plain_types(hint))
        for field in dataclasses.fields(kind)
    }
    for kind in _KINDS.values()
}
"""Of each kind's fields, by name; plain ones, which are most, are looked up: a run has a hundred thousand lines."""


_FORMERLY: dict[type[Event], dict[str, str]] = {
    EvaluationEvent: {"validation_loss": "score", "validation_losses": "scores"}
}
"""What fields are called now, by their names in version 1."""


def line_of(event: Event) -> bytes:
    """An event as a line, without its end."""
    table: dict[str, Any] = {"event": event.kind}
    if isinstance(event, StartEvent):
        table[formats.KEY] = EVENTS.version
    values = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    for name, value in values.items():
        if value is not None:
            table[name] = None if isinstance(value, float) and not math.isfinite(value) else value
    return json.dumps(table).encode()


def events_in(lines: bytes, where: str) -> tuple[list[Event], int]:
    """The events in whole lines, and how many lines a disk or a copy has spoilt, which are left out.

    Raises UserError for a format that this release cannot read; `where` says of what file.
    """
    events, spoilt = [], 0
    for line in lines.splitlines():
        table = _table_in(line)
        kind = _KINDS.get(table.get("event", ""))
        if kind is StartEvent:
            EVENTS.check(table, where)
        event = _event_of(kind, table) if kind else None
        events += [event] if event else []
        spoilt += not table or (kind is not None and event is None)
    return events, spoilt


def _table_in(line: bytes) -> dict[str, Any]:
    """What a line holds; empty where it is no event."""
    try:
        table = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    sound = isinstance(table, dict) and isinstance(table.get("event"), str) and isinstance(table.get("step"), int)
    return table if sound else {}


def _event_of(kind: type[Event], table: dict[str, Any]) -> Event | None:
    """None when a field is missing, or is of another type."""
    hints, known, formerly = _TYPES[kind], {}, _FORMERLY.get(kind, {})
    for called, value in table.items():
        name = formerly.get(called, called)
        if name in hints:
            hint, plain = hints[name]
            if value is None and hint is float:
                value = math.nan
            if not (type(value) in plain if plain else _fits(value, hint)):
                return None
            known[name] = value
    try:
        return kind(**known)
    except (TypeError, ValueError):
        return None


def _fits(value: Any, hint: Any) -> bool:
    """Whether what JSON gives is of a field's type."""
    kind, inside = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is types.UnionType:
        return any(_fits(value, one) for one in inside)
    if kind is Sequence:
        return isinstance(value, list) and all(_fits(one, *inside) for one in value)
    if kind is dict:
        return isinstance(value, dict) and all(_fits(one, inside[1]) for one in value.values())
    return type(value) in ((int, float) if kind is float else (kind,))
