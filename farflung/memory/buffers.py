"""Buffers that forward passes change, such as running means: a pass that is made once more changes none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from torch import Tensor, nn


class Buffer(NamedTuple):
    """A module's own buffer, and its value at some time."""

    owner: nn.Module
    name: str
    value: Tensor


def buffers_of(module: nn.Module) -> list[Buffer]:
    """All that a module and those in it have."""
    owned = ((owner, *entry) for owner in module.modules() for entry in owner._buffers.items())
    return [Buffer(owner, name, value) for owner, name, value in owned if value is not None]


@contextmanager
def having(buffers: Sequence[Buffer]) -> Iterator[None]:
    """A context in which modules have copies of these as their buffers; after it they have what they had before."""
    before = [owner._buffers[name] for owner, name, _ in buffers]
    copies = {id(value): value.clone() for _, _, value in buffers}
    for owner, name, value in buffers:
        owner._buffers[name] = copies[id(value)]
    try:
        yield
    finally:
        for (owner, name, _), own in zip(buffers, before, strict=True):
            owner._buffers[name] = own


class Found:
    """The buffers that a forward pass through a module changes, as it found them."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._changed: list[Buffer] = []

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """One for the forward pass, and one for when it is made again, which finds them as it did the first time."""
        return self._noting(), self._again()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        before = buffers_of(self._module)
        noted = [(one, one.value._version, one.value.clone()) for one in before]
        yield
        changed = {
            one.owner
            for one, version, _ in noted
            if one.owner._buffers[one.name] is not one.value or one.value._version != version
        }
        # All of a module's own: only the number of batches tells that a BatchNorm's running means have changed.
        self._changed = [Buffer(one.owner, one.name, value) for one, _, value in noted if one.owner in changed]

    @contextmanager
    def _again(self) -> Iterator[None]:
        with having(self._changed):
            yield
