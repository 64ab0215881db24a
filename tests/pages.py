"""The blocks of a page of the documentation, and how they are run, in order and in one folder.

A comment before a block says how, where it is not simply run:

- `<!-- not run: WHY -->`;
- `<!-- file: NAME -->`: it is written there;
- `<!-- with: NAME … -->`: readers have these of their own, so they are made first (see own_files);
- `<!-- run small: FLAGS -->`: runs that it begins get the flags of a run of seconds, and these; runs that it goes on
  with, and mixtures, get these alone;
- `<!-- run until: TEXT -->`: each line goes on until Ctrl-C, which comes once it has said this;
- `<!-- run as peers: FLAGS -->`: its peers run at the same time, as in terminals of their own, with these flags where
  a run begins, until each has held a round; its other lines are run then.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from own_files import MAKERS
from patience import patience, until
from processes import PACE, SMALL
from warm import Python

BLOCK = re.compile(r"((?:^<!-- .+? -->\n+)*)^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- (not run|file|with|run small|run until|run as peers):? ?(.*?) ?-->")
SMALL_OF = {
    "clicks": ["--max-clicks", "2000", "--batch-size", "32", "--replicas", "2"],
    "graph": ["--super-nodes", "20", "--hidden", "8"],
    "images": ["--width", "8", "--batch-size", "4", "--eval-pictures", "8", "--drawn-pictures", "8", "--replicas", "2"],
}
"""A small run of each workload but language."""


@dataclass(frozen=True)
class Block:
    """A block of code, with what the comments before it say."""

    language: str
    text: str
    marks: dict[str, str]

    @property
    def lines(self) -> list[str]:
        """The lines of a shell, each whole."""
        return [line for line in self.text.replace("\\\n", " ").splitlines() if line.strip()]


def blocks_of(page: Path) -> list[Block]:
    found = BLOCK.findall(page.read_text("utf-8"))
    return [Block(language, text, dict(MARK.findall(before))) for before, language, text in found]


def write(block: Block, folder: Path) -> bool:
    """Writes a block where it is a file; whether it is."""
    if name := block.marks.get("file"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(block.text)
    return bool(name)


def run_shell(block: Block) -> None:
    """A block of a shell's lines."""
    if "run as peers" in block.marks:
        run_as_peers(block.lines, block.marks["run as peers"])
        return
    for line in block.lines:
        if "run small" in block.marks:
            line = smaller(line, block.marks["run small"])
        if "run until" in block.marks:
            run_until(line, block.marks["run until"])
        else:
            run_line(line)


def make_own(names: str) -> None:
    """What readers have of their own, unless a block before has made it."""
    for path in map(Path, names.split()):
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            MAKERS[str(path)](path)


def smaller(line: str, flags: str = "") -> str:
    """A line with the flags of a run of seconds, where it begins one."""
    words = shlex.split(line, comments=True)
    if not {"train", "invite", "split", "evaluate"} & set(words):
        return line
    small = [] if {"--resume", "mixture"} & set(words) else small_flags(words)
    return f"{line.partition(' #')[0]} {shlex.join(small)} {flags}"


def small_flags(words: list[str]) -> list[str]:
    """The flags of a run of seconds, for a command that begins one."""
    workload = words[words.index("--workload") + 1] if "--workload" in words else "language"
    if "farflung.mixtures.pictures" in workload:
        workload = "images"
    length = [] if "--rounds" in words else ["--steps", "20"]
    return [*([*SMALL_OF[workload], *PACE] if workload in SMALL_OF else SMALL), *length]


def run_line(line: str) -> None:
    """A line as a shell would run it; farflung alone as a fork of a process that has imported it."""
    words = shlex.split(line, comments=True)
    if words[:1] == ["farflung"] and not set("$|&;<>") & set(line):
        process = Python("-m", *words)
        out, errors = process.communicate(timeout=patience(120))
        assert process.wait() == 0, f"{line}\n{out}\n{errors}"
    else:
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=patience(120))
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


def run_until(line: str, text: str) -> None:
    """A line that goes on until Ctrl-C."""
    process = Python("-m", *shlex.split(line, comments=True))
    try:
        until(lambda: process.poll() is not None or text in process.out.read_text() + process.err.read_text())
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=patience(60))
        assert process.wait() in (0, 130) and text in out + errors, f"{line}\n{out}\n{errors}"
    finally:
        process.kill()


def run_as_peers(lines: list[str], flags: str) -> None:
    """Lines that begin and join a run of peers, each a process of its own, and look at it; Ctrl-C ends them."""
    pytest.importorskip("hivemind")
    peers: list[Python] = []
    before, flags = have_met(), os.path.expandvars(flags)

    def wait(holds: Callable[[], bool]) -> None:
        until(lambda: any(peer.poll() is not None for peer in peers) or holds(), 120)
        for peer in peers:
            assert peer.poll() is None, f"{peer.args}\n{peer.err.read_text()}"

    try:
        for line in lines:
            words = shlex.split(line, comments=True)
            if "join" in words:
                wait(Path(words[words.index("join") + 1]).exists)
                peers.append(Python("-m", *words, "--max-tokens", "100000"))
            elif "invite" in words:
                words = [*shlex.split(smaller(line, flags), comments=True), "--steps", "1000000"]
                if "--train" in words:
                    peers.append(Python("-m", *words))
                else:
                    run_line(shlex.join(words))
        wait(lambda: len(have_met() - before) >= len(peers))
        for line in lines:
            command = {*shlex.split(line, comments=True)} & {"invite", "join", "status"}
            if not command - {"status"}:
                run_line(f"{line.partition(' #')[0]} --once" if command else line)
        for peer in peers:
            peer.send_signal(signal.SIGINT)
        for peer in peers:
            _, errors = peer.communicate(timeout=patience(60))
            assert peer.wait() == 130, errors
    finally:
        for peer in peers:
            peer.kill()


def have_met() -> set[Path]:
    """The run folders whose replicas have averaged with others."""
    events = Path("runs").glob("*/events/*.jsonl")
    return {path.parents[1] for path in events if '"averaged"' in path.read_text()}
