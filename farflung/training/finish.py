"""The end of a run: what came out of it, over all replicas."""

from __future__ import annotations

import json
from typing import Any

import torch

from farflung.config import Config
from farflung.files import write_text
from farflung.networks import Traffic
from farflung.outer.fragments import split
from farflung.training import checkpoint
from farflung.training.gather import among_the_living, gather
from farflung.training.trainer import Trainer

PATIENCE = 10
"""The end waits this many times the deadline: replicas that never met may be far apart in time."""

PROMPT_TOKENS = 16
SAMPLE_TOKENS = 256


def finish(trainer: Trainer, writes: bool) -> dict[str, Any]:
    """Averages the replicas' weights once, evaluates them, and returns the run's summary.

    Leaves the averaged weights in the trainer's model. With `writes`, the summary and the averaged weights go to
    the run folder.
    """
    config, network = trainer.config, trainer.network
    deadline = PATIENCE * config.deadline
    traffic = Traffic(**vars(network.traffic))
    seconds = trainer.events.elapsed()
    own_loss = trainer.validation_loss()

    (weights,) = split(trainer.model, 1)
    own = weights.read()
    mean = among_the_living(
        network, lambda group: network.all_reduce(own.clone(), group, f"average at the end of {group}").wait(deadline)
    )
    deviation = float((own - mean).square().mean()) if own.numel() else 0.0
    weights.write(mean)
    facts = {
        "loss": own_loss,
        "deviation": deviation,
        "sent": traffic.bytes_sent,
        "blocked": traffic.seconds_blocked,
        "rounds": trainer.rounds,
        "seconds": seconds,
    }
    all_facts = gather(network, facts, "summary", deadline)
    checkpoint.prune(trainer.folder, trainer.rank, config.keep_checkpoints)
    summary = {
        "method": config.method,
        "replicas": config.replicas,
        "steps": trainer.step,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "tokens": trainer.step * config.tokens_per_step * config.replicas,
        "validation_loss": sum(f["loss"] for f in all_facts) / len(all_facts),
        "validation_loss_per_replica": [f["loss"] for f in all_facts],
        "validation_loss_averaged": trainer.validation_loss(),
        "bytes_sent": sum(f["sent"] for f in all_facts),
        "ddp_bytes": ddp_bytes(own.numel(), config),
        "rounds": max(f["rounds"] for f in all_facts),
        "seconds": max(f["seconds"] for f in all_facts),
        "seconds_blocked": sum(f["blocked"] for f in all_facts) / len(all_facts),
        "weight_spread": (sum(f["deviation"] for f in all_facts) / len(all_facts)) ** 0.5,
    }
    if writes:
        summary["sample"] = sample_text(trainer)
        checkpoint.write(checkpoint.average_of(trainer.folder), trainer.model.state_dict())
        write_text(trainer.folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


def ddp_bytes(parameters: int, config: Config) -> int:
    """What float32 gradients averaged every step would have cost, all replicas: 2 (N - 1) messages a step."""
    return 4 * parameters * 2 * (config.replicas - 1) * config.steps


@torch.no_grad()
def sample_text(trainer: Trainer) -> str:
    """How the trained model continues the beginning of a held-out sequence."""
    torch.manual_seed(trainer.config.seed)
    prompt = trainer.held_out[:1, :PROMPT_TOKENS].to(trainer.device)
    trainer.model.eval()
    tokens = trainer.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_length=min(SAMPLE_TOKENS, trainer.config.sequence_length),
        do_sample=True,
        temperature=0.7,
        pad_token_id=trainer.tokenizer.end,
    )
    return trainer.tokenizer.decode(tokens[0].tolist())
