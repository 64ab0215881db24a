"""Stores of chats: the sequences and labels that chats have by themselves, made once, and refused to what is unlike."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_here
from test_chats import MARKED, PLAIN, ROWS, tokenizer_with, written

from farflung.data import Sequences
from farflung.errors import UserError
from farflung.workloads import chat_store, chats, prepared, store, tokenizers
from farflung.workloads.chat_store import Chat
from farflung.workloads.dealing import Deal
from farflung.workloads.language import Language
from farflung.workloads.settings import LanguageSettings

Rendered = tuple[list[int], list[int]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARFLUNG_CACHE", str(tmp_path / "cache"))


def some(count: int, seed: int) -> list[Chat]:
    """Chats of one to four messages of up to thirty letters."""
    random = Random(seed)

    def message() -> dict[str, str]:
        words = "".join(random.choices("abcdéf ", k=random.randrange(30)))
        return {"role": random.choice(["user", "system", "assistant", "assistant"]), "content": words}

    return [Chat(str(number), [message() for _ in range(random.randint(1, 4))]) for number in range(count)]


def by_hand(chat: Chat) -> Rendered:
    """A chat as bytes, and its labels."""
    tokens: list[int] = []
    labels: list[int] = []
    for message in chat.messages:
        answers = message["role"] == "assistant"
        head, said = f"{message['role']}: ".encode(), (message["content"] + "\n\0"[answers]).encode()
        tokens += [*head, *said]
        labels += [-100] * len(head) + ([*said] if answers else [-100] * len(said))
    return tokens, labels


def dealt(found: list[Rendered], length: int, most: int | None, draws: bool) -> tuple[list[Rendered], list[Rendered]]:
    """The cut chats to train on and held out."""
    read, taken = 0, []
    for tokens, labels in found:
        if most is None or read < most:
            taken.append((tokens[:length], labels[:length]))
            read += len(tokens)
    kept = [(tokens, labels) for tokens, labels in taken if any(label != -100 for label in labels[1:])]
    contents = [str(number).encode() if draws else np.array(one[0]).tobytes() for number, one in enumerate(kept)]
    out = [sha256(content).digest()[0] < 256 / 20 for content in contents]
    if len(kept) < 20 or all(out) or not any(out):
        return kept[:-1], kept[-1:]
    return [one for one, is_out in zip(kept, out, strict=True) if not is_out], [
        one for one, is_out in zip(kept, out, strict=True) if is_out
    ]


def rows(batch: chats.Labelled) -> list[Rendered]:
    """A batch without what fills it up: bytes hold no zero but at the ends of answers."""
    found = []
    for tokens, labels in zip(*(part.tolist() for part in batch), strict=True):
        size = max(place + 1 for place, label in enumerate(zip(tokens, labels, strict=True)) if label != (0, -100))
        found.append((tokens[:size], labels[:size]))
    return found


@pytest.mark.filterwarnings("ignore:data .* longer than a sequence")
@pytest.mark.filterwarnings("ignore:data .* have no answer")
@given(
    count=st.integers(9, 90),
    seed=st.integers(0, 10**6),
    length=st.integers(20, 90),
    most=st.none() | st.integers(1000, 3000),
    draws=st.booleans(),
    stops=st.lists(st.integers(0, 60), max_size=2),
)
@settings(max_examples=40)
def test_a_store_gives_what_the_chats_do_however_they_are_cut_and_however_often_it_was_interrupted(
    count: int,
    seed: int,
    length: int,
    most: int | None,
    draws: bool,
    stops: list[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder, told = tmp_path_factory.mktemp("store"), some(count, seed)

    def until(stop: int) -> Iterator[Chat]:
        yield from told[:stop]
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(store, "BATCH", 100)
        patched.setattr(store, "KEPT_EVERY", 200)
        for stop in stops:
            with pytest.raises(KeyboardInterrupt):
                chat_store.write(folder, until(min(stop, count)), tokenizers.Bytes(), None, lambda *_: None)
            for path in folder.glob("*.bin"):
                path.write_bytes(path.read_bytes() + b"what was written last and is not known to be whole")
        chat_store.write(folder, told, tokenizers.Bytes(), None, lambda *_: None)
    training, held_out = dealt([by_hand(chat) for chat in told], length, most, draws)
    given = LanguageSettings(data=str(folder), sequence_length=length, max_tokens=most)
    if len(training) < 2:
        with pytest.raises(UserError, match="give at least 3"):
            chats.load(given, tokenizers.Bytes(), Deal(draws=draws))
        return
    found = chats.load(given, tokenizers.Bytes(), Deal(draws=draws))
    assert found.available == len(training)
    assert rows(found.batch(np.arange(len(training)))) == training and rows(found.held_out(99)) == held_out
    learnt = sum(label != -100 for _, labels in training for label in labels)
    assert found.answer_tokens == round(learnt / len(training))
    width = max(len(tokens) for tokens, _ in training[:3])
    assert [part.shape for part in found.batch(np.arange(min(3, len(training))))] == [
        (min(3, len(training)), width)
    ] * 2


def test_chats_are_prepared_once_for_a_template(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    data = LanguageSettings(data=written(tmp_path / "c.jsonl", ROWS), sequence_length=64)
    plain, marked = (tokenizer_with(template, tmp_path / name) for name, template in (("p", PLAIN), ("m", MARKED)))

    def made(name: str) -> Path:
        told.clear()
        taken = tokenizers.load(name)
        return prepared.store_of(data, taken, lambda *how: told.append(how), as_chats=True).folder

    first = made(plain)
    assert told and made(plain) == first and not told
    assert made(marked) != first and told
    os.truncate(first / "index.bin", 10)
    assert made(plain) == first and told, "a damaged one is made again"


def test_a_named_store_trains_as_its_chats_do_and_is_refused_to_what_is_unlike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, data = tokenizer_with(PLAIN, tmp_path / "t"), written(tmp_path / "c.jsonl", ROWS)
    assert run_here(monkeypatch, tmp_path, "prepare", "c.jsonl", "--tokenizer", "t", "--out", "store") == 0
    of_chats, of_store = (
        Language(LanguageSettings(model="micro", data=one, tokenizer=name, sequence_length=64))
        for one in (data, str(tmp_path / "store"))
    )
    tokens = store.read(tmp_path / "store").manifest.training
    parts = of_chats.batch(np.arange(of_chats.available or 0)), of_chats._held_out
    answers = sum(int((labels != -100).sum()) for _, labels in parts)
    assert f"store holds {tokens:,} tokens of 40 chats, {answers:,} of them in answers" in capsys.readouterr().out
    of_store.check()
    ids = of_chats.sample_ids(seed=0, replica=1, step=2, size=9)
    assert np.array_equal(ids, of_store.sample_ids(seed=0, replica=1, step=2, size=9))
    assert all(map(torch.equal, of_store.batch(ids), of_chats.batch(ids))) and of_store.digest() == of_chats.digest()
    assert run_here(monkeypatch, tmp_path, "prepare", "c.jsonl", "--tokenizer", "t", "--out", "store") == 2
    with pytest.raises(UserError, match="is a store of chats, and text is needed here"):
        Sequences(str(tmp_path / "store"), 8, tokenizer=name)

    def refused(tokenizer: str) -> str:
        with pytest.raises(UserError) as error:
            Language(LanguageSettings(model="micro", data=str(tmp_path / "store"), tokenizer=tokenizer)).check()
        return str(error.value)

    assert "its tokens are not of the model's tokenizer; prepare" in refused("bytes")
    assert "of another chat template than the tokenizer has now; prepare them" in refused(
        tokenizer_with(MARKED, tmp_path / "m")
    )
    os.truncate(tmp_path / "store" / "index.bin", store.ENTRY.itemsize)
    assert "index.bin: has 1 chats, and store.json says 40; remove the folder" in refused(name)


def test_a_chat_that_cannot_be_is_told_by_its_record_and_the_same_command_goes_on_when_it_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store, "BATCH", 100)
    monkeypatch.setattr(store, "KEPT_EVERY", 200)
    spoilt = [*ROWS[:30], {"messages": []}, *ROWS[30:]]
    words = ["prepare", "c.jsonl", "--out", "store"]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, spoilt)))
    assert run_here(monkeypatch, tmp_path, *words) == 2
    told = capsys.readouterr().err
    assert "c.jsonl: record 31 is a chat without messages; remove it" in told and told.count("\n") == 1
    done = json.loads((tmp_path / "store" / "progress.json").read_text())["documents"]
    assert 0 < done <= 30
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    assert run_here(monkeypatch, tmp_path, *words) == 0
    assert store.read(tmp_path / "store").manifest.documents == 40
