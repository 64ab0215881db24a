"""What do rounds cost a Trainer of transformers in the steps between them?
Two processes train a small Llama with the callback and without, in turns; steps next to a round are left out. Compared
by processor time, since wall time on a machine that others use, too, differs by more than what is asked here; the
callback should leave 98 % of the speed. Takes a minute or two.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from bench.lib.store import Store
from bench.lib.table import Cell, Part, Table
from farflung import methods
from farflung.networks import TorchNetwork
from farflung.testing.hosts import LOOPBACK, torch_everywhere

WANTED = 0.98
"""The share of the speed without the callback that is to be left."""


@dataclass(frozen=True)
class Options:
    steps: int = 60
    """Inner steps of each training."""
    every: int = 20
    """Inner steps between rounds."""
    width: int = 192
    """Of the model's hidden states."""
    repeats: int = 2
    """Trainings with the callback, and as many without."""


SMOKE = Options(steps=6, every=3, width=32, repeats=1)


class Clock(TrainerCallback):  # type: ignore[misc]
    """Notes wall and processor seconds at the end of each step."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []

    def on_step_end(self, *given: Any, **named: Any) -> None:
        self.marks.append((time.perf_counter(), time.process_time()))


def train(network: TorchNetwork, options: Options, rounds: bool) -> tuple[float, float]:
    """The median wall and processor seconds of a step that is next to no round."""
    from farflung.integrations.transformers import Rounds

    torch.manual_seed(0)
    shape = {"hidden_size": options.width, "intermediate_size": 3 * options.width, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, num_hidden_layers=4, **shape))
    tokens = torch.randint(512, (256, 32), generator=torch.Generator().manual_seed(network.rank))
    clock = Clock()
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            out, max_steps=options.steps, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
            logging_strategy="no",
        )  # fmt: skip
        callbacks = [clock, *([Rounds(methods.noloco(every=options.every), network)] if rounds else [])]
        data = [{"input_ids": row, "labels": row} for row in tokens]
        Trainer(model, args, train_dataset=data, callbacks=callbacks).train()
    each = [
        (now[0] - before[0], now[1] - before[1])
        for step, (before, now) in enumerate(zip(clock.marks, clock.marks[1:], strict=False), start=2)
        if step > 2 and step % options.every > 1
    ]
    wall, processor = (median(column) for column in zip(*each, strict=True))
    return wall, processor


def process(options: Options) -> None:
    """Prints the seconds of each training of this process: with rounds and without, in turns."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    network = TorchNetwork.from_env(starting=60)
    from farflung.integrations.replicas import Seat

    Seat(network, 60).leave()  # also without the callback, each process trains alone
    seen = [(rounds, *train(network, options, rounds)) for _ in range(options.repeats) for rounds in (False, True)]
    print(json.dumps(seen))


def run(options: Options, store: Store) -> Iterator[Part]:
    arguments = ["-m", __name__, json.dumps(vars(options))]
    told = torch_everywhere([LOOPBACK] * 2, arguments, timeout_s=600)
    seen = [tuple(one) for text in told for one in json.loads(text.strip().splitlines()[-1])]

    def row(rounds: bool) -> tuple[Cell, ...]:
        wall, processor = (median(one[n] for one in seen if one[0] == rounds) for n in (1, 2))
        alone = median(one[2] for one in seen if not one[0])
        return "with" if rounds else "without", 1 / wall, 1000 * processor, alone / processor, WANTED

    columns = {"callback": "", "steps/s": ".1f", "processor ms a step": ".2f", "share": ".1%", "wanted": ".0%"}
    title = f"2 replicas, width {options.width}, every={options.every}, {options.repeats} trainings each, in turns"
    yield Table(columns, [row(False), row(True)], title)


if __name__ == "__main__":
    process(Options(**json.loads(sys.argv[1])))
