"""Tables of embeddings that a run's replicas have dealt out among themselves, beside the rest, which each has whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from farflung.embeddings import Bags, ShardedTables
from farflung.embeddings.crossings import crossing_named
from farflung.errors import UserError
from farflung.hooks.trained import held_by, trainable
from farflung.inner import Inner
from farflung.networks import Network
from farflung.settings import Settings
from farflung.workloads import Workload


def crossing_of(workload: Workload) -> str:
    """How rows cross between replicas that have dealt out a workload's tables; "" where each has all of them."""
    found: str = getattr(workload, "crossing", "")
    return found


def check_tables(settings: Settings) -> None:
    """Refuses dealt tables where replicas do not take all steps together. Raises UserError."""
    if not (crossing := crossing_of(settings.made_workload())):
        if chosen := settings.changes().get("crossing"):
            raise UserError(f"crossing is {chosen!r}, but no tables are dealt out; add --tables dealt, or leave it out")
        return
    crossing_named(crossing)
    island, elastic = settings.island, settings.network.kind.elastic or settings.network.independent
    refused = {
        "peers that come and go do not; leave out --tables dealt": elastic,
        "by the clock replicas do not; give --every in inner steps": settings.by_clock,
        "an observer does not; leave out --observers": settings.run.observers,
        "stages and shards do not; leave them out": island.divided,
        "replicas that are computed together do not; leave out --batched-replicas": island.batched_replicas,
        "compiled layers do not; leave out --compile": island.compile,
    }
    if why := next((why for why, so in refused.items() if so), ""):
        raise UserError(f"replicas that deal tables out look rows up all at once, and {why}")


class DealtTables:
    """The tables that this replica holds and trains, with an optimizer of their own.

    It steps after the rest's, with its learning rate. A gradient is the mean over the replicas' losses; one that is not
    finite is not used.
    """

    def __init__(self, workload: Any, model: nn.Module, network: Network, deadline_s: float) -> None:
        self._tables, self.rest = workload.tables_and_rest(model)
        crossing = crossing_named(workload.crossing)
        self._sharded = ShardedTables(self._tables.whole(), network, crossing, deadline_s)
        self._tables.give_out(self._sharded.owned_by(network.rank), self._look_up)
        rest = set(self.rest.parameters())
        self._named = {name: one for name, one in trainable(model).items() if one not in rest}
        self._optimizer: torch.optim.Optimizer | None = None

    @classmethod
    def of(cls, workload: Workload, model: nn.Module, network: Network, deadline_s: float) -> DealtTables | None:
        """Deals out a model's tables, where its workload wants that."""
        return cls(workload, model, network, deadline_s) if crossing_of(workload) else None

    def _look_up(self, bags: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        found: Tensor = self._sharded([Bags(*bag) for bag in bags])
        return found

    def step_after(self, optimizer: torch.optim.Optimizer, inner: Inner, weight_decay: float) -> None:
        """Makes the optimizer, where there are tables here, which steps after each step of another."""
        if self._named:
            self._optimizer = inner.make(self._named.items(), lr=inner.lr, weight_decay=weight_decay)
            optimizer.register_step_post_hook(self._step)

    def _step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        assert self._optimizer
        for group in self._optimizer.param_groups:
            group["lr"] = optimizer.param_groups[0]["lr"]
        for table in held_by(self._optimizer):
            if table.grad is not None and not table.grad.isfinite().all():
                table.grad = None
        self._optimizer.step()
        self._optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's."""
        return self._optimizer.state_dict() if self._optimizer else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `state_dict`."""
        if self._optimizer:
            self._optimizer.load_state_dict(state)

    def gather(self) -> None:
        """Gives each replica all tables when the run is over, to judge, to sample and to keep; all call it alike.

        Raises PeerLostError.
        """
        device = next(self.rest.parameters()).device
        self._tables.take_back([weight.to(device) for weight in self._sharded.whole_weights()])
