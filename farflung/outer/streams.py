"""One fragment's rounds, and what is remembered between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from farflung.networks import Finished, Group, Network, PeerLostError, Pending
from farflung.outer.adaptation import Adaptation
from farflung.outer.averaging import Averaging
from farflung.outer.fragments import Fragment
from farflung.outer.fusion import Fusion
from farflung.outer.healing import Compared, sketch
from farflung.outer.meeting import Meeting
from farflung.outer.round import Round
from farflung.outer.schedules import Schedule
from farflung.outer.topologies import Topology, group_of

if TYPE_CHECKING:
    from farflung.outer.method import Method


@dataclass
class Stream:
    """A fragment, its anchor, how its messages are averaged, and when its next round starts.

    `every` and `delay` are the schedule's until adaptation changes them; `rounds` counts those that have started, and
    `trained` the inner steps since the last one. `met` is the last round's group, and `lost` says that a round was lost
    since anchors were last known to be equal.
    """

    index: int
    fragment: Fragment
    anchor: Tensor
    averaging: Averaging
    adaptation: Adaptation | None
    every: int
    delay: int
    next_start: int
    rounds: int
    trained: int = 0
    met: Group = ()
    lost: bool = False

    @property
    def label(self) -> str:
        """The next round's, by which groups are drawn."""
        return f"round {self.rounds} of fragment {self.index}"

    def key(self, attachment: str, round: int | None = None) -> str:
        """The key of a round's exchange: of the next one, unless it is said."""
        return f"round {self.rounds if round is None else round} of {attachment}, fragment {self.index}"

    def next_group(self, network: Network, topology: Topology) -> Group:
        """With whom this replica averages the fragment in its next round."""
        return group_of(network.rank, topology.groups(network.members(), self.label))

    def start(
        self, message: Tensor, group: Group, attachment: str, network: Network, method: Method
    ) -> tuple[Pending[Tensor], float]:
        """Starts averaging a message, and where all anchors should be equal, comparing them; see Averaging."""
        key = self.key(attachment)
        if not method.topology.alike or len(group) < 2:
            return self.averaging.start(message, group, key, self.rounds)
        # In an eager merge each anchor has the own last part in it; then only rounds that were lost count.
        anchor = self.anchor[:0] if method.merge.eager else self.anchor
        own = sketch(anchor, self.lost or self.met not in ((), group))
        sketches = network.exchange(own, group, f"{key}, anchors")
        pending, error = self.averaging.start(message, group, key, self.rounds)
        return Compared(pending, sketches), error

    def pace(self) -> dict[str, Any]:
        """When rounds come, and what that follows: what members of one group must have alike."""
        return {
            "every": self.every,
            "delay": self.delay,
            "next_start": self.next_start,
            "adaptation": self.adaptation.state_dict() if self.adaptation else None,
            "share": self.averaging.share,
        }

    def keep_pace(self, pace: dict[str, Any]) -> None:
        """Goes by another replica's `pace`."""
        self.every, self.delay, self.next_start = pace["every"], pace["delay"], pace["next_start"]
        if self.adaptation:
            self.adaptation.load_state_dict(pace["adaptation"])
        self.averaging.shrink_to(pace["share"])

    def began(self, step: int, schedule: Schedule, group: Group) -> None:
        """A round has started after a step: on to the next."""
        self.trained, self.met = 0, group
        self.rounds += 1
        if schedule.final is not None:
            self.every = schedule.every_at(step)
        self.next_start += self.every

    def due(self, step: int) -> bool:
        """Whether its next round starts after a step."""
        return 0 < self.next_start <= step

    def skip_to(self, step: int) -> None:
        """Leaves out the rounds before a step that a replica has missed."""
        if self.every and self.next_start < step:
            missed = -(-(step - self.next_start) // self.every)
            self.next_start += missed * self.every
            self.rounds += missed

    def state_dict(self) -> dict[str, Any]:
        """All that changes from round to round."""
        return {
            "anchor": self.anchor,
            "rounded_off": self.fragment.rounded_off,
            "averaging": self.averaging.state_dict(),
            "adaptation": self.adaptation.state_dict() if self.adaptation else None,
            "every": self.every,
            "delay": self.delay,
            "next_start": self.next_start,
            "rounds": self.rounds,
            "trained": self.trained,
            "met": self.met,
            "lost": self.lost,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`."""
        self.anchor.copy_(state["anchor"])
        self.fragment.rounded_off = copied(state["rounded_off"], self.anchor.device)
        self.averaging.load_state_dict(copied(state["averaging"], self.anchor.device))
        if self.adaptation:
            self.adaptation.load_state_dict(state["adaptation"])
        for name in ("every", "delay", "next_start", "rounds", "trained", "lost"):
            setattr(self, name, state[name])
        self.met = tuple(state["met"])


def streams_of(
    method: Method,
    network: Network,
    fragments: Sequence[Fragment],
    anchors: Sequence[Tensor],
    exact: bool,
    fusion: Callable[[], Fusion] | None,
) -> list[Stream]:
    """The streams of a method's fragments, before their first rounds; each has a `fusion` of its own, if any."""
    schedule, alike = method.schedule, method.topology.alike
    return [
        Stream(
            index=index,
            fragment=fragment,
            anchor=anchor,
            averaging=Averaging(
                network,
                method.codec,
                fragment.views,
                method.averaging,
                alike,
                f"fragment {index}",
                exact,
                fusion() if fusion else None,
            ),
            adaptation=Adaptation(method.adapt) if method.adapt else None,
            every=schedule.every or 0,
            delay=schedule.delay,
            next_start=schedule.first(index),
            rounds=schedule.first(index) // (schedule.every or 1),
        )
        for index, (fragment, anchor) in enumerate(zip(fragments, anchors, strict=True))
    ]


@dataclass
class Offer:
    """What a replica has to say in a round.

    Args:
        message: flat; its memory belongs to the round.
        fault: why it holds no progress, or "".
        anchor: a copy of the anchor that it was made with, where the merge needs it.
        applied: what part of it the anchor has been moved by already, before any exchange; an eager merge does.
    """

    message: Tensor
    fault: str
    anchor: Tensor | None
    applied: float = 0.0


@dataclass
class Flight:
    """A round between its start and its landing.

    `own` is a copy of the own message, `anchor` of the anchor that it was made with, `applied` the part of it that has
    moved the anchor already, and `at_start` a copy of the weights at its start, where the merge needs them. `apart`
    says, once it has landed, whether the group's anchors differed.
    """

    fragment: int
    round: int
    group: Group
    started_step: int
    lands_at: int
    started: float
    message: Tensor
    pending: Pending[Tensor]
    own: Tensor | None
    anchor: Tensor | None
    applied: float
    at_start: Tensor | None
    compression_error: float
    outcome: str
    reason: str
    apart: bool = False

    def wait(self, deadline: float) -> Tensor:
        """The round's mean. The policy for lost peers: what the message then holds, often this replica's own."""
        try:
            mean = self.pending.wait(deadline)
        except PeerLostError as lost:
            self.note("peer lost", str(lost))
            # A copy: a peer that is only late may still be writing its values into the message.
            return self.message.clone()
        if isinstance(self.pending, Meeting) and (met := self.pending.met):
            self.group, self.compression_error = met.group, met.compression_error
            if met.outcome != "averaged" or not self.reason:
                self.note(met.outcome, met.reason)
        if isinstance(self.pending, Compared):
            self.apart = self.pending.apart
        return mean

    def note(self, outcome: str, reason: str) -> None:
        """Says how it went; that nothing was offered is not forgotten over that."""
        self.outcome = outcome
        self.reason = f"{self.reason}; {reason}" if self.reason and reason else self.reason or reason

    def told(
        self,
        step: int,
        waited_from: float,
        landed: float,
        effective_rank: float | None,
        share: float | None,
        every: int | None,
    ) -> Round:
        """What there is to say of it once it has landed after a step."""
        return Round(
            round=self.round,
            fragment=self.fragment,
            group=self.group,
            started_step=self.started_step,
            step=step,
            started=self.started,
            finished=self.pending.finished_at,
            waited_from=waited_from,
            landed=landed,
            outcome=self.outcome,
            reason=self.reason,
            compression_error=self.compression_error,
            effective_rank=effective_rank,
            share=share,
            every=every,
        )

    def packed(self, mean: Tensor, now: float) -> dict[str, Any]:
        """As plain values, once the mean is there; times as ages, since clocks begin anew with a process."""
        finished = self.pending.finished_at
        self.pending = Finished(mean, finished)
        return {**vars(self), "message": mean.clone(), "started": self.started - now, "pending": finished - now}

    @classmethod
    def unpacked(cls, saved: dict[str, Any], device: torch.device, now: float) -> Flight:
        """The flight that `packed` made these values of."""
        values = copied(saved, device)
        pending = Finished(values["message"], saved["pending"] + now)
        return cls(**{**values, "started": saved["started"] + now, "pending": pending})


def copied(state: Any, device: torch.device) -> Any:
    """The same containers with copies of all tensors in them, on `device`: what is loaded twice must not change."""
    if isinstance(state, Tensor):
        return state.to(device, copy=True)
    if isinstance(state, dict):
        return {key: copied(value, device) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(copied(value, device) for value in state)
    return state
