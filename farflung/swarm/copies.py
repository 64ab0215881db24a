"""Copies of another stage's state: what is left of it when the last peer that served it is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING

import torch

from farflung.files import replacing
from farflung.networks import PeerLostError, SharedState

if TYPE_CHECKING:
    from farflung.networks.internet import InternetNetwork

LOOK_SECONDS = 1.0
"""How often a peer looks whether it is time for a copy."""


class Copies:
    """One peer's part: of each stage, the last peer by rank keeps a copy of the next one's state, on disk.

    Args:
        folder: for the copies.
        every: steps from one to the next.
        due: whether this peer is the one of its stage.
    """

    def __init__(
        self, network: InternetNetwork, stages: int, folder: Path, every: int, due: Callable[[], bool]
    ) -> None:
        self._network, self._every, self._due = network, every, due
        self._next = (int(network.peers.info["stage"]) + 1) % stages
        self._folder = folder

    async def go_on(self) -> None:
        """Takes copies for ever."""
        before = 0
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            turn = int(self._network.peers.info["step"]) // self._every
            if turn == before or not self._due():
                continue
            try:
                state = await self._network.asked_for(self._next)
                await asyncio.to_thread(self._write, state)
            except PeerLostError:
                continue  # nobody has it now
            except OSError as error:  # to fetch it again at once would not make room
                why = error.strerror or error
                told = f"no copy of stage {self._next} is kept: {why}; see to {self._folder}"
                self._network.peers.background.tell_once(told)
            before = turn

    def _write(self, state: SharedState) -> None:
        with replacing(self._path(self._next)) as file:
            torch.save({"tensors": state.tensors, "facts": state.facts}, file)

    def lent(self, stage: int) -> SharedState | None:
        """The copy of a stage, if it has a whole one."""
        try:
            told = torch.load(self._path(stage), weights_only=True)
            return SharedState(told["tensors"], told["facts"])
        except (OSError, RuntimeError, ValueError, KeyError, EOFError, UnpicklingError):
            return None  # others may have one

    def _path(self, stage: int) -> Path:
        return self._folder / f"stage-{stage}.pt"
