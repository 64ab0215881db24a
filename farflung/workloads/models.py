"""Language models of transformers: presets, and whatever AutoConfig loads."""

from __future__ import annotations

import contextlib
import copy
import difflib
import logging
import zlib
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from farflung.errors import UserError
from farflung.scoped import quiet
from farflung.workloads.base import Reshape
from farflung.workloads.packing import positions_given
from farflung.workloads.settings import LanguageSettings
from farflung.workloads.tokenizers import Bytes, Pretrained, Tokenizer, comes_with, load, reason

PRESETS: dict[str, dict[str, int]] = {
    "micro": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 176},
    "tiny": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 352},
    "small": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1024},
    # The three of the NoLoCo paper (arXiv 2506.10911).
    "llama-125m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2048},
    "llama-1.3b": {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 5504},
    "llama-6.8b": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008},
}


def build(settings: LanguageSettings, tokenizer: Tokenizer, seed: int, reshape: Reshape | None = None) -> Any:
    """The causal language model that the settings name, on the CPU, from a seed or with its own weights.

    What `reshape` takes out of the model, which has no memory yet, is never made or read. Random weights depend only on
    the seed and their module's name. Raises UserError.
    """
    config = model_config(settings, tokenizer)
    reshape = reshape or (lambda model: None)
    try:
        model = outline(config)
        if settings.pretrained:
            return _pretrained(type(model), settings.model, reshape)
        reshape(model)
    except (OSError, ValueError) as error:
        raise _cannot_load(settings.model, error) from error
    materialise(model, seed)
    return model


@contextlib.contextmanager
def without_remarks() -> Iterator[None]:
    """Keeps transformers from remarks and progress bars meanwhile, which would stand around farflung's own lines."""
    from transformers.utils import logging as remarks

    bars = remarks.is_progress_bar_enabled()
    remarks.disable_progress_bar()
    try:
        with quiet("transformers", logging.ERROR):
            yield
    finally:
        if bars:
            remarks.enable_progress_bar()


def outline(config: Any) -> Any:
    """The model of a transformers configuration, without memory for its weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"), without_remarks():
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)


@torch.no_grad()
def materialise(model: Any, seed: int) -> None:
    """Gives a model without memory random weights, each module's from the seed and its name.

    A module's own `initialise` comes before that of transformers. Raises UserError where a weight has neither.
    """
    model.to_empty(device="cpu")
    model.tie_weights()
    tensors = chain(model.named_parameters(), model.named_buffers())
    numbers = {name: tensor for name, tensor in tensors if tensor.is_floating_point()}
    for tensor in numbers.values():
        tensor.fill_(float("nan"))
    with torch.random.fork_rng(devices=[]):
        for name, module in reversed(list(model.named_modules())):  # parts first: a whole may change its parts' weights
            torch.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            initialise = getattr(module, "initialise", None)
            initialise() if initialise else model._init_weights(module)
    for name, tensor in numbers.items():
        if tensor.sum().isnan():
            raise UserError(
                f"{type(model).__name__} cannot be trained from random weights: transformers has no first value for "
                f"its {name}; begin with published ones (--pretrained), or choose another model"
            )


def _pretrained(kind: type, name: str, reshape: Reshape) -> Any:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        super(made, self).__init__(*args, **kwargs)
        reshape(self)

    # transformers makes a model without memory, and then reads only those weights that the model has.
    made: Any = type(kind.__name__, (kind,), {"__init__": init})
    with without_remarks():
        return made.from_pretrained(name, dtype=torch.float32)


def tokenizer_of(settings: LanguageSettings) -> Tokenizer:
    """The tokenizer that the settings name, or else the model's own.

    Raises UserError where it cannot be loaded, or is another one than published weights were trained with.
    """
    given = settings.tokenizer
    if settings.model in PRESETS:
        return load(given or "bytes")
    vocabulary = getattr(_loaded_config(settings.model), "vocab_size", Bytes.size)
    if not comes_with(settings.model):
        if settings.pretrained and not given and vocabulary != Bytes.size:
            raise UserError(
                f"model {settings.model} has no tokenizer with it, and {vocabulary} tokens are not bytes; give the "
                "one that it was trained with: --tokenizer, a folder or a name on the hub"
            )
        return load(given or "bytes")
    if not given:
        return Pretrained(settings.model)
    tokenizer = load(given)
    if settings.pretrained and not settings.force_tokenizer and not Pretrained(settings.model).alike(tokenizer):
        raise UserError(
            f"tokenizer {given} is not the one that the weights of {settings.model} were trained with, so they would "
            "make nothing of the text; leave out --tokenizer, or add --force-tokenizer"
        )
    return tokenizer


def model_config(settings: LanguageSettings, tokenizer: Tokenizer) -> Any:
    """The model's transformers configuration, checked against tokenizer and sequences. Raises UserError."""
    from transformers import LlamaConfig

    if settings.lora and not settings.pretrained:
        raise UserError(
            f"lora is {settings.lora}, but adapters are for a model's published weights; add --pretrained, or leave "
            "out --lora to train all weights from random ones"
        )
    if settings.lora_modules and not settings.lora:
        raise UserError("lora_modules says which layers get adapters, but lora is 0; give --lora RANK, or leave it out")
    if settings.model in PRESETS:
        if settings.pretrained:
            raise UserError(f"model {settings.model} is a preset without published weights; leave out --pretrained")
        return LlamaConfig(
            **PRESETS[settings.model],
            vocab_size=max(tokenizer.size, tokenizer.end + 1),
            max_position_embeddings=settings.sequence_length,
            bos_token_id=tokenizer.end,
            eos_token_id=tokenizer.end,
        )
    config = _loaded_config(settings.model)
    vocabulary = getattr(config, "vocab_size", tokenizer.size)
    if tokenizer.size > vocabulary:
        raise UserError(
            f"tokenizer {settings.tokenizer or 'bytes'} has {tokenizer.size} tokens but model {settings.model} only "
            f"{vocabulary}; use the tokenizer that belongs to the model"
        )
    longest = getattr(config, "max_position_embeddings", None) or settings.sequence_length
    if settings.sequence_length > longest:
        raise UserError(
            f"sequence_length is {settings.sequence_length} but model {settings.model} takes at most {longest} tokens"
        )
    return config


def _loaded_config(model: str) -> Any:
    """What AutoConfig loads of a folder, or of a name on the hub. Raises UserError."""
    from transformers import AutoConfig

    try:
        with quiet("huggingface_hub", logging.ERROR):  # it would log each attempt to find a name
            return AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise _cannot_load(model, error) from error


def sequence_loss(
    model: nn.Module,
    sequences: torch.Tensor,
    labels: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """The mean cross-entropy, in nats a token, of predicting each token of (n, length) sequences from those before.

    Of `labels`, those that are -100 are not predicted. Where `positions` begin again, so does a document, in which
    nothing before is seen. In training mode, a family's other losses are added, such as that of a mixture's routers.
    """
    labels = sequences if labels is None else labels
    given = {} if positions is None else {"position_ids": positions}
    with positions_given(positions):
        if not model.training:
            return cross_entropy(model, model(input_ids=sequences, use_cache=False, **given).logits, labels)
        loss: torch.Tensor = model(input_ids=sequences, labels=labels, use_cache=False, **given).loss
    return loss


def within_documents(sequences: torch.Tensor, end: int) -> torch.Tensor:
    """The position of each token of (n, length) sequences in its document, from 0; each ends with the token `end`."""
    numbers = torch.arange(sequences.shape[1], device=sequences.device).expand_as(sequences)
    begins = torch.zeros_like(sequences)
    begins[:, 1:] = torch.where(sequences[:, :-1] == end, numbers[:, 1:], 0)
    return numbers - begins.cummax(dim=1).values


def cross_entropy(model: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy, in nats a token, of a model's (n, length, tokens) logits for (n, length) labels."""
    loss: torch.Tensor = model.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1])
    return loss


@torch.no_grad()
def check_causal(model: Any) -> None:
    """Raises UserError for a model that sees the tokens it is to predict, or whose loss rewards repeating tokens."""
    family, was_training = type(model).__name__, model.training
    device, seen = next(model.parameters()).device, 4
    tokens = torch.arange(2, 10, device=device).unsqueeze(0)
    later = torch.cat([tokens[:, :seen], tokens[:, seen:].flip(1)], dim=1)
    model.eval()
    output = model(input_ids=tokens, labels=tokens, use_cache=False)
    changed = (output.logits - model(input_ids=later, use_cache=False).logits)[:, :seen].abs().max()
    model.train(was_training)
    if changed > 1e-5 * output.logits.abs().max():
        raise UserError(
            f"{family} sees the tokens that it is to predict; choose a causal model, "
            'or a folder in whose config.json "is_decoder" is true'
        )
    repeating = nn.functional.cross_entropy(output.logits.flatten(0, 1).float(), tokens.flatten())
    if torch.isclose(output.loss, repeating) and not torch.isclose(
        repeating, cross_entropy(model, output.logits, tokens)
    ):
        raise UserError(f"{family} has a loss that is least when it repeats each token; choose a model that predicts")


@torch.no_grad()
def check_keeps_to_documents(model: Any) -> None:
    """Raises UserError for a model that sees documents before the one that positions say a token is in."""
    was_training, device = model.training, next(model.parameters()).device

    def logits(tokens: torch.Tensor, *, batch: torch.Tensor) -> Any:
        return model(input_ids=tokens, position_ids=batch, use_cache=False).logits

    refuse_across_documents(type(model.eval()).__name__, torch.arange(2, 10, device=device).unsqueeze(0), logits)
    model.train(was_training)


def refuse_across_documents(family: str, entering: torch.Tensor, compute: Callable[..., torch.Tensor]) -> None:
    """Raises UserError where what is computed of two documents of four tokens lets the second one see the first.

    `compute` takes what enters, (1, 8) or (1, 8, width), and as its `batch` the tokens' positions.
    """
    positions = torch.arange(4, device=entering.device).repeat(2).unsqueeze(0)
    other = torch.cat([entering[:, :4].flip(1), entering[:, 4:]], dim=1)
    try:
        one, same = compute(entering, batch=positions), compute(other, batch=positions)
        seen = (one - same)[:, 4:].abs().max() > 1e-5 * one.abs().max()
    except TypeError:  # it takes no positions
        seen = torch.tensor(True)
    if seen:
        raise UserError(f"{family} cannot keep its attention within documents; leave out --document-mask")


NO_MODELS = {
    "config.toml": "a run; export its model first, with: farflung export RUN FOLDER",
    "adapter_config.json": "an adapter alone; export its run without --adapter, which joins it to its model",
}
"""What else a folder may be, by a file in it, and what to do."""


def _cannot_load(name: str, error: Exception) -> UserError:
    meant = difflib.get_close_matches(name, PRESETS, n=1)
    if meant and not Path(name).exists():
        return UserError(f"there is no model {name!r}; did you mean {meant[0]!r}?")
    for file, what in NO_MODELS.items():
        if (Path(name) / file).exists():
            return UserError(f"model {name!r} is {what}")
    known = ", ".join(PRESETS)
    return UserError(f"model {name!r}: {reason(name, error)}; give a preset ({known}), a folder, or a name on the hub")
