"""Processes of one run that were started with other settings or data than each other."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from farflung.config import Config, UserError
from farflung.methods import settled
from farflung.networks import Network
from farflung.outer.digests import digest
from farflung.training.gather import gather

OWN = ("out", "data", "tokenizer", "device", "starting", "deadline", "log_every", "keep_checkpoints", "offload")
"""Settings that each machine chooses for itself. Where data lies is its own affair; see `other_text`."""


def refuse_other_settings(network: Network, config: Config) -> None:
    """Compares the settings of all processes. Raises UserError where one that must be equal is not, and PeerLost."""
    own = {name: value for name, value in dataclasses.asdict(settled(config)).items() if name not in OWN}
    first, *others = gather(network, own, "settings", config.starting)
    for rank, theirs in enumerate(others, 1):
        for name, value in theirs.items():
            if value != first[name]:
                flag = "--" + name.replace("_", "-")
                raise UserError(
                    f"{flag} is {_said(first[name])} for process 0 and {_said(value)} for process {rank}; "
                    "start all machines with the same settings"
                )


def other_text(network: Network, held_out: Tensor, deadline: float) -> bool:
    """Whether processes hold different text out to validate on. Raises PeerLost."""
    told = gather(network, digest([held_out]).tolist(), "held-out text", deadline)
    return any(other != told[0] for other in told)


def _said(value: Any) -> str:
    return "unset" if value is None else str(value)
