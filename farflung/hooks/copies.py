"""Weights that inner optimizers keep besides the model's: schedule-free averages, float32 masters of half precision.

A round changes the model's weights between the optimizer's steps. Copies in the optimizer's state are changed with
them. An optimizer that hides its copies puts the old weights back; that is how it is found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farflung.hooks.hidden import Watch
from farflung.hooks.kept import Kept
from farflung.hooks.shards import own_of
from farflung.hooks.trained import held_by


class Copies:
    """The copies of weights that some optimizers keep. Torch's own keep none. Rounds write a fragment's together.

    Ours say which ones they keep, in `keeps_weights`; those of others are looked for.
    """

    others_move_them = False
    """Whether what goes along with rounds sees itself to the copies that our optimizers keep, as FastWeights does."""

    def __init__(self, optimizers: Sequence[Optimizer], fragments: Sequence[Sequence[nn.Parameter]]) -> None:
        self._fragments = fragments
        self._plain = [optimizer for optimizer in optimizers if _known(optimizer)]
        self._told = [optimizer for optimizer in self._plain if hasattr(optimizer, "keeps_weights")]
        self._kept = [Kept(optimizer) for optimizer in optimizers if optimizer not in self._plain]
        self._watches: list[list[Watch]] = [[] for _ in fragments]
        for kept in self._kept:
            held = set(held_by(kept.optimizer))
            for watches, parameters in zip(self._watches, fragments, strict=True):
                if own := [parameter for parameter in parameters if parameter in held]:
                    name = type(kept.optimizer).__name__
                    watches.append(Watch(name, own, partial(kept.in_sight, own)))

    def begin(self) -> None:
        """Records optimizers and weights before the first step."""
        for kept in self._kept:
            kept.begin()
        self._restart()

    @torch.no_grad()
    def stepped(self) -> None:
        """Records an inner step."""
        for kept in self._kept:
            kept.stepped()
        for watches in self._watches:
            for watch in watches:
                watch.stepped()

    @contextmanager
    def following(self, *fragments: int) -> Iterator[None]:
        """A context in which a round writes the parameters of some fragments, by default all; copies change by as much.

        Raises UserError when an optimizer puts back what rounds have written.
        """
        for kept in self._kept:
            kept.look()
        written = fragments or range(len(self._fragments))
        told = [] if fragments and self.others_move_them else self._told
        follows = told or any(kept.followers for kept in self._kept)
        wanted = [parameter for fragment in written for parameter in self._fragments[fragment] if follows]
        before = {parameter: own_of(parameter.detach()).clone() for parameter in wanted}
        yield
        for kept in self._kept:
            kept.follow(before)
        for optimizer in told:
            _move(optimizer, before)
        for fragment in written:
            for watch in self._watches[fragment]:
                watch.written()
            self._watches[fragment] = [watch for watch in self._watches[fragment] if not watch.trusts]

    def put_back(self) -> None:
        """Resets all state to its first values, and copies to the weights."""
        for optimizer in self._plain:
            for parameter in held_by(optimizer):
                optimizer.state.pop(parameter, None)
        for kept in self._kept:
            kept.put_back()
        self._restart()

    def _restart(self) -> None:
        for watches in self._watches:
            for watch in watches:
                watch.restart()

    def state_dict(self) -> list[dict[str, Any]]:
        """What is known of each optimizer's copies."""
        return [kept.state_dict() for kept in self._kept]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Goes on from a `state_dict`."""
        for kept, saved in zip(self._kept, state, strict=True):
            kept.load_state_dict(saved)


def _move(optimizer: Any, before: Mapping[nn.Parameter, Tensor]) -> None:
    """Moves what an optimizer keeps of parameters as far as these have moved from `before`."""
    for parameter in held_by(optimizer):
        state = optimizer.state.get(parameter, {})
        for copy in [own_of(state[name]) for name in optimizer.keeps_weights if name in state and parameter in before]:
            copy.add_(own_of(parameter.detach()) - before[parameter])


def _known(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith(("torch.optim.", "farflung."))
