"""The mean gradient of all replicas, for one optimizer's steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from farflung.codecs import finite
from farflung.errors import UserError
from farflung.hooks.scaling import is_scaled, step_always, take_gradients, unscale
from farflung.hooks.shards import own_of
from farflung.hooks.steps import Arguments, hook_steps
from farflung.hooks.trained import held_by
from farflung.networks import Finished, Group, Pending
from farflung.outer.averaging import Averaging
from farflung.outer.bundles import Cells
from farflung.outer.faults import Faults
from farflung.outer.fragments import split
from farflung.outer.outcomes import Outcome, Round
from farflung.outer.session import Session, copied
from farflung.outer.topologies import group_of

NOTES = "notes"
"""The cell of a message's notes, which arrive as they are."""
OTHER_NOTES = 3
"""Notes beside that of each parameter: the loss, whether it counts, an overflow."""

SPARSE = "{} has sparse gradients, which cannot be averaged; make the embedding with sparse=False, or use diloco"


class MeanGradient:
    """Averages one optimizer's gradients before its steps, or whenever it calls its closure. See GradientLoop.

    A message is all gradients as one flat float32 tensor, zeros where there is none, and then notes, a number each:
    for each parameter whether it has a gradient; the loss, whether it counts, and whether a gradient overflowed. The
    index is the optimizer's place among the session's, until whose end its steps are hooked.
    """

    def __init__(self, session: Session, optimizer: torch.optim.Optimizer, index: int) -> None:
        held = set(held_by(optimizer))
        self.step = 0
        self.faults = Faults(session.network.rank)
        self._session = session
        self._network = network = session.network
        self._optimizer = optimizer
        self._index = index
        trained = {parameter for parameter in session.trained.parameters if parameter.numel()}
        (self._fragment,) = split(session.trained.model, 1, held & trained)
        self.cells_here = self._fragment.cells
        self._parameters = self._fragment.parameters
        method = session.method
        self._topology = method.topology
        self._feeds_back = method.codec.traits.feeds_back
        self._averaging = Averaging(network, method, self._cells, plain={NOTES})
        self._exchanges = 0
        self._exchanges_before_step = 0
        self._ever_present = [False] * len(self._parameters)
        session.undo.callback(step_always(optimizer))
        session.undo.callback(hook_steps(optimizer, self._before_step, self._after_step))

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        """Averages the gradients, now or whenever the optimizer calls its closure."""
        self.step += 1
        self._exchanges_before_step = self._exchanges
        _, *rest = args
        closure: Callable[[], Any] | None = rest[0] if rest else kwargs.get("closure")
        if kwargs.get("grad_scaler") is not None:
            raise UserError(f"{self._name} unscales gradients by itself, too late for their mean; use one of torch's")
        if closure is None:
            self._average(None)
            return None
        if is_scaled(optimizer):
            raise UserError("a GradScaler cannot take a closure; call backward yourself, and scaler.step(optimizer)")

        def averaged() -> Any:
            with torch.enable_grad():
                loss = closure()
            return self._average(loss)

        if rest:
            return (optimizer, averaged, *rest[1:]), kwargs
        return args, {**kwargs, "closure": averaged}

    def _after_step(self) -> None:
        if self._exchanges == self._exchanges_before_step:
            raise UserError(f"{self._name} never called its closure, so its gradients were not averaged; leave it out")

    @torch.no_grad()
    def _average(self, loss: Any) -> Any:
        """Puts the mean gradients in the place of this replica's; returns the mean of the loss."""
        network = self._network
        network.advance()
        self._session.trained.check()
        self._exchanges += 1

        remembered = self._averaging.state_dict() if is_scaled(self._optimizer) else None
        overflow = unscale(self._optimizer)
        message, fault = self._message(loss, overflow)
        number = self._exchanges
        group = group_of(network.rank, self._topology.groups(network.members(), str(number)))
        started = network.now()
        key = self._session.key(f"gradient {number} of optimizer {self._index}")
        pending, error = self._start(message, group, key)
        mean = pending.wait(self._session.deadline_s)
        *present, total_loss, counted, overflowed = mean[self._fragment.numel :].tolist()
        if overflowed:
            take_gradients(self._optimizer)
            if remembered is not None:
                self._averaging.load_state_dict(remembered)  # what was sent in vain is still to be sent
        else:
            self._scatter(mean, present)
        self._session.report(
            Round(
                round=number,
                fragment=self._index,
                group=group,
                started_step=self.step,
                step=self.step,
                started=started,
                finished=pending.finished_at,
                waited_from=started,
                landed=network.now(),
                outcome=Outcome.NO_PROGRESS if fault else Outcome.AVERAGED if group else Outcome.SAT_OUT,
                reason=fault,
                compression_error=error,
            )
        )
        return _like(loss, total_loss / counted if counted else float("nan"))

    def _start(self, message: Tensor, group: Group, key: str) -> tuple[Pending[Tensor], float]:
        """Starts averaging a message; who sits out keeps its own."""
        if not group:
            return Finished(message, self._network.now()), 0.0
        return self._averaging.start(message, group, key, self._exchanges)

    def _message(self, loss: Any, overflow: bool) -> tuple[Tensor, str]:
        """The message, and why it holds no gradients, or ""."""
        device = self._parameters[0].device if self._parameters else None
        numel = self._fragment.numel
        message = torch.zeros(numel + len(self._parameters) + OTHER_NOTES, dtype=torch.float32, device=device)
        present = [parameter.grad is not None for parameter in self._parameters]
        if any(p.grad is not None and p.grad.layout != torch.strided for p in self._parameters):
            raise UserError(SPARSE.format(f"a parameter of {self._name}"))
        grads = {name: _gradient_of(parameter) for name, parameter in self._fragment.named.items()}
        self._fragment.gather(grads, message[:numel])
        if not overflow and not finite(message):
            self.faults.spoil("the gradient is not finite")
        fault = self.faults.judge(self._exchanges, self.step)
        self._session.untrained.restore() if fault else self._session.untrained.keep()
        if overflow:
            fault = fault or "a gradient overflowed at the GradScaler's scale"
        if fault:
            message.zero_()
            present = [False] * len(present)
        own_loss = 0.0 if loss is None else float(loss)
        counts = not fault and abs(own_loss) <= torch.finfo(message.dtype).max
        notes = [*present, own_loss if counts else 0.0, counts, overflow]
        message[numel:] = torch.tensor(notes, dtype=message.dtype)
        return message, fault

    def _scatter(self, mean: Tensor, present: Sequence[float]) -> None:
        """Gives each parameter its mean gradient, and none where no replica has one.

        A residual of a parameter, from steps in which it had a gradient, is a gradient, too.
        """
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
        grads = {name: _gradient_of(parameter) for name, parameter in self._fragment.named.items()}
        self._fragment.scatter(mean[: self._fragment.numel], grads)
        self._ever_present = [bool(now) or before for now, before in zip(present, self._ever_present, strict=True)]
        residuals = [self._feeds_back and ever for ever in self._ever_present]
        for (name, parameter), has_one, has_more in zip(self._fragment.named.items(), present, residuals, strict=True):
            if not has_one and not (has_more and bool(grads[name].any())):
                parameter.grad = None

    def _cells(self, message: Tensor) -> Cells:
        """A message as the gradients and single notes that it consists of."""
        numel = self._fragment.numel
        return self._fragment.by_cell(message[:numel]) | {NOTES: list(message[numel:].unbind())}

    @property
    def _name(self) -> str:
        return type(self._optimizer).__name__

    def state_dict(self) -> dict[str, Any]:
        """The codec's state, and the steps so far."""
        return {
            "step": self.step,
            "faults": self.faults.state_dict(),
            "exchanges": self._exchanges,
            "ever_present": dict(zip(self._fragment.named, self._ever_present, strict=True)),
        }

    def cells(self) -> dict[str, dict[str, Any]]:
        """What codecs remember of each cell, by its name."""
        codecs = self._averaging.state_dict()
        return {c.name: {"codecs": codecs.get(c.name, {}), "values": c.numel} for c in self._fragment.cells}

    def load_state_dict(self, state: dict[str, Any], cells: Mapping[str, dict[str, Any]]) -> None:
        """Goes on from a `state_dict` and `cells`, which may be more than this process keeps."""
        self.step, self._exchanges = state["step"], state["exchanges"]
        self._ever_present = [state["ever_present"][name] for name in self._fragment.named]
        self.faults.load_state_dict(state["faults"])
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        own = {cell.name: cells[cell.name]["codecs"] for cell in self._fragment.cells}
        self._averaging.load_state_dict(copied(own, device))


def _gradient_of(parameter: nn.Parameter) -> Tensor:
    """What this process has of it; noughts where there is none."""
    if parameter.grad is None:
        own = own_of(parameter)
        return own.new_zeros(1).expand_as(own)
    return own_of(parameter.grad)


def _like(loss: Any, value: float) -> Any:
    """A value in the form that a closure gave its loss."""
    if isinstance(loss, Tensor):
        return torch.full_like(loss, value, requires_grad=False)
    return None if loss is None else value
