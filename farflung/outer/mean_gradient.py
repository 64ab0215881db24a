"""The mean gradient of all replicas, for one optimizer's steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from farflung.codecs import finite
from farflung.errors import UserError
from farflung.hooks.scaling import is_scaled, step_always, take_gradients, unscale
from farflung.hooks.shards import own_of
from farflung.hooks.steps import Arguments, hook_steps
from farflung.hooks.trained import held_by
from farflung.networks import Finished, Group, Pending
from farflung.outer.averaging import Averaging, Meeting
from farflung.outer.bundles import Cells
from farflung.outer.columns import Column, Message
from farflung.outer.faults import Faults
from farflung.outer.fragments import split
from farflung.outer.outcomes import Outcome, Round
from farflung.outer.pending import Together
from farflung.outer.session import Session
from farflung.outer.sparse import dense, rows_of, sparse_names
from farflung.outer.states import copied
from farflung.outer.topologies import group_of

NOTES = "notes"
"""The cell of a message's notes, which arrive as they are."""


class Notes(NamedTuple):
    """What travels beside gradients; of a group, the sums or means of what its members say.

    Args:
        present: whether each parameter has a gradient, by name.
        loss: of a closure.
        counted: whether it counts.
        overflowed: whether a gradient overflowed.
    """

    present: Mapping[str, float]
    loss: float
    counted: float
    overflowed: float


OTHER_NOTES = len(Notes._fields) - 1
"""Notes beside those of the pieces."""


class MeanGradient:
    """Averages one optimizer's gradients before its steps, or whenever it calls its closure. See GradientLoop.

    A message is the gradients of a column's cells as one flat float32 tensor, zeros where there is none, and then
    notes, a number each: for each piece of these cells whether its parameter has a gradient; the loss, whether it
    counts, and whether a gradient overflowed. The index is the optimizer's place among the session's, until whose end
    its steps are hooked.
    """

    def __init__(self, session: Session, optimizer: torch.optim.Optimizer, index: int) -> None:
        held = set(held_by(optimizer))
        self.step = 0
        self.faults = Faults(session.network.rank, session.trained.layout)
        self._session = session
        self._network = network = session.network
        self._optimizer = optimizer
        self._index = index
        named = {name: parameter for name, parameter in session.trained.named.items() if parameter in held}
        (self.fragment,) = split(session.trained.model, 1, named)
        self._parameters = self.fragment.parameters
        method = session.method
        self._topology = method.topology
        self._sparse = sparse_names(session.trained.model, named, method.codec)
        self._feeds_back = method.codec.traits.feeds_back
        self._averaging = Averaging(network.rank, method, plain={NOTES})
        self._exchanges = 0
        self._exchanges_before_step = 0
        self._ever_present = dict.fromkeys(self.fragment.named, False)
        session.undo.callback(step_always(optimizer))
        session.undo.callback(hook_steps(optimizer, self._before_step, self._after_step))

    @property
    def next_round(self) -> int:
        """The number of the next exchange."""
        return self._exchanges + 1

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
        gradients, notes, fault = self._message(loss, overflow)
        if self._session.trained.layout.processes > 1:
            notes = notes._replace(present=self._in_replica(notes).present)
        number = self._exchanges
        group = group_of(network.rank, self._topology.groups(network.members(), str(number)))
        started = network.now()
        pending, error = self._start(gradients, notes, group)
        with self._session.departures.watched(group, self._index, number):
            means = pending.wait(self._session.deadline_s)
        found = self._found(means, gradients)
        if found.overflowed:
            take_gradients(self._optimizer)
            if remembered is not None:
                self._averaging.load_state_dict(remembered)  # what was sent in vain is still to be sent
        else:
            self._scatter(gradients[: self.fragment.numel], found.present)
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
        return _like(loss, found.loss / found.counted if found.counted else float("nan"))

    def _start(self, gradients: Tensor, notes: Notes, group: Group) -> tuple[Pending[list[Message]], float]:
        """Starts averaging flat gradients, column by column, each with its notes; who sits out keeps its own."""
        network, key = self._network, self._session.key(f"gradient {self._exchanges} of optimizer {self._index}")
        columns = self._session.columns.of(group or (network.rank,), self.fragment.names)
        messages = [self._with_notes(gradients, notes, column) for column in columns]
        if not group or not columns:
            return Finished(messages, network.now()), 0.0
        meetings = [Meeting(column.network, group, column.key(key), self._exchanges) for column in columns]
        started, error = self._averaging.start_parts(messages, meetings)
        return Together(started, network.now, lambda _: messages), error

    def _with_notes(self, gradients: Tensor, notes: Notes, column: Column) -> Message:
        """A column's part of flat gradients, and the notes behind it."""
        message = self.fragment.message(gradients[: self.fragment.numel])
        part = message.part(column.cells)
        told = torch.tensor([*(notes.present[name] for name in self._told_of(column.cells)), *notes[1:]])
        flat = gradients if part is message else torch.cat([part.flat, part.flat.new_empty(len(told))])
        flat[-len(told) :] = told

        def views(flat: Tensor) -> Cells:
            return {**part.views(flat[: -len(told)]), NOTES: flat[-len(told) :].unbind()}

        return Message(flat, [*part.names, NOTES], views)

    def _told_of(self, cells: Collection[str]) -> list[str]:
        """The parameter of each piece of some cells."""
        wanted = set(cells)
        return [piece.parameter for cell in self.fragment.cells if cell.name in wanted for piece in cell.pieces]

    def _message(self, loss: Any, overflow: bool) -> tuple[Tensor, Notes, str]:
        """Flat gradients, with room for notes; these; and why there are no gradients, or ""."""
        device = self._parameters[0].device if self._parameters else None
        numel, room = self.fragment.numel, len(self._told_of(self.fragment.names)) + OTHER_NOTES
        flat = torch.zeros(numel + room, dtype=torch.float32, device=device)
        for name, parameter in self.fragment.named.items():
            if parameter.grad is not None and parameter.grad.layout != torch.strided and name not in self._sparse:
                raise UserError(f"{name} has sparse gradients, but no embedding with sparse=True; give it dense ones")
        present = {name: float(parameter.grad is not None) for name, parameter in self.fragment.named.items()}
        grads = {name: _gradient_of(parameter) for name, parameter in self.fragment.named.items()}
        self.fragment.keeper.gather(grads, flat[:numel])
        if not overflow and not finite(flat):
            self.faults.spoil("the gradient is not finite")
        fault = self.faults.judge(self._exchanges, self.step)
        self._session.untrained.restore() if fault else self._session.untrained.keep()
        if overflow:
            fault = fault or "a gradient overflowed at the GradScaler's scale"
        if fault:
            flat.zero_()
            present = dict.fromkeys(present, 0.0)
        own_loss = 0.0 if loss is None else float(loss)
        counts = not fault and abs(own_loss) <= torch.finfo(flat.dtype).max
        return flat, Notes(present, own_loss if counts else 0.0, float(counts), float(overflow)), fault

    def _found(self, messages: Sequence[Message], gradients: Tensor) -> Notes:
        """The notes of the group; the mean gradients replace this replica's.

        A process learns what the keepers of its cells were told, whichever processes of its replica these are.
        """
        whole = self.fragment.message(gradients[: self.fragment.numel])
        present = dict.fromkeys(self._session.trained.layout.outline, 0.0)
        rest = [0.0] * OTHER_NOTES
        for message in messages:
            whole.put(message)
            names = self._told_of(message.names)
            *told, loss, counted, overflowed = message.flat[-len(names) - OTHER_NOTES :].tolist()
            rest = [loss, counted, overflowed]
            for name, has_one in zip(names, told, strict=True):
                present[name] += has_one
        return self._in_replica(Notes(present, *rest))

    def _in_replica(self, notes: Notes) -> Notes:
        """The sum of what the replica's processes have to say; of a few rows, some shards have none."""
        layout = self._session.trained.layout
        present = [notes.present.get(name, 0.0) for name in layout.outline]
        sums = layout.total(torch.tensor([*present, *notes[1:]], dtype=torch.float64)).tolist()
        return Notes(dict(zip(layout.outline, sums, strict=False)), *sums[-OTHER_NOTES:])

    def _scatter(self, mean: Tensor, present: Mapping[str, float]) -> None:
        """Gives each parameter its mean gradient, and none where no replica has one.

        A residual of a parameter, from steps in which it had a gradient, is a gradient, too.
        """
        for parameter in self._parameters:
            if parameter.grad is None or parameter.grad.layout != torch.strided:
                parameter.grad = torch.empty_like(parameter)
        grads = {name: _gradient_of(parameter) for name, parameter in self.fragment.named.items()}
        self.fragment.keeper.scatter(mean, grads)
        for name, parameter in self.fragment.named.items():
            self._ever_present[name] = self._ever_present[name] or bool(present[name])
            residual = self._feeds_back and self._ever_present[name] and bool(grads[name].any())
            if not present[name] and not residual:
                parameter.grad = None
            elif name in self._sparse:
                parameter.grad = rows_of(grads[name])

    @property
    def _name(self) -> str:
        return type(self._optimizer).__name__

    def state_dict(self) -> dict[str, Any]:
        """The codec's state, and the steps so far."""
        return {
            "step": self.step,
            "faults": self.faults.state_dict(),
            "exchanges": self._exchanges,
            "ever_present": dict(self._ever_present),
        }

    def cells(self) -> dict[str, dict[str, Any]]:
        """What codecs remember of each cell, by its name."""
        codecs = self._averaging.state_dict()
        return {c.name: {"codecs": codecs.get(c.name, {}), "values": c.numel} for c in self.fragment.cells}

    def load_state_dict(self, state: dict[str, Any], cells: Mapping[str, dict[str, Any]]) -> None:
        """Goes on from a `state_dict` and `cells`, which may be more than this process keeps."""
        self.step, self._exchanges = state["step"], state["exchanges"]
        self._ever_present = {name: state["ever_present"][name] for name in self.fragment.named}
        self.faults.load_state_dict(state["faults"])
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        own = {cell.name: cells[cell.name]["codecs"] for cell in self.fragment.cells}
        self._averaging.load_state_dict(copied(own, device))


def _gradient_of(parameter: nn.Parameter) -> Tensor:
    """What this process has of it; noughts where there is none."""
    if parameter.grad is None:
        own = own_of(parameter)
        return own.new_zeros(1).expand_as(own)
    return own_of(dense(parameter.grad))


def _like(loss: Any, value: float) -> Any:
    """A value in the form that a closure gave its loss."""
    if isinstance(loss, Tensor):
        return torch.full_like(loss, value, requires_grad=False)
    return None if loss is None else value
