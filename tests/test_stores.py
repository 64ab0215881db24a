"""Stores of tokens: what is in them, made once, whatever interrupts it, and found again."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from random import Random

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import patience
from processes import SMALL as FEW
from processes import farflung, fill

from farflung.errors import UserError
from farflung.workloads import data, prepared, store, tokenizers
from farflung.workloads.language import Language
from farflung.workloads.settings import LanguageSettings

SMALL = {"BATCH": 40, "KEPT_EVERY": 100}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("FARFLUNG_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> tokenizers.Pretrained:
    """A small byte-pair tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = Path(__file__).read_text()
    made.train_from_iterator([text], trainers.BpeTrainer(vocab_size=400, special_tokens=["<end>"]))
    folder = tmp_path_factory.mktemp("pieces")
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>").save_pretrained(folder)
    return tokenizers.Pretrained(str(folder))


def held_out(text: str) -> bool:
    return sha256(text.encode()).digest()[0] < 256 / 20


def expected(texts: list[str], most: int | None) -> tuple[bytes, bytes]:
    """Bytes to train on and held out: a document in twenty, by its hash, or the end where that is no good part."""
    parts, room = ([], []), 10**9 if most is None else most
    texts = [text for text in texts if text]
    for text in texts:
        if room > 0:
            parts[held_out(text)].append((text.encode() + b"\0")[:room])
            room -= len(text.encode()) + 1
    training, judged = (b"".join(part) for part in parts)
    share = len(judged) / max(1, len(training) + len(judged))
    if len(parts[0]) + len(parts[1]) < 20 or not 0.01 <= share <= 0.5:
        all_of_it = training + judged
        cut = len(all_of_it) - len(all_of_it) // 20
        return all_of_it[:cut], all_of_it[cut:]
    return training, judged


def held(made: store.Store) -> tuple[bytes, bytes]:
    return made.training.tobytes(), made.held_out.tobytes()


@given(
    texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=30), min_size=1, max_size=60),
    most=st.none() | st.integers(1, 900),
    stops=st.lists(st.integers(0, 60), max_size=3),
)
def test_a_store_is_the_documents_one_after_the_other_however_often_it_was_interrupted(
    texts: list[str], most: int | None, stops: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("store")

    def until(stop: int) -> Iterator[str]:
        yield from texts[:stop]
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        for name, value in SMALL.items():
            patched.setattr(store, name, value)
        for stop in stops:
            if not store.is_store(folder):
                try:
                    store.write(folder, until(stop), tokenizers.Bytes(), most, lambda *_: None)
                except KeyboardInterrupt:
                    with (folder / "training.bin").open("ab") as file:
                        file.write(b"what was written last and is not known to be whole")
        if not store.is_store(folder):
            store.write(folder, texts, tokenizers.Bytes(), most, lambda *_: None)
    assert held(store.read(folder)) == expected(texts, most)
    at_once = store.write(tmp_path_factory.mktemp("once"), texts, tokenizers.Bytes(), most, lambda *_: None)
    assert store.read(folder).manifest == at_once.manifest
    assert sorted(path.name for path in folder.iterdir()) == ["held-out.bin", "store.json", "training.bin"]


def test_a_tokenizer_of_pieces_gives_what_it_gives_of_each_document(
    pieces: tokenizers.Pretrained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"{number} def run(self) -> None:\n    return {number}\n" * (number % 7 + 1) for number in range(90)]
    monkeypatch.setattr(store, "BATCH", 500)
    made = store.write(tmp_path / "store", texts, pieces, None, lambda *_: None)
    alone = [
        [*pieces._tokenizer(text, add_special_tokens=False)["input_ids"], pieces._tokenizer.eos_token_id]
        for text in texts
    ]
    dealt = [
        [token for text, tokens in zip(texts, alone, strict=True) if held_out(text) == part for token in tokens]
        for part in (False, True)
    ]
    assert [made.training.tolist(), made.held_out.tolist()] == dealt and made.manifest.kind == "uint16"


def test_a_long_document_is_cut_at_line_ends_and_has_the_same_tokens(
    pieces: tokenizers.Pretrained, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(f"line {number}\n\n  and {number * number} more of it\n" for number in range(300))
    whole = pieces.encode(text)
    monkeypatch.setattr(tokenizers, "LONGEST", 100)
    assert len([*tokenizers._cut(text)]) > 50 and np.array_equal(pieces.encode(text), whole)


@given(
    numbers=st.lists(st.integers(0, 399), min_size=150, max_size=300, unique=True).map(lambda one: one + one[:50]),
    random=st.randoms(use_true_random=False),
    more=st.integers(1, 40),
)
@settings(max_examples=6)
def test_a_document_is_held_out_or_not_whatever_is_with_it_and_in_whatever_order(
    numbers: list[int], random: Random, more: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("stores")

    def parts(name: str, numbers: list[int]) -> list[set[bytes]]:
        texts = (f"document {number}" for number in numbers)
        made = store.write(folder / name, texts, tokenizers.Bytes(), None, lambda *_: None)
        assert made.held_out.size and made.training.size
        return [set(part.tobytes().split(b"\0")) - {b""} for part in (made.training, made.held_out)]

    one = parts("one", numbers)
    other = parts("other", random.sample([*numbers, *range(400, 400 + more)], len(numbers) + more))
    assert not one[0] & one[1] and not one[0] & other[1] and not one[1] & other[0]


def settings_of(path: Path, **other: object) -> LanguageSettings:
    return LanguageSettings(data=str(path), sequence_length=8, **other)  # type: ignore[arg-type]


def a_text(folder: Path, name: str = "a.txt") -> Path:
    path = folder / name
    path.write_text("some words to train on\n" * 200)
    return path


@pytest.mark.parametrize("small", [True, False])
def test_a_terminal_shows_how_far_a_runs_own_preparation_is(
    small: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    path, shown = a_text(tmp_path), Terminal()
    if not small:
        monkeypatch.setattr("farflung.workloads.text.SMALL", path.stat().st_size - 1)
    monkeypatch.setattr(sys, "stderr", shown)
    made = prepared.store_of(settings_of(path), tokenizers.Bytes())
    tokens = made.manifest.training + made.manifest.held_out
    assert (f"{tokens:,} tokens" in shown.getvalue()) == (not small)


def test_a_run_makes_its_store_of_large_data_once_before_its_replicas_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = a_text(tmp_path)
    language = Language(settings_of(path))
    language.prepare()  # of little, `check` makes it
    assert not [*prepared.cache().glob("tokens/*/store.json")]
    monkeypatch.setattr("farflung.workloads.text.SMALL", path.stat().st_size - 1)
    language.prepare()
    made, told = [*prepared.cache().glob("tokens/*/store.json")], list[tuple[int, int]]()
    prepared.store_of(settings_of(path), tokenizers.Bytes(), lambda *how: told.append(how))
    assert len(made) == 1 and not told


def test_the_same_text_is_prepared_once_wherever_it_lies_and_other_text_again(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []

    def prepare(path: Path, **other: object) -> store.Store:
        return prepared.store_of(settings_of(path, **other), tokenizers.Bytes(), lambda *how: told.append(how))

    first = prepare(a_text(tmp_path))
    os.utime(tmp_path / "a.txt", (1, 1))
    shutil.copy(tmp_path / "a.txt", tmp_path / "b.txt")
    assert [prepare(tmp_path / name).folder for name in ("a.txt", "a.txt", "b.txt")] == [first.folder] * 3
    assert len(told) == 1
    (tmp_path / "a.txt").write_text("other words to train on" * 200)
    assert prepare(tmp_path / "a.txt").folder != first.folder and len(told) == 2
    assert prepare(tmp_path / "b.txt", max_tokens=1000).manifest.training == 950 and len(told) == 3


def test_no_store_is_kept_of_a_file_that_is_written_to_meanwhile(cache: Path, tmp_path: Path) -> None:
    path = a_text(tmp_path)
    before = path.read_text()

    def written_to(*_: int) -> None:
        path.write_text(before + "more")

    with pytest.raises(UserError, match=r"a\.txt: was written to while tokens were made of it; begin again"):
        prepared.store_of(settings_of(path), tokenizers.Bytes(), written_to)
    assert not [*cache.glob("tokens/*/store.json")]
    made = prepared.store_of(settings_of(path), tokenizers.Bytes())
    assert made.manifest.training + made.manifest.held_out == len(before) + len("more") + 1


def test_a_store_is_found_in_a_cache_that_can_only_be_read(cache: Path, tmp_path: Path) -> None:
    made = prepared.store_of(settings_of(a_text(tmp_path)), tokenizers.Bytes())
    shutil.rmtree(cache / "seen")
    (cache / "seen").touch()  # nobody, not even root, can write a note below it
    assert prepared.store_of(settings_of(a_text(tmp_path)), tokenizers.Bytes()) == made


def test_a_damaged_store_of_the_cache_is_made_again(tmp_path: Path) -> None:
    settings = settings_of(a_text(tmp_path))
    made = prepared.store_of(settings, tokenizers.Bytes())
    before = held(made)
    os.truncate(made.folder / "training.bin", 100)
    assert held(prepared.store_of(settings, tokenizers.Bytes())) == before


ONE = """
import os, sys
from farflung.workloads import prepared, store, tokenizers
from farflung.workloads.settings import LanguageSettings
store.BATCH = 1000
times = []
made = prepared.store_of(LanguageSettings(data=sys.argv[1]), tokenizers.Bytes(), lambda *how: times.append(how))
print(bool(times), (made.folder / "training.bin").stat().st_ino, made.training.sum())
"""


def test_of_processes_that_start_together_one_makes_it_and_all_have_it(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": "words " * 400}) for _ in range(2000)))
    command = [sys.executable, "-c", ONE, str(tmp_path / "rows.jsonl")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=patience(120))[0].split() for process in processes]
    assert sorted(made for made, *_ in said) == ["False", "False", "True"]
    assert len({tuple(rest) for _, *rest in said}) == 1


def test_a_killed_preparation_goes_on_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": f"{i} words " * 40}) for i in range(20_000)))
    program = ONE.replace("store.BATCH = 1000", "store.BATCH, store.KEPT_EVERY = 1000, 100_000").replace(
        "lambda *how: times.append(how)", "lambda *how: how[1] > 3e6 and os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path / "rows.jsonl")], timeout=patience(120))
    assert killed.returncode == -9
    (left,) = tmp_path.glob("cache/tokens/*/progress.json")
    assert json.loads(left.read_text())["documents"] > 5000
    told: list[tuple[int, int]] = []
    settings = settings_of(tmp_path / "rows.jsonl")
    made = prepared.store_of(settings, tokenizers.Bytes(), lambda *how: told.append(how))
    assert told[0][1] > 3e6 - 200_000
    assert held(made) == expected([f"{i} words " * 40 for i in range(20_000)], None)


def test_a_preparation_that_is_interrupted_while_it_holds_out_the_end_has_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the text is then written over what was held out before, of which an earlier note tells the size."""
    for name, value in SMALL.items():
        monkeypatch.setattr(store, name, value)
    short = next(text for text in map(str, range(999)) if held_out(text))
    texts = [short, *(f"document {number} of some length, so that it is noted" for number in range(18))]
    assert len(texts) < 20 and not any(map(held_out, texts[1:]))
    kept_safe, flushed = os.fsync, 0

    def interrupted(file: int) -> None:
        nonlocal flushed
        kept_safe(file)
        if (flushed := flushed + 1) == at:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    for at in range(1, 99):
        flushed, folder = 0, tmp_path / str(at)
        try:
            store.write(folder, texts, tokenizers.Bytes(), None, lambda *_: None)
        except KeyboardInterrupt:
            store.write(folder, texts, tokenizers.Bytes(), None, lambda *_: None)
        assert held(store.read(folder)) == expected(texts, None), at
        if flushed < at:
            break
    assert at > 10


def test_two_processes_do_not_prepare_into_one_folder(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": "words " * 400}) for _ in range(20)))
    with FileLock(tmp_path / "store" / prepared.LOCK):
        other = farflung("prepare", "rows.jsonl", "--out", "store", cwd=tmp_path)
    told = "another process makes a store in store; wait for it, or give another folder with --out"
    assert other.returncode == 2 and other.stderr.count("\n") == 1 and told in other.stderr, other.stderr
    (tmp_path / "file").touch()
    onto_a_file = farflung("prepare", "rows.jsonl", "--out", "file", cwd=tmp_path)
    assert onto_a_file.returncode == 2 and onto_a_file.stderr.count("\n") == 1, onto_a_file.stderr
    ended = farflung("prepare", "rows.jsonl", "--out", "store", cwd=tmp_path)
    assert ended.returncode == 0 and held(store.read(tmp_path / "store")) == expected(["words " * 400] * 20, None)
    assert {path.name for path in (tmp_path / "store").iterdir()} == {*store.TEXT, store.MANIFEST}


@given(
    numbers=st.lists(st.integers(0, 99), min_size=2, max_size=30, unique=True),
    random=st.randoms(use_true_random=False),
)
@settings(max_examples=20)
def test_a_manifest_tells_all_documents_and_their_order(
    numbers: list[int], random: Random, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("stores")

    def sources(name: str, texts: list[str], most: int | None = None) -> str:
        return store.write(folder / name, texts, tokenizers.Bytes(), most, lambda *_: None).manifest.sources

    texts = [f"document {number}" for number in numbers]
    turned = [*texts[1:], texts[0]]
    changed = random.randrange(len(texts))
    other = [*texts[:changed], "another", *texts[changed + 1 :]]
    joined = [texts[0] + texts[1], *texts[2:]]
    every = [sources(str(place), one) for place, one in enumerate((texts, turned, other, joined, texts[:-1]))]
    assert len(set(every)) == len(every) and sources("again", [*texts, ""]) == every[0]
    assert sources("beginning", texts, most=sum(len(text) + 1 for text in texts[:-1])) == every[-1]


def test_a_preparation_does_not_go_on_with_other_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(store, name, value)
    texts = [f"document {number} of some length" for number in range(40)]

    def cut() -> Iterator[str]:
        yield from texts[:30]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.write(tmp_path / "store", cut(), tokenizers.Bytes(), None, lambda *_: None)
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in ["another", *texts[1:]]))
    ended = farflung("prepare", "a.jsonl", "--out", "store", cwd=tmp_path)
    told = "store: this store was begun with other documents than there are now; put back what they were, or remove"
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1 and told in ended.stderr, ended.stderr
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    ended = farflung("prepare", "a.jsonl", "--out", "store", cwd=tmp_path)
    assert ended.returncode == 0 and held(store.read(tmp_path / "store")) == expected(texts, None), ended.stderr


def test_a_named_store_trains_as_its_text_does(tmp_path: Path) -> None:
    path = a_text(tmp_path)
    ended = farflung("prepare", "a.txt", "--out", "store", cwd=tmp_path)
    assert ended.returncode == 0 and "store holds 4,601 tokens of 1 document" in ended.stdout, ended.stderr
    of_text, of_store = (Language(settings_of(place)) for place in (path, tmp_path / "store"))
    of_store.check()
    ids = of_text.sample_ids(seed=0, replica=1, step=2, size=9)
    assert of_store.digest() == of_text.digest()
    assert np.array_equal(ids, of_store.sample_ids(seed=0, replica=1, step=2, size=9))
    assert of_store.batch(ids).equal(of_text.batch(ids))  # type: ignore[union-attr]
    again = farflung("prepare", "a.txt", "--out", "store", cwd=tmp_path)
    assert again.returncode == 2 and "holds a whole store" in again.stderr
    for name, fault in (("training.bin", "has 100 tokens, and store.json says 4371"), ("store.json", "damaged")):
        os.truncate(tmp_path / "store" / name, 100)
        with pytest.raises(UserError, match=fault):
            Language(settings_of(tmp_path / "store")).check()


def test_checkpoints_keep_which_documents_each_source_has(tmp_path: Path) -> None:
    texts, chats = a_text(tmp_path), tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
    chats.write_text("\n".join(json.dumps({"messages": messages}) for _ in range(9)))
    named = (str(texts), str(chats), f"0.5*{texts} + 0.5*{chats}")
    of_text, of_chats, of_both = (Language(LanguageSettings(data=one, sequence_length=64)).known for one in named)
    assert [*of_text, *of_chats] == [str(texts), str(chats)] and of_both == {**of_text, **of_chats}


@pytest.mark.slow
def test_a_run_does_not_go_on_with_a_store_of_other_text(tmp_path: Path) -> None:
    def prepare(texts: list[str]) -> None:
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        store.write(tmp_path / "store", texts, tokenizers.Bytes(), None, lambda *_: None)

    prepare(first := ["some words " * 300, "some more " * 300])
    few = [*FEW[: FEW.index("--max-tokens")], "--data", "store", "--steps", 5, "--every", 2, "--network", "simulated"]
    assert farflung("train", *few, "--out", "run", cwd=tmp_path).returncode == 0
    on = ("train", "--resume", "run", "--steps", 8)
    prepare([first[1], first[0]])
    ended = farflung(*on, cwd=tmp_path)
    told = "data store: has changed since this run began; put back what it was, or begin a new run"
    assert ended.returncode == 2 and ended.stderr.count(told) == 1, ended.stderr
    assert told in ended.stderr.strip().splitlines()[-1]
    prepare(first)
    ended = farflung(*on, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr


def test_max_tokens_bounds_a_named_store_too(tmp_path: Path) -> None:
    store.write(tmp_path / "store", ["a" * 4000, "b" * 96_000], tokenizers.Bytes(), None, lambda *_: None)
    found = data.load(settings_of(tmp_path / "store", max_tokens=1000), tokenizers.Bytes())
    assert (found._training.tokens, found._held_out.tokens) == (950, 49)


def test_a_tokenizer_is_the_same_whatever_it_has_done_and_however_it_cuts(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({"a": 0, "<end>": 1, "?": 2}, "?"))
    for name, length in (("one", 4), ("other", 8)):
        made.enable_truncation(length)
        PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>").save_pretrained(tmp_path / name)
    fresh, other, used = (tokenizers.Pretrained(str(tmp_path / name)) for name in ("one", "other", "one"))
    used.encode("a")
    assert fresh.digest == used.digest == other.digest


def test_a_store_of_another_tokenizer_or_a_later_release_is_refused(
    pieces: tokenizers.Pretrained, tmp_path: Path
) -> None:
    store.write(tmp_path / "store", ["word " * 400], pieces, None, lambda *_: None)
    with pytest.raises(UserError, match="not of the model's tokenizer; prepare the text again"):
        Language(settings_of(tmp_path / "store")).check()
    manifest = tmp_path / "store" / "store.json"
    manifest.write_text(manifest.read_text().replace('"format": 2', '"format": 99'))
    with pytest.raises(UserError, match="newer than farflung"):
        Language(settings_of(tmp_path / "store")).check()


def test_a_full_disk_is_a_line_and_the_same_command_goes_on_when_there_is_room(disk: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words to train on\n" * 10_000)
    os.truncate(other := fill(disk), other.stat().st_size - 60_000)
    command = ("prepare", str(tmp_path / "a.txt"), "--out", str(disk / "store"))
    full = farflung(*command, cwd=tmp_path)
    assert full.returncode == 2 and full.stderr.count("\n") == 1 and "No space left" in full.stderr, full.stderr
    other.unlink()
    ended = farflung(*command, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert held(store.read(disk / "store")) == expected([(tmp_path / "a.txt").read_text()], None)


def test_a_cache_that_cannot_be_is_a_line_that_says_how_to_have_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FARFLUNG_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="set FARFLUNG_CACHE to another folder"):
        prepared.store_of(settings_of(a_text(tmp_path)), tokenizers.Bytes())
