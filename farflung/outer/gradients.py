"""Averaging of gradients before every inner step: synchronous data parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from farflung.codecs import Codec
from farflung.networks import Network
from farflung.outer.attached import Attached, Disagreement, Round, finite
from farflung.outer.averaging import agree, average
from farflung.outer.topologies import Topology


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
        deadline: float = 120.0,
        on_round: Callable[[Round], None] | None = None,
    ) -> None:
        super().__init__(network, deadline, on_round)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._topology = topology
        self._codec = codec
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
        group = self._topology.group(network.rank, network.members(), str(self.step))
        started = network.now()
        pending = average(network, self._codec, gradient, group, f"gradient {self.step}")
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
            )
        )

    def _gather(self) -> Tensor:
        """All gradients as one flat float32 tensor; where there is none, zeros."""
        parts = [
            torch.zeros_like(p, dtype=torch.float32).flatten() if p.grad is None else p.grad.float().flatten()
            for p in self._parameters
        ]
        return torch.cat(parts) if parts else torch.empty(0)

    def _scatter(self, gradient: Tensor) -> None:
        parts = torch.split(gradient, [parameter.numel() for parameter in self._parameters])
        for parameter, part in zip(self._parameters, parts, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(part.view(parameter.shape))


def different_start(rank: int) -> str:
    """The message of a Disagreement."""
    return (
        f"replica {rank} starts from other weights than the rest; seed every replica alike before making the model, "
        "or load the same weights into all"
    )
