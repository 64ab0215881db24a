"""Files of checkpoints that lie in a place that is not theirs: they are whole, and yet nothing goes on from them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from processes import simulated_run

from farflung.errors import UserError
from farflung.training import checkpoint


def test_a_file_of_another_replica_or_step_is_named(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"method": "gasloc", "every": 3, "steps": 4, "checkpoint_every": 2}
    simulated_run(tmp_path, **settings)
    place = checkpoint.path_of(tmp_path, 4, "replica-1")
    for step, replica in ((4, 0), (2, 1)):
        shutil.copy(checkpoint.path_of(tmp_path, step, f"replica-{replica}"), place)
        with pytest.raises(UserError) as error:
            simulated_run(tmp_path, resume=True, **settings)
        assert str(error.value) == (
            f"{place} is of replica {replica} at step {step}; copy replica 1's own file of step 4 there, or remove it "
            "to use what is older"
        )
