"""Graphs, of which each replica trains on a part (RandomTMA and SuperTMA: arXiv 2305.09887)."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farflung.errors import UserError
from farflung.lazy import Later
from farflung.workloads.dealing import ALL, Deal
from farflung.workloads.graph.settings import GraphSettings

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from farflung.workloads.base import Batch, Ids, Reshape, Score
    from farflung.workloads.graph import links, models, nodes, parts, reading
    from farflung.workloads.graph.data import GraphData
    from farflung.workloads.graph.models import GraphModel
    from farflung.workloads.graph.tasks import Task
else:
    np, torch = Later("numpy"), Later("torch")
    links, models, nodes, parts, reading = (
        Later(f"farflung.workloads.graph.{name}") for name in ("links", "models", "nodes", "parts", "reading")
    )


@dataclass(frozen=True)
class Part:
    """Some nodes of a graph and the edges among them."""

    nodes: Ids
    """Their numbers in the whole graph, in order."""
    targets: Ids
    """(targets, n) to train on, in a shuffled order, by the places of `nodes`."""
    features: Tensor
    """(nodes, width) float32, on a device."""
    adjacency: Tensor
    """(nodes, nodes) there; see `models.adjacency`."""


class Graph:
    """Node labels or links of one graph. Each replica has a part, and does not see the edges to the others'.

    A sample is some of the part's nodes or edges; a step embeds all of the part and scores these. The whole graph is
    embedded to judge a model. See Workload.
    """

    Settings = GraphSettings
    divisible = None

    def __init__(self, settings: GraphSettings, deal: Deal = ALL) -> None:
        self.settings = settings
        self._deal = deal
        self._parts: dict[tuple[int | None, torch.device], Part] = {}
        kinds: dict[str, type[Task]] = {"nodes": nodes.Nodes, "links": links.Links}
        self._kind = kinds[settings.task]
        self.units, self.measure, self.judged_by = self._kind.units, self._kind.measure, self._kind.judged_by

    @property
    def units_per_sample(self) -> int:
        """See Workload; a part with few of them has smaller samples."""
        return self.settings.targets

    @cached_property
    def data(self) -> GraphData:
        """The whole graph. Raises UserError."""
        found = reading.read(self.settings.data)
        if self.settings.checksum not in ("", found.checksum):
            raise UserError(
                f"data {self.settings.data}: it is another graph than this run began with; put back what it was, or "
                "begin a new run"
            )
        return found

    @cached_property
    def task(self) -> Task:
        """What is learnt. Raises UserError."""
        return self._kind(self.data, self.settings)

    @property
    def _cut(self) -> str:
        return self.settings.parts or self._deal.cut or "whole"

    @property
    def _number(self) -> int:
        """Of parts. Raises UserError where there is one for each replica, and nobody knows how many these are."""
        number = 1 if self._cut == "whole" else self._deal.replicas
        if number is None:
            raise UserError(
                f"parts is {self._cut}, but on the internet the number of replicas is not known; choose --parts whole"
            )
        return number

    @cached_property
    def part_of(self) -> Ids:
        """The part that each node is in. Raises UserError."""
        return parts.CUTS[self._cut](self.task.edges, self.data.nodes, self._number, self.settings)

    @cached_property
    def _samples(self) -> Ids:
        """Of each part, how many samples it has. Raises UserError for a part without any."""
        owners = self.part_of[self.task.training]
        inside = (owners == owners[:, :1]).all(axis=1)
        there = np.bincount(owners[inside, 0], minlength=self._number)
        if len(empty := np.flatnonzero(there == 0)):
            raise UserError(
                f"part {empty[0]} of {len(there)} has no {self.units} to train on; choose --parts super with fewer "
                "super_nodes, or fewer replicas"
            )
        return -(-there // self.settings.targets)

    @property
    def _begins(self) -> Ids:
        """The first sample of each part, where those of all are counted on."""
        return np.cumsum(self._samples) - self._samples

    @property
    def available(self) -> int:
        """See Workload: samples of all parts."""
        return int(self._samples.sum())

    def check(self) -> None:
        """See Workload. A graph is read whole."""
        self.outline()
        _ = self._samples

    def settled(self) -> GraphSettings:
        """Its settings with the graph's hash. Raises UserError."""
        return replace(self.settings, checksum=self.data.checksum)

    def outline(self) -> GraphModel:
        """See Workload."""
        chosen, width = self.settings, self.data.features.shape[1]
        with torch.device("meta"):
            return models.GraphModel(
                chosen.model, width, chosen.hidden, chosen.layers, self.task.outputs, chosen.dropout
            )

    def build(self, seed: int, reshape: Reshape | None = None) -> GraphModel:
        """See Workload."""
        return models.build(self.outline(), seed, reshape)

    def sample_ids(self, seed: int, replica: int, step: int, size: int) -> Ids:
        """Which samples of its part a replica trains on; an id tells the step, too, so that each draws other pairs."""
        part = replica % self._number
        # Who has a part alone deals all of it to itself.
        deal = self._deal if self._number == 1 else replace(self._deal, replicas=None, apart=False)
        own = deal.ids(seed, replica, step, size, int(self._samples[part]))
        ids: Ids = step * self.available + self._begins[part] + own
        return ids

    def batch(self, ids: Ids) -> Batch:
        """The part's number, targets (targets, n), and what their scores should be (targets,); int64."""
        numbers = ids % self.available
        part = int(np.searchsorted(self._begins, numbers[0], side="right")) - 1
        own = self.part(part, torch.device("cpu"))
        samples = np.array_split(own.targets, self._samples[part])
        chosen = [samples[number - self._begins[part]] for number in numbers]
        targets, wanted = self.task.batch(np.concatenate(chosen), own.nodes, ids)
        return {"part": torch.tensor(part), "targets": torch.from_numpy(targets), "wanted": torch.from_numpy(wanted)}

    def weight(self, batch: Batch) -> int:
        """See Workload."""
        return len(batch["wanted"])

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """See Workload."""
        own = self.part(int(batch["part"]), batch["targets"].device)
        return self.task.loss(model(own.features, own.adjacency, batch["targets"]), batch["wanted"])

    def evaluate(self, model: Any, size: int, device: torch.device) -> Score:
        """See Workload; on the whole graph."""
        return self.task.evaluate(model, self._embedded(model, device), size * self.settings.targets)

    def digest(self) -> str:
        """See Workload."""
        return hashlib.sha256(self.data.checksum.encode() + self.task.held_out.tobytes()).hexdigest()

    def sample(self, model: Any, seed: int, device: torch.device) -> str:
        """A table of what the model says of a few held-out nodes."""
        return self.task.table(model, self._embedded(model, device))

    def export(self, weights: Mapping[str, Tensor], target: Path, seed: int, constrained_to: int = 0) -> None:
        """A folder that `farflung.workloads.graph.load` loads; without the graph, it does not say what labels mean."""
        chosen = self.settings
        about: dict[str, Any] = {"data": chosen.data, "checksum": chosen.checksum, "scores": self._kind.scores}
        with contextlib.suppress(UserError):
            about["labels"] = self.task.labels
        shape = models.shape_of(weights, chosen.model, chosen.layers)
        models.export(weights, shape, target, about)

    def part(self, number: int | None, device: torch.device) -> Part:
        """A part on a device, by its number; None for the whole graph."""
        if (number, device) not in self._parts:
            self._parts[number, device] = self._made(number, device)
        return self._parts[number, device]

    def _made(self, number: int | None, device: torch.device) -> Part:
        everyone = np.arange(self.data.nodes)
        own = everyone if number is None else everyone[self.part_of == number]
        targets = parts.within(self.task.training, own, len(everyone))
        order = np.random.default_rng(self.settings.split_seed).permutation(len(targets))
        edges = parts.within(self.task.edges, own, len(everyone))
        features = torch.from_numpy(self.data.features[own])
        adjacency = models.adjacency(self.settings.model, edges, len(own))
        return Part(own, targets[order], features.to(device), adjacency.to(device))

    def _embedded(self, model: Any, device: torch.device) -> Tensor:
        whole = self.part(None, device)
        embedded: Tensor = model.embed(whole.features, whole.adjacency)
        return embedded
