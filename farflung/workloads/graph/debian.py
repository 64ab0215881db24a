"""The packages of Debian and what they depend on: a real graph that each machine with apt has, or can get.

A package's label is its section. Its features are made of the words of its name and of its one-line description.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from farflung.errors import UserError
from farflung.workloads import apt
from farflung.workloads.apt import Package
from farflung.workloads.graph.data import GraphData, undirected
from farflung.workloads.graph.kept import Arrays, kept

MOST_EDGES = 1000
"""A package with more is left out: it tells nothing of those that depend on it."""
WIDTH = 64
"""Features of a package."""
LEAST_USES = 3
"""A word that fewer packages have is left out."""


@functools.cache
def read() -> GraphData:
    """The graph of the packages that apt's lists named when this process first asked. Raises UserError for none."""
    packages = apt.packages("Section", "Description")
    checksum = hashlib.sha256(json.dumps(packages).encode()).hexdigest()
    made = kept("debian", [checksum, WIDTH, MOST_EDGES, LEAST_USES], lambda: graph_of(packages))
    names, classes = (tuple(made[name].tolist()) for name in ("names", "classes"))
    return GraphData("debian", made["features"], made["edges"], checksum, made["labels"], names, classes)


def graph_of(packages: Mapping[str, Package]) -> Arrays:
    """Of packages by their names. Raises UserError."""
    edges = _edges(packages)
    if not len(edges):
        raise UserError(f"no package in apt's lists has few enough dependencies; {apt.REMEDY}")
    used, edges = np.unique(edges, return_inverse=True)
    everyone = list(packages)
    names = [everyone[number] for number in used]
    sections = [packages[name].get("Section", "unknown") for name in names]
    classes, labels = np.unique(sections, return_inverse=True)
    words = [_words(f"{name} {packages[name].get('Description', '')}") for name in names]
    return {
        "features": features_of(words),
        "edges": edges.reshape(-1, 2).astype(np.int64),
        "labels": labels.astype(np.int64),
        "names": np.array(names),
        "classes": classes,
    }


def _edges(packages: Mapping[str, Package]) -> NDArray[np.int64]:
    """(edges, 2), of all alternatives; without what has too many."""
    edges = undirected(apt.pairs(packages))
    many = np.bincount(edges.ravel(), minlength=len(packages)) > MOST_EDGES
    return edges[~many[edges].any(axis=1)]


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]{2,}", text.lower())


def features_of(texts: list[list[str]]) -> NDArray[np.float32]:
    """(texts, WIDTH): TF-IDF of their words, and of that the largest singular directions."""
    uses = Counter(word for words in texts for word in set(words))
    known = {word: number for number, word in enumerate(sorted(w for w in uses if uses[w] >= LEAST_USES))}
    rows, columns, values = [], [], []
    for row, words in enumerate(texts):
        counts = Counter(word for word in words if word in known)
        of_words = {
            word: (1 + np.log(n)) * (1 + np.log((1 + len(texts)) / (1 + uses[word]))) for word, n in counts.items()
        }
        length = np.sqrt(sum(weight**2 for weight in of_words.values())) or 1.0
        rows += [row] * len(of_words)
        columns += [known[word] for word in of_words]
        values += [weight / length for weight in of_words.values()]
    shape = (len(texts), len(known))
    places, weights = torch.tensor([rows, columns]), torch.tensor(values, dtype=torch.float32)
    table = torch.sparse_coo_tensor(places, weights, shape, check_invariants=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # With more directions than are kept, the kept ones are found exactly enough.
        left, strengths, _ = torch.svd_lowrank(table.coalesce(), q=min(2 * WIDTH, *shape), niter=4)
    features = (left * strengths)[:, :WIDTH]
    features *= np.sqrt(features.numel()) / features.norm()  # as large as what networks are made for
    return features.numpy()
