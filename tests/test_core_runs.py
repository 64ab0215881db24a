"""Runs of the command line in which some replicas have the core only: resumed, exported, refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from processes import SMALL, run_here, same_weights, saved
from safetensors.torch import load_file
from subnet import ids

from farflung.cli import training
from farflung.training.cautions import cautions
from farflung.workloads.models import without_remarks

RUN = ("train", *SMALL, "--network", "simulated", "--replicas", "3", "--method", "noloco", "--every", "4")
CORE = ("--core", "heads2", "--core-only-replicas", "1", "--rest-every", "2")


def test_a_run_is_resumed_and_its_core_exported_beside_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twelve steps at once, and six and six; the exports are ordinary models that score as the summary says."""
    for steps in (["--steps", "12", "--out", "once"], ["--steps", "6", "--out", "twice"]):
        assert run_here(monkeypatch, tmp_path, *RUN, *CORE, *steps, "--lr-schedule", "stable") == 0
    assert run_here(monkeypatch, tmp_path, "train", "--resume", "twice", "--steps", "12") == 0
    assert same_weights(tmp_path / "once", tmp_path / "twice", 12, replicas=(0, 1, 2))
    strong, weak = (saved(tmp_path / "once", 12, replica) for replica in (0, 2))
    assert not [name for name in weak["model"] if ".rest." in name]
    rest = {name for name in strong["model"] if ".rest." in name}
    assert rest and strong["model"].keys() - rest == weak["model"].keys()
    assert strong["outer"]["cells"].keys() > weak["outer"]["cells"].keys()
    summary = json.loads((tmp_path / "once" / "summary.json").read_text())
    assert summary["others_averaged"]["core"] > 0
    assert run_here(monkeypatch, tmp_path, "export", "once", "whole") == 0
    assert run_here(monkeypatch, tmp_path, "export", "once", "core", "--core") == 0
    sizes = [
        sum(v.numel() for v in load_file(tmp_path / one / "model.safetensors").values()) for one in ("whole", "core")
    ]
    assert sizes == [sum(v.numel() for v in one["model"].values()) for one in (strong, weak)]
    capsys.readouterr()
    assert run_here(monkeypatch, tmp_path, *RUN, "--steps", "4", "--out", "plain") == 0
    assert run_here(monkeypatch, tmp_path, "export", "plain", "none", "--core") != 0
    assert "no core; leave out --core" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("core", ["heads2", "lowrank3"])
def test_a_core_that_was_exported_computes_what_it_computes_in_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, core: str
) -> None:
    """Of a run that has not ended: the mean of each weight over those who hold it. Logits, to rounding."""
    from transformers import AutoModelForCausalLM

    from farflung.joint.kinds import core_named
    from farflung.joint.maps import core_alone, maps_of
    from farflung.settings import read_settings

    given = ("--core", core, "--core-only-replicas", "2", "--steps", "5", "--out", "run")
    assert run_here(monkeypatch, tmp_path, *RUN, *given) == 0
    for averages in (tmp_path / "run" / "checkpoints").glob("average*"):
        averages.unlink()
    for what in (["whole"], ["core", "--core"]):
        assert run_here(monkeypatch, tmp_path, "export", "run", *what) == 0
    held = [saved(tmp_path / "run", 5, replica)["model"] for replica in range(3)]
    model = read_settings(tmp_path / "run" / "config.toml").made_workload().build(0, core_named(core).divide)
    mean = {name: torch.stack([one[name] for one in held if name in one]).mean(0) for name in held[0]}
    model.load_state_dict(mean)
    assert maps_of(model)
    with torch.no_grad(), without_remarks():
        whole, alone = (
            AutoModelForCausalLM.from_pretrained(tmp_path / one, trust_remote_code=True) for one in ("whole", "core")
        )
        torch.testing.assert_close(whole(ids(0, 0)).logits, model(ids(0, 0)).logits, rtol=1e-4, atol=1e-5)
        with core_alone(model):
            torch.testing.assert_close(alone(ids(0, 0)).logits, model(ids(0, 0)).logits, rtol=1e-4, atol=1e-5)


def test_a_run_that_ends_before_the_rests_first_round_says_so() -> None:
    def told(*flags: str) -> list[str]:
        given = ["--core", "heads2", "--every", "4", "--steps", "8", *flags]
        return cautions(training.what_is_asked(given).settings)

    (line,) = told("--rest-every", "3")
    assert "ends at step 8, before the first round of what lies beside the core, which comes after step 12" in line
    assert not told("--rest-every", "2") and not told("--rest-every", "9", "--core-only-replicas", "3")
    (line,) = told("--every", "9", "--rest-every", "9")
    assert "before its first round" in line


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ("--core foo", "core is 'foo'; give lowrank16 or heads2"),
        ("--core lowrank64", "a core must be narrower; choose at most lowrank63"),
        ("--core heads4", "a core must be narrower; choose fewer"),
        ("--core-only-replicas 1", "the model has no core; leave it out, or begin a run with --core"),
        ("--rest-every 2", "the model has no core; leave it out, or begin a run with --core"),
        ("--core heads2 --core-only-replicas 4", "but --replicas is 3; choose at most that"),
        ("--core heads2 --core-only", "give --core-only-replicas"),
        ("--core heads2 --method ist", "choose another, such as noloco or diloco"),
        ("--core heads2 --batched-replicas", "does not go with batched_replicas"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str, what: str
) -> None:
    run = [word for word in RUN if word not in ("--method", "noloco", "--every", "4")]
    assert run_here(monkeypatch, tmp_path, *run, "--steps", "4", "--out", "run", *given.split()) == 2
    said = capsys.readouterr().err.strip()
    assert what in said.replace("--batched-replicas", "batched_replicas") and "\n" not in said, said
    assert not (tmp_path / "run").exists()
