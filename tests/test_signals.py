"""Ctrl-C and SIGTERM, at every instant of a command: it ends in one line, without a traceback and with its code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import SLOWER, patience, until
from processes import SMALL
from swarm import SETTINGS, Swarm
from warm import Python

INSTANTS = (0.1, 1.5, 3, 5, 8)
"""Seconds after a command begins, on an idle machine: while it imports, prepares, starts processes, and trains.

One signal comes at every other of them, the other at the rest.
"""
LOCAL = ("--listen", "127.0.0.1")
RUN = [*SMALL, "--steps", 100_000, "--out", "{out}"]
COMMANDS = {
    "simulated": ["train", *RUN, "--replicas", 2, "--network", "simulated"],
    "processes": ["train", *RUN, "--replicas", 2],
    "independent": ["train", *RUN, "--replicas", 2, "--independent"],
    "first peer": ["invite", "--name", "other", "--train", *RUN, *LOCAL],
    "bootstrap": ["invite", "--name", "other", *LOCAL],
    "join": ["join", "run.ticket", "--out", "{out}", *LOCAL],
    "island": ["join", "run.ticket", "--stages", 2, "--batch-size", 4, "--out", "{out}", *LOCAL],
    "status": ["status", "run.ticket", *LOCAL],
    "doctor": ["doctor", "run.ticket", *LOCAL],
}


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """A run that peers can join."""
    made = Swarm(tmp_path_factory.mktemp("swarm"))
    made.start("invite", "--name", "test", "--ticket", "run.ticket", *SETTINGS, "--steps", 100_000, log="bootstrap")
    until(lambda: (made.folder / "run.ticket").exists())
    yield made
    for process in made.processes:
        process.kill()


def read_until(fd: int, ends: float) -> bytes:
    """What comes until the other side closes, or a moment."""
    said = b""
    os.set_blocking(fd, False)
    while time.monotonic() < ends:
        try:
            content = os.read(fd, 1 << 16)
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:  # a terminal without processes
            break
        else:
            if not content:
                break
            said += content
    return said


def hears(pid: int) -> bool:
    """Whether a process, or one that it has started, has got past Python's own start, and hears signals."""
    try:
        caught = re.search(r"SigCgt:\t(\w+)", Path(f"/proc/{pid}/status").read_text())
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return False
    assert caught
    return bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1) or any(hears(int(child)) for child in children)


def stopped(command: list[str], folder: Path, seconds: float, terminal: bool) -> tuple[str, str, int]:
    """What a command says before it is stopped after some seconds, and after that; and its exit code."""
    ours, theirs = pty.openpty() if terminal else os.pipe()
    streams = {"stdin": theirs if terminal else subprocess.DEVNULL, "stdout": theirs, "stderr": theirs}
    words = [sys.executable, "-m", "farflung", *command]
    if terminal:  # its own, so that a Ctrl-C goes to all of its processes
        words = ["setsid", "--ctty", "--wait", *words]
    process = subprocess.Popen(words, cwd=folder, start_new_session=True, **streams)  # type: ignore[call-overload]
    os.close(theirs)
    until(lambda: hears(process.pid))
    before = read_until(ours, time.monotonic() + seconds)
    if terminal:
        os.write(ours, b"\x03")
    else:
        process.send_signal(signal.SIGTERM)
    try:
        after = read_until(ours, time.monotonic() + patience(60))
        return plain(before), plain(after).replace("^C", ""), process.wait(patience(60))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        os.close(ours)


def plain(said: bytes) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", said.decode(errors="replace"))


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [True, False], ids=["Ctrl-C", "SIGTERM"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_ends_in_one_line_at_every_instant(swarm: Swarm, tmp_path: Path, name: str, terminal: bool) -> None:
    for number, instant in enumerate(INSTANTS[::2] if terminal else INSTANTS[1::2]):
        command = [str(word).replace("{out}", str(tmp_path / str(number))) for word in COMMANDS[name]]
        before, after, code = stopped(command, swarm.folder, instant * float(os.environ[SLOWER]), terminal)
        told = (instant, code, before, after)
        assert not re.search('Traceback|Error|Exception|File "', after) and "Traceback" not in before, told
        if code == 130:
            ends = [line for line in after.splitlines() if line.startswith("farflung: ") and "stopped" in line]
            assert len(ends) == 1, told
        elif name == "doctor":  # it had ended, perhaps with a finding
            assert code in (0, 1) and not after, told
        else:  # what serves until it is stopped
            assert code == 0 and name in ("bootstrap", "status"), told


@pytest.mark.slow
def test_a_run_that_has_just_ended_waits_for_nobody_when_it_is_stopped(tmp_path: Path) -> None:
    arguments = ["train", *SMALL, "--steps", 5, "--replicas", 1, "--method", "local", "--deadline", 600]
    arguments += ["--out", tmp_path / "run"]
    process = Python("-m", "farflung", *arguments, cwd=tmp_path)
    until(lambda: any(b'"event": "end"' in path.read_bytes() for path in (tmp_path / "run").glob("events/*")))
    process.send_signal(signal.SIGTERM)  # its processes are about to write the results
    said, told = process.communicate(timeout=patience(60))
    assert process.returncode in (0, 130) and "Traceback" not in said + told, told
    assert (tmp_path / "run" / "summary.json").exists()


SWALLOWED = """
import sys, time
from farflung import cli
def run():
    try:
        print("begun", flush=True)
        time.sleep(600)
    except:  # as some modules do while they are imported
        time.sleep(600)
cli._run = run
cli.main()
"""


def test_what_swallows_an_interrupt_keeps_no_process_of_a_launcher() -> None:
    environment = {**os.environ, "FARFLUNG_STARTED_HERE": str(os.getpid())}
    process = subprocess.Popen([sys.executable, "-c", SWALLOWED], stdout=subprocess.PIPE, env=environment)
    assert process.stdout and process.stdout.readline() == b"begun\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(patience(20)) == 130
    process.stdout.close()


def test_a_ctrl_c_reaches_no_daemon_that_is_needed_to_leave() -> None:
    """It goes to all processes of a terminal's session."""
    from farflung.networks.internet.contact.background import Background

    async def session() -> int:
        process = await asyncio.create_subprocess_exec("sleep", "60")
        try:
            return os.getsid(process.pid)
        finally:
            process.kill()

    background = Background(print)
    background.start()
    assert background.run(session(), patience(20)) != os.getsid(0)
    background.end(asyncio.sleep(0))
