"""What a method is attached to."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from farflung.networks import Network
from farflung.outer.options import Options

if TYPE_CHECKING:
    from farflung.outer.method import Method


@dataclass(frozen=True)
class Setup:
    """What a method is attached to, and how."""

    method: Method
    model: nn.Module
    optimizers: Sequence[Optimizer]
    """In the order in which they step."""
    network: Network
    options: Options
    """All of them."""
    undo: ExitStack
    """Takes what undoes the hooks; whoever makes this closes it if attaching fails."""
