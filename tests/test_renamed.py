"""Old names work for one version, and say what they are called now."""

from __future__ import annotations

import importlib
import operator
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from processes import SMALL, farflung, run_here

from farflung import methods
from farflung.codecs import Codec, Dense, Modulo, Quantize, Transform, codec_named
from farflung.errors import UserError
from farflung.networks import SimulatedNetwork
from farflung.outer import Everyone, RandomGroups


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("farflung.networks", "PeerLost", "farflung.networks.PeerLostError"),
        ("farflung.networks", "Died", "farflung.networks.ReplicaDiedError"),
        ("farflung.networks", "OpenNetwork", "farflung.networks.ElasticNetwork"),
        ("farflung.networks", "State", "farflung.networks.SharedState"),
        ("farflung.networks", "among_the_living", "farflung.networks.among_members"),
        ("farflung.methods", "settings_of", "farflung.methods.defaults_of"),
        ("farflung.networks.internet", "Seat", "farflung.networks.listening.ListenAddress"),
        ("farflung.networks.internet", "introduction", "farflung.networks.internet.newcomer_info"),
        ("farflung.codecs", "NotFinite", "farflung.codecs.NotFiniteError"),
        ("farflung.codecs", "Stage", "farflung.codecs.Transform"),
        ("farflung.codecs", "Apart", "farflung.codecs.SplitCodec"),
        ("farflung.codecs", "Float", "farflung.codecs.BlockFloat"),
        ("farflung.codecs", "Frequency", "farflung.codecs.BlockDCT"),
        ("farflung.methods", "dct", "farflung.methods.dynamic_threshold"),
        ("farflung.outer", "Attached", "farflung.outer.Session"),
        ("farflung.outer", "GossipApart", "farflung.outer.SplitGossip"),
        ("farflung.outer", "Anchored", "farflung.outer.ParameterAveraging"),
        ("farflung.outer", "SignSGD", "farflung.inner.SignSGD"),
        ("farflung.outer", "names_of", "farflung.inner.names_of"),
        ("farflung.outer", "Disagreement", "farflung.outer.DisagreementError"),
        ("farflung.outer", "Diverged", "farflung.outer.DivergedError"),
    ],
)
def test_old_names_still_work(module: str, old: str, new: str) -> None:
    home, _, name = new.rpartition(".")
    with pytest.warns(DeprecationWarning, match=rf"{module}\.{old} is called {new} now"):
        found = getattr(importlib.import_module(module), old)
    assert found is getattr(importlib.import_module(home), name)


@pytest.mark.parametrize(
    ("make", "old", "new"),
    [
        (lambda name: methods.RECIPES[name](), "dct", "dynamic-threshold"),
        (lambda name: methods.chosen(methods.RoundSettings(method=name)), "dct", "dynamic-threshold"),
        (codec_named, "frequency", "block-dct"),
        (codec_named, "ef-frequency-topk5", "ef-block-dct-topk5"),
    ],
)
def test_old_names_in_settings_still_work(make: Callable[[str], object], old: str, new: str) -> None:
    with pytest.warns(FutureWarning, match=r"is called (dynamic-threshold|block-dct) now"):
        found = make(old)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted = make(new)
    assert repr(found) == repr(wanted)


def test_names_that_never_were_are_not_there() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Colander'"):
        _ = importlib.import_module("farflung.networks").Colander


def test_the_old_name_of_a_method_still_works() -> None:
    model = torch.nn.Linear(2, 1)
    outer = methods.diloco().attach(model, torch.optim.SGD(model.parameters(), lr=0.1), SimulatedNetwork.alone())
    with pytest.warns(DeprecationWarning, match="land is called apply_pending now"):
        outer.land()


@pytest.mark.parametrize(
    ("thing", "old", "new"),
    [
        (Dense(), "lossless", "traits.lossless"),
        (Modulo(), "needs_receiver", "traits.needs_receiver"),
        (Dense(), "shrink_to", "set_budget"),
        (Dense(), "turn_to", "set_round"),
        (Modulo(), "wants_expectation", "wants_reference"),
        (Modulo(), "expect", "set_reference"),
        (Modulo(), "expect_change", "set_change"),
        (Dense(), "shrink", "forward"),
        (Dense(), "restore", "inverse"),
        (Dense() | Quantize(), "stages", "transforms"),
        (Modulo(round_robin=3), "turns", "round_robin"),
        (Everyone(), "alike", "identical"),
        (RandomGroups(), "alike", "identical"),
        (SimulatedNetwork.alone(), "relay", "scatter_combine_gather"),
        (SimulatedNetwork.alone(), "computed", "advance"),
        (methods.diloco(), "check_open", "check_elastic"),
    ],
)
def test_old_names_of_attributes_still_work(thing: object, old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{old} is called .*{new} now") as told:
        found = getattr(thing, old)
    assert found == operator.attrgetter(new)(thing)
    assert told[0].filename == __file__


def test_old_names_of_arguments_still_work() -> None:
    with pytest.warns(DeprecationWarning, match=r"Modulo\(turns=\) is called Modulo\(round_robin=\) now") as told:
        assert Modulo(bits=4, turns=2) == Modulo(bits=4, round_robin=2)
    assert told[0].filename == __file__


def test_an_import_by_an_old_name_warns_once_where_it_stands() -> None:
    with pytest.warns(DeprecationWarning) as told:
        exec(compile("from farflung.codecs import Stage", "theirs.py", "exec"), {})
    assert [one.filename for one in told] == ["theirs.py"]


@pytest.mark.parametrize(
    ("base", "old", "new"),
    [
        (Codec, "lossless", "traits"),
        (Codec, "needs_receiver", "traits"),
        (Codec, "shrink_to", "set_budget"),
        (Codec, "turn_to", "set_round"),
        (Codec, "expect", "set_reference"),
        (Transform, "expect_change", "set_change"),
        (Transform, "shrink", "forward"),
        (Transform, "restore", "inverse"),
    ],
)
def test_a_codec_written_for_the_version_before_is_told_what_its_names_are_now(base: type, old: str, new: str) -> None:
    with pytest.raises(UserError, match=rf"Theirs says {old}, which is called {new}.* now.*define {new}"):
        type("Theirs", (base,), {old: True})
    type("ForBoth", (base,), {old: True, new: True})
    with pytest.raises(UserError, match=rf"says {old}"):
        setattr(base(), old, True)


@pytest.mark.parametrize("ask", [lambda codec: codec.encode([torch.zeros(3)]), lambda codec: codec.nbytes([])])
@pytest.mark.parametrize("base", [Codec, Transform])
def test_what_a_codec_lacks_is_named(base: type, ask: Callable[[Codec], object]) -> None:
    with pytest.raises(NotImplementedError, match=r"Theirs has no (encode|nbytes|forward); define it"):
        ask(type("Theirs", (base,), {})())


NOW, LATER = "is called", " now; the old name goes with the next version"


def test_an_old_name_on_the_command_line_is_told_once_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated = ["--model", "micro", "--replicas", "2", "--rounds", "2", "--out", "wan"]
    assert run_here(monkeypatch, tmp_path, "simulate", "--methods", "dct,local-sgd", *simulated) == 2
    capsys.readouterr()
    assert run_here(monkeypatch, tmp_path, "simulate", "--methods", "dct", *simulated) == 0
    said = capsys.readouterr()
    assert said.err == f"farflung: the method dct {NOW} dynamic-threshold{LATER}\n"
    assert re.search("^dynamic-threshold ", said.out, re.MULTILINE)
    assert (tmp_path / "wan" / "events" / "dynamic-threshold.jsonl").exists()


@pytest.mark.slow
def test_warnings_of_replicas_that_are_processes_are_told_once(tmp_path: Path) -> None:
    quickly = [*SMALL, "--replicas", "2", "--steps", "2"]
    done = farflung("train", *quickly, "--method", "dct", "--codec", "frequency-topk5", "--out", tmp_path / "old")
    assert done.returncode == 0
    assert sorted(done.stderr.splitlines()) == [
        f"farflung: the codec frequency {NOW} block-dct{LATER}",
        f"farflung: the method dct {NOW} dynamic-threshold{LATER}",
    ]
    done = farflung("train", *quickly, "--method", "demo", "--inner", "adamw", "--out", tmp_path / "demo")
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "farflung: demo is published with SignSGD, and is another method with inner adamw; give --inner sign"
    ]
