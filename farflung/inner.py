"""Inner optimizers: what one replica's ordinary steps are made with."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import nn

from farflung.adamw import SLOW, checked, loss_of, mixed, refuse_sparse, step_each
from farflung.adamw import PrimalAveraging as PrimalAveraging
from farflung.adamw import SlowAdamW as SlowAdamW
from farflung.errors import UserError
from farflung.hooks.layouts import FullySharded, Layout, is_sharded
from farflung.hooks.shards import own_of
from farflung.hooks.wholes import Wholes, portions

Scale = Literal["rms", "fans"]
"""What the size of Muon's steps follows from."""

MEAN_STEP = "mean_step"
"""What the last round's mean step, divided by the learning rate, is called in an optimizer's state."""

TOGETHER = 1 << 22
"""The most values of matrices that Muon works on at once; of larger ones it takes one after the other."""


@dataclass(frozen=True)
class Inner:
    """An inner optimizer: what makes it of named parameters, `lr` and `weight_decay`, and its usual learning rate."""

    make: Callable[..., torch.optim.Optimizer]
    lr: float
    settings: tuple[str, ...] = ()
    """What else `make` may be given."""

    def having(self, **chosen: Any) -> Inner:
        """The same with other settings, by their flags; None leaves one as it is. Raises UserError if it has none."""
        given = {name: value for name, value in chosen.items() if value is not None}
        if unknown := [name for name in given if name.removeprefix("muon_") not in self.settings]:
            name, others = unknown[0], "Muon has" if unknown[0].startswith("muon_") else "Muon and AdamW have"
            raise UserError(f"{name} is {given[name]}, which only {others}; leave it out, or use muon")
        given = {name.removeprefix("muon_"): value for name, value in given.items()}
        return replace(self, make=partial(self.make, **given)) if given else self


def _adamw(named: Any, slow_share: float = 0.0, slow_momentum: float = 0.999, **settings: Any) -> torch.optim.Optimizer:
    if slow_share:
        betas = (0.9, max(0.95, slow_momentum))  # sizes forgotten sooner would leave it to be divided by nothing
        return SlowAdamW(named, betas=betas, slow_share=slow_share, slow_momentum=slow_momentum, **settings)
    return torch.optim.AdamW(named, betas=(0.9, 0.95), fused=True, **settings)


_OF_SLOW = ("slow_share", "slow_momentum")
ADAMW = Inner(_adamw, lr=3e-3, settings=_OF_SLOW)


class SignSGD(torch.optim.Optimizer):
    """DeMo's (arXiv 2411.19870), which keeps nothing: θ ← θ - lr · (sign(gradient) + weight decay · θ)."""

    def __init__(self, parameters: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, checked({"lr": lr, "weight_decay": weight_decay}))

    def step(self, closure: Any = None) -> Any:
        """One step; parameters without a gradient stay. Returns what the closure, if there is one, returns."""
        return step_each(self, closure, self._move)

    def _move(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        own_of(parameter).mul_(1 - group["lr"] * group["weight_decay"]).add_(gradient.sign(), alpha=-group["lr"])


class Along(TypedDict, total=False):
    """What Muon's steps follow besides gradients and their mean.

    Args:
        slow_share: the part of a slow momentum in what is made orthogonal, as in SlowAdamW; 0 keeps none.
        slow_momentum: of that.
        align: the part of a step that follows the last round's mean step, where rounds tell it (outer.AlignedSteps).
    """

    slow_share: float
    slow_momentum: float
    align: float


ALONG = Along(slow_share=0.0, slow_momentum=0.999, align=0.0)


class Muon(torch.optim.Optimizer):
    """For matrices: steps along the orthogonal factor of the gradients' mean, by default with Nesterov's momentum.

    Matrices of one shape are orthogonalised together. Those that FSDP2 has sharded come together whole, each in one of
    the processes, which must all step alike. On processors, unlike `torch.optim.Muon`, it computes in float32: most of
    them have no bfloat16 and are ten times as slow with it.

    Args:
        matrices: named ones, or not.
        lr: the learning rate.
        weight_decay: as AdamW's.
        momentum: of the gradients' mean.
        nesterov: whether it looks ahead: along lerp(gradient, mean, momentum), and not along the mean.
        scale: "rms" makes steps as large as AdamW's, 0.2·√max(rows, columns), so that one learning rate serves both
            (arXiv 2502.16982); "fans" makes them √(rows / columns), as in MuLoCo (arXiv 2505.23725).
        along: what else steps follow, as in Along.

    Raises TypeError for other settings.
    """

    wholes: Wholes | None = None
    """What brings matrices together of which this process has rows; None where they are whole."""

    def __init__(
        self,
        matrices: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        scale: Scale = "rms",
        **along: Unpack[Along],
    ) -> None:
        if unknown := along.keys() - ALONG.keys():
            raise TypeError(f"Muon has no setting {unknown.pop()!r}")
        if scale not in _SIZES:
            raise UserError(f"scale is {scale!r}; choose one of {', '.join(_SIZES)}")
        chosen = {"momentum": momentum, "nesterov": nesterov, "scale": scale, **ALONG, **along}
        super().__init__(matrices, checked({"lr": lr, "weight_decay": weight_decay, **chosen}))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """For copies, pickles and states, also those of versions that had fewer settings."""
        super().__setstate__(state)
        _fill_in(self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See Optimizer. Raises UserError for what is no matrix."""
        super().add_param_group(param_group)
        for name, parameter in next(_named_by_group(self.param_groups[-1:]))[1].items():
            if parameter.ndim != 2:
                self.param_groups.pop()
                raise UserError(
                    f"Muon is for matrices, but parameter {name} has {parameter.ndim} dimensions; give it to another "
                    "optimizer, or all of them to MuonAdamW"
                )
        self.wholes = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step; matrices without a gradient stay. Returns what the closure, if there is one, returns.

        Raises UserError where matrices are divided, but not by their rows, and PeerLostError where a shard is lost.
        """
        loss = loss_of(closure)
        groups = list(_named_by_group(self.param_groups))
        everything = {name: parameter for _, named in groups for name, parameter in named.items()}
        if self.wholes is None and any(map(is_sharded, everything.values())):
            self.wholes = Wholes(FullySharded(everything), everything)
        like = next((own_of(p.grad) for p in everything.values() if p.grad is not None), torch.zeros(0))
        for names in self._portions(everything):
            some = [(group, {name: named[name] for name in names if name in named}) for group, named in groups]
            updates: dict[str, torch.Tensor] = {}
            for group, named in some:
                updates |= self._means(group, named)
            if self.wholes:
                self.wholes(names, updates, like, orthogonal)
            else:
                updates = dict(zip(updates, orthogonal(list(updates.values())), strict=True))
            for group, named in some:
                self._move(group, named, updates)
        return loss

    def _portions(self, everything: Mapping[str, nn.Parameter]) -> list[list[str]]:
        """The names of matrices that are worked on together: what that takes besides is then little.

        On processors they are of one layer, which so steps as it does alone, to the bit: rounding depends on how many
        matrices there are.
        """
        if self.wholes:
            return self.wholes.portions(TOGETHER)
        layers: dict[str, list[str]] = {}
        for name, parameter in everything.items():
            layers.setdefault(_layer_of(name) if parameter.device.type == "cpu" else "", []).append(name)
        alike = (sorted(names, key=lambda name: sorted(everything[name].shape)) for names in layers.values())
        return [one for names in alike for one in portions({n: everything[n].numel() for n in names}, TOGETHER)]

    def _means(self, group: dict[str, Any], named: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
        """The gradients' means, as Nesterov's momentum looks ahead if it does, of this process's rows."""
        gradients, means = {}, []
        for name, parameter in named.items():
            if parameter.grad is not None:
                refuse_sparse(self, parameter.grad)
                state = self.state[parameter]
                if "momentum_buffer" not in state:  # a round may have told it the mean step before
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                gradients[name] = own_of(parameter.grad)
                means.append(own_of(state["momentum_buffer"]))
        if not gradients:
            return {}
        each = list(gradients.values())
        torch._foreach_lerp_(means, each, 1 - group["momentum"])
        # Copies: what comes together whole is written over.
        ahead = torch._foreach_lerp(each, means, group["momentum"] if group["nesterov"] else 1.0)
        if group["slow_share"]:
            each_ahead = zip(gradients.items(), ahead, strict=True)
            return {name: self._with_slow(group, named[name], own, one) for (name, own), one in each_ahead}
        return dict(zip(gradients, ahead, strict=True))

    def _with_slow(
        self, group: dict[str, Any], parameter: nn.Parameter, gradient: torch.Tensor, ahead: torch.Tensor
    ) -> torch.Tensor:
        """The mix of a mean with the slow momentum, which goes on."""
        state = self.state[parameter]
        if SLOW not in state:
            state[SLOW] = torch.zeros_like(parameter)
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        state["step"] += 1
        slow = own_of(state[SLOW]).lerp_(gradient, 1 - group["slow_momentum"])
        return mixed(ahead, group["momentum"], slow, group, float(state["step"]))

    def _move(
        self, group: dict[str, Any], named: Mapping[str, nn.Parameter], updates: Mapping[str, torch.Tensor]
    ) -> None:
        moved = {name: parameter for name, parameter in named.items() if parameter.grad is not None}
        if moved:
            shapes = self.wholes.shapes if self.wholes else {name: p.shape for name, p in moved.items()}
            weights = [own_of(parameter) for parameter in moved.values()]
            size = _SIZES[group["scale"]]
            sizes = [-group["lr"] * size(*shapes[name]) for name in moved]
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            steps = torch._foreach_mul([updates[name] for name in moved], sizes)
            for step, parameter in zip(steps, moved.values(), strict=True) if group["align"] else ():
                if (mean := self.state[parameter].get(MEAN_STEP)) is not None:
                    step.lerp_(-group["lr"] * own_of(mean), group["align"])
            torch._foreach_add_(weights, steps)


_SIZES: dict[str, Callable[[int, int], float]] = {
    "rms": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
    "fans": lambda rows, columns: (rows / max(columns, 1)) ** 0.5,
}


def _fill_in(groups: Iterable[dict[str, Any]]) -> None:
    """Gives Muon's groups the settings that the version before did not have."""
    for group in groups:
        if "momentum" in group:
            group.setdefault("nesterov", True)
            group.setdefault("scale", "rms")
            group.update({name: group.get(name, value) for name, value in ALONG.items()})


def _named_by_group(groups: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, nn.Parameter]]]:
    """Groups with their parameters by name, or by number where they were given without; no name comes twice."""
    numbers, known = map(str, itertools.count()), set[str]()
    for group in groups:
        named: dict[str, nn.Parameter] = {}
        for name, parameter in zip(group.get("param_names") or numbers, group["params"], strict=False):
            named[name if name not in known else f"{name} of {len(known)}"] = parameter
            known.update(named)
        yield group, named


def _layer_of(name: str) -> str:
    """A parameter's name up to the number of its layer, if it has one."""
    found = re.match(r"(?:[^.]*\.)*?\d+\.", name)
    return found[0] if found else ""


def orthogonal(matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """About U Vᵀ of each matrix U S Vᵀ, of its shape, dtype and device; those of one shape, or turned, together."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for number, matrix in enumerate(matrices):
        alike.setdefault((*sorted(matrix.shape), matrix.dtype, matrix.device), []).append(number)
    found = list(matrices)
    for (rows, *_), numbers in alike.items():
        wide = [matrices[n] if matrices[n].shape[0] == rows else matrices[n].T for n in numbers]
        for number, done in zip(numbers, newton_schulz(torch.stack(wide)).to(wide[0].dtype), strict=True):
            found[number] = done if matrices[number].shape[0] == rows else done.T
    return found


def newton_schulz(wide: torch.Tensor) -> torch.Tensor:
    """About U Vᵀ of matrices U S Vᵀ (n, rows, columns ≥ rows): five steps, with the coefficients known from Muon.

    On processors in float32, elsewhere in bfloat16, which the result has.
    """
    own, of_gram, of_square = 3.4445, -4.7750, 2.0315
    near = wide.to(torch.float32 if wide.device.type == "cpu" else torch.bfloat16)
    near = near / torch.linalg.vector_norm(near, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = near @ near.mT
        near = torch.baddbmm(near, torch.baddbmm(gram, gram, gram, beta=of_gram, alpha=of_square), near, beta=own)
    return near


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the matrices of a model's layers, AdamW for all else: embeddings, head, norms, biases.

    A matrix is a layer's where its name has a number in it, as those in an `nn.ModuleList` have. Settings besides the
    learning rate and the weight decay are Muon's.
    """

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], lr: float = 1e-3, weight_decay: float = 0.1, **of_muon: Any
    ) -> None:
        self._parts: list[torch.optim.Optimizer] = []
        self._of_muon = of_muon
        super().__init__(named, {"lr": lr, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds named parameters, as one group for Muon and one for AdamW. Raises UserError where names are missing."""
        named = list(param_group["params"])
        if not all(isinstance(entry, tuple) for entry in named):
            raise UserError("MuonAdamW tells a layer's matrices by their names; give it model.named_parameters()")
        settings = {**self.defaults, **{key: value for key, value in param_group.items() if key != "params"}}
        of_slow = {name: value for name, value in self._of_muon.items() if name in _OF_SLOW}
        kinds: list[tuple[Callable[..., torch.optim.Optimizer], bool]]
        kinds = [(partial(Muon, **self._of_muon), True), (partial(ADAMW.make, **of_slow), False)]
        for kind, of_layers in kinds:
            if chosen := [(name, p) for name, p in named if _is_matrix_of_layer(name, p.ndim) is of_layers]:
                part = kind(chosen, **settings)
                super().add_param_group(part.param_groups[0])
                self._parts.append(part)
        self._share()

    def lie_in(self, layout: Layout) -> None:
        """Tells it that it has rows of a layout's matrices; all processes that swap there must then step alike."""
        shapes = {name: shape for name, shape in layout.outline.items() if name in layout.here}
        for part in self._parts:
            if isinstance(part, Muon):
                part.wholes = Wholes(layout, [name for name, s in shapes.items() if _is_matrix_of_layer(name, len(s))])

    def _share(self) -> None:
        """Lets the parts work on this optimizer's groups and state, so that these are the only ones."""
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_parts": self._parts, "_of_muon": self._of_muon}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """For copies and pickles; `load_state_dict` calls it, too."""
        super().__setstate__(state)
        _fill_in(self.param_groups)
        self._share()

    def step(self, closure: Any = None) -> Any:
        """One step; parameters without a gradient stay. Returns what the closure, if there is one, returns."""
        loss = loss_of(closure)
        for part in self._parts:
            part.step()
        return loss


def _is_matrix_of_layer(name: str, dimensions: int) -> bool:
    return dimensions == 2 and any(part.isdigit() for part in name.split("."))


_OF_MUON = ("momentum", "nesterov", "scale", "align", *_OF_SLOW)
MUON = Inner(MuonAdamW, lr=1e-2, settings=_OF_MUON)
MULOCO = Inner(partial(MuonAdamW, momentum=0.9, nesterov=False, scale="fans"), lr=2e-2, settings=_OF_MUON)
"""As MuLoCo's authors have it (arXiv 2505.23725); they also take a weight decay of 0.005 or less."""
SIGN = Inner(SignSGD, lr=1e-2)
GPA = Inner(PrimalAveraging, lr=3e-3)

INNER = {"adamw": ADAMW, "muon": MUON, "muloco": MULOCO, "sign": SIGN, "gpa": GPA}
"""Inner optimizers by the names that settings give them."""


def names_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """The parameters' names, in the order in which the optimizer numbers them."""
    return [name for group in optimizer.param_groups for name in group["param_names"]]
