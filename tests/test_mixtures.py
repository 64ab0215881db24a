"""Data of several sources by weights, and data of its own to judge by."""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from far_server import FarServer
from hypothesis import given
from hypothesis import strategies as st
from processes import SMALL, farflung
from torch import Tensor

from farflung.data import Sequences
from farflung.errors import UserError
from farflung.events import EvaluationEvent
from farflung.figure import LOSS
from farflung.report.read import read_run
from farflung.training.summary import by_source
from farflung.workloads.dealing import Deal, mixed
from farflung.workloads.language import Language
from farflung.workloads.mixtures import BLOCK, sources
from farflung.workloads.models import sequence_loss
from farflung.workloads.settings import LanguageSettings

LENGTH = 8


def rows(path: Path, letter: str, count: int) -> Path:
    """Documents of seven letters, which with their end are a sequence each; all differ."""
    path.write_text("".join(json.dumps({"text": f"{letter}{number:06d}"}) + "\n" for number in range(count)))
    return path


@pytest.fixture
def two(tmp_path: Path) -> str:
    """Nine of ten sequences are of one source, and a tenth of the other."""
    return f"0.9*{rows(tmp_path / 'a.jsonl', 'a', 600)} + 0.1*{rows(tmp_path / 'b.jsonl', 'b', 100)}"


def language(data: str, deal: Deal = Deal(), **settings: object) -> Language:  # noqa: B008
    given = {"model": "micro", "sequence_length": LENGTH, "eval_sequences": 20, **settings}
    return Language(LanguageSettings(data=data, **given), deal)  # type: ignore[arg-type]


def trained_on(workload: Language, replica: int, steps: int, size: int = 8) -> list[str]:
    ids = (workload.sample_ids(3, replica, step, size) for step in range(steps))
    return [bytes(row[:7].tolist()).decode() for one in ids for row in workload.batch(one)]


@given(
    shares=st.lists(st.integers(1, 30), min_size=2, max_size=5),
    seed=st.integers(0, 99),
    begin=st.integers(0, 500),
    count=st.integers(1, 200),
)
def test_each_block_has_each_sources_share_and_their_turns_follow_on_each_other(
    shares: list[int], seed: int, begin: int, count: int
) -> None:
    block = sum(shares)
    end = (begin + count) // block * block + block
    of, turns = mixed(seed, 1, np.arange(end), shares)
    for first in range(0, end, block):
        assert Counter(of[first : first + block].tolist()) == dict(enumerate(shares))
    for source in range(len(shares)):
        assert turns[of == source].tolist() == list(range(len(turns[of == source])))
    some, own = mixed(seed, 1, np.arange(begin, begin + count), shares)
    assert np.array_equal(some, of[begin : begin + count]) and np.array_equal(own, turns[begin : begin + count])


@pytest.mark.parametrize("deal", [Deal(), Deal(2), Deal(2, apart=True)], ids=["each", "dealt", "apart"])
def test_a_source_is_seen_once_before_any_of_it_is_twice_and_by_one_replica_alone(two: str, deal: Deal) -> None:
    workload = language(two, deal)
    seen = [trained_on(workload, replica, BLOCK // 8) for replica in range(2)]
    for own in seen:
        counts = Counter(one[0] for one in own)
        assert counts == {"a": 900, "b": 100}
    for letter, size in (("a", 600), ("b", 100)):
        firsts = [[one for one in own if one[0] == letter] for own in seen]
        within = (
            size * 9 // 10 // (deal.replicas or 1)
        )  # less than what is trained on, of which a twentieth is held out
        begun = [one for own in firsts for one in own[:within]]
        once = begun if deal.replicas else begun[:within]
        assert len(set(once)) == len(once)


def test_what_a_step_trains_on_does_not_depend_on_the_steps_before(two: str) -> None:
    whole = trained_on(language(two), 0, 300)
    late = language(two)
    ids = late.sample_ids(3, 0, 299, 8)
    assert [bytes(row[:7].tolist()).decode() for row in late.batch(ids)] == whole[-8:]


def test_losses_are_of_each_source_and_their_mean_is_by_sequences(two: str) -> None:
    workload = language(two)
    model = workload.build(0).eval()
    score = workload.evaluate(model, 7, torch.device("cpu"))
    held_out = workload._held_out
    letters = [chr(row[0]) for row in held_out]
    assert Counter(letters) == {"a": 18, "b": 2}
    expected = {letter: held_out[[one == letter for one in letters]] for letter in "ab"}
    names = [source.data for source in sources(two)]
    for name, samples in zip(names, expected.values(), strict=True):
        with torch.no_grad():
            assert score.sources[name] == pytest.approx(float(sequence_loss(model, samples)), rel=1e-5)
    assert score.value == pytest.approx((18 * score.sources[names[0]] + 2 * score.sources[names[1]]) / 20)
    assert not language(names[0]).evaluate(model, 7, torch.device("cpu")).sources, "of one source"


def test_with_data_to_judge_by_all_else_is_trained_on(tmp_path: Path) -> None:
    data, other = rows(tmp_path / "a.jsonl", "a", 100), rows(tmp_path / "v.jsonl", "v", 30)
    workload = language(str(data), validation=str(other), eval_sequences=100)
    assert sorted(trained_on(workload, 0, 25, 4)) == [f"a{number:06d}" for number in range(100)]
    held_out = [bytes(row[:7].tolist()).decode() for row in workload._held_out]
    assert sorted(held_out) == [f"v{number:06d}" for number in range(30)]


def test_what_is_trained_on_and_judged_by_is_told(two: str, tmp_path: Path) -> None:
    files = [Path(source.data) for source in sources(two)]
    other = tmp_path / "another.txt"
    other.write_text("other words\n" * 400)

    def told(data: str, validation: object) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            Language(LanguageSettings(data=data, validation=str(validation), sequence_length=LENGTH)).check()
        return [str(one.message) for one in found]

    assert not told(two, other)
    (link := tmp_path / "link.jsonl").symlink_to(files[1])
    every = f"{tmp_path}/[ab].jsonl"
    for one, of, named in (
        (two, link, files[1]),
        (every, files[0], files[0]),
        (every, every, f"{files[0]} and 1 other"),
    ):
        (line,) = told(one, of)
        assert f"validation: trained on, too: {named}" in line


def test_a_file_of_two_sources_that_hold_out_each_by_itself_is_told(two: str, tmp_path: Path) -> None:
    file = sources(two)[0].data
    twice = f"0.5*{file} + 0.5*{tmp_path}/*.jsonl"
    (other := tmp_path / "other.txt").write_text("other words\n" * 400)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Language(LanguageSettings(data=two, sequence_length=LENGTH)).check()
        Language(LanguageSettings(data=twice, validation=str(other), sequence_length=LENGTH)).check()
    with pytest.warns(UserWarning, match=f"data: in several sources: {re.escape(file)}; what one of them holds out"):
        Language(LanguageSettings(data=twice, sequence_length=LENGTH)).check()


def test_chats_are_judged_by_chats(tmp_path: Path) -> None:
    def chats(name: str, count: int) -> str:
        told = [{"prompt": f"{name}{number}", "completion": f"{number}"} for number in range(count)]
        (tmp_path / name).with_suffix(".jsonl").write_text("\n".join(map(json.dumps, told)))
        return str((tmp_path / name).with_suffix(".jsonl"))

    data, other = chats("t", 40), chats("v", 3)
    workload = language(data, validation=other, sequence_length=64)
    workload.check()
    assert workload.available == 40
    tokens, _ = workload._held_out
    texts = [bytes(row.tolist()).decode() for row in tokens]
    assert len(texts) == 3 and all(f"v{number}" in text for number, text in enumerate(texts))
    text = rows(tmp_path / "text.jsonl", "a", 9)
    with pytest.raises(UserError, match=r"validation: .*text\.jsonl holds text, and data chats; give two of a kind"):
        language(data, validation=str(text), sequence_length=64).check()


@pytest.fixture
def mixed_kinds(tmp_path: Path) -> tuple[str, str]:
    """Chats of two answers, and documents of 32 tokens."""

    def told(number: int) -> list[dict[str, str]]:
        said = ("user", f"is it {number}"), ("assistant", "yes"), ("user", "so?"), ("assistant", "!" * (number % 9))
        return [{"role": role, "content": content} for role, content in said]

    (tmp_path / "c.jsonl").write_text("\n".join(json.dumps({"messages": told(number)}) for number in range(100, 200)))
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"text": f"{n:06d}" * 5 + "."}) for n in range(200)))
    return str(tmp_path / "c.jsonl"), str(tmp_path / "t.jsonl")


def test_of_chats_only_answers_are_learnt_and_of_text_beside_them_all(mixed_kinds: tuple[str, str]) -> None:
    workload = language("0.7*{} + 0.3*{}".format(*mixed_kinds), Deal(2), sequence_length=64)
    workload.check()
    alone = [language(one, sequence_length=64) for one in mixed_kinds]
    of_chats, texts = (one.batch(np.arange(one.available or 0)) for one in alone)
    rows = [*zip(*of_chats, strict=True), *zip(texts, texts, strict=True)]
    expected = {bytes(row.tolist()).strip(b"\0"): label[label >= 0].tolist() for row, label in rows}
    batches = [workload.batch(workload.sample_ids(3, 0, step, 8)) for step in range(BLOCK // 8)]
    found = [(row, label) for batch in batches for row, label in zip(*batch, strict=True)]
    assert sum(bool((label == row).all()) for row, label in found) == 300
    assert all(label[label >= 0].tolist() == expected[bytes(row.tolist()).strip(b"\0")] for row, label in found)
    said = workload.sample(workload.build(0).eval(), 0, torch.device("cpu"))
    assert said.startswith("user: is it") and "assistant:" in said.splitlines()[1]


@pytest.mark.parametrize("mask", [False, True], ids=["plain", "document mask"])
def test_losses_of_both_kinds_are_means_of_all_tokens_that_are_learnt(mixed_kinds: tuple[str, str], mask: bool) -> None:
    workload = language("0.7*{} + 0.3*{}".format(*mixed_kinds), sequence_length=64, document_mask=mask)
    alone = [language(one, sequence_length=64).data for one in mixed_kinds]
    model = workload.build(0).eval()

    def loss(rows: list[tuple[Tensor, Tensor]]) -> float:
        """A sample at a time, of which nothing fills it up; a text has two documents, and a chat is one."""
        total, count = 0.0, 0
        for row, label in rows:
            end = int(row.nonzero()[-1]) + 2
            positions = torch.arange(32).repeat(2)[None] if mask and torch.equal(row, label) else None
            own = int((label[1:] >= 0).sum())
            total += own * float(sequence_loss(model, row[None, :end], label[None, :end], positions))
            count += own
        return total / count

    with torch.no_grad():
        batch = workload.batch(workload.sample_ids(3, 0, 0, 8))
        assert {torch.equal(row, label) for row, label in zip(*batch, strict=True)} == {True, False}
        assert float(workload.loss(model, batch)) == pytest.approx(loss([*zip(*batch, strict=True)]), rel=1e-5)
        score = workload.evaluate(model, 5, torch.device("cpu"))
        (tokens, labels), texts = alone[0].held_out(14), alone[1].held_out(6)
        both = [[*zip(tokens, labels, strict=True)], [*zip(texts, texts, strict=True)]]
        assert [*score.sources.values()] == pytest.approx([*map(loss, both)], rel=1e-5)
        assert score.value == pytest.approx(loss(both[0] + both[1]), rel=1e-5)


def test_a_mixture_with_chats_may_be_judged_by_either_and_text_by_no_chats(mixed_kinds: tuple[str, str]) -> None:
    data = "0.7*{} + 0.3*{}".format(*mixed_kinds)
    for validation in (*mixed_kinds, data):
        judged = language(data, sequence_length=64, validation=validation)
        judged.check()
        assert judged.evaluate(judged.build(0).eval(), 9, torch.device("cpu")).value > 0
    _, text = mixed_kinds
    with pytest.raises(UserError, match=r"validation: .*c\.jsonl holds chats, and data text; give two of a kind"):
        language(text, sequence_length=64, validation=data).check()
    with pytest.raises(UserError, match="holds chats, whose prompts stages and shards do not mask"):
        _ = language(data).divisible


def test_a_source_may_be_far_away_and_another_prepared(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    for number in range(3):
        rows(tmp_path / "far" / f"{number}.jsonl", "f", 300)
    near = rows(tmp_path / "near.jsonl", "n", 300)
    assert farflung("prepare", str(near), "--out", "store", cwd=tmp_path).returncode == 0
    server = FarServer(tmp_path / "far")
    try:
        workload = language(f"0.75*{server.address}/*.jsonl + 0.25*{tmp_path / 'store'}", Deal(2))
        seen = trained_on(workload, 0, 50)
        assert Counter(one[0] for one in seen[:BLOCK])["f"] == pytest.approx(300, abs=40)
        assert len(workload.known) >= 1, "checkpoints hold what the files that have come held"
        again = language(workload.settings.data, Deal(2))
        again.known.update(workload.known)
        assert trained_on(again, 0, 50) == seen
        workload.let_go()
    finally:
        server.close()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("0.5*a + b", "'b' has no weight; write each source as 0.3*PATH"),
        ("0.5*a + -0.5*b", "'-0.5*b' has no weight"),
        ("0.5*a + 0.4*b", "the weights come to 0.9; make them come to 1"),
        ("0.5*a + 0.5*a", "a is there twice; give it once"),
        ("1*a + 0*b", "the weight of b is less than a thousandth"),
        (" + ".join(f"0.01*{number}" for number in range(101)), "has 101 sources, and may have 100"),
    ],
)
def test_weights_that_cannot_be_are_refused_in_a_line(data: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        sources(data)
    assert words in str(error.value) or "come to 1.01" in str(error.value), error.value
    assert "\n" not in str(error.value)


def test_what_is_almost_a_mixture_is_told_how_to_write_one() -> None:
    with pytest.raises(UserError, match=r"no such file.*; write a mixture as '0\.7\*PATH \+ 0\.3\*OTHER'"):
        language("0.5*a+0.5*b").check()


@pytest.mark.parametrize("data", ["stdlib", "0.5*.txt", "a + b.txt", "hf:name", "https://host/a+b"])
def test_what_is_no_mixture_is_left_alone(data: str) -> None:
    assert not sources(data)


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=20))
def test_shares_are_the_weights_to_a_thousandth(parts: list[int]) -> None:
    weights = [part / sum(parts) for part in parts]
    if min(weights) < 0.002:
        return
    found = sources(" + ".join(f"{weight:.6f}*p{number}" for number, weight in enumerate(weights)))
    assert sum(source.share for source in found) == BLOCK
    assert all(abs(source.share / BLOCK - weight) <= 1 / BLOCK for source, weight in zip(found, weights, strict=True))


def test_mixtures_are_refused_where_there_can_be_one_source(two: str, tmp_path: Path) -> None:
    refused = farflung("prepare", two, "--out", "store", cwd=tmp_path)
    assert refused.returncode == 2 and "prepare each source by itself" in refused.stderr
    with pytest.raises(UserError, match="make Sequences of each source"):
        Sequences(two, LENGTH)
    with pytest.raises(UserError, match="leave out --order draws"):
        language(two, Deal(draws=True)).check()


def test_machines_may_name_the_same_sources_otherwise() -> None:
    losses = [{"/a/x": 1.0, "/a/y": 3.0}, {"/b/x": 2.0, "/b/y": 5.0}]
    expected = {"/a/x": 1.5, "/a/y": 4.0}
    assert by_source(LOSS, losses) == {"validation_losses": expected}
    assert by_source(LOSS, [losses[0], {}]) == {}, "a machine has one source"


def test_max_tokens_does_not_limit_the_data_to_judge_by(tmp_path: Path) -> None:
    data, other = rows(tmp_path / "a.jsonl", "a", 600), rows(tmp_path / "v.jsonl", "v", 600)
    mixture = f"0.99*{data} + 0.01*{other}"
    language(str(data), max_tokens=4000, validation=mixture, sequence_length=1200).check()


@pytest.mark.slow
def test_a_run_tells_each_sources_loss_and_goes_on_exactly(two: str, tmp_path: Path) -> None:
    common = ["train", "--data", two, *SMALL, "--replicas", "2", "--every", "5", "--checkpoint-every", "10"]
    common += ["--eval-every", "10", "--warmup", "0", "--lr-final", "1"]
    whole = farflung(*common, "--steps", "20", "--out", "whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    assert farflung(*common, "--steps", "10", "--out", "half", cwd=tmp_path).returncode == 0
    more = farflung("train", "--resume", "half", "--steps", "20", cwd=tmp_path)
    assert more.returncode == 0, more.stderr
    told = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "half")]
    assert told[0]["validation_losses"] == told[1]["validation_losses"]
    names = [source.data for source in sources(two)]
    assert list(told[0]["validation_losses"]) == names and all(f"of {name}" in whole.stdout for name in names)
    of_a, of_b = (told[0]["epochs_of_sources"][name] for name in names)
    assert of_a == pytest.approx(72 / 285, rel=0.1), "72 of 80 sequences of two documents each, of 95% of 600 documents"
    assert of_b == pytest.approx(8 / 47.5, rel=0.2)
    run = read_run(tmp_path / "whole")
    assert all([*(event.scores or ())] == names for event in run.of(0, EvaluationEvent))
    assert f"{names[0]}: " in (tmp_path / "whole" / "report.html").read_text()
