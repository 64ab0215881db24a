"""A package of a user's own, installed by pip: its method, codec, network and workload are as good as farflung's."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from installed import farflung_with, install_package

from farflung import codecs, methods, networks, settings
from farflung.codecs import ErrorFeedback, Quantize, TopK, codec_named
from farflung.errors import UserError
from farflung.events import EvaluationEvent, RoundEvent
from farflung.registry import Registry
from farflung.report.read import read_run
from farflung.settings import Settings

COMMAND = ("train", "--workload", "regression", "--features", "6", "--replicas", "4", "--steps", "24", "--lr", "0.05")
COMMAND += ("--every", "4", "--warmup", "2", "--eval-every", "6", "--log-every", "4", "--inner", "adamw")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_package(tmp_path_factory.mktemp("package"))


@pytest.mark.slow
def test_all_four_train_together(package: Path, tmp_path: Path) -> None:
    seconds = {}
    for network in ("simulated", "bay"):
        theirs = ("--method", "ring", "--codec", "places4", "--network", network, "--out", tmp_path / network)
        done = farflung_with(package, *COMMAND, *theirs)
        assert done.returncode == 0, done.stderr
        run = read_run(tmp_path / network)
        rounds = run.of(0, RoundEvent)
        groups = [tuple(round.group) for round in rounds]
        assert groups == [(0, 3), (0, 1), (0, 3), (0, 1), (0, 3), (0, 1)], groups
        assert all(round.outcome == "averaged" and 0 < round.compression_error < 0.01 for round in rounds)
        # The net has 6 x 16 + 16 weights in one layer, and 17 in the other: two bytes each, and each layer a header.
        assert all(258 <= round.bytes_sent < 258 + 150 for round in rounds[1:])
        losses = [event.score for event in run.of(0, EvaluationEvent)]
        assert losses[-1] < 0.6 * losses[0]
        seconds[network] = json.loads((tmp_path / network / "summary.json").read_text())["seconds"]
    assert seconds["bay"] - seconds["simulated"] == pytest.approx(7, abs=0.5), "the start and six rounds"


@pytest.mark.slow
def test_they_are_listed_and_planned_beside_ours(package: Path) -> None:
    listed = farflung_with(package, "methods").stdout
    assert "ring" in listed and "places2, places3" in listed, listed
    simulated = farflung_with(package, "simulate", "--methods", "ring,noloco", "--params", "1e6", "--replicas", "4")
    assert simulated.returncode == 0 and "ring" in simulated.stdout, simulated.stderr


@pytest.mark.slow
def test_a_setting_of_their_method_reaches_the_command_line(package: Path) -> None:
    shown = farflung_with(package, "train", "--method", "ring", "--help-all").stdout
    assert "--pull" in shown
    done = farflung_with(package, "train", "--method", "ring", "--gamma", "1")
    assert done.returncode == 2 and "ring has no setting gamma" in done.stderr


HOMES: dict[str, list[tuple[Any, str]]] = {
    "methods": [(methods, "RECIPES"), (methods.recipes, "RECIPES"), (methods.settings, "RECIPES")],
    "codecs": [(codecs.registry, "CODECS")],
    "networks": [(networks.settings, "NETWORKS")],
    "workloads": [(settings, "WORKLOADS")],
}
Installs = Callable[..., None]


@pytest.fixture
def installs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installs:
    """Installs a package: its code, and what names it adds of a kind."""

    def install(package: str, kind: str, names: dict[str, str], code: str = "") -> None:
        (tmp_path / f"{package}.py").write_text(code)
        folder = tmp_path / f"{package}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
        entries = "\n".join(f"{name} = {package}:{value}" for name, value in names.items())
        (folder / "entry_points.txt").write_text(f"[farflung.{kind}]\n{entries}\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(__import__("sys").modules, package, raising=False)
        old = getattr(*HOMES[kind][0])
        anew = Registry(old.kind, {key: old[key] for key in old._rows}, old._check, old._renamed)
        for home, name in HOMES[kind]:
            monkeypatch.setattr(home, name, anew)

    return install


CODEC = """
from farflung.codecs import Name, Quantize
NAME = Name(pattern=r"whole(\\d)", make=lambda bits: Quantize(bits=int(bits)), examples=("whole8",), travels="whole")
ZERO = Name(pattern=r"zero(\\d)", make=lambda bits: 1 / 0, examples=("zero3",), travels="none")
NONE = Name(pattern="none", make=lambda: None, examples=("none",), travels="none")
"""


def test_a_broken_codec_fails_alone(installs: Installs, caplog: pytest.LogCaptureFixture) -> None:
    installs("boom", "codecs", {"abroken": "NAME"}, 'raise ValueError("at\\nimport")')
    installs("sound", "codecs", {"whole": "NAME", "zero": "ZERO", "none": "NONE"}, CODEC)
    assert codec_named("int8") == Quantize(bits=8)
    assert not caplog.records
    assert codec_named("ef-topk5-whole4") == ErrorFeedback(TopK(share=0.05) | Quantize(bits=4))
    for name, words in {
        "zip": "there is no codec 'zip'; there are: .*whole8",
        "abroken": r"the codec 'abroken' of the package boom cannot be loaded \(ValueError: at import\); repair or",
        "zero3": "the codec 'zero' of the package sound cannot be made of 'zero3': ZeroDivisionError",
        "none": "the codec 'none' of the package sound cannot be made of 'none': .*None, which is no codec",
    }.items():
        with pytest.raises(UserError, match=words):
            codec_named(name)
    why = "(ValueError: at import); repair or remove that package"
    told = "the codec 'abroken' of the package boom cannot be loaded " + why
    assert {record.message for record in caplog.records} == {told} and len(caplog.records) == 1


WRONG = """
from farflung.codecs import Name, Dense
THREE = 3
class Bare: pass
def empty(every: int = 5): return None
def required(every: int, x: float): ...
def clash(steps: int = 7):
    from farflung.methods import diloco
    return diloco()
REGEX = Name(pattern="bro(ken", make=Dense, examples=("broken",), travels="x")
"""
STRINGS = """
from __future__ import annotations
def hidden(every: int = 5, thing: Thing = None):
    from farflung.methods import diloco
    return diloco()
"""


@pytest.mark.parametrize(
    ("kind", "value", "code", "words"),
    [
        ("methods", "THREE", WRONG, "TypeError: 'int' object is not callable"),
        ("methods", "empty", WRONG, "TypeError: it makes None, which is no farflung.Method"),
        ("methods", "Bare", WRONG, "which is no farflung.Method"),
        ("methods", "required", WRONG, "missing 2 required positional arguments: 'every' and 'x'"),
        ("methods", "hidden", STRINGS, "NameError: name 'Thing' is not defined"),
        ("methods", "x", "import sys\nsys.exit('bye')", "SystemExit: bye"),
        ("codecs", "THREE", WRONG, "TypeError: it is 3, which is no farflung.codecs.Name"),
        ("codecs", "REGEX", WRONG, "error: missing \\)"),
        ("networks", "THREE", WRONG, "TypeError: it is 3, which is no farflung.networks.NetworkKind"),
        ("workloads", "THREE", WRONG, "TypeError: it is 3, which is no farflung.workloads.Workload"),
        ("workloads", "Bare", WRONG, "which is no farflung.workloads.Workload with a dataclass of Settings"),
    ],
)
def test_what_is_nothing_of_its_kind_is_blamed_on_its_package(
    kind: str, value: str, code: str, words: str, installs: Installs
) -> None:
    installs("wrong", kind, {"odd": value}, code)
    registry = getattr(*HOMES[kind][0])
    with pytest.raises(
        UserError, match=rf"^the {kind[:-1]} 'odd' of the package wrong cannot be loaded .*{words}"
    ) as told:
        _ = registry["odd"]
    assert "\n" not in str(told.value)
    assert "odd" in registry and "odd" not in dict(registry.usable())


def test_a_name_that_is_taken_or_retired_is_left_out_and_told_of(
    installs: Installs, caplog: pytest.LogCaptureFixture
) -> None:
    installs("first", "methods", {"theirs": "THREE"}, WRONG)
    installs("second", "methods", {"theirs": "THREE", "noloco": "empty", "dct": "empty"}, WRONG)
    with caplog.at_level(logging.WARNING):
        assert {"noloco", "theirs"} <= set(methods.RECIPES) and "dct" not in set(methods.RECIPES)
    told = sorted(record.message for record in caplog.records)
    assert told[0].startswith(
        "the method 'dct' of the package second is left out: farflung has, or had, one of that name"
    )
    assert told[1].startswith("the method 'noloco' of the package second is left out: farflung has, or had, one")
    assert "is left out: the package" in told[2] and len(told) == 3
    assert methods.RECIPES["noloco"] is methods.noloco


def test_a_setting_that_a_package_s_method_calls_as_another_is_blamed_on_it(installs: Installs) -> None:
    installs("wrong", "methods", {"clashing": "clash"}, WRONG)
    with pytest.raises(UserError, match="the method 'clashing' of the package wrong has a setting steps"):
        Settings.of(method="clashing")
