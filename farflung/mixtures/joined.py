"""The experts of a mixture together: what they come to, and one model of them all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from farflung.errors import UserError
from farflung.mixtures.folder import COPY_AGAIN, Mixture
from farflung.mixtures.modeling import MixtureConfig, MixtureForCausalLM
from farflung.mixtures.routers import mean_scores
from farflung.workloads import models, store
from farflung.workloads.data import Rows
from farflung.workloads.tokenizers import FILES, Pretrained, Tokenizer

BATCH = 16
"""Sequences that a model is judged by at once."""
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError)
"""What libraries raise where a folder holds no model, or a damaged one."""


@dataclass(frozen=True)
class ExpertScore:
    """What an expert comes to on the sequences that it is given."""

    number: int
    sequences: int
    instead: int
    """How many of them are of missing experts."""
    loss: float | None
    """Nats a token; None for no sequence."""


@dataclass(frozen=True)
class MixtureScore:
    """What a mixture comes to on the sequences held out, and a dense model on the same ones."""

    experts: list[ExpertScore]
    loss: float
    """Nats a token, of all sequences."""
    dense: float | None


def evaluate(mixture: Mixture, experts: Mapping[int, Path], dense: Path | None, prefix: int | None) -> MixtureScore:
    """Judges each held-out sequence by the expert that its begin routes it to.

    Args:
        experts: the exported models that there are, by number; the sequences of others go to the next best.
        dense: an exported model to judge by all of them, too.
        prefix: tokens that the routers read; None for as many as they have learnt to.

    Raises UserError: there is no expert; a model is damaged, has other tokens, or reads too few; the routers' prefix is
    too long; a part of the mixture is missing.
    """
    _refuse_none(mixture, experts)
    if prefix and prefix > mixture.prefix:
        raise UserError(f"prefix is {prefix}, and the routers have learnt to read {mixture.prefix}; give no more")
    tokenizer = mixture.read_tokenizer()
    sequences = _held_out(mixture)
    scores = _router_scores(mixture, sequences[:, : prefix or mixture.prefix], tokenizer.end)
    best, chosen = scores.argmax(axis=1), _next_best(scores, [*experts])
    found, total = [], 0.0
    for number, folder in sorted(experts.items()):
        here = chosen == number
        loss = _loss(mixture, folder, sequences[torch.from_numpy(here)], tokenizer)
        total += (loss or 0.0) * here.sum()
        found.append(ExpertScore(number, int(here.sum()), int((here & (best != number)).sum()), loss))
    of_dense = _loss(mixture, dense, sequences, tokenizer) if dense else None
    return MixtureScore(found, total / len(sequences), of_dense)


def join(mixture: Mixture, experts: Mapping[int, Path], target: Path) -> None:
    """Writes one folder with the experts that there are, their routers, the tokenizer and the code of their model.

    Raises UserError: there is no expert; one is damaged, has other tokens, or reads too few; a router is missing.
    """
    _refuse_none(mixture, experts)
    tokenizer, numbers = mixture.read_tokenizer(), sorted(experts)
    with models.without_remarks():
        parts = [_expert(mixture, experts[number], tokenizer) for number in numbers]
        routers = [_router(mixture, number) for number in numbers]
        first = parts[0].config
        config = MixtureConfig(
            [_table_of(part) for part in parts],
            [_table_of(router) for router in routers],
            numbers,
            mixture.prefix,
            tokenizer.end,
            vocab_size=max(part.config.vocab_size for part in parts),
            bos_token_id=first.bos_token_id,
            eos_token_id=first.eos_token_id,
        )
        with torch.device("meta"):
            model = MixtureForCausalLM(config)
        for place, pair in enumerate(zip(parts, routers, strict=True)):
            model.put(place, *pair)
        MixtureConfig.register_for_auto_class()
        MixtureForCausalLM.register_for_auto_class("AutoModelForCausalLM")
        model.save_pretrained(target)
        tokenizer.save(str(target))


def _table_of(model: Any) -> dict[str, Any]:
    """A model's configuration, without where it was read."""
    table: dict[str, Any] = model.config.to_diff_dict()
    return {key: value for key, value in table.items() if key != "_name_or_path"}


def route(mixture: Mixture, text: str) -> NDArray[np.float32]:
    """(E,): how likely each router finds a text's begin, in nats a token. Raises UserError for what is no text."""
    tokenizer = mixture.read_tokenizer()
    try:
        tokens = torch.from_numpy(tokenizer.encode(text).astype(np.int64))[None, : mixture.prefix]
    except UnicodeEncodeError as error:
        raise UserError(f"the text is no Unicode ({error.reason}); give it in the terminal's own encoding") from error
    if not tokens.numel():
        raise UserError("the text is empty; give at least one letter")
    scores: NDArray[np.float32] = _router_scores(mixture, tokens, tokenizer.end)[0]
    return scores


def example(mixture: Mixture, expert: int) -> str:
    """The first sequence that an expert is trained on, as text."""
    tokens = _store(mixture, expert).training[: mixture.sequence_length]
    return mixture.read_tokenizer().decode(tokens.tolist())


def _refuse_none(mixture: Mixture, experts: Mapping[int, Path]) -> None:
    if not experts:
        raise UserError(
            f"{mixture.folder} has no expert that is trained; first: farflung train --data {mixture.store(0)} "
            f"--sequence-length {mixture.sequence_length} --out {mixture.run(0)}, and so on for each"
        )


def _held_out(mixture: Mixture) -> Tensor:
    """(n, length) int64: those of all experts, one after the other."""
    parts = [_store(mixture, number).held_out for number in range(mixture.experts)]
    return Rows(parts, mixture.sequence_length).spread(sum(mixture.held_out))


def _store(mixture: Mixture, expert: int) -> store.Store:
    """An expert's text. Raises UserError where it is missing, damaged, or of another split."""
    folder = mixture.store(expert)
    if not store.is_store(folder):
        raise UserError(f"{folder} is missing, or half of it; {COPY_AGAIN}")
    found = store.read(folder)
    told = sum(mixture.dealt[expert]), mixture.held_out[expert]
    if (len(found.training), len(found.held_out)) != tuple(count * mixture.sequence_length for count in told):
        raise UserError(f"{folder} has another number of sequences than the mixture says; {COPY_AGAIN}")
    return found


def _router_scores(mixture: Mixture, prefixes: Tensor, start: int) -> NDArray[np.float32]:
    each = [mean_scores(_router(mixture, one), prefixes, start) for one in range(mixture.experts)]
    return np.stack(each, axis=1)


def _next_best(scores: NDArray[np.float32], there: list[int]) -> NDArray[np.int64]:
    """(n,): the expert with the best of (n, E) scores, among those that are there."""
    among = np.full_like(scores, -np.inf)
    among[:, there] = scores[:, there]
    best: NDArray[np.int64] = among.argmax(axis=1)
    return best


@torch.no_grad()
def _loss(mixture: Mixture, folder: Path, sequences: Tensor, tokenizer: Tokenizer) -> float | None:
    if not len(sequences):
        return None
    model = _expert(mixture, folder, tokenizer)
    sums = [float(models.sequence_loss(model, batch)) * len(batch) for batch in sequences.split(BATCH)]
    return sum(sums) / len(sequences)


def _expert(mixture: Mixture, folder: Path, tokenizer: Tokenizer) -> Any:
    """A model in evaluation mode. Raises UserError for one of other tokens, of too few at once, or of no text."""
    if not any((folder / name).exists() for name in FILES):
        raise UserError(f"{folder} holds no model of text, as it has no tokenizer; train it on the mixture's own text")
    if not Pretrained(str(folder)).alike(tokenizer):
        raise UserError(
            f"{folder} has other tokens than the mixture, whose text was split with another tokenizer; train it on the "
            "mixture's own text"
        )
    model = _model(folder, "export that run again, train it again, or give another model")
    length = mixture.sequence_length
    if (longest := getattr(model.config, "max_position_embeddings", None) or length) < length:
        raise UserError(
            f"{folder} reads at most {longest} tokens, and the mixture's sequences have {length}; train it with "
            f"--sequence-length {length}"
        )
    return model


def _router(mixture: Mixture, expert: int) -> Any:
    """An expert's router, in evaluation mode. Raises UserError where it is missing, or damaged."""
    return _model(mixture.router(expert), COPY_AGAIN)


def _model(folder: Path, remedy: str) -> Any:
    from transformers import AutoModelForCausalLM

    how = {"dtype": torch.float32, "local_files_only": True, "trust_remote_code": False, "output_loading_info": True}
    try:
        with models.without_remarks():
            model, told = AutoModelForCausalLM.from_pretrained(folder, **how)
    except UNREADABLE as error:
        why = f"{error}".partition("\n")[0].rstrip(".") if folder.is_dir() else "there is no such folder"
        raise UserError(f"{folder} holds no model of text that can be read ({why}); {remedy}") from error
    if told["missing_keys"]:  # they would be random numbers
        raise UserError(f"{folder} lacks weights, such as {min(told['missing_keys'])}; {remedy}")
    if not all(weights.isfinite().all() for weights in model.parameters()):
        raise UserError(f"{folder} has weights that are no finite numbers; {remedy}")
    return model.eval()
