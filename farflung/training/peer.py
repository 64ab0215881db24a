"""One peer of a run on the internet: it joins with a ticket, trains, and leaves when it wants."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch.distributed.elastic.multiprocessing.errors import record

from farflung.errors import UserError, counted
from farflung.findings import Finding
from farflung.hooks.trained import trainable
from farflung.networks.base import CORE_ONLY
from farflung.networks.following import FollowingNetwork
from farflung.networks.listening import ListenAddress
from farflung.networks.peers.ticket import NobodyAnswersError, Ticket
from farflung.networks.settings import NetworkSettings
from farflung.pipeline.boundaries import boundary_named
from farflung.pipeline.check import check_stepping
from farflung.settings import RunSettings, Settings
from farflung.signals import Interrupt, on_stop_signals
from farflung.training import beginning, island, launch, observing, seats
from farflung.training.core import check_core, outline
from farflung.training.failures import OneLine
from farflung.training.finish import finish, write_results
from farflung.training.gathering import gather_at_the_end
from farflung.training.limits import check_clock, check_folder, check_observer
from farflung.training.onlooker import in_folder, internet, looking_on, parts_for, seen, ticket_in
from farflung.training.own_ticket import own_identity, ticket_kept, with_newer_addresses
from farflung.training.stopping import Stop
from farflung.training.terminal import BEGIN_WITH, say
from farflung.training.trainer import Trainer

if TYPE_CHECKING:
    from farflung.networks import Network, TorchNetwork
    from farflung.networks.internet import DoorNetwork, InternetNetwork, Peers
    from farflung.outer import Session
    from farflung.training.onlooker import OpenNetwork

LAST_PORT = 65535

OF_A_MACHINE = ("compile", "memory", "far_folder", "device_tflops", "profile", "profile_replicas")
"""Settings of how a peer's own machine computes, which a ticket does not tell others."""
OF_A_PEER = ("out", "observe", "core_only", "track", "track_replicas", "max_hours", *OF_A_MACHINE)
"""Those, and what else is each peer's own."""


def shared_settings(settings: Settings) -> dict[str, Any]:
    """The settings that a ticket holds: those that are not at their defaults. Raises UserError."""
    if settings.network.kind.simulate:
        name = settings.network.network
        raise UserError(f"network is {name!r}, but peers meet on the internet; leave it out, or use farflung train")
    if settings.run.replicas != RunSettings.replicas:
        raise UserError(f"replicas is {settings.run.replicas}, but peers come and go; leave it out")
    if settings.network.independent:
        raise UserError("independent replicas are started by farflung train; leave out --independent")
    if settings.island.divided or settings.island.gateway:
        raise UserError(
            "stages, shard and gateway are each peer's own; leave them out, and give them to farflung join, or have "
            "each peer serve one stage with --swarm"
        )
    check_for_internet(settings)
    if settings.island.swarm:
        launch.check_settings(settings.changed(network="internet"))
    settings = settings.with_settled_workload()
    own = {name: Settings().flat()[name] for name in OF_A_PEER}
    return settings.changed(**own, network=NetworkSettings.network).changes()


def ticket_settings(ticket: Ticket) -> Settings:
    """The settings that a ticket says. Raises UserError."""
    if ticket.size:
        raise UserError(
            f"the ticket leads to a {ticket.name} of {ticket.size} machines, which is no run; take part with: "
            f"farflung {ticket.name} --join TICKET"
        )
    try:
        settings = Settings.of(**ticket.settings).changed(network="folder" if ticket.folder else "internet", replicas=1)
        check_folder(settings)
    except UserError as error:
        raise UserError(f"ticket of {ticket.name}: {error}") from error
    return settings


def check_for_internet(settings: Settings, local: ListenAddress | None = None) -> None:
    """Refuses what peers on the internet cannot do, who listen there. Raises UserError."""
    own = settings.island
    if own.divided and local and local.announce and not own.gateway:
        raise UserError("announce leads to one port, and each process of an island has its own; add --gateway")
    ports = 1 if own.gateway else own.processes  # of which each process has one, from the given one on
    if local and not 0 <= local.port <= LAST_PORT + 1 - ports:
        raise UserError(
            f"port is {local.port}, but this peer needs {counted(ports, 'port')} from there on, up to {LAST_PORT}; "
            f"choose a --port of at most {LAST_PORT + 1 - ports}{', or add --gateway' if ports > 1 else ''}"
        )
    if own.islands:
        raise UserError("islands is for farflung train; each peer says --stages and --shard when it joins")
    if own.offload:
        raise UserError("a peer on the internet computes where its weights are; leave out --offload")
    if own.gateway and not own.divided:
        raise UserError("gateway is for a peer of several processes, and this one is alone; leave it out")
    check_stepping(own)
    if own.divided and boundary_named(own.boundary)[0]:
        raise UserError(
            f"with boundary {own.boundary} the stages decide which weights exist, and peers differ in them; choose "
            "another --boundary"
        )
    if settings.network.conditions:
        raise UserError("conditions are for the simulated network; leave them out")
    check_folder(settings)
    launch.check_network(settings.changed(network="internet"))
    check_clock(settings)
    check_observer(settings)
    check_core(settings.changed(network="internet"))
    settings.method().check_elastic()


def run_peer(
    ticket: Ticket,
    settings: Settings,
    local: ListenAddress,
    first: bool,
    joined: Callable[[OpenNetwork], None],
    name: str = "",
    alone: str = "",
) -> None:
    """Trains as one peer, by a `name` if given, until the run's last step, the `first` if need be; tells when `joined`.

    Of an island each process calls this, and the first one joins. Where nobody answers, says what one `alone` can do.
    Raises StoppedError, UserError and what training raises; where it does not come to that, the folder stays as it was.
    Raises MoveError where this peer of a swarm is to serve another stage.
    """
    folder, told = Path(settings.run.out), list[Trainer]()

    def tell(line: str) -> None:
        told[0].log.warn(line) if told else say(line)

    # Independent replicas on one machine have local ranks, too, but each has a folder of its own.
    owns_folder = not settings.island.divided or launch.local_rank() == 0
    with contextlib.ExitStack() as leaving, _told_where_nobody_answers(alone):
        if owns_folder:
            leaving.enter_context(beginning.left_as_it_was(folder))
            beginning.refuse_while_trained(folder)  # before the others hear of this peer
        check_for_internet(settings, local)
        if first and settings.run.observe:
            raise UserError("an observer trains nothing, so it cannot begin a run; leave out --first or --observe")
        able = seats.stages_within_reach(settings, ticket_settings(ticket), folder)
        near = island.opened(settings, ticket) if settings.island.divided else None
        resumed = island.led(near, settings, "begun", launch.is_begun(folder))
        joining: OpenNetwork | None = None
        if island.leads(near):
            joining = _joining(ticket, settings, local, first, tell, near, name)
            leaving.callback(joining.close)
            joined(joining)
        at = island.led(near, settings, "rank", _reached_at(joining))
        network = joining or leaving.enter_context(_following(near, settings, at, ticket, local, tell))
        step = island.step_of(near, settings, folder, at[0]) if resumed else None
        if joining and able:
            _take_stage(cast("InternetNetwork", joining), able, settings)  # folders have no swarms
        away = island.led(near, settings, "away", joining is not None and _away(joining, settings, step))
        _prepare(near, settings, owns_folder)
        launch.use_cores_of(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        network.expect_model(*model_of(settings))
        if joining:
            leaving.enter_context(ticket_kept(joining, folder / "run.ticket"))
        coordination = island.coordination(near, settings.figure)
        with launch.stopping_on_signals(coordination.stop):
            device = launch.pick_device(settings.run.device, launch.local_rank())
            trainer = Trainer(settings, network, folder, coordination, device, step)
            told.append(trainer)
            leaving.callback(trainer.log.events.close)
            _train(trainer, joining, away)
            _finish(trainer, near, joining)


def _train(trainer: Trainer, joining: OpenNetwork | None, away: bool) -> None:
    """Trains, or observes, until the end."""
    if joining and trainer.settings.run.observe:
        observing.observe(trainer, observing.Peers(joining, trainer.settings, trainer.step))
        return
    if joining:
        _begin_together(joining, trainer.step, trainer.stop, trainer.settings.network.deadline)
    trainer.train(away, at_the_end=functools.partial(_stay_for_observers, trainer, joining))


def _stay_for_observers(trainer: Trainer, joining: OpenNetwork | None, session: Session) -> None:
    """Stays, for a deadline at most, until those who observe the run have the state after its last step."""
    session.apply_pending()
    run, ends = trainer.settings.run, time.monotonic() + trainer.settings.network.deadline

    def wanted() -> bool:
        leaves = trainer.stop.requested or time.monotonic() > ends
        return joining is not None and not leaves and observing.is_observed(joining, run.steps)

    session.give_while(wanted)


def _prepare(near: TorchNetwork | None, settings: Settings, owns_folder: bool) -> None:
    """Has the process that owns the run folder prepare it; the others wait for it."""
    folder = Path(settings.run.out)
    if owns_folder:
        launch.prepare(settings, folder, launch.is_begun(folder))
    island.led(near, settings, "prepared", None)


def _take_stage(network: InternetNetwork, able: list[int], settings: Settings) -> None:
    """Chooses the stage that this peer of a swarm serves, of those that it is able to."""
    network.peers.info["stage"] = settings.island.stages  # none yet
    network.expect_model(*model_of(settings))
    seats.take_stage(network, able, settings.island.stages, Path(settings.run.out))


def _reached_at(network: OpenNetwork | None) -> tuple[int, tuple[str, ...]]:
    """The rank of who joins, and its addresses."""
    return (network.rank, network.invitation().addresses) if network else (0, ())


def _finish(trainer: Trainer, near: TorchNetwork | None, network: OpenNetwork | None) -> None:
    """Writes what has come of this peer's run, and what the others last told. Raises NoRoomError."""
    others = {"peers": seen(network)} if network else {}
    summary = finish(trainer, lambda ended: ended(island.alone(near)))
    write_results(trainer, summary | others, tells=island.leads(near))
    if network and trainer.settings.island.swarm:
        gather_at_the_end(cast("InternetNetwork", network), trainer.settings, trainer.folder, trainer.log.warn)
    trainer.island.leave()


@functools.partial(record, error_handler=OneLine())
def run_part(ticket: Ticket, settings: Settings, local: ListenAddress, first: bool, name: str, alone: str) -> None:
    """One of the processes of an island; see `run_peer`. A launcher learns why it failed."""
    with on_stop_signals(Interrupt()):  # which lets it end its daemon
        run_peer(ticket, settings, local, first, lambda network: None, name, alone)


@contextlib.contextmanager
def _told_where_nobody_answers(what_to_do: str) -> Iterator[None]:
    """Raises UserError with what to do, where nobody answers."""
    try:
        yield
    except NobodyAnswersError as error:
        raise UserError(f"{error}; {what_to_do}") from error


def _joining(
    ticket: Ticket,
    settings: Settings,
    local: ListenAddress,
    first: bool,
    tell: Callable[[str], None],
    near: Network | None,
    name: str,
) -> OpenNetwork:
    """Joins the run. Raises UserError."""
    folder = Path(settings.run.out)
    ticket = with_newer_addresses(ticket, folder / "run.ticket")
    identity = own_identity(ticket, folder, launch.is_begun(folder))
    facts = {CORE_ONLY: 1.0} if settings.core.core_only else {}
    info = {**parts_for(ticket).newcomer_info(ticket, name), "facts": facts}
    if ticket.folder:
        meeting = in_folder(ticket, identity.path, settings.network.deadline, tell, info, near)
        if not first:
            meeting.find_others()
        return meeting
    parts = internet()
    from farflung.swarm.visits import refuse_visits  # what it imports is an extra, which is there by now

    peers: Peers = parts.Peers(ticket, identity, local, info, tell, first)
    if settings.island.swarm:  # which may have known it before, and have microbatches for it at once
        refuse_visits(peers)
    network: InternetNetwork = parts.InternetNetwork(
        peers,
        deadline=settings.network.deadline,
        fetched=folder / "fetched",
        near=near,
        gateway=settings.island.gateway,
    )
    return network


@contextlib.contextmanager
def _following(
    near: Network | None,
    settings: Settings,
    at: tuple[int, Sequence[str]],
    ticket: Ticket,
    local: ListenAddress,
    tell: Callable[[str], None],
) -> Iterator[FollowingNetwork]:
    """The network of a process of an island that does not join, with a door of its own unless there is a gateway.

    `at` is the rank of the one that joins, and its addresses.
    """
    assert near is not None
    rank, addresses = at
    ticket = ticket.at(tuple(addresses))
    if settings.island.gateway:
        yield FollowingNetwork(rank, near)
        return
    parts = internet()
    own_port = dataclasses.replace(local, port=local.port + near.rank if local.port else 0)
    with tempfile.TemporaryDirectory() as scratch:
        identity = parts.Identity(Path(scratch) / "door.key")
        info = {**parts.newcomer_info(ticket), "door_of": rank}
        peers: Peers = parts.Peers(ticket, identity, own_port, info, tell)
        network: DoorNetwork = parts.DoorNetwork(rank, near, peers, settings.network.deadline)
        try:
            yield network
        finally:
            network.close()


def _away(network: OpenNetwork, settings: Settings, step: int | None) -> bool:
    """Whether this peer was away for so long that it needs the others' state; then it is on its way."""
    method, behind = settings.method(), network.behind(step or 0)
    if settings.run.observe or not method.schedule.every:
        return False  # without rounds there are no anchors; steps taken together are led to the weights that it missed
    if behind is None and settings.island.swarm:
        # Nobody else has its stage; others keep copies of its state.
        behind = seats.furthest(cast("InternetNetwork", network)) - (step or 0)
    away = bool(behind and (step is None or behind > method.schedule.every))
    if away:
        network.prefetch(method.topology.identical)  # while the rest is being prepared
    return away


def _begin_together(network: OpenNetwork, step: int, stop: Stop, deadline_s: float) -> None:
    """Waits until as many replicas as are told know of each other; else a short run is over before its first round."""
    replicas = int(os.environ.get(BEGIN_WITH, "0"))
    if not replicas:
        return
    network.stand_by(step)
    ends = time.monotonic() + deadline_s
    while len(network.members()) < replicas and time.monotonic() < ends and not stop.requested:
        time.sleep(0.1)


def examined(path: Path, local: ListenAddress) -> Iterator[Finding]:
    """The checks of a ticket and this machine, one after the other."""
    try:
        ticket = ticket_in(path)
        places = counted(len(ticket.addresses), "address")
        yield Finding(True, f"{path} is a ticket to {ticket.name}, with {places}")
        if not ticket.size:
            ticket_settings(ticket)
        with looking_on(ticket, local) as network:
            yield Finding(True, "the run's peers accept the ticket; clocks and versions agree with theirs")
            yield from parts_for(ticket).examine(network.peers)
    except UserError as error:
        yield Finding(False, str(error))


def model_of(settings: Settings) -> tuple[str, int]:
    """A hash of the model's shapes, and its number of values."""
    trained = trainable(outline(settings))
    shapes = [(name, tuple(parameter.shape)) for name, parameter in trained.items()]
    values = sum(parameter.numel() for parameter in trained.values())
    return hashlib.sha256(repr(shapes).encode()).hexdigest()[:16], values
