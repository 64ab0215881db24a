"""Averaging of gradients before every inner step: synchronous data parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from farflung.codecs import Codec, finite
from farflung.networks import Network
from farflung.outer.attached import Attached, Disagreement, Round
from farflung.outer.averaging import Averaging, agree
from farflung.outer.fragments import Fragment
from farflung.outer.streams import on_device
from farflung.outer.topologies import Topology, group_of


class GradientLoop(Attached):
    """Hands the inner optimizer the mean of all replicas' gradients as its own.

    A replica without a sound gradient counts as zero. A peer that is lost ends the run, with PeerLost: replicas that
    go on from different gradients would no longer be one model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        network: Network,
        *,
        topology: Topology,
        codec: Codec,
        gather_up_to: int = 2,
        deadline: float = 120.0,
        on_round: Callable[[Round], None] | None = None,
    ) -> None:
        super().__init__(network, deadline, on_round)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._topology = topology
        self._fragment = Fragment(self._parameters)
        self._averaging = Averaging(network, codec, self._fragment.views, gather_up_to, topology.alike, "gradients")
        self._hook = optimizer.register_step_pre_hook(self._before_inner_step)

    @torch.no_grad()
    def _before_inner_step(self, *_: Any) -> None:
        network = self.network
        network.computed()
        if self.step == 0 and not agree(network, self._parameters, self.deadline):
            raise Disagreement(different_start(network.rank))
        self.step += 1

        gradient = self._gather()
        if not finite(gradient):
            self.spoil("the gradient is not finite")
        fault = self._judge()
        if fault:
            gradient.zero_()
        group = group_of(network.rank, self._topology.groups(network.members(), str(self.step)))
        started = network.now()
        pending, error = self._averaging.start(gradient, group, f"gradient {self.step}")
        self._scatter(pending.wait(self.deadline))
        outcome = "no progress offered" if fault else "averaged"
        self._on_round(
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
        self._averaging.load_state_dict(on_device(state["averaging"], device))

    def _gather(self) -> Tensor:
        """All gradients as one flat float32 tensor; where there is none, zeros."""
        parts = [
            torch.zeros_like(p, dtype=torch.float32).flatten() if p.grad is None else p.grad.float().flatten()
            for p in self._parameters
        ]
        return torch.cat(parts) if parts else torch.empty(0)

    def _scatter(self, gradient: Tensor) -> None:
        for parameter, part in zip(self._parameters, self._fragment.views(gradient), strict=True):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(part)


def different_start(rank: int) -> str:
    """The message of a Disagreement."""
    return (
        f"replica {rank} starts from other weights than the rest; seed every replica alike before making the model, "
        "or load the same weights into all"
    )
