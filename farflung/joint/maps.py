"""Linear maps of which a core computes without the rest.

Each takes the place of an `nn.Linear` of the same name. Its parameters are the core's, and those of its `rest` are not:
on a replica that has the core alone, `rest` is None. While `whole` is False the rest is left out of what is computed,
and so has no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

REST = "rest"


class LowRankMap(nn.Module):
    """y = U V x + b of the core, and W x of the rest.

    Args:
        like: the linear map whose place it takes; the whole begins with what that computes.
        rank: of U V.
        spread: the standard deviation that the entries of U V begin with.
    """

    def __init__(self, like: nn.Linear, rank: int, spread: float) -> None:
        super().__init__()
        device, dtype = like.weight.device, like.weight.dtype
        self.enter = nn.Linear(like.in_features, rank, bias=False, device=device, dtype=dtype)
        self.leave = nn.Linear(rank, like.out_features, like.bias is not None, device=device, dtype=dtype)
        self.rest: nn.Linear | None = nn.Linear(
            like.in_features, like.out_features, bias=False, device=device, dtype=dtype
        )
        self.whole = True
        self._spread = spread
        self.initialise()
        _take(self.rest, like)
        with torch.no_grad():
            self.rest.weight.sub_(self.leave.weight @ self.enter.weight)
            if like.bias is not None:
                self.leave.bias.copy_(like.bias).requires_grad_(like.bias.requires_grad)

    def initialise(self) -> None:
        """First values of U and V, with which U V is spread as W is."""
        each = (self._spread / self.enter.out_features**0.5) ** 0.5
        for part in (self.enter, self.leave):
            nn.init.normal_(part.weight, std=each)

    def forward(self, entering: Tensor) -> Tensor:
        """(…, in) to (…, out)."""
        core: Tensor = self.leave(self.enter(entering))
        return core + self.rest(entering) if self.whole and self.rest is not None else core

    def product(self, weights: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
        """The core of an ordinary map of that name."""
        product = weights[f"{name}.leave.weight"] @ weights[f"{name}.enter.weight"]
        bias = {f"{name}.bias": weights[f"{name}.leave.bias"]} if self.leave.bias is not None else {}
        return {f"{name}.weight": product, **bias}

    def joined(self, weights: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
        """Core and rest as an ordinary map of that name."""
        core = self.product(weights, name)
        return {**core, f"{name}.weight": core[f"{name}.weight"] + weights[f"{name}.rest.weight"]}


class FirstRows(nn.Linear):
    """The first outputs of a linear map are the core's, the others the rest's. Args: see LowRankMap."""

    def __init__(self, like: nn.Linear, count: int) -> None:
        biased, device, dtype = like.bias is not None, like.weight.device, like.weight.dtype
        super().__init__(like.in_features, count, biased, device=device, dtype=dtype)
        more = like.out_features - count
        self.rest: nn.Linear | None = nn.Linear(like.in_features, more, biased, device=device, dtype=dtype)
        self.whole = True
        _take(self, like, rows=slice(count))
        _take(self.rest, like, rows=slice(count, None))

    def forward(self, entering: Tensor) -> Tensor:
        """(…, in) to (…, out)."""
        core = super().forward(entering)
        return torch.cat([core, self.rest(entering)], dim=-1) if self.whole and self.rest is not None else core

    def joined(self, weights: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
        """See LowRankMap."""
        kinds = ["weight"] if self.bias is None else ["weight", "bias"]
        return {f"{name}.{one}": torch.cat([weights[f"{name}.{one}"], weights[f"{name}.rest.{one}"]]) for one in kinds}


class FirstColumns(nn.Linear):
    """The first inputs of a linear map are the core's, the others the rest's. Args: see LowRankMap."""

    def __init__(self, like: nn.Linear, count: int) -> None:
        device, dtype = like.weight.device, like.weight.dtype
        super().__init__(count, like.out_features, like.bias is not None, device=device, dtype=dtype)
        more = like.in_features - count
        self.rest: nn.Linear | None = nn.Linear(more, like.out_features, bias=False, device=device, dtype=dtype)
        self.whole = True
        _take(self, like, columns=slice(count))
        _take(self.rest, like, columns=slice(count, None))

    def forward(self, entering: Tensor) -> Tensor:
        """(…, in) to (…, out); of the core's inputs alone where there are no others."""
        core = super().forward(entering[..., : self.in_features])
        if not (self.whole and self.rest is not None):
            return core
        more: Tensor = self.rest(entering[..., self.in_features :])
        return core + more

    def joined(self, weights: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
        """See LowRankMap."""
        weight = torch.cat([weights[f"{name}.weight"], weights[f"{name}.rest.weight"]], dim=1)
        return {f"{name}.weight": weight, **({} if self.bias is None else {f"{name}.bias": weights[f"{name}.bias"]})}


@torch.no_grad()
def _take(part: nn.Linear, like: nn.Linear, rows: slice = slice(None), columns: slice = slice(None)) -> None:
    """Has a part begin with values of a linear map, and be trained as that is."""
    part.weight.copy_(like.weight[rows, columns]).requires_grad_(like.weight.requires_grad)
    if part.bias is not None:
        part.bias.copy_(like.bias[rows]).requires_grad_(like.bias.requires_grad)


Map = LowRankMap | FirstRows | FirstColumns


def maps_of(model: nn.Module) -> dict[str, Map]:
    """The maps of a model that have a core, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Map)}


def rest_of(model: nn.Module) -> set[str]:
    """The names of the parameters that are not the core's; none where it is alone, and in a model without one."""
    return {
        f"{name}.{REST}.{one}"
        for name, module in maps_of(model).items()
        if module.rest is not None
        for one, _ in module.rest.named_parameters()
    }


def reduce_to_core(model: nn.Module) -> None:
    """Takes the rest out of a model, in place."""
    for module in maps_of(model).values():
        module.rest = None


def set_whole(model: nn.Module, whole: bool) -> None:
    """Has a model compute with its rest, or without."""
    for module in maps_of(model).values():
        module.whole = whole


@contextmanager
def core_alone(model: nn.Module) -> Iterator[None]:
    """Within, a model computes without its rest, which then has no gradients."""
    set_whole(model, False)
    try:
        yield
    finally:
        set_whole(model, True)
