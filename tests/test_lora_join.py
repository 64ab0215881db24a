"""Who joins a run of adapters brings the base that they are for: a ticket, and real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from patience import patience, until
from swarm import Swarm

pytestmark = pytest.mark.slow


def base(folder: Path, seed: int, width: int) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256, bos_token_id=0, eos_token_id=0)).save_pretrained(folder)
    return folder


def test_another_base_is_refused_in_one_line_and_a_copy_elsewhere_is_taken(swarm: Swarm, tmp_path: Path) -> None:
    """Other weights of the same shapes, which nothing else would notice, and other shapes."""
    models = tmp_path / "models"
    ours, copy = (base(models / name, 0, 16) for name in ("ours", "copy"))
    others = {"weights": base(models / "weights", 1, 16), "shapes": base(models / "shapes", 0, 32)}
    run = ("--pretrained", "--lora", 2, "--sequence-length", 32, "--every", 5, "--batch-size", 2, "--eval-sequences", 2)
    ticket = ("--ticket", "run.ticket", "--port", swarm.port, "--max-tokens", 100_000, "--deadline", patience(15))
    swarm.start("invite", "--name", "test", "--model", ours, *run, *ticket, log="first")
    until(lambda: "the ticket is in" in swarm.said("first"))
    joining = {name: swarm.join(name, "--model", folder) for name, folder in others.items()}
    for name, process in joining.items():
        assert process.wait(patience(60)) == 2, swarm.said(name)
        begun, joined, refused = swarm.said(name).splitlines()
        assert "run folder" in begun and "joined a run with 0 peers in training" in joined
        assert "its weights are not those that the run's adapters are for" in refused
        assert not (tmp_path / name / "events").exists()
    swarm.join("same", "--model", copy)
    until(lambda: swarm.step("same") > 0)
