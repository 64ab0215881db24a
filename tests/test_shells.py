"""Runs that a user's shell has started go on when the shell has ended, and the terminal is gone."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import patience, until
from processes import SMALL, free_port
from swarm import Swarm

SIMULATED = [*SMALL, "--replicas", 2, "--steps", 200, "--network", "simulated", "--out", "run"]
BY_HAND = [*SMALL, "--steps", 200, "--out", "run"]
WITHOUT_LAUNCHER = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Orphans become children of this process, so that it learns how they end."""
    prctl, pr_set_child_subreaper = ctypes.CDLL(None).prctl, 36
    prctl(pr_set_child_subreaper, 1)
    try:
        yield
    finally:
        prctl(pr_set_child_subreaper, 0)


class Shell:
    """A login shell in a terminal of its own."""

    def __init__(self, folder: Path) -> None:
        self.pid, self._terminal = pty.fork()
        if not self.pid:
            os.chdir(folder)
            os.execvp("bash", ["bash", "--norc", "-i"])
        os.set_blocking(self._terminal, False)

    def type(self, line: str) -> None:
        os.write(self._terminal, f"{line}\n".encode())

    def until(self, holds: Callable[[], Any]) -> None:
        """Waits until something holds, and shows what comes meanwhile: a terminal that does not stops who writes."""

        def held() -> bool:
            with contextlib.suppress(OSError):  # there is nothing to read, or nobody left to write
                os.read(self._terminal, 1 << 16)
            return bool(holds())

        until(held)

    def exit(self) -> None:
        """As a user does; then the terminal's window closes."""
        self.type("exit")
        self.until(lambda: os.waitpid(self.pid, os.WNOHANG)[0] == self.pid)
        os.close(self._terminal)


def line(how: str, *arguments: object, **variables: object) -> str:
    """What a user types to start a command in the background; its process tells its id."""
    variables_and_how = [*(f"{name}={value}" for name, value in variables.items()), how]
    command = shlex.join(map(str, (sys.executable, "-m", "farflung", *arguments)))
    return f"{' '.join(variables_and_how)} bash -c 'echo $$ >> pids; exec {command}' &"


@pytest.mark.slow
@pytest.mark.parametrize(("what", "how"), [("simulated", "nohup"), ("without a launcher", "setsid"), ("peer", "nohup")])
def test_a_run_outlives_the_shell_that_has_started_it(tmp_path: Path, what: str, how: str) -> None:
    swarm = Swarm(tmp_path)
    commands = [line(how, "train", *SIMULATED)]
    if what == "without a launcher":
        where = {**WITHOUT_LAUNCHER, "MASTER_PORT": free_port()}
        commands = [line(how, "train", *BY_HAND, RANK=rank, LOCAL_RANK=rank, **where) for rank in (0, 1)]
    if what == "peer":
        settings = [word for word in SMALL if not str(word).startswith("--max-tokens") and word != "100000"]
        arguments = ("invite", "--name", "test", "--ticket", "run.ticket", "--port", swarm.port, *settings)
        swarm.start(*arguments, "--steps", 200, log="bootstrap")
        until(lambda: (tmp_path / "run.ticket").exists())
        commands = [line(how, "join", "run.ticket", "--out", "run", "--listen", "127.0.0.1")]
    with adopting():
        shell = Shell(tmp_path)
        for command in commands:
            shell.type(command)
        shell.until(lambda: list(tmp_path.glob("run/checkpoints/step-*")))
        shell.exit()
        codes = [os.waitpid(int(pid), 0)[1] for pid in (tmp_path / "pids").read_text().split()]
    for process in swarm.processes:
        process.kill()
    said = (tmp_path / "nohup.out").read_text() if how == "nohup" else ""
    assert (tmp_path / "run" / "summary.json").exists(), said
    assert codes == [0] * len(commands) and "Traceback" not in said, (codes, said)


LAUNCHER = """
import os, subprocess, sys
from farflung.training.terminal import STARTED_HERE, say, share_terminal
share_terminal()
say("the launcher starts")
part = "from farflung.training.terminal import say; say('a process of it speaks, through its launcher')"
environment = {**os.environ, STARTED_HERE: str(os.getpid())}
subprocess.run([sys.executable, "-c", part], env=environment, stderr=subprocess.DEVNULL)
say("the launcher ends")
"""


ENDS_WHILE_IT_STARTS_ANOTHER = """
import os, sys
from pathlib import Path
from farflung.training.forks import PROCESSES, run_module
from farflung.training.terminal import STARTED_HERE
log, port, *arguments = sys.argv[1:]
environment = {**os.environ, STARTED_HERE: str(os.getpid()), "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1",
               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
process = PROCESSES.Process(target=run_module, args=(environment, ["farflung", "train", *arguments], Path(log)))
process.start()
print(process.pid, flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_a_process_that_its_launcher_has_lost_while_it_started_it_does_not_wait_for_the_others(tmp_path: Path) -> None:
    log = tmp_path / "log"
    arguments = (str(log), str(free_port()), *map(str, SMALL), "--steps", "20", "--out", str(tmp_path / "run"))
    launcher = [sys.executable, "-c", ENDS_WHILE_IT_STARTS_ANOTHER, *arguments]
    told = subprocess.run(launcher, stdout=subprocess.PIPE, text=True, check=True, timeout=patience(60)).stdout
    until(lambda: not Path(f"/proc/{int(told)}").exists())
    assert log.read_text() == "farflung: stopped\n"


@pytest.mark.parametrize("mode", ["w", "a"])
def test_processes_overwrite_nothing_that_their_launcher_says_in_a_file_nor_it_their_words(
    mode: str, tmp_path: Path
) -> None:
    with (tmp_path / "log").open(mode) as log:
        subprocess.run([sys.executable, "-c", LAUNCHER], stderr=log, check=True, timeout=patience(60))
    words = ["the launcher starts", "a process of it speaks, through its launcher", "the launcher ends"]
    assert (tmp_path / "log").read_text().splitlines() == [f"farflung: {line}" for line in words]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd")
def test_systemd_has_nothing_to_say_against_the_unit_of_the_docs(tmp_path: Path) -> None:
    text = (Path(__file__).parent.parent / "docs" / "how-to" / "service.md").read_text()
    (unit,) = re.findall(r"```ini\n(.*?)```", text, re.DOTALL)
    (command,) = re.findall(r"^ExecStart=(\S+)", unit, re.MULTILINE)
    (path := tmp_path / "stories.service").write_text(unit.replace(command, sys.executable))
    told = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, timeout=patience(60))
    assert told.returncode == 0 and "stories" not in told.stderr, told.stderr
