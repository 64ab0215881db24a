"""Graph networks of torch_geometric, with a head that scores nodes or pairs of them."""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from farflung.errors import UserError
from farflung.workloads.base import Ids, Reshape


def _geometric() -> Any:
    try:
        import torch_geometric.nn
    except ImportError as error:
        raise UserError("graphs need torch_geometric; install farflung[graphs]") from error
    return torch_geometric.nn


def _gcn(width: int, hidden: int, layers: int, dropout: float) -> nn.Module:
    found: nn.Module = _geometric().GCN(width, hidden, layers, dropout=dropout, normalize=False)
    return found


def _sage(width: int, hidden: int, layers: int, dropout: float) -> nn.Module:
    found: nn.Module = _geometric().GraphSAGE(width, hidden, layers, dropout=dropout, aggr="add")
    return found


def _gcn_weights(degrees: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return (degrees[rows] * degrees[columns]).rsqrt()


def _sage_weights(degrees: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return 1 / degrees[rows]


KINDS = {"gcn": (_gcn, _gcn_weights, True), "sage": (_sage, _sage_weights, False)}
"""Of each: its layers, the weights of its adjacency, and whether a node is its own neighbour."""


class GraphModel(nn.Module):
    """Embeds nodes by their features and neighbours, and scores some of them, or pairs.

    Args:
        kind: gcn (Kipf and Welling, arXiv 1609.02907) or sage (GraphSAGE, arXiv 1706.02216).
        width: numbers of a node's features.
        outputs: scores of a node, or of a pair.
    """

    def __init__(self, kind: str, width: int, hidden: int, layers: int, outputs: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.encoder = KINDS[kind][0](width, hidden, layers, dropout)
        self.head = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs))

    def embed(self, features: Tensor, adjacency: Tensor) -> Tensor:
        """(nodes, hidden) of features (nodes, width) and an `adjacency` (nodes, nodes)."""
        with torch.autocast(features.device.type, enabled=False):  # torch multiplies sparse matrices in float32 alone
            embedded: Tensor = self.encoder(features, adjacency)
        return embedded

    def scores(self, embedded: Tensor, targets: Tensor) -> Tensor:
        """(targets, outputs) for the numbers of a node or more each, (targets, n), whose embeddings are multiplied."""
        found: Tensor = self.head(embedded[targets].prod(dim=1))
        return found

    def forward(self, features: Tensor, adjacency: Tensor, targets: Tensor) -> Tensor:
        """The scores of some targets."""
        return self.scores(self.embed(features, adjacency), targets)


def adjacency(kind: str, edges: Ids | Tensor, nodes: int) -> Tensor:
    """(nodes, nodes) sparse (CSR) float32, with the weights that a kind of network gives the neighbours of each node.

    `edges` (edges, 2) are undirected, each given once.
    """
    _, weights_of, with_itself = KINDS[kind]
    pairs = torch.as_tensor(edges)
    itself = torch.arange(nodes if with_itself else 0)
    rows = torch.cat([pairs[:, 0], pairs[:, 1], itself])
    columns = torch.cat([pairs[:, 1], pairs[:, 0], itself])
    degrees = torch.bincount(rows, minlength=nodes).float()
    weights, places = weights_of(degrees, rows, columns), torch.stack([rows, columns])
    table = torch.sparse_coo_tensor(places, weights, (nodes, nodes), check_invariants=True)
    with warnings.catch_warnings(action="ignore"):  # torch calls this layout new
        return table.coalesce().to_sparse_csr()


def build(outline: GraphModel, seed: int, reshape: Reshape | None) -> GraphModel:
    """Gives a model without memory random weights, each module's from the seed and its name."""
    if reshape:
        reshape(outline)
    outline.to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]):
        for name, module in outline.named_modules():
            reset = getattr(module, "reset_parameters", None)
            if reset and next(module.parameters(recurse=False), None) is not None:
                torch.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
                reset()
    return outline


README = """# A graph network, trained with farflung

    from farflung.workloads.graph import load
    from farflung.workloads.graph.models import adjacency

    model = load("this folder")       # a torch module, in evaluation mode
    edges = ...                       # (edges, 2) int64: each undirected edge once
    features = ...                    # (nodes, {width}) float32
    embedded = model.embed(features, adjacency("{kind}", edges, len(features)))
    scores = model.scores(embedded, targets)      # {scores}

It needs farflung[graphs]. `config.json` has the model's shape, and what the scores are of.
"""


def shape_of(weights: Mapping[str, Tensor], kind: str, layers: int) -> dict[str, Any]:
    """What `GraphModel` is made with, for one that has these weights."""
    hidden, width = next(
        value.shape for name, value in weights.items() if name.startswith("encoder") and value.dim() > 1
    )
    outputs = weights["head.2.bias"].numel()
    return {"kind": kind, "width": width, "hidden": hidden, "layers": layers, "outputs": outputs}


def export(weights: Mapping[str, Tensor], shape: Mapping[str, Any], target: Path, about: Mapping[str, Any]) -> None:
    """Writes a folder that `load` loads; `about` says what the scores are of, for people. Raises OSError."""
    from safetensors.torch import save_file

    target.mkdir(parents=True)
    save_file({name: value.contiguous() for name, value in weights.items()}, target / "model.safetensors")
    config = json.dumps({"shape": shape, **about}, indent=1, ensure_ascii=False)
    (target / "config.json").write_text(config, "utf-8")
    (target / "README.md").write_text(README.format(**shape, scores=about["scores"]), "utf-8")


def load(folder: str | Path) -> GraphModel:
    """A model that `farflung export` has written, in evaluation mode. Raises UserError."""
    from safetensors.torch import load_file

    try:
        config = json.loads((Path(folder) / "config.json").read_text("utf-8"))
        model = GraphModel(**config["shape"])
        model.load_state_dict(load_file(Path(folder) / "model.safetensors"))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise UserError(f"{folder} holds no graph network: {error}; give a folder of farflung export") from error
    return model.eval()
