"""The page about others' trainers: its code runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from problem import small_model
from torch import Tensor, nn

import farflung

PAGE = Path(__file__).parents[1] / "docs" / "tutorials" / "trainers.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)


class Judged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = small_model()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.net(x) - x.sum(1, keepdim=True)).square().mean()}


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Judged()

    def training_step(self, batch: dict[str, Tensor], index: int) -> Any:
        return self.model(**batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS[1:], ids=["transformers", "lightning", "accelerate"])
def test_the_code_of_the_page_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = Module()
    data = [{"x": torch.randn(6)} for _ in range(16)]
    given: dict[str, Any] = {"model": module.model, "module": module, "data": data, "farflung": farflung}
    given |= {"loader": torch.utils.data.DataLoader(data, batch_size=4), "optimizer": module.configure_optimizers()}
    before = torch.cat([one.detach().flatten().clone() for one in module.parameters()])
    exec(BLOCKS[0] + block, given)
    assert not torch.equal(before, torch.cat([one.detach().flatten() for one in module.parameters()]))


def test_the_page_names_every_example() -> None:
    examples = (Path(__file__).parents[1] / "examples").glob("*.py")
    assert all(f"examples/{path.name}" in PAGE.read_text() for path in examples)
