"""A graph in memory, as all ways to read one give it; refuses what nothing can be learnt from."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from farflung.errors import UserError
from farflung.workloads.base import Ids


@dataclass(frozen=True)
class GraphData:
    """Nodes with features, and edges between them, which have no direction.

    Raises UserError for what does not fit together; `where` is what it is called then.
    """

    where: str
    features: NDArray[np.float32]
    """(nodes, width)."""
    edges: Ids
    """(edges, 2): the numbers of the two nodes, as they were read."""
    checksum: str
    """A hash of what was read."""
    labels: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    """(nodes,) from 0, and -1 where it is not known; empty where nodes have none."""
    names: tuple[str, ...] = ()
    """Of the nodes; empty where they have none."""
    classes: tuple[str, ...] = ()
    """What the labels mean; empty where that is not known."""
    held_out_nodes: Ids | None = None
    """The numbers of the nodes to judge by; None where they are to be chosen."""
    held_out_links: Ids | None = None
    """(links, 2) to judge by; None where they are to be chosen."""

    def __post_init__(self) -> None:
        if self.features.ndim != 2 or self.features.size == 0:
            raise UserError(f"{self.where}: features have the shape {self.features.shape}; give (nodes, width)")
        if len(bad := np.flatnonzero(~np.isfinite(self.features).all(axis=1))):
            raise UserError(
                f"{self.where}: the features of node {bad[0]} are not all finite in float32; give numbers without NaN, "
                "smaller than 3e38"
            )
        self._check_pairs("edge", self.edges)
        if not len(self.edges):
            raise UserError(f"{self.where}: there is no edge; give a graph with edges")
        self._check_labels()
        if self.held_out_links is not None:
            self._check_pairs("held-out link", self.held_out_links)
        if self.held_out_nodes is not None:
            self._check_nodes(self.held_out_nodes)
        if self.names and len(self.names) != self.nodes:
            raise UserError(
                f"{self.where}: there are {len(self.names)} names, but {self.nodes} nodes; give each a name"
            )

    @property
    def nodes(self) -> int:
        """How many there are."""
        return len(self.features)

    @property
    def kinds(self) -> int:
        """How many labels there are."""
        return len(self.classes) or int(self.labels.max(initial=-1)) + 1

    @cached_property
    def links(self) -> Ids:
        """The edges, each once, lower node first, in order; without those of a node with itself."""
        return undirected(self.edges)

    def name(self, node: int) -> str:
        """What a person calls a node."""
        return self.names[node] if self.names else f"node {node}"

    def label(self, kind: int) -> str:
        """What a person calls a label."""
        return self.classes[kind] if self.classes else f"label {kind}"

    @property
    def _nodes_there(self) -> str:
        return f"nodes 0 to {self.nodes - 1} only; remove it, or give that node features"

    def _unknown(self, nodes: Ids) -> Ids:
        return np.flatnonzero((nodes < 0) | (nodes >= self.nodes))

    def _check_pairs(self, what: str, pairs: Ids) -> None:
        if pairs.ndim != 2 or pairs.shape[1] != 2:
            raise UserError(f"{self.where}: {what}s have the shape {pairs.shape}; give (number, 2), two nodes for each")
        if len(bad := self._unknown(pairs.ravel())):
            place = bad[0]
            raise UserError(
                f"{self.where}: {what} {place // 2} has node {pairs.flat[place]}, but there are {self._nodes_there}"
            )

    def _check_nodes(self, held_out: Ids) -> None:
        if held_out.ndim != 1:
            raise UserError(f"{self.where}: held-out nodes have the shape {held_out.shape}; give (number,)")
        if len(bad := self._unknown(held_out)):
            raise UserError(f"{self.where}: node {held_out[bad[0]]} is held out, but there are {self._nodes_there}")

    def _check_labels(self) -> None:
        if self.labels.shape not in ((0,), (self.nodes,)):
            raise UserError(
                f"{self.where}: labels have the shape {self.labels.shape}, but there are {self.nodes} nodes; "
                "give each one label, or -1 where it is not known"
            )
        most = len(self.classes) or self.nodes  # more kinds than nodes are numbers that are no labels
        if len(bad := np.flatnonzero((self.labels < -1) | (self.labels >= most))):
            raise UserError(
                f"{self.where}: node {bad[0]} has the label {self.labels[bad[0]]}, which is out of range; "
                f"labels are 0 to {most - 1}, or -1 where it is not known"
            )


def undirected(pairs: Ids) -> Ids:
    """(pairs, 2) nodes: each pair once, lower node first, in order, and none of a node with itself."""
    ordered = np.sort(pairs[pairs[:, 0] != pairs[:, 1]], axis=1)
    return np.unique(ordered, axis=0)
