"""A model without its weights, as the planner knows it: its parameters, layers, and what these compute."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from farflung.cells import Cell, Shape, cells_among, dealt
from farflung.errors import UserError
from farflung.pipeline.balance import spans
from farflung.pipeline.boundaries import boundary_named
from farflung.workloads import Language, models
from farflung.workloads.base import Span
from farflung.workloads.decoder import anatomy, attention_of, is_tied, loads, operations_of
from farflung.workloads.experts import active_shares, chosen_experts
from farflung.workloads.settings import LanguageSettings
from farflung.workloads.subspace import constrain, subspace_of

VOCABULARY = 32_000
"""The vocabulary of presets of published sizes where no tokenizer is given."""

PUBLISHED_WIDTH = 768
"""Hidden width of the smallest preset of a published size."""


@dataclass(frozen=True)
class Block:
    """A layer, or what comes before or after the layers.

    Args:
        shapes: of its parameters.
        work: how many of their numbers a token is multiplied with: those of matrices; of experts, the active ones'.
    """

    shapes: tuple[Shape, ...]
    work: float

    @property
    def parameters(self) -> int:
        """All of them."""
        return sum(map(math.prod, self.shapes))


@dataclass(frozen=True)
class Architecture:
    """A decoder: its layers, one by one, and what comes before and after them.

    Args:
        first, last: embeddings, and norm and head. A tied head counts as work, but has no shapes.
        hidden: width of the hidden states.
        attention: numbers in a token's queries and values, all heads together.
        vocabulary: tokens that the head tells apart.
        tied: the shape of the embeddings, where the head shares them.
        active: parameters that take part in a token's computation.
        outline: the model itself, without memory.
        saved: what its layers save, as it is counted: see `farflung.planner.saved`.
    """

    layers: tuple[Block, ...]
    first: Block
    last: Block
    hidden: int
    attention: int
    vocabulary: int
    tied: Shape | None
    active: float
    outline: Any = field(compare=False, repr=False)
    _spans: dict[int, list[Span]] = field(default_factory=dict, init=False, compare=False, repr=False)
    saved: dict[tuple[int, int, str], Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    _constrained: dict[tuple[str, int], Architecture] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @cached_property
    def parameters(self) -> int:
        """All of them, tied ones once."""
        return sum(part.parameters for part in (self.first, *self.layers, self.last))

    @cached_property
    def cells(self) -> list[Cell]:
        """Of all parameters, tied ones once."""
        return cells_among([part.shapes for part in (self.first, *self.layers, self.last)])

    def spans(self, stages: int) -> list[Span]:
        """The layers of each of so many pipeline stages, dealt out as training does. Raises UserError."""
        if stages == 1:
            return [Span(0, len(self.layers), first=True, last=True)]
        if stages not in self._spans:
            self._spans[stages] = spans(*loads(self.outline), stages)
        return self._spans[stages]

    def constrained(self, boundary: str, stages: int, seed: int) -> Architecture:
        """The model as so many stages train it: a subspace makes some matrices smaller. Raises UserError."""
        rank, _ = boundary_named(boundary)
        if not rank or stages == 1:
            return self
        if (boundary, stages) not in self._constrained:
            model, cut = models.outline(self.outline.config), self.spans(stages)
            parts = anatomy(model)
            constrain(model, parts[parts.layers], subspace_of(model.config, rank, seed), cut[-1].begin)
            made = architecture(type(model).__name__, model)
            made._spans[stages] = cut  # layers are dealt out before any is constrained
            self._constrained[boundary, stages] = made
        return self._constrained[boundary, stages]

    def parts(self, span: Span) -> list[Block]:
        """The blocks of a stage."""
        ends = [self.first] * span.first, [self.last] * span.last
        return [*ends[0], *self.layers[span.begin : span.end], *ends[1]]

    def stage_cells(self, span: Span) -> list[Cell]:
        """The cells that a stage trains."""
        return cells_among([part.shapes for part in self.parts(span)])

    def kept_cells(self, stages: int, shards: int) -> list[list[Cell]]:
        """The cells that each process of a replica keeps, stage by stage. Raises UserError."""
        kept: list[list[Cell]] = []
        for cells in map(self.stage_cells, self.spans(stages)):
            keepers = dealt(cells, shards)
            kept += [[cell for cell in cells if keepers[cell.name] == shard] for shard in range(shards)]
        return kept

    def flops_per_token(self, span: Span, sequence_length: int, recompute: bool = False) -> float:
        """A stage's operations for one token, forward and backward: 6 for each number of `work` and of attention.

        To `recompute` takes one more forward pass through the layers.
        """
        layers = sum(layer.work for layer in self.layers[span.begin : span.end])
        attention = (span.end - span.begin) * self.attention * sequence_length
        return operations_of(layers + attention, self.last.work if span.last else 0.0, recompute)


def architecture_of(
    name: str, sequence_length: int = LanguageSettings.sequence_length, tokenizer: str = ""
) -> Architecture:
    """A preset, or a model that transformers can configure, without memory for its weights. Raises UserError."""
    settings = Language.Settings(model=name, tokenizer=tokenizer or "bytes", sequence_length=sequence_length)
    config = Language(settings).config
    if not tokenizer and name in models.PRESETS and config.hidden_size >= PUBLISHED_WIDTH:
        config.vocab_size = max(config.vocab_size, VOCABULARY)
    try:
        model = models.outline(config)
    except (ValueError, TypeError, RuntimeError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"model {name!r} cannot be built as a causal language model: {reason}") from error
    return architecture(name, model)


def architecture(name: str, model: Any) -> Architecture:
    """Takes the measure of a model without memory; `name` is for messages. Raises UserError."""
    layers, before, head = modules_of(name, model)
    shares = active_shares(model)
    if shares and not chosen_experts(model):
        raise UserError(f"model {name!r} has experts, but does not say how many of them a token takes")
    inside = {id(p) for layer in layers for p in layer.parameters()}
    outside = [p for p in model.parameters() if id(p) not in inside]
    looked_up = {id(p) for module in before for p in module.parameters()}
    settings = model.config.get_text_config()
    tied = tuple(head.weight.shape) if is_tied(model) else None

    def part(parameters: Iterable[nn.Parameter], works: bool = True) -> Block:
        listed = list(parameters)
        work = sum(shares.get(id(p), 1.0) * p.numel() for p in listed if p.dim() > 1) if works else 0.0
        return Block(tuple(tuple(p.shape) for p in listed), work)

    last = part(p for p in outside if id(p) not in looked_up)
    return Architecture(
        layers=tuple(part(layer.parameters()) for layer in layers),
        first=part((p for p in outside if id(p) in looked_up), works=False),
        last=Block(last.shapes, last.work + (math.prod(tied) if tied else 0)),
        hidden=settings.hidden_size,
        attention=attention_of(settings),
        vocabulary=settings.vocab_size,
        tied=tied,
        active=sum(shares.get(id(p), 1.0) * p.numel() for p in model.parameters()),
        outline=model,
    )


def modules_of(name: str, model: Any) -> tuple[nn.ModuleList, list[nn.Module], Any]:
    """The layers, the modules before them that only look things up, and the head; even if it cannot be split."""
    try:
        parts = anatomy(model)
        before = [parts[name] for name in (parts.embeddings, *parts.positions)]
        return parts[parts.layers], before, model.get_output_embeddings()
    except UserError:
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        if not lists:
            raise UserError(f"model {name!r} has no list of layers; the planner knows decoders that have") from None
        layers = max(lists, key=lambda module: sum(p.numel() for p in module.parameters()))
        return layers, [model.get_input_embeddings()], model.get_output_embeddings()
