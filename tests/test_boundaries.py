"""What crosses from stage to stage: packets of one length, and hidden states in a subspace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import COMMON, cut, gpt2
from torch import Tensor
from transformers import LlamaConfig, Olmo2Config, Qwen2Config

from farflung.codecs import Dense
from farflung.errors import UserError
from farflung.pipeline.boundaries import Boundary, boundary_named
from farflung.workloads import models
from farflung.workloads.decoder import Piece, anatomy, keep
from farflung.workloads.subspace import ConfinedLinear, Subspace, check_constrained, constrain, subspace_of

RANK = 6
CONFIG = LlamaConfig(**COMMON)
SHAPE = torch.Size((2, 12, 32))
LARGE = torch.Size((2, 64, 64))
TOKENS = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(1))


class Crossing(torch.autograd.Function):
    """A boundary within one process."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, boundary: Boundary) -> Tensor:
        ctx.boundary = boundary
        return boundary.unpack(boundary.pack(hidden, TOKENS), TOKENS)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.boundary.unpack_gradient(ctx.boundary.pack_gradient(gradients[0])), None


def constrained(subspace: Subspace, up_to: int, config: Any = CONFIG) -> Any:
    model = models.outline(config)
    parts = anatomy(model)
    constrain(model, parts[parts.layers], subspace, up_to)
    return model


@pytest.mark.parametrize(
    ("name", "bytes_a_number", "error"),
    [("float32", 4, 0.0), ("bfloat16", 2, 4e-3), ("int8", 1.2, 1e-2), ("int4", 0.7, 0.2), ("topk50", 2.8, 0.45)],
)
def test_packets_are_of_one_length_and_lose_little(name: str, bytes_a_number: float, error: float) -> None:
    _, codec = boundary_named(name)
    boundary = Boundary(LARGE, codec)
    for scale in (1.0, 1e-3, 0.0):
        hidden = torch.randn(LARGE, generator=torch.Generator().manual_seed(2)) * scale
        packet = boundary.pack(hidden, TOKENS)
        assert packet.shape == boundary.room().shape and packet.dtype == boundary.room().dtype
        assert packet.nbytes == boundary.nbytes <= bytes_a_number * hidden.numel() + 64
        lost = (boundary.unpack(packet, TOKENS) - hidden).norm()
        assert lost <= error * hidden.norm()
        assert torch.equal(boundary.unpack_gradient(boundary.pack_gradient(hidden)), boundary.unpack(packet, TOKENS))


def test_what_is_not_finite_is_told_and_not_sent() -> None:
    boundary = Boundary(SHAPE, boundary_named("int8")[1])
    hidden = torch.ones(SHAPE)
    boundary.pack(hidden, TOKENS)
    assert not boundary.spoilt
    hidden[0, 0, 0] = float("nan")
    assert not boundary.unpack(boundary.pack(hidden, TOKENS), TOKENS).any()
    assert boundary.spoilt


def test_names() -> None:
    assert boundary_named("subspace32") == (32, Dense())
    assert boundary_named("subspace32-int8") == (32, boundary_named("int8")[1])


def test_a_subspace_says_the_stream_its_gradients_and_the_loss_exactly() -> None:
    subspace = subspace_of(CONFIG, RANK, seed=5)
    spans = cut(CONFIG, 3)
    whole = constrained(subspace, spans[-1].begin)
    models.materialise(whole, seed=3)
    streams: list[Tensor] = []
    for span in spans[:-1]:
        whole.get_decoder().layers[span.end - 1].register_forward_hook(lambda _, __, output: streams.append(output))
    expected = models.sequence_loss(whole.train(), TOKENS)
    expected.backward()

    pieces, passing = [], TOKENS
    boundary = Boundary(SHAPE, Dense(), subspace)
    assert boundary.nbytes == 2 * 12 * RANK * 4
    for span in spans:
        model = constrained(subspace, spans[-1].begin)
        keep(model, span)
        models.materialise(model, seed=3)
        pieces.append(Piece(model.train(), span))
        passing = pieces[-1](passing)
        if not span.last:
            passing = Crossing.apply(passing, boundary)
            torch.testing.assert_close(passing, streams[len(pieces) - 1], atol=1e-5, rtol=1e-5)
    loss = pieces[-1].model.loss_function(logits=passing, labels=TOKENS, vocab_size=256)
    loss.backward()
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=0)
    gradients = {name: p.grad for piece in pieces for name, p in piece.model.named_parameters()}
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=1e-4)
    # Of what is constrained, few numbers are trained; what comes after the last boundary stays free.
    assert whole.model.layers[0].mlp.down_proj.weight.shape == (RANK, 64)
    assert whole.model.layers[4].mlp.down_proj.weight.shape == (32, 64)


def test_a_constrained_model_is_a_plain_one_once_trained() -> None:
    subspace = subspace_of(CONFIG, RANK, seed=5)
    model = constrained(subspace, 3)
    models.materialise(model, seed=3)
    plain = models.outline(CONFIG)
    models.materialise(plain, seed=0)
    shapes = {name: parameter.shape for name, parameter in plain.named_parameters()}
    weights = {name: subspace.plain(name, weight, shapes[name]) for name, weight in model.named_parameters()}
    plain.load_state_dict(weights, strict=False)
    with torch.no_grad():
        torch.testing.assert_close(plain.eval()(TOKENS).logits, model.eval()(TOKENS).logits, atol=1e-5, rtol=1e-5)


def test_the_basis_is_orthonormal_and_a_function_of_the_seed() -> None:
    one, same, other = (Subspace(32, RANK, 256, 0.02, seed) for seed in (5, 5, 6))
    torch.testing.assert_close(one.basis.T @ one.basis, torch.eye(RANK), atol=1e-6, rtol=0)
    assert torch.equal(one.basis, same.basis) and torch.equal(one.frozen, same.frozen)
    assert not torch.equal(one.basis, other.basis)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (gpt2(), "its head is tied"),
        (gpt2(tie_word_embeddings=False), "layer 0's attn.c_proj is a Conv1D"),
        (LlamaConfig(**COMMON, mlp_bias=True), r"layer 0's mlp.down_proj has a bias"),
        (LlamaConfig(**COMMON, attention_bias=True), r"layer 0's self_attn.o_proj has a bias"),
        (Olmo2Config(**COMMON | {"pad_token_id": 1}), "what leaves layer 0 lies outside"),
    ],
)
def test_what_would_leave_the_subspace_is_refused(config: Any, reason: str) -> None:
    subspace = subspace_of(config, RANK, seed=5)
    with pytest.raises(UserError, match=reason):
        model = constrained(subspace, 3, config)
        models.materialise(model, seed=3)
        check_constrained(model.get_decoder(), model.get_decoder().layers, subspace, up_to=3)


@pytest.mark.parametrize("config", [CONFIG, Qwen2Config(**COMMON, num_key_value_heads=2)])
def test_what_can_be_constrained_is_not_refused(config: Any) -> None:
    subspace = subspace_of(config, RANK, seed=5)
    model = constrained(subspace, 3, config)
    models.materialise(model, seed=3)
    check_constrained(model.get_decoder(), model.get_decoder().layers, subspace, up_to=3)
    assert sum(isinstance(module, ConfinedLinear) for module in model.modules()) == 6
