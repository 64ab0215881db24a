"""Mixtures of pictures whose folder is damaged: one line says what, and what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from mixed_pictures import expert, make

from farflung.errors import UserError
from farflung.mixtures.pictures.folder import PictureSplit
from farflung.mixtures.pictures.joined import joined


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
