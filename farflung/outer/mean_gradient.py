"""The mean gradient of all replicas, for one optimizer's steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from farflung.cells import Piece
from farflung.codecs.values import norm
from farflung.errors import UserError
from farflung.hooks.scaling import is_scaled, step_always, unscale
from farflung.hooks.steps import Arguments, hook_steps
from farflung.hooks.trained import held_by
from farflung.networks import Finished
from farflung.outer.averaging import Averaging, Meeting
from farflung.outer.bundles import Cells, joint_error
from farflung.outer.columns import Column, Message
from farflung.outer.faults import Faults
from farflung.outer.fragments import Fragment, split
from farflung.outer.gradient_exchange import BLOCK, NOTES, OTHER_NOTES, Exchange, Notes, Part
from farflung.outer.held_gradients import HeldGradients
from farflung.outer.outcomes import Outcome, Round
from farflung.outer.pending import Together
from farflung.outer.session import Session
from farflung.outer.sparse import rows_of, sparse_names
from farflung.outer.states import copied, of_cell
from farflung.outer.topologies import group_of

if TYPE_CHECKING:
    from farflung.memory.updates import FarUpdates


class MeanGradient:
    """Averages one optimizer's gradients before its steps, or whenever it calls its closure. See GradientLoop.

    A message is the gradients of a column's cells as one flat float32 tensor, zeros where there is none, and then
    notes, a number each: for each piece of these cells whether its parameter has a gradient; the loss, whether it
    counts, and whether a gradient overflowed. `in_blocks`, there is a message of each block, one after the other.
    The index is the optimizer's place among the session's, until whose end its steps are hooked.
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
        self._far: Callable[[], FarUpdates | None] = lambda: None
        self._cut([self.fragment])
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

    def in_blocks(self, far: Callable[[], FarUpdates | None]) -> None:
        """Takes gradients block by block from now on, those that are `far` from where they lie.

        The host steps a layer that is far when all blocks with gradients of it have come, while others are under way.
        Messages of a codec without loss are made on the host; others where they always are, to the same bits.
        """
        self._far = far
        self._cut(self.fragment.parts(BLOCK))
        if self._session.method.codec.traits.lossless:
            self._device = torch.device("cpu")

    def weights(self, copied: bool) -> Message:
        """The weights as they are, in a flat tensor; or, not `copied`, only the cells' views of them."""
        fragment = self.fragment
        if copied:
            return fragment.message(fragment.read())
        cells = {cell.name: [_rows(piece, fragment.named) for piece in cell.pieces] for cell in fragment.cells}
        return Message(torch.empty(0), fragment.names, lambda _: cells)

    def _cut(self, blocks: Sequence[Fragment]) -> None:
        self._blocks = blocks
        self._device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self._last = {name: block for block in blocks for name in block.named}
        """The last block with values of each parameter."""

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
        gradients = HeldGradients(self._far())
        told, fault = self._notes(gradients, loss, unscale(self._optimizer))
        number = self._exchanges
        group = group_of(network.rank, self._topology.groups(network.members(), str(number)))
        exchange, started = Exchange(number, gradients, told, fault, group), network.now()
        for block in self._blocks:
            exchange.parts.append(self._start(exchange, block))
            if len(exchange.parts) > 1:
                self._end(exchange)
        while exchange.parts:
            self._end(exchange)
        found = exchange.found
        if found.overflowed:
            for parameter in held_by(self._optimizer):
                gradients.drop(parameter)
            if remembered is not None:
                self._averaging.load_state_dict(remembered)  # what was sent in vain is still to be sent
        self._session.report(
            Round(
                round=number,
                fragment=self._index,
                group=group,
                started_step=self.step,
                step=self.step,
                started=started,
                finished=exchange.finished,
                waited_from=started + exchange.used_s,
                landed=network.now(),
                outcome=Outcome.NO_PROGRESS if fault else Outcome.AVERAGED if group else Outcome.SAT_OUT,
                reason=fault,
                compression_error=joint_error(exchange.errors, exchange.sizes),
            )
        )
        return _like(loss, found.loss / found.counted if found.counted else float("nan"))

    def _start(self, exchange: Exchange, block: Fragment) -> Part:
        """Starts averaging a block's gradients, column by column, each with its notes; who sits out keeps its own."""
        network, group = self._network, exchange.group
        key = self._session.key(f"gradient {exchange.number} of optimizer {self._index}")
        if len(self._blocks) > 1:
            key = f"{key}, from {block.names[0]}"
        flat = self._flat(exchange, block)
        columns = self._session.columns.of(group or (network.rank,), block.names)
        messages = [self._with_notes(flat, exchange.told, block, column) for column in columns]
        if not group or not columns:
            return Part(block, flat, Finished(messages, network.now()))
        meetings = [Meeting(column.network, group, column.key(key), exchange.number) for column in columns]
        exchange.sizes.append(norm([flat]) if len(self._blocks) > 1 else 1.0)  # while the values are its own
        started, error = self._averaging.start_parts(messages, meetings)
        exchange.errors.append(error)
        return Part(block, flat, Together(started, network.now, lambda _: messages))

    def _end(self, exchange: Exchange) -> None:
        """Waits for the first block under way; its mean takes the place of its gradients, and layers may step."""
        block, flat, pending = exchange.parts.popleft()
        with self._session.departures.watched(exchange.group, self._index, exchange.number):
            means = pending.wait(self._session.deadline_s)
        exchange.finished, came = pending.finished_at, self._network.now()
        exchange.found = self._found(means, block, flat)
        if not exchange.found.overflowed:
            self._scatter(exchange, block, flat[: block.numel])
            exchange.gradients.step(exchange.known)
        exchange.used_s += self._network.now() - came

    def _with_notes(self, gradients: Tensor, notes: Notes, block: Fragment, column: Column) -> Message:
        """A column's part of a block's flat gradients, and the notes behind it."""
        message = block.message(gradients[: block.numel])
        part = message.part(column.cells)
        told = torch.tensor([*(notes.present[name] for name in _told_of(block, column.cells)), *notes[1:]])
        flat = gradients if part is message else torch.cat([part.flat, part.flat.new_empty(len(told))])
        flat[-len(told) :] = told

        def views(flat: Tensor) -> Cells:
            return {**part.views(flat[: -len(told)]), NOTES: flat[-len(told) :].unbind()}

        return Message(flat, [*part.names, NOTES], views)

    def _flat(self, exchange: Exchange, block: Fragment) -> Tensor:
        """A block's flat gradients, with room for notes."""
        room = len(_told_of(block, block.names)) + OTHER_NOTES
        flat = torch.zeros(block.numel + room, dtype=torch.float32, device=self._device)
        if not exchange.fault:
            grads = {name: exchange.gradients.read(parameter) for name, parameter in block.named.items()}
            block.keeper.gather(grads, flat[: block.numel])
        return flat

    def _notes(self, gradients: HeldGradients, loss: Any, overflow: bool) -> tuple[Notes, str]:
        """This replica's notes; and why it has no gradients, or ""."""
        for name, parameter in self.fragment.named.items():
            if parameter.grad is not None and parameter.grad.layout != torch.strided and name not in self._sparse:
                raise UserError(f"{name} has sparse gradients, but no embedding with sparse=True; give it dense ones")
        present = {name: float(gradients.has(parameter)) for name, parameter in self.fragment.named.items()}
        if not overflow and not gradients.finite(self._parameters):
            self.faults.spoil("the gradient is not finite")
        fault = self.faults.judge(self._exchanges, self.step)
        self._session.untrained.restore() if fault else self._session.untrained.keep()
        if overflow:
            fault = fault or "a gradient overflowed at the GradScaler's scale"
        if fault:
            present = dict.fromkeys(present, 0.0)
        own_loss = 0.0 if loss is None else float(loss)
        counts = not fault and abs(own_loss) <= torch.finfo(torch.float32).max
        notes = Notes(present, own_loss if counts else 0.0, float(counts), float(overflow))
        if self._session.trained.layout.processes > 1:
            notes = notes._replace(present=self._in_replica(notes).present)
        return notes, fault

    def _found(self, messages: Sequence[Message], block: Fragment, gradients: Tensor) -> Notes:
        """The notes of the group; the mean gradients of a block replace this replica's.

        A process learns what the keepers of its cells were told, whichever processes of its replica these are.
        """
        whole = block.message(gradients[: block.numel])
        present = dict.fromkeys(self._session.trained.layout.outline, 0.0)
        rest = [0.0] * OTHER_NOTES
        for message in messages:
            whole.put(message)
            names = _told_of(block, message.names)
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

    def _scatter(self, exchange: Exchange, block: Fragment, mean: Tensor) -> None:
        """Gives the parameters of a block its mean gradients; and those that end in it none where no replica has one.

        A residual of a parameter, from steps in which it had a gradient, is a gradient, too.
        """
        gradients, present = exchange.gradients, exchange.found.present
        grads = {name: gradients.room(parameter) for name, parameter in block.named.items()}
        block.keeper.scatter(mean, grads)
        for name, parameter in block.named.items():
            if self._last[name] is not block:
                continue
            exchange.known.add(parameter)
            self._ever_present[name] = self._ever_present[name] or bool(present[name])
            residual = self._feeds_back and self._ever_present[name] and bool(grads[name].any())
            if not present[name] and not residual:
                gradients.drop(parameter)
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
        return {c.name: of_cell({"codecs": codecs.get(c.name, {})}, c) for c in self.fragment.cells}

    def load_state_dict(self, state: dict[str, Any], cells: Mapping[str, dict[str, Any]]) -> None:
        """Goes on from a `state_dict` and `cells`, which may be more than this process keeps."""
        self.step, self._exchanges = state["step"], state["exchanges"]
        self._ever_present = {name: state["ever_present"][name] for name in self.fragment.named}
        self.faults.load_state_dict(state["faults"])
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        own = {cell.name: cells[cell.name]["codecs"] for cell in self.fragment.cells}
        self._averaging.load_state_dict(copied(own, device))


def _told_of(block: Fragment, cells: Sequence[str]) -> list[str]:
    """The parameter of each piece of some cells of a block."""
    wanted = set(cells)
    return [piece.parameter for cell in block.cells if cell.name in wanted for piece in cell.pieces]


def _rows(piece: Piece, named: Mapping[str, nn.Parameter]) -> Tensor:
    """A piece of the parameters, of which this process has all rows."""
    whole = named[piece.parameter].detach()
    return whole[piece.begin : piece.begin + piece.shape[0]] if piece.shape else whole


def _like(loss: Any, value: float) -> Any:
    """A value in the form that a closure gave its loss."""
    if isinstance(loss, Tensor):
        return torch.full_like(loss, value, requires_grad=False)
    return None if loss is None else value
