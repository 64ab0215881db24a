"""What a graph network is trained from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from farflung.tables import BETWEEN_MACHINES, BETWEEN_PEERS, Checked, setting


@dataclass(frozen=True)
class GraphSettings(Checked):
    """The graph, how it is cut into the replicas' parts, and the network that learns from it."""

    data: str = setting("debian", may_differ=BETWEEN_MACHINES | BETWEEN_PEERS)
    """A folder of arrays, one in OGB's format, or debian: the packages that this machine's apt knows."""
    checksum: str = ""
    """Hash of the graph that was read. farflung fills it in, and refuses machines with another graph."""
    task: Literal["nodes", "links"] = "nodes"
    """What is learnt: nodes, the label of each; links, which nodes have an edge."""
    parts: Literal["random", "super", "min-cut", "whole"] | None = None
    """How the graph is cut, a part for each replica; edges between parts are left out. Unset: as the method says."""
    super_nodes: int = setting(1000, least=1)
    """Pieces that METIS cuts the graph into, with few edges between them, before chance deals them out to the parts."""
    split_seed: int = setting(0, least=0)
    """The seed of the parts and of what is held out."""
    model: Literal["gcn", "sage"] = "sage"
    """The layers: gcn, of Kipf and Welling; sage, GraphSAGE with the mean of the neighbours."""
    hidden: int = setting(64, least=1)
    """Numbers that a node has after each layer."""
    layers: int = setting(2, least=1)
    """How many edges away a node sees."""
    dropout: float = setting(0.0, least=0, below=1)
    """The share of hidden numbers that training leaves out."""
    targets: int = setting(64, least=1)
    """Nodes or edges in one sample, of which a step takes --batch-size."""
    eval_targets: int = setting(2000, least=1)
    """Held-out nodes or links to judge the model by, at most."""
    eval_negatives: int = setting(100, least=1)
    """Other nodes that each held-out link is ranked among."""

    def settled(self) -> GraphSettings:
        """With the hash of the graph. Raises UserError."""
        from farflung.workloads.graph.workload import Graph  # which needs these settings

        return Graph(self).settled()
