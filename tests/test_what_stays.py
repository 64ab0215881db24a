"""Files of a run that cannot be removed: here folders, which somebody has put where farflung's files would be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from problem import inner_steps, small_model
from processes import saved, simulated_run

from farflung import RunFolder, methods
from farflung.errors import UserError
from farflung.events import WarningEvent
from farflung.networks import SimulatedNetwork
from farflung.report import read_run
from farflung.training import checkpoint

OLD = "cannot remove {}: Is a directory, of an old checkpoint; move it elsewhere, or remove it"


def warnings_in(folder: Path) -> list[str]:
    run = read_run(folder)
    return [event.message for replica in run.replicas for event in run.of(replica, WarningEvent)]


def blocked(path: Path) -> Path:
    """A folder in the place of a file, if there is one."""
    path.unlink(missing_ok=True)
    (path / "notes").mkdir(parents=True)
    return path


def test_an_old_checkpoint_that_stays_is_told_once_and_training_goes_on(tmp_path: Path) -> None:
    simulated_run(tmp_path, steps=4, checkpoint_every=2)
    stays = blocked(checkpoint.path_of(tmp_path, 2, "replica-0"))
    simulated_run(tmp_path, resume=True, steps=10, checkpoint_every=2)
    assert saved(tmp_path, 10, 0)["outer"]["step"] == 10
    assert warnings_in(tmp_path) == [OLD.format(stays)]
    assert (stays / "notes").is_dir() and not checkpoint.path_of(tmp_path, 2, "replica-1").exists()


def test_a_later_checkpoint_that_stays_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    simulated_run(tmp_path, steps=4, checkpoint_every=2)
    stays = blocked(checkpoint.path_of(tmp_path, 4, "replica-0"))
    told = f"cannot remove {stays}: Is a directory, of a later checkpoint than that of step 2; move it elsewhere"
    with pytest.raises(UserError, match=f"^{told}, or remove it, and start again$"):
        simulated_run(tmp_path, resume=True, steps=6, checkpoint_every=2)


@pytest.mark.parametrize("name", ["checkpoints/averaged.pt", "summary.json"])
def test_results_that_stay_are_refused_before_anything_is_trained(tmp_path: Path, name: str) -> None:
    simulated_run(tmp_path, steps=4)
    stays = blocked(tmp_path / name)
    told = f"cannot remove {stays}: Is a directory; move it elsewhere, or remove it, and start again"
    with pytest.raises(UserError, match=f"^{told}$"):
        simulated_run(tmp_path, resume=True, steps=6)


def test_a_loop_of_one_s_own_goes_on_too(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = methods.diloco(every=2).attach(model, optimizer, SimulatedNetwork.alone())
    with RunFolder(tmp_path, keep=1) as run, outer:
        run.begin(outer)
        stays = blocked(checkpoint.path_of(tmp_path, 0, "replica-0"))
        for step in range(6):
            inner_steps(model, optimizer, 0, range(step, step + 1))
            run.save()
    assert checkpoint.steps_of(tmp_path, 0) == {6}
    assert warnings_in(tmp_path) == [OLD.format(stays)]
