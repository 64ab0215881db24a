"""Data on other machines: file by file, each when it is needed, in a cache of bounded size."""

from __future__ import annotations

import contextlib
import gzip
import json
import lzma
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from far_server import FarServer
from patience import patience, until
from processes import SMALL, farflung
from warm import Python

from farflung.errors import LostDataError, UserError
from farflung.training import checkpoint
from farflung.workloads import far, tokenizers
from farflung.workloads.dealing import Deal
from farflung.workloads.language import Language
from farflung.workloads.settings import LanguageSettings
from farflung.workloads.shard_cache import ShardCache
from farflung.workloads.shards import IN_FILE, Shards

LENGTH, FILES = 8, 6


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FarServer]:
    """Six files of thirty rows each; the sequences of all differ."""
    (tmp_path / "far").mkdir()
    for number in range(FILES):
        rows = [json.dumps({"text": f"{number}:{row:03d} {'abcdefgh'[row % 8] * (row + 9)}"}) for row in range(30)]
        (tmp_path / "far" / f"{number}.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    served = FarServer(tmp_path / "far")
    yield served
    served.close()


def shards(server: FarServer, folder: Path, shares: int = 1, room: int = 10**9) -> Shards:
    files = far.files(f"{server.address}/*.gz")
    return Shards(
        ShardCache(folder, room, tokenizers.Bytes(), "text", 1),
        files,
        LENGTH,
        "far",
        Deal(shares if shares > 1 else None),
    )


def ids_of(found: Shards, seed: int, replica: int, step: int, size: int) -> np.ndarray:
    return found.at(seed, replica, step * size + np.arange(size))


def all_ids(found: Shards) -> set[int]:
    """What there is, counted from the files' tokens themselves."""
    sizes = [len(found._cache.tokens(file).training) // LENGTH for file in found._files]
    return {file << IN_FILE | number for file, size in enumerate(sizes) for number in range(size)}


@pytest.mark.parametrize("shares", [1, 3, 6, 8])
def test_each_sequence_comes_once_before_any_comes_twice(server: FarServer, tmp_path: Path, shares: int) -> None:
    found = shards(server, tmp_path / "cache", shares)
    everything = all_ids(found)
    own = [sum(found.size(unit) for unit in found.order(7, replica, 0)) for replica in range(shares)]
    ids = [ids_of(found, 7, replica, 0, size).tolist() for replica, size in enumerate(own)]
    assert sorted(one for each in ids for one in each) == sorted(everything)
    again = ids_of(found, 7, 0, 0, 2 * own[0]).tolist()
    assert again[: own[0]] == ids[0] and again[own[0] :] != ids[0]
    assert len(set(again[own[0] :])) == len(again[own[0] :]) or shares > 1  # a second epoch's share has another size


def test_what_a_step_trains_on_does_not_depend_on_what_was_read_before(server: FarServer, tmp_path: Path) -> None:
    first, second = (shards(server, tmp_path / name, 2) for name in "ab")
    steps = [ids_of(first, 0, 1, step, 4) for step in range(20)]
    assert np.array_equal(ids_of(second, 0, 1, 19, 4), steps[19])
    assert np.array_equal(first.batch(steps[19]), second.batch(steps[19]))
    text = bytes(first.batch(steps[19])[0].tolist()).decode()
    file = steps[19][0] >> IN_FILE
    whole = gzip.decompress((server.folder / f"{file}.jsonl.gz").read_bytes()).decode()
    assert text in "\0".join(json.loads(line)["text"] for line in whole.splitlines()) + "\0"


def test_only_files_that_are_trained_on_come_here(server: FarServer, tmp_path: Path) -> None:
    found = shards(server, tmp_path / "cache", FILES)
    found.batch(ids_of(found, 0, 2, 0, 4))
    found._cache.tokens(found._files[found.order(0, 2, 0)[0].file])
    coming = {unit.file for epoch in range(3) for unit in found.order(0, 2, epoch)}
    until(lambda: len(server.asked) > 1)
    assert {name for name in server.asked if name} <= {f"{file}.jsonl.gz" for file in coming}


def test_the_cache_is_bounded_and_what_was_removed_comes_again(server: FarServer, tmp_path: Path) -> None:
    found = shards(server, tmp_path / "cache", room=3000)
    biggest = 0
    for step in range(200):  # a file has some twenty steps
        found.batch(ids_of(found, 0, 0, step, 8))
        with contextlib.suppress(FileNotFoundError):  # one is removed just now
            biggest = max(biggest, sum(path.stat().st_size for path in tmp_path.glob("cache/*/*.bin")))
    assert 0 < biggest <= 3000 + 3 * 1500  # of a file, 1300 bytes are tokens
    assert len(server.asked) > FILES
    assert sum(path.is_dir() for path in (tmp_path / "cache").iterdir()) < FILES, "no empty folders are left"


def test_a_file_that_has_changed_is_refused(server: FarServer, tmp_path: Path) -> None:
    known = shards(server, tmp_path / "cache")
    all_ids(known)
    for path in server.folder.iterdir():
        path.write_bytes(path.read_bytes() + gzip.compress(b'{"text": "more"}'))
    later = shards(server, tmp_path / "other")
    later._cache.known.update(known._cache.known)
    with pytest.raises(UserError, match=r"0\.jsonl\.gz: has changed since this run began; put back"):
        later.held_out(4)


def test_a_file_of_the_same_size_that_was_written_later_is_another(server: FarServer, tmp_path: Path) -> None:
    """A plain web server tells of a file no more than its size and when it was written."""
    first = shards(server, tmp_path / "cache").batch(np.arange(3))
    path = server.folder / "0.jsonl.gz"
    length = path.stat().st_size
    rows = [json.dumps({"text": f"{row} others {'hgfedcba'[row % 8] * 20}"}) for row in range(30)]
    path.write_bytes(gzip.compress("\n".join(rows).encode()).ljust(length, b"\0"))
    os.utime(path, (1e9, 1e9))
    assert path.stat().st_size == length
    assert not np.array_equal(shards(server, tmp_path / "cache").batch(np.arange(3)), first)


@pytest.mark.parametrize("name", ["store.json", "progress.json", "training.bin.txt"])
def test_a_file_may_be_named_as_ours_are(server: FarServer, tmp_path: Path, name: str) -> None:
    (server.folder / name).write_text(json.dumps([{"text": "words " * 30} for _ in range(30)]))
    cache = ShardCache(tmp_path / "cache", 10**9, tokenizers.Bytes(), "text", 1)
    assert b"words words " in cache.tokens(f"{server.address}/{name}").training.tobytes()


def test_what_killed_processes_have_left_is_removed_for_room(server: FarServer, tmp_path: Path) -> None:
    left = [tmp_path / "cache" / folder / f"{far.ARRIVED}0.jsonl.gz.host-1.tmp" for folder in ("a" * 32, "b" * 32)]
    for path in left:
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x" * 2000)
        os.utime(path.parent, (1e9, 1e9))
    found = shards(server, tmp_path / "cache", room=3000)
    found.batch(ids_of(found, 0, 0, 0, 1))
    for step in range(60):
        found.batch(ids_of(found, 0, 0, step, 8))
    assert not any(path.parent.exists() for path in left)


def test_chats_of_another_machine_are_refused_with_what_to_do(server: FarServer, tmp_path: Path) -> None:
    chat = json.dumps({"messages": [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": "Yes."}]})
    (tmp_path / "far" / "chats.jsonl").write_text(chat)
    cache = ShardCache(tmp_path / "cache", 10**9, tokenizers.Bytes(), "text", 1)
    told = r"chats.jsonl: no column 'text'; set text_column to one of messages, or copy it here first if it holds chats"
    with pytest.raises(UserError, match=told):
        cache.tokens(f"{server.address}/chats.jsonl")


def test_what_is_half_there_is_made_anew(server: FarServer, tmp_path: Path) -> None:
    found = shards(server, tmp_path / "cache")
    expected = {file: found._cache.tokens(file).training.tobytes() for file in found._files}
    for path in tmp_path.glob("cache/*/training.bin"):
        path.write_bytes(path.read_bytes()[:-3])
    again = shards(server, tmp_path / "cache")
    assert {file: again._cache.tokens(file).training.tobytes() for file in again._files} == expected


def judged_by(cache: Path, monkeypatch: pytest.MonkeyPatch, validation: str, **more: Any) -> bytes:
    """The bytes of all samples that a model is judged by."""
    monkeypatch.setenv("FARFLUNG_CACHE", str(cache))
    monkeypatch.setattr(far, "PIECE", 1000)
    monkeypatch.setattr(far, "SILENT_S", 20.0)
    monkeypatch.setattr(far, "DEADLINE_S", 5.0)
    given = {"sequence_length": LENGTH, "eval_sequences": 200, **more}
    workload = Language(LanguageSettings(data=str(Path(__file__).parent / "*.py"), validation=validation, **given))
    workload.check()
    return bytes(workload.held_out_batch(np.arange(workload.held_out)).flatten().tolist())


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt", "a.txt.xz"])
def test_data_to_judge_by_is_read_no_further_than_its_samples_take(
    name: str, server: FarServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one file, whose rest never comes."""
    texts = [Random(number).randbytes(50).hex() for number in range(9000)]
    lines = [json.dumps({"text": text}) for text in texts] if "jsonl" in name else texts
    raw = "\n".join(lines).encode()
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(Path(name).suffix, bytes)
    (server.folder / name).write_bytes(pack(raw))
    server.most = 300_000
    samples = judged_by(tmp_path / "cache", monkeypatch, f"{server.address}/{name}")
    assert len(samples) == 200 * LENGTH
    begin = "".join(texts) if "jsonl" in name else "\n".join(texts)
    rows = (samples[at : at + LENGTH].replace(b"\0", b"").decode() for at in range(0, len(samples), LENGTH))
    assert all(row in begin[: 201 * LENGTH] for row in rows)
    assert judged_by(tmp_path / "other", monkeypatch, f"{server.address}/{name}") == samples


def test_only_the_first_files_to_judge_by_are_read(
    server: FarServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as so many samples take, or as there is room."""
    few, room = {"eval_sequences": 150}, {"eval_sequences": 10**6, "data_room": 6e-6}
    for number, (more, most) in enumerate(((few, 150), (room, 6000 // 4 // LENGTH))):
        server.asked.clear()
        samples = judged_by(tmp_path / f"cache-{number}", monkeypatch, f"{server.address}/*.gz", **more)
        assert most - 1 <= len(samples) / LENGTH <= most
        assert {name for name in server.asked if name} == {"0.jsonl.gz", "1.jsonl.gz"}


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("{}/none/", "cannot be read: 404"),
        ("{}/folder", "{}/folder: is a folder; end it with /"),
        ("{}/*.parquet", "no files there; give a file"),
        ("{}/9.jsonl", "{}/9.jsonl: cannot be read: 404"),
        ("http://127.0.0.1:1/", "cannot be read"),
        ("s3://bucket/*.jsonl", "Install s3fs to access S3; install it, and try again"),
        ("hf:", "names no data set; give hf:NAME"),
        ("gopher://host/", "Protocol not known: gopher"),
    ],
)
def test_an_address_that_leads_nowhere_is_told_in_a_line(server: FarServer, address: str, told: str) -> None:
    (server.folder / "folder").mkdir()
    with pytest.raises(UserError) as error:
        far.files(address.format(server.address))
    assert told.format(server.address) in str(error.value) and "\n" not in str(error.value)


def settings(server: FarServer, steps: int = 100) -> list[object]:
    small = SMALL[: SMALL.index("--max-tokens")]
    data = ["--data", f"{server.address}/*.gz", "--data-deadline", 2, "--data-room", 3e-6]
    return [*small, *data, "--steps", steps, "--every", 5, "--replicas", 2, "--network", "torch"]


@pytest.mark.slow
def test_a_run_whose_source_is_lost_stops_with_a_checkpoint_and_goes_on_exactly(
    server: FarServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(24):  # more than two replicas keep mapped, of ten steps each
        rows = [json.dumps({"text": f"{number}:{row:03d} {'abcdefgh'[row % 8] * (row + 9)}"}) for row in range(18)]
        (server.folder / f"{number}.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    assert farflung("train", *settings(server), "--out", "whole").returncode == 0
    process = Python("-m", "farflung", "train", *settings(server), "--out", "cut", cwd=tmp_path, err=tmp_path / "err")
    until(lambda: list(tmp_path.glob("cut/checkpoints/step-*")) or process.poll() is not None)
    server.close()
    assert process.wait(patience(60)) == 2
    last = (tmp_path / "err").read_text().strip().splitlines()[-1]
    assert "cannot be read, for 2 s now" in last and "with a checkpoint to go on from" in last, last
    server.open()
    resumed = farflung("train", "--resume", "cut")
    assert resumed.returncode == 0, resumed.stderr
    whole, cut = (checkpoint.read(checkpoint.path_of(tmp_path / run, 100, "replica-1")) for run in ("whole", "cut"))
    assert set(cut["data"]) == set(whole["data"]) and cut["trained"] == whole["trained"] == 100


@pytest.mark.slow
def test_a_run_that_is_stopped_waits_for_no_silent_source(server: FarServer, tmp_path: Path) -> None:
    words = settings(server, steps=10**6)
    words[words.index("--data-deadline") + 1] = 10**6
    process = Python("-m", "farflung", "train", *words, "--out", "run", cwd=tmp_path, err=tmp_path / "err")
    until(lambda: list(tmp_path.glob("run/checkpoints/step-*")) or process.poll() is not None)
    server.close()
    until(lambda: "it is asked again" in (tmp_path / "err").read_text() or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    assert process.wait(patience(60)) == 130, (tmp_path / "err").read_text()
    assert "its last checkpoint is of step" in (tmp_path / "err").read_text()


def test_what_is_held_out_still_comes_when_no_more_steps_are_taken(server: FarServer, tmp_path: Path) -> None:
    found, usual = shards(server, tmp_path / "cache"), shards(server, tmp_path / "other")
    assert ids_of(found, 0, 0, 0, 4).shape == (4,)
    found.let_go()
    assert np.array_equal(found.held_out(5), usual.held_out(5))
    with pytest.raises(LostDataError):
        for step in range(200):
            found.batch(ids_of(found, 0, 0, step, 8))


def test_to_stop_reads_no_data(tmp_path: Path) -> None:
    workload = Language(LanguageSettings(data=str(tmp_path / "none.txt")))
    workload.let_go()
    with pytest.raises(UserError, match="no such file"):
        _ = workload.data
