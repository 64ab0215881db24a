"""Processes of one run that were started with other settings or data than each other."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from farflung.config import Config
from farflung.errors import UserError
from farflung.hooks.digests import digest
from farflung.methods import settled
from farflung.networks import Network
from farflung.training.gather import gather

PLACES = ("out", "data", "tokenizer", "device", "outer_device", "offload")
OWN = (*PLACES, "starting", "deadline", "log_every", "keep_checkpoints")
"""Settings that each machine chooses for itself. Where data lies is its own affair; see `other_text`."""


def refuse_other_settings(network: Network, config: Config) -> None:
    """Compares the settings of all processes.

    Raises UserError where one that must be equal is not, and PeerLostError.
    """
    own = {name: value for name, value in dataclasses.asdict(settled(config)).items() if name not in OWN}
    (one, first), *others = gather(network, own, "settings", config.starting).items()
    for other, theirs in others:
        for name, value in theirs.items():
            if value != first[name]:
                flag = "--" + name.replace("_", "-")
                raise UserError(
                    f"{flag} is {_said(first[name])} for process {one} and {_said(value)} for process {other}; "
                    "start all machines with the same settings"
                )


def other_text(network: Network, held_out: Tensor, deadline: float) -> bool:
    """Whether processes hold different text out to validate on. Raises PeerLostError."""
    first, *others = gather(network, digest([held_out]).tolist(), "held-out text", deadline).values()
    return any(other != first for other in others)


def _said(value: Any) -> str:
    return "unset" if value is None else str(value)
