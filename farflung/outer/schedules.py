"""When rounds start, and when their results are applied."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from farflung.durations import seconds_of, ticks_of
from farflung.errors import UserError


def _ticks_and_seconds(every: int | str | None, seconds: float | None) -> tuple[int | None, float | None]:
    """`every` in tenths of a second and in seconds, where it is a time; else itself, and None. Raises UserError."""
    if seconds is None and not isinstance(every, str):
        return every, None
    given = seconds_of("every", every) if isinstance(every, str) else seconds
    if not isinstance(given, int | float) or isinstance(given, bool):
        raise UserError(f"seconds is {given!r}; give a number, or a time such as every='30s'")
    ticks = ticks_of("every", given)
    told = ticks if isinstance(every, str) else every
    if told not in (None, ticks) or seconds not in (None, given):
        raise UserError(f"every is {every} and seconds is {seconds:g}; give one of them")
    return ticks, given


@dataclass(frozen=True, init=False)
class Schedule:
    """Fragment p starts a round at each step where (step - offset of p) is a multiple of `every`.

    The offsets spread the fragments evenly over the steps between rounds (Streaming DiLoCo, arXiv 2501.18512).

    By the clock (RandomTMA, arXiv 2305.09887), what it counts are not steps but tenths of a second since the replicas
    began together. When a round is due, each finishes the step that it is in; so they may be of unlike speeds.

    Args:
        every: inner steps between two rounds of one fragment, or a time such as "30s"; None never has a round.
        fragments: parts of the parameters that have rounds of their own.
        delay: inner steps between sending an update and applying the result, or a time; training goes on meanwhile.
        final: what `every` is after `steps`; it gets there by equal factors. None leaves it as it is.
        steps: inner steps of the run.
        seconds: the time between two rounds, in place of `every`.

    Raises:
        UserError: they cannot work together.
    """

    every: int | None
    fragments: int
    delay: int
    final: int | None
    steps: int
    seconds: float | None

    def __init__(
        self,
        every: int | str | None = None,
        fragments: int = 1,
        delay: int | str = 0,
        final: int | None = None,
        steps: int = 0,
        *,
        seconds: float | None = None,
    ) -> None:
        in_steps = delay if isinstance(every, str) and not isinstance(delay, str) else 0
        every, seconds = _ticks_and_seconds(every, seconds)
        if isinstance(delay, str):
            if seconds is None:
                raise UserError(f"delay is {delay!r}, but every is {every!r}; give both as times, or neither")
            delay = ticks_of("delay", seconds_of("delay", delay))
        chosen = {"every": every, "fragments": fragments, "delay": delay, "final": final, "steps": steps}
        for name, value in {**chosen, "seconds": seconds}.items():
            object.__setattr__(self, name, value)
        for name, value in chosen.items():
            unset = value is None and name in ("every", "final")
            if not unset and (not isinstance(value, int) or isinstance(value, bool)):
                raise UserError(f"{name} is {value!r}; it must be a whole number")
        self._check()
        if in_steps:
            raise UserError(f"delay is {in_steps}, but rounds go by the clock; give it as a time, too, such as '5s'")

    def _check(self) -> None:
        """Refuses what cannot work together. Raises UserError."""
        if self.every is None:
            return
        if self.every < 1 or self.fragments < 1 or self.delay < 0:
            raise UserError(f"{self} is not possible: every and fragments must be at least 1, delay at least 0")
        unit = "" if self.seconds is None else " (tenths of a second)"
        if self.delay > self.every:
            raise UserError(
                f"delay is {self.delay} but every is {self.every}{unit}: a round must be applied before the next one "
                f"starts; choose a delay of at most {self.every}"
            )
        if self.seconds is not None and (self.fragments > 1 or self.final is not None):
            of_final = f"every_final is {self.final}", "leave it out"
            what, remedy = of_final if self.final is not None else (f"fragments is {self.fragments}", "choose 1")
            raise UserError(f"{what}, but rounds by the clock have none; {remedy}, or give every in inner steps")
        if self.fragments > self.every:
            raise UserError(
                f"fragments is {self.fragments} but every is {self.every}: "
                "only one fragment can start a round in a step; choose no more fragments than every"
            )
        if self.final is not None and self.final < max(self.delay, self.fragments):
            raise UserError(
                f"every_final is {self.final}, less than delay ({self.delay}) or fragments ({self.fragments}); "
                f"choose at least {max(self.delay, self.fragments)}"
            )

    def __repr__(self) -> str:
        told = (f"{name}={value!r}" for name, value in vars(self).items() if name != "seconds" or self.by_clock)
        return f"Schedule({', '.join(told)})"

    @property
    def by_clock(self) -> bool:
        """Whether it counts tenths of a second, and not inner steps."""
        return self.seconds is not None

    def every_at(self, step: int) -> int:
        """Inner steps from a round that starts after a step to the fragment's next; 0 for never."""
        if self.every is None or self.final is None:
            return self.every or 0
        progress = min(step / max(self.steps, 1), 1.0)
        return round(self.every * math.pow(self.final / self.every, progress))

    def times(self, factor: int) -> Schedule:
        """With rounds so many times as far apart."""
        if factor == 1 or self.every is None:
            return self
        if self.seconds is not None:
            return replace(self, every=None, seconds=self.seconds * factor)
        return replace(self, every=self.every * factor, final=None if self.final is None else self.final * factor)

    def first(self, fragment: int) -> int:
        """The step (counted from 1) after which a fragment's first round starts; 0 for never."""
        if self.every is None:
            return 0
        return fragment * self.every // self.fragments or self.every

    def shortened(self, share: float) -> tuple[int, int]:
        """`every` and the delay at a share of the schedule's length; rounds of all fragments still fit in."""
        if self.every is None:
            return 0, 0
        every = max(self.fragments, round(self.every * share))
        return every, self.delay * every // self.every
