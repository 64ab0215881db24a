"""Mixtures of pictures whose folder is damaged: one line says what, and what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mixed_pictures import expert, make
from safetensors.torch import load_file, save_file
from torch import Tensor

from farflung.errors import UserError
from farflung.mixtures.pictures.folder import PictureSplit
from farflung.mixtures.pictures.joined import PictureScore, evaluate, join, joined, teacher


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> PictureSplit:
    """Red, green and blue pictures."""
    return make(tmp_path_factory.mktemp("mixture"))


@pytest.mark.parametrize("damage", ["missing", "no weights", "half a file"])
def test_a_router_that_cannot_be_read_is_told_in_a_line(damage: str, mixture: PictureSplit, tmp_path: Path) -> None:
    folder = tmp_path / "mix"
    shutil.copytree(mixture.folder, folder)
    (weights,) = (folder / "router").glob("*.safetensors")
    if damage == "missing":
        shutil.rmtree(folder / "router")
    elif damage == "no weights":
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"router holds no router that can be read; split the pictures again") as error:
        joined(PictureSplit.read(folder), {0: expert(mixture, 0, tmp_path / "0")})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("changed", [{"dealt": [[1, 2, 3]]}, {"experts": "3"}, {"experts": 2}, {"held_out": None}])
def test_a_manifest_that_does_not_agree_with_itself_is_told_in_a_line(
    changed: dict[str, Any], mixture: PictureSplit, tmp_path: Path
) -> None:
    whole = json.loads((mixture.folder / "mixture.json").read_text())
    (tmp_path / "mixture.json").write_text(json.dumps(whole | changed))
    with pytest.raises(UserError, match=r"mixture\.json is damaged .*; split the data again") as error:
        PictureSplit.read(tmp_path)
    assert "\n" not in str(error.value)


@pytest.fixture
def copied(mixture: PictureSplit, tmp_path: Path) -> PictureSplit:
    """A copy, whose experts are in runs/0 to runs/2."""
    shutil.copytree(mixture.folder, tmp_path / "mix")
    found = PictureSplit.read(tmp_path / "mix")
    for number in range(3):
        expert(found, number, found.run(number))
    return found


def experts(split: PictureSplit) -> dict[int, Path]:
    return {number: split.run(number) for number in range(3)}


def rewritten(split: PictureSplit, **changed: Any) -> PictureSplit:
    where = split.folder / "mixture.json"
    where.write_text(json.dumps(json.loads(where.read_text()) | changed))
    return PictureSplit.read(split.folder)


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    (where,) = folder.glob("*.safetensors")
    save_file(change(load_file(where)), where)


def without_one(table: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in table.items() if name != "conv_in.weight"}


def of_none(table: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value * torch.nan for name, value in table.items()}


def refused(told: str, act: Callable[[], object]) -> None:
    with pytest.raises(UserError, match=told) as error:
        act()
    assert "\n" not in str(error.value)


def judged(split: PictureSplit) -> PictureScore:
    return evaluate(split, experts(split), None, top=1, all_above=0.5, drawn=0)


def test_an_expert_that_lacks_a_weight_is_neither_judged_nor_exported(copied: PictureSplit, tmp_path: Path) -> None:
    change_weights(copied.run(1), without_one)
    for act in (lambda: judged(copied), lambda: join(copied, experts(copied), tmp_path / "out")):
        refused("runs/1 holds no network that draws", act)


def test_a_router_of_no_numbers_or_of_another_split_is_told_of(copied: PictureSplit) -> None:
    fewer = rewritten(copied, experts=2, dealt=copied.dealt[:2], held_out=copied.held_out[:2])
    refused(r"router knows 3 parts, not 2; copy the mixture's folder again", lambda: judged(fewer))
    change_weights(copied.router, of_none)
    refused(r"router has weights that are no finite numbers; copy the mixture's folder again", lambda: judged(copied))


def test_pictures_that_are_missing_are_told_of(copied: PictureSplit) -> None:
    next(copied.store(1).rglob("*.png")).unlink()
    refused(r"was split with 167 pictures to train on and 13 held out, and has 1\d+ and 1\d;", lambda: judged(copied))


def test_other_classes_and_shares_of_noise_that_are_none_are_told_of(copied: PictureSplit) -> None:
    refused("has other classes than the pictures", lambda: judged(rewritten(copied, classes=["a", "b", "c"])))
    refused(r"mixture\.json is damaged", lambda: rewritten(copied, hits={"x": 1.0}))


@pytest.mark.parametrize("damage", ["table", "key", "missing", "half a file", "a weight less"])
def test_a_teacher_that_is_damaged_is_told_of(damage: str, copied: PictureSplit, tmp_path: Path) -> None:
    out = tmp_path / "out"
    join(copied, experts(copied), out)
    assert teacher(copied, out).numbers == [0, 1, 2]
    (weights,) = (out / "expert-1").glob("*.safetensors")
    if damage == "table":
        (out / "experts.json").write_text("{")
    elif damage == "key":
        (out / "experts.json").write_text('{"experts": [0, 1, 2]}')
    elif damage == "missing":
        shutil.rmtree(out / "expert-1")
    elif damage == "half a file":
        weights.write_bytes(weights.read_bytes()[:1000])
    else:
        change_weights(out / "expert-1", without_one)
    refused("teacher .*out: is damaged; write it again with: farflung mixture export", lambda: teacher(copied, out))


def test_a_teacher_of_another_mixture_is_told_of(copied: PictureSplit, tmp_path: Path) -> None:
    """Its experts are of other parts, and each picture would be taught by one that does not know it."""
    join(copied, experts(copied), tmp_path / "out")
    change_weights(copied.router, lambda table: {name: value + 1 for name, value in table.items()})
    refused("is of another mixture than .*mix, whose parts are others", lambda: teacher(copied, tmp_path / "out"))
