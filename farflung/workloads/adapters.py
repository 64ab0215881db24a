"""LoRA (arXiv 2106.09685), by peft: small matrices that train beside published weights, which stay as they are.

A layer computes W·x + 2·B·A·x, with A: (rank, in) and B: (out, rank). B begins at zero, and A as the run's seed says,
so all replicas begin equal, and as the published model.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from farflung.errors import UserError
from farflung.workloads.settings import LanguageSettings

SCALE = 2
"""What B·A·x counts: peft's lora_alpha over the rank."""

SHOWN = 12
"""The most layers' names that a message tells."""


def add(model: Any, settings: LanguageSettings, seed: int) -> None:
    """Adds an adapter to a model, with or without memory; from then on, only it is trained, saved and loaded.

    Raises UserError.
    """
    peft, config = _peft(), _config(settings)
    _check_modules(model, settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, model)
    every = model.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in every if not parameter.requires_grad}
    model.register_state_dict_post_hook(partial(_leave_out, frozen))
    model.register_load_state_dict_post_hook(partial(_miss_none, frozen))


def digest(model: nn.Module) -> str:
    """A hash of a model's weights: their names, shapes and values."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()[:32]


def refuse_other_base(model: nn.Module, settings: LanguageSettings) -> None:
    """Raises UserError where a model is not the one that the run's adapters are for, if that is known yet."""
    if settings.base and digest(model) != settings.base:
        raise UserError(
            f"model {settings.model}: its weights are not those that the run's adapters are for; "
            "put the base that the run began with there, or name another place: in the run's config.toml, or with "
            "farflung join --model"
        )


def save(base: Any, settings: LanguageSettings, weights: Mapping[str, Tensor], target: Path, merged: bool) -> None:
    """Writes a base model with trained adapters `merged` into it, or in peft's own form without it."""
    peft = _peft()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about what peft asks it
        model = peft.get_peft_model(base, _config(settings))
    loaded = base.load_state_dict(weights, strict=False)
    absent = [name for name, parameter in base.named_parameters() if parameter.requires_grad and name not in weights]
    assert not loaded.unexpected_keys and not absent, f"no weights for {absent}, no place for {loaded.unexpected_keys}"
    if merged:
        model.merge_and_unload().save_pretrained(target)
    else:
        model.save_pretrained(target, save_embedding_layers=False)


def _config(settings: LanguageSettings) -> Any:
    chosen = _modules(settings)
    return _peft().LoraConfig(
        r=settings.lora,
        lora_alpha=SCALE * settings.lora,
        target_modules=chosen or "all-linear",
        task_type="CAUSAL_LM",
        base_model_name_or_path=settings.model,
    )


def _modules(settings: LanguageSettings) -> list[str]:
    return [name for part in settings.lora_modules.split(",") if (name := part.strip())]


def _check_modules(model: Any, settings: LanguageSettings) -> None:
    """Refuses names that no layer has which can get an adapter. Raises UserError."""
    from transformers.pytorch_utils import Conv1D

    kinds = (nn.Linear, nn.Embedding, Conv1D)
    there = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    known = list(dict.fromkeys(name.rpartition(".")[2] for name in there))
    for wanted in _modules(settings):
        if not any(name == wanted or name.endswith(f".{wanted}") for name in there):
            told = ", ".join(known[:SHOWN])
            raise UserError(f"lora_modules: {settings.model} has no layer {wanted!r} for an adapter; it has {told}")
        ends = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
        if getattr(model.config, "tie_word_embeddings", False) and any(
            id(model.get_submodule(name)) in ends for name in there if name.endswith(wanted)
        ):
            raise UserError(
                f"lora_modules: {wanted} shares its weights with the other end of {settings.model}, so an adapter "
                "could not be merged into it; leave it out"
            )


def _leave_out(frozen: set[str], module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name in frozen:
        state.pop(f"{prefix}{name}", None)


def _miss_none(frozen: set[str], module: nn.Module, keys: Any) -> None:
    keys.missing_keys[:] = [name for name in keys.missing_keys if name not in frozen]


def _peft() -> Any:
    """peft. Raises UserError where it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise UserError(
            "lora needs peft, which is not installed; install it with: pip install 'farflung[lora]'"
        ) from error
    return peft
