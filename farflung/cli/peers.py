"""farflung invite, join, status and doctor: runs on the internet."""

from __future__ import annotations

import functools
import os
import re
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import tyro

from farflung.cli import helping
from farflung.cli.arguments import FAILURE, flag, free_folder, given, kinds_among, parse, unset, with_field, without
from farflung.cli.results import tell_result
from farflung.cli.training import check_trackers, telling_how_to_go_on, tracking, watched
from farflung.errors import UserError, counted
from farflung.files import typed
from farflung.networks.listening import ListenAddress
from farflung.networks.peers.ticket import Ticket, is_folder, read_ticket
from farflung.settings import Settings
from farflung.signals import on_stop_signals
from farflung.tables import BETWEEN_PEERS
from farflung.training.forks import BY_PEERS, import_ahead
from farflung.training.terminal import STARTED_HERE, say
from farflung.workloads.registry import WORKLOADS

NOT_INVITED = (
    *("replicas", "shares", "network", "independent", "restarts", "conditions", "bandwidth_mbps", "latency_ms"),
    *("step_ms", "shard", "islands", "gateway", "offload", "routes", "observe", "observers"),
    *("core_only", "core_only_replicas"),
)
"""Settings that a run on the internet does not have, or that each peer gives to farflung join."""
OBSERVES = "--observe"
FIRST = ("model", "data", "method", "every", "steps", "batch_size", "lr", "robust", "listen", "port")
"""The settings that whoever begins a run on the internet asks for."""


@dataclass(frozen=True, kw_only=True)
class _Peer:
    """How others see this machine, and reach it."""

    called: Annotated[str, tyro.conf.arg(name="as")] = ""
    """What the others call this peer; else it has its machine's name."""
    local: tyro.conf.OmitArgPrefixes[ListenAddress] = field(default_factory=ListenAddress)

    def __post_init__(self) -> None:
        """Raises UserError."""
        if not re.fullmatch(r"[\w.-]{0,32}", self.called):
            raise UserError(f"as is {self.called!r}, but a name has up to 32 letters, digits, dots and dashes")


@dataclass(frozen=True)
class InviteOptions(_Peer):
    """Which run to start; most settings of farflung train can be given, too."""

    name: str
    """What the run is called."""
    train: bool = False
    """Train here as the first peer; else be a bootstrap node, which only helps peers find each other."""
    at: str = ""
    """A folder where the peers meet, as a URL (file, s3, sftp, webdav, …); without it they call each other."""
    ticket: Path | None = None
    """Where to write the ticket, readable by you alone; it is printed unless given."""
    key: Path | None = None
    """A bootstrap node's key file, made if there is none; with the same key, port and machine it keeps its address."""


@dataclass(frozen=True)
class JoinOptions(_Peer):
    """Which run to join."""

    ticket: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="TICKET")]
    """The ticket's file, or a run folder with one."""
    first: bool = False
    """If no other peer answers, start the run here, or go on from this peer's checkpoint."""


@dataclass(frozen=True)
class StatusOptions:
    """Which run to look at."""

    ticket: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="TICKET")]
    """The ticket's file, or the folder of a run on the internet."""
    once: bool = False
    """Show it once, instead of anew every few seconds."""
    local: tyro.conf.OmitArgPrefixes[ListenAddress] = field(default_factory=ListenAddress)
    """Where this machine listens. Needed only where a firewall lets just one interface or port through."""


@dataclass(frozen=True)
class DoctorOptions:
    """What to check."""

    ticket: tyro.conf.Positional[Path | None] = None
    """The ticket's file, or the folder of a run on the internet. Without it, the machine alone is checked."""
    local: tyro.conf.OmitArgPrefixes[ListenAddress] = field(default_factory=ListenAddress)
    """The same settings as for farflung join on this machine; doctor tries them."""


def invite(arguments: list[str]) -> None:
    """Start a run on the internet, or through a folder: write its ticket, and be its first peer or a bootstrap node."""
    settings = Settings.of(**kinds_among(arguments))
    if {*helping.ASKED} & {*arguments}:  # else each that is given is refused with a reason
        settings = Settings(**{name: without(table, NOT_INVITED) for name, table in vars(settings).items()})
    options: Any = parse(with_field(InviteOptions, "settings", settings), arguments, "invite", invite.__doc__, FIRST)
    refuse_several("start it without torchrun")
    if options.ticket:
        refuse_no_ticket(options.ticket)

    from farflung.training import onlooker, peer
    from farflung.training.cautions import cautions

    if not options.at:
        onlooker.internet()  # or says at once that it is missing
    ticket = _new_ticket(options, peer.shared_settings(options.settings))
    for line in cautions(peer.ticket_settings(ticket)):
        say(line)
    if options.train:
        folder = typed(Path(options.settings.run.out)) if options.settings.run.out else free_folder(options.name)
        run = options.settings.run
        own = {"track": run.track, "track_replicas": run.track_replicas, "max_hours": run.max_hours}
        settings = peer.ticket_settings(ticket).changed(out=str(folder), **own)
        _train(ticket, settings, options, True, lambda network: hand_out(network.invitation(), options.ticket))
        return
    node = onlooker.looking_on(ticket, options.local, options.key, options.called, bootstrap=True)
    with node as network, _until_stopped() as stopped:
        hand_out(network.invitation(), options.ticket)
        if options.at:
            return  # where peers find each other by themselves
        say(f"a bootstrap node of {options.name}; Ctrl-C ends it")
        while not stopped.wait(60):
            trains = [one for one in onlooker.seen(network) if one["state"] == "trains"]
            say(f"{counted(len(trains), 'peer')} in training")


def _new_ticket(options: InviteOptions, shared: dict[str, Any]) -> Ticket:
    """A ticket to a new run, which leads to a folder if one is given. Raises UserError."""
    from farflung.training import peer

    ticket = Ticket.new(options.name, shared)
    if options.at and not is_folder(options.at):
        where = f"file://{Path(options.at).absolute()}" if "/" in options.at else "s3://BUCKET/RUN"
        raise UserError(f"at is {options.at!r}, but a folder is given as a URL, such as {where}")
    if re.match(r"(file|local)://([^/]|$)", options.at or ""):
        where = f"file://{Path(options.at.partition('://')[2]).absolute()}"
        raise UserError(f"at is {options.at!r}, which is elsewhere for each peer; give the whole path, such as {where}")
    ticket = ticket.at((options.at,)) if options.at else ticket
    peer.ticket_settings(ticket)  # which refuses what peers there cannot do
    return ticket


def refuse_several(remedy: str) -> None:
    """Refuses to be a peer in each of several processes, which would share a run folder and a key. Raises UserError."""
    if (count := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise UserError(f"torchrun has started {count} processes, and this peer is one; {remedy}")


def refuse_no_ticket(path: Path) -> None:
    """Refuses to write a ticket in place of what is none, which would be lost. Raises UserError."""
    if path.is_file() and path.stat().st_size:
        try:
            read_ticket(path)
        except UserError as error:
            raise UserError(f"{path} exists, and is no ticket; give another place for the ticket") from error
    elif path.exists() and not path.is_file():
        raise UserError(f"{path} exists, and is no file; give another place for the ticket")


def hand_out(ticket: Any, path: Path | None) -> None:
    """Writes a ticket, or prints it. Raises UserError."""
    if path is None:
        print(ticket.text(), flush=True)
        where = os.fstat(sys.stdout.fileno())
        if stat.S_ISREG(where.st_mode) and where.st_mode & (stat.S_IRGRP | stat.S_IROTH):
            say("others on this machine can read the ticket's file; give it with --ticket FILE, and they cannot")
        return
    try:
        ticket.write(path)
    except OSError as error:
        raise UserError(f"cannot write the ticket {path}: {error.strerror}; give another place for it") from error
    say(f"the ticket is in {path}; hand it over as you would a password")


def join_options() -> type[JoinOptions]:
    """The arguments of join: its own, and what may differ between peers."""
    tables = (*map(type, vars(Settings()).values()), *(kind.Settings for _, kind in WORKLOADS.usable()))
    return with_field(JoinOptions, "own", unset(tables, BETWEEN_PEERS))


def join(arguments: list[str]) -> None:
    """Join a run on the internet as one more peer; Ctrl-C leaves, the same command with --out rejoins."""
    options: Any = parse(join_options(), arguments, "join", join.__doc__)

    from farflung.training import onlooker, peer
    from farflung.training.cautions import of_observer

    ticket = onlooker.ticket_in(options.ticket)
    settings = peer.ticket_settings(ticket).changed(**given(options.own))
    for line in of_observer(settings) if settings.run.observe else ():
        say(line)
    if not settings.island.divided:
        refuse_several("say how they divide the model with --stages or --shard, or start it without torchrun")
    folder = typed(Path(options.own.out)) if options.own.out else free_folder(ticket.name)
    settings = settings.changed(out=str(folder))
    again = ["join", *arguments, *([] if options.own.out else ["--out", str(folder)])]
    own = {name: value for name, value in given(options.own).items() if name != "out"}
    _train(ticket, settings, options, options.first, _say_who_is_there, again=again, own=own)


def _say_who_is_there(network: Any) -> None:
    """Says that this peer has joined, and what the seconds to its first step are for."""
    others = counted(len(network.members()) - 1, "peer")
    say(f"joined a run with {others} in training; now this one reads its data and makes its model")


def status(arguments: list[str]) -> None:
    """Show the peers of a run on the internet: their step, speed, and when they were last heard."""
    options = parse(StatusOptions, arguments, "status", status.__doc__)

    from farflung.report.peers import show
    from farflung.training import onlooker

    ticket = onlooker.ticket_in(options.ticket)
    with onlooker.looking_on(ticket, options.local) as network, _until_stopped() as stopped:
        show(lambda: onlooker.seen(network), stopped, options.once)


def doctor(arguments: list[str]) -> None:
    """Check what this machine needs to train, or with a ticket, to join that run; and say what to fix."""
    options = parse(DoctorOptions, arguments, "doctor", doctor.__doc__)

    from farflung.training import machine, peer

    checks = machine.checked(options.local, Path.cwd())
    healthy = True
    for finding in peer.examined(options.ticket, options.local) if options.ticket else checks:
        print(finding.line, flush=True)
        healthy = healthy and finding.good
    if not healthy:
        sys.exit(FAILURE)


def _train(
    ticket: Any,
    settings: Settings,
    seat: InviteOptions | JoinOptions,
    first: bool,
    joined: Callable[[Any], None] = lambda network: None,
    again: Sequence[str] = (),
    own: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Trains as a peer, with some settings of its `own`; an island's processes are started to do so `again`."""
    from farflung.training import island, observing, onlooker, peer, seats
    from farflung.training.launch import local_rank

    folder, local = Path(settings.run.out), seat.local
    place = {name: value for name, value in vars(local).items() if value != getattr(ListenAddress, name)}
    place |= {"as": seat.called} if seat.called else {}
    flags = tuple(_as_flags({**own, **place}))
    alone = observing.WHEN if settings.run.observe else _how_to_begin_again(seat.ticket or folder, folder, flags)
    part = settings.island.divided and "WORLD_SIZE" in os.environ
    if part and (STARTED_HERE in os.environ or local_rank()):
        peer.run_part(ticket, settings, local, first, seat.called, alone)
        return
    check_trackers(settings)
    say(f"{ticket.name}: {settings.rounds.method}, {settings.length}; run folder {folder}")

    come_back = functools.partial(_how_to_come_back, seat.ticket, folder, flags, first)
    with telling_how_to_go_on(come_back, max_hours=settings.run.max_hours):
        with tracking(settings, folder), watched(folder, sys.stderr) as show:
            networks: list[Any] = []

            def tell(network: Any) -> None:
                networks.append(network)
                if len(networks) == 1:  # a peer of a swarm that moves joins again
                    joined(network)
                    show(lambda: onlooker.seen(networks[-1]))

            if part:
                show()
                peer.run_part(ticket, settings, local, first, seat.called, alone)
            elif settings.island.divided:
                import_ahead(BY_PEERS)
                peer.check_for_internet(settings, local)
                show()
                island.launch_all(settings, folder, list(again))
            else:
                train = lambda first: peer.run_peer(ticket, settings, local, first, tell, seat.called, alone)  # noqa: E731
                seats.keeping_on(train, first, folder)
        tell_result(folder, sys.stderr)


def _how_to_come_back(ticket: Path | None, folder: Path, flags: Sequence[str], first: bool) -> str:
    """What to do where a peer has stopped: by the ticket that it keeps, unless it was not in the run yet."""
    from farflung.training import island
    from farflung.training.checkpoint import whole_steps
    from farflung.training.events import join_command

    kept = "".join(f"its last checkpoint is of step {step}; " for step in whole_steps(folder)[:1])
    if ticket and not (folder / "run.ticket").exists():
        again = join_command(folder, *flags, *(["--first"] if first else []), ticket=ticket)
    else:
        begins = not (island.knows_others(folder) or OBSERVES in flags)
        again = join_command(folder, *flags, *(["--first"] if begins else []))
    return f"{kept}come back with: {again}"


def _how_to_begin_again(ticket: Path, folder: Path, flags: Sequence[str]) -> str:
    """What to do where nobody answers at a ticket's addresses; one in a peer's run folder is for the run there."""
    from farflung.training.events import join_command
    from farflung.training.launch import is_begun

    for run in (folder, ticket if ticket.is_dir() else ticket.parent):
        if is_begun(run) and all((run / name).exists() for name in ("peer.key", "run.ticket")):
            return f"when all are gone, go on from the checkpoint in {run} with: {join_command(run, *flags, '--first')}"
    return f"when all are gone, begin the run again here with: {join_command(folder, *flags, '--first', ticket=ticket)}"


def _as_flags(options: Mapping[str, Any]) -> Iterator[str]:
    """What gives some options again."""
    for name, value in options.items():
        yield flag(name)
        if value is not True:
            yield from map(str, value) if isinstance(value, tuple) else (str(value),)


@contextmanager
def _until_stopped() -> Iterator[threading.Event]:
    """An event that Ctrl-C and its kin set."""
    stopped = threading.Event()
    with on_stop_signals(lambda *_: stopped.set()):
        yield stopped
