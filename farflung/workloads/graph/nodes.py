"""The label of each node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from farflung.errors import UserError
from farflung.figure import Figure
from farflung.workloads.base import Ids, Score
from farflung.workloads.graph.tasks import aligned, split
from farflung.workloads.held_out import evenly

if TYPE_CHECKING:
    from farflung.workloads.graph.data import GraphData
    from farflung.workloads.graph.models import GraphModel
    from farflung.workloads.graph.settings import GraphSettings

SHOWN = 8
"""Nodes of a sample."""


class Nodes:
    """Learns the labels of nodes by cross-entropy; judged by the share that the model gets right. See Task."""

    units = "nodes"
    measure = "nats a node"
    judged_by = Figure("accuracy", more_is_better=True)
    scores = "(n, labels) of nodes, targets (n, 1) int64"

    def __init__(self, data: GraphData, settings: GraphSettings) -> None:
        labelled = np.flatnonzero(data.labels >= 0)
        if not len(labelled):
            raise UserError(f"{data.where}: no node has a label; give labels.npy, or choose --task links")
        if data.held_out_nodes is None:
            training, held_out = (labelled[places] for places in split(len(labelled), settings.split_seed))
        else:
            held_out = np.intersect1d(data.held_out_nodes, labelled)
            training = np.setdiff1d(labelled, held_out)
        if not (len(training) and len(held_out)):
            raise UserError(
                f"{data.where}: {len(training)} nodes with labels are to train on and {len(held_out)} to judge by; "
                "both need some: give more labels, or another held_out_nodes.npy"
            )
        if len(kinds := np.unique(data.labels[training])) == 1:
            raise UserError(
                f"{data.where}: all {len(training)} nodes to train on have one label, {data.label(kinds[0])}, so that "
                "nothing is to be learnt; give others in labels.npy, or choose --task links"
            )
        self._data = data
        self.outputs, self.edges = data.kinds, data.links
        self.labels = [data.label(kind) for kind in range(data.kinds)]
        self.training = training[:, None]
        self.held_out = held_out[evenly(len(held_out), settings.eval_targets)][:, None]

    def batch(self, targets: Ids, nodes: Ids, key: Ids) -> tuple[Ids, Ids]:
        """See Task: the nodes themselves, and their labels."""
        return targets, self._data.labels[nodes[targets[:, 0]]]

    def loss(self, scores: Tensor, wanted: Tensor) -> Tensor:
        """See Task."""
        return functional.cross_entropy(scores.float(), wanted)

    def evaluate(self, model: GraphModel, embedded: Tensor, size: int) -> Score:
        """See Task."""
        wanted = torch.from_numpy(self._data.labels[self.held_out[:, 0]]).to(embedded.device)
        parts = torch.from_numpy(self.held_out).to(embedded.device).split(size)
        scores = torch.cat([model.scores(embedded, part) for part in parts])
        right = (scores.argmax(dim=1) == wanted).double().masked_fill(scores.isnan().any(dim=1), torch.nan)
        return Score(float(right.mean()), others={"cross-entropy": float(self.loss(scores, wanted))})

    def table(self, model: GraphModel, embedded: Tensor) -> str:
        """See Task: the label that the model gives some nodes, and the true one."""
        shown = self.held_out[evenly(len(self.held_out), SHOWN)]
        found = model.scores(embedded, torch.from_numpy(shown).to(embedded.device)).argmax(dim=1).tolist()
        rows = [("node", "predicted", "true")]
        for node, kind in zip(shown[:, 0], found, strict=True):
            rows.append((self._data.name(node), self._data.label(kind), self._data.label(self._data.labels[node])))
        return aligned(rows)
