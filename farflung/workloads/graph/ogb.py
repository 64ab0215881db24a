"""Graphs as the Open Graph Benchmark (arXiv 2005.00687) gives them: the folder of one, as it is unpacked."""

from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from farflung.errors import UserError
from farflung.workloads.base import Ids
from farflung.workloads.graph.data import GraphData
from farflung.workloads.graph.kept import checksum, kept

NUMPY: list[Any] = [np.ndarray.__reduce__(np.empty(0))[0], np.ndarray, np.dtype, type(np.dtype(np.int64))]
"""What an array in a file of torch is made with."""


def is_ogb(folder: Path) -> bool:
    """Whether a folder is in OGB's format."""
    return (folder / "raw" / "edge.csv.gz").exists()


def read(folder: Path) -> GraphData:
    """The nodes or links of OGB's validation set are held out; the labels of its test set are not looked at.

    Raises UserError and OSError.
    """
    paths = [folder / "raw" / f"{name}.csv.gz" for name in ("edge", "node-feat", "node-label")]
    splits = sorted([*folder.glob("split/*/*.csv.gz"), *folder.glob("split/*/*.pt")])
    read_from = checksum([*(path for path in paths if path.exists()), *splits])
    made = kept("ogb", read_from, lambda: {path.name: _table(path) for path in paths if path.exists()})
    if paths[1].name not in made:
        raise UserError(f"there is no {paths[1]}; farflung needs a graph whose nodes have features")
    labels = made.get(paths[2].name, np.empty((0, 1)))
    if labels.shape[1] > 1:
        raise UserError(f"{paths[2]} has {labels.shape[1]} labels for each node; farflung learns one")
    split = {path.name.partition(".")[0]: path for path in splits}
    known = np.nan_to_num(labels.ravel(), nan=-1).astype(np.int64)
    nodes = {name: _nodes(path) for name, path in split.items() if path.suffix == ".gz"}
    if "test" in nodes and len(known):
        known[_there(split["test"], nodes["test"], len(known))] = -1
    return GraphData(
        where=str(folder),
        features=made[paths[1].name].astype(np.float32),
        edges=made[paths[0].name].astype(np.int64),
        checksum=read_from,
        labels=known,
        held_out_nodes=nodes.get("valid"),
        held_out_links=_links(split["valid"]) if "valid" in split and not nodes else None,
    )


def _table(path: Path) -> NDArray[np.float64]:
    try:
        with gzip.open(path, "rt", encoding="ascii") as file:
            return np.loadtxt(file, delimiter=",", ndmin=2)
    except (ValueError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no table of numbers: {error}; unpack the data set again") from error


def _nodes(path: Path) -> Ids:
    return _table(path).ravel().astype(np.int64)


def _there(path: Path, nodes: Ids, count: int) -> Ids:
    """These nodes. Raises UserError where there is another than those of the graph."""
    if len(bad := nodes[(nodes < 0) | (nodes >= count)]):
        raise UserError(f"{path} has node {bad[0]}, but there are labels of {count} nodes; unpack the data set again")
    return nodes


def _links(path: Path) -> Ids:
    """(links, 2); of `edge`, or of a source and a target node."""
    try:
        with torch.serialization.safe_globals(NUMPY):
            found = torch.load(path, weights_only=True)
        pairs = [found["edge"]] if "edge" in found else [found["source_node"], found["target_node"]]
        return np.stack([np.asarray(part) for part in pairs], axis=-1).reshape(-1, 2).astype(np.int64)
    except (pickle.UnpicklingError, struct.error, RuntimeError, EOFError, LookupError, TypeError, ValueError) as error:
        told = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"{path} holds no links ({told}); unpack the data set again") from error
