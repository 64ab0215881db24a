"""What turns a round's averaged message into a new anchor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from farflung.codecs import Codec
from farflung.errors import UserError

OuterFactory = Callable[[list[Tensor]], torch.optim.Optimizer]
"""Makes an outer optimizer for the anchors (flat float32 tensors, one a fragment)."""

BLOCK = 1 << 18
"""Elements that the CPU works on at a time: the few tensors of an update fit its cache together."""


class OuterOptimizer(torch.optim.Optimizer):
    """An optimizer of anchors that chooses what travels. Any torch optimizer will do; it then gets these defaults.

    Both methods may overwrite their last argument, so that they need no memory of their own.
    """

    sends_weights = False
    """Whether messages are as large as the weights. Rounding them would lose the small steps between rounds."""
    in_second_half = False
    """Whether only the second half of a message is, so that the first may be rounded."""
    notes_messages = False
    """Whether it notes each message that it makes, so that none may be made but to be sent."""

    def message(self, anchor: Tensor, weights: Tensor) -> Tensor:
        """What this replica puts on the wire, for the anchor φ and the weights θ, both flat: by default Δ = φ - θ.

        It is given the weights rather than Δ, since θ cannot be had back from Δ without rounding.
        """
        return pseudo_gradient(anchor, weights)

    def step_with(self, anchor: Tensor, mean: Tensor) -> None:
        """Moves the anchor, given the mean of the group's messages: by default as if it were the gradient."""
        descend(self, anchor, mean)

    def gradient(self, anchor: Tensor, mean: Tensor) -> Tensor:
        """What the mean of the messages says that the anchor should descend along: by default that mean."""
        return mean


def pseudo_gradient(anchor: Tensor, weights: Tensor) -> Tensor:
    """Δ = φ - θ, in the memory of the weights."""
    return torch.sub(anchor, weights, out=weights)


def descend(optimizer: torch.optim.Optimizer, anchor: Tensor, gradient: Tensor) -> None:
    """One step of the optimizer, in which only this anchor has a gradient."""
    anchor.grad = gradient
    optimizer.step()
    anchor.grad = None


def message_of(outer: torch.optim.Optimizer, anchor: Tensor, weights: Tensor) -> Tensor:
    """The message of any torch optimizer."""
    return outer.message(anchor, weights) if isinstance(outer, OuterOptimizer) else pseudo_gradient(anchor, weights)


def step_with(outer: torch.optim.Optimizer, anchor: Tensor, mean: Tensor) -> None:
    """The outer step of any torch optimizer."""
    if isinstance(outer, OuterOptimizer):
        outer.step_with(anchor, mean)
    else:
        descend(outer, anchor, mean)


def gradient_of(outer: torch.optim.Optimizer, anchor: Tensor, mean: Tensor) -> Tensor:
    """The gradient that a mean message stands for, for any torch optimizer."""
    return outer.gradient(anchor, mean) if isinstance(outer, OuterOptimizer) else mean


def load_into(outer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Gives an outer optimizer a state. Raises ValueError where it is of another kind."""
    settings, own = ([set(group) for group in one["param_groups"]] for one in (state, outer.state_dict()))
    if settings != own:
        raise ValueError(f"its outer optimizer is no {type(outer).__name__}")
    defaults = dict(outer.defaults)  # torch adds to them, and they are compared with those of states
    outer.load_state_dict(state)
    outer.defaults = defaults


def sends_weights(outer: torch.optim.Optimizer) -> bool:
    """Whether the messages of any torch optimizer are as large as the weights."""
    return isinstance(outer, OuterOptimizer) and outer.sends_weights


def refuse_rounded_weights(outer: torch.optim.Optimizer, codec: Codec, encoded: Sequence[Tensor]) -> None:
    """Refuses a codec, or float32 where all is encoded, that would round whole weights. Raises UserError."""
    if not (isinstance(outer, OuterOptimizer) and outer.sends_weights):
        return
    traits = codec.traits
    carried = traits.halves[1] if outer.in_second_half and traits.halves else traits
    if not carried.keeps_weights:
        raise UserError(
            f"the outer optimizer {type(outer).__name__} sends whole weights, in which {codec!r} would round "
            "small steps away; use methods.noloco, or an outer optimizer of pseudo-gradients, such as torch's SGD"
        )
    if any(anchor.dtype == torch.float64 for anchor in encoded):
        raise UserError(
            f"the outer optimizer {type(outer).__name__} sends whole weights, and on the internet those of float64 "
            "would be rounded to float32; train in float32, or use diloco"
        )


class GossipNesterov(OuterOptimizer):
    """NoLoCo's modified Nesterov momentum (arXiv 2506.10911), for averages over small random groups.

        v ← α·v - β·mean(Δ) - γ·(φ - mean(φ));   φ ← φ + v

    β is lr, α momentum. The two means are only needed in the sum β·Δ - γ·φ = (β - γ)·φ - β·θ, which is the one tensor
    that travels. γ pulls the anchors of a group together; groups of 2 are stable up to γ of about 1.5.
    """

    sends_weights = True

    def __init__(self, anchors: Iterable[Tensor], lr: float = 0.7, momentum: float = 0.5, gamma: float = 0.7) -> None:
        super().__init__(anchors, {"lr": lr, "momentum": momentum, "gamma": gamma})

    def message(self, anchor: Tensor, weights: Tensor) -> Tensor:
        """(β - γ)·φ - β·θ."""
        lr, gamma = self._settings["lr"], self._settings["gamma"]
        for theta, phi in blocks(weights, anchor):
            theta.mul_(-lr)
            if lr != gamma:
                theta.add_(phi, alpha=lr - gamma)
        return weights

    def step_with(self, anchor: Tensor, mean: Tensor) -> None:
        """v ← α·v - mean - γ·φ; φ ← φ + v."""
        momentum, gamma = self._settings["momentum"], self._settings["gamma"]
        state = self.state[anchor]
        if "velocity" not in state:
            state["velocity"] = torch.zeros_like(anchor)
        for phi, v, u in blocks(anchor, state["velocity"], mean):
            v.mul_(momentum).sub_(u).sub_(phi, alpha=gamma)
            phi.add_(v)

    def gradient(self, anchor: Tensor, mean: Tensor) -> Tensor:
        """β·mean(Δ) + γ·(φ - mean(φ)) = mean + γ·φ."""
        return torch.add(mean, anchor, alpha=self._settings["gamma"])

    @property
    def _settings(self) -> dict[str, Any]:
        return self.param_groups[0]


class SplitGossip(GossipNesterov):
    """GossipNesterov whose message has two halves, βΔ and -γ·φ, each with a codec of its own.

    A pseudo-gradient may be compressed like a gradient; of an anchor, only its difference from the partner's may. A
    message has twice the numbers, so it is for codecs that compress much.
    """

    in_second_half = True

    def message(self, anchor: Tensor, weights: Tensor) -> Tensor:
        """β·(φ - θ), then -γ·φ: twice the anchor's length."""
        delta = pseudo_gradient(anchor, weights).mul_(self._settings["lr"])
        return torch.cat([delta, anchor * -self._settings["gamma"]])

    def step_with(self, anchor: Tensor, mean: Tensor) -> None:
        """v ← α·v - (mean of the halves' sum) - γ·φ; φ ← φ + v."""
        super().step_with(anchor, mean[: anchor.numel()] + mean[anchor.numel() :])

    def gradient(self, anchor: Tensor, mean: Tensor) -> Tensor:
        """As GossipNesterov's, of the halves' sum."""
        return super().gradient(anchor, mean[: anchor.numel()] + mean[anchor.numel() :])


class Average(OuterOptimizer):
    """The anchor becomes the mean of the weights: local SGD, exact to the bit for a group of one."""

    sends_weights = True

    def __init__(self, anchors: Iterable[Tensor]) -> None:
        super().__init__(anchors, {})

    def message(self, anchor: Tensor, weights: Tensor) -> Tensor:
        """θ itself."""
        return weights

    def step_with(self, anchor: Tensor, mean: Tensor) -> None:
        """φ ← mean(θ)."""
        anchor.copy_(mean)


class ParameterAveraging(OuterOptimizer):
    """Any torch optimizer, for replicas that should hold the same anchor φ but may not: the weights θ travel.

    The gradient φ - mean(θ) is the mean pseudo-gradient where anchors are equal; where they are not, it also draws
    them together.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups[0]["params"], {})
        self.inner, self.defaults = inner, inner.defaults

    def message(self, anchor: Tensor, weights: Tensor) -> Tensor:
        """θ."""
        return weights

    def step_with(self, anchor: Tensor, mean: Tensor) -> None:
        """A step of the optimizer with the gradient φ - mean(θ)."""
        descend(self.inner, anchor, self.gradient(anchor, mean))

    def gradient(self, anchor: Tensor, mean: Tensor) -> Tensor:
        """φ - mean(θ), in the memory of the mean."""
        return pseudo_gradient(anchor, mean)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The optimizer's own."""
        self.inner.load_state_dict(state_dict)


def state_by_anchor(outer: torch.optim.Optimizer) -> dict[Tensor, dict[str, Any]]:
    """What an outer optimizer keeps of each anchor."""
    return (outer.inner if isinstance(outer, ParameterAveraging) else outer).state


def kept_of(outer: torch.optim.Optimizer, anchor: Tensor) -> dict[str, Tensor]:
    """The tensors of an anchor's shape that an outer optimizer keeps of it, by name."""
    state = state_by_anchor(outer).get(anchor, {})
    return {name: value for name, value in state.items() if isinstance(value, Tensor) and value.shape == anchor.shape}


def after_a_step(make: OuterFactory) -> tuple[int, set[str]]:
    """How many times an anchor's length an outer optimizer's message has, and the names of what it keeps."""
    anchor = torch.zeros(2, dtype=torch.float32, device="cpu")
    outer = make([anchor])
    message = message_of(outer, anchor, torch.ones_like(anchor))
    lengths = message.numel() // 2
    step_with(outer, anchor, message)
    return lengths, set(kept_of(outer, anchor))


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Flat tensors of one length cut alike into pieces that fit a CPU's cache together; whole ones elsewhere."""
    first = tensors[0]
    size = BLOCK if first.device.type == "cpu" else max(first.numel(), 1)
    return zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)
