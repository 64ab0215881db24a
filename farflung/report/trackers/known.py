"""The trackers that there are: how accelerate begins a run of each or goes on with it, and where its figures are."""

from __future__ import annotations

import importlib.util
import os
import shlex
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farflung.errors import UserError, suggestion

PROJECT = "farflung"
"""What the runs are filed under, unless the tracker's own environment variable says."""


@dataclass(frozen=True)
class Seat:
    """One run of a tracker: the figures of one replica.

    Args:
        folder: the run folder.
        name: what people see.
        group: what all replicas of the run are filed under.
        id: what no other run has.
        before: what the tracker called the run when it began; "" for a new one.
        settings: the run's.
    """

    folder: Path
    name: str
    group: str
    id: str
    before: str
    settings: dict[str, Any]


@dataclass(frozen=True)
class Tracker:
    """One kind of tracker.

    Args:
        package: what has to be installed for it, beside accelerate.
        begin: begins the run of a seat, or goes on with it; returns accelerate's tracker.
        where: says where the figures are.
        called: what the tracker calls the run; `Seat.before` the next time.
        ordered: whether it takes rows only in the order of their numbers; the step is then a figure of the row.
    """

    package: str
    begin: Callable[[Seat], Any]
    where: Callable[[Seat, Any], str]
    called: Callable[[Any], str] = lambda run: "begun"
    ordered: bool = False


_STATE = threading.Lock()
"""Of accelerate's state, which all threads share."""


def _begun(tracker: Any) -> Any:
    """A tracker of accelerate's that has begun its run."""
    from accelerate import PartialState

    with _STATE:
        PartialState(cpu=True)  # without which accelerate's log refuses to be written; a GPU is for training
    tracker.start()
    return tracker


def _tensorboard(seat: Seat) -> Any:
    from accelerate.tracking import TensorBoardTracker

    return _begun(TensorBoardTracker(seat.name, str(_tensorboard_folder(seat))))


def _tensorboard_folder(seat: Seat) -> Path:
    return seat.folder / "tensorboard"


def _wandb(seat: Seat) -> Any:
    import wandb
    from accelerate.tracking import WandBTracker

    made = WandBTracker(
        os.environ.get("WANDB_PROJECT", PROJECT),
        id=seat.id,
        name=seat.name,
        group=seat.group,
        config=seat.settings,
        resume="allow",
        reinit="create_new",
        settings=wandb.Settings(console="off", silent=True),
    )
    tracker = _begun(made)
    tracker.tracker.define_metric("*", step_metric="step")
    return tracker


def _at_wandb(seat: Seat, run: Any) -> str:
    if run.url:
        return str(run.url)
    offline = Path(run.dir).parent
    return f"{offline}; send them with: wandb sync {shlex.quote(str(offline))}"


def _trackio(seat: Seat) -> Any:
    from accelerate.tracking import TrackioTracker

    made = TrackioTracker(
        PROJECT,
        name=f"{seat.name}-{seat.id}",  # by which it knows a run again
        group=seat.group,
        config=seat.settings,
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return _begun(made)


def _mlflow(seat: Seat) -> Any:
    from accelerate.tracking import MLflowTracker

    made = MLflowTracker(PROJECT, run_name=seat.name, run_id=seat.before or None, tags={"group": seat.group})
    tracker = _begun(made)
    if not seat.before:
        tracker.store_init_configuration(seat.settings)
    return tracker


def _at_mlflow(seat: Seat, run: Any) -> str:
    import mlflow

    return f"{mlflow.get_tracking_uri()}, experiment {os.environ.get('MLFLOW_EXPERIMENT_NAME', PROJECT)}"


TRACKERS = {
    "tensorboard": Tracker(
        "tensorboard",
        _tensorboard,
        lambda seat, run: f"see them with: tensorboard --logdir {shlex.quote(str(_tensorboard_folder(seat)))}",
    ),
    "wandb": Tracker("wandb", _wandb, _at_wandb, ordered=True),
    "trackio": Tracker("trackio", _trackio, lambda seat, run: f"see them with: trackio show --project {PROJECT}"),
    "mlflow": Tracker("mlflow", _mlflow, _at_mlflow, lambda run: str(run.info.run_id)),
}


def named(names: str) -> dict[str, Tracker]:
    """The trackers of a list of names, with commas between them. Raises UserError."""
    chosen = list(dict.fromkeys(filter(None, map(str.strip, names.split(",")))))
    for name in chosen:
        if name not in TRACKERS:
            raise UserError(f"there is no tracker {name!r}{suggestion(name, list(TRACKERS))}")
        for package in (TRACKERS[name].package, "accelerate"):
            if importlib.util.find_spec(package) is None:
                raise UserError(
                    f"the tracker {name} needs {package}, which is not installed; "
                    "install it with: pip install 'farflung[track]'"
                )
    return {name: TRACKERS[name] for name in chosen}
