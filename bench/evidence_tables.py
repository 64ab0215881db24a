"""The tables of docs/evidence.md, as Markdown, from bench/results alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import mean, stdev
from typing import Any

import ablation as ablation_bench
import frontier as frontier_bench
import gap as gap_bench
import inner as inner_bench
import numpy as np
import scaling as scaling_bench
from recorded import RESULTS, Recorded, Result, Settings, regime

from farflung import settings as run_settings
from farflung.networks import Conditions
from farflung.outer import message_bytes
from farflung.planner.architecture import architecture_of
from farflung.planner.timing import Timer

RATES = (10, 100, 1000)
"""Links, in Mbit/s, that hours are told for."""

CONDITIONS = Conditions(latency_ms=20, step_ms=100)
"""Of the simulated hours, but for the links' rates."""

Seeds = dict[int, Result]


@dataclass(frozen=True)
class Row:
    """One method, tuned."""

    name: str
    settings: Settings
    results: Seeds

    @property
    def losses(self) -> list[float]:
        """By seed."""
        return [self.results[seed]["validation_loss"] for seed in sorted(self.results)]

    @property
    def megabytes(self) -> float:
        """That one replica sent, a mean."""
        return mean(r["bytes_sent"] for r in self.results.values()) / self.settings["replicas"] / 1e6

    @property
    def fewer(self) -> float:
        """How many times fewer bytes than float32 gradients every step would have been."""
        return mean(r["ddp_bytes"] / r["bytes_sent"] if r["bytes_sent"] else math.inf for r in self.results.values())


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; columns after the first are set to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def around(values: Sequence[float], digits: int = 3, sign: str = "") -> str:
    """Mean and deviation."""
    deviation = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):{sign}.{digits}f}{deviation}"


def changes(own: Seeds, base: Seeds) -> list[float]:
    """By how many per cent the loss differs, seed by seed."""
    seeds = sorted(own.keys() & base.keys())
    return [100 * (own[seed]["validation_loss"] / base[seed]["validation_loss"] - 1) for seed in seeds]


def told(settings: Settings, left_out: Iterable[str] = ()) -> str:
    """Settings as words, in one order."""
    return ", ".join(
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in settings.items()
        if key not in left_out
    )


def frontier_rows() -> list[Row]:
    """All rows of the frontier that there are."""
    common = regime(frontier_bench.Options().steps)
    recorded = Recorded("frontier", common)
    return [
        Row(name, common | recorded.chosen[name], recorded.results(recorded.chosen[name]))
        for name in frontier_bench.ROWS
        if name in recorded.chosen
    ]


def on_frontier(rows: Sequence[Row], cost: dict[str, float]) -> set[str]:
    """The rows that no other row beats in both loss and cost."""
    loss = {row.name: mean(row.losses) for row in rows}
    return {
        name
        for name in loss
        if not any(loss[other] < loss[name] and cost[other] <= cost[name] for other in loss if other != name)
    }


def frontier() -> str:
    rows = frontier_rows()
    best = on_frontier(rows, {row.name: row.megabytes for row in rows})
    searched = ("lr", "outer_lr", "outer_momentum")
    return markdown(
        ("method", "loss", "seed by seed", "MB a replica", "fewer than ddp", "on the frontier", "tuned to"),
        (
            (
                row.name,
                around(row.losses),
                " ".join(f"{loss:.3f}" for loss in row.losses),
                f"{row.megabytes:.3g}",
                f"{row.fewer:.3g}×" if row.megabytes else "∞",
                "yes" if row.name in best else "",
                told({key: row.settings[key] for key in searched if key in row.settings}),
            )
            for row in rows
        ),
    )


def seconds_of(settings: Settings, rate: float) -> float:
    """What a run takes on the simulated clock with links of this rate; trains nothing."""
    config = run_settings.Settings.of(**settings)
    method = config.method()
    if not method.schedule.every:
        return config.run.steps * CONDITIONS.step_ms / 1000
    conditions = Conditions(latency_ms=CONDITIONS.latency_ms, step_ms=CONDITIONS.step_ms, bandwidth_mbps=rate)
    sizes = cache(
        partial(message_bytes, method, architecture_of(config.workload.model, config.workload.sequence_length).shapes)
    )
    rounds = config.run.steps // method.schedule.every
    timing = Timer(method, sizes, conditions, config.run.replicas, rounds, math.inf).run()
    return timing.seconds * config.run.steps / timing.steps


def hours() -> str:
    rows = frontier_rows()
    cost = {rate: {row.name: seconds_of(row.settings, rate) for row in rows} for rate in RATES}
    best = {rate: on_frontier(rows, cost[rate]) for rate in RATES}
    return markdown(
        ("method", "loss", *(f"h at {rate} Mbit/s" for rate in RATES)),
        (
            (
                row.name,
                around(row.losses),
                *(
                    f"{cost[rate][row.name] / 3600:.4f}" + (" (frontier)" if row.name in best[rate] else "")
                    for rate in RATES
                ),
            )
            for row in rows
        ),
    )


def inner() -> str:
    common = regime(frontier_bench.Options().steps)
    adamw = {row.name: row for row in frontier_rows()}
    recorded = Recorded("inner", common)
    lines = []
    for name in inner_bench.NAMES:
        if name not in recorded.chosen or name not in adamw:
            continue
        muon = recorded.results(recorded.chosen[name])
        losses = [result["validation_loss"] for result in muon.values()]
        change = changes(muon, adamw[name].results)
        rates = (adamw[name].settings["lr"], recorded.chosen[name]["lr"])
        lines.append(
            (
                name,
                around(adamw[name].losses),
                around(losses),
                f"{around(change, 1, '+')} %",
                "Muon" if max(change) < 0 else "AdamW" if min(change) > 0 else "neither on all seeds",
                f"{rates[0]:g}, {rates[1]:g}",
            )
        )
    return markdown(("method", "AdamW", "Muon", "change", "better on all seeds", "lr of each"), lines)


def finals(seeds: Seeds) -> Seeds:
    """The results with the losses of the weights that runs end with."""
    return {seed: {**result, "validation_loss": result.get(gap_bench.FINAL)} for seed, result in seeds.items()}


def gap() -> str:
    common = regime(gap_bench.Options().steps)
    recorded = Recorded("gap", common)
    yardsticks = {name: finals(recorded.results(recorded.chosen[name])) for name in ("ddp", "ddp, Muon")}
    best = min(yardsticks.values(), key=lambda seeds: mean(r["validation_loss"] for r in seeds.values()))
    lines, before = [], {}
    for name in ("ddp", "ddp, Muon", "DiLoCo as published", *gap_bench.STEPS):
        settings = recorded.chosen[name]
        row = Row(name, common | settings, finals(recorded.results(settings)))
        new = {key: value for key, value in settings.items() if before.get(key) != value} if before else settings
        added = name in gap_bench.STEPS
        kept = told(new) or "nothing was better: as before"
        lines.append(
            (
                f"+ {name}" if added else name,
                kept if added else told(settings, ("method",)),
                around(row.losses),
                f"{around(changes(row.results, yardsticks['ddp']), 1, '+')} %",
                f"{around(changes(row.results, best), 1, '+')} %",
                f"{row.fewer:.3g}×",
            )
        )
        if name == "DiLoCo as published" or added:
            before = settings
    head = ("what", "settings", "loss", "to ddp with AdamW", "to the better ddp", "fewer bytes")
    return markdown(head, lines)


def gap_regimes() -> str:
    recorded = Recorded("gap", regime(gap_bench.Options().steps))
    lines = []
    for name, (other, _) in gap_bench.REGIMES.items():
        ddp, best = (
            finals(recorded.results(gap_bench.changed(recorded.chosen[row], other)))
            for row in ("ddp, Muon", gap_bench.BEST)
        )
        if ddp and best:
            losses = [around([result["validation_loss"] for result in seeds.values()]) for seeds in (ddp, best)]
            fewer = mean(result["ddp_bytes"] / result["bytes_sent"] for result in best.values())
            lines.append((name, *losses, f"{around(changes(best, ddp), 1, '+')} %", f"{fewer:.1f}×"))
    return markdown(("", "ddp, Muon", "the best above", "gap", "fewer bytes"), lines)


def gap_alternatives() -> str:
    common = regime(gap_bench.Options().steps)
    recorded = Recorded("gap", common)
    settings, lines = recorded.chosen["DiLoCo as published"], []
    seed = gap_bench.Options().seeds[0]
    for name, alternatives in gap_bench.STEPS.items():
        without = finals(recorded.results(settings))
        for label, changed in alternatives.items():
            found = finals(recorded.results(gap_bench.changed(settings, changed)))
            if seed in found and found[seed]["validation_loss"]:
                lines.append((name, label, f"{changes({seed: found[seed]}, without)[0]:+.1f} %"))
        settings = recorded.chosen[name]
    return markdown(("added to the best so far", "alternative", "change of the loss, one seed"), lines)


def ablation() -> str:
    base = Recorded("frontier", {}).chosen_as(ablation_bench.BASE)
    recorded = Recorded("ablation", regime(ablation_bench.Options().steps))
    unchanged = ablation_bench.settings_of(base, {})
    parts = [f"The base: {told(base, ('method',))}."]
    for question, rows in ablation_bench.questions(base).items():
        lines = []
        everything = [ablation_bench.settings_of(base, changed) for changed in rows.values()]
        reference = recorded.results(unchanged if unchanged in everything else everything[0])
        for name, changed in rows.items():
            found = recorded.results(ablation_bench.settings_of(base, changed))
            sound = {seed: result for seed, result in found.items() if result["validation_loss"]}
            if not sound:
                lines.append((name, "diverged", "", "", "")) if found else None
                continue
            results = list(sound.values())
            lines.append(
                (
                    name,
                    around([result["validation_loss"] for result in results]),
                    f"{around(changes(sound, reference), 1, '+')} %",
                    around([result["validation_loss_averaged"] for result in results]),
                    f"{mean(result['weight_spread'] for result in results):.2g}",
                )
            )
        head = ("", "loss of a replica", "change", "loss of their average", "consensus distance")
        parts.append(f"**{question}**\n\n{markdown(head, lines)}")
    return "\n\n".join(parts)


@dataclass(frozen=True)
class Gaps:
    """A method's gaps to ddp, in per cent, by replicas and seed."""

    batch: str
    method: str
    points: list[tuple[int, float]]

    def at(self, replicas: int) -> list[float]:
        """By seed."""
        return [gap for number, gap in self.points if number == replicas]

    def line(self, points: Sequence[tuple[int, float]]) -> tuple[float, float]:
        """Gap = first + second · log2(replicas), by least squares."""
        numbers, values = zip(*points, strict=True)
        slope, start = np.polyfit(np.log2(numbers), values, 1)
        return float(start), float(slope)

    def predicted(self, replicas: int, tries: int = 2000) -> tuple[float, float, float]:
        """The gap at so many replicas: the line's, and 5th and 95th percentile of lines through resampled points."""
        start, slope = self.line(self.points)
        chance, found = np.random.default_rng(0), []
        while len(found) < tries:
            points = [self.points[i] for i in chance.integers(len(self.points), size=len(self.points))]
            if len({number for number, _ in points}) > 1:
                first, second = self.line(points)
                found.append(first + second * math.log2(replicas))
        low, high = np.percentile(found, [5, 95])
        return start + slope * math.log2(replicas), float(low), float(high)


def all_gaps() -> list[Gaps]:
    """Every method's but ddp's, for both kinds of batch."""
    options, tuned = scaling_bench.Options(), Recorded("frontier", {}).chosen
    recorded = Recorded("scaling", regime(options.steps))
    found = []
    for batch in scaling_bench.BATCHES:
        for method in scaling_bench.METHODS[1:]:
            points = []
            for replicas in options.replicas:
                own, ddp = (
                    recorded.results(scaling_bench.settings_of(tuned[name], batch, replicas))
                    for name in (method, scaling_bench.METHODS[0])
                )
                points += [(replicas, change) for change in changes(own, ddp)]
            found.append(Gaps(batch, method, points))
    return found


def scaling() -> str:
    replicas = scaling_bench.Options().replicas
    return markdown(
        ("gap to ddp, %", *(f"{number} replicas" for number in replicas)),
        (
            (f"{gaps.method}, {gaps.batch}", *(around(gaps.at(n), 1, "+") if gaps.at(n) else "" for n in replicas))
            for gaps in all_gaps()
        ),
    )


def scaling_fits() -> str:
    def line(gaps: Gaps) -> tuple[str, ...]:
        start, slope = gaps.line(gaps.points)
        guess, low, high = gaps.predicted(256)
        fit = f"{start:.1f} {slope:+.1f} · log2 N"
        return f"{gaps.method}, {gaps.batch}", fit, f"{guess:.1f} %", f"{low:.1f} to {high:.1f} %"

    head = ("", "fit, %", "at 256 replicas", "5th to 95th percentile")
    return markdown(head, [line(gaps) for gaps in all_gaps() if len(gaps.points) > 2])


def others() -> str:
    path = RESULTS / "others.json"
    runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []
    lines = []
    for name in dict.fromkeys(run["contender"] for run in runs):
        found = [run for run in runs if run["contender"] == name]
        results = [run["result"] for run in found]
        lines.append(
            (
                name,
                found[0]["library"] or "this repository",
                around([result["loss"] for result in results]),
                around([result["bytes_sent"] / 1e6 for result in results], 1),
                around([result["seconds"] for result in results], 1),
            )
        )
    return markdown(("", "version", "loss", "MB on the wire", "seconds"), lines)


def machines() -> str:
    names = ("frontier", "inner", "gap", "ablation", "scaling")
    found = {name: Recorded(name, {}).made_on() for name in names if (RESULTS / f"{name}.json").exists()}
    return markdown(("table", "made on"), [(name, "<br>".join(made)) for name, made in found.items()])
