"""Causal language models on text."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from farflung.errors import UserError
from farflung.lazy import Later
from farflung.workloads.dealing import ALL, Deal
from farflung.workloads.settings import LanguageSettings

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor, nn

    from farflung.workloads import adapters, base, chats, continuing, decoder, models, sources, tokenizers
    from farflung.workloads import subspace as subspaces
    from farflung.workloads.base import Batch, Coordinates, Forward, Ids, Load, Reshape, Score, Span
    from farflung.workloads.chats import Chats, Labelled
    from farflung.workloads.continuing import Continuation
    from farflung.workloads.data import Data
    from farflung.workloads.shards import Shards
    from farflung.workloads.sources import Mixture, Source
else:
    np, torch, subspaces = Later("numpy"), Later("torch"), Later("farflung.workloads.subspace")
    adapters, base, chats, continuing, decoder, models, sources, tokenizers = (
        Later(f"farflung.workloads.{name}")
        for name in ("adapters", "base", "chats", "continuing", "decoder", "models", "sources", "tokenizers")
    )


class Language:
    """A causal language model on sequences of tokens, or on the answers of chats; or an adapter of one.

    A workload that can be divided where it trains on text, and all of the model: see Workload and Divisible.
    """

    Settings = LanguageSettings
    units = "tokens"
    measure = "nats a token"

    def __init__(self, settings: LanguageSettings, deal: Deal = ALL) -> None:
        self.settings = settings
        self._deal = deal

    @property
    def divisible(self) -> Language:
        """See Workload. Raises UserError where the settings are for a whole model."""
        remedy = "leave out --stages, --shard, --islands and --offload"
        if self.settings.lora:
            raise UserError(f"lora trains layers beside frozen ones, which stages and shards cannot hold yet; {remedy}")
        chats_there = False
        with contextlib.suppress(UserError):  # data that cannot be read is for `check` to tell of
            chats_there = self.holds_chats
        if chats_there:
            raise UserError(
                f"data {self.settings.data} holds chats, whose prompts stages and shards do not mask; {remedy}"
            )
        return self

    @property
    def units_per_sample(self) -> int:
        """See Workload: of a chat, the tokens of its answers, in the mean."""
        return sources.learnt(self.data, self.settings.sequence_length)

    @cached_property
    def _named(self) -> list[Source]:
        return sources.named(self.settings)  # once: on the hub, each asking is a journey

    @cached_property
    def _judges(self) -> list[Source]:
        return sources.judges(self.settings)

    @property
    def holds_chats(self) -> bool:
        """Whether it trains on the answers of chats, and perhaps on text, too. Raises UserError."""
        return any(source.is_chats for source in self._named)

    @property
    def _answers(self) -> bool:
        """Whether the first sample that it is judged by is a chat."""
        return (self._judges or self._named)[0].is_chats

    @cached_property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """Makes tokens of text. Raises UserError."""
        return models.tokenizer_of(self.settings)

    @cached_property
    def config(self) -> Any:
        """The model's transformers configuration. Raises UserError."""
        return models.model_config(self.settings, self.tokenizer)

    @cached_property
    def data(self) -> Data | Shards | Chats | Mixture:
        """The tokens to train on. Raises UserError."""
        return sources.load(self._named, self.tokenizer, self._deal)

    @cached_property
    def _judged_by(self) -> dict[str, Tensor | Labelled]:
        """Samples of each source."""
        return sources.held_out(self.data, self._judges, self.tokenizer, self.settings.eval_sequences)

    @cached_property
    def _held_out(self) -> Tensor | Labelled:
        parts = [*self._judged_by.values()]
        return sources.together(parts, self.tokenizer.end, with_labels=isinstance(parts[0], tuple))

    @cached_property
    def bytes_per_unit(self) -> float:
        """The bytes of held-out text that a token stands for, on average; of chats, of their answers' text."""
        parts = _parts(self._held_out)
        tokens = parts[-1][parts[-1] != chats.IGNORED].tolist()
        return self.tokenizer.count_bytes(tokens) / len(tokens)

    def prepare(self) -> None:
        """Makes tokens of what `check` has not read, where nobody has; a terminal shows it. Raises UserError."""
        sources.prepare(self._named, self._judges, self.tokenizer, self._deal)

    def check(self) -> None:
        """See Workload."""
        _ = self.config
        if self.settings.lora:
            self.outline()
            if self.settings.base:
                adapters.refuse_other_base(self._base(), self.settings)
        if self._positions and not self.tokenizer.marks_ends:
            raise UserError(
                "the tokenizer has no token for the end of a text, by which documents are told apart; give it an "
                "eos_token, or leave out --document-mask"
            )
        sources.check(self._named, self._judges, self.tokenizer, self._deal)

    def settled(self) -> LanguageSettings:
        """Its settings with the hash of the base, where adapters are trained. Raises UserError."""
        if not self.settings.lora or self.settings.base:
            return self.settings
        return replace(self.settings, base=adapters.digest(self._base()))

    def _base(self) -> Any:
        return models.build(self.settings, self.tokenizer, seed=0)

    def outline(self) -> Any:
        """See Workload."""
        model = models.outline(self.config)
        if self.settings.lora:
            adapters.add(model, self.settings, seed=0)
        return model

    def build(self, seed: int, reshape: Reshape | None = None) -> Any:
        """See Workload."""
        model = models.build(self.settings, self.tokenizer, seed, reshape)
        if reshape is None:
            models.check_causal(model)
            if self.settings.document_mask:
                models.check_keeps_to_documents(model)
        if self.settings.lora:
            adapters.refuse_other_base(model, self.settings)
            adapters.add(model, self.settings, seed)
        return model

    @property
    def available(self) -> int | None:
        """See Workload; of files that come one by one, it is not known."""
        return self.data.available

    def epochs(self, samples: float) -> dict[str, float]:
        """See Workload."""
        return self.data.epochs(samples) if isinstance(self.data, sources.Mixture) else {}

    @property
    def known(self) -> MutableMapping[str, Any]:
        """See Workload."""
        return cast("MutableMapping[str, Any]", self.data.known)

    def sample_ids(self, seed: int, replica: int, step: int, size: int) -> Ids:
        """See Workload."""
        if self.data.available is None:
            return self.data.at(seed, replica, step * size + np.arange(size))
        return self._deal.ids(seed, replica, step, size, self.data.available)

    def let_go(self) -> None:
        """See Workload."""
        if let_go := getattr(self.__dict__.get("data"), "let_go", None):  # of data that was not read, nobody waits
            let_go()

    def batch(self, ids: Ids) -> Batch:
        """Sequences (n, length) int64; of chats, with their labels."""
        return self.data.batch(ids)

    def loss(self, model: Any, batch: Tensor | Labelled) -> Tensor:
        """See Workload; of chats, the mean over the tokens of their answers."""
        tokens, labels = batch if isinstance(batch, tuple) else (batch, batch)
        positions_of = self._positions
        positions = positions_of(tokens) if positions_of else None
        if positions is not None and self.holds_chats:
            # A chat is one document, though its messages may end as a text does; what is learnt whole is text.
            is_text = (labels == tokens).all(dim=1, keepdim=True)
            positions = torch.where(is_text, positions, torch.arange(tokens.shape[1], device=tokens.device))
        return models.sequence_loss(model, tokens, labels, positions)

    @property
    def _positions(self) -> Callable[[Tensor], Tensor] | None:
        """Says where in its document each token of a text is, where documents are not to see each other."""
        if not self.settings.document_mask or all(source.is_chats for source in self._named):
            return None
        return partial(models.within_documents, end=self.tokenizer.end)

    def weight(self, batch: Tensor | Labelled) -> int:
        """See Workload: its sequences, or the tokens of answers that are predicted in it."""
        return len(batch) if isinstance(batch, torch.Tensor) else int((batch[1][:, 1:] != chats.IGNORED).sum())

    def operations(self, recompute: bool) -> float | None:
        """See Workload; None for adapters, and for a model whose parts are not known."""
        if self.settings.lora:
            return None
        with contextlib.suppress(UserError):
            return decoder.operations(self.outline(), self.settings.sequence_length, recompute)
        return None

    def evaluate(self, model: Any, size: int, device: torch.device) -> Score:
        """The mean cross-entropy, in nats a token, of the sequences held out, or of the answers in them."""
        sums: dict[str, tuple[float, int]] = {}
        for source, samples in self._judged_by.items():
            split = (torch.split(part, size) for part in _parts(samples))
            batches = [parts[0] if len(parts) == 1 else parts for parts in zip(*split, strict=True)]
            weights = [self.weight(batch) for batch in batches]
            losses = [float(self.loss(model, base.to(batch, device))) for batch in batches]
            sums[source] = sum(map(float.__mul__, losses, map(float, weights))), sum(weights)
        return base.Score.of(sums)

    def digest(self) -> str:
        """See Workload."""
        return hashlib.sha256(b"".join(part.numpy().tobytes() for part in _parts(self._held_out))).hexdigest()

    def sample(self, model: Any, seed: int, device: torch.device) -> str:
        """How a model continues the beginning of a sequence held out, or answers a prompt held out."""
        tokens = self._continuation.by(model, seed, device)
        if not self._answers:
            return self.tokenizer.decode(tokens)
        asked = self._continuation.prompt.shape[1]
        return "\n".join(self.tokenizer.decode(part).strip() for part in (tokens[:asked], tokens[asked:]))

    def export(self, weights: Mapping[str, Tensor], target: Path, seed: int, constrained_to: int = 0) -> None:
        """A folder that AutoModelForCausalLM loads, with the tokenizer in it; adapters are merged into their base."""
        from transformers import AutoModelForCausalLM

        if self.settings.lora:
            self._export_adapter(weights, target, merged=True)
            return
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

    def export_adapter(self, weights: Mapping[str, Tensor], target: Path) -> None:
        """A folder that peft's PeftModel loads beside the base model. Raises UserError where none is trained."""
        if not self.settings.lora:
            raise UserError("this run has trained all of its model's weights, and no adapter; leave out --adapter")
        self._export_adapter(weights, target, merged=False)

    def _export_adapter(self, weights: Mapping[str, Tensor], target: Path, merged: bool) -> None:
        model = self._base()
        adapters.refuse_other_base(model, self.settings)
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        with models.without_remarks():
            adapters.save(model, self.settings, weights, target, merged)
            self.tokenizer.save(str(target))

    @property
    def held_out(self) -> int:
        """See Divisible."""
        return len(self._texts_held_out)

    @property
    def sources(self) -> dict[str, int]:
        """See Divisible."""
        return {source: len(samples) for source, samples in self._judged_by.items()}

    def held_out_batch(self, ids: Ids) -> Tensor:
        """See Divisible."""
        return self._texts_held_out[torch.from_numpy(ids)]

    @property
    def _texts_held_out(self) -> Tensor:
        assert isinstance(self._held_out, torch.Tensor)  # chats cannot be divided
        return self._held_out

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
            raise UserError("boundary subspace: published weights do not lie in one; leave out --pretrained")
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
        if self.settings.document_mask:
            decoder.check_keeps_to_documents(self.config)
        if subspace:
            assert isinstance(subspace, subspaces.Subspace)
            model = self.outline()
            self.keep(model, base.Span(0, 1, first=True, last=False), subspace, spans[-1].begin)
            models.materialise(model, seed)
            subspaces.check_constrained(model.get_decoder(), self.layers(model), subspace, up_to=1)

    def piece(self, model: Any, span: Span, half: bool) -> decoder.Piece:
        """See Divisible."""
        return decoder.Piece(model, span, half, self._positions)

    def example(self, samples: int) -> Tensor:
        """See Divisible."""
        return torch.empty(samples, self.settings.sequence_length, dtype=torch.int64, device="meta")

    def shapes(self, model: Any, batch: Tensor) -> tuple[torch.Size, torch.Size]:
        """See Divisible."""
        config = model.config
        return torch.Size((*batch.shape, config.hidden_size)), torch.Size((*batch.shape, config.vocab_size))

    def sample_in_pieces(self, forward: Forward, seed: int) -> str:
        """See Divisible. Each new token takes a pass through all stages."""
        return self.tokenizer.decode(self._continuation.in_pieces(forward, self.config.vocab_size, seed))

    @cached_property
    def _continuation(self) -> Continuation:
        most = self.settings.sequence_length
        return continuing.Continuation.of(self._held_out, self._answers, most, self.tokenizer.end)


def _parts(batch: Tensor | Labelled) -> Labelled | tuple[Tensor]:
    """Sequences, and their labels if they have others."""
    return (batch,) if isinstance(batch, torch.Tensor) else batch
