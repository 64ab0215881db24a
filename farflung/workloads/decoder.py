"""Takes a transformers decoder apart: what lies before, in and after its layers; and a stage with some of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from farflung.errors import UserError
from farflung.workloads import models
from farflung.workloads.base import Load, Span
from farflung.workloads.experts import active_shares
from farflung.workloads.packing import positions_given
from farflung.workloads.routers import router_loss_of

POSITIONS = ("embed_positions", "wpe")
"""Names of learned positions that are added to the embeddings."""
FINAL_NORMS = ("norm", "final_layer_norm", "final_layernorm", "ln_f")
"""Names of the norm after the last layer."""


@dataclass(frozen=True)
class Anatomy:
    """The parts of a causal language model, by their names in its decoder."""

    decoder: Any
    layers: str
    embeddings: str
    positions: list[str]
    dropouts: list[str]
    norms: list[str]

    def __getitem__(self, name: str) -> Any:
        return getattr(self.decoder, name)


class Absent(nn.Module):
    """Stands in for what another stage has; returns its input."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        """Its input."""
        return hidden


class NoPositions(nn.Module):
    """Stands in for positions, which the first stage has added."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Nothing to add."""
        return torch.zeros(())


class Piece(nn.Module):
    """What a stage computes: token ids (first) or hidden states to hidden states, or to logits (last).

    In training, the sums of a mixture's router loss come and go beside these.

    Args:
        model: the causal language model, of which only the span is left.
        half: whether matrix products are computed in bfloat16; inputs and outputs are float32.
        positions: says where in its document each token of a batch is; None where all of a sequence is one.
    """

    def __init__(
        self, model: Any, span: Span, half: bool = False, positions: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.span = span
        self._half, self._positions = half, positions
        self.routers = router_loss_of(model)
        self.sums = self.routers.numbers if self.routers else 0
        self._router_logits: tuple[Tensor, ...] = ()
        if self.routers:
            model.get_decoder().register_forward_pre_hook(self._ask_routers, with_kwargs=True)
            model.get_decoder().register_forward_hook(self._note_routers)

    def forward(
        self, entering: Tensor, sums: Tensor | None = None, batch: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """(n, length) ids or (n, length, width) numbers to (n, length, width) numbers or (n, length, tokens) logits.

        `sums` are those of earlier stages' routers, see RouterLoss; in training, they come out with this stage's.
        `batch` are the ids, of which `positions` are made.
        """
        given: dict[str, Any] = {"input_ids" if self.span.first else "inputs_embeds": entering, "use_cache": False}
        if self._positions:
            assert batch is not None
            given["position_ids"] = self._positions(batch).to(entering.device)
        in_documents = positions_given(given.get("position_ids"))
        if self.routers:
            given["output_router_logits"] = False  # the family would make a loss of this piece's alone
        with torch.autocast(entering.device.type, torch.bfloat16, enabled=self._half), in_documents:
            if self.span.last:
                leaving: Tensor = self.model(**given).logits.float()
            else:
                leaving = self.model.get_decoder()(**given).last_hidden_state.float()
            # Zero-bubble schedules detach it in place, which views do not allow.
            leaving = leaving.clone() if leaving._is_view() else leaving
            if not (self.routers and self.model.training):
                return leaving
            logits, self._router_logits = self._router_logits, ()
            if sums is None:
                sums = torch.zeros(self.routers.numbers, device=entering.device, requires_grad=True)
            return leaving, sums + self.routers.sums(logits).to(entering.device)

    def loss(self, leaving: Tensor | tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        """What training minimises, of the last piece's output; in evaluation mode, the cross-entropy alone."""
        logits, *sums = leaving if isinstance(leaving, tuple) else (leaving,)
        entropy = models.cross_entropy(self.model, logits, labels)
        return entropy + self.routers.loss(*sums) if self.routers and sums else entropy

    def _ask_routers(self, decoder: nn.Module, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**given, "output_router_logits": decoder.training}

    def _note_routers(self, decoder: nn.Module, args: Any, output: Any) -> None:
        if decoder.training:
            self._router_logits = output.router_logits


def is_tied(model: Any) -> bool:
    """Whether the head is the embeddings again."""
    return bool(getattr(model.config, "tie_word_embeddings", False))


def anatomy(model: Any) -> Anatomy:
    """A model's parts. Raises UserError, saying why, for one that cannot be split."""
    decoder, embeddings, head = model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()
    family = type(model).__name__
    lists = [name for name, child in decoder.named_children() if isinstance(child, nn.ModuleList)]
    if len(lists) != 1 or embeddings is None or head is None or decoder is model:
        raise _cannot_split(family, "it is no decoder of embeddings, one list of layers and a head")
    names: dict[str, list[str]] = {"embeddings": [], "positions": [], "dropouts": [], "norms": []}
    for name, child in decoder.named_children():
        if child is embeddings:
            names["embeddings"].append(name)
        elif name in POSITIONS:
            names["positions"].append(name)
        elif name in FINAL_NORMS:
            names["norms"].append(name)
        elif isinstance(child, nn.Dropout):
            names["dropouts"].append(name)
        elif name != lists[0] and any(True for _ in child.parameters()):
            raise _cannot_split(family, f"whether its {name} belongs before or after the layers is not known")
    known = {id(parameter) for module in (decoder, head) for parameter in module.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in known:
            raise _cannot_split(family, f"{name} lies outside of its decoder and head")
    if not names["embeddings"]:
        raise _cannot_split(family, "its embeddings lie outside of its decoder")
    return Anatomy(decoder, lists[0], names["embeddings"][0], names["positions"], names["dropouts"], names["norms"])


def loads(model: Any) -> tuple[list[Load], Load, Load]:
    """The loads of the layers, of what comes before them, and of what comes after. Raises UserError.

    Looking up embeddings is no work; of experts, only those that a token takes count.
    """
    parts, shares = anatomy(model), active_shares(model)

    def load(*modules: nn.Module) -> Load:
        held = [parameter for module in modules for parameter in module.parameters()]
        work = sum(shares.get(id(p), 1.0) * p.numel() for p in held if p.dim() > 1)
        return Load(sum(p.numel() for p in held), work)

    before = load(*(parts[name] for name in (parts.embeddings, *parts.positions)))._replace(work=0.0)
    after = load(*(parts[name] for name in parts.norms), model.get_output_embeddings())
    return [load(layer) for layer in parts[parts.layers]], before, after


def operations(model: Any, sequence_length: int, recompute: bool = False) -> float:
    """Operations that training takes for one token, see `operations_of`. Raises UserError."""
    layers, _, after = loads(model)
    attention = len(layers) * attention_of(model.config.get_text_config()) * sequence_length
    return operations_of(sum(layer.work for layer in layers) + attention, after.work, recompute)


def operations_of(layers: float, head: float, recompute: bool) -> float:
    """Operations for one token, forward and backward: 6 for each number that it is multiplied with.

    To `recompute` takes one more forward pass through the layers.
    """
    return (8 if recompute else 6) * layers + 6 * head


def attention_of(settings: Any) -> int:
    """Numbers in a token's queries and values, whose heads may have other widths than hidden / heads."""
    heads = getattr(settings, "num_attention_heads", 0)
    usual = getattr(settings, "head_dim", None) or settings.hidden_size // max(heads, 1)
    widths = (getattr(settings, name, None) or usual for name in ("qk_head_dim", "v_head_dim"))
    return int(heads * sum(widths))


def keep(model: Any, span: Span) -> None:
    """Removes from a model all that is not in a span. A tied head keeps a copy of the embeddings."""
    parts, tied = anatomy(model), is_tied(model)
    layers = parts[parts.layers]
    for number in range(len(layers)):
        if not span.begin <= number < span.end:
            layers[number] = Absent()
    if not span.first:
        for name in parts.positions:
            setattr(parts.decoder, name, NoPositions())
        for name in parts.dropouts:
            setattr(parts.decoder, name, nn.Identity())
        if not (tied and span.last):
            setattr(parts.decoder, parts.embeddings, Absent())
    if not span.last:
        for name in parts.norms:
            setattr(parts.decoder, name, Absent())
        head = model.get_output_embeddings()
        setattr(model, next(name for name, child in model.named_children() if child is head), Absent())
    if tied and not (span.first and span.last):
        model.config.tie_word_embeddings = span.last
        model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def check_passes_on(config: Any) -> None:
    """Raises UserError, saying why, for a transformers configuration whose model cannot be split.

    A stage without layers must return its input, bit for bit: else the model computes more between its layers than its
    stages would.
    """
    model = models.outline(config)
    family = type(model).__name__
    keep(model, Span(0, 0, first=False, last=False))
    models.materialise(model, seed=0)
    entering = torch.randn(1, 4, config.hidden_size, generator=torch.Generator().manual_seed(0))
    piece = Piece(model.eval(), Span(0, 0, first=False, last=False))
    try:
        with torch.no_grad():
            leaving = piece(entering)
    except Exception as error:  # whatever a family does with what its layers return
        raise _cannot_split(family, f"its decoder cannot do without its layers ({error})") from error
    if leaving.shape != entering.shape or not torch.equal(leaving, entering):
        raise _cannot_split(family, "it changes what passes between its layers")


@torch.no_grad()
def check_keeps_to_documents(config: Any) -> None:
    """As that of whole models, for a transformers configuration; one layer of each kind is tried. Raises UserError."""
    kinds = getattr(config, "layer_types", None) or [""]
    entering = torch.randn(1, 8, config.hidden_size, generator=torch.Generator().manual_seed(0))
    for number in sorted(kinds.index(kind) for kind in set(kinds)):
        model, span = models.outline(config), Span(number, number + 1, first=False, last=False)
        keep(model, span)
        models.materialise(model, seed=0)
        piece = Piece(model.eval(), span, positions=lambda given: given)
        models.refuse_across_documents(type(model).__name__, entering, piece)


def _cannot_split(family: str, reason: str) -> UserError:
    return UserError(f"{family} cannot be split into stages: {reason}; train it with --stages 1")
