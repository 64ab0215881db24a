"""DLRM (arXiv 1906.00091): tables of embeddings for categories, and what pairs of them have in common."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

LookUp = Callable[[list[tuple[Tensor, Tensor]]], Tensor]
"""From the arguments of each table's nn.EmbeddingBag to what is looked up: (clicks, tables, width)."""


class Tables(nn.Module):
    """A table for each column of categories.

    Args:
        rows: of each table.
        width: numbers in a row.
        sparse: whether gradients are sparse; see nn.EmbeddingBag.
    """

    def __init__(self, rows: Sequence[int], width: int, sparse: bool = False) -> None:
        super().__init__()
        # Names without numbers of their own: Muon takes matrices of numbered layers, which tables are not.
        bags = {f"table{n}": nn.EmbeddingBag(count, width, mode="sum", sparse=sparse) for n, count in enumerate(rows)}
        self.bags = nn.ModuleDict(bags)
        self._look_up: LookUp | None = None

    def whole(self) -> list[nn.EmbeddingBag]:
        """The tables, in order."""
        return [bag for bag in self.bags.values() if isinstance(bag, nn.EmbeddingBag)]

    def give_out(self, keeps: Sequence[int], look_up: LookUp) -> None:
        """Keeps only these tables, under the names that they had; rows are then looked up elsewhere."""
        self.bags = nn.ModuleDict({f"table{n}": self.bags[f"table{n}"] for n in keeps})
        self._look_up = look_up

    def take_back(self, weights: Sequence[Tensor]) -> None:
        """Has all tables again, with these weights."""
        bags = [nn.EmbeddingBag.from_pretrained(weight, freeze=False, mode="sum") for weight in weights]
        self.bags = nn.ModuleDict({f"table{n}": bag for n, bag in enumerate(bags)})
        self._look_up = None

    def forward(self, rows: Tensor) -> Tensor:
        """(clicks, tables, width), of a row (clicks, tables) of each table."""
        if self._look_up:
            return self._look_up(bags_of(rows))
        found = zip(self.bags.values(), bags_of(rows), strict=True)
        return torch.stack([bag(ids, offsets) for bag, (ids, offsets) in found], dim=1)


def bags_of(rows: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The rows (clicks, tables) of each table as the arguments of its nn.EmbeddingBag."""
    offsets = torch.arange(len(rows), device=rows.device)
    return [(ids.contiguous(), offsets) for ids in rows.unbind(dim=1)]


class Interactions(nn.Module):
    """From numbers and looked-up rows to the logit of a click.

    The numbers become one more row; the products of all pairs of rows, and that one, go through the upper layers.
    """

    def __init__(self, numbers: int, tables: int, width: int, hidden: int) -> None:
        super().__init__()
        self.lower = _layers(numbers, hidden, width) if numbers else Constant(width)
        pairs = (tables + 1) * tables // 2
        self.upper = _layers(pairs + width, hidden, hidden, 1)

    def forward(self, numbers: Tensor, looked_up: Tensor) -> Tensor:
        """(clicks,) logits."""
        lower = self.lower(numbers)
        rows = torch.cat([lower[:, None], looked_up], dim=1)
        one, other = torch.triu_indices(rows.shape[1], rows.shape[1], offset=1, device=rows.device)
        products = (rows @ rows.mT)[:, one, other]
        logits: Tensor = self.upper(torch.cat([lower, products], dim=1))
        return logits.squeeze(1)


class Constant(nn.Module):
    """The same row for each click, which is learnt."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.zeros(width))

    def reset_parameters(self) -> None:
        """Small numbers: of noughts, all products would be nought."""
        nn.init.normal_(self.row, std=len(self.row) ** -0.5)

    def forward(self, numbers: Tensor) -> Tensor:
        """(clicks, width)."""
        return self.row.expand(len(numbers), -1)


class DLRM(nn.Module):
    """Tables, which replicas may deal out among themselves, and the rest.

    Args:
        numbers: columns of numbers.
        rows: of each column of categories, the rows of its table.
        width: numbers in a row.
        hidden: numbers in each hidden layer.
        sparse: whether the tables' gradients are sparse.
    """

    def __init__(self, numbers: int, rows: Sequence[int], width: int, hidden: int, sparse: bool = False) -> None:
        super().__init__()
        self.tables = Tables(rows, width, sparse)
        self.interactions = Interactions(numbers, len(rows), width, hidden)

    def forward(self, numbers: Tensor, rows: Tensor) -> Tensor:
        """(clicks,) logits, of numbers (clicks, columns) and rows (clicks, tables)."""
        logits: Tensor = self.interactions(numbers, self.tables(rows))
        return logits


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Gives each module weights from the seed and its name."""
    with torch.random.fork_rng(devices=[]):
        for name, module in model.named_modules():
            torch.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            if isinstance(module, nn.EmbeddingBag):
                nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
            elif isinstance(module, nn.Linear | Constant):
                module.reset_parameters()


def _layers(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for one, other in pairwise(widths):
        layers += [nn.Linear(one, other), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
