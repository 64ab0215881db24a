"""Processes of one run that were started with other settings or data than each other."""

from __future__ import annotations

from typing import Any

from farflung.errors import UserError
from farflung.networks import Network
from farflung.settings import Settings, names_that_may_differ
from farflung.tables import BETWEEN_MACHINES
from farflung.training.gather import gather


def refuse_other_settings(network: Network, settings: Settings) -> None:
    """Compares the settings of all processes, but for what each machine chooses for itself.

    Raises UserError where one that must be equal is not, and PeerLostError.
    """
    free = names_that_may_differ(BETWEEN_MACHINES, settings)
    own = {name: value for name, value in settings.settled().flat().items() if name not in free}
    (one, first), *others = gather(network, own, "settings", settings.network.starting).items()
    for other, theirs in others:
        for name, value in theirs.items():
            if value != first[name]:
                flag = "--" + name.replace("_", "-")
                raise UserError(
                    f"{flag} is {_said(first[name])} for process {one} and {_said(value)} for process {other}; "
                    "start all machines with the same settings"
                )


def other_data(network: Network, digest: str, deadline: float) -> bool:
    """Whether processes hold out other samples than each other, by their digests. Raises PeerLostError."""
    first, *others = gather(network, digest, "held-out data", deadline).values()
    return any(other != first for other in others)


def _said(value: Any) -> str:
    return "unset" if value is None else str(value)
