"""The subspace codec: exact on the wire, what the constraint costs, and when it pays on a slow link.

    python bench/subspace.py [--steps 1000] [--out runs/bench-subspace]

1. Four stages whose boundaries carry k numbers a token, against the same model in one piece.
2. Loss after the same steps at equal bytes: subspace, random projection and top-k, and the unconstrained model.
3. Time to a loss when each stage has a link of its own of `rate-mbit`: seconds a step are those of real processes in
   network namespaces (needs root; see netlab.py), steps those of table 2.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import tyro
from real import Finished, flags
from torch import Tensor

from farflung.codecs import Dense, Quantize, TopK
from farflung.pipeline.balance import spans
from farflung.pipeline.boundaries import Boundary
from farflung.report.read import read_run
from farflung.settings import Settings
from farflung.training.learning_rate import lr_scale
from farflung.workloads import Language, models
from farflung.workloads.base import Span
from farflung.workloads.decoder import Piece, anatomy, keep, loads
from farflung.workloads.subspace import Subspace, constrain, subspace_of

STAGES = 4
EVALUATE_EVERY = 50


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
    out: Path = Path("runs/bench-subspace")
    """Where losses are kept."""


class Crossing(torch.autograd.Function):
    """A boundary within one process."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, boundary: Boundary, tokens: Tensor) -> Tensor:
        ctx.boundary = boundary
        return boundary.unpack(boundary.pack(hidden, tokens), tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.boundary.unpack_gradient(ctx.boundary.pack_gradient(gradients[0])), None, None


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
                passing = Crossing.apply(passing, self.boundary, tokens)
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


def trained(options: Options, kind: str, rank: int) -> dict[str, Any]:
    """The validation losses of a run, by step, and the bytes of a token at a boundary; each is made only once."""
    path = options.out / f"{kind}-{rank}-{options.steps}.json"
    if path.exists():
        return json.loads(path.read_text())  # type: ignore[no-any-return]
    torch.set_num_threads(1)
    config = Settings.of(model=options.model, steps=options.steps, batch_size=options.batch_size, lr=3e-3)
    chain = Chain(config, kind, rank)
    workload = Language(config.workload)
    held_out = workload.data.held_out(64).split(options.batch_size)
    optimizer = torch.optim.AdamW(chain.parameters, lr=config.inner.lr, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
    losses = {}
    for step in range(options.steps):
        optimizer.param_groups[0]["lr"] = config.inner.lr * lr_scale(config.inner, step, config.run.steps)
        chain.loss(workload.batch(workload.sample_ids(0, 0, step, options.batch_size))).backward()
        torch.nn.utils.clip_grad_norm_(chain.parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % EVALUATE_EVERY == 0:
            with torch.no_grad():
                losses[step + 1] = sum(float(chain.loss(part)) for part in held_out) / len(held_out)
    result = {"losses": losses, "bytes": chain.boundary.nbytes / chain.shape[:-1].numel()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result))
    return json.loads(json.dumps(result))  # type: ignore[no-any-return]


def step_seconds(options: Options, boundary: str, batch_size: int) -> float:
    """What a step takes with each stage on a host of its own."""
    from netlab import NetLab

    folder = options.out / f"timed-{boundary}-{options.rate_mbit:g}"
    if not (folder / "summary.json").exists():
        settings = {"model": options.model, "replicas": 1, "stages": STAGES, "method": "local", "steps": 24, "clip": 0}
        settings |= {"boundary": boundary, "batch_size": batch_size, "microbatches": 8, "log_every": 1}
        settings |= {"eval_every": 1000, "eval_sequences": 8, "checkpoint_every": 0, "out": folder}
        with NetLab(STAGES, options.rate_mbit) as lab:
            lab.torch_everywhere(["-m", "farflung", "train", *flags(settings)], timeout=600)
    finished = Finished(read_run(folder))
    return batch_size * 128 / finished.tokens_per_second


def main(options: Options) -> None:
    config = Settings.of(model=options.model, steps=options.steps, batch_size=options.batch_size, lr=3e-3)
    width = Language(config.workload).config.hidden_size
    ranks = (width // 4, width // 8, width // 16)
    print(
        f"{options.model}, width {width}, {STAGES} stages\n\n1. the wire: largest difference to the model in one piece"
    )
    print(f"{'k':>4} {'activations':>12} {'loss':>9} {'gradients, of the largest':>26}")
    for rank in ranks:
        apart, loss, gradients = exactness(config, rank)
        print(f"{rank:4} {apart:12.1e} {loss:9.1e} {gradients:26.1e}")

    kinds = [
        ("unconstrained", 0),
        ("int8", 0),
        *((kind, k) for k in ranks for kind in ("subspace", "projection", "top-k")),
    ]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        runs = dict(zip(kinds, pool.map(trained, [options] * len(kinds), *zip(*kinds, strict=True)), strict=True))
    print(f"\n2. validation loss after {options.steps} steps\n{'':14} {'k':>4} {'bytes a token':>14} {'loss':>8}")
    for (kind, rank), run in runs.items():
        print(f"{kind:14} {rank or '':4} {run['bytes']:14.1f} {run['losses'][str(options.steps)]:8.4f}")

    print(f"\n3. time to a loss, a link of {options.rate_mbit:g} Mbit/s for each stage")
    rivals = {"int8": ("int8", 0), **{f"subspace{rank}": ("subspace", rank) for rank in ranks}}
    seconds = {name: step_seconds(options, name, options.batch_size) for name in rivals}
    targets = [run["losses"][str(options.steps)] for key, run in runs.items() if key in rivals.values()]
    print(f"{'boundary':12} {'s a step':>9} " + " ".join(f"{f'to {target:.3f}':>22}" for target in sorted(targets)))
    for name, key in rivals.items():
        cells = []
        for target in sorted(targets):
            steps = next((int(step) for step, loss in runs[key]["losses"].items() if loss <= target), None)
            cells.append(f"{steps} steps, {steps * seconds[name]:.0f} s" if steps else "not reached")
        print(f"{name:12} {seconds[name]:9.3f} " + " ".join(f"{cell:>22}" for cell in cells), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__, args=sys.argv[1:]))
