"""Graphs: parts, batches and figures against plain loops and dense matrices; what is refused; runs to their end."""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from own_files import write_graph as write
from patience import patience
from processes import saved
from warm import Python

from farflung.errors import UserError
from farflung.pipeline.assemble import training
from farflung.pipeline.settings import IslandSettings
from farflung.settings import Settings
from farflung.workloads.dealing import Deal
from farflung.workloads.graph import debian, load, models, parts
from farflung.workloads.graph.data import undirected
from farflung.workloads.graph.reading import read
from farflung.workloads.graph.settings import GraphSettings
from farflung.workloads.graph.workload import Graph

CPU = torch.device("cpu")
NODES, KINDS = 120, 3


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FARFLUNG_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three kinds of nodes; most edges join two of a kind, and features tell a little of it."""
    return write(tmp_path / "graph")


def graph(folder: Path, replicas: int | None = 1, cut: str = "", **chosen: Any) -> Graph:
    return Graph(GraphSettings(data=str(folder), **chosen), Deal(replicas, cut=cut))


def neighbours(edges: np.ndarray, count: int) -> list[set[int]]:
    found: list[set[int]] = [set() for _ in range(count)]
    for one, other in edges.tolist():
        if one != other:
            found[one].add(other)
            found[other].add(one)
    return found


# Parts


@given(pairs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=40))
def test_an_undirected_edge_is_there_once_whatever_its_direction(pairs: list[tuple[int, int]]) -> None:
    found = undirected(np.array(pairs))
    wanted = {frozenset(pair) for pair in pairs if len(set(pair)) == 2}
    assert len(found) == len(wanted) and {frozenset(pair) for pair in found.tolist()} == wanted


@given(
    pairs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30),
    nodes=st.sets(st.integers(0, 9), min_size=1),
)
def test_a_part_has_just_the_edges_whose_ends_are_both_in_it(pairs: list[tuple[int, int]], nodes: set[int]) -> None:
    own = np.array(sorted(nodes))
    found = parts.within(np.array(pairs, np.int64).reshape(-1, 2), own, 10)
    assert own[found].tolist() == [list(pair) for pair in pairs if set(pair) <= nodes]


@pytest.mark.parametrize("cut", ["random", "super", "min-cut"])
@pytest.mark.parametrize("replicas", [1, 3, 4])
def test_each_node_is_in_one_part_and_parts_are_of_about_one_size(folder: Path, cut: str, replicas: int) -> None:
    part_of = graph(folder, replicas, parts=cut, super_nodes=40).part_of
    sizes = np.bincount(part_of, minlength=replicas)
    assert part_of.shape == (NODES,) and len(sizes) == replicas
    assert sizes.min() > 0.5 * NODES / replicas and sizes.max() < 1.5 * NODES / replicas


def test_super_nodes_keep_more_edges_than_random_parts_and_are_more_alike_than_a_minimal_cut(tmp_path: Path) -> None:
    """Twelve cliques in a ring, of three kinds, four neighbouring ones each: the law that SuperTMA rests on."""
    clique = np.array([(a, b) for a in range(10) for b in range(a)])
    edges = np.concatenate(
        [clique + 10 * place for place in range(12)] + [np.array([(9, 10)]) + 10 * p for p in range(11)]
    )
    where = write(tmp_path / "ring", edges=edges, labels=np.arange(NODES) // 40)
    kept, unlike = {}, {}
    for cut in ("random", "super", "min-cut"):
        made = graph(where, 3, parts=cut, super_nodes=12)
        kept[cut] = np.mean([made.part_of[a] == made.part_of[b] for a, b in edges])
        mixes = [np.bincount(made.data.labels[made.part_of == part], minlength=3) for part in range(3)]
        unlike[cut] = np.abs(np.array(mixes) - np.mean(mixes, axis=0)).sum()
    assert kept["random"] < 0.5 < kept["super"] <= kept["min-cut"]
    assert unlike["random"] < unlike["min-cut"] and unlike["super"] < unlike["min-cut"]


def test_metis_takes_any_seed(folder: Path) -> None:
    for seed in (2**31, 2**70):
        cut = graph(folder, 2, parts="min-cut", split_seed=seed).part_of
        assert set(cut.tolist()) == {0, 1}


def test_pieces_are_kept_and_not_cut_again(folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = graph(folder, 2, parts="super", super_nodes=20).part_of
    (kept,) = (own_cache / "graphs").glob("pieces-*.npz")
    before = kept.stat().st_mtime_ns
    assert (graph(folder, 2, parts="super", super_nodes=20).part_of == first).all()
    assert kept.stat().st_mtime_ns == before and not list(own_cache.rglob("*.tmp"))
    kept.write_bytes(kept.read_bytes()[:50])  # as a full disk might leave it
    assert (graph(folder, 2, parts="super", super_nodes=20).part_of == first).all()
    other = graph(folder, 2, parts="super", super_nodes=20, split_seed=1).part_of
    assert (other != first).any()
    assert len(list((own_cache / "graphs").glob("pieces-*.npz"))) == 2


def test_the_method_says_how_the_graph_is_cut_where_the_settings_do_not(folder: Path) -> None:
    def kinds(**chosen: Any) -> int:
        run = Settings.of(workload="graph", data=str(folder), replicas=4, super_nodes=30, **chosen)
        made = run.made_workload()
        assert isinstance(made, Graph)
        return len(np.unique(made.part_of))

    assert kinds(method="noloco") == 1
    assert kinds(method="random-tma") == kinds(method="super-tma") == 4
    assert kinds(method="random-tma", parts="whole") == 1
    own = [graph(folder, 4, cut=cut, super_nodes=30).part_of for cut in ("random", "super")]
    assert (own[0] != own[1]).any()


# Networks


def dense(kind: str, edges: np.ndarray, count: int) -> np.ndarray:
    """The matrices of the papers: D^-1/2 (A + I) D^-1/2, and the mean of the neighbours."""
    table = np.zeros((count, count))
    for one, those in enumerate(neighbours(edges, count)):
        table[one, sorted(those)] = 1
    if kind == "gcn":
        table += np.eye(count)
        degrees = table.sum(axis=1)
        return table / np.sqrt(degrees[:, None] * degrees)
    return table / np.maximum(table.sum(axis=1, keepdims=True), 1)


@pytest.mark.parametrize("kind", ["gcn", "sage"])
def test_a_network_computes_the_papers_formula(folder: Path, kind: str) -> None:
    made = graph(folder, model=kind, hidden=7)
    model, data = made.build(3), made.data
    table, hidden = torch.from_numpy(dense(kind, data.edges, NODES)), torch.from_numpy(data.features).double()
    convolutions: Any = model.encoder.convs
    for number, layer in enumerate(convolutions):
        weights = {name: value.double() for name, value in layer.state_dict().items()}
        if kind == "gcn":
            hidden = table @ hidden @ weights["lin.weight"].T + weights["bias"]
        else:
            near = table @ hidden @ weights["lin_l.weight"].T + weights["lin_l.bias"]
            hidden = near + hidden @ weights["lin_r.weight"].T
        hidden = hidden.relu() if number == 0 else hidden
    found = model.embed(torch.from_numpy(data.features), models.adjacency(kind, data.links, NODES))
    torch.testing.assert_close(found.double(), hidden, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["gcn", "sage"])
def test_weights_follow_from_the_seed_and_a_modules_name(folder: Path, kind: str) -> None:
    made = graph(folder, model=kind)
    one, same, other = (made.build(seed).state_dict() for seed in (1, 1, 2))
    deeper = graph(folder, model=kind, task="links").build(1).state_dict()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    assert all(torch.equal(one[name], deeper[name]) for name in one if name.startswith("encoder"))
    assert all(value.isfinite().all() for value in one.values())


# Batches


@pytest.mark.parametrize("cut", ["random", "super", "whole"])
@pytest.mark.parametrize("task", ["nodes", "links"])
def test_an_epoch_has_each_target_of_each_part_once(folder: Path, cut: str, task: str) -> None:
    made = graph(folder, 3, parts=cut, task=task, targets=7, super_nodes=30)
    everyone = neighbours(made.task.edges, NODES)
    for replica in range(3):
        own = made.part(0 if cut == "whole" else replica, CPU)
        seen: list[tuple[int, ...]] = []
        for step in range(len(np.array_split(own.targets, -(-len(own.targets) // 7)))):
            batch = made.batch(made.sample_ids(0, 0 if cut == "whole" else replica, step, 1))
            wanted, targets = batch["wanted"].tolist(), own.nodes[batch["targets"].numpy()].tolist()
            if task == "nodes":
                assert wanted == [made.data.labels[node] for (node,) in targets]
                seen += [tuple(one) for one in targets]
            else:
                edges = [tuple(pair) for pair, is_edge in zip(targets, wanted, strict=True) if is_edge]
                assert all(two in everyone[one] for one, two in edges) and len(wanted) == 2 * len(edges)
                seen += edges
        if cut != "whole":
            inside = [row for row in made.task.training if set(row) <= set(own.nodes.tolist())]
            assert sorted(seen) == sorted(tuple(map(int, row)) for row in inside)
        assert not {tuple(row) for row in seen} & {tuple(map(int, row)) for row in made.task.held_out}


def test_other_nodes_of_the_pairs_are_of_the_part_and_new_in_each_step(folder: Path) -> None:
    made = graph(folder, 2, parts="random", task="links", targets=1000)
    drawn = []
    for step in (0, 1, 1):
        batch = made.batch(made.sample_ids(0, 1, step, 1))
        pairs = batch["targets"][batch["wanted"] == 0]
        assert pairs.min() >= 0 and pairs.max() < len(made.part(1, CPU).nodes)
        drawn.append(pairs)
    assert not torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[1], drawn[2])


def test_microbatches_weigh_what_their_targets_do(folder: Path) -> None:
    made = graph(folder, task="nodes", targets=50)
    ids, model = made.sample_ids(0, 0, 0, 3), made.build(0)
    whole = made.loss(model, made.batch(ids))
    pieces = [made.batch(ids[:2]), made.batch(ids[2:])]
    mean = sum(made.weight(one) * made.loss(model, one) for one in pieces) / sum(map(made.weight, pieces))
    torch.testing.assert_close(whole, mean)


@pytest.mark.parametrize("kind", ["gcn", "sage"])
def test_in_half_precision_the_loss_is_nearly_the_same(folder: Path, kind: str) -> None:
    made = graph(folder, model=kind)
    model, batch = made.build(0), made.batch(made.sample_ids(0, 0, 0, 2))
    whole = made.loss(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        half = made.loss(model, batch)
    assert half.item() == pytest.approx(whole.item(), rel=0.02) and half.dtype == torch.float32


# Figures


class Told(torch.nn.Module):
    """Scores as they are given: of node a and node b, table[a, b]."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table = table

    def embed(self, features: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        return features

    def scores(self, embedded: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.table[tuple(targets.T)].reshape(len(targets), -1)


@pytest.mark.parametrize("values", [2, 1000])
def test_the_mrr_is_that_of_a_plain_loop(folder: Path, values: int) -> None:
    made = graph(folder, task="links", eval_negatives=9)
    table = torch.randint(values, (NODES, NODES), generator=torch.Generator().manual_seed(0)).float()
    found: Any = made.evaluate(Told(table), 1, CPU)
    others = made.task._others  # type: ignore[attr-defined]
    ranks = []
    for (one, other), drawn in zip(made.task.held_out, others, strict=True):
        own, theirs = float(table[one, other]), [float(table[one, node]) for node in drawn]
        ranks.append(1 + sum(score > own for score in theirs) + sum(score == own for score in theirs) / 2)
    assert found.value == pytest.approx(np.mean([1 / rank for rank in ranks]))
    assert found.others["hits at 10"] == pytest.approx(np.mean([rank <= 10 for rank in ranks]))


def test_a_model_that_says_the_same_of_all_pairs_has_no_good_mrr(folder: Path) -> None:
    found: Any = graph(folder, task="links", eval_negatives=9).evaluate(Told(torch.zeros(NODES, NODES)), 8, CPU)
    assert found.value == pytest.approx(1 / 5.5)


def test_accuracy_is_the_share_of_labels_that_are_right(folder: Path) -> None:
    made = graph(folder)
    labels = torch.from_numpy(made.data.labels)
    right = torch.nn.functional.one_hot(labels, KINDS).float()
    wrong = right.roll(1, dims=1)
    held_out = made.task.held_out[:, 0]
    assert len(held_out) == 12
    mixed = right.clone()
    mixed[held_out[:3]] = wrong[held_out[:3]]
    found: list[Any] = [made.evaluate(Told(table), 1, CPU) for table in (right, wrong, mixed)]
    assert [one.value for one in found] == [1.0, 0.0, 0.75]
    assert made.judged_by.more_is_better


@pytest.mark.parametrize("task", ["nodes", "links"])
def test_what_is_held_out_is_not_trained_on_and_a_link_is_not_seen(folder: Path, task: str) -> None:
    made = graph(folder, task=task).task
    training, held_out = ({tuple(row) for row in rows.tolist()} for rows in (made.training, made.held_out))
    assert training and held_out and not training & held_out
    if task == "links":
        assert not held_out & {tuple(row) for row in made.edges.tolist()}
    assert graph(folder, task=task, split_seed=1).digest() != graph(folder, task=task).digest()


def test_a_folder_may_say_what_is_held_out(tmp_path: Path) -> None:
    where = write(tmp_path / "own", held_out_nodes=np.array([5, 3]), held_out_links=np.array([[7, 2], [2, 9]]))
    nodes, links = (graph(where, task=task).task for task in ("nodes", "links"))
    assert sorted(nodes.held_out[:, 0]) == [3, 5] and not {3, 5} & set(nodes.training[:, 0])
    assert links.held_out.tolist() == [[7, 2], [2, 9]]
    assert not {(2, 7), (2, 9)} & {tuple(row) for row in links.edges.tolist()}


# What is refused


def edges(*rows: tuple[int, int]) -> np.ndarray:
    return np.array(rows)


def features(bad: float) -> np.ndarray:
    found = np.ones((NODES, 2))
    found[4, 1] = bad
    return found


@pytest.mark.filterwarnings("error::RuntimeWarning")  # which people would see above the line
@pytest.mark.parametrize(
    ("changed", "chosen", "words"),
    [
        ({"edges": edges((0, 1), (3, 500))}, {}, "edge 1 has node 500, but there are nodes 0 to 119 only"),
        ({"edges": edges((0, 1), (-1, 2))}, {}, "edge 1 has node -1"),
        ({"edges": np.array([1, 2, 3])}, {}, "edges have the shape (3,); give (number, 2), two nodes for each"),
        ({"edges": np.array(3)}, {}, "edges have the shape (); give (number, 2), two nodes for each"),
        ({"edges": np.array([[0, 2**63]], np.uint64)}, {}, "edges.npy has 9223372036854775808, which"),
        (
            {"labels": np.full(NODES, 2**64 - 1, np.uint64)},
            {},
            "labels.npy has 18446744073709551615, which is too large",
        ),
        (
            {"labels": np.zeros(NODES, int)},
            {},
            "all 108 nodes to train on have one label, label 0",
        ),
        ({"features": features(1e300)}, {}, "the features of node 4 are not all finite in float32"),
        ({"held_out_nodes": np.array([[1], [500]])}, {}, "held-out nodes have the shape (2, 1); give (number,)"),
        ({"held_out_nodes": np.array(500)}, {}, "held-out nodes have the shape (); give (number,)"),
        ({"features": np.full((NODES, 2), "x")}, {}, "features.npy holds <U1; give numbers"),
        ({"labels": np.zeros((NODES, 1), int)}, {}, "labels have the shape (120, 1), but there are 120 nodes"),
        ({"labels": np.array(3)}, {}, "labels have the shape (), but there are 120 nodes"),
        ({"held_out_links": edges((1, 1), (2, 2))}, {"task": "links"}, "0 to judge by, which gives no MRR"),
        ({"edges": np.empty((0, 2), int)}, {}, "there is no edge"),
        ({"edges": np.array([[0.5, 1]])}, {}, "edges.npy holds float64; give whole numbers"),
        ({"features": np.ones((50, 2), np.float32)}, {}, "but there are nodes 0 to 49 only"),
        ({"features": features(np.nan)}, {}, "the features of node 4 are not all finite"),
        ({"features": features(np.inf)}, {}, "the features of node 4 are not all finite"),
        ({"labels": np.zeros(50, int)}, {}, "labels have the shape (50,), but there are 120 nodes"),
        ({"labels": np.arange(NODES) - 5}, {}, "node 0 has the label -5, which is out of range"),
        ({"labels": np.full(NODES, 10**9)}, {}, "node 0 has the label 1000000000, which is out of range"),
        ({"labels": np.full(NODES, -1)}, {}, "no node has a label; give labels.npy, or choose --task links"),
        ({"held_out_nodes": np.array([500])}, {}, "node 500 is held out, but there are nodes 0 to 119 only"),
        ({"held_out_links": edges((0, 500))}, {}, "held-out link 0 has node 500"),
        ({"held_out_links": np.empty((0, 2), int)}, {"task": "links"}, "0 to judge by, which gives no MRR"),
        ({"edges": edges((0, 1))}, {"task": "links"}, "0 links are to train on and 1 to judge by"),
        ({"edges": edges((0, 1), (1, 2))}, {"task": "links", "parts": "random"}, "has no edges to train on"),
        ({}, {"parts": "super", "super_nodes": 500}, "super_nodes is 500; the graph has 120 nodes"),
        ({}, {"parts": "super", "super_nodes": 3}, "super_nodes is 3; the graph has 120 nodes and there are 4 parts"),
        ({"labels": np.arange(NODES) * (np.arange(NODES) < 3) - (np.arange(NODES) > 2)}, {"parts": "random"}, "part "),
        ({}, {"checksum": "0" * 64}, "it is another graph than this run began with"),
    ],
)
def test_what_cannot_be_learnt_from_is_refused_in_a_line(
    tmp_path: Path, changed: dict[str, Any], chosen: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError) as refused:
        graph(write(tmp_path / "bad", **changed), 4, **chosen).check()
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_names_are_lines_of_utf_8_and_may_hold_other_marks(tmp_path: Path) -> None:
    folder = write(tmp_path / "named")
    names = [f"a\u2028\x85{number}" for number in range(NODES)]
    (folder / "names.txt").write_text("\n".join(names) + "\n", "utf-8")
    assert read(str(folder)).names == tuple(names)
    (folder / "names.txt").write_bytes(b"\xe9\n" * NODES)
    with pytest.raises(UserError, match=r"names\.txt is no text in UTF-8: .*; save it as such"):
        read(str(folder))


@pytest.mark.parametrize("task", ["nodes", "links"])
def test_a_spoilt_model_has_no_score(folder: Path, task: str) -> None:
    """No score is greater than NaN, so that the true one would come first."""
    made = graph(folder, 1, task=task, parts="whole")
    model = made.build(0).eval()
    with torch.no_grad():
        model.head[2].bias.fill_(torch.nan)
        assert np.isnan(made.evaluate(model, 8, torch.device("cpu")).value)


def test_a_part_without_any_node_is_told(folder: Path) -> None:
    """Not given to two replicas instead: METIS may leave a part empty."""
    made = graph(folder, 3, parts="random")
    made.__dict__["part_of"] = np.arange(NODES) % 2
    with pytest.raises(UserError, match="part 2 of 3 has no nodes to train on"):
        made.check()


def test_a_folder_that_is_none_and_files_that_are_no_arrays_are_refused(tmp_path: Path, folder: Path) -> None:
    def refused(name: str, words: str) -> None:
        with pytest.raises(UserError, match=words) as error:
            read(name)
        assert "\n" not in str(error.value)

    refused(str(tmp_path / "nosuch"), "there is no such folder")
    (folder / "edges.npy").write_bytes(b"\x93NUMPY nothing")
    refused(str(folder), r"edges\.npy is no array of numbers")
    with (folder / "edges.npy").open("wb") as file:
        np.savez(file, edges=np.zeros((3, 2), int))
    refused(str(folder), r"edges\.npy is an archive of arrays; write the array alone, with numpy\.save")
    (folder / "edges.npy").unlink()
    refused(str(folder), r"there is no .*edges\.npy; give a folder")


def test_parts_need_a_number_of_replicas(folder: Path) -> None:
    with pytest.raises(UserError, match="choose --parts whole"):
        graph(folder, None, parts="random").check()
    graph(folder, None).check()
    assert len(graph(folder, None).sample_ids(0, 17, 3, 4)) == 4


@pytest.mark.parametrize(("package", "parts"), [("torch_geometric.nn", "random"), ("pymetis", "super")])
def test_what_is_not_installed_is_told(folder: Path, package: str, parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=r"install farflung\[graphs\]"):
        graph(folder, 2, parts=parts, super_nodes=20).check()


def test_a_graph_networks_layers_are_not_computed_twice(folder: Path) -> None:
    with pytest.raises(UserError, match="leave out --recompute"):
        training(graph(folder).build(0), IslandSettings(recompute=True))


# OGB's format, and Debian's packages


def table(path: Path, rows: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        file.writelines(",".join(map(str, np.atleast_1d(row))) + "\n" for row in rows)


@pytest.fixture
def ogb(folder: Path, tmp_path: Path) -> Path:
    made = tmp_path / "ogbn-made"
    for name, array in {"edge": "edges", "node-feat": "features", "node-label": "labels"}.items():
        table(made / "raw" / f"{name}.csv.gz", np.load(folder / f"{array}.npy").tolist())
    return made


def test_ogbs_nodes_are_split_as_it_says_and_test_labels_are_not_looked_at(folder: Path, ogb: Path) -> None:
    for name, nodes in {"train": range(80), "valid": range(80, 100), "test": range(100, 120)}.items():
        table(ogb / "split" / "time" / f"{name}.csv.gz", nodes)
    for _ in range(2):  # the second time out of the cache
        found, plain = graph(ogb), read(str(folder))
        assert (found.data.links == plain.links).all() and np.allclose(found.data.features, plain.features)
        assert found.task.training[:, 0].tolist() == list(range(80))
        assert found.task.held_out[:, 0].tolist() == list(range(80, 100))
    assert (found.data.labels[100:] == -1).all() and (found.data.labels[:100] == plain.labels[:100]).all()


@pytest.mark.parametrize("as_sources", [False, True])
def test_ogbs_links_are_judged_by_its_validation_set(ogb: Path, as_sources: bool) -> None:
    pairs = np.array([[7, 2], [2, 9]])
    held: dict[str, Any] = {"source_node": pairs[:, 0], "target_node": pairs[:, 1]} if as_sources else {"edge": pairs}
    (ogb / "split" / "time").mkdir(parents=True)
    torch.save(held, ogb / "split" / "time" / "valid.pt")
    assert graph(ogb, task="links").task.held_out.tolist() == pairs.tolist()


def test_what_ogbs_folder_lacks_is_told(ogb: Path) -> None:
    (ogb / "raw" / "node-feat.csv.gz").rename(ogb / "elsewhere")
    with pytest.raises(UserError, match=r"there is no .*node-feat\.csv\.gz"):
        read(str(ogb))
    table(ogb / "raw" / "node-feat.csv.gz", ["x,y"])
    with pytest.raises(UserError, match=r"node-feat\.csv\.gz is no table of numbers"):
        read(str(ogb))


@pytest.mark.parametrize("held", [b"junk", {"foo": 1}, [1], {"edge": None}])
def test_ogbs_links_that_are_none_are_told(ogb: Path, held: Any) -> None:
    path = ogb / "split" / "time" / "valid.pt"
    path.parent.mkdir(parents=True)
    if isinstance(held, bytes):
        path.write_bytes(held)
    else:
        torch.save(held, path)
    with pytest.raises(UserError, match=r"valid\.pt holds no links .*; unpack the data set again"):
        read(str(ogb))


@pytest.mark.parametrize("node", [-1, 10**6])
def test_ogbs_test_set_of_nodes_that_are_not_there_is_told(ogb: Path, node: int) -> None:
    folder = ogb / "split" / "time"
    folder.mkdir(parents=True)
    table(folder / "test.csv.gz", [str(node)])
    with pytest.raises(UserError, match=rf"test\.csv\.gz has node {node}, but there are labels of"):
        read(str(ogb))


LISTS = """Package: editor
Version: 1
Depends: libtext (>= 2), libc | libc-small
Section: editors
Description: an editor of plain text

Package: libtext
Pre-Depends: libc:any
Section: libs
Description: handles plain text

Package: libc
Section: libs
Description: the library of plain text and all else

Package: alone
Section: games
Description: plays plain games
"""


def apt(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An apt-cache that says this, which was not asked yet."""
    debian.read.cache_clear()
    folder.mkdir(exist_ok=True)
    (folder / "lists").write_text(text)
    (folder / "apt-cache").write_text(f'#!/bin/sh\n[ "$1" = dumpavail ] && exec cat {folder / "lists"}\n')
    (folder / "apt-cache").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_debians_packages_are_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apt(tmp_path / "bin", LISTS, monkeypatch)
    found = read("debian")
    assert found.names == ("editor", "libc", "libtext") and found.classes == ("editors", "libs")
    assert found.labels.tolist() == [0, 1, 1] and found.links.tolist() == [[0, 1], [0, 2], [1, 2]]
    apt(tmp_path / "bin", LISTS.replace("plays plain", "has plain"), monkeypatch)
    assert read("debian").checksum != found.checksum


@pytest.mark.parametrize("text", ["", "Package: alone\nSection: games\n"])
def test_a_machine_without_lists_is_told_what_to_do(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apt(tmp_path / "bin", text, monkeypatch)
    with pytest.raises(UserError, match="run apt-get update first"):
        read("debian")


def test_a_machine_without_apt_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    debian.read.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"apt-cache cannot be asked.*run apt-get update first"):
        read("debian")


def test_features_are_the_largest_directions_of_tf_idf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against numpy: inner products of features are those of the table's best approximation of that rank."""
    rng = np.random.default_rng(0)
    texts = [[f"word{'abcdefghij'[n]}" for n in rng.integers(10, size=6)] for _ in range(40)]
    monkeypatch.setattr(debian, "WIDTH", 4)
    words = sorted({word for text in texts for word in text})
    counts = np.array([[text.count(word) for word in words] for text in texts])
    weights = np.where(counts > 0, 1 + np.log(np.maximum(counts, 1)), 0) * (
        1 + np.log(41 / (1 + (counts > 0).sum(axis=0)))
    )
    weights /= np.linalg.norm(weights, axis=1, keepdims=True)
    left, strengths, _ = np.linalg.svd(weights, full_matrices=False)
    best = left[:, :4] * strengths[:4]
    found = debian.features_of(texts)
    wanted = best @ best.T * (found**2).sum() / (best**2).sum()
    assert np.allclose(found @ found.T, wanted, atol=0.02 * np.abs(wanted).max()) and np.std(found) < 1.01


# Whole runs


def farflung(*words: object) -> tuple[int, str, str]:
    process = Python("-m", "farflung", *words)
    out, errors = process.communicate(timeout=patience(120))
    return process.returncode, out, errors


SMALL = ("--workload", "graph", "--replicas", 2, "--every", 4, "--inner", "adamw", "--lr", "0.02", "--warmup", 2)
SMALL += ("--steps", 40, "--eval-every", 10, "--log-every", 10, "--checkpoint-every", 20, "--super-nodes", 30)


@pytest.mark.slow
def test_a_run_learns_resumes_and_is_exported(folder: Path, tmp_path: Path) -> None:
    """Simulated and of real processes: the same weights, which go on from a checkpoint, and are exported."""
    common = (*SMALL, "--data", folder, "--method", "super-tma", "--keep-checkpoints", 9)
    for network in ("simulated", "torch"):
        code, out, errors = farflung("train", *common, "--network", network, "--out", tmp_path / network)
        assert code == 0, errors
        assert "predicted" in out
    one, other = (saved(tmp_path / network, 40, 1)["model"] for network in ("simulated", "torch"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    code, _, errors = farflung("export", tmp_path / "torch", tmp_path / "model")
    assert code == 0, errors
    made, model = graph(folder), load(tmp_path / "model")
    found: Any = made.evaluate(model, 8, CPU)
    assert found.value > 0.6  # 1/3 by chance
    assert json.loads((tmp_path / "model" / "config.json").read_text())["labels"] == [f"label {n}" for n in range(3)]
    with pytest.raises(UserError, match="holds no graph network"):
        load(tmp_path / "torch")


@pytest.mark.slow
def test_another_graph_is_refused_when_a_run_goes_on_and_export_needs_none(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, _, errors = farflung("train", *SMALL, "--data", folder, "--network", "simulated", "--out", run)
    assert code == 0, errors
    np.save(folder / "labels.npy", np.zeros(NODES, int))
    code, _, errors = farflung("train", "--resume", run, "--steps", 60)
    assert code == 2 and "another graph than this run began with" in errors.splitlines()[-1]
    code, _, errors = farflung("export", run, tmp_path / "model")  # needs no graph, but cannot say what labels mean
    assert code == 0, errors
    assert "labels" not in json.loads((tmp_path / "model" / "config.json").read_text())
    assert sum(one.numel() for one in load(tmp_path / "model").parameters()) > 0
