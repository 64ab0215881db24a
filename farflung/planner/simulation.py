"""What rounds cost under given conditions, method by method: `farflung simulate`."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from farflung.durations import duration
from farflung.errors import UserError
from farflung.files import write_text
from farflung.methods import RECIPES, defaults_of
from farflung.networks import conditions_named
from farflung.outer import Method, message_bytes
from farflung.planner.architecture import architecture_of
from farflung.planner.options import SimulateOptions
from farflung.planner.sizes import square_model
from farflung.planner.table import Column, Table, figures, percent
from farflung.planner.timing import Timer, Timing


@dataclass(frozen=True)
class Simulated:
    """One method's rounds."""

    name: str
    method: Method
    replicas: int
    timing: Timing

    @property
    def every(self) -> int:
        """Inner steps in a round; by the clock, on average."""
        schedule = self.method.schedule
        return max(1, self.timing.steps // self.timing.rounds_each) if schedule.by_clock else schedule.every or 1

    @property
    def computing(self) -> float:
        """Share of the replicas' time in which they compute."""
        return self.timing.computed / max(self.timing.computed + self.timing.blocked, 1e-30)

    @property
    def sent(self) -> float:
        """Megabytes that a replica sends in a round."""
        return self.timing.bytes_sent / self.replicas / self.timing.rounds_each / 1e6


def simulate(options: SimulateOptions) -> list[Simulated]:
    """Times each method's rounds. Raises UserError."""
    given = {"step_ms": options.step_ms, "seed": options.seed}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    conditions = replace(conditions_named(options.conditions), **changes)
    cells = architecture_of(options.model).cells if options.model else square_model(options.params or 0.0)
    methods = {name: _method_named(name, options.every) for name in method_names(options.methods)}
    deadline, work = options.deadline or math.inf, options.work_ms / 1000
    results = []
    for name, method in methods.items():
        sizes = cache(partial(message_bytes, method, cells))
        besides = [added for one in method.companions if (added := one.added(method, cells))]
        timer = Timer(method, sizes, conditions, options.replicas, options.rounds, deadline, work, besides)
        results.append(Simulated(name, method, options.replicas, timer.run()))
    return results


def method_names(listed: str) -> list[str]:
    """The names in a list with commas between, as they are now. Raises UserError for none."""
    names = [name.strip() for name in listed.split(",") if name.strip()]
    if not names:
        raise UserError(f"methods is {listed!r}; give names with commas between: {', '.join(RECIPES)}")
    known = list(dict.fromkeys(map(RECIPES.current, names)))
    if dealt := [name for name in known if RECIPES[name]().dealing]:
        raise UserError(f"{dealt[0]} sends units of a model, whose bytes are not planned yet; leave it out")
    return known


def _method_named(name: str, every: int | str | None = None) -> Method:
    """A method with its defaults, and with `every` where it has that setting. Raises UserError."""
    known = defaults_of(name)
    return RECIPES[name](every=every) if every is not None and "every" in known else RECIPES[name]()


COLUMNS = (
    Column("method", "", lambda r: r.name),
    Column("steps", "a round", lambda r: r.every),
    Column("time", "s a round", lambda r: r.timing.seconds_per_round, figures),
    Column("time", "s a step", lambda r: r.timing.seconds_per_round / r.every, figures),
    Column("computing", "% of time", lambda r: r.computing, percent),
    Column("blocked", "% of time", lambda r: 1 - r.computing, percent),
    Column("uplinks used", "% of rate", lambda r: r.timing.uplink, percent),
    Column("sent", "MB a replica and round", lambda r: r.sent, figures),
    Column("sent by all", "GB in all", lambda r: r.timing.bytes_sent / 1e9, figures),
    Column("failed", "rounds a replica", lambda r: sum(one.failed for one in r.timing.rounds) / r.replicas, figures),
)


def simulation_table(results: Sequence[Simulated]) -> Table:
    """What the rounds cost."""
    return Table(COLUMNS, results)


def pace_line(results: Sequence[Simulated], conditions: str) -> str:
    """What a step takes by itself, and how much longer it is for waiting, method by method."""
    longer = ", ".join(f"{one.name} {1 / max(one.computing, 1e-9):.3g}" for one in results)
    first = results[0]
    step_s = first.timing.computed / max(first.timing.steps * first.replicas, 1)
    alone = f"under {conditions}, a machine computes a step in {duration(step_s)} on average"
    return f"{alone}; waiting for links and slower machines makes it longer, times: {longer}"


def write_events(results: Sequence[Simulated], folder: Path) -> None:
    """One JSON object a line for every round: when it began and ended, and how long all replicas together waited."""
    for result in results:
        lines = (json.dumps(dataclasses.asdict(times)) for times in result.timing.rounds)
        write_text(folder / f"{result.name}.jsonl", "".join(f"{line}\n" for line in lines))
