"""Replicas that are members of their own on this machine: when one dies it is started again, and the others go on.

Each is a `farflung join` over loopback, with a run folder of its own below the run's: `replica-0`, `replica-1`, …
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from farflung.errors import UserError, disk_errors
from farflung.files import write_text
from farflung.networks.peers.ticket import Ticket, read_ticket
from farflung.networks.settings import NetworkSettings
from farflung.settings import RunSettings, Settings
from farflung.signals import on_stop_signals
from farflung.training import beginning, checkpoint, launch, onlooker, peer
from farflung.training.cautions import cautions
from farflung.training.events import tell_death
from farflung.training.failures import RunFailedError, described_exit
from farflung.training.finish import finish_apart
from farflung.training.forks import BY_PEERS, import_ahead, none_left, run_module, starting
from farflung.training.stopping import StoppedError, seconds_here
from farflung.training.terminal import BEGIN_WITH, WATCHED_BY, say, share_terminal

JOIN = ("farflung", "join")
"""What a replica runs: a module, and the first of its arguments."""
LOOPBACK = "127.0.0.1"
POLL_SECONDS = 0.2
"""Seconds between two looks at the replicas."""
LINES_SHOWN = 3
"""The last lines of a replica's output that are shown when it dies."""


def prepare(settings: Settings, folder: Path, resume: bool, restart: bool = False) -> None:
    """Refuses settings that cannot work, and writes config.toml and the run's ticket. Raises UserError.

    To `restart` removes the run that is in the folder; the settings are found to be good before that.
    """
    shared = _shared(settings)
    onlooker.internet()  # or says at once that it is missing
    if resume or restart:
        beginning.refuse_while_trained(folder)
    else:
        beginning.refuse_occupied(folder)
    if restart:
        beginning.clear(folder)
    elif resume:
        beginning.refuse_other_replicas(settings, folder)
        beginning.refuse_edited(settings, folder)
        _let_go_on(settings.run.steps, folder)
    beginning.write_settings(settings, folder)
    path = folder / "run.ticket"
    ticket = read_ticket(path) if path.exists() else Ticket.new(folder.name, {})
    with disk_errors(f"write to {folder}", "choose another folder with --out"):
        dataclasses.replace(ticket, settings=shared).write(path)


def _let_go_on(steps: int, folder: Path) -> None:
    """Has replicas train on that have ended, where a run is to have more steps now."""
    for summary in folder.glob("replica-*/summary.json"):
        if json.loads(summary.read_text("utf-8"))["steps"] < steps:
            checkpoint.forget_results(summary.parent, summary.parent.name)


def _shared(settings: Settings) -> dict[str, object]:
    """The settings that the replicas' ticket holds. Raises UserError for what independent replicas cannot do."""
    if settings.network.kind.simulate:
        name = settings.network.network
        raise UserError(f"network is {name!r}, but independent replicas are real processes; leave out --independent")
    if settings.run.replicas == 1:
        raise UserError("replicas is 1, but a replica alone has no others that go on; leave out --independent")
    if settings.island.divided or settings.island.offload:
        raise UserError("an independent replica is one process; leave out --stages, --shard, --islands and --offload")
    usual = {"replicas": RunSettings.replicas, "restarts": NetworkSettings.restarts, "independent": False}
    shared = peer.shared_settings(settings.changed(**usual))
    shared |= {name: value for name, value in settings.changes().items() if name in peer.OF_A_MACHINE}
    launch.check_settings(settings.changed(network="internet"))
    for line in cautions(settings):
        say(line)
    return shared


class _Member:
    """One replica, from start to start, and what has come of it."""

    def __init__(self, run: Path, number: int, of: int) -> None:
        self.number, self._of = number, of
        self.folder = run / f"replica-{number}"
        self.ticket = self.folder / "run.ticket"
        self.log = run / "logs" / f"replica-{number}.log"
        self.deaths = 0
        self.given_up = False
        self.process: BaseProcess | None = None
        self._ticket_before = 0

    @property
    def finished(self) -> bool:
        """Whether it has come to the run's end, and its results are there."""
        results_there = (self.folder / "summary.json").exists() and checkpoint.averages(self.folder)
        return self.process is None and bool(results_there)

    @property
    def waits(self) -> bool:
        """Whether it is to be started."""
        return self.process is None and not (self.finished or self.given_up)

    @property
    def there(self) -> bool:
        """Whether it has joined, so that others can join by it: it then writes a ticket."""
        return self.process is not None and _written(self.ticket) != self._ticket_before

    def start(self, ticket: Path, first: bool, together: int) -> None:
        """Joins, and begins when so many have; or comes back after a death."""
        self._ticket_before = _written(self.ticket)
        where = [str(ticket), "--out", str(self.folder), "--listen", LOOPBACK]
        own = {"OMP_NUM_THREADS": launch.cores_for(self._of), "LOCAL_RANK": self.number, WATCHED_BY: os.getpid()}
        own |= {} if self.deaths else {BEGIN_WITH: together}
        environment = {**os.environ, **{name: str(value) for name, value in own.items()}}
        arguments = [*JOIN, *where, *(["--first"] if first else [])]
        # A session of its own: a Ctrl-C is for the launcher, which stops all.
        process = import_ahead(BY_PEERS).Process(target=run_module, args=(environment, arguments, self.log))
        with starting():
            process.start()
        self.process = process

    def ended(self) -> int | None:
        """The code with which its process has ended since it was last asked."""
        code = self.process.exitcode if self.process else None
        if code is not None:
            self.process = None
        return code

    def give_up(self) -> None:
        """Starts it no more."""
        self.given_up = True
        for path in self.folder.glob("events/*.jsonl"):
            tell_death(path)

    def last_lines(self) -> str:
        """The end of its output, a line each, set in."""
        lines = self.log.read_text("utf-8", errors="replace").splitlines()[-LINES_SHOWN:]
        return "".join(f"\n    {line}" for line in lines)


def launch_all(settings: Settings, folder: Path, resume: bool) -> None:
    """All replicas, until each has come to its end or died too often; then the results of those that have ended.

    Raises StoppedError, UserError, RunFailedError and NoRoomError.
    """
    share_terminal()
    count = settings.run.replicas
    members = [_Member(folder, number, count) for number in range(count)]
    ticket, asked = folder / "run.ticket", threading.Event()
    together = sum(member.waits for member in members)
    with on_stop_signals(lambda *_: asked.set()), none_left(2 * settings.network.deadline):
        while any(member.waits or member.process for member in members):
            for member in members:
                if (code := member.ended()) is not None:
                    _after_the_end(member, code, members, settings.network.restarts)
            _keep_newest(ticket, members)
            for member, first in _to_start(members):
                member.start(ticket, first, together)
            if asked.wait(POLL_SECONDS):
                raise StoppedError("stopped by a signal")
            if (hours := settings.run.max_hours) and seconds_here() > 3600 * hours:
                raise StoppedError(f"stopped after {hours:g} hours")
    ended = {member.number: member.folder for member in members if member.finished}
    if not ended:
        raise RunFailedError(f"no replica has come to its end; their output lies in {folder}/logs")
    finish_apart(settings, folder, ended, launch.pick_device(settings.run.device, 0))


def _after_the_end(member: _Member, code: int, members: Sequence[_Member], restarts: int) -> None:
    """Takes note of a replica whose process has ended, and tells the user unless it has done its work."""
    if member.finished:
        return
    member.deaths += 1
    if member.deaths > restarts:
        member.give_up()
        what = "it has died too often, and the others go on without it"
    elif any(other.finished for other in members) and not any(other.process for other in members):
        member.give_up()
        what = "the others have come to the end without it"
    else:
        what = f"it is started again ({member.deaths} of {restarts})"
    say(f"replica {member.number}: {described_exit(code)}; {what}; see {member.log}, which ends:{member.last_lines()}")


def _to_start(members: Sequence[_Member]) -> list[tuple[_Member, bool]]:
    """The replicas to start now, and whether as the first, which calls nobody: where none is there or on its way."""
    waiting = [member for member in members if member.waits]
    if any(member.there for member in members):
        return [(member, False) for member in waiting]
    if any(member.process for member in members):
        return []
    return [(max(waiting, key=lambda member: checkpoint.whole_steps(member.folder)[:1]), True)] if waiting else []


def _keep_newest(ticket: Path, members: Sequence[_Member]) -> None:
    """Keeps the run's ticket such that it leads to those that are there."""
    newest = max((member.ticket for member in members if member.there), key=_written, default=ticket)
    if _written(newest) > _written(ticket):
        with contextlib.suppress(OSError):  # a full disk spoils no training
            write_text(ticket, newest.read_text("utf-8"), private=True)


def _written(path: Path) -> int:
    """When a file was written; 0 for one that is not there."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
