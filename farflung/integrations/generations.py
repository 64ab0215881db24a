"""A checkpoint that is saved over the last one: this stays beside it until every replica has saved the next."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

from farflung.errors import UserError
from farflung.integrations.replicas import Seat
from farflung.networks import PeerLostError


def of_replica(path: Path, rank: int) -> Path:
    """Where a replica saves what is to be saved under a path: replica 0 there, the others in a folder beside it."""
    return path.parent / f"replica-{rank}" / path.name if rank else path


def new_of(place: Path) -> Path:
    """Where to save what `put` is to put in a place; it is whole from the moment that it is there."""
    return place.with_name(f"{place.name}.new")


def _before(place: Path) -> Path:
    return place.with_name(f"{place.name}.before")


def put(place: Path, seat: Seat, step: int, seconds: float) -> None:
    """Puts what lies in `new_of` in its place, once all replicas have come to that; all call this alike."""
    try:
        seat.told("saved", step, seconds)
    except PeerLostError as lost:
        warnings.warn(f"the checkpoint at step {step} may not be saved everywhere: {lost}", stacklevel=2)
    if place.exists():
        remove(_before(place))
        place.rename(_before(place))
    new_of(place).rename(place)


def newest_common(place: Path, seat: Seat, step_of: Callable[[Path], int | None]) -> Path:
    """The newest checkpoint of a place that every replica has whole; all call this alike.

    Raises UserError where there is none. `step_of` tells the step of a whole one.
    """
    paths = [path for path in all_of(place) if path.exists()]
    found = {step: path for path in paths if (step := step_of(path)) is not None}
    said = seat.told("found", sorted(found))
    common = set.intersection(*(set(steps) for steps in said.values()))
    if not common:
        told = ", ".join(f"replica {rank}: {steps or 'none'}" for rank, steps in said.items())
        raise UserError(
            f"{place} is no checkpoint that all replicas have whole (steps of {told}); it was cut, damaged or saved "
            "without rounds: resume another, or begin anew"
        )
    return found[max(common)]


def all_of(place: Path) -> tuple[Path, ...]:
    """All places of a checkpoint, in order of what is to be taken where two are of the same step."""
    return new_of(place), _before(place), place


def remove(path: Path) -> None:
    """Removes a file or a folder, if it is there."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
