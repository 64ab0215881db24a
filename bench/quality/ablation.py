"""What is each part and setting of NoLoCo worth?
One thing is changed at a time around the settings that frontier has found for `noloco, every 20`, the baseline of
every table, with several seeds to tell a change from chance. Takes some hours on two cores, after frontier.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean

from bench.lib.runs import Runs, around, changes, in_words, regime, sound
from bench.lib.store import Result, Settings, Store
from bench.lib.table import Part, Table


@dataclass(frozen=True)
class Options:
    steps: int = 200
    """Inner steps of each replica."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One run of each row for each."""
    questions: tuple[str, ...] = ()
    """Which to go through; all unless given."""
    replicas: int = 8
    """Copies of the model, unless a row is about them."""


SMOKE = Options(steps=2, seeds=(0,), questions=("How many average in a round (n)?",), replicas=8)


BASE = "noloco, every 20"
DEFAULTS: Settings = {"gamma": 0.7, "group_size": 2, "shares": "alike"}
"""What the base leaves out."""


def questions(base: Settings) -> dict[str, dict[str, Settings]]:
    """What is asked, and the rows that answer it: changes to the base, which is itself the row without any."""
    diloco = {**base, "method": "diloco"}
    piped = {"stages": 2, "replicas": 4}
    averaging = {"outer_lr": 1.0, "outer_momentum": 0.0, "gamma": 1.0}
    return {
        "Which outer optimizer?": {
            "NoLoCo's Nesterov, pairs": {},
            "the same without its pull (γ = 0), pairs": {"gamma": 0.0},
            "plain Nesterov, pairs": {**diloco, "group_size": 2},
            "plain averaging of weights, pairs": averaging,
            "plain Nesterov, everyone (DiLoCo)": diloco,
            "plain averaging of weights, everyone": {**diloco, "outer_lr": 1.0, "outer_momentum": 0.0},
        },
        "How many average in a round (n)?": {f"n = {n}": {"group_size": n} for n in (2, 4, 8)},
        "How many inner steps between rounds?": {f"every {every}": {"every": every} for every in (5, 10, 20, 50, 100)},
        "Outer momentum α": {f"α = {alpha:g}": {"outer_momentum": alpha} for alpha in (0.0, 0.3, 0.5, 0.7, 0.9)},
        "Outer learning rate β": {f"β = {beta:g}": {"outer_lr": beta} for beta in (0.35, 0.5, 0.7, 1.0, 1.4)},
        "Pull γ": {f"γ = {gamma:g}": {"gamma": gamma} for gamma in (0.0, 0.35, 0.7, 1.0, 1.4)},
        "How many replicas?": {f"{n} replicas": {"replicas": n} for n in (4, 8, 16)},
        "Where do microbatches go (2 stages × 4 replicas, real processes)?": {
            "fixed routes": piped,
            "random routes": {**piped, "routes": "random"},
        },
        "Are late weights averaged at the end?": {
            "no": {},
            "the last tenth": {"tail_average": 0.1},
            "the last half": {"tail_average": 0.5},
        },
        "Is the replicas' data of one kind?": {
            "NoLoCo, alike": {},
            "NoLoCo, apart": {"shares": "apart"},
            "NoLoCo, apart, γ = 0": {"shares": "apart", "gamma": 0.0},
            "DiLoCo, alike": diloco,
            "DiLoCo, apart": {**diloco, "shares": "apart"},
            "no exchange, alike": {**base, "method": "local"},
            "no exchange, apart": {**base, "method": "local", "shares": "apart"},
        },
    }


def settings_of(base: Settings, changes: Settings) -> Settings:
    """A row's settings, without those that its method does not have."""
    settings = {**base, **DEFAULTS, **changes}
    if settings["method"] == "diloco":
        return {key: value for key, value in settings.items() if key not in DEFAULTS or key in changes}
    if settings["method"] == "local":
        kept = ("method", "inner", "lr", "shares")
        return {key: settings[key] for key in kept if key in settings}
    return settings


def asked(base: Settings, options: Options) -> dict[str, dict[str, Settings]]:
    """The questions that are gone through."""
    every = questions(base)
    return {question: every[question] for question in options.questions or every}


def run(options: Options, store: Store) -> list[Part]:
    base = Store("frontier").chosen_as(BASE)
    with Runs(store, regime(options.steps, replicas=options.replicas)) as runs:
        futures = [
            runs.start(settings_of(base, changed), seed)
            for seed in options.seeds
            for rows in asked(base, options).values()
            for changed in rows.values()
        ]
        for future in futures:
            future.result()
    return tables(store, options)["ablation"]


def tables(store: Store, options: Options) -> dict[str, list[Part]]:
    """A table for each question."""
    base = Store("frontier").chosen_as(BASE)
    common = regime(options.steps, replicas=options.replicas)
    parts: list[Part] = [f"The base: {in_words(base, ('method',))}."]
    for question, rows in asked(base, options).items():
        found = {name: store.results(common | settings_of(base, changed)) for name, changed in rows.items()}
        settings = [settings_of(base, changed) for changed in rows.values()]
        unchanged = settings_of(base, {})
        reference = store.results(common | (unchanged if unchanged in settings else settings[0]))
        columns = ("", "loss of a replica", "change", "loss of their average", "consensus distance")
        lines = [answer(name, results, reference) for name, results in found.items() if results]
        parts.append(Table(dict.fromkeys(columns, ""), lines, question))
    return {"ablation": parts}


def answer(name: str, found: dict[int, Result], reference: dict[int, Result]) -> tuple[str, ...]:
    """A row's line."""
    ended = sound(found)
    if not ended:
        return name, "diverged", "", "", ""
    return (
        name,
        around(result["validation_loss"] for result in ended.values()),
        f"{around(changes(ended, reference), 1, '+')} %",
        around(result["validation_loss_averaged"] for result in ended.values()),
        f"{mean(result['weight_spread'] for result in ended.values()):.2g}",
    )
