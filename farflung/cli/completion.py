"""farflung completion: what shells need to complete commands and flags."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from farflung.cli import mixtures, peers, preparing, runs, training, watching
from farflung.cli.arguments import LIKE_A_FILE, parse, with_field
from farflung.planner.options import PlanOptions, RecommendOptions, SimulateOptions
from farflung.settings import Settings


@dataclass(frozen=True)
class CompletionOptions:
    """For which shell."""

    shell: tyro.conf.Positional[Literal["bash", "zsh", "fish"]]
    """Where to put what is printed, docs/how-to/completion.md says."""


def completion(arguments: list[str]) -> None:
    """Print what bash, zsh or fish needs to complete farflung's commands and flags."""
    asked = parse(CompletionOptions, arguments, "completion", completion.__doc__)
    kinds = [
        Annotated[kind, tyro.conf.subcommand(name, prefix_name=False)] for name, kind in options_of_commands().items()
    ]
    any_of_them: Any = functools.reduce(operator.or_, kinds)
    tyro.cli(any_of_them, args=["--tyro-print-completion", asked.shell], prog="farflung", config=LIKE_A_FILE)


def options_of_commands() -> dict[str, Any]:
    """The arguments of each command."""
    return {
        "train": with_field(training.TrainOptions, "settings", Settings()),
        "invite": with_field(peers.InviteOptions, "settings", Settings()),
        "join": peers.join_options(),
        "status": peers.StatusOptions,
        "doctor": peers.DoctorOptions,
        "plan": PlanOptions,
        "simulate": SimulateOptions,
        "recommend": RecommendOptions,
        "methods": runs.MethodsOptions,
        "report": runs.ReportOptions,
        "export": runs.ExportOptions,
        "prepare": preparing.PrepareOptions,
        "mixture": mixtures.MixtureOptions,
        "track": watching.TrackOptions,
        "watch": watching.WatchOptions,
        "completion": CompletionOptions,
    }
