"""What a step takes, part by part, measured in a few seconds and in little memory: one layer of each kind at a time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from farflung.hooks.layouts import is_sharded
from farflung.hooks.shards import gathered, own_of
from farflung.memory import modes
from farflung.memory.buffers import buffers_of, having
from farflung.memory.calls import Seen, calls_of, kind_of
from farflung.memory.copies import Copies
from farflung.memory.measure import Held, Saved, bytes_of, staying, tensors_in
from farflung.memory.plan import LayerCost, Profile

TIMES = 2
"""How often each thing is timed; the fastest counts."""
COPIED = 1 << 25
"""Bytes that are copied, each way, to find how fast that is."""

AHEAD = 2
"""How many more layers' weights a GPU has whole: those that FSDP2 gathers next, and gradients that it shares out."""

SLICE = 1 << 22
"""Values of each parameter outside of the layers that the optimizer's step is timed with: embeddings may be large."""

Make = Callable[[Sequence[tuple[str, nn.Parameter]]], Optimizer]
"""Makes an inner optimizer of named parameters."""


@dataclass(frozen=True)
class Sharded:
    """A model that FSDP2 shards: `root` computes, and `rows` are what is stepped here of each of its parameters."""

    root: nn.Module
    rows: Mapping[nn.Parameter, nn.Parameter]


@dataclass(frozen=True)
class Model:
    """What is measured: a model's `layers` in their order, what computes the loss of a batch, and its optimizer.

    `in_flight` are the forward passes that wait for their backward passes, at most. A model that is `sharded` is
    measured by all who have shards of it at once, and shows its shards whenever nobody computes with it. Layers are
    `compiled` where they are to be called so.
    """

    whole: nn.Module
    layers: Sequence[nn.Module]
    loss: Callable[[], Tensor]
    make: Make
    device: torch.device
    in_flight: int = 1
    sharded: Sharded | None = None
    compiled: bool = False

    @property
    def root(self) -> nn.Module:
        """The module that holds all of it."""
        return self.sharded.root if self.sharded else self.whole

    def named(self, layer: nn.Module) -> dict[str, nn.Parameter]:
        """A layer's trained parameters, by their names in the model."""
        return {name: parameter for name, parameter in self.own(layer).items() if parameter.requires_grad}

    def own(self, layer: nn.Module) -> dict[str, nn.Parameter]:
        """A layer's parameters, by their names in the model; of shards the rows here."""
        rows = self.sharded.rows if self.sharded else {}
        own = {id(rows.get(parameter, parameter)) for parameter in layer.parameters()}
        return {name: p for name, p in self.whole.named_parameters() if id(p) in own}

    def together(self, layer: nn.Module) -> dict[str, Tensor]:
        """Tensors like those of a layer's trained parameters, by name, of which this process has rows: all of each."""
        rows = self.sharded.rows if self.sharded else {}
        names = {id(parameter): name for name, parameter in self.named(layer).items()}
        own = [(names.get(id(rows.get(whole))), whole) for whole in layer.parameters()]
        return {name: torch.zeros(p.shape, dtype=p.dtype, device=self.device) for name, p in own if name}


def profiled(model: Model, copies: Copies, passes: int = 1) -> Profile:
    """What a model's step takes: one of its `passes` forward and backward, and the optimizer's step.

    Of what the device holds all the time, beside weights, gradients and moments, only what a layer computes with counts
    in. It computes gradients of its own, and leaves weights, buffers, gradients and random numbers as they are. Raises
    UserError for layers that cannot be measured alone.
    """
    with torch.random.fork_rng(), _without_gradients(model.root), having(buffers_of(model.root)):
        seen, casts_again = calls_of(model.layers, model.loss, model.device)
        kinds = {key: number for number, key in reversed([*enumerate(map(kind_of, model.layers, seen))])}
        measured = {key: _layer(model, model.layers[number], seen[number], passes) for key, number in kinds.items()}
        # What is in no layer is whole from pass to pass, and so are its gradients.
        outside = whole_bytes(model.root) - sum(map(whole_bytes, model.layers))
        working = 2 * outside + max(one.working for one in measured.values())
        first, last = _ends(model, seen, working)
    costs = [measured[kind_of(layer, one)].cost for layer, one in zip(model.layers, seen, strict=True)]
    first, *costs = (replace(cost, step_bytes=max(cost.step_bytes - working, 0)) for cost in (first, *costs))
    out_s, in_s = _speeds(copies, model.device)
    if model.device.type == "cpu":  # whose far state comes from files, and goes there
        costs = [through_files(cost, out_s, in_s) for cost in costs]
    return Profile(
        layers=tuple(costs),
        before=first,
        head=last,
        out_bytes_s=out_s,
        in_bytes_s=in_s,
        fixed_bytes=working,
        beside=False,
        in_flight=model.in_flight,
        passes=passes,
        casts_again=casts_again,
    )


def whole_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters, of which this process has shards, while they are gathered."""
    return bytes_of(parameter for parameter in module.parameters() if is_sharded(parameter))


def through_files(cost: LayerCost, out_bytes_s: float, in_bytes_s: float) -> LayerCost:
    """A layer whose gradients and moments come from files before a step of its far optimizer, and its moments go."""
    seconds = (cost.gradient_bytes + cost.moment_bytes) / in_bytes_s + cost.moment_bytes / out_bytes_s
    return replace(cost, far_step_s=cost.far_step_s + seconds)


@dataclass(frozen=True)
class Measured:
    """A layer's cost, and what it holds at most besides what it saves."""

    cost: LayerCost
    working: int


@contextlib.contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """A context that leaves no gradients."""
    try:
        yield
    finally:
        for parameter in model.parameters():
            parameter.grad = None


def _layer(model: Model, layer: nn.Module, seen: Seen, passes: int) -> Measured:
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    entering = seen.args[0].detach().requires_grad_()

    def forward() -> list[Tensor]:
        with torch.autocast(model.device.type, **seen.autocast):
            output = layer(entering, *seen.args[1:], **seen.given)
        return [tensor for tensor in tensors_in(output) if tensor.requires_grad]

    def backward(leaving: Sequence[Tensor]) -> None:
        torch.autograd.backward(leaving, [*map(torch.ones_like, leaving)])
        for parameter in (entering, *trained):
            parameter.grad = None

    with gathered(layer):  # whose weights lie in the same storages each time
        stays = staying(layer, (seen.args[1:], seen.given))
    saved = Saved(stays)
    with saved, Held() as held:  # computed as it is, since nothing is seen of what compiled layers hold meanwhile
        backward(forward())
    working = max(held.most - saved.bytes, 0)
    with modes.computing(layer, modes.forward_of(layer, model.compiled)):
        if model.compiled:
            backward(forward())
            saved = Saved(stays)
            with saved:
                backward(forward())
        forward_s, backward_s = _timed(forward, backward, model.device)
        now = partial(_now, model.device)
        again_s = min(modes.again(layer, now, lambda: backward(forward()))[1] for _ in range(TIMES))
    state = _state(model, model.named(layer))
    # Muon brings matrices together of which processes have rows.
    state["step_bytes"] += _stepping(model.make, model.together(layer), model.device)[2]
    weights, whole = bytes_of(own_of(p) for p in layer.parameters()), whole_bytes(layer)
    if whole and passes > 1:  # gradients are summed up before they are shared out
        state["gradient_bytes"] = whole
    times, entered = seen.times, entering.untyped_storage().nbytes()
    state["spared_s"] = times * (forward_s - again_s)
    cost = LayerCost(times * forward_s, times * backward_s, times * saved.bytes, times * entered, weights, **state)
    gathers = whole * (1 + AHEAD * (model.device.type == "cuda"))
    return Measured(cost, working + gathers)


def _timed(
    forward: Callable[[], list[Tensor]], backward: Callable[[Sequence[Tensor]], None], device: torch.device
) -> tuple[float, float]:
    """The least seconds of each."""
    times = []
    for _ in range(TIMES):
        began = _now(device)
        leaving = forward()
        middle = _now(device)
        backward(leaving)
        times.append((middle - began, _now(device) - middle))
    forward_s, backward_s = (min(each) for each in zip(*times, strict=True))
    return forward_s, backward_s


def _state(model: Model, named: Mapping[str, nn.Parameter], most: int | None = None) -> dict[str, Any]:
    """What the optimizer's step of some parameters takes, and the bytes of its moments and gradients.

    Of each it steps a copy, or one of its first rows, of about `most` values, and reckons the rest like these.
    """
    whole = {name: own_of(parameter).detach() for name, parameter in named.items()}
    rows = {name: own[: max(1, most // own[0].numel())] if most and own.dim() else own for name, own in whole.items()}
    near_s, moments, held = _stepping(model.make, rows, model.device)
    far_s = near_s if model.device.type == "cpu" else _stepping(model.make, rows, torch.device("cpu"))[0]
    gradients = bytes_of(whole.values())
    share = max(bytes_of(rows.values()), 1) / max(gradients, 1)
    return {
        "gradient_bytes": gradients,
        "moment_bytes": round(moments / share),
        "near_step_s": near_s / share,
        "far_step_s": far_s / share,
        "step_bytes": round(held / share),
    }


def _stepping(make: Make, rows: Mapping[str, Tensor], device: torch.device) -> tuple[float, int, int]:
    """The least seconds of a step of copies of tensors on a device, and bytes: of their moments, and held besides."""
    copies = [(name, nn.Parameter(own.to(device, copy=True))) for name, own in rows.items()]
    if not copies:
        return 0.0, 0, 0
    optimizer, times = make(copies), []
    for _, parameter in copies:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # which makes its moments
    with Held() as held:
        optimizer.step()
    for _ in range(TIMES):
        began = _now(device)
        optimizer.step()
        times.append(_now(device) - began)
    moments = bytes_of(tensors_in([optimizer.state[parameter] for _, parameter in copies]))
    return min(times), moments, held.most


@dataclass
class Marks:
    """When the loss is computed without its layers: seconds, and bytes saved so far, at each of some moments."""

    device: torch.device
    saved: Saved
    at: dict[str, tuple[float, int]] = field(default_factory=dict)

    def note(self, moment: str, *_: Any) -> None:
        """Notes it, the first time."""
        self.at.setdefault(moment, (_now(self.device), self.saved.bytes))

    def between(self, begin: str, end: str) -> tuple[float, int]:
        """Seconds, and bytes, from one moment to another."""
        (before_s, before), (after_s, after) = self.at[begin], self.at[end]
        return max(after_s - before_s, 0.0), after - before


def _ends(model: Model, seen: Sequence[Seen], working: int) -> tuple[LayerCost, LayerCost]:
    """What lies before the layers, and after them: measured as if there were no layers between."""
    layered = {name for layer in model.layers for name in model.own(layer)}
    others = {name: p for name, p in model.whole.named_parameters() if name not in layered}
    aside = _wants_more(model, seen)
    with Held() as held:
        _marked(model, seen, aside)
    marks = _marked(model, seen, aside)
    forward, backward = marks.between("begin", "first"), marks.between("entered", "end")
    state = _state(model, {name: p for name, p in others.items() if p.requires_grad}, SLICE)
    weights = bytes_of(own_of(p) for p in others.values())
    before = LayerCost(forward[0], backward[0], forward[1], 0, weights, **state)
    head_forward, head_backward = marks.between("last", "loss"), marks.between("loss", "left")
    # At its peak it holds gradients of its own beside what it saves.
    saved = max(head_forward[1], held.most - forward[1] - working - state["gradient_bytes"])
    none = LayerCost(0.0, 0.0, 0, 0, 0, 0, 0, 0.0, 0.0)
    return before, replace(none, forward_s=head_forward[0], backward_s=head_backward[0], saved_bytes=saved)


def _wants_more(model: Model, seen: Sequence[Seen]) -> bool:
    """Warms up, and finds out whether the loss takes more from layers than what they return, such as routers' loads."""
    try:
        _marked(model, seen, aside=False)
    except Exception:
        _marked(model, seen, aside=True)
        return True
    return False


def _marked(model: Model, seen: Sequence[Seen], aside: bool) -> Marks:
    """A forward and backward pass in which layers pass on what enters them; with `aside` they compute besides."""
    with gathered(model.root):
        saved = Saved(staying(model.root, ()))
    marks, last = Marks(model.device, saved), len(model.layers) - 1

    def passing(number: int, forward: Callable[..., Any], entering: Tensor, *args: Any, **given: Any) -> Any:
        if aside:
            with torch.no_grad(), _disable_current_modes():
                forward(entering, *args, **given)
        if number == 0:
            marks.note("first")
            if not entering.requires_grad:
                entering = entering.detach().requires_grad_()
            entering.register_hook(partial(marks.note, "entered"))
        if number == last:
            marks.note("last")
            entering = entering * 1.0  # so that its gradient is told apart
            if entering.requires_grad:
                entering.register_hook(partial(marks.note, "left"))
        elif entering._is_view():  # of which FSDP2 warns
            entering = entering * 1.0
        return seen[number].returned(entering)

    with contextlib.ExitStack() as stack:
        for number, layer in enumerate(model.layers):
            stack.enter_context(modes.computing(layer, partial(passing, number, layer.forward)))
        with saved:
            marks.note("begin")
            loss = model.loss()
            for moment in ("first", "last", "loss"):  # where some layers were left out
                marks.note(moment)
        loss.backward()
        for moment in ("left", "entered", "end"):  # where nothing before the layers is trained
            marks.note(moment)
    return marks


def _speeds(copies: Copies, device: torch.device) -> tuple[float, float]:
    """Bytes a second out and back, both ways at once."""
    near = [torch.zeros(COPIED, dtype=torch.uint8, device=device) for _ in range(2)]
    slots = [copies.far.take(COPIED) for _ in range(2)]
    copies.out(slots[1], near[1])()
    fastest = [float("inf")] * 2
    for _ in range(TIMES):
        began = _now(device)
        arrivals = [copies.out(slots[0], near[0]), copies.back(slots[1], near[1])]
        for way, arrival in enumerate(arrivals):
            arrival()
            fastest[way] = min(fastest[way], _now(device) - began)
    for slot in slots:
        copies.far.give(COPIED, slot)
    return COPIED / fastest[0], COPIED / fastest[1]


def _now(device: torch.device) -> float:
    """Seconds, once a device has computed all that it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
