"""A shell completes commands, flags and the values of flags."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from patience import patience

from farflung.cli import COMMANDS, completion


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    command = [sys.executable, "-m", "farflung", "completion", "bash"]
    path = tmp_path_factory.mktemp("completion") / "farflung"
    path.write_text(subprocess.run(command, check=True, capture_output=True, text=True, timeout=patience(60)).stdout)
    return path


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        (["stat"], ["status"]),
        (["train", "--max-"], ["--max-hours", "--max-tokens"]),
        (["train", "--merge", "m"], ["mixed"]),
        (["join", "--restarts", "2", "--gate"], ["--gateway"]),
        (["report", "--sm"], ["--small"]),
        (["mixture", "ev"], ["evaluate"]),
        (["mixture", "split", "--router-"], ["--router-sequences"]),
    ],
    ids=" ".join,
)
def test_bash_completes(script: Path, typed: list[str], completed: list[str]) -> None:
    words = ["farflung", *typed]
    lines = [
        f"source {shlex.quote(str(script))}",
        f"COMP_WORDS=({shlex.join(words)}) COMP_CWORD={len(typed)}",
        f"$(complete -p farflung | sed 's/.*-F \\([^ ]*\\).*/\\1/') farflung {shlex.quote(words[-1])} {words[-2]}",
        'printf "%s\\n" "${COMPREPLY[@]}"',
    ]
    done = subprocess.run(
        ["bash", "--norc", "-c", "\n".join(lines)], capture_output=True, text=True, timeout=patience(60)
    )
    assert sorted(map(str.strip, done.stdout.split())) == completed, done.stderr


def test_each_command_is_completed() -> None:
    assert list(completion.options_of_commands()) == list(COMMANDS)
