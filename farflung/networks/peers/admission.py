"""What a newcomer says of itself, and why it cannot train in a run."""

from __future__ import annotations

import socket

from farflung.errors import UserError
from farflung.formats import PROTOCOL, package_version
from farflung.networks.peers.frames import Frame, reading, whole
from farflung.networks.peers.member import CLOCK_SECONDS
from farflung.networks.peers.ticket import Ticket

LAST_PROTOCOL = 1 << 16


OTHER_SHAPES = (
    "the model made here has other shapes than the run's; "
    "take the model and tokenizer that the ticket names, and see that both machines have the same files and versions"
)


def newcomer_info(ticket: Ticket, name: str = "") -> Frame:
    """The peer info of one that does not train yet, and has no model; it is called after its machine, unless named."""
    return {
        "version": package_version(),
        "settings": ticket.settings_hash,
        "shapes": "",
        "host": name or socket.gethostname(),
        "trains": False,
    }


@reading("what a peer says of itself")
def disagreement(newcomer: Frame, run: Frame) -> str:
    """Why a peer cannot train in the run, and the remedy; "" when it can."""
    if (spoken := whole(newcomer.get("protocol", 0), LAST_PROTOCOL)) != PROTOCOL.version:
        remedy = "update farflung" if spoken < PROTOCOL.version else "use theirs"
        return (
            f"this is farflung {newcomer.get('version')!s:.20} with {PROTOCOL.name} {spoken}, the run's peers have "
            f"farflung {run['version']} with {PROTOCOL.version}; {remedy}: pip install farflung=={run['version']}"
        )
    if newcomer.get("settings") != run["settings"]:
        return "the ticket's settings are not the run's; ask for a new ticket, and do not edit it"
    if run["shapes"] and newcomer.get("shapes") and newcomer["shapes"] != run["shapes"]:
        return OTHER_SHAPES
    return ""


def check_clock(theirs: float, asked: float, now: float) -> None:
    """Checks that two clocks agree, by the other's time between two moments of this one's. Raises UserError."""
    if fault := clock_fault((asked + now) / 2 - theirs, (now - asked) / 2):
        raise UserError(fault)


def clock_fault(ahead: float, unsure: float = 0.0) -> str:
    """What to say to one whose clock is so many seconds ahead of another's, give or take some; "" if that is little."""
    if abs(ahead) <= CLOCK_SECONDS + unsure:
        return ""
    return (
        f"this machine's clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the other peers'; "
        "set it, for example with: timedatectl set-ntp true"
    )
