"""What does it cost to make tokens of much text, and to train on it then?
The text is this Python's standard library, repeated and shuffled by line, in files of 8 MB. Preparing it is timed
beside the tokenizer alone on the same text, in this process, on all cores. Then processes start that train on it:
seconds until the first has its batch, and the memory of its own that it needs beside what one with little text needs.
Takes a quarter of an hour for 2 GB.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.lib.store import Store
from bench.lib.table import Cell, Part, Table
from farflung.workloads import prepared, text, tokenizers
from farflung.workloads.settings import LanguageSettings

FILE = 8 << 20
"""Bytes of a file of text."""
WANTED = 0.8

BEGIN = """
import json, sys, time
from pathlib import Path
from farflung.workloads.language import Language
from farflung.workloads.settings import LanguageSettings
workload = Language(LanguageSettings(data=sys.argv[1], tokenizer=sys.argv[2]))
workload.tokenizer
began = time.monotonic()
for step in range(100):
    workload.batch(workload.sample_ids(0, 0, step, 32))
    if not step:
        first = time.monotonic() - began
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(json.dumps([first, int(status["RssAnon"].split()[0]) / 1000]))
"""


@dataclass(frozen=True)
class Options:
    megabytes: int = 2000
    """Of text."""


SMOKE = Options(megabytes=2)


def written(folder: Path, megabytes: int) -> Path:
    """A folder of text files."""
    lines = [line for document in text.documents("stdlib", "") for line in document.splitlines(keepends=True)]
    draw = random.Random(0)
    folder.mkdir()
    for number in range(max(1, (megabytes << 20) // FILE)):
        draw.shuffle(lines)
        content, size = [], 0
        for line in lines:
            content.append(line)
            if (size := size + len(line)) >= min(FILE, megabytes << 20):
                break
        (folder / f"{number}.txt").write_text("".join(content))
    return folder


def pieces(folder: Path) -> str:
    """A byte-pair tokenizer of 8,192 tokens, trained on a part of the standard library."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    sample = (document for number, document in enumerate(text.documents("stdlib", "")) if not number % 10)
    made.train_from_iterator(
        sample, trainers.BpeTrainer(vocab_size=8192, special_tokens=["<end>"], show_progress=False)
    )
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>").save_pretrained(folder)
    return str(folder)


def alone(data: Path, tokenizer: tokenizers.Tokenizer) -> float:
    """Seconds that the tokenizer takes for the text, a file at a time; reading is not counted."""
    taken = 0.0
    for document in text.documents(str(data), ""):
        began = time.monotonic()
        for _ in tokenizer.encode_all([document]):
            pass
        taken += time.monotonic() - began
    return taken


def begun(data: Path, tokenizer: str) -> list[float]:
    """Of a process that draws batches: seconds until the first, and megabytes of memory that are its own."""
    command = [sys.executable, "-c", BEGIN, str(data), tokenizer]
    result: list[float] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return result


def run(options: Options, store: Store) -> Iterator[Part]:
    def rows() -> Iterator[list[Cell]]:
        for name in ("bytes", pieces(folder / "pieces")):
            tokenizer = tokenizers.load(name)
            began = time.monotonic()
            made = prepared.store_of(LanguageSettings(data=str(data)), tokenizer).manifest
            taken = time.monotonic() - began
            limit = alone(data, tokenizer)
            begun(little, name)  # makes its store
            (first, own), (first_of_little, own_of_little) = begun(data, name), begun(little, name)
            tokens = (made.training + made.held_out) / 1e6
            kind = "bytes" if name == "bytes" else "pieces"
            yield [kind, tokens, taken, limit, limit / taken, first, first_of_little, own - own_of_little]

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        os.environ[prepared.CACHE] = str(folder / "cache")
        data, little = written(folder / "much", options.megabytes), written(folder / "little", 1)
        columns = {"tokenizer": "", "M tokens": ",.0f", "prepared s": ".1f", "tokenizer alone s": ".1f", "share": ".0%"}
        columns |= {"first batch s": ".2f", "of little text": ".2f", "own memory MB more": ".1f"}
        title = f"{options.megabytes:,} MB of text, {os.cpu_count()} cores; wanted: a share of {WANTED:.0%}"
        yield Table(columns, rows(), f"{title} where tokens are not bytes")
