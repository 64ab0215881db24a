"""Which of an island's processes is blamed, by what each has left for its launcher."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from farflung.networks import PeerLostError
from farflung.pipeline import Mesh
from farflung.training.failures import OneLine, failure_of

GRACE_S = 30
"""How long torch's launcher waits, after a process has failed, until it kills the others."""


@pytest.mark.parametrize(
    ("seconds_later", "blamed"),
    [
        (GRACE_S, "stage 0 of replica 0 failed: PeerLostError: no word within 20 s from one of: stage 1"),
        (1, "stage 1 of replica 0 failed: it died of signal 9"),
        (-1, "stage 1 of replica 0 failed: it died of signal 9"),
    ],
    ids=["the launcher has killed it", "a death that the launcher saw late", "a death"],
)
def test_who_is_killed_for_not_ending_is_not_the_cause(
    seconds_later: int, blamed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    OneLine().record_exception(PeerLostError([0], "no word within 20 s from one of: stage 1 of replica 0"))
    told = ProcessFailure(local_rank=0, pid=100, exitcode=1, error_file=str(tmp_path / "error.json"))
    killed = ProcessFailure(local_rank=1, pid=101, exitcode=-signal.SIGKILL, error_file=str(tmp_path / "none.json"))
    killed.timestamp = told.timestamp + seconds_later
    error = ChildFailedError("farflung", {0: told, 1: killed})
    assert str(failure_of(error, tmp_path, Mesh.alike(1, stages=2))).startswith(blamed)


def test_what_a_failed_process_has_printed_lies_under_a_name_that_one_can_type(tmp_path: Path) -> None:
    (parts := tmp_path / "logs" / "tmp1a" / "x_9" / "attempt_0" / "0").mkdir(parents=True)
    (parts / "stderr.log").write_text("out of memory")
    failure = ProcessFailure(0, 1, -9, str(parts / "error.json"))
    told = str(failure_of(ChildFailedError("run", {0: failure}), tmp_path, Mesh.alike(1)))
    assert told.endswith(f"its output lies in {tmp_path}/logs/replica-0.log")
    assert (tmp_path / "logs" / "replica-0.log").read_text() == "out of memory"
