"""A run's processes start as forks wherever a user is, and whatever lies there; nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from patience import patience, until

PROGRAM = """
import os, signal, sys
from farflung.training.forks import import_ahead, none_left, run_module, starting
context = import_ahead(sys.argv[2:])
if sys.argv[1] == "killed at once":
    os.kill(os.getpid(), signal.SIGKILL)
with none_left(5):
    lock = context.Lock()
    process = context.Process(target=run_module, args=(dict(os.environ), ["a_part"]))
    if sys.argv[1] == "interrupted":  # before the fork is there, which then does not find the lock
        process.lock = lock
        signal.signal(signal.SIGALRM, lambda *_: sys.exit("interrupted"))
        signal.setitimer(signal.ITIMER_REAL, 0.5)
    with starting():
        process.start()
    process.join()
    print("it ended with", process.exitcode, flush=True)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""
"""A user's own, which does nothing about being imported by the processes that it starts."""

A_PART = """
import os, sys
names = ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONWARNINGS", "PYTORCH_NVML_BASED_CUDA_CHECK", "FARFLUNG_IMPORTS_AHEAD")
print("imported ahead:", "ahead" in sys.modules, "set:", [name for name in names if name in os.environ], flush=True)
"""

SLOW = "import time; time.sleep(2)"
DEADLY = "import os; os._exit(1)"
TRAP = "raise RuntimeError('a file that only has the name of a module')"


def program(folder: Path, *arguments: str, where: str = "here", **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs it with modules of its own beside it, from where files have names of modules, or else from beside it."""
    (own := folder / "own").mkdir()
    (here := folder / "here").mkdir()
    modules = {"a_part": A_PART, "broken": TRAP, "ahead": "", "deadly": DEADLY, "slow": SLOW}
    for name, text in {"program": PROGRAM, **modules}.items():
        (own / f"{name}.py").write_text(text)
    for name in ("signal", "tokenize", "transformers", "ahead"):
        (here / f"{name}.py").write_text(TRAP)
    unset = {"PYTHONPATH", "PYTHONSAFEPATH", "PYTHONWARNINGS", "PYTORCH_NVML_BASED_CUDA_CHECK"}
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    # As an installed one, farflung is found from everywhere.
    (own / "farflung").symlink_to(Path(__file__).parent.parent / "farflung")
    return subprocess.run(
        [sys.executable, own / "program.py", *arguments],
        cwd=folder / where,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=patience(60),
    )


def test_processes_import_what_their_program_would_and_not_the_program_itself(tmp_path: Path) -> None:
    ended = program(tmp_path, "", "broken", "ahead")
    assert (ended.stdout, ended.stderr) == ("imported ahead: True set: []\nit ended with 0\n", "")


def test_processes_start_where_no_socket_can_be(tmp_path: Path) -> None:
    (far := tmp_path / ("a" * 120)).mkdir()
    ended = program(tmp_path, "", "ahead", where="own", TMPDIR=str(far))
    assert (ended.stdout, ended.stderr) == ("imported ahead: False set: []\nit ended with 0\n", "")


def test_a_fork_that_comes_after_its_launcher_was_interrupted_says_nothing(tmp_path: Path) -> None:
    ended = program(tmp_path, "interrupted", "slow")
    assert (ended.stdout, ended.stderr) == ("", "interrupted\n")


@pytest.mark.parametrize("how", ["", "killed", "killed at once"])
def test_nothing_is_left_of_the_process_that_imports_ahead(how: str, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as place:  # for its socket, to which tmp_path may be too long a way
        ended = program(tmp_path, how, TMPDIR=place)
        assert ended.returncode == (-signal.SIGKILL if how else 0) and not ended.stderr
        until(lambda: not list(Path(place).iterdir()))


def test_a_system_that_lets_no_process_start_is_a_line(tmp_path: Path) -> None:
    ended = program(tmp_path, "", "deadly")
    *_, line = ended.stderr.splitlines()
    assert ended.returncode == 1 and line.startswith("farflung.errors.UserError: cannot start a run's processes: ")


def test_a_command_runs_with_all_streams_closed() -> None:
    command = f"'{sys.executable}' -m farflung --version <&- >&- 2>&-"
    assert subprocess.run(["bash", "-c", command], timeout=patience(60)).returncode == 0
