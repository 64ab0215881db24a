"""farflung mixture split: on one machine, on several under torchrun, or on several that meet by a ticket."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from farflung.cli.arguments import flags_among, parse, value_among
from farflung.cli.peers import hand_out, refuse_no_ticket, refuse_several
from farflung.errors import UserError, disk_errors
from farflung.files import refuse_taken
from farflung.mixtures.kinds import Kind, kind_of
from farflung.mixtures.settings import SplitSettings
from farflung.networks.listening import ListenAddress
from farflung.networks.peers.ticket import NobodyAnswersError, Ticket
from farflung.tables import setting

if TYPE_CHECKING:
    from farflung.mixtures.folder import Split
    from farflung.networks.base import Network


@dataclass(frozen=True, kw_only=True)
class SplitOptions(SplitSettings):
    """Which text to split, how, and with which other machines."""

    invite: Path | None = None
    """Split together with other machines: write a ticket for them to this file, and wait for them."""
    machines: int | None = setting(None, least=2)
    """With --invite: how many split together, this one among them; at most one for each expert."""
    join: Path | None = None
    """Split together with the machine that has written this ticket: as it says, but for --data and --out."""
    local: tyro.conf.OmitArgPrefixes[ListenAddress] = field(default_factory=ListenAddress)


def split(arguments: list[str]) -> None:
    """Deal text, or pictures, among experts; text on several machines, too, with --invite or under torchrun."""
    kind = kind_of(value_among(arguments, "--workload") or SplitSettings.workload)
    wanted: Any = SplitOptions if kind.Settings is SplitSettings else kind.Settings
    options = parse(wanted, arguments, "mixture split", split.__doc__)
    with _opened(options, arguments) as (settings, network, tells):
        made = kind.split(settings, network, _tell if tells else lambda _: None)
    if not tells:
        return
    print("\n".join(kind.dealt(made)))
    if network.traffic.bytes_sent:
        print(f"sent to each other machine, scores and routers: {network.traffic.bytes_sent:,} bytes in all")
    _write_page(kind, made)
    print(f"farflung: {made.folder} has a part for each of {made.experts} experts; train each, anywhere, by itself:")
    print(f"  farflung train {kind.train_flags(made)} --data {made.store(0)} --out {made.run(0)}    and so on")


@contextmanager
def _opened(options: Any, arguments: list[str]) -> Iterator[tuple[Any, Network, bool]]:
    """How to split, this machine's seat, and whether it tells of it: those under torchrun share a terminal."""
    if isinstance(options, SplitOptions) and (options.invite or options.join or options.machines):
        settings, ticket = _meeting(options, arguments)
        with _together(settings, ticket, options) as network:
            yield settings, network, True
        return

    from farflung.networks import from_env

    network = from_env()
    yield options, network, network.rank == network.members()[0]


def _meeting(options: SplitOptions, arguments: list[str]) -> tuple[SplitSettings, Ticket]:
    """How machines that meet by a ticket split, and the ticket. Raises UserError."""
    from farflung.mixtures.tickets import machines_of, settings_of, ticket_to
    from farflung.training.onlooker import ticket_in

    refuse_several("start it without torchrun")
    refuse_taken(options.out, "give another folder with --out")
    if options.join:
        if options.invite or options.machines:
            raise UserError("--invite and --machines are for the first machine; the others give --join TICKET alone")
        ticket = ticket_in(options.join)
        machines_of(ticket)
        given = {name[2:].replace("-", "_") for name in flags_among(arguments)}
        return settings_of(ticket, options, given), ticket
    if not (options.invite and options.machines):
        raise UserError("the first machine gives both: --invite TICKET, a file to write, and --machines, how many")
    refuse_no_ticket(options.invite)
    return options, ticket_to(options, options.machines)


@contextmanager
def _together(settings: SplitSettings, ticket: Ticket, options: SplitOptions) -> Iterator[Network]:
    """This machine's seat among those that have the ticket, once all have come. Raises UserError."""
    from farflung.mixtures.routers import largest_packet
    from farflung.mixtures.tickets import machines_of
    from farflung.training.onlooker import internet
    from farflung.training.terminal import say

    parts = internet()
    machines, first = machines_of(ticket), options.invite is not None
    largest = largest_packet(settings, machines)
    with tempfile.TemporaryDirectory() as scratch:
        identity = parts.Identity(Path(scratch) / "peer.key")
        peers = parts.Peers(ticket, identity, options.local, parts.newcomer_info(ticket), say, first)
        try:
            network = parts.FixedGroup(peers, machines, largest, settings.deadline)
        except NobodyAnswersError as error:
            raise UserError(
                f"nobody answers where {options.join} leads: the split is over, or was begun anew with another ticket, "
                "or this machine cannot call the one that has written it"
            ) from error
        try:
            if first:
                hand_out(network.invitation(), options.invite)
                say(f"on each other machine: farflung mixture split --data … --out … --join {options.invite}")
            network.gather(settings.deadline, say)
            yield network
        finally:
            network.close()


def _write_page(kind: Kind, made: Split) -> None:
    """A report in the mixture's folder, and where it is."""
    from farflung.report.split import write_split

    out = made.folder / "report.html"
    title = f"{made.experts} experts' {kind.noun}s: {made.folder.name}"
    with disk_errors(f"write {out}", "make room"):
        write_split(out, title, kind.told(made), kind.picture(made))
    print(f"report: {out}")


def _tell(line: str) -> None:
    print(line, flush=True)
