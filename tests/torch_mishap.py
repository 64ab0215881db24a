"""A process of islands in which something goes wrong in one process only: `torch_mishap.py CASES _ OUT`.

Four processes are two islands of two shards, or one of two shards twice. The user's loop knows no pipeline of ours.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from patience import patience
from torch import Tensor, nn
from torch_shard import Model, batch, sharded, whole

from farflung import methods
from farflung.errors import UserError
from farflung.hooks.shards import own_of
from farflung.networks import Network, PeerLostError, TorchNetwork
from farflung.outer import DisagreementError, DivergedError, GradientLoop, Session

EVERY = 3
SPOILT_AT = EVERY + 1


def trained(
    network: Network, model: nn.Module, replica: int, share: Callable[[Tensor], Tensor], spoils: Callable[[int], bool]
) -> tuple[list[Any], dict[str, Tensor]]:
    """What rounds came to, and the weights; before some steps a user's loop says that training went wrong."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    said: list[Any] = []
    try:
        with methods.diloco(every=EVERY).attach(
            model, optimizer, network, deadline_s=60, on_round=lambda round: said.append((round.outcome, round.reason))
        ) as outer:
            for step in range(5 * EVERY):
                model(share(batch(replica, step))).square().mean().backward()
                if spoils(step):
                    outer.spoil("my own check")
                optimizer.step()
                optimizer.zero_grad()
    except DivergedError as error:
        said.append(str(error))
    return said, whole(model)


def once(step: int) -> bool:
    """A loop that something goes wrong in once."""
    return step == SPOILT_AT


def always(step: int) -> bool:
    """A loop in which it goes on."""
    return step >= SPOILT_AT


def never(step: int) -> bool:
    """A loop in which all is well."""
    return False


def spoilt(everyone: TorchNetwork, spoils: Callable[[int], bool]) -> Any:
    """Two islands of two shards; the second process says so."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "shard"))
    replica, shard = divmod(everyone.process, 2)
    network = everyone.of_islands([(0, 1), (2, 3)])
    says = spoils if everyone.process == 1 else never
    return trained(network, sharded(mesh["shard"]), replica, lambda whole: whole.chunk(2)[shard], says)


def spoilt_twice_sharded(everyone: TorchNetwork, spoils: Callable[[int], bool]) -> Any:
    """One replica, of which each shard is in two processes; the last one says so."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))
    says = spoils if everyone.process == 3 else never
    network = everyone.among([everyone.process])
    return trained(network, sharded(mesh), 0, lambda whole: whole.chunk(4)[everyone.process], says)


def bad_gradient(
    network: Network, model: nn.Module, replica: int, share: Callable[[Tensor], Tensor], case: str, spoils: bool
) -> tuple[list[Any], dict[str, Tensor]]:
    """What ddp came to, where one gradient of a process is infinite once, or a GradScaler finds it so."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=case == "scaled")
    said: list[Any] = []
    with methods.ddp().attach(
        model, optimizer, network, deadline_s=60, on_round=lambda round: said.append((round.outcome, round.reason))
    ):
        for step in range(4):
            scaler.scale(model(share(batch(replica, step))).square().mean()).backward()
            if spoils and step == 2:
                own_of(model.layers[0].weight.grad)[0, 0] = float("inf")  # type: ignore[index]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return said, whole(model)


def bad_gradients(everyone: TorchNetwork, case: str) -> Any:
    """An island of two shards, and two whole replicas; the gradient is the first process's."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "shard"))
    network = everyone.of_islands([(0, 1), (2,), (3,)])
    if network.rank:
        return bad_gradient(network, Model(), network.rank, lambda batch: batch, case, spoils=False)
    model, spoils = sharded(mesh["shard"]), everyone.process == 0
    return bad_gradient(network, model, 0, lambda batch: batch.chunk(2)[everyone.process], case, spoils)


def with_lr(lr: float) -> methods.Method:
    """A method whose description does not tell of its learning rate."""
    return replace(methods.diloco(every=EVERY), outer=lambda anchors: torch.optim.SGD(anchors, lr=lr))


UNLIKE: dict[str, tuple[methods.Method, methods.Method]] = {
    "schedule": (methods.diloco(every=3), methods.diloco(every=4)),
    "outer": (methods.diloco(every=1), methods.ddp()),
    "outer optimizer": (with_lr(0.5), with_lr(0.7)),
}
"""What the shards of a replica are given, each another, by what they differ in."""


def unlike(everyone: TorchNetwork, what: str) -> str:
    """What two islands say whose shards are given other methods than each other."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "shard"))
    replica, shard = divmod(everyone.process, 2)
    model = sharded(mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with UNLIKE[what][shard].attach(model, optimizer, everyone.of_islands([(0, 1), (2, 3)])):
            for step in range(2 * EVERY):
                model(batch(replica, step).chunk(2)[shard]).square().mean().backward()
                optimizer.step()
    except DisagreementError as error:
        return str(error)
    return ""


def kept_twice(everyone: TorchNetwork) -> str:
    """What an island says of which two processes have each shard, beside replicas of one process."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("island", "copy", "shard"))
    network = everyone.of_islands([(0, 1), (2,), (3,)])
    model = Model() if network.rank else sharded(mesh["copy", "shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with methods.diloco(every=EVERY).attach(model, optimizer, network, deadline_s=60):
            model(batch(0, 0)).square().mean().backward()
            optimizer.step()
    except UserError as error:
        return str(error)
    return ""


def dies(everyone: TorchNetwork, islands: list[tuple[int, ...]]) -> Any:
    """The last process dies in training; the rest end with the mean of their weights and of their statistics.

    Returns what each process had, and ended with, and what it said.
    """
    from torch.distributed.device_mesh import init_device_mesh

    said = io.StringIO()
    logging.getLogger("farflung").addHandler(logging.StreamHandler(said))
    network = everyone.of_islands(islands) if islands else everyone
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "shard"))
    shards = islands[network.rank] if islands else [everyone.process]
    model: nn.Module = sharded(mesh["shard"]) if len(shards) > 1 else Model()
    if not islands:
        model.register_buffer("seen", torch.zeros(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with methods.noloco(every=3).attach(model, optimizer, network, deadline_s=60) as outer:
        for step in range(8):
            if everyone.process == 3 and step == 7:
                os._exit(1)
            for buffer in model.buffers():
                buffer.fill_(everyone.process)
            part = batch(network.rank, step).chunk(len(shards))[shards.index(everyone.process)]
            model(part).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        before = whole(model)
        outer.finish(average_weights=True)
        ended = {**whole(model), **dict(model.named_buffers())}
    return before, ended, said.getvalue()


FEWER = {
    "pairs": methods.noloco(every=2),
    "pairs, delayed": methods.noloco(every=4, delay=3),
    "everyone": methods.diloco(every=2),
    "everyone, delayed": methods.dilocox(every=4),
    "fragments": methods.diloco(every=4, fragments=2),
    "gradients": methods.ddp(),
}


def fewer(everyone: TorchNetwork, method: methods.Method) -> Any:
    """The last replica has fewer batches, and deadlines are long; rounds, an error if any, and the last weights."""
    model, rounds = Model(), list[Any]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = 5 if everyone.rank == 3 else 16
    with patient(method, model, optimizer, everyone, rounds) as outer:
        try:
            for step in range(steps):
                model(batch(everyone.rank, step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        except PeerLostError as error:
            everyone.store.set(f"told {everyone.rank}", "")
            if everyone.rank == 0:  # it keeps the store, in which the others look who has left
                everyone.store.wait(["told 1", "told 2"], timedelta(seconds=patience(30)))
            return rounds, str(error), None
        outer.finish(average_weights=not isinstance(outer, GradientLoop))
    return rounds, "", whole(model)


def patient(
    method: methods.Method, model: nn.Module, optimizer: torch.optim.Optimizer, network: Network, rounds: list[Any]
) -> Session:
    """The method with long deadlines."""
    return method.attach(
        model,
        optimizer,
        network,
        deadline_s=10_000,
        on_round=lambda round: rounds.append((round.round, round.group, round.outcome.value, round.reason)),
    )


CASES: dict[str, Callable[[TorchNetwork], Any]] = {
    "spoilt": lambda everyone: spoilt(everyone, once),
    "spoilt, HSDP": lambda everyone: spoilt_twice_sharded(everyone, once),
    "diverged, HSDP": lambda everyone: spoilt_twice_sharded(everyone, always),
    "bad gradient": lambda everyone: bad_gradients(everyone, ""),
    "bad gradient, scaled": lambda everyone: bad_gradients(everyone, "scaled"),
    "dies": lambda everyone: dies(everyone, []),
    "dies in an island": lambda everyone: dies(everyone, [(0, 1), (2,), (3,)]),
    "fewer": lambda everyone: {name: fewer(everyone, method) for name, method in FEWER.items()},
    "kept twice": kept_twice,
    "unlike": lambda everyone: {what: unlike(everyone, what) for what in UNLIKE},
}


def main() -> None:
    """Has each mishap in turn, and leaves what came of it."""
    names, _, out = sys.argv[1:4]
    torch.set_num_threads(1)
    everyone = TorchNetwork.from_env(starting=60)
    torch.save({name: CASES[name](everyone) for name in names.split(";")}, Path(out) / f"{everyone.process}.pt")


if __name__ == "__main__":
    main()
