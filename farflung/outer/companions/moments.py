"""What inner optimizers keep of each parameter, averaged at rhythms of its own."""

from __future__ import annotations

import math
import zlib
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from farflung.cells import Cell, Piece
from farflung.codecs import Dense
from farflung.errors import UserError
from farflung.hooks.shards import own_of
from farflung.networks.base import BESIDE
from farflung.networks.torchrun import log
from farflung.outer.averaging import Averaging, Growth
from farflung.outer.columns import Message, views_like
from farflung.outer.companions.additions import Addition, awaited, exchanged
from farflung.outer.companions.base import Added, Along
from farflung.outer.companions.growths import OwnPart, decay_of, growth_of
from farflung.outer.fragments import sendable
from farflung.outer.outcomes import Outcome
from farflung.outer.topologies import Everyone

if TYPE_CHECKING:
    from farflung.inner import Inner
    from farflung.outer.fragments import Fragment, Weights
    from farflung.outer.loop import OuterLoop
    from farflung.outer.method import Method
    from farflung.outer.outcomes import Result
    from farflung.outer.round import Sync

STEP = 2.0**-30
"""What a step counts in messages: next to moments, which a message's size is judged by, that is nothing."""

SQUARE = "exp_avg_sq"
"""What kinds of Adam call the mean of squares that they divide their other moments by."""

SQUARES = frozenset((SQUARE, "max_exp_avg_sq", "square_avg"))
"""What no optimizer lets be negative: it takes their roots."""

MOST_STEPS = 2.0**23
"""Taken of others: a float32 counts twice as far."""

NONE_KEPT = "no attached optimizer keeps %s, so only weights are averaged; give attach one that does, such as AdamW"


@dataclass(frozen=True)
class AveragedMoments:
    """Averages what inner optimizers keep, each kind at every so-many-th round (DES-LOC, arXiv 2505.22549).

    A moment forgets slowly or fast, and need not be averaged more often than it does. What is averaged travels as
    float32 among those who held the round, which wait for it; the numbers of steps that moments are divided by are
    averaged with them, since replicas that come late have had fewer. One whose moments are not finite takes the
    others'. One that has had no gradient of a value yet leaves its moments at nought until their size is averaged, too.

    Args:
        rhythms: kinds of state by their names, such as exp_avg, and the rounds from one average to the next; one that
            comes several times is averaged at each of its rhythms.
    """

    rhythms: tuple[tuple[str, int], ...]
    sends_more = True

    def __post_init__(self) -> None:
        if bad := [(name, rounds) for name, rounds in self.rhythms if rounds < 1]:
            raise UserError(f"{bad[0][0]} is to be averaged each {bad[0][1]} rounds; choose at least 1")

    def added(self, method: Method, cells: Sequence[Cell]) -> Added:
        """See Companion: what the method's own inner optimizer keeps, and a number of steps a piece."""
        rhythms, pieces = self.by_kind(), [piece for cell in cells for piece in cell.pieces]
        kept = kinds_kept(method.inner, {piece.parameter: len(piece.shape) for piece in pieces})
        often = {kind: _often(each) for kind, each in rhythms.items()}
        shares = [(piece, [often[kind] for kind in kept[piece.parameter] & often.keys()]) for piece in pieces]
        values = sum(piece.numel * sum(each) + max(each, default=0.0) for piece, each in shares)
        return Added(values, Everyone() if method.topology.identical else method.topology, hidden=False)

    def along(self, loop: OuterLoop) -> Along:
        """See Companion."""
        return Moments(loop, self.by_kind())

    def by_kind(self) -> dict[str, list[int]]:
        """The rhythms of each kind."""
        kinds: dict[str, list[int]] = {}
        for kind, rounds in self.rhythms:
            kinds.setdefault(kind, []).append(rounds)
        return kinds


def _often(rhythms: Sequence[int]) -> float:
    """In which part of the rounds at least one of some rhythms is due."""
    several = [some for count in range(1, len(rhythms) + 1) for some in combinations(rhythms, count)]
    return math.fsum((-1) ** (len(some) + 1) / math.lcm(*some) for some in several)


def _is_due(round: int, rhythms: Sequence[int]) -> bool:
    return any(round % rounds == 0 for rounds in rhythms)


def kinds_kept(inner: Inner, dimensions: Mapping[str, int]) -> dict[str, set[str]]:
    """What an inner optimizer keeps of parameters of so many dimensions, by name: found by a step of tiny ones."""
    shapes = {name: [1] * count for name, count in dimensions.items()}
    named = {name: nn.Parameter(torch.ones(one, dtype=torch.float32, device="cpu")) for name, one in shapes.items()}
    optimizer = inner.make(list(named.items()), lr=inner.lr, weight_decay=0.0)
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {name: set(optimizer.state.get(parameter, {})) for name, parameter in named.items()}


class Moments(Along):
    """One loop's moments."""

    def __init__(self, loop: OuterLoop, rhythms: Mapping[str, Sequence[int]]) -> None:
        self._loop = loop
        self._rhythms = rhythms
        plain = replace(loop.method, codec=Dense(), topology=Everyone(), fuse="mean")
        rank, rule = loop.network.rank, loop.aggregation
        self._averagings = [Averaging(rank, plain, exact=True, aggregation=rule()) for _ in loop.anchors]
        self._kinds: dict[str, tuple[str, ...]] = {}
        """What is kept of each parameter, by its name; also of those that have had no gradient yet."""
        self._decays: dict[str, dict[str, float | None]] = {}
        self._own = [OwnPart() for _ in loop.anchors]
        self._told = False

    def before(self, sync: Sync[Tensor], weights: Weights) -> None:
        """Notes what there is: a replica that was spoilt has none afterwards."""
        self._note(weights)

    def _note(self, weights: Weights) -> None:
        names = {parameter: name for name, parameter in weights.fragment.named.items()}
        for optimizer in self._loop.trained.optimizers:
            for group in optimizer.param_groups:
                states = [optimizer.state[one] for one in group["params"] if one in optimizer.state]
                kinds = tuple(kind for kind in self._rhythms if any(kind in state for state in states))
                if kinds:
                    decays = {kind: decay_of(kind, group) for kind in kinds}
                    here = [names[one] for one in group["params"] if one in names]
                    self._kinds |= dict.fromkeys(here, kinds)
                    self._decays |= dict.fromkeys(here, decays)

    def after(self, sync: Sync[Tensor], weights: Weights, round: int, result: Result) -> None:
        """Averages what is due after this round."""
        due = [kind for kind, rhythms in self._rhythms.items() if _is_due(round, rhythms)]
        # Where replicas come and go, who was missed may come to this, and others wait for it.
        missing = () if self._loop.network.elastic else result.missing
        group = tuple(rank for rank in result.group if rank not in missing)
        if not due or len(group) < 2 or self._loop.network.rank not in group:  # whose own message nobody takes
            return
        self._note(weights)  # one that goes on from a state has not seen the round start
        if not (self._kinds or self._told):
            self._told = True
            log.warning(NONE_KEPT, " or ".join(self._rhythms))
        states = self._states(weights)
        known = self._known(weights, states, self._own[sync.index])
        moments = Due(weights.fragment, states, known, due)
        message = moments.message(weights.anchor.device)
        if not (sound := sendable(message.flat)):
            message.flat.zero_()
        kind = self._loop.trained.layout.total(moments.digest)
        key = self._loop.key(f"round {round} of moments{BESIDE}fragment {sync.index}")
        added = Addition(message, group, key, round, sync.index, float(sound), str(int(kind)), moments.growths)
        exchange = exchanged(self._loop, added, self._averagings[sync.index])
        averaged = awaited(self._loop, added, exchange)
        if averaged.outcome == Outcome.AVERAGED:
            counted, part = _counted(states), self._own[sync.index]
            moments.take(message.like(averaged.mean), len(averaged.group) if sound else math.inf, part.lent)
            part.takes(due, counted, _counted(states))
        elif averaged.outcome == Outcome.PEER_LOST:
            result.note(Outcome.PEER_LOST, averaged.reason)
        else:
            result.note(result.outcome, f"moments were not averaged: {averaged.reason}")

    def _known(self, weights: Weights, states: Mapping[str, dict[str, Any]], part: OwnPart) -> dict[str, Known]:
        """What the replica keeps of each parameter; a process may keep cells of parameters of which it has no rows."""
        run = 0.0 if self._loop.method.schedule.by_clock else float(self._loop.step)  # which counts no steps there
        own = part.steps(_counted(states))
        known = {}
        for name in (name for name in weights.fragment.named if name in self._kinds):
            kinds, decays = self._kinds[name], self._decays[name]
            growths = {kind: 1.0 if kind in part.averaged else growth_of(decays[kind], own, run) for kind in kinds}
            more = 1.0 if part.averaged or not own else max(1.0, (run or MOST_STEPS) / own)
            known[name] = Known(kinds, float(states.get(name, {}).get("step", 0.0)), growths, more)
        return dict(ChainMap(*self._loop.trained.layout.told(known)))

    def _states(self, weights: Weights) -> dict[str, dict[str, Any]]:
        """What inner optimizers keep of each parameter, by its name."""
        named, optimizers = weights.fragment.named, self._loop.trained.optimizers
        return {n: one.state[p] for one in optimizers for n, p in named.items() if one.state.get(p)}


def _leave_undivided(state: Mapping[str, Any], kinds: Sequence[str]) -> None:
    """Takes nothing of moments where this replica has had no gradient yet, by whose size they would be divided."""
    if (square := state.get(SQUARE)) is not None:
        for kind in kinds:
            if kind in state:
                own_of(state[kind]).masked_fill_(own_of(square) == 0, 0)


def _counted(states: Mapping[str, Mapping[str, Any]]) -> float:
    """The steps that inner optimizers count."""
    return max((float(state.get("step", 0.0)) for state in states.values()), default=0.0)


class Known(NamedTuple):
    """What is kept of a parameter: of which kinds, after how many steps, and as how many times as large it counts."""

    kinds: tuple[str, ...]
    step: float
    growths: Mapping[str, float]
    more_steps: float


class Due:
    """The moments of a fragment that are averaged after a round.

    A cell's part of their message has each piece of each kind in turn, and then the steps of its pieces.

    Args:
        fragment: of whose parameters they are.
        states: what is kept of these, by their names.
        known: what the replica has of each, whichever of its processes.
        due: those that are averaged now.
    """

    def __init__(
        self,
        fragment: Fragment,
        states: Mapping[str, dict[str, Any]],
        known: Mapping[str, Known],
        due: Sequence[str],
    ) -> None:
        self._fragment = fragment
        self._states = states
        self._known = known
        self._kinds = {name: [kind for kind in one.kinds if kind in due] for name, one in known.items()}
        self._due = [kind for kind in due if any(kind in own for own in self._kinds.values())]

    @property
    def digest(self) -> Tensor:
        """A number (float64) that is another one, almost surely, where other kinds are kept of the cells."""
        pieces = [piece for cell in self._fragment.cells for piece in cell.pieces]
        words = (f"{piece.parameter} {piece.begin} {self._kinds.get(piece.parameter, [])}" for piece in pieces)
        return torch.tensor([sum(zlib.crc32(word.encode()) for word in words)], dtype=torch.float64, device="cpu")

    @property
    def growths(self) -> Growth:
        """As how many times as large each cell's tensors in the message count: see Meeting."""
        if all(one.more_steps == 1 and set(one.growths.values()) <= {1.0} for one in self._known.values()):
            return 1.0
        found = {}
        for cell in self._cells:
            pieces = [self._known[piece.parameter] for piece in self._pieces(cell)]
            each = [self._known[cell.pieces[place].parameter].growths[kind] for kind, place in self._places(cell)]
            found[cell.name] = [*each, max(piece.more_steps for piece in pieces)]
        return found

    def message(self, device: torch.device) -> Message:
        """Them as they are; noughts where none are kept yet."""
        flats = {kind: self._gathered(kind, device) for kind in self._due}
        cells = {cell.name: [*self._views(cell, flats).values(), *self._steps(cell, device)] for cell in self._cells}
        tensors = [tensor.reshape(-1) for each in cells.values() for tensor in each]
        none = torch.empty(0, dtype=self._fragment.dtype, device=device)
        return Message(torch.cat([none, *tensors]), list(cells), partial(views_like, cells))

    def take(self, mean: Message, members: float, lent: float) -> None:
        """Replaces them, where any are kept, and the numbers of steps that they are divided by.

        Steps and squares are never negative, so that their mean is at least what is this replica's own of it. One who
        says otherwise would have others take roots of less than nothing, or divide by next to nothing. Of its steps,
        so many are `lent`: what is its own grows, or round after round the same lie would leave ever less of it. Of a
        mean among infinitely many, nothing is its own.
        """
        device = mean.flat.device
        flats = {kind: self._gathered(kind, device) for kind in self._due}
        for cell in self._cells:
            views = self._views(cell, flats)
            *values, steps = mean.cells[cell.name]
            for ((kind, _), own), value in zip(views.items(), values, strict=True):
                least = own.nan_to_num(0.0, 0.0, 0.0).clamp_(min=0.0) / members if kind in SQUARES else value
                own.copy_(torch.maximum(value, least))
            for piece, number in zip(self._pieces(cell), steps.tolist(), strict=True):
                if isinstance(step := self._states.get(piece.parameter, {}).get("step"), Tensor):
                    least_steps = max(1.0, (self._known[piece.parameter].step - lent) / members)
                    step.fill_(min(max(least_steps, number / STEP), MOST_STEPS))
        for kind, flat in flats.items():
            self._fragment.keeper.scatter(flat, self._local(kind))
        for state in self._states.values():
            _leave_undivided(state, self._due)

    @property
    def _cells(self) -> list[Cell]:
        return [cell for cell in self._fragment.cells if self._pieces(cell)]

    def _pieces(self, cell: Cell) -> list[Piece]:
        """Those of which anything is averaged."""
        return [piece for piece in cell.pieces if self._kinds.get(piece.parameter)]

    def _local(self, kind: str) -> dict[str, Tensor]:
        """What this process has of a kind, by the parameters' names."""
        return {
            name: own_of(state[kind]) if kind in (state := self._states.get(name, {})) else torch.zeros_like(own)
            for name, own in ((name, own_of(one.detach())) for name, one in self._fragment.named.items())
        }

    def _gathered(self, kind: str, device: torch.device) -> Tensor:
        out = torch.zeros(self._fragment.numel, dtype=self._fragment.dtype, device=device)
        self._fragment.keeper.gather(self._local(kind), out)
        return out

    def _places(self, cell: Cell) -> list[tuple[str, int]]:
        """The kinds and pieces of a cell, in the order in which they travel."""
        kinds = [self._kinds.get(piece.parameter, ()) for piece in cell.pieces]
        return [(kind, place) for kind in self._due for place, kept in enumerate(kinds) if kind in kept]

    def _views(self, cell: Cell, flats: Mapping[str, Tensor]) -> dict[tuple[str, int], Tensor]:
        """The pieces of a cell of each kind, in flat tensors of the whole fragment."""
        pieces = {kind: self._fragment.message(flat).cells[cell.name] for kind, flat in flats.items()}
        return {(kind, place): pieces[kind][place] for kind, place in self._places(cell)}

    def _steps(self, cell: Cell, device: torch.device) -> list[Tensor]:
        pieces = self._pieces(cell)
        steps = [self._known[piece.parameter].step * STEP for piece in pieces]
        return [torch.tensor(steps, dtype=self._fragment.dtype, device=device)]
