"""Recommenders: click logs as they are read and encoded, the model, its figure, and runs."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from own_files import criteo_line, write_log, write_parquet
from processes import run_here
from safetensors.torch import load_file
from torch import Tensor, nn

from farflung import UserError, methods
from farflung.embeddings import Bags, ShardedTables
from farflung.networks import SimulatedNetwork, Simulation
from farflung.training.agreement import refuse_changed_data
from farflung.workloads.clicks import files, synthetic
from farflung.workloads.clicks.encoding import Encoder
from farflung.workloads.clicks.figures import auc
from farflung.workloads.clicks.log import Categories, ClickLog
from farflung.workloads.clicks.model import DLRM, bags_of, initialise
from farflung.workloads.clicks.settings import ClicksSettings
from farflung.workloads.clicks.workload import Recommender
from farflung.workloads.dealing import Deal

CPU = torch.device("cpu")


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=2, max_size=40))
def test_the_auc_counts_pairs(clicks: list[tuple[bool, int]]) -> None:
    came, other = ([score for label, score in clicks if label is side] for side in (True, False))
    found = auc([label for label, _ in clicks], [score for _, score in clicks])
    if came and other:
        wins = sum((one > two) + (one == two) / 2 for one in came for two in other)
        assert found == pytest.approx(wins / (len(came) * len(other)))
    else:
        assert np.isnan(found)


def criteo(folder: Path, lines: Sequence[str], name: str = "day.tsv") -> str:
    return str(write_log(folder / name, lines))


def parquet(folder: Path, columns: dict[str, Any], name: str = "day.parquet") -> str:
    return str(write_parquet(folder / name, columns))


def recommender(data: str, **settings: Any) -> Recommender:
    return Recommender(ClicksSettings(data=data, **settings))


@pytest.mark.parametrize("name", ["day.tsv", "day.tsv.gz"])
def test_a_log_of_criteos_is_read(name: str, tmp_path: Path) -> None:
    lines = [criteo_line(click) for click in range(200)]
    log = recommender(criteo(tmp_path, lines, name))._log
    assert log.labels.tolist() == [click % 3 // 2 for click in range(200)]
    assert list(log.numbers) == [f"I{n}" for n in range(1, 14)] and len(log.categories) == 26
    assert log.numbers["I3"].tolist() == [3.0 * click for click in range(200)] and np.isnan(log.numbers["I13"]).all()
    assert log.shown(7)["C4"] == "00000002" and log.shown(7)["C26"] == ""


def test_a_packed_log_that_is_damaged_is_told_in_a_line(tmp_path: Path) -> None:
    path = Path(criteo(tmp_path, [criteo_line(click) for click in range(2000)], "day.tsv.gz"))
    whole = path.read_bytes()
    for damaged in (whole[:40], whole[:200] + bytes(100) + whole[300:]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"day\.tsv\.gz (is damaged|cannot be read): .*; mend it, or name another$"):
            _ = recommender(str(path))._log


def test_files_are_read_one_after_the_other_up_to_a_number_of_clicks(tmp_path: Path) -> None:
    for day in range(3):
        criteo(tmp_path, [criteo_line(100 * day + click) for click in range(100)], f"{day}.tsv")
    clicks = recommender(str(tmp_path / "*.tsv"), max_clicks=150)
    assert clicks._log.numbers["I1"].tolist() == [*range(150)]


def test_columns_with_names_are_taken_by_them(tmp_path: Path) -> None:
    text = criteo(tmp_path, ["shop\tprice\tbought", *(f"s{n % 3}\t{n / 2}\t{n % 2}" for n in range(40))])
    columns = {"shop": [f"s{n % 3}" for n in range(40)], "price": [n / 2 for n in range(40)]}
    typed = parquet(tmp_path, columns | {"bought": [bool(n % 2) for n in range(40)]})
    for log in (
        recommender(text, label="bought", numbers="price")._log,
        recommender(typed, label="bought")._log,
    ):
        assert list(log.numbers) == ["price"] and list(log.categories) == ["shop"]
        assert log.labels.tolist() == [n % 2 for n in range(40)] and log.numbers["price"][3] == 1.5
        assert [log.shown(n)["shop"] for n in range(4)] == ["s0", "s1", "s2", "s0"]


def test_ends_of_lines_and_names_of_files_are_as_others_write_them(tmp_path: Path) -> None:
    lines = [criteo_line(click) for click in range(60)]
    for end in ("\r", "\r\n"):
        (tmp_path / "old.tsv").write_bytes(end.join(lines).encode())
        log = recommender(str(tmp_path / "old.tsv"))._log
        assert len(log) == 60 and list(log.categories)[-1] == "C26"
    shouted = parquet(tmp_path, {"label": [0, 1] * 30, "shop": ["a", "b"] * 30}, "DAY.PARQUET")
    assert list(recommender(shouted)._log.categories) == ["shop"]


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    data = criteo(tmp_path, ["\ufefflabel\tshop", *(f"{n % 2}\ts{n % 3}" for n in range(20))])
    log = files.read(data, ClicksSettings())
    assert list(log.categories) == ["shop"] and log.labels.tolist() == [0, 1] * 10


def test_a_spoilt_model_has_no_auc() -> None:
    assert np.isnan(auc([0, 1, 1], [0.5, np.nan, 0.25]))


def broken(folder: Path, kind: str) -> str:
    """A log in which something is amiss."""
    lines = [criteo_line(click) for click in range(50)]
    if kind == "short line":
        return criteo(folder, [*lines[:16], lines[16].rpartition("\t")[0], *lines[17:]])
    if kind == "short line under names":
        return criteo(folder, ["label\tshop", *(f"{n % 2}\ts{n}" for n in range(5000)), "0"])
    if kind == "empty line":
        return criteo(folder, [*lines[:16], "", *lines[17:]])
    if kind in ("no text", "short line of no text"):
        bad = criteo_line(16, C3="BAD") if kind == "no text" else "0\tBAD"
        data = Path(criteo(folder, [*lines[:16], bad, *lines[17:]]))
        data.write_bytes(data.read_bytes().replace(b"BAD", b"\xff"))
        return str(data)
    if kind == "no number":
        return criteo(folder, [*lines[:16], criteo_line(16, I3="many"), *lines[17:]])
    if kind == "no label":
        return criteo(folder, [*lines[:16], criteo_line(16, label="2"), *lines[17:]])
    if kind == "words":
        return parquet(folder, {"label": [0, 1, 1], "price": ["1", "2", "cheap"], "shop": ["a", "b", "c"]})
    if kind == "no positive":
        return criteo(folder, [criteo_line(click, label="0") for click in range(50)])
    if kind == "nothing":
        return criteo(folder, [])
    if kind == "commas":
        return criteo(folder, ["label,shop", "0,a", "1,b"])
    if kind == "no name":
        return criteo(folder, ["\tlabel\tshop", "0\t0\ta", "1\t1\tb"])
    if kind == "one name":
        return criteo(folder, ["label\tshop\tshop", "0\ta\ta", "1\tb\tb"])
    if kind == "lists":
        return parquet(folder, {"label": [0, 1], "shop": [["a"], ["b", "c"]]})
    if kind == "no column":
        return parquet(folder, {"labels": [0, 1], "shop": ["a", "b"]})
    if kind == "no categories":
        return parquet(folder, {"label": [0, 1], "price": [0.5, 1.5]})
    if kind == "no parquet":
        return criteo(folder, lines, "day.parquet")
    if kind == "unlike":
        parquet(folder, {"label": [0, 1], "shop": ["a", "b"]}, "1.parquet")
        parquet(folder, {"label": [0, 1], "town": ["a", "b"]}, "2.parquet")
        return str(folder / "*.parquet")
    return str(folder / "none.tsv")


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("short line", {}, "day.tsv, line 17: 39 fields where line 1 has 40; mend or remove that line"),
        ("short line under names", {}, "day.tsv, line 5002: 1 field where line 1 has 2; mend or remove that line"),
        ("empty line", {}, "day.tsv, line 17: the label is ''; it must be 0 or 1"),
        ("no text", {}, "day.tsv, line 17 is no text in UTF-8; mend or remove that line"),
        ("short line of no text", {}, "day.tsv, line 17 is no text in UTF-8; mend or remove that line"),
        ("no number", {}, "day.tsv, line 17: column I3 holds 'many', which is no number; mend it, or name others in"),
        ("no label", {}, "day.tsv, line 17: the label is '2'; it must be 0 or 1"),
        ("words", {"numbers": "price"}, "day.parquet, row 3: column price holds 'cheap', which is no number"),
        (
            "words",
            {"numbers": "prise"},
            "day.parquet has no column 'prise', which --numbers names; did you mean",
        ),
        ("no positive", {}, "hold no positive click (label 1) among 50; give a log with both kinds"),
        ("nothing", {}, "day.tsv begins with an empty line, or is empty; leave it out"),
        ("commas", {}, "day.tsv, line 1 has no tabs, which must be between columns"),
        ("no name", {}, "day.tsv: column 1 has no name; give it one, or remove it"),
        ("one name", {}, "day.tsv has 'shop' as the name of more than one column; rename the others"),
        ("lists", {}, "day.parquet: column 'shop' holds list<"),
        ("words", {"numbers": "price,label"}, "--numbers names 'label', which is the label; leave it out"),
        ("no column", {}, "day.parquet has no column 'label'; did you mean 'labels'?; set --label"),
        ("no categories", {}, "day.parquet has no column of categories; leave some out of --numbers"),
        ("no parquet", {}, "day.parquet is no Parquet file"),
        ("unlike", {}, "2.parquet has the columns town where "),
        ("missing", {}, "there are no files"),
    ],
)
def test_what_is_amiss_in_a_log_is_told_in_a_line(
    kind: str,
    settings: dict[str, str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(files, "BLOCK", 2000)  # so that even these small files are read in pieces
    with pytest.raises(UserError) as told:
        _ = recommender(broken(tmp_path, kind), **settings)._log
    assert words in str(told.value) and "\n" not in str(told.value)
    assert capfd.readouterr().err == ""  # where a library would write what it has swallowed


def test_a_new_category_takes_the_unknown_row_and_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    columns = {"label": [n % 2 for n in range(60)], "shop": [f"s{n % 3}" for n in range(60)], "town": ["a"] * 60}
    data = parquet(tmp_path, columns)
    columns = {"label": [0, 1, 1, 0], "shop": ["s2", "new", "s0", "newer"], "town": ["a"] * 4}
    validation = parquet(tmp_path, columns, "validation.parquet")
    clicks = recommender(data, validation=validation)
    assert clicks.judged_on.rows.tolist() == [[3, 1], [0, 1], [1, 1], [0, 1]]
    assert clicks.available == 60
    (line,) = caplog.messages
    assert line.startswith(f"{validation}: some categories of 4 clicks") and "(shop 2)" in line


def test_the_most_frequent_categories_have_rows_and_numbers_one_size() -> None:
    words = ["rare", "often", "some", "never"]
    codes = np.array([1, 1, 1, 2, 2, 0, 3])
    heights = np.array([0, 1, 3, 7, np.nan, 0, 1000], np.float32)
    log = ClickLog("here", np.zeros(7, np.float32), {"height": heights}, {"shop": Categories(codes, words)})
    encoder = Encoder.of(log, np.arange(6), max_rows=3)
    assert encoder.words == {"shop": ["often", "some"]} and encoder.table_rows == [3]
    clicks = encoder.encoded(log)
    assert clicks.rows[:, 0].tolist() == [1, 1, 1, 2, 2, 0, 0]
    logs = np.log1p(np.array([0, 1, 3, 7, 0]))
    expected = (np.log1p(heights) - logs.mean()) / logs.std()
    expected[4] = 0  # a number that is missing is the mean
    np.testing.assert_allclose(clicks.numbers[:, 0], expected, rtol=1e-5)
    other = ClickLog("there", np.zeros(1, np.float32), {}, log.categories)
    with pytest.raises(UserError, match="there has the columns shop; the model has height, shop"):
        encoder.encoded(other)


def test_every_click_is_trained_on_or_held_out_and_never_both() -> None:
    clicks = recommender("synthetic", max_clicks=1000)
    training, held = clicks._split
    assert sorted([*training, *held]) == [*range(1000)] and len(held) == 50
    seen = np.concatenate([clicks.sample_ids(0, 0, step, 95) for step in range(10)])
    assert sorted(seen) == sorted(training)  # an epoch has each once
    shares = [Recommender(ClicksSettings(max_clicks=1000), Deal(2)).sample_ids(0, rank, 3, 20) for rank in range(2)]
    assert not set(shares[0]) & set(shares[1])


def test_a_run_does_not_go_on_with_another_log(tmp_path: Path) -> None:
    """Other clicks give categories other rows."""
    lines = ["label\tshop", *(f"{n % 2}\ts{n % 5}" for n in range(60))]
    log = tmp_path / "day.tsv"

    def known() -> dict[str, str]:
        return recommender(str(log)).known

    log.write_text("\n".join(lines) + "\n")
    before = known()
    refuse_changed_data(before, known())
    log.write_text("\n".join(lines[:30] + lines[31:]) + "\n")
    with pytest.raises(UserError, match=r"day\.tsv: has changed since this run began"):
        refuse_changed_data(before, known())


def test_more_synthetic_clicks_begin_with_the_same() -> None:
    few, many = synthetic.read(300), synthetic.read(900)
    assert np.array_equal(few.labels, many.labels[:300]) and 0 < few.labels.mean() < 1
    for name in few.categories:
        assert few.shown(299)[name] == many.shown(299)[name]
    assert all(np.array_equal(few.numbers[name], many.numbers[name][:300]) for name in few.numbers)


def test_debians_pairs_are_those_of_apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stanzas = [f"Package: p{n}\nSection: s{n % 2}\nMaintainer: me\n" for n in range(40)]
    for n in range(1, 40):
        stanzas[n] += f"Depends: p0 (>= 1) | p{n - 1}, elsewhere\n"
    (tmp_path / "lists").write_text("\n".join(stanzas))
    (tmp_path / "apt-cache").write_text(f"#!/bin/sh\n[ $1 = dumpavail ] && cat {tmp_path / 'lists'}\n")
    (tmp_path / "apt-cache").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    log = recommender("debian")._log
    pairs = {(n, 0) for n in range(1, 40)} | {(n, n - 1) for n in range(1, 40)}
    for click, label in enumerate(log.labels):
        shown = log.shown(click)
        pair = tuple(int(shown[title].removeprefix("p")) for title in ("package", "needed package"))
        assert (pair in pairs) == bool(label)
        assert shown["section"] == f"s{pair[0] % 2}" and shown["needed maintainer"] == "me"
    assert log.labels.sum() == len(pairs) and len(log) > 2 * len(pairs)


@pytest.mark.parametrize("there", [True, False])
def test_a_machine_without_apts_lists_is_told_what_to_do(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if there:
        (tmp_path / "apt-cache").write_text("#!/bin/sh\n")
        (tmp_path / "apt-cache").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"data is debian, and apt.*; run apt-get update first"):
        _ = recommender("debian")._log


@pytest.mark.parametrize("numbers", [0, 3])
def test_the_model_is_dlrms_equations(numbers: int) -> None:
    model = DLRM(numbers, rows=[5, 9, 4], width=6, hidden=7)
    initialise(model, 3)
    given, rows = torch.randn(8, numbers), torch.stack([torch.randint(count, (8,)) for count in (5, 9, 4)], dim=1)
    found = model(given, rows)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def through(name: str, x: Tensor, layers: int) -> Tensor:
        for n in range(layers):
            x = weights[f"{name}.{2 * n}.weight"] @ x + weights[f"{name}.{2 * n}.bias"]
            x = x.clamp(min=0) if n < layers - 1 else x
        return x

    for click in range(8):
        lower = through("interactions.lower", given[click], 2) if numbers else weights["interactions.lower.row"]
        vectors = [lower, *(weights[f"tables.bags.table{n}.weight"][rows[click, n]] for n in range(3))]
        products = torch.stack([one @ other for one, other in combinations(vectors, 2)])
        torch.testing.assert_close(found[click], through("interactions.upper", torch.cat([lower, products]), 3)[0])


def test_weights_follow_from_the_seed_and_the_modules_name() -> None:
    clicks = recommender("synthetic", max_clicks=500)
    whole = clicks.build(4)

    def without_tables(model: Any) -> None:
        del model.tables

    rest = clicks.build(4, reshape=without_tables)
    for name, weight in rest.named_parameters():
        assert torch.equal(weight, whole.get_parameter(name))
    other = clicks.build(5)
    assert not torch.equal(other.tables.bags["table3"].weight, whole.tables.bags["table3"].weight)
    assert torch.isfinite(torch.cat([weight.detach().flatten() for weight in whole.parameters()])).all()


class Dealt(nn.Module):
    """A DLRM whose tables the replicas have dealt out."""

    def __init__(self, model: DLRM, network: SimulatedNetwork) -> None:
        super().__init__()
        self.tables = ShardedTables(list(model.tables.bags.values()), network)
        self.interactions = model.interactions

    def forward(self, numbers: Tensor, rows: Tensor) -> Tensor:
        return self.interactions(numbers, self.tables([Bags(*bag) for bag in bags_of(rows)]))


def test_dealt_tables_beside_averaged_layers_train_as_averaged_copies_do() -> None:
    clicks = recommender("synthetic", max_clicks=2000)

    def trained(network: SimulatedNetwork, dealt: bool) -> tuple[list[Tensor], Tensor]:
        copies = clicks.build(0)
        model = Dealt(copies, network) if dealt else copies
        attached = model.interactions if dealt else model
        optimizer = torch.optim.SGD(attached.parameters(), lr=0.3)
        own = torch.optim.SGD(model.tables.parameters(), lr=0.3) if dealt else None
        with methods.ddp().attach(attached, optimizer, network):
            for step in range(6):
                ids = clicks.sample_ids(0, network.rank, step, 32)
                clicks.loss(model, clicks.batch(ids)).backward()
                for one in filter(None, (optimizer, own)):
                    one.step()
                    one.zero_grad()
        tables = model.tables.whole_weights() if dealt else [bag.weight for bag in model.tables.bags.values()]
        return tables, torch.cat([weight.detach().flatten() for weight in model.interactions.parameters()])

    for replicas in (2, 3):
        one, other = (
            Simulation(replicas).run(lambda network, dealt=dealt: trained(network, dealt)) for dealt in (True, False)
        )
        for (tables, rest), (all_tables, whole) in zip(one, other, strict=True):
            torch.testing.assert_close(rest, whole, rtol=0, atol=1e-6)
            for table, copy in zip(tables, all_tables, strict=True):
                torch.testing.assert_close(table, copy, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_run_is_judged_by_its_auc_and_its_model_is_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--workload", "clicks", "--max-clicks", "2000", "--replicas", "2", "--network", "simulated")
    small += ("--every", "4", "--steps", "12", "--eval-every", "4", "--batch-size", "64", "--log-every", "4")
    assert run_here(monkeypatch, tmp_path, "train", *small, "--out", "run") == 0
    assert run_here(monkeypatch, tmp_path, "export", "run", "model") == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "AUC" in capsys.readouterr().out and summary["units"] == "clicks"
    assert summary["sample"].split("\n")[0].split() == ["chance", "came", "C1", "C2", "C3", "C4"]
    exported = tmp_path / "model"
    model = DLRM(**json.loads((exported / "config.json").read_text()))
    model.load_state_dict(load_file(exported / "model.safetensors"))
    encoder = Encoder(**json.loads((exported / "encoder.json").read_text()))
    clicks = recommender("synthetic", max_clicks=2000)
    held = encoder.encoded(clicks._log)
    chosen = torch.from_numpy(clicks._split[1])
    with torch.no_grad():
        logits = model(held.numbers[chosen], held.rows[chosen])
    assert auc(held.labels[chosen], logits) == pytest.approx(summary["auc_averaged"], abs=1e-6)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, held.labels[chosen])
    assert summary["others_averaged"]["log loss"] == pytest.approx(float(expected), abs=1e-5)
