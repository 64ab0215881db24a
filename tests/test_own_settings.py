"""Settings of a workload of the user's own: what is written into a run's config.toml is what is read from it."""

from __future__ import annotations

import dataclasses
import enum
import math
from pathlib import Path
from typing import Any, Literal, Optional

import pytest
from own_workload import Guess

from farflung.errors import UserError
from farflung.settings import Settings, read_settings, settings_toml
from farflung.workloads.registry import WORKLOADS


class Colour(enum.Enum):
    red = "red"


def _chosen(monkeypatch: pytest.MonkeyPatch, hint: Any, default: Any) -> Settings:
    """Settings of a run of a workload with one setting of some type."""
    field = ("own", hint, dataclasses.field(default_factory=lambda: default))
    kind = dataclasses.make_dataclass("Own", [field], frozen=True)
    monkeypatch.setattr("own_workload.Own", type("Own", (Guess,), {"Settings": kind}), raising=False)
    return Settings.of(workload="own_workload:Own")


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (tuple[int, ...], (3, 4)),
        (tuple[tuple[str, float], ...], (("a", 1.5), ("b", 2.5))),
        (list[str], ["a", 'b"\x7f']),
        (Optional[str], "x"),  # noqa: UP045
        (int | None, None),
        (Literal["a", 3] | None, 3),
        (float, math.inf),
        (float, 1e300),
        (bool, True),
    ],
)
def test_what_is_written_is_read(hint: Any, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = _chosen(monkeypatch, hint, value)
    (tmp_path / "config.toml").write_text(settings_toml(settings))
    assert read_settings(tmp_path / "config.toml").workload.own == settings.workload.own == value


@pytest.mark.parametrize(
    ("hint", "value"),
    [(Path, Path("/tmp")), (Colour, Colour.red), (dict[str, float], {}), (list[int | None], []), (Any, 1)],
)
def test_what_no_file_can_hold_is_told_before_the_run(hint: Any, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told = "cannot be loaded .*its setting own is .*, which a run's config.toml cannot hold; make it a str"
    with pytest.raises(UserError, match=told):
        _chosen(monkeypatch, hint, value)
    assert "own_workload:Own" not in WORKLOADS


@pytest.mark.parametrize("name", ["own_workload:", ":Guess", "own_workload:Guess:x", "own-workload:Guess"])
def test_what_is_no_class_in_a_module_is_told(name: str) -> None:
    with pytest.raises(
        UserError,
        match=r"cannot be loaded, as it names nothing in a module; give MODULE:NAME, such as mypackage\.module:Mine",
    ):
        Settings.of(workload=name)
