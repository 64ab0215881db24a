"""How a graph is cut into the replicas' parts (RandomTMA and SuperTMA: arXiv 2305.09887)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from farflung.errors import UserError
from farflung.workloads.base import Ids
from farflung.workloads.dealing import permuted
from farflung.workloads.graph.kept import kept

if TYPE_CHECKING:
    from farflung.workloads.graph.settings import GraphSettings

METIS_SEEDS = 1 << 31
"""METIS knows seeds below."""

Cut = Callable[[Ids, int, int, "GraphSettings"], Ids]
"""Gives the part of each node, from undirected edges, the numbers of nodes and of parts, and the settings."""


def whole(edges: Ids, nodes: int, parts: int, settings: GraphSettings) -> Ids:
    """One part has all nodes: each replica trains on the whole graph."""
    return np.zeros(nodes, np.int64)


def random(edges: Ids, nodes: int, parts: int, settings: GraphSettings) -> Ids:
    """Each node is in any part with the same chance, and parts are of one size: about 1/parts of the edges stay."""
    return permuted(np.arange(nodes), nodes, (settings.split_seed,)) % parts


def super_nodes(edges: Ids, nodes: int, parts: int, settings: GraphSettings) -> Ids:
    """METIS cuts many small pieces with few edges between them, which are dealt out at random.

    So parts are alike, and most edges stay. Raises UserError for more pieces than nodes, or fewer than parts.
    """
    pieces = settings.super_nodes
    if not parts <= pieces <= nodes:
        raise UserError(
            f"super_nodes is {pieces}; the graph has {nodes} nodes and there are {parts} parts: choose a number between"
        )
    dealt = permuted(np.arange(pieces), pieces, (settings.split_seed,)) % parts
    return dealt[metis(edges, nodes, pieces, settings.split_seed)]


def min_cut(edges: Ids, nodes: int, parts: int, settings: GraphSettings) -> Ids:
    """METIS cuts as many parts as there are, with few edges between them: parts are unlike (PSGD-PA's)."""
    return metis(edges, nodes, parts, settings.split_seed)


CUTS: dict[str, Cut] = {"random": random, "super": super_nodes, "min-cut": min_cut, "whole": whole}
"""By what the setting `parts` calls them."""


def metis(edges: Ids, nodes: int, pieces: int, seed: int) -> Ids:
    """The piece of each node: pieces are of about one size, and few edges are between them. Raises UserError."""
    made = kept("pieces", [_digest(edges), nodes, pieces, seed], lambda: {"piece": _metis(edges, nodes, pieces, seed)})
    return made["piece"]


def _metis(edges: Ids, nodes: int, pieces: int, seed: int) -> Ids:
    try:
        import pymetis
    except ImportError as error:
        raise UserError("cutting a graph needs pymetis; install farflung[graphs], or choose --parts random") from error
    both = np.concatenate([edges, edges[:, ::-1]])
    both = both[np.lexsort((both[:, 1], both[:, 0]))]
    begins = np.concatenate([[0], np.cumsum(np.bincount(both[:, 0], minlength=nodes))])
    options = pymetis.Options(seed=seed % METIS_SEEDS)
    found = pymetis.part_graph(pieces, pymetis.CSRAdjacency(begins, both[:, 1]), options=options)
    return np.asarray(found.vertex_part, np.int64)


def within(pairs: Ids, nodes: Ids, count: int) -> Ids:
    """(pairs, n) with all of their nodes among `nodes` of `count`, by their places in these."""
    place = np.full(count, -1)
    place[nodes] = np.arange(len(nodes))
    local = place[pairs]
    return local[(local >= 0).all(axis=1)]


def _digest(edges: Ids) -> str:
    return hashlib.sha256(np.ascontiguousarray(edges).tobytes()).hexdigest()
