"""Runs whose replicas deal tables of embeddings out, against runs in which each has all."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import same, saved, train_together, trained_here
from safetensors.torch import load_file
from torch import Tensor

from farflung.errors import UserError
from farflung.events import EvaluationEvent, StepEvent
from farflung.planner.outlook import outlook
from farflung.report.read import read_run
from farflung.settings import Settings
from farflung.training import checkpoint
from farflung.training.dealt_tables import check_tables
from farflung.training.export import export
from farflung.training.resharding import whole_weights

SMALL: dict[str, Any] = {
    "workload": "clicks",
    "method": "ddp",
    "inner": "adamw",
    "batch_size": 32,
    "steps": 12,
    "warmup": 2,
    "max_clicks": 1500,
    "width": 4,
    "hidden": 8,
    "replicas": 3,
    "network": "simulated",
    "clip": 0.0,
    "eval_every": 6,
    "log_every": 1,
    "checkpoint_every": 6,
    "lr_schedule": "stable",
}


def run(folder: Path, resume: bool = False, **given: Any) -> Path:
    trained_here(folder, resume, **SMALL | given)
    return folder


def figures(folder: Path) -> list[float | None]:
    """All losses and scores, of all replicas, in order."""
    told = read_run(folder)
    losses = [event.loss for replica in told.replicas for event in told.of(replica, StepEvent)]
    return losses + [event.score for replica in told.replicas for event in told.of(replica, EvaluationEvent)]


def averaged(folder: Path) -> dict[str, Tensor]:
    return whole_weights(checkpoint.averages(folder))


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("copied") / "run")


@pytest.fixture(scope="module")
def dealt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("dealt") / "run", tables="dealt")


def test_a_run_with_dealt_tables_is_one_in_which_each_replica_has_all(copied: Path, dealt: Path) -> None:
    assert figures(dealt) == pytest.approx(figures(copied), rel=0, abs=1e-6)
    for name, weight in averaged(copied).items():
        torch.testing.assert_close(averaged(dealt)[name], weight, rtol=0, atol=1e-5)
    held = [saved(dealt, 12, replica)["model"].keys() for replica in range(3)]
    tables = [{name for name in names if "tables" in name} for names in held]
    assert set.union(*tables) == {name for name in averaged(copied) if "tables" in name}
    assert sum(map(len, tables)) == len(set.union(*tables))  # each is at one replica
    sent = [json.loads((folder / "summary.json").read_text())["bytes_sent"] for folder in (copied, dealt)]
    assert 0 < sent[1] < sent[0] / 2


def test_it_goes_on_bit_for_bit_and_is_exported_whole(dealt: Path, tmp_path: Path) -> None:
    half = run(tmp_path / "run", tables="dealt", steps=6)
    whole = run(tmp_path / "whole", tables="dealt", steps=12)
    export(half, tmp_path / "half", best=True)
    exported = load_file(tmp_path / "half" / "model.safetensors")
    parts = [saved(half, 6, replica)["model"] for replica in range(3)]
    assert exported.keys() == averaged(whole).keys()
    assert all(torch.equal(exported[name], part[name]) for part in parts for name in part if "tables" in name)
    run(half, resume=True, tables="dealt", steps=12)
    for replica in range(3):
        assert same(*(saved(folder, 12, replica)["model"] for folder in (half, whole)))
    assert same(averaged(half), averaged(whole))
    (half / "checkpoints" / "averaged.pt").unlink()
    (half / "events" / "replica-1.jsonl").unlink()
    with pytest.raises(UserError, match="tables that replicas have dealt out lie elsewhere"):
        export(half, tmp_path / "part")


def test_beside_rounds_of_the_layers_codecs_of_the_rows_send_less(tmp_path: Path) -> None:
    """With DiLoCo the layers part from each other between rounds, and tables are the same for all."""
    sent = {}
    for crossing in ("rows", "rows-int8", "rows-int4", "top50"):
        given = {"tables": "dealt", "crossing": crossing, "method": "diloco", "every": 4, "steps": 6}
        folder = run(tmp_path / crossing, **given)
        summary = json.loads((folder / "summary.json").read_text())
        sent[crossing] = summary["bytes_sent"]
        assert 0 < summary["auc_averaged"] < 1
    assert sent["rows"] > sent["top50"] and sent["rows"] > sent["rows-int8"] > sent["rows-int4"]


def test_a_dry_run_counts_the_averaged_layers_alone() -> None:
    given = {name: value for name, value in SMALL.items() if name != "network"} | {"tables": "dealt"}
    settings = Settings.of(**given)
    layers = settings.made_workload().tables_and_rest(settings.made_workload().outline())[1]
    numel = sum(one.numel() for one in layers.parameters())
    told = dict(outlook(settings, torch.device("cpu")))["rounds"]
    (in_one,) = re.findall(r"sends ([\d.]+) MB in one", told)
    assert float(in_one) == pytest.approx(4 * numel * 2 * 2 / 3 / 1e6, rel=0.05)
    assert told.endswith("; rows of the dealt tables come on top")


@pytest.mark.slow
def test_processes_train_dealt_tables_as_simulated_replicas_do(tmp_path: Path, dealt: Path) -> None:
    given = {name: value for name, value in SMALL.items() if name not in ("network", "replicas")}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    train_together(3, *flags, "--tables", "dealt", "--out", tmp_path / "run")
    for replica in range(3):
        assert same(*(saved(folder, 12, replica)["model"] for folder in (tmp_path / "run", dealt)))
    assert same(averaged(tmp_path / "run"), averaged(dealt))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tables": "copied", "crossing": "rows-int4"}, "no tables are dealt out; add --tables dealt, or leave it out"),
        ({"crossing": "int4"}, "crossing is 'int4'; give rows, rows-int8"),
        ({"crossing": "topmost"}, "crossing is 'topmost'; give rows"),
        ({"crossing": "rows-int9"}, "crossing is 'rows-int9': .*choose 8, 4 or 2"),
        ({"crossing": "top120"}, "crossing is 'top120': .*choose more than 0 and at most 1"),
        ({"crossing": ""}, "crossing is ''; say what crosses"),
        ({"network": "internet"}, "peers that come and go do not; leave out --tables dealt"),
        ({"independent": True}, "peers that come and go do not; leave out --tables dealt"),
        ({"method": "diloco", "every": "1s", "rounds": 3}, "by the clock replicas do not; give --every"),
        ({"observers": 1}, "an observer does not; leave out --observers"),
        ({"batched_replicas": True, "network": "simulated"}, "leave out --batched-replicas"),
        ({"compile": True}, "compiled layers do not; leave out --compile"),
    ],
)
def test_what_dealt_tables_cannot_is_told(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_tables(Settings.of(**{"workload": "clicks", "tables": "dealt"} | given))
