"""farflung's data in a loop of one's own: as the trainer deals it, and exact when resumed."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Subset

from farflung.data import Sequences
from farflung.errors import UserError
from farflung.settings import Settings

LENGTH = 16


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARFLUNG_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def source(tmp_path: Path) -> str:
    rows = [json.dumps({"words": " ".join(f"{row}.{word}" for word in range(12))}) for row in range(10, 70)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    return str(tmp_path / "rows.jsonl")


def found(source: str, **arguments: int | None) -> Sequences:
    return Sequences(source, LENGTH, column="words", seed=3, **arguments)


def test_it_deals_as_the_trainer_does(source: str) -> None:
    settings = Settings.of(data=source, sequence_length=LENGTH, text_column="words", seed=3, replicas=2, batch_size=4)
    workload = settings.made_workload()
    loader = DataLoader(found(source, replica=1, replicas=2), batch_size=4)
    for step, batch in enumerate(loader):
        assert torch.equal(batch[:4], workload.batch(workload.sample_ids(3, 1, step, 4))[: len(batch)])
    assert torch.equal(found(source).held_out(5), workload.data.held_out(5))  # type: ignore[attr-defined]


def test_an_epoch_has_each_sequence_once_whoever_loads_it(source: str) -> None:
    both = [found(source, replica=replica, replicas=2) for replica in (0, 1)]
    seen = [tuple(row.tolist()) for dataset in both for row in dataset]
    assert len(set(seen)) == len(seen) >= len(found(source)) - 1
    alone = found(source)
    whole = torch.stack([alone[item] for item in range(len(alone))])
    workers = torch.cat(list(DataLoader(alone, batch_size=7, num_workers=2)))
    assert torch.equal(workers, whole)
    resumed = torch.cat(list(DataLoader(Subset(alone, range(14, len(alone))), batch_size=7)))
    assert torch.equal(resumed, whole[14:])
    alone.set_epoch(1)
    second = torch.stack([alone[item] for item in range(len(alone))])
    assert not torch.equal(second, whole) and set(map(tuple, second.tolist())) == set(map(tuple, whole.tolist()))


def test_what_is_passed_to_another_process_is_where_the_tokens_lie(source: str) -> None:
    """So that workers that are not forked map them, too, whatever has become of the text."""
    passed = pickle.dumps(whole := found(source, replica=1, replicas=2))
    tokens = 2 * len(whole) * LENGTH
    Path(source).write_text("others")
    there = pickle.loads(passed)
    assert torch.equal(torch.stack([*there]), torch.stack([*whole]))
    more = [json.dumps({"words": "many more words " * 40}) for _ in range(100)]
    Path(source).write_text("\n".join(more))
    larger = found(source, replica=1, replicas=2)
    assert len(larger) * LENGTH > 2 * tokens and len(pickle.dumps(larger)) < len(passed) + 100


def test_what_cannot_be_is_told(source: str, tmp_path: Path) -> None:
    with pytest.raises(IndexError, match=r"item -1 of \d+ sequences"):
        found(source)[-1]
    with pytest.raises(UserError, match="replica is 2 of 2; number them from 0 to 1"):
        found(source, replica=2, replicas=2)
    for name, least in (("seed", 0), ("replica", 0), ("replicas", 1)):
        with pytest.raises(UserError, match=f"{name} is {least - 1}; it must be at least {least}"):
            Sequences(source, LENGTH, column="words", **{name: least - 1})  # type: ignore[arg-type]
    with pytest.raises(UserError, match="epoch is -1; it must be at least 0"):
        found(source).set_epoch(-1)
    with pytest.raises(UserError, match=r"\d+ sequences are fewer than 9999 replicas; give more text"):
        found(source, replicas=9999)
    with pytest.raises(UserError, match="no such file"):
        Sequences(str(tmp_path / "none.txt"), LENGTH)
    with pytest.raises(UserError, match="fewer than one sequence"):
        Sequences(source, 10**6, column="words")
