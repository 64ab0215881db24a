"""What is learnt of a graph, and how well: the label of each node, or which nodes have an edge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from torch import Tensor

from farflung.figure import Figure
from farflung.workloads.base import Ids, Score
from farflung.workloads.dealing import permuted

if TYPE_CHECKING:
    from farflung.workloads.graph.data import GraphData
    from farflung.workloads.graph.models import GraphModel
    from farflung.workloads.graph.settings import GraphSettings

HELD_OUT_SHARE = 10
"""One node or link in this many is held out, where the data does not say which."""


class Task(Protocol):
    """One thing to learn. A target is what a score is of: one node or more, (n,) numbers.

    Making it raises UserError for a graph without what it needs.
    """

    units: str
    """What a target is one of, in the plural."""
    measure: str
    """The unit of `loss`."""
    judged_by: Figure
    """The figure that `evaluate` gives first."""
    scores: str
    """What a model's scores are of, for people."""
    outputs: int
    """Scores of a target."""
    labels: list[str]
    """What people call each of them, where they do."""
    edges: Ids
    """(edges, 2): those that the network may see, each once."""
    training: Ids
    """(targets, n) to train on."""
    held_out: Ids
    """(targets, n) to judge by."""

    def __init__(self, data: GraphData, settings: GraphSettings) -> None: ...

    def batch(self, targets: Ids, nodes: Ids, key: Ids) -> tuple[Ids, Ids]:
        """Targets to score, and what the scores should be, for some of those to train on.

        `targets` are places among `nodes`, those of a part; `key` seeds what is drawn besides.
        """
        ...

    def loss(self, scores: Tensor, wanted: Tensor) -> Tensor:
        """The mean over scores (targets, outputs)."""
        ...

    def evaluate(self, model: GraphModel, embedded: Tensor, size: int) -> Score:
        """How well held-out targets are scored, about `size` at a time, for the embeddings of the whole graph."""
        ...

    def table(self, model: GraphModel, embedded: Tensor) -> str:
        """Some held-out targets, with what the model says of them."""
        ...


def split(count: int, seed: int) -> tuple[Ids, Ids]:
    """Which of so many targets are to train on, and which are held out, both in order."""
    held_out = permuted(np.arange(count), count, (seed, 1)) < -(-count // HELD_OUT_SHARE)
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def aligned(rows: Sequence[tuple[str, str, str]]) -> str:
    """A table as text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)
