"""Is an adapter that replicas train together better than the one that each would train alone?
Pre-trains a small Llama on generated text, and then trains LoRA adapters on other text of which each replica has a
share of its own: with `farflung train --lora` and in TRL's SFTTrainer with the callback, and with each of both alone. A
round should send four bytes for each value of the adapter. Takes about ten minutes on two cores.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch

from bench.lib.store import Result, Settings, Store
from bench.lib.table import Cell, Part, Table
from bench.lib.training import simulate
from farflung import methods
from farflung.events import EvaluationEvent, RoundEvent
from farflung.networks import TorchNetwork
from farflung.testing.hosts import LOOPBACK, torch_everywhere
from farflung.training.export import export
from farflung.workloads import Language
from farflung.workloads.settings import LanguageSettings

SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]
ALONE, TOGETHER, TRL_ALONE, TRL = "each replica alone", "train --lora", "SFTTrainer, each replica alone", "SFTTrainer"
SHARED: Settings = {
    "batch_size": 8,
    "sequence_length": 64,
    "eval_sequences": 64,
    "inner": "adamw",
    "lr": 3e-3,
    "tokenizer": "bytes",
}
"""Of all runs."""

FOLLOWERS = 4
"""How many words may follow a word."""


@dataclass(frozen=True)
class Options:
    steps: int = 100
    """Inner steps of each replica."""
    every: int = 10
    """Inner steps between rounds."""
    replicas: int = 4
    """Copies of the model."""
    rank: int = 8
    """Of the adapters."""
    pretraining: int = 300
    """Steps that the base is trained, by one replica."""
    texts: int = 1200
    """Documents to fine-tune on, of all replicas together; each has about a hundred bytes."""
    model: str = "tiny"
    """A preset of farflung."""
    seeds: tuple[int, ...] = (0,)
    """One run of each row for each."""


SMOKE = Options(steps=4, every=2, replicas=2, pretraining=2, texts=60, model="micro")


def write_texts(path: Path, count: int, seed: int) -> str:
    """Documents in which each word has a few that may follow it: half of these are the same for all seeds."""
    own, common = random.Random(seed), random.Random("common")
    words = ["".join(common.choices(SYLLABLES, k=2)) for _ in range(200)]
    after = [common.choices(words, k=FOLLOWERS // 2) + own.choices(words, k=FOLLOWERS // 2) for _ in words]
    follow = dict(zip(words, after, strict=True))
    lines = []
    for _ in range(count):
        text = [own.choice(words)]
        while len(text) < 20:
            text.append(own.choice(follow[text[-1]]))
        lines.append(json.dumps({"text": " ".join(text)}) + "\n")
    path.write_text("".join(lines))
    return str(path)


def prepared(options: Options, folder: Path) -> Settings:
    """The base and the texts to fine-tune on, as settings; makes them where they are not there yet."""
    base = folder / f"base-{options.model}-{options.pretraining}-{options.texts}"
    if not base.exists():
        before = {"data": write_texts(folder / "before.jsonl", 4 * options.texts, seed=1), "method": "local"}
        plan = {"model": options.model, "replicas": 1, "steps": options.pretraining, "checkpoint_every": 0}
        simulate(folder / "pretraining", **SHARED, **before, **plan)
        export(folder / "pretraining", base)
    data = write_texts(folder / "after.jsonl", options.texts, seed=2)
    return {**SHARED, "model": str(base), "pretrained": True, "lora": options.rank, "data": data}


def replicas_run(options: Options, settings: Settings, seed: int) -> Result:
    """What each replica reaches, and the bytes of its adapter's values and of a round."""
    with tempfile.TemporaryDirectory() as scratch:
        plan = {"replicas": options.replicas, "steps": options.steps, "checkpoint_every": 0, "shares": "apart"}
        end = {"eval_every": options.steps, "log_every": options.steps, "seed": seed}
        run = simulate(Path(scratch) / "run", **settings, **plan, **end).run
        assert run.summary
        ends = [run.of(replica, EvaluationEvent)[-1].score for replica in range(options.replicas)]
        rounds = [event.bytes_sent for event in run.of(0, RoundEvent)]
        return {"losses": ends, "values": run.summary["parameters"], "bytes": median(rounds) if rounds else None}


def trl_run(options: Options, settings: Settings, seed: int, rounds: bool) -> Result:
    """The same of SFTTrainer, on the same sequences, in a process for each replica."""
    given = {"options": vars(options), "settings": settings, "seed": seed, "rounds": rounds}
    told = torch_everywhere([LOOPBACK] * options.replicas, ["-m", __name__, json.dumps(given)], timeout_s=900)
    each: list[Result] = [json.loads(text.strip().splitlines()[-1]) for text in told]
    return {**each[0], "losses": [one["loss"] for one in each]}


def process(options: Options, settings: Settings, seed: int, rounds: bool) -> None:
    """One replica in SFTTrainer, with rounds or alone on the same share; prints what it has reached."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    from farflung.integrations.replicas import Seat
    from farflung.integrations.transformers import Rounds

    logging.getLogger("transformers").setLevel(logging.ERROR)
    network, sizes = TorchNetwork.from_env(starting=300), list[int]()
    known = vars(LanguageSettings())
    workload = Language(LanguageSettings(**{name: value for name, value in settings.items() if name in known}))
    data = Dataset.from_dict({"input_ids": workload.batch(np.arange(workload.available or 0)).tolist()})
    noted: Any = {"deadline_s": 300, "starting_s": 300, "on_round": lambda ended: sizes.append(ended.bytes_sent)}
    if rounds:
        callbacks = [Rounds(methods.noloco(every=options.every), network, **noted)]
    else:
        seat = Seat(network, 300)  # so that the processes train alone, too
        data, callbacks = seat.share(data), []
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as out:
        trainer = SFTTrainer(
            model=LlamaForCausalLM.from_pretrained(settings["model"]),
            args=SFTConfig(
                out, max_steps=options.steps, per_device_train_batch_size=settings["batch_size"], seed=seed,
                learning_rate=settings["lr"], lr_scheduler_type="cosine", max_length=settings["sequence_length"],
                report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True,
                bf16=False,
            ),
            train_dataset=data,
            processing_class=AutoTokenizer.from_pretrained(settings["model"]),
            peft_config=LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear"),
            callbacks=callbacks,
        )  # fmt: skip
        trainer.train()
    model = trainer.model.get_base_model().eval()
    with torch.no_grad():
        loss = workload.evaluate(model, settings["batch_size"], torch.device("cpu")).value
    values = sum(one.numel() for one in model.parameters() if one.requires_grad)
    print(json.dumps({"loss": loss, "values": values, "bytes": median(sizes) if sizes else None}))


def run(options: Options, store: Store) -> Iterator[Part]:
    wanted = SHARED | {"pretrained": True, "lora": options.rank} | vars(options)
    del wanted["seeds"]

    def made(way: str, seed: int) -> Result:
        settings = prepared(options, store.scratch)
        if way in (TRL, TRL_ALONE):
            return trl_run(options, settings, seed, rounds=way == TRL)
        rounds = {"method": "local"} if way == ALONE else {"method": "noloco", "every": options.every}
        return replicas_run(options, settings | rounds, seed)

    def row(way: str) -> tuple[Cell, ...]:
        found = [store.once(wanted | {"way": way}, seed, partial(made, way, seed)) for seed in options.seeds]
        losses = [loss for one in found for loss in one["losses"]]
        return way, mean(losses), min(losses), max(losses), found[0]["bytes"], 4 * found[0]["values"]

    columns = {"": "", "loss": ".4f", "best": ".4f", "worst": ".4f", "bytes a round": ",.0f", "4 x adapter": ",.0f"}
    title = (
        f"{options.replicas} replicas, rank {options.rank}, {options.steps} steps, every={options.every}, "
        f"{options.model} pre-trained for {options.pretraining} steps; loss held out, in nats a byte"
    )
    yield Table(columns, map(row, (ALONE, TOGETHER, TRL_ALONE, TRL)), title)


if __name__ == "__main__":
    words: dict[str, Any] = json.loads(sys.argv[1])
    process(Options(**words["options"]), words["settings"], words["seed"], words["rounds"])
