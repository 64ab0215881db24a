"""What to choose for given links: `farflung recommend`, from what was measured and how long rounds take."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from farflung.errors import UserError
from farflung.methods import RoundSettings, chosen
from farflung.networks import Conditions
from farflung.outer import Method, message_bytes
from farflung.planner.lengths import Gap, Gaps, Lengths
from farflung.planner.options import RecommendOptions
from farflung.planner.sizes import side_of, square_model
from farflung.planner.table import Column, Table, figures, percent
from farflung.planner.timing import Timer

MEASURED = Path(__file__).with_name("evidence.json")
"""What benches have measured; `python -m bench evidence` makes it."""

ROUNDS = 3
"""As many are timed."""
A_BIT = 1.05
"""By this factor rounds become rarer at least, until links can keep up."""
OF_LINKS = ("every", "every_final")
"""Settings that become larger where links are slow."""
ALONE = {"method": "local"}
"""The row of replicas that never meet."""
RAREST = 100_000
"""Inner steps between two rounds beyond which none is recommended."""


class Known(NamedTuple):
    """A measured row, its gap in a run of some length, and there that of replicas that never meet."""

    settings: dict[str, Any]
    table: str
    gaps: Gaps
    gap: Gap
    alone: float

    @property
    def pays(self) -> bool:
        """Whether it is better than never to meet."""
        return self.gap.middle < self.alone


@dataclass(frozen=True)
class Candidate:
    """A measured row, with rounds as rare as the links need them; gaps are shares of ddp's loss.

    Args:
        settings: of its rounds, as they are recommended.
        table: of docs/evidence.md, from which its gap comes.
        gaps: what was measured.
        factor: how much rarer its rounds are than those measured.
        computing: the share of the time in which replicas compute.
        middle: the gap, however large.
        least, most: what it may be.
        sent: megabytes that a replica sends in a step.
        first: the step after which its first round comes.
    """

    settings: dict[str, Any]
    table: str
    gaps: Gaps
    factor: float
    computing: float
    middle: float
    least: float
    most: float
    sent: float
    first: int

    @property
    def expected(self) -> float:
        """The gap that is to be expected: no more than the most."""
        return min(self.middle, self.most)

    @property
    def flags(self) -> str:
        """The settings as flags."""
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in self.settings.items())


def measured() -> dict[str, Any]:
    """The table of the package."""
    table: dict[str, Any] = json.loads(MEASURED.read_text(encoding="utf-8"))
    return table


def recommend(options: RecommendOptions) -> list[Candidate]:
    """What was measured, the least middle of a gap first; without what was no better than replicas that never meet.

    Raises UserError where links are too slow for any.
    """
    table = measured()
    growth = growth_of(table["rows"])
    wider = side_of(options.params) / side_of(table["parameters"])
    useful = [row._replace(settings=_as_wide(row.settings, wider)) for row in _at_length(table, options.steps)]
    found = [one for one in (_candidate(row, growth, options) for row in useful) if one]
    if not found:
        raise UserError(
            f"links of {options.link} are too slow for {options.params:g} parameters and steps of {options.step_ms:g} "
            f"ms: rounds would have to be more than {RAREST:,} steps apart; train a smaller model, or adapters only"
        )
    # Of rows that links have made the same, the one that was measured nearest.
    nearest = {
        (_kind(one.settings), one.factor > 1 or one.flags): one for one in sorted(found, key=lambda one: -one.factor)
    }
    return sorted(nearest.values(), key=lambda one: (one.middle, -one.computing))


def _at_length(table: dict[str, Any], steps: int) -> list[Known]:
    """What is known of each row in a run of so many steps; without what is no better than replicas that never meet.

    A row that was not measured at several lengths is left out where one of its kind was.
    """
    (never,), longer = _parted(table)
    lengths, apart = Lengths([row["gaps"] for row in longer]), Lengths([never])

    def known(row: dict[str, Any], gaps: Gaps, alone: float) -> Known:
        return Known(row["settings"], row["table"], gaps, lengths.gap(gaps, steps), alone)

    alone = apart.gap(never, steps).middle
    rows = [known(row, row["gaps"], alone) for row in longer if lengths.known(row["gaps"], steps)]
    rows = [row for row in rows if row.pays]
    kinds, length = {_kind(row.settings) for row in rows}, str(table["steps"])
    alone = apart.gap({length: table["alone"]}, steps).middle
    shorter = [known(row, {length: row["gaps"]}, alone) for row in table["rows"]]
    return rows + [row for row in shorter if row.pays and _kind(row.settings) not in kinds]


def _parted(table: dict[str, Any]) -> tuple[list[Gaps], list[dict[str, Any]]]:
    """The gaps of replicas that never meet, and the other rows of longer runs."""
    never = [row["gaps"] for row in table["longer"] if row["settings"] == ALONE]
    return never, [row for row in table["longer"] if row["settings"] != ALONE]


def _kind(settings: dict[str, Any]) -> str:
    """What links do not change of a row's settings."""
    return repr(sorted((name, "" if name in OF_LINKS else value) for name, value in settings.items()))


def growth_of(rows: Sequence[dict[str, Any]]) -> float:
    """The exponent with which a gap grows as rounds get rarer, from methods measured at two distances; their mean."""
    by_method: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        settings = row["settings"]
        if settings.keys() == {"method", "every"}:
            by_method.setdefault(settings["method"], []).append((settings["every"], mean(row["gaps"])))
    pairs = [sorted(points) for points in by_method.values() if len(points) > 1]
    return mean(math.log(far[1] / near[1]) / math.log(far[0] / near[0]) for near, *_, far in pairs)


def _candidate(row: Known, growth: float, options: RecommendOptions) -> Candidate | None:
    """A row with rounds as rare as the links need them; None where that is too rare."""
    settings, gap, factor = row.settings, row.gap, 1.0
    while True:
        stretched = settings | {n: math.ceil(settings[n] * factor) for n in OF_LINKS if n in settings}
        computing, sent = _timed(stretched, options)
        if computing >= 1 - options.wait:
            break
        # What a round waits hardly depends on how rare it is.
        factor *= max(A_BIT, (1 / max(computing, 1e-9) - 1) / (options.wait / (1 - options.wait)))
        if "every" not in settings or factor * settings["every"] > RAREST:
            return None
    middle, schedule = gap.middle * factor**growth, chosen(RoundSettings(**stretched)).schedule
    first = min(map(schedule.first, range(schedule.fragments)))
    least, most = gap.least, gap.most if factor == 1 else row.alone
    if first > options.steps:  # its replicas never meet
        middle, least, most = max(middle, row.alone), row.alone, row.alone
    return Candidate(stretched, row.table, row.gaps, factor, computing, middle, least, most, sent, first)


def _as_wide(settings: dict[str, Any], wider: float) -> dict[str, Any]:
    """Settings with which a model so many times wider sends as large a part of its matrices as was measured."""
    if "codec" not in settings:
        return settings
    codec = re.sub(r"(?<=lowrank)\d+", lambda rank: str(max(round(int(rank[0]) * wider), 1)), settings["codec"])
    return settings | {"codec": codec}


def _timed(settings: dict[str, Any], options: RecommendOptions) -> tuple[float, float]:
    """The share of the time in which replicas compute, and the megabytes that one sends in a step."""
    given = dict(settings)
    if last := given.pop("every_final", None):
        given["every"] = round(math.sqrt(given["every"] * last))
    method: Method = chosen(RoundSettings(**given))
    conditions = Conditions(bandwidth_mbps=options.mbps, latency_ms=options.latency_ms, step_ms=options.step_ms)
    sizes = cache(partial(message_bytes, method, square_model(options.params)))
    timing = Timer(method, sizes, conditions, options.replicas, ROUNDS, math.inf).run()
    sent = timing.bytes_sent / options.replicas / max(timing.steps, 1) / 1e6
    return timing.computed / max(timing.computed + timing.blocked, 1e-30), sent


COLUMNS = (
    Column("method and settings", "", lambda one: one.flags),
    Column("computing", "% of time", lambda one: one.computing, percent),
    Column("sent", "MB a replica and step", lambda one: one.sent, figures),
    Column("rarer", "than measured, times", lambda one: one.factor, figures),
    Column("gap", "% above ddp", lambda one: one.expected, percent),
    Column("from", "%", lambda one: one.least, percent),
    Column("to", "%", lambda one: one.most, percent),
)


def told(candidates: Sequence[Candidate], options: RecommendOptions) -> str:
    """The recommendation, what it comes from, and how far it is to be trusted."""
    best, table = candidates[0], measured()
    gap = f"{percent(best.expected)}% above ddp's, from {percent(best.least)} to {percent(best.most)}%"
    lines = [
        Table(COLUMNS, candidates).text(),
        "",
        f"take: farflung train {best.flags} --steps {options.steps}",
        f"expected validation loss: {gap}, in a run of {options.steps:,} steps",
        f'measured in: docs/evidence.md, "{best.table}"',
    ]
    if best.first > options.steps:
        lines.append(
            f"The run would be over before its first round, which comes after step {best.first:,}: its replicas would "
            "never meet. Say how long yours is, --steps, or let replicas wait more, --wait."
        )
    elif best.factor > 1:
        lines.append(
            f"Rounds {figures(best.factor)} times as rare were not measured. gap: as gaps grew with rarer rounds "
            "of noloco; from: as if rarer rounds cost nothing; to: as of replicas that never meet."
        )
    if sum(one.middle > one.most for one in candidates) > 1:
        lines.append(
            'No gap is shown as more than is under "to"; rows that would be more come in the order of how much more.'
        )
    if options.replicas > table["replicas"]:
        added = (f"{least:.1f} to {most:.1f} in {n} steps" for n, (least, most) in table["doubling"].items())
        lines.append(
            f"Gaps are of {table['replicas']} replicas. With more they were larger: by so many points for each "
            f"doubling, up to 32: {', '.join(added)} (one seed)."
        )
    return "\n".join([*lines, *_of_length(best, options.steps, table), _how_thin(options.params, table)])


def _of_length(best: Candidate, steps: int, table: dict[str, Any]) -> Iterator[str]:
    """How the recommended row's gap in a run of so many steps is known."""
    shortest, longest = table["steps"], max(int(length) for row in table["longer"] for length in row["gaps"])
    own, several = (
        max((int(length) for length, gaps in best.gaps.items() if len(gaps) >= seeds), default=0) for seeds in (1, 2)
    )
    if steps <= shortest:
        yield f"No run was shorter than {shortest} steps. Gaps close in longer ones: say yours, --steps 10000."
    elif own < min(steps, longest) and best.most:  # ddp's own has none to close
        yield f"Its gap was measured in runs of {own:,} steps; here it closes as those of other rows have done."
    elif several < min(steps, own):
        yield f"Runs of {own:,} steps are of one seed: their deviation is taken to be that of runs of {several:,}."
    if steps > longest:
        yield (
            f"No run was longer than {longest:,} steps. gap: what it is there; from: where it would be if it went on "
            "closing."
        )


def _how_thin(params: float, table: dict[str, Any]) -> str:
    times = params / table["parameters"]
    than_yours = f"{figures(times)} times fewer" if times >= 1 else f"{figures(1 / times)} times more"
    return (
        f"This evidence is thin: {table['parameters'] / 1e6:.2f}M parameters "
        f"({than_yours} than yours), {table['replicas']} replicas. "
        "Compare two methods for a while on your own model."
    )
