import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.errors import UserError
from farflung.outer import GossipNesterov, RandomGroups, Schedule
from farflung.settings import Settings, read_settings, settings_toml
from farflung.tables import help_of


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
        ("every = 'x'", ["every", "'x'", "int"]),
        ("every = 0", ["every", "at least 1"]),
        ("lr = 0", ["lr", "more than 0"]),
        ("lr = inf", ["lr is inf", "finite"]),
        ("gamma = nan", ["gamma is nan", "finite"]),
        ("network = 'pigeon'", ["network", "pigeon", "torch, simulated"]),
        ("every = ", ["not valid TOML"]),
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
