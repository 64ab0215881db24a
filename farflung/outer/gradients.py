"""Averaging of gradients before every inner step: synchronous data parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from farflung.codecs import finite
from farflung.networks import Network
from farflung.outer.attached import Attached, Options, Round
from farflung.outer.averaging import Averaging
from farflung.outer.fragments import split
from farflung.outer.shards import own_of
from farflung.outer.streams import copied
from farflung.outer.topologies import group_of

if TYPE_CHECKING:
    from farflung.outer.method import Method


class GradientLoop(Attached):
    """Hands the inner optimizer the mean of all replicas' gradients as its own.

    A replica without a sound gradient counts as zero. A peer that is lost ends the run, with PeerLost: replicas that
    go on from different gradients would no longer be one model.
    """

    def __init__(
        self,
        method: Method,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        network: Network,
        options: Options,
    ) -> None:
        super().__init__(model, optimizers, network, options, {"method": "gradients"})
        (self._fragment,) = split(model, 1, self.trained.parameters)
        self._parameters = self._fragment.parameters
        self._topology = method.topology
        self._averaging = Averaging(
            network, method.codec, self._fragment.views, method.averaging, method.topology.alike, "gradients"
        )
        self._hooks.append(optimizers[-1].register_step_pre_hook(self._before_inner_step))

    @torch.no_grad()
    def _before_inner_step(self, *_: Any) -> None:
        network = self.network
        network.computed()
        self.trained.check()
        self.step += 1

        gradient = self._gather()
        if not finite(gradient):
            self.spoil("the gradient is not finite")
        fault = self._judge(self.step)
        if fault:
            gradient.zero_()
        group = group_of(network.rank, self._topology.groups(network.members(), str(self.step)))
        started = network.now()
        pending, error = self._averaging.start(gradient, group, self._key(f"gradient {self.step}"))
        self._scatter(pending.wait(self.deadline))
        outcome = "no progress offered" if fault else "averaged"
        self._report(
            Round(
                round=self.step,
                fragment=0,
                group=group,
                started_step=self.step,
                step=self.step,
                started=started,
                finished=pending.finished_at,
                waited_from=started,
                landed=network.now(),
                outcome=outcome,
                reason=fault,
                compression_error=error,
            )
        )

    def state_dict(self) -> dict[str, Any]:
        """What the codec remembers, besides."""
        return {**super().state_dict(), "averaging": self._averaging.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`."""
        super().load_state_dict(state)
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self._averaging.load_state_dict(copied(state["averaging"], device))

    def _gather(self) -> Tensor:
        """All gradients as one flat float32 tensor; where there is none, zeros."""
        parts = [
            torch.zeros_like(own_of(p), dtype=torch.float32).flatten()
            if p.grad is None
            else own_of(p.grad).float().flatten()
            for p in self._parameters
        ]
        return torch.cat(parts) if parts else torch.empty(0)

    def _scatter(self, gradient: Tensor) -> None:
        for parameter, part in zip(self._parameters, self._fragment.views(gradient), strict=True):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            own_of(parameter.grad).copy_(part)
