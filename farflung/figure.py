"""What a run is judged by, and how two values of it compare."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from farflung.errors import UserError

_SUMMARY = """
method units measure judged_by replicas missing steps stages shards islands parameters tokens epochs
epochs_of_sources others_averaged bytes_sent boundary_bytes ddp_bytes steps_trained rounds seconds
seconds_blocked tokens_per_second mfu spent weight_spread branch_scale peers sample sample_picture step time
replica kind
"""
TAKEN = frozenset(_SUMMARY.split())
"""What a run's summary and events call other things."""


class Figure(NamedTuple):
    """A figure that says how good a model is."""

    name: str = "validation loss"
    """As people read it."""
    unit: str = ""
    """What it is measured in, such as nats a token; "" for none."""
    more_is_better: bool = False

    @property
    def key(self) -> str:
        """Its name in summaries and trackers, such as link_mrr."""
        return re.sub(r"\W+", "_", self.name).strip("_").lower()

    @property
    def heading(self) -> str:
        """Its name over a narrow column."""
        return self.name.removesuffix(" loss")

    @property
    def key_of_sources(self) -> str:
        """The name of a table of its values, one for each source."""
        return self.key + ("es" if self.key.endswith("s") else "s")

    def badness(self, value: float) -> float:
        """Less is better."""
        return -value if self.more_is_better else value

    def best(self, values: Iterable[float]) -> float:
        """The best of some values; the first of equal ones."""
        return min(values, key=self.badness)

    def told(self, value: str) -> str:
        """A value as people read it, with the name and the unit."""
        return f"{self.name} {value} {self.unit}".rstrip()

    def checked(self) -> Figure:
        """Itself. Raises UserError for a name that has no letters, or is that of another number of a run."""
        if not self.key:
            raise UserError(f"a figure is called {self.name!r}; give it a name of letters, such as 'link MRR'")
        if taken := [key for key in (self.key, self.key_of_sources) if key in TAKEN]:
            raise UserError(f"a figure is called {self.name!r}, but a run has another {taken[0]}; rename it")
        return self


LOSS = Figure()
"""Of runs that say nothing else."""


def figure_of(workload: Any) -> Figure:
    """What a workload's models are judged by: its `judged_by`, or else the validation loss in its `measure`."""
    told = getattr(workload, "judged_by", LOSS._replace(unit=workload.measure))
    if not isinstance(told, Figure):
        raise UserError(
            f"judged_by of the workload {type(workload).__name__} is {told!r}; make it a farflung.figure.Figure, such "
            "as Figure('AUC', more_is_better=True)"
        )
    return told.checked()
