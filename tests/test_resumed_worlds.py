"""Simulated runs that go on while somebody is cut off or dead: they end as those that were never interrupted."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from processes import same, saved, simulated_run

STEPS, EVERY = 18, 3
CUT = "[[cuts]]\nreplicas = [2]\nfrom_s = 0.5\nuntil_s = 1.0\n"
DEATH = "[[deaths]]\nreplica = 1\nat_s = 1.05\n"


def gone_on(run: Path, to: Path, step: int, **settings: Any) -> None:
    """A copy of a run that goes on from one of its checkpoints."""
    shutil.copytree(run, to)
    for path in to.glob("checkpoints/step-*"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)
    (to / "summary.json").unlink()
    simulated_run(to, resume=True, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "world", "step"),
    [
        pytest.param("dilocox", CUT, 5, id="adapting, cut off"),
        pytest.param("dilocox", DEATH, 12, id="adapting, dead"),
        pytest.param("ist", DEATH, 12, id="dealing, dead"),
    ],
)
def test_who_was_there_at_the_beginning_counts_as_before(method: str, world: str, step: int, tmp_path: Path) -> None:
    """Only means of all that began adapt the steps between rounds, and units are dealt to so many."""
    (tmp_path / "world.toml").write_text(world)
    settings = {"replicas": 4, "steps": STEPS, "every": EVERY, "checkpoint_every": 1, "keep_checkpoints": STEPS}
    settings |= {"method": method, "conditions": str(tmp_path / "world.toml")}
    simulated_run(tmp_path / "one", **settings)
    gone_on(tmp_path / "one", tmp_path / "other", step, **settings)
    for replica in (0, 2, 3):
        one, other = (saved(tmp_path / name, STEPS, replica) for name in ("one", "other"))
        assert same(one["model"], other["model"])
        paces = [[fragment["adaptation"] for fragment in state["outer"]["fragments"]] for state in (one, other)]
        assert paces[0] == paces[1]
