"""What a method deals out among its replicas: which units, and from which seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from farflung.errors import UserError
from farflung.joint.branches import ATTENTION, FEED_FORWARD, refuse_shared
from farflung.outer.session import Session
from farflung.outer.setup import Setup
from farflung.subnets.assembling import assemble, scale_best, scale_branches
from farflung.subnets.loop import SubnetLoop
from farflung.subnets.units import KINDS, Pool


@dataclass(frozen=True)
class DealtUnits:
    """Units that are dealt out anew in each round (IST, arXiv 1910.02120; ResIST, arXiv 2107.00961).

    Args:
        units: heads, which go with FFN columns, or whole layers.
        seed: of the deals; the same on all replicas.
    """

    units: Literal["heads", "layers"] = "heads"
    seed: int = 0

    def session(self, setup: Setup) -> Session:
        """Rounds that deal. Raises UserError for what cannot be dealt."""
        return SubnetLoop(setup, self)

    def check(self, model: nn.Module, replicas: int) -> None:
        """See Dealing."""
        self.pools(model, replicas)

    def pools(self, model: nn.Module, replicas: int) -> list[Pool]:
        """The units of a model, which may have no memory yet. Raises UserError where so many cannot share them."""
        pools = KINDS[self.units](model)
        if not pools:
            raise UserError(
                f"no units are found in {type(model).__name__} that could be dealt out, such as layers with "
                f"{', '.join(ATTENTION)} and {', '.join(FEED_FORWARD)}; choose another method, such as noloco"
            )
        refuse_shared(model, [name for pool in pools for name in pool.cuts])
        for pool in pools:
            if pool.units % replicas:
                what = "layers" if pool.modules else "KV heads" if len(pool.cuts) > 3 else "FFN columns"
                raise UserError(
                    f"{pool.name} has {pool.units} {what}, which {replicas} replicas cannot share evenly; choose a "
                    f"number of replicas that divides {pool.units}"
                )
        return pools

    def assemble(self, mean: Mapping[str, Tensor], model: nn.Module, replicas: int) -> None:
        """See Dealing; branches count 1 / N."""
        pools = KINDS[self.units](model)
        assemble(mean, pools, replicas)
        scale_branches(mean, pools, 1 / replicas)

    def assemble_best(self, model: nn.Module, replicas: int, badness: Callable[[], float]) -> float:
        """See Dealing."""
        weights, pools = dict(model.named_parameters()), KINDS[self.units](model)
        assemble(weights, pools, replicas)
        return scale_best(weights, pools, replicas, badness)
