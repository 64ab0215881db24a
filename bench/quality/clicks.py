"""What do the replicas of a recommender send, and what does sending less cost in AUC?
A DLRM is trained for one epoch, by Adam, in two ways. Data parallel: all of it is on each replica, and gradients are
averaged. Model parallel: each table is on one replica and looked up by all, and only the layers are averaged. Bytes are
what a replica sends; in the second way for the tables, since the layers take the same in all rows. Seconds are what
steps wait for links; computation comes on top. With debian it needs apt's lists (apt-get update).
Takes about half an hour for each batch size on two cores, and with --clicks 300000 a quarter of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from bench.lib.runs import Runs
from bench.lib.store import Result, Settings, Store
from bench.lib.table import Part, Table
from farflung import methods
from farflung.codecs import ErrorFeedback, Quantize, Threshold
from farflung.embeddings import Bags, Crossing, DistinctRows, LargestOfSample, ShardedTables
from farflung.networks import Conditions, SimulatedNetwork, Simulation
from farflung.outer import Method
from farflung.workloads.clicks.model import DLRM, bags_of
from farflung.workloads.clicks.settings import ClicksSettings
from farflung.workloads.clicks.workload import Recommender
from farflung.workloads.dealing import Deal


@dataclass(frozen=True)
class Options:
    data: str = "debian"
    """The clicks: debian, synthetic, or logs; see --data of farflung train --workload clicks."""
    clicks: int = 2_000_000
    """So many of them, at most."""
    replicas: int = 2
    """Copies of the layers; the tables are dealt to them, or copied."""
    batches: tuple[int, ...] = (512, 2048)
    """Clicks in a step of a replica."""
    lr: float = 0.005
    """Of Adam."""
    mbps: float = 100.0
    """Of each replica's link, both ways."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One run of each row for each."""


SMOKE = Options(data="synthetic", clicks=400, batches=(32,), seeds=(0,))


def in_2_bits(share: float) -> Method:
    """Dynamic thresholds, with the values that they keep in 2 bits."""
    return methods.dynamic_threshold(codec=ErrorFeedback(Threshold(share=share) | Quantize(bits=2)))


COPIED: dict[str, Callable[[], Method]] = {
    "copied, all gradients": methods.ddp,
    "copied, 1%": methods.dynamic_threshold,
    "copied, 1% in 2 bits": lambda: in_2_bits(0.01),
    "copied, 1.9% in 2 bits": lambda: in_2_bits(0.019),
}
DEALT: dict[str, Callable[[], Crossing]] = {
    "dealt, all pooled": lambda: LargestOfSample(1.0),
    "dealt, distinct rows": DistinctRows,
    "dealt, rows in int8": lambda: DistinctRows("int8"),
    "dealt, rows in int4": lambda: DistinctRows("int4"),
    "dealt, rows in 3 bits": lambda: DistinctRows("stat3"),
    "dealt, largest 12.5%": lambda: LargestOfSample(0.125),
    "dealt, largest 5%": lambda: LargestOfSample(0.05),
}


COLUMNS = {
    "tables": "",
    "AUC": ".4f",
    "to the first": "+.4f",
    "log loss": ".4f",
    "MB a replica": ".1f",
    "times fewer": ".1f",
    "s waited": ".0f",
}


def run(options: Options, store: Store) -> Iterator[Part]:
    clicks = clicks_of(options.data, options.clicks, options.replicas)  # before there are processes, which have it then
    yield f"{options.data}: {clicks.available:,} clicks to train on"
    common: Settings = {"lr": options.lr, "mbps": options.mbps, "data": options.data, "clicks": options.clicks}
    common |= {"replicas": options.replicas, "held_out": clicks.digest()[:16]}
    with Runs(store, common, made) as runs:
        for batch in options.batches:
            title = f"{options.replicas} replicas, batch {batch}, one epoch, {options.mbps:g} Mbit/s"
            yield Table(COLUMNS, rows(options, batch, runs), f"{title}, seeds {options.seeds}")


def rows(options: Options, batch: int, runs: Runs) -> Iterator[tuple[Any, ...]]:
    whole: list[Result] = []
    for name in (*COPIED, *DEALT):
        runs.start_all({"tables": name, "batch": batch}, options.seeds)
    for ways in (COPIED, DEALT):
        base: list[Result] = []
        for name in ways:
            found = list(runs.on_seeds({"tables": name, "batch": batch}, options.seeds).values())
            base, whole = base or found, whole or found
            auc, loss, sent, waited = (
                mean(one[key] for one in found) for key in ("auc", "log_loss", "bytes", "waited")
            )
            before = mean(one["auc"] for one in whole)
            yield name, auc, auc - before, loss, sent / 1e6, mean(one["bytes"] for one in base) / sent, waited


def made(settings: Settings, seed: int) -> Result:
    """One run. Computation takes no time in it, and what is waited for is the link alone."""
    replicas = settings["replicas"]
    clicks = clicks_of(settings["data"], settings["clicks"], replicas)
    simulation = Simulation(replicas, Conditions(bandwidth_mbps=settings["mbps"], latency_ms=10, step_ms=0))
    name, batch, lr = settings["tables"], settings["batch"], settings["lr"]
    return simulation.run(lambda network: trained(network, clicks, name, batch, lr, seed))[0]


@cache
def clicks_of(data: str, most: int, replicas: int) -> Recommender:
    return Recommender(ClicksSettings(data=data, max_clicks=most), Deal(replicas))


class Dealt(nn.Module):
    """A DLRM whose tables the replicas have dealt out."""

    def __init__(self, model: DLRM, network: SimulatedNetwork, crossing: Crossing) -> None:
        super().__init__()
        tables = [table for table in model.tables.bags.values() if isinstance(table, nn.EmbeddingBag)]
        self.tables = ShardedTables(tables, network, crossing)
        self.interactions = model.interactions

    def forward(self, numbers: Tensor, rows: Tensor) -> Tensor:
        logits: Tensor = self.interactions(numbers, self.tables([Bags(*bag) for bag in bags_of(rows)]))
        return logits


def trained(
    network: SimulatedNetwork, clicks: Recommender, name: str, batch: int, lr: float, seed: int
) -> dict[str, float]:
    """One replica's epoch: what it has sent, and how good the model is."""
    copy: DLRM = clicks.build(seed)
    model = Dealt(copy, network, DEALT[name]()) if name in DEALT else copy
    averaged = model.interactions if isinstance(model, Dealt) else model
    optimizers = [torch.optim.Adam(averaged.parameters(), lr=lr, fused=True)]
    if isinstance(model, Dealt):
        optimizers.append(torch.optim.Adam(model.tables.parameters(), lr=lr, fused=True))
    of_tables = 0
    method = COPIED[name]() if name in COPIED else methods.ddp()
    with method.attach(averaged, optimizers[0], network):
        for step in range(clicks.available // (batch * len(network.members()))):
            before = network.traffic.bytes_sent
            clicks.loss(model, clicks.batch(clicks.sample_ids(seed, network.rank, step, batch))).backward()
            of_tables += network.traffic.bytes_sent - before
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        sent, waited = network.traffic.bytes_sent, network.traffic.seconds_blocked
    if isinstance(model, Dealt):
        sent = of_tables
        for table, weight in zip(copy.tables.bags.values(), model.tables.whole_weights(), strict=True):
            table.weight = nn.Parameter(weight)
    with torch.no_grad():
        score = clicks.evaluate(copy, 4096, torch.device("cpu"))
    return {"auc": score.value, "log_loss": score.others["log loss"], "bytes": sent, "waited": waited}
