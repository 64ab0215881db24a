"""A mixture of causal language models: routers choose by a text's begin who continues it. It needs transformers alone.

This file lies in each folder that farflung exports a mixture to; `trust_remote_code=True` runs it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


def log_likelihoods(model: Any, tokens: Tensor, known: Tensor, start: int) -> Tensor:
    """The log-likelihood of texts under a causal model, each read from the token `start` on: (n,) float32, in nats.

    Args:
        tokens: (n, m) int64.
        known: (n, m) bool: which of them count; behind the last one, anything may stand.
    """
    before = torch.cat([tokens.new_full((len(tokens), 1), start), tokens[:, :-1]], dim=1)
    logits = model(input_ids=before, use_cache=False).logits.float()
    each = -nn.functional.cross_entropy(logits.transpose(1, 2), tokens, reduction="none")
    return (each * known).sum(dim=1)


def prefixes(tokens: Tensor, mask: Tensor | None, most: int) -> tuple[Tensor, Tensor]:
    """Up to `most` first tokens of texts that are padded on either side: (n, m) tokens, and (n, m) which there are."""
    if mask is None:
        mask = torch.ones_like(tokens)
    first = mask.bool().int().sort(dim=1, descending=True, stable=True)
    return tokens.gather(1, first.indices)[:, :most], first.values[:, :most].bool()


class MixtureConfig(PreTrainedConfig):  # type: ignore[misc]
    """The configurations of experts and routers, in pairs.

    Args:
        experts: each expert's configuration, as a dictionary.
        routers: those of the routers.
        numbers: what the experts were called when the text was split; some may be missing.
        prefix_length: tokens that the routers read.
        start: the token that stands before a text when routers read it.
    """

    model_type = "farflung_mixture"

    def __init__(
        self,
        experts: list[dict[str, Any]] | None = None,
        routers: list[dict[str, Any]] | None = None,
        numbers: list[int] | None = None,
        prefix_length: int = 32,
        start: int = 0,
        **more: Any,
    ) -> None:
        self.experts, self.routers, self.numbers = experts or [], routers or [], numbers or []
        self.prefix_length, self.start = prefix_length, start
        super().__init__(**more)


def _of_dictionary(table: dict[str, Any]) -> Any:
    # In the dtype that the mixture is loaded in, and not the one that its part was saved in.
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**table), dtype=torch.get_default_dtype())


class MixtureForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """Experts and their routers. A text is the work of one expert: that whose router finds its begin most likely."""

    config_class = MixtureConfig
    _supports_sdpa = True

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config)
        # As children of their own and in no list: transformers asks a model's children which weights are tied.
        for place, tables in enumerate(zip(config.experts, config.routers, strict=True)):
            self.put(place, *map(_of_dictionary, tables))
        self.post_init()

    def put(self, place: int, expert: nn.Module, router: nn.Module) -> None:
        """Puts an expert and its router at their place, from 0."""
        self.add_module(f"expert_{place}", expert)
        self.add_module(f"router_{place}", router)

    @property
    def experts(self) -> list[Any]:
        """The experts, in order."""
        return [getattr(self, f"expert_{place}") for place in range(len(self.config.experts))]

    @property
    def routers(self) -> list[Any]:
        """Their routers, in order."""
        return [getattr(self, f"router_{place}") for place in range(len(self.config.routers))]

    @torch.no_grad()
    def route(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Which of `experts` takes each text (n, m): (n,) int64."""
        tokens, known = prefixes(input_ids, attention_mask, self.config.prefix_length)
        scores = [log_likelihoods(router, tokens, known, self.config.start) for router in self.routers]
        return torch.stack(scores).argmax(dim=0)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        **more: Any,
    ) -> CausalLMOutput:
        """Logits (n, m, tokens) of each text by its own expert; with `labels`, the mean cross-entropy, too.

        A token that an expert does not have, where others have more, gets -inf.
        """
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        logits: Tensor | None = None
        for expert, rows in self._groups(input_ids, attention_mask):
            of_rows = {name: tensor[rows] for name, tensor in given.items() if tensor is not None}
            own = expert(**of_rows, use_cache=False).logits
            if logits is None:
                logits = own.new_full((*input_ids.shape, self.config.vocab_size), -torch.inf)
            logits[rows, :, : own.shape[-1]] = own
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)

    @torch.no_grad()
    def generate(self, inputs: Tensor | None = None, attention_mask: Tensor | None = None, **more: Any) -> Any:
        """How each text goes on, by its own expert: (n · num_return_sequences, longest) int64, padded at the end.

        Takes all that transformers' `generate` does. Texts of several experts come back as tokens alone. What is not
        given is as in the mixture's own `generation_config`.
        """
        texts = more.pop("input_ids", None) if inputs is None else inputs
        if texts is None or not texts.numel():
            raise ValueError("a mixture goes on with a text, and is given none; give input_ids")
        mask = torch.ones_like(texts) if attention_mask is None else attention_mask
        # What is given becomes a part of the settings: transformers no longer wants settings and single ones together.
        settings = copy.deepcopy(more.pop("generation_config", None) or self.generation_config)
        more = {**settings.update(**more), "generation_config": settings}
        made = [
            (rows, expert.generate(texts[rows], attention_mask=mask[rows], **more))
            for expert, rows in self._groups(texts, mask)
        ]
        if len(made) == 1:
            return made[0][1]
        if not all(isinstance(tokens, Tensor) for _, tokens in made):
            raise ValueError("texts of several experts have no common output but tokens; give one text at a time")
        padding = self.config.start if settings.pad_token_id is None else settings.pad_token_id
        return self._in_order(made, len(texts), padding)

    def _in_order(self, made: list[tuple[Tensor, Tensor]], count: int, padding: int) -> Tensor:
        each = len(made[0][1]) // len(made[0][0])
        longest = max(tokens.shape[1] for _, tokens in made)
        found = made[0][1].new_full((count, each, longest), padding)
        for rows, tokens in made:
            found[rows, :, : tokens.shape[1]] = tokens.unflatten(0, (-1, each))
        return found.flatten(0, 1)

    def _groups(self, tokens: Tensor, mask: Tensor | None) -> list[tuple[Any, Tensor]]:
        """The experts that have some of these texts, and the numbers of the texts."""
        chosen = self.route(tokens, mask)
        return [(self.experts[number], (chosen == number).nonzero()[:, 0]) for number in chosen.unique().tolist()]
