"""Hidden states in a subspace, which a few coordinates represent exactly (Protocol Models, arXiv 2506.01260).

Every stage knows an orthonormal basis U (width × rank). Each matrix that writes to the stream of hidden numbers is
constrained to it, W = U·A, and the embeddings are T + S·Uᵀ, with T random, frozen and known to all. Then X - T[tokens]
lies in the span of U after every layer: (X - T[tokens])·U represents X, and G·U all of its gradient G that matters.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from farflung.errors import UserError

WRITERS = ("o_proj", "down_proj", "out_proj", "c_proj", "fc2", "dense", "dense_4h_to_h")
"""Names of the matrices that write to the stream: the last ones of attention and of the feed-forward part."""

STREAM_NOISE = 1e-4
"""How far the stream may leave the subspace by rounding, relative to its norm."""


class Subspace:
    """The basis and the frozen embeddings: functions of a seed, made where they are needed and never sent.

    Args:
        width: of the hidden states.
        rank: coordinates of a hidden state.
        tokens: rows of the embeddings.
        scale: standard deviation of the frozen embeddings.
        seed: the same for all stages and replicas.
    """

    def __init__(self, width: int, rank: int, tokens: int, scale: float, seed: int) -> None:
        if rank > width:
            raise UserError(
                f"boundary subspace{rank} has more dimensions than the model's {width}; choose at most that"
            )
        self.width, self.rank, self.tokens, self.scale, self.seed = width, rank, tokens, scale, seed

    @cached_property
    def basis(self) -> Tensor:
        """U: (width, rank) float32, orthonormal columns."""
        generator = torch.Generator().manual_seed(self.seed)
        noise = torch.randn(self.width, self.rank, dtype=torch.float64, generator=generator)
        basis: Tensor = torch.linalg.qr(noise).Q
        return basis.float().contiguous()

    @cached_property
    def frozen(self) -> Tensor:
        """T: (tokens, width) float32."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(self.tokens, self.width, generator=generator).mul_(self.scale)

    def basis_on(self, device: torch.device) -> Tensor:
        """The basis on a device."""
        return self.basis.to(device)

    def coordinates(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """(…, rank) coordinates of the hidden states (…, width) of those tokens."""
        return (hidden - self._frozen_of(tokens, hidden.device)) @ self.basis_on(hidden.device)

    def hidden(self, coordinates: Tensor, tokens: Tensor) -> Tensor:
        """(…, width) hidden states of coordinates (…, rank)."""
        return coordinates @ self.basis_on(coordinates.device).T + self._frozen_of(tokens, coordinates.device)

    def _frozen_of(self, tokens: Tensor, device: torch.device) -> Tensor:
        return self.frozen[tokens.to("cpu")].to(device)

    def plain(self, name: str, weight: Tensor, shape: torch.Size) -> Tensor:
        """A trained weight as a plain model has it, in its shape there; it computes the same."""
        if weight.shape == shape:
            return weight
        if shape[0] == self.tokens and weight.shape[0] == self.tokens:
            return self.frozen.to(weight) + weight @ self.basis.to(weight).T
        return self.basis.to(weight) @ weight


class ConfinedLinear(nn.Module):
    """x ↦ U·(A·x): a linear map into the subspace. `weight` is A: (rank, in)."""

    basis: Tensor

    def __init__(self, replaced: nn.Linear, subspace: Subspace, scale: float) -> None:
        super().__init__()
        device = replaced.weight.device
        self._subspace, self._scale = subspace, scale
        self.weight = nn.Parameter(torch.empty(subspace.rank, replaced.in_features, device=device))
        self.register_buffer("basis", torch.empty(subspace.width, subspace.rank, device=device), persistent=False)

    def initialise(self) -> None:
        """Random, as its matrix would be after a projection."""
        nn.init.normal_(self.weight, std=self._scale)
        self.basis.copy_(self._subspace.basis)

    def forward(self, entering: Tensor) -> Tensor:
        """(…, in) to (…, width)."""
        return nn.functional.linear(nn.functional.linear(entering, self.weight), self.basis)


class SubspaceEmbedding(nn.Module):
    """token ↦ T[token] + U·S[token]. `weight` is S: (tokens, rank)."""

    basis: Tensor
    frozen: Tensor

    def __init__(self, replaced: nn.Embedding, subspace: Subspace) -> None:
        super().__init__()
        device = replaced.weight.device
        self._subspace = subspace
        self.weight = nn.Parameter(torch.empty(subspace.tokens, subspace.rank, device=device))
        self.register_buffer("basis", torch.empty(subspace.width, subspace.rank, device=device), persistent=False)
        self.register_buffer("frozen", torch.empty(subspace.tokens, subspace.width, device=device), persistent=False)

    def initialise(self) -> None:
        """S as random as T."""
        nn.init.normal_(self.weight, std=self._subspace.scale)
        self.basis.copy_(self._subspace.basis)
        self.frozen.copy_(self._subspace.frozen)

    def forward(self, tokens: Tensor) -> Tensor:
        """(…) ids to (…, width)."""
        free = nn.functional.linear(nn.functional.embedding(tokens, self.weight), self.basis)
        return nn.functional.embedding(tokens, self.frozen) + free


def subspace_of(settings: Any, rank: int, seed: int) -> Subspace:
    """The subspace for a transformers configuration."""
    scale = getattr(settings, "initializer_range", None) or 0.02
    return Subspace(settings.hidden_size, rank, settings.vocab_size, scale, seed)


def constrain(model: Any, layers: nn.ModuleList, subspace: Subspace, up_to: int) -> None:
    """Constrains a model's embeddings and its layers before `up_to`, whose output crosses a boundary.

    Raises UserError, naming the layer, for what would leave the subspace.
    """
    if getattr(model.config, "tie_word_embeddings", False):
        raise _cannot_constrain("its head is tied to the embeddings, and logits need all of their width")
    if isinstance(embeddings := model.get_input_embeddings(), nn.Embedding):
        model.set_input_embeddings(SubspaceEmbedding(embeddings, subspace))
    for number in range(up_to):
        for name, module in list(layers[number].named_modules()):
            if name.rpartition(".")[2] in WRITERS:
                _constrain_one(layers[number], name, module, f"layer {number}'s {name}", subspace)


def _constrain_one(layer: nn.Module, name: str, module: nn.Module, called: str, subspace: Subspace) -> None:
    if not isinstance(module, nn.Linear):
        raise _cannot_constrain(f"{called} is a {type(module).__name__}, and only linear maps can be constrained")
    if module.bias is not None:
        raise _cannot_constrain(f"{called} has a bias, which lies outside of it")
    layer.set_submodule(name, ConfinedLinear(module, subspace, subspace.scale))


@torch.no_grad()
def check_constrained(model: Any, layers: nn.ModuleList, subspace: Subspace, up_to: int) -> None:
    """Checks that the stream stays in the subspace through each constrained layer, whatever gains and biases become.

    Spoils the model. Raises UserError, naming the layer: of a norm or a dropout after a projection, say.
    """
    generator = torch.Generator().manual_seed(subspace.seed)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.uniform_(0.5, 1.5, generator=generator)
    tokens = torch.randint(subspace.tokens, (1, 8), generator=generator)
    leaving: dict[int, Tensor] = {}
    hooks = [
        layers[number].register_forward_hook(lambda _, __, output, number=number: leaving.update({number: output}))
        for number in range(up_to)
    ]
    with torch.random.fork_rng(devices=[]):
        model.train()(input_ids=tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    for number in range(up_to):
        hidden = leaving[number] if isinstance(leaving[number], Tensor) else leaving[number][0]
        free = hidden - subspace.frozen[tokens]
        outside = free - (free @ subspace.basis) @ subspace.basis.T
        if float(outside.norm()) > STREAM_NOISE * float(hidden.norm()):
            raise _cannot_constrain(
                f"what leaves layer {number} lies outside of it (a norm or dropout after a projection?)"
            )


def _cannot_constrain(reason: str) -> UserError:
    return UserError(f"boundary subspace: {reason}; choose another --boundary, such as int8")
