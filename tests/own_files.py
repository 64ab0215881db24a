"""What readers of a page have of their own: pictures, logs, texts, a graph, a model, a run. Each maker fills a path."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from processes import SMALL, farflung

TEXTS = [f"document {i}: " + "the quick brown fox jumps over the lazy dog. " * (i % 5 + 1) for i in range(60)]
SOURCES = Path(json.__file__).parent
"""A package of the standard library, for code."""


def write_graph(folder: Path, nodes: int = 120, kinds: int = 3, **changed: Any) -> Path:
    """A graph whose edges mostly join two nodes of a kind, and whose features tell a little of it."""
    rng = np.random.default_rng(0)
    labels = np.arange(nodes) % kinds
    features = rng.normal(size=(nodes, 5)).astype(np.float32)
    features[np.arange(nodes), labels] += 1
    pairs = rng.integers(nodes, size=(1500, 2))
    edges = pairs[(labels[pairs[:, 0]] == labels[pairs[:, 1]]) | (rng.random(1500) < 0.1)]
    folder.mkdir(exist_ok=True)
    for name, array in {"edges": edges, "features": features, "labels": labels, **changed}.items():
        if array is not None:
            np.save(folder / f"{name}.npy", array)
    return folder


def criteo_line(click: int, **over: str) -> str:
    """A line as Criteo's: a label, 13 numbers, 26 categories; some fields are empty."""
    fields = {"label": str(click % 3 // 2)}
    fields |= {f"I{n}": str(click * n) if n < 13 else "" for n in range(1, 14)}
    fields |= {f"C{n}": f"{click % (n + 1):08x}" if n < 26 else "" for n in range(1, 27)}
    return "\t".join({**fields, **over}.values())


def write_log(path: Path, lines: Sequence[str]) -> Path:
    """A click log as text, packed if its name says so."""
    text = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.name.endswith(".gz") else text)
    return path


def write_tokenizer(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "<end>"]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>").save_pretrained(folder)
    return folder


def write_model(folder: Path) -> Path:
    """A saved model with its tokenizer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    write_tokenizer(folder)
    GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2, n_positions=64)).save_pretrained(folder)
    return folder


def write_pictures(folder: Path, classes: int = 3, each: int = 60, side: int = 8) -> Path:
    """Red, green and blue pictures of noise, each colour a class."""
    from PIL import Image

    random = np.random.default_rng(2)  # one by which some of each are held out
    for label in range(classes):
        (folder / str(label)).mkdir(parents=True)
        for number in range(each):
            pixels = random.integers(0, 90, (side, side, 3), np.uint8)
            pixels[..., label] += 160
            Image.fromarray(pixels).save(folder / str(label) / f"{number}.png")
    return folder


def write_parquet(path: Path, columns: dict[str, Any]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path)
    return path


def _texts(folder: Path) -> None:
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text)
    write_parquet(folder / "more.parquet", {"content": TEXTS})


def _days(folder: Path) -> None:
    folder.mkdir()
    for day in range(2):
        write_log(folder / f"{day}.tsv.gz", [criteo_line(click) for click in range(day, 1000, 2)])


def _run(folder: Path, method: str = "noloco") -> None:
    brief = ("--method", method, "--replicas", "2", "--every", "5", "--steps", "20")
    done = farflung("train", *SMALL, *brief, "--out", folder)
    assert done.returncode == 0, done.stderr


MINE = """
import farflung
import torch

sizes = [30, 20]
batches = [(torch.randn(8, 3), torch.randint(20, (8, 2)), torch.rand(8).round()) for _ in range(4)]


class Layers(torch.nn.Linear):
    def forward(self, numbers, pooled):
        return super().forward(torch.cat([numbers, pooled.flatten(1)], dim=1)).squeeze(1)


layers, loss_of = Layers(3 + 2 * 16, 1), torch.nn.functional.binary_cross_entropy_with_logits

network = farflung.from_env()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train_a_step():
    optimizer.zero_grad()
    model(torch.ones(2)).backward()
    optimizer.step()
"""
"""A recommender's parts, and those of a loop of one's own."""

MAKERS: dict[str, Callable[[Path], Any]] = {
    "code": lambda folder: shutil.copytree(SOURCES, folder, ignore=shutil.ignore_patterns("__pycache__")),
    "days": _days,
    "letters": _texts,
    "MODEL": write_model,
    "mygraph": write_graph,
    "pictures": write_pictures,
    "mine.py": lambda path: path.write_text(MINE),
    "runs/diloco-1": lambda folder: _run(folder, "diloco"),
    "runs/first": _run,
    "runs/noloco-1": _run,
    "stories.parquet": lambda path: write_parquet(path, {"text": TEXTS}),
    "texts": _texts,
}
"""Who makes what, by its name in the folder of a page's blocks."""
