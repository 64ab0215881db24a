"""A replica's rounds beside the trainer's own files of a checkpoint, and which checkpoints all replicas have whole."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from farflung.errors import UserError
from farflung.hooks.digests import digest
from farflung.hooks.trained import held_by
from farflung.integrations.replicas import Seat
from farflung.outer import Session
from farflung.training import checkpoint

ROUNDS = "rounds.pt"
"""The file of a checkpoint that is written last: where it is, the trainer's own are whole."""


def state_of(sessions: Sequence[Session], seat: Seat) -> dict[str, Any]:
    """A replica's rounds, and what tells whether weights and optimizers are those that they belong to."""
    return {
        "replica": seat.rank,
        "replicas": seat.replicas,
        "step": sum(session.step for session in sessions),
        "digests": [digest(_kept_by_trainer(session)).tolist() for session in sessions],
        "outer": [session.state_dict() for session in sessions],
    }


def load(sessions: Sequence[Session], seat: Seat, state: dict[str, Any], where: str) -> None:
    """Goes on from a `state_of`, once the trainer has loaded weights and optimizers. Raises UserError for another's."""
    refuse_other_seat(seat, state, where)
    if state["digests"] != [digest(_kept_by_trainer(session)).tolist() for session in sessions]:
        raise UserError(
            f"the rounds in {where} belong to other weights or another optimizer's state than those that were loaded; "
            "take all files of a checkpoint from the same save"
        )
    for session, outer in zip(sessions, state["outer"], strict=True):
        session.load_state_dict(outer)


def refuse_other_seat(seat: Seat, state: dict[str, Any], where: str) -> None:
    """Raises UserError where a state is of another replica, or of another number of them."""
    if state.get("replicas") != seat.replicas:
        raise UserError(
            f"{where} is of a run of {state.get('replicas')} replicas, and there are {seat.replicas}; start as many "
            "processes, or begin anew with its weights"
        )
    if state.get("replica") != seat.rank:
        raise UserError(
            f"{where} is of replica {state.get('replica')}, and this is replica {seat.rank}; give each its own folder"
        )


def _kept_by_trainer(session: Session) -> Iterator[Tensor]:
    yield from session.trained.parameters
    for optimizer in session.trained.optimizers:
        for parameter in held_by(optimizer):
            state = optimizer.state.get(parameter, {})
            yield from (state[name] for name in sorted(state) if isinstance(state[name], Tensor))


def write(folder: Path, sessions: Sequence[Session], seat: Seat) -> None:
    """Writes the rounds into a checkpoint's folder, with the sizes of the files there; without sessions, none."""
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file() and path.name != ROUNDS}
    state = state_of(sessions, seat) if sessions else {"replica": seat.rank, "replicas": seat.replicas}
    checkpoint.write(folder / ROUNDS, cast(checkpoint.Weights, {**state, "files": sizes}))


def read(folder: Path, seat: Seat) -> dict[str, Any]:
    """What `write` has written. Raises UserError where it is not there, not this replica's, or without rounds."""
    state = _stored(folder)
    if "replica" not in state:
        raise UserError(
            f"{folder} holds no rounds: it was cut off while it was saved, or is of training without farflung, or lies "
            "elsewhere than where this replica saves; begin anew with its weights, or resume another checkpoint"
        )
    refuse_other_seat(seat, state, str(folder))
    if "outer" not in state:
        raise UserError(
            f"{folder} holds only the model, since it was saved with save_only_model; nothing can go on from it: "
            "begin anew with its weights"
        )
    return state


def step_of(folder: Path) -> int | None:
    """The step of a checkpoint's folder that is whole."""
    if fault := _fault(folder):
        warnings.warn(f"{folder} is left out: {fault}", stacklevel=2)
        return None
    return int(_stored(folder).get("step", 0))


def _stored(folder: Path) -> dict[str, Any]:
    """The file of rounds in a folder; nothing where there is none, or one that farflung has not written."""
    try:
        return cast(dict[str, Any], checkpoint.read(path)) if (path := folder / ROUNDS).exists() else {}
    except (KeyError, TypeError, AttributeError):
        return {}


def set_aside_what_not_all_have(folder: Path, seat: Seat) -> None:
    """Renames checkpoints that are not whole on every replica, and later than those that are; all call this alike.

    So the trainer finds the same last checkpoint on all, whenever the processes were killed.
    """
    found = {int(path.name.partition("-")[2]): path for path in folder.glob("checkpoint-*") if _numbered(path)}
    of_rounds = any((path / ROUNDS).exists() for path in found.values())
    faults = {step: _fault(path) for step, path in found.items() if of_rounds or _cut(path)}
    whole = [step for step in found if step in faults and not faults[step]]
    others = {_stored(found[step]).get("replicas", seat.replicas) for step in whole} - {seat.replicas}
    if others:
        warnings.warn(f"{folder} is of {min(others)} replicas, and there are {seat.replicas}", stacklevel=2)
    said = seat.told("checkpoints", {"whole": whole, "rounds": of_rounds, "other": bool(others)})
    if any(one["other"] for one in said.values()) or not any(one["rounds"] for one in said.values()):
        return
    common = set.intersection(*(set(one["whole"]) for one in said.values()))
    for step in sorted(faults):
        if step > max(common, default=-1):
            _set_aside(found[step], faults[step] or "other replicas have not saved it whole")


def _numbered(path: Path) -> bool:
    return path.is_dir() and bool(re.fullmatch(r"checkpoint-\d+", path.name))


def _cut(folder: Path) -> bool:
    """Whether a trainer was killed before its last file of a checkpoint."""
    return not (folder / "trainer_state.json").exists()


def _fault(folder: Path) -> str:
    """Why a checkpoint of a run with rounds is not whole, or ""."""
    if not (folder / ROUNDS).exists():
        return "it was cut off while it was saved"
    try:
        sizes = _stored(folder).get("files", {})
    except UserError as error:
        return str(error)
    for name, size in sizes.items():
        file = folder / name
        if not file.exists() or file.stat().st_size != size:
            return f"its {name} is {'damaged' if file.exists() else 'missing'}"
    return ""


def _set_aside(path: Path, why: str) -> None:
    aside = path.with_name(f"unfinished-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    warnings.warn(f"{path} is set aside as {aside.name}: {why}", stacklevel=2)
