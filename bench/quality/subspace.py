"""Do boundaries that carry k numbers a token train as well, and when do they pay on a slow link?
Four stages against the same model in one piece (exact, but for rounding), then loss after the same steps at equal
bytes beside random projection, top-k and the unconstrained model, then time to a loss with a link of 20 Mbit/s for
each stage, in real processes in network namespaces. Takes about an hour on two cores; the last part needs root.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from bench.lib.store import Result, Store
from bench.lib.table import Cell, Part, Table
from bench.lib.training import Finished, flags
from farflung.codecs import Dense, Quantize, TopK
from farflung.pipeline.balance import spans
from farflung.pipeline.boundaries import Boundary
from farflung.report.read import read_run
from farflung.settings import Settings
from farflung.testing.hosts import NetLab, torch_everywhere, unavailable
from farflung.training.learning_rate import lr_scale
from farflung.workloads import Language, models
from farflung.workloads.base import Span
from farflung.workloads.decoder import Piece, anatomy, keep, loads
from farflung.workloads.subspace import Subspace, constrain, subspace_of

STAGES = 4
LEARNING_RATE = 3e-3


@dataclass(frozen=True)
class Options:
    model: str = "tiny"
    """What is trained."""
    steps: int = 1000
    """Inner steps of each loss."""
    rate_mbit: float = 20.0
    """Each stage's link, each way."""
    batch_size: int = 8
    """Sequences of a step."""
    evaluate_every: int = 50
    """Steps between evaluations."""
    timed_steps: int = 24
    """Steps of the runs whose seconds are measured; 0 leaves them out."""
    divisors: tuple[int, ...] = (4, 8, 16)
    """The model's width over k."""
    kinds: tuple[str, ...] = ("subspace", "projection", "top-k")
    """Boundaries of k numbers a token, or as many bytes."""


SMOKE = Options(steps=2, evaluate_every=1, timed_steps=0, divisors=(4,), kinds=("subspace",))


def config_of(options: Options) -> Settings:
    """Of the runs that are made in one process."""
    return Settings.of(model=options.model, steps=options.steps, batch_size=options.batch_size, lr=LEARNING_RATE)


class Crossing(torch.autograd.Function):
    """A boundary within one process."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, boundary: Boundary, tokens: Tensor) -> Tensor:
        ctx.boundary = boundary
        return boundary.unpack(boundary.pack(hidden, tokens), tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.boundary.unpack_gradient(ctx.boundary.pack_gradient(gradients[0])), None, None


cross: Callable[[Tensor, Boundary, Tensor], Tensor] = Crossing.apply


class Chain:
    """The pieces of a model one after the other, with boundaries between them."""

    def __init__(self, config: Settings, kind: str, rank: int) -> None:
        settings = Language(config.workload).config
        self.spans = spans(*loads(models.outline(settings)), STAGES)
        self.subspace = subspace_of(settings, rank, config.run.seed) if kind == "subspace" else None
        self.pieces = [Piece(self.model(settings, span), span) for span in self.spans]
        self.shape = torch.Size((config.island.batch_size, config.workload.sequence_length, settings.hidden_size))
        self.boundary = boundary_of(kind, rank, self.shape, self.subspace)
        self.parameters = [p for piece in self.pieces for p in piece.model.parameters()]

    def model(self, settings: Any, span: Span | None) -> Any:
        """The whole model, or what is in a span."""
        model = models.outline(settings)
        if self.subspace:
            parts = anatomy(model)
            constrain(model, parts[parts.layers], self.subspace, self.spans[-1].begin)
        if span:
            keep(model, span)
        models.materialise(model, seed=0)
        return model.train()

    def streams(self, tokens: Tensor, lossy: bool = True) -> list[Tensor]:
        """What enters each piece but the first, and the logits."""
        passing, seen = tokens, []
        for piece in self.pieces:
            passing = piece(passing)
            if not piece.span.last and lossy:
                passing = cross(passing, self.boundary, tokens)
            seen.append(passing)
        return seen

    def loss(self, tokens: Tensor, lossy: bool = True) -> Tensor:
        """The mean loss of sequences."""
        logits = self.streams(tokens, lossy)[-1]
        loss: Tensor = self.pieces[-1].model.loss_function(logits=logits, labels=tokens, vocab_size=logits.shape[-1])
        return loss


def boundary_of(kind: str, rank: int, shape: torch.Size, subspace: Subspace | None) -> Boundary:
    """Of a subspace, or of its bytes otherwise spent."""
    wanted = shape[:-1].numel() * rank * 4
    if kind == "subspace":
        return Boundary(shape, Dense(), subspace)
    if kind == "projection":
        return Boundary(shape, Dense(), Subspace(shape[-1], rank, 256, 0.0, seed=0))
    if kind == "top-k":
        shares = (share / 1000 for share in range(1, 1000))
        fitting = [share for share in shares if Boundary(shape, TopK(share=share)).nbytes <= wanted]
        return Boundary(shape, TopK(share=fitting[-1]))
    return Boundary(shape, Quantize(bits=8) if kind == "int8" else Dense())


def exactness(config: Settings, rank: int) -> tuple[float, float, float]:
    """The largest differences of activations, of the loss, and of gradients (of their largest), to the whole model."""
    chain = Chain(config, "subspace", rank)
    whole = chain.model(Language(config.workload).config, None)
    expected: list[Tensor] = []
    for span in chain.spans[:-1]:
        whole.get_decoder().layers[span.end - 1].register_forward_hook(lambda _, __, out: expected.append(out.detach()))
    tokens = torch.randint(256, chain.shape[:-1], generator=torch.Generator().manual_seed(0))
    loss = models.sequence_loss(whole, tokens)
    loss.backward()
    seen = chain.streams(tokens)
    apart = max(float((a.detach() - b).abs().max()) for a, b in zip(seen[:-1], expected, strict=True))
    own = chain.loss(tokens)
    own.backward()
    gradients = {name: p.grad for piece in chain.pieces for name, p in piece.model.named_parameters()}
    wrong = max(float((gradients[n] - p.grad).abs().max() / p.grad.abs().max()) for n, p in whole.named_parameters())
    return apart, abs(float((own - loss).detach())), wrong


def trained(options: Options, kind: str, rank: int) -> Result:
    """The validation losses of a run, by step, and the bytes of a token at a boundary."""
    torch.set_num_threads(1)
    config = config_of(options)
    chain = Chain(config, kind, rank)
    workload = Language(config.workload)
    texts = workload.data.held_out(64)
    assert isinstance(texts, torch.Tensor)
    held_out = texts.split(options.batch_size)
    optimizer = torch.optim.AdamW(chain.parameters, lr=LEARNING_RATE, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
    losses = {}
    for step in range(options.steps):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * lr_scale(config.inner, step, config.run.steps)
        chain.loss(workload.batch(workload.sample_ids(0, 0, step, options.batch_size))).backward()
        torch.nn.utils.clip_grad_norm_(chain.parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % options.evaluate_every == 0:
            with torch.no_grad():
                losses[str(step + 1)] = sum(float(chain.loss(part)) for part in held_out) / len(held_out)
    return {"losses": losses, "bytes": chain.boundary.nbytes / chain.shape[:-1].numel()}


def step_seconds(options: Options, store: Store, boundary: str) -> float:
    """What a step takes with each stage on a host of its own."""
    settings = {"model": options.model, "replicas": 1, "stages": STAGES, "method": "local", "clip": 0, "log_every": 1}
    settings |= {"steps": options.timed_steps, "boundary": boundary, "batch_size": options.batch_size}
    settings |= {"microbatches": 8, "eval_every": 1000, "eval_sequences": 8, "checkpoint_every": 0}

    def measured() -> Result:
        folder = store.scratch / f"timed-{boundary}"
        shutil.rmtree(folder, ignore_errors=True)
        with NetLab(STAGES, options.rate_mbit) as lab:
            command = ["-m", "farflung", "train", *flags(settings | {"out": folder})]
            torch_everywhere(lab.hosts, command, timeout_s=600)
        return {"seconds": options.batch_size * 128 / Finished(read_run(folder)).tokens_per_second}

    return float(store.once(settings | {"rate_mbit": options.rate_mbit}, 0, measured)["seconds"])


def run(options: Options, store: Store) -> Iterator[Part]:
    width = Language(config_of(options).workload).config.hidden_size
    ranks = [width // divisor for divisor in options.divisors]
    yield f"{options.model}, width {width}, {STAGES} stages"
    yield Table(
        {"k": "d", "activations": ".1e", "loss": ".1e", "gradients, of the largest": ".1e"},
        ((rank, *exactness(config_of(options), rank)) for rank in ranks),
        "1. the wire: largest difference to the model in one piece",
    )
    runs = all_trained(options, store, ranks)
    yield Table(
        {"": "", "k": "d", "bytes a token": ".1f", "loss": ".4f"},
        [(kind, k or None, run["bytes"], run["losses"][str(options.steps)]) for (kind, k), run in runs.items()],
        f"2. validation loss after {options.steps} steps",
    )
    if not options.timed_steps:
        return
    if reason := unavailable():
        yield f"3. time to a loss: not measured, since {reason}"
    else:
        yield times(options, store, ranks, runs)


def all_trained(options: Options, store: Store, ranks: list[int]) -> dict[tuple[str, int], Result]:
    """Every kind of boundary's run, as many at a time as there are cores."""
    kinds = [("unconstrained", 0), ("int8", 0), *((kind, k) for k in ranks for kind in options.kinds)]
    settings = {"model": options.model, "steps": options.steps, "batch_size": options.batch_size}
    keys = {(kind, k): settings | {"kind": kind, "rank": k} for kind, k in kinds}
    missing = [key for key in kinds if not store.results(keys[key])]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        made = pool.map(trained, [options] * len(missing), *zip(*missing, strict=True)) if missing else []
        for key, result in zip(missing, made, strict=True):
            store.keep(keys[key], 0, result)
    return {key: store.results(keys[key])[0] for key in kinds}


def times(options: Options, store: Store, ranks: list[int], runs: dict[tuple[str, int], Result]) -> Table:
    """Seconds to each rival's loss."""
    rivals = {"int8": ("int8", 0), **{f"subspace{rank}": ("subspace", rank) for rank in ranks}}
    targets = sorted(runs[key]["losses"][str(options.steps)] for key in rivals.values())

    def row(name: str, key: tuple[str, int]) -> tuple[Cell, ...]:
        seconds = step_seconds(options, store, name)
        cells = []
        for target in targets:
            steps = next((int(step) for step, loss in runs[key]["losses"].items() if loss <= target), None)
            cells.append(f"{steps} steps, {steps * seconds:.0f} s" if steps else "not reached")
        return name, seconds, *cells

    return Table(
        {"boundary": "", "s a step": ".3f", **{f"to {target:.6f}": "" for target in targets}},
        (row(name, key) for name, key in rivals.items()),
        f"3. time to a loss, a link of {options.rate_mbit:g} Mbit/s for each stage",
    )
