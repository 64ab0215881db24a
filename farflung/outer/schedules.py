"""When rounds start, and when their results are applied."""

from __future__ import annotations

import math
from dataclasses import dataclass

from farflung.errors import UserError


@dataclass(frozen=True)
class Schedule:
    """Fragment p starts a round at each step where (step - offset of p) is a multiple of `every`.

    The offsets spread the fragments evenly over the steps between rounds (Streaming DiLoCo, arXiv 2501.18512).

    Args:
        every: inner steps between two rounds of one fragment; None never has a round.
        fragments: parts of the parameters that have rounds of their own.
        delay: inner steps between sending an update and applying the result; training goes on during the exchange.
        final: what `every` is after `steps`; it gets there by equal factors. None leaves it as it is.
        steps: inner steps of the run.

    Raises:
        UserError: the three cannot work together.
    """

    every: int | None
    fragments: int = 1
    delay: int = 0
    final: int | None = None
    steps: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            unset = value is None and name in ("every", "final")
            if not unset and (not isinstance(value, int) or isinstance(value, bool)):
                raise UserError(f"{name} is {value!r}; it must be a whole number")
        if self.every is None:
            return
        if self.every < 1 or self.fragments < 1 or self.delay < 0:
            raise UserError(f"{self} is not possible: every and fragments must be at least 1, delay at least 0")
        if self.delay > self.every:
            raise UserError(
                f"delay is {self.delay} but every is {self.every}: a round must be applied before the next one starts; "
                f"choose a delay of at most {self.every}"
            )
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

    def every_at(self, step: int) -> int:
        """Inner steps from a round that starts after a step to the fragment's next; 0 for never."""
        if self.every is None or self.final is None:
            return self.every or 0
        progress = min(step / max(self.steps, 1), 1.0)
        return round(self.every * math.pow(self.final / self.every, progress))

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
