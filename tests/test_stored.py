"""Tensors that stay in a checkpoint's file until something is computed with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from farflung.errors import UserError
from farflung.memory.measure import Held
from farflung.training.stored import SMALL, StoredTensor, stored

LARGE = (300, 400)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64, torch.bool]


def written(folder: Path, value: object) -> Path:
    torch.save(value, folder / "state.pt")
    return folder / "state.pt"


@given(dtype=st.sampled_from(DTYPES), turned=st.booleans(), rows=st.integers(0, 20), columns=st.integers(0, 20))
def test_any_tensor_is_read_as_torch_itself_reads_it(
    dtype: torch.dtype, turned: bool, rows: int, columns: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Slices, turned ones, and several of one storage."""
    whole = (torch.arange(300 * 400).view(LARGE) % 251).to(dtype)
    part = whole[rows:, columns:]
    path = written(tmp_path_factory.mktemp("state"), {"all": [whole, (part.t() if turned else part, whole[:2])]})
    found, known = stored(path), torch.load(path, weights_only=True)
    (first, (second, small)), (its_first, (its_second, its_small)) = found["all"], known["all"]
    assert isinstance(first, StoredTensor) and isinstance(second, StoredTensor) and type(small) is Tensor
    for one, its in ((first, its_first), (second, its_second), (small, its_small)):
        assert (one.shape, one.dtype, one.numel(), one.nbytes) == (its.shape, its.dtype, its.numel(), its.nbytes)
        assert torch.equal(one, its) and torch.equal(one.to("cpu", copy=True), its)


def test_a_model_takes_them_one_by_one(tmp_path: Path) -> None:
    model, other = (nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))) for _ in range(2))
    state = stored(written(tmp_path, model.state_dict()))
    with Held() as held:  # type: ignore[no-untyped-call]
        other.load_state_dict(state)
    assert held.most == 256 * 256 * 4
    assert all(torch.equal(one, its) for one, its in zip(model.parameters(), other.parameters(), strict=True))


def test_they_are_read_only_and_a_file_that_was_cut_short_is_told(tmp_path: Path) -> None:
    path = written(tmp_path, torch.zeros(SMALL))
    found = stored(path)
    with pytest.raises(AssertionError, match="add_ would change what is read only"):
        found.add_(1)
    path.write_bytes(path.read_bytes()[: SMALL // 2])
    with pytest.raises(UserError, match=r"cannot read .*state\.pt: it has been cut short; start again to resume"):
        found + 1
