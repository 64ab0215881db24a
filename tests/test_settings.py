import dataclasses
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.codecs import Codec
from farflung.errors import UserError
from farflung.inner import INNER, Inner
from farflung.methods import RECIPES, diloco, noloco
from farflung.outer import GossipNesterov, Method, RandomGroups, Schedule
from farflung.settings import Settings, names_that_may_differ, read_settings, settings_toml
from farflung.tables import (
    AFTER_RESUME,
    BETWEEN_MACHINES,
    BETWEEN_PEERS,
    Checked,
    MayDiffer,
    help_of,
    setting,
)
from farflung.training.cautions import cautions


@given(
    data=st.text(st.characters(codec="utf-8", exclude_categories=["Cs"])),
    lr=st.floats(1e-9, 1e9),
    every=st.none() | st.integers(1, 9999),
    pretrained=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_settings_survive_their_file(
    tmp_path_factory: pytest.TempPathFactory, data: str, lr: float, every: int | None, pretrained: bool
) -> None:
    config = Settings.of(data=data, lr=lr, every=every, pretrained=pretrained)
    path = tmp_path_factory.mktemp("settings") / "config.toml"
    path.write_text(settings_toml(config), encoding="utf-8")
    assert read_settings(path) == config


def test_every_setting_has_help_text() -> None:
    for table in vars(Settings()).values():
        told = help_of(type(table))
        assert all(told[field.name] for field in dataclasses.fields(table))


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("evry = 3", ["evry", "did you mean 'every'"]),
        ("every = 'x'", ["every", "'x'", "30s"]),
        ("every = 0", ["every", "at least 1"]),
        ("lr = 0", ["lr", "more than 0"]),
        ("lr = inf", ["lr is inf", "finite"]),
        ("gamma = nan", ["gamma is nan", "finite"]),
        ("network = 'pigeon'", ["network", "pigeon", "torch, simulated"]),
        ("every = ", ["not valid TOML"]),
        ("[run]\nsteps = 3\n[rounds]\nsteps = 9", ["steps is given twice; remove one"]),
        ("steps = 3\n[run]\nsteps = 9", ["steps is given twice; remove one"]),
        ("tail_average = 0.5\nlate_average = 0.2", ["tail_average is given twice, once by its old name late_average"]),
        ("method = ['diloco']", ["method is ['diloco']", "type str"]),
        ("workload = ['language']", ["workload is ['language']", "type str"]),
        ("workload = 5", ["workload is 5", "type str"]),
        ("inner = ['muon']", ["inner is ['muon']", "one of adamw, muon, muloco, sign"]),
        (f"lr = 1{'0' * 400}", ["lr is 1000000000", "finite"]),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path: Path, toml: str, words: list[str]) -> None:
    path = tmp_path / "c.toml"
    path.write_text(toml)
    with pytest.raises(UserError) as error:
        read_settings(path)
    message = str(error.value)
    assert "\n" not in message and str(path) in message
    assert all(word in message for word in words), message


def test_a_method_takes_its_own_settings_from_the_config() -> None:
    method = Settings.of(method="noloco", every=7, delay=2, gamma=0.9, group_size=4, seed=5).method()
    assert method.schedule == Schedule(every=7, delay=2)
    assert method.topology == RandomGroups(4, 5)
    assert method.outer is not None
    outer = method.outer([__import__("torch").zeros(3)])
    assert isinstance(outer, GossipNesterov) and outer.param_groups[0]["gamma"] == 0.9


def test_a_setting_that_a_method_lacks_is_refused() -> None:
    with pytest.raises(UserError, match="diloco has no setting gamma"):
        Settings.of(method="diloco", gamma=0.5).method()
    with pytest.raises(UserError, match="did you mean 'noloco'"):
        Settings.of(method="nolco").method()


def test_a_file_has_a_table_for_each_room_or_none(tmp_path: Path) -> None:
    settings = Settings.of(model="micro", every=7, lr=0.5, stages=2, deadline=9.0, steps=11)
    tables = settings_toml(settings)
    assert [line for line in tables.splitlines() if line.startswith("[")] == [f"[{name}]" for name in vars(settings)]
    flat = "\n".join(line for line in tables.splitlines() if not line.startswith("["))
    for number, text in enumerate((tables, flat)):
        (tmp_path / f"{number}.toml").write_text(text)
        assert read_settings(tmp_path / f"{number}.toml") == settings


def test_a_file_of_the_version_before_is_read_and_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old.toml").write_text('schedule = "gpipe"\nlate_average = 0.25\nmethod = "diloco"\n')
    settings = read_settings(tmp_path / "old.toml")
    assert settings == Settings.of(pipeline_schedule="gpipe", tail_average=0.25, method="diloco")
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 and "farflung: schedule is called pipeline_schedule now; the old name goes" in "\n".join(told)


def test_a_table_that_there_is_not_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[iland]\nstages = 2\n")
    with pytest.raises(UserError, match=r"c.toml: there is no table \[iland\]; did you mean 'island'\?"):
        read_settings(tmp_path / "c.toml")


@pytest.mark.parametrize(
    ("where", "free"),
    [
        (
            AFTER_RESUME,
            "batched_replicas boundary checkpoint_every compile data_deadline data_room deadline device "
            "device_tflops eval_every far_folder force_tokenizer islands keep_checkpoints log_every lr max_hours "
            "memory microbatches pipeline_schedule profile profile_replicas restarts rounds shard stages steps "
            "text_share track track_replicas",
        ),
        (
            BETWEEN_MACHINES,
            "compile data data_deadline data_room deadline device device_tflops far_folder keep_checkpoints "
            "log_every max_hours memory offload out outer_device profile profile_replicas starting text_share "
            "tokenizer track track_replicas validation",
        ),
        (
            BETWEEN_PEERS,
            "batch_size boundary checkpoint_every compile core_only data data_deadline data_room deadline device "
            "device_tflops eval_every far_folder gateway log_every max_hours max_tokens memory microbatches "
            "model observe out pipeline_schedule profile profile_replicas restarts shard stages text_column "
            "text_share tokenizer track track_replicas validation",
        ),
    ],
)
def test_what_may_differ_where(where: MayDiffer, free: str) -> None:
    assert sorted(names_that_may_differ(where, Settings())) == free.split()


@dataclasses.dataclass(frozen=True)
class Twice(Checked):
    steps: int = 3


def test_a_workload_that_calls_a_setting_as_a_room_does_is_refused() -> None:
    with pytest.raises(UserError, match="has a setting steps, which every run has"):
        Settings(workload=Twice())


def test_the_workload_that_does_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("own_twice")
    module.Mine = type("Mine", (), {"Settings": Twice})
    monkeypatch.setitem(sys.modules, "own_twice", module)
    with pytest.raises(UserError, match="the workload 'own_twice:Mine' has a setting steps"):
        Settings.of(workload="own_twice:Mine")


@given(st.integers(-5, 15), st.integers(-5, 15) | st.none(), st.integers(-5, 15) | st.none())
def test_a_value_is_held_to_the_limits_of_its_field(value: int, least: int | None, most: int | None) -> None:
    kind = dataclasses.make_dataclass(
        "Kind", [("size", int, setting(0, least=least, most=most))], bases=(Checked,), frozen=True
    )
    if (least is not None and value < least) or (most is not None and value > most):
        with pytest.raises(UserError, match=f"size is {value}; it must be at (least|most)"):
            kind(size=value)
    else:
        assert kind(size=value).size == value


def test_a_method_of_another_package_may_take_settings_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a package's entry point would add it."""

    def tuned(every: int = 50, pull: float = 0.5, codec: Codec | str | None = None) -> Method:
        return noloco(every, gamma=pull, codec=codec)

    monkeypatch.setitem(RECIPES._rows, "tuned", tuned)
    settings = Settings.of(method="tuned", pull=0.25, every=7)
    outer = settings.method().outer
    assert isinstance(outer, partial) and outer.keywords["gamma"] == 0.25
    assert settings.method().schedule.every == 7 and settings.flat()["pull"] == 0.25
    assert settings.changes() == {"method": "tuned", "pull": 0.25, "every": 7}
    with pytest.raises(UserError, match="pull is 'much'; it must be of type float"):
        settings.changed(pull="much")
    with pytest.raises(UserError, match="there is no setting 'pull'"):
        settings.changed(method="diloco").changed(pull=0.5)


def test_a_method_with_an_inner_optimizer_of_its_own_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Inner(torch.optim.SGD, lr=0.25)

    def theirs(every: int = 3) -> Method:
        return dataclasses.replace(diloco(every), inner=own)

    monkeypatch.setitem(RECIPES._rows, "theirs", theirs)
    settled = Settings.of(method="theirs").settled()
    assert settled.inner.inner is None and settled.inner.lr == 0.25 and settled.method().inner is own
    assert Settings.of(method="theirs", inner="adamw").settled().method().inner is INNER["adamw"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"method": "local"}, ["over the run's last rounds, and local holds none; it changes nothing; leave it out"]),
        ({"every": 50}, ["in which one round ends at most; it averages nothing; give a larger part"]),
        ({"every": 50, "every_final": 10}, []),
        ({"every": 20}, []),
        ({"method": "ddp"}, []),
    ],
)
def test_a_tail_without_two_rounds_is_told(given: dict[str, Any], told: list[str]) -> None:
    settings = Settings.of(**{"method": "diloco"} | given, steps=400, tail_average=0.1)
    assert [line.partition(", ")[2] for line in cautions(settings)] == told
