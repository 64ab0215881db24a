"""What the trainers of other libraries share here: each process is a replica, whose trainer believes itself alone.

A trainer that sees torchrun's variables would join the processes to one model and send gradients at each step. So they
are hidden from it once farflung's network has been made, and farflung divides the data instead of it.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset, Subset

from farflung.errors import UserError
from farflung.hooks.start import all_there
from farflung.hooks.trained import refuse_without_values
from farflung.networks import Network
from farflung.networks.base import packet_of, words_of

LAUNCHED = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RUN_ID"),
)
"""The variables by which trainers find out that torchrun has started them."""

DIVIDING = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron",
}
"""The variables by which `accelerate launch` and TrainingArguments choose what divides one model among processes."""

_TAKEN: weakref.WeakKeyDictionary[Network, weakref.ref[Seat]] = weakref.WeakKeyDictionary()
_ASKED: weakref.WeakKeyDictionary[Network, itertools.count[int]] = weakref.WeakKeyDictionary()


class Seat:
    """A replica's seat on a network, taken for one trainer until this has trained.

    Raises UserError where the network is none, cannot serve a trainer, or serves another one.
    """

    def __init__(self, network: Network, starting_s: float) -> None:
        _check(network)
        self.network = network
        self.rank, self.replicas = network.rank, len(network.members())
        self._starting_s = starting_s
        self.take()
        hide_launcher(network)

    def take(self) -> None:
        """Takes the seat, unless it has it. Raises UserError where another trainer has it."""
        holder = _TAKEN.get(self.network)
        if holder and holder() not in (None, self):
            raise UserError(
                "this network already serves a trainer that has not ended its training; train that one first, or give "
                "up what holds it (del trainer), then make the next"
            )
        _TAKEN[self.network] = weakref.ref(self)

    def leave(self) -> None:
        """Gives the seat to whoever wants it next."""
        _TAKEN.pop(self.network, None)

    def told(self, what: str, said: Any, seconds: float | None = None) -> dict[int, Any]:
        """What each replica says, a value that JSON can hold; all call this alike. Raises PeerLostError."""
        number = next(_ASKED.setdefault(self.network, itertools.count()))
        packet = packet_of(json.dumps(said).encode())
        pending = self.network.exchange(packet, self.network.members(), f"trainer's question {number}, {what}")
        packets = all_there(self.network, pending, seconds or self._starting_s)
        return {rank: json.loads(words_of(packet)) for rank, packet in packets.items()}

    def agree(self, settings: Mapping[str, Any]) -> None:
        """Compares settings of the trainer; all call this alike. Raises UserError for the first that differs."""
        for rank, theirs in self.told("settings", dict(settings)).items():
            for name, own in json.loads(json.dumps(settings)).items():
                if theirs[name] != own:
                    raise UserError(
                        f"{name} is {own} on replica {self.rank}, but {theirs[name]} on replica {rank}; give all "
                        "replicas the same, or their rounds would wait for steps that never come"
                    )

    def share(self, data: Any) -> Any:
        """This replica's part of a dataset: every so manyth sample, as many as each other replica gets.

        Raises UserError where there are fewer samples than replicas.
        """
        if self.replicas == 1 or data is None:
            return data
        known = sys.modules.get("datasets")
        if known and isinstance(data, known.IterableDataset):
            return known.distributed.split_dataset_by_node(data, self.rank, self.replicas)
        if isinstance(data, IterableDataset):
            return _EveryNth(data, self.rank, self.replicas)
        if not (each := len(data) // self.replicas):
            raise UserError(f"{len(data)} samples cannot be divided among {self.replicas} replicas; give more")
        own = range(self.rank, each * self.replicas, self.replicas)
        return data.select(own) if hasattr(data, "select") else Subset(data, own)


class _EveryNth(IterableDataset[Any]):
    """A replica's part of what can only be read from its beginning."""

    def __init__(self, data: IterableDataset[Any], first: int, step: int) -> None:
        self._data, self._first, self._step = data, first, step

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self._data, self._first, None, self._step)


def _check(network: Network) -> None:
    """Raises UserError for what cannot serve a trainer."""
    for name, kind in DIVIDING.items():
        if os.environ.get(name, "").lower() in ("true", "1"):
            raise UserError(
                f"{name} is set, and {kind} would divide one model among the replicas, where each must hold its own; "
                "leave it out of the trainer and of accelerate's configuration, and unset the variable"
            )
    if network is None or isinstance(network, type) or not hasattr(network, "members"):
        raise UserError(f"the network given is {network!r}; make one first: network = farflung.networks.from_env()")
    if network.elastic:
        raise UserError("peers on the internet come and go, which a trainer cannot; use farflung join, or attach")
    started = int(os.environ.get("WORLD_SIZE", 1))
    replicas = len(network.members())
    if replicas == 1 and started > 1:
        raise UserError(
            f"{started} processes were started, but the network given has one replica; make it of torchrun's: "
            "network = farflung.networks.from_env()"
        )
    if network.islands or started not in (1, replicas):
        raise UserError(
            f"{started} processes are {replicas} replicas of several each, which this trainer cannot hold; start one "
            "process for each replica, or use attach in a loop of your own"
        )


def refuse_meta(model: nn.Module) -> None:
    """Raises UserError where a model has no values yet."""
    refuse_without_values(dict(model.named_parameters()))


def hide_launcher(network: Network) -> None:
    """Hides from libraries that torchrun has started this process; each keeps the GPU that it was started for.

    States that accelerate has made already are changed, too. Nothing else of the process is touched.
    """
    states = _accelerate_states()
    local = int(os.environ.get("LOCAL_RANK", 0))
    if not torch.cuda.is_initialized() and not any(states) and (gpus := torch.cuda.device_count()) > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[local % gpus]
    for name in LAUNCHED:
        os.environ.pop(name, None)
    believe_alone()


def believe_alone() -> None:
    """Makes accelerate's states those of a process that is alone."""
    for state in _accelerate_states():
        if state:
            kind = type(state["distributed_type"]).NO
            state |= {"distributed_type": kind, "backend": None, "num_processes": 1}
            state |= {"process_index": 0, "local_process_index": 0}


def _accelerate_states() -> list[Any]:
    """What accelerate believes in this process; empty where it has not asked yet."""
    if not (module := sys.modules.get("accelerate.state")):
        return []
    return [module.PartialState._shared_state, module.AcceleratorState._shared_state]
