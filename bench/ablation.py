"""NoLoCo one setting at a time: what each of its parts is worth, and how much that varies between seeds.

    python bench/ablation.py [--steps 200] [--seeds 0 1 2]

Around the settings that bench/frontier.py has found for `noloco, every 20`. Results go to bench/results/ablation.json.
"""

from __future__ import annotations

from dataclasses import dataclass

import tyro
from recorded import Recorded, Settings, regime


@dataclass(frozen=True)
class Options:
    steps: int = 200
    """Inner steps of each replica."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One run of each row for each."""


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
            "the last tenth": {"late_average": 0.1},
            "the last half": {"late_average": 0.5},
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


def main(options: Options) -> None:
    base = Recorded("frontier", {}).chosen_as(BASE)
    with Recorded("ablation", regime(options.steps)) as recorded:
        futures = [
            recorded.start(settings_of(base, changes), seed)
            for seed in options.seeds
            for rows in questions(base).values()
            for changes in rows.values()
        ]
        for future in futures:
            future.result()


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
