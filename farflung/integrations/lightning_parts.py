"""What a replica puts in the place of Lightning's own: its way to files, and its training data."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from farflung.errors import UserError
from farflung.integrations import generations
from farflung.integrations.replicas import Seat


class OwnFiles:
    """Lightning's CheckpointIO, with a replica's own place for each file, where the one before stays beside it."""

    def __init__(self, io: Any, seat: Seat, deadline_s: float) -> None:
        self._io, self._seat, self._deadline_s = io, seat, deadline_s

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Saves beside the place, and puts it there once all replicas have come to that."""
        place = generations.of_replica(Path(path), self._seat.rank)
        part = place.with_name(f"{place.name}.part")
        self._io.save_checkpoint(checkpoint, str(part), storage_options)
        part.rename(generations.new_of(place))
        generations.put(place, self._seat, int(checkpoint["global_step"]), self._deadline_s)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """The newest checkpoint of this path that all replicas have whole. Raises UserError."""
        place = generations.of_replica(Path(path), self._seat.rank)
        return self._io.load_checkpoint(str(generations.newest_common(place, self._seat, _step_of)), *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        """Removes this replica's, also the one before."""
        for one in generations.all_of(generations.of_replica(Path(path), self._seat.rank)):
            generations.remove(one)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._io, name)


def _step_of(path: Path) -> int | None:
    try:
        return int(torch.load(path, map_location="cpu", weights_only=False, mmap=True)["global_step"])
    except Exception as error:  # whatever a damaged file makes of unpickling it
        warnings.warn(f"{path} is left out, since it is damaged: {str(error).partition(chr(10))[0]}", stacklevel=2)
        return None


def divide(trainer: Any, seat: Seat) -> None:
    """Makes what Lightning trains on this replica's share of it; what cannot be divided is refused when it is asked."""
    source = trainer.fit_loop._data_source
    if "dataloader" not in vars(source):
        whole = source.dataloader
        source.dataloader = lambda: _divided(whole(), trainer, seat)


def _divided(data: Any, trainer: Any, seat: Seat) -> Any:
    if isinstance(data, list | tuple):
        return type(data)(_divided(one, trainer, seat) for one in data)
    if isinstance(data, dict):
        return {name: _divided(one, trainer, seat) for name, one in data.items()}
    if not isinstance(data, DataLoader):
        raise UserError(f"the training data is a {type(data).__name__}; give a DataLoader, which can be divided")
    if isinstance(data.dataset, IterableDataset):
        raise UserError("an IterableDataset cannot be divided here; give a dataset with a length")
    if not isinstance(data.sampler, RandomSampler | SequentialSampler):
        raise UserError(
            f"a {type(data.sampler).__name__} cannot be divided among the replicas; leave the sampler out, and use "
            "shuffle="
        )
    sampler: DistributedSampler[Any] = DistributedSampler(
        data.dataset, seat.replicas, seat.rank, shuffle=isinstance(data.sampler, RandomSampler), drop_last=True
    )
    package = type(trainer).__module__.partition(".trainer")[0]
    own = importlib.import_module(f"{package}.utilities.data")._update_dataloader(data, sampler)
    return Resumable(own)


class Resumable:
    """A DataLoader that goes on after the batch that it had come to, in the same order."""

    def __init__(self, data: DataLoader[Any]) -> None:
        self._data, self._given, self._skipped = data, 0, 0

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[Any]:
        self._given, self._skipped = self._skipped, 0
        with torch.random.fork_rng(devices=[], enabled=self._given > 0):  # what was drawn for these has been drawn
            batches = iter(self._data)
            for _ in range(self._given):
                next(batches)
        for batch in batches:
            self._given += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """How many batches of the epoch it has given."""
        return {"given": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on after so many batches, or with the next epoch."""
        self._skipped = state["given"] % len(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)


def clip_in_mixed_precision(plugin: Any) -> Callable[[], None]:
    """Lets a precision plugin clip gradients of optimizers under rounds; returns what undoes that.

    They tell scalers that they handle scaling, since rounds count each step. Lightning refuses to clip for such ones.
    """
    if not hasattr(plugin, "scaler"):
        return lambda: None

    def clip(optimizer: Any, clip_val: float = 0.0, *args: Any, **kwargs: Any) -> None:
        if clip_val > 0 and plugin.scaler is not None:
            plugin.scaler.unscale_(optimizer)
        super(type(plugin), plugin).clip_gradients(optimizer, clip_val, *args, **kwargs)

    plugin.clip_gradients = clip
    return lambda: vars(plugin).pop("clip_gradients", None)
