"""Which nodes have an edge."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from farflung.errors import UserError
from farflung.figure import Figure
from farflung.workloads.base import Ids, Score
from farflung.workloads.graph.data import undirected
from farflung.workloads.graph.tasks import aligned, split
from farflung.workloads.held_out import evenly

if TYPE_CHECKING:
    from farflung.workloads.graph.data import GraphData
    from farflung.workloads.graph.models import GraphModel
    from farflung.workloads.graph.settings import GraphSettings

SHOWN = 6
"""Nodes of a sample."""


class Links:
    """Learns to tell edges from pairs drawn at random, by binary cross-entropy. See Task.

    It is judged by the mean reciprocal rank (MRR) of the other end of each held-out link among nodes drawn at random,
    the same in each evaluation. Of equal scores, half count as better.
    """

    units = "edges"
    measure = "nats an edge"
    judged_by = Figure("link MRR", more_is_better=True)
    scores = "(n, 1) of pairs, targets (n, 2) int64: more than 0 where an edge is likely"
    outputs = 1

    def __init__(self, data: GraphData, settings: GraphSettings) -> None:
        if data.held_out_links is None:
            training, held_out = (data.links[places] for places in split(len(data.links), settings.split_seed))
        else:
            given = data.held_out_links
            held_out = given[given[:, 0] != given[:, 1]]
            training = _without(data.links, undirected(held_out), data.nodes)
        if not (len(training) and len(held_out)):
            raise UserError(
                f"{data.where}: {len(training)} links are to train on and {len(held_out)} to judge by, which gives no "
                "MRR; both need some: give more edges, or another held_out_links.npy"
            )
        self._data = data
        self.labels: list[str] = []
        self.edges = self.training = training
        self.held_out = held_out[evenly(len(held_out), settings.eval_targets)]
        drawn = np.random.default_rng(settings.split_seed)
        self._others = drawn.integers(data.nodes, size=(len(self.held_out), settings.eval_negatives))

    def batch(self, targets: Ids, nodes: Ids, key: Ids) -> tuple[Ids, Ids]:
        """See Task: these edges, and as many pairs of one of their ends and a node of the part."""
        drawn, count = np.random.default_rng(key), len(targets)
        ends = targets[np.arange(count), drawn.integers(2, size=count)]
        others = np.stack([ends, drawn.integers(len(nodes), size=count)], axis=1)
        return np.concatenate([targets, others]), np.repeat([1, 0], count)

    def loss(self, scores: Tensor, wanted: Tensor) -> Tensor:
        """See Task."""
        return functional.binary_cross_entropy_with_logits(scores[:, 0].float(), wanted.float())

    def evaluate(self, model: GraphModel, embedded: Tensor, size: int) -> Score:
        """See Task."""
        ends = torch.from_numpy(np.concatenate([self.held_out, self._others], axis=1)).to(embedded.device)
        ranks = torch.cat([_ranks(model, embedded, part) for part in ends.split(max(1, size // ends.shape[1]))])
        return Score(float((1 / ranks).mean()), others={"hits at 10": float((ranks <= 10).double().mean())})

    def table(self, model: GraphModel, embedded: Tensor) -> str:
        """See Task: the likeliest new neighbour of some nodes, and the one that was held out."""
        rows = [("node", "likeliest new neighbour", "held out")]
        everyone = torch.arange(self._data.nodes, device=embedded.device)
        for node, other in self.held_out[evenly(len(self.held_out), SHOWN)]:
            scores = model.scores(embedded, torch.stack([torch.full_like(everyone, node), everyone], dim=1))[:, 0]
            known = self.edges[(self.edges == node).any(axis=1)].ravel()
            scores[torch.from_numpy(np.append(known, node)).to(scores.device)] = -torch.inf
            likeliest = int(scores.argmax())
            rows.append((self._data.name(node), self._data.name(likeliest), self._data.name(other)))
        return aligned(rows)


def _ranks(model: GraphModel, embedded: Tensor, ends: Tensor) -> Tensor:
    """(links,) from 1, NaN without scores, for a node, its true neighbour and others: (links, 2 + others)."""
    pairs = torch.stack(torch.broadcast_tensors(ends[:, :1], ends[:, 1:]), dim=-1)
    scores = model.scores(embedded, pairs.flatten(0, 1)).view(len(ends), -1)
    true, others = scores[:, :1], scores[:, 1:]
    ranks = 1 + (others > true).sum(dim=1) + (others == true).sum(dim=1) / 2
    return ranks.masked_fill(scores.isnan().any(dim=1), torch.nan)  # nothing is greater than NaN


def _without(pairs: Ids, left_out: Ids, nodes: int) -> Ids:
    numbers, wanted = (one[:, 0] * nodes + one[:, 1] for one in (pairs, left_out))
    return pairs[~np.isin(numbers, wanted)]
