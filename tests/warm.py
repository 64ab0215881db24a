"""Python processes that start at once: forks of one that has imported what most of them need.

A fork has memory, files, threads and signals of its own, as a process that a user starts; only imports are shared.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path

from farflung.training.forks import PROCESSES, hear_signals, import_ahead

IMPORTED = (
    *("farflung.cli", "farflung.training.launch", "farflung.training.export", "farflung.report"),
    *("farflung.networks.internet", "transformers.models.llama.modeling_llama", "transformers.models.auto"),
    *("transformers.models.auto.modeling_auto", "transformers.generation", "torch._dynamo"),
)


class Python:
    """`python ARGUMENTS` with the interface of subprocess.Popen; what it says goes to the files `out` and `err`."""

    def __init__(
        self,
        *arguments: object,
        cwd: Path | None = None,
        out: Path | None = None,
        err: Path | None = None,
        **environment: str,
    ) -> None:
        self.args = [str(argument) for argument in arguments]
        self._files = [tempfile.NamedTemporaryFile("w+"), tempfile.NamedTemporaryFile("w+")]  # noqa: SIM115
        self.out, self.err = (Path(path or file.name) for path, file in zip((out, err), self._files, strict=True))
        self.out.touch()
        self.err.touch()
        where = os.fspath(cwd or Path.cwd())
        import_ahead(IMPORTED)
        self._process = PROCESSES.Process(
            target=_run, args=(self.args, where, str(self.out), str(self.err), {**os.environ, **environment})
        )
        self._process.start()
        self.pid = self._process.pid or 0
        _STARTED.append(self)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0, self.out.read_text(), self.err.read_text())
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return self.out.read_text(), self.err.read_text()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


_STARTED: list[Python] = []


def _kill_all() -> None:
    """A test that failed may have left some, and multiprocessing waits for them at the end."""
    for process in _STARTED:
        process.kill()


atexit.register(_kill_all)


def _nothing() -> None:
    """All is there."""


def _run(arguments: list[str], folder: str, out: str, err: str, environment: dict[str, str]) -> None:
    for path, stream in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    hear_signals()
    forkserver.ensure_running = _nothing  # what it starts are forks of the same process, whose address forks know
    forkserver._forkserver.ensure_running = _nothing
    option, *rest = arguments
    sys.argv = arguments
    if option == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif option == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(option, run_name="__main__")
