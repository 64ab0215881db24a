"""How a language model continues what it is given: the text that a run's sample is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from farflung.workloads import chats, models
from farflung.workloads.base import Forward
from farflung.workloads.chats import Labelled

PROMPT_TOKENS, SAMPLE_TOKENS = 16, 256
"""Tokens that are given, and those in all; of a chat, SAMPLE_TOKENS come after the prompt."""
SAMPLE_S = 60.0
"""Seconds after which a whole model ends where it is."""
TEMPERATURE = 0.7


@dataclass(frozen=True)
class Continuation:
    """A prompt, and how far it is continued.

    Args:
        prompt: (1, tokens).
        length: the most tokens, with those of the prompt.
        end: the token that ends it before.
    """

    prompt: Tensor
    length: int
    end: int

    @classmethod
    def of(cls, held_out: Tensor | Labelled, answers: bool, most: int, end: int) -> Continuation:
        """Of the beginning of a sequence held out; of a chat, where it `answers`, of all before its first answer."""
        tokens, labels = chats.labelled(held_out)
        if answers:
            prompt = tokens[:1, : int((labels[0, 1:] != chats.IGNORED).nonzero()[0]) + 1]
            return cls(prompt, min(prompt.shape[1] + SAMPLE_TOKENS, most), end)
        length = min(SAMPLE_TOKENS, most)
        return cls(tokens[:1, : min(PROMPT_TOKENS, length // 2)], length, end)

    def by(self, model: Any, seed: int, device: torch.device) -> list[int]:
        """All tokens, as a whole model continues them."""
        torch.manual_seed(seed)
        prompt = self.prompt.to(device)
        with models.without_remarks():
            made: Sequence[Tensor] = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_length=self.length,
                max_time=SAMPLE_S,
                do_sample=True,
                temperature=TEMPERATURE,
                pad_token_id=self.end,
            )
        return made[0].tolist()

    def in_pieces(self, forward: Forward, values: int, seed: int) -> list[int]:
        """All tokens, as a divided model continues them: each new one, of so many, takes a pass through all stages."""
        tokens, begun = self.prompt[0].tolist(), self.prompt.shape[1]
        generator = torch.Generator().manual_seed(seed)
        while len(tokens) < self.length and (len(tokens) == begun or tokens[-1] != self.end):
            scores = forward(torch.tensor([tokens]), lambda logits: logits[0, -1], values)
            chances = torch.softmax(scores / TEMPERATURE, dim=0)
            tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
        return tokens
