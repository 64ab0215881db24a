"""Causal language models on text."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farflung.errors import UserError
from farflung.lazy import Later
from farflung.workloads.settings import LanguageSettings
from farflung.workloads.text import documents

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from farflung.workloads import base, data, decoder, models, tokenizers
    from farflung.workloads import subspace as subspaces
    from farflung.workloads.base import Coordinates, Forward, Ids, Load, Reshape, Span
    from farflung.workloads.data import Data
else:
    torch, subspaces = Later("torch"), Later("farflung.workloads.subspace")
    base, data, decoder, models, tokenizers = (
        Later(f"farflung.workloads.{name}") for name in ("base", "data", "decoder", "models", "tokenizers")
    )

PROMPT_TOKENS = 16
SAMPLE_TOKENS = 256

TEMPERATURE = 0.7
"""Of the sample that a trained model writes."""


class Language:
    """A causal language model on sequences of tokens. A workload that can be divided: see Workload and Divisible."""

    Settings = LanguageSettings
    units = "tokens"
    measure = "nats a token"

    def __init__(self, settings: LanguageSettings, shares: int = 1) -> None:
        self.settings = settings
        self._shares = shares

    @property
    def divisible(self) -> Language:
        """See Workload."""
        return self

    @property
    def units_per_sample(self) -> int:
        """See Workload."""
        return self.settings.sequence_length

    @cached_property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """Makes tokens of text. Raises UserError."""
        return models.tokenizer_of(self.settings)

    @cached_property
    def config(self) -> Any:
        """The model's transformers configuration. Raises UserError."""
        return models.model_config(self.settings, self.tokenizer)

    @cached_property
    def data(self) -> Data:
        """The tokens. Raises UserError."""
        return data.load(self.settings, self.tokenizer, self._shares)

    @cached_property
    def _held_out(self) -> Tensor:
        return self.data.held_out(self.settings.eval_sequences)

    @cached_property
    def bytes_per_unit(self) -> float:
        """The bytes of held-out text that a token stands for, on average."""
        tokens = self._held_out.flatten().tolist()
        return self.tokenizer.count_bytes(tokens) / len(tokens)

    def check(self) -> None:
        """See Workload."""
        _ = self.config
        if not any(documents(self.settings.data, self.settings.text_column)):
            raise data.no_text(self.settings.data)

    def outline(self) -> Any:
        """See Workload."""
        return models.outline(self.config)

    def build(self, seed: int, reshape: Reshape | None = None) -> Any:
        """See Workload."""
        model = models.build(self.settings, self.tokenizer, seed, reshape)
        if reshape is None:
            models.check_causal(model)
        return model

    def sample_ids(self, seed: int, replica: int, step: int, size: int) -> Ids:
        """See Workload."""
        return base.drawn_ids(seed, replica, step, size, self.data.available, self._shares)

    def batch(self, ids: Ids) -> Tensor:
        """Sequences (n, length) int64."""
        return self.data.batch(ids)

    def loss(self, model: Any, batch: Tensor) -> Tensor:
        """See Workload."""
        return models.sequence_loss(model, batch)

    def evaluate(self, model: Any, size: int, device: torch.device) -> float:
        """The mean cross-entropy, in nats a token, of the sequences held out."""
        parts = torch.split(self._held_out, size)
        losses = [float(models.sequence_loss(model, part.to(device))) * len(part) for part in parts]
        return sum(losses) / len(self._held_out)

    def digest(self) -> str:
        """See Workload."""
        return hashlib.sha256(self._held_out.numpy().tobytes()).hexdigest()

    def sample(self, model: Any, seed: int, device: torch.device) -> str:
        """How a model continues the beginning of a sequence held out."""
        torch.manual_seed(seed)
        prompt = self._prompt().to(device)
        with models.without_remarks():
            tokens = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_length=self._sample_length,
                do_sample=True,
                temperature=TEMPERATURE,
                pad_token_id=self.tokenizer.end,
            )
        return self.tokenizer.decode(tokens[0].tolist())

    def export(self, weights: Mapping[str, Tensor], target: Path, seed: int, constrained_to: int = 0) -> None:
        """A folder that AutoModelForCausalLM loads, with the tokenizer in it."""
        from transformers import AutoModelForCausalLM

        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        with models.without_remarks():
            model = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32)
            if constrained_to:
                subspace = subspaces.subspace_of(model.config, constrained_to, seed)
                shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
                weights = {name: subspace.plain(name, weight, shapes[name]) for name, weight in weights.items()}
            absent = set(model.load_state_dict(weights, strict=False).missing_keys)
            assert absent <= set(model.all_tied_weights_keys), f"no weights for {absent}"
            model.save_pretrained(target)
            self.tokenizer.save(str(target))

    @property
    def held_out(self) -> int:
        """See Divisible."""
        return len(self._held_out)

    def held_out_batch(self, ids: Ids) -> Tensor:
        """See Divisible."""
        return self._held_out[torch.from_numpy(ids)]

    def loads(self, model: Any) -> tuple[list[Load], Load, Load]:
        """See Divisible."""
        return decoder.loads(model)

    def layers(self, model: Any) -> nn.ModuleList:
        """See Divisible."""
        parts = decoder.anatomy(model)
        layers: nn.ModuleList = parts[parts.layers]
        return layers

    def tied_weight(self, model: Any) -> nn.Parameter | None:
        """See Divisible."""
        return model.get_input_embeddings().weight if decoder.is_tied(self) else None

    def subspace(self, rank: int, seed: int) -> subspaces.Subspace:
        """See Divisible."""
        if self.settings.pretrained:
            raise UserError("boundary subspace: published weights do not lie in one; remove pretrained")
        return subspaces.subspace_of(self.config, rank, seed)

    def keep(self, model: Any, span: Span, subspace: Coordinates | None = None, constrained: int = 0) -> None:
        """See Divisible."""
        if subspace:
            assert isinstance(subspace, subspaces.Subspace)
            subspaces.constrain(model, self.layers(model), subspace, constrained)
        decoder.keep(model, span)

    def check_division(self, spans: list[Span], subspace: Coordinates | None, seed: int) -> None:
        """See Divisible. Tries the first constrained layer; the others are made alike."""
        decoder.check_passes_on(self.config)
        if subspace:
            assert isinstance(subspace, subspaces.Subspace)
            model = self.outline()
            self.keep(model, base.Span(0, 1, first=True, last=False), subspace, spans[-1].begin)
            models.materialise(model, seed)
            subspaces.check_constrained(model.get_decoder(), self.layers(model), subspace, up_to=1)

    def piece(self, model: Any, span: Span, half: bool) -> decoder.Piece:
        """See Divisible."""
        return decoder.Piece(model, span, half)

    def example(self, samples: int) -> Tensor:
        """See Divisible."""
        return torch.empty(samples, self.settings.sequence_length, dtype=torch.int64, device="meta")

    def shapes(self, model: Any, batch: Tensor) -> tuple[torch.Size, torch.Size]:
        """See Divisible."""
        config = model.config
        return torch.Size((*batch.shape, config.hidden_size)), torch.Size((*batch.shape, config.vocab_size))

    def sample_in_pieces(self, forward: Forward, seed: int) -> str:
        """See Divisible. Each new token takes a pass through all stages."""
        prompt = self._prompt()
        tokens, begun = prompt[0].tolist(), prompt.shape[1]
        generator = torch.Generator().manual_seed(seed)
        while len(tokens) < self._sample_length and (len(tokens) == begun or tokens[-1] != self.tokenizer.end):
            scores = forward(torch.tensor([tokens]), lambda logits: logits[0, -1], self.config.vocab_size)
            chances = torch.softmax(scores / TEMPERATURE, dim=0)
            tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
        return self.tokenizer.decode(tokens)

    @property
    def _sample_length(self) -> int:
        return min(SAMPLE_TOKENS, self.settings.sequence_length)

    def _prompt(self) -> Tensor:
        return self._held_out[:1, : min(PROMPT_TOKENS, self._sample_length // 2)]
