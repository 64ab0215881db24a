"""One replica of the bench `others`: the same model, data, batches and inner optimizer, under a contender's rounds.

    python -m bench.lib.contenders CONTENDER NUMBER ADDRESS SETTINGS SCRATCH

Prints one line of JSON: validation loss, seconds of training, bytes that left the host's interface. Each contender's
library is imported by its own function only, since each has an environment of its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from farflung.settings import Settings
from farflung.testing.waiting import until
from farflung.workloads import Language
from farflung.workloads.models import sequence_loss

REPLICAS = 4
OUTER: dict[str, Any] = {"lr": 0.7, "momentum": 0.5, "nesterov": True}
TIMEOUT = timedelta(seconds=120)
PORT = 29510

Step = Callable[[], None]
"""Makes an inner step, and whatever rounds come with it."""


class Replica:
    """The model and what it trains on, the same for all contenders."""

    def __init__(self, settings: dict[str, Any], number: int, address: str, scratch: Path) -> None:
        torch.set_num_threads(1)
        self.number, self.address, self.scratch = number, address, scratch
        self.every, self.steps = settings.pop("every"), settings["steps"]
        self.config = Settings.of(**settings, replicas=REPLICAS)
        self._workload = Language(self.config.workload)
        self.model = self._workload.build(0).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings["lr"], weight_decay=0.1, fused=True)

    def backward(self, step: int) -> None:
        """Leaves the gradient of the step's loss."""
        ids = self._workload.sample_ids(self.config.run.seed, self.number, step, self.config.island.batch_size)
        self._workload.loss(self.model, self._workload.batch(ids)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Of this replica's weights."""
        self.model.eval()
        held_out = self._workload.data.held_out(128)
        assert isinstance(held_out, torch.Tensor)  # of text
        return float(sequence_loss(self.model, held_out))

    def meet(self, where: str) -> None:
        """Waits until all replicas have come so far."""
        (self.scratch / f"{where}-{self.number}").touch()
        arrived = [self.scratch / f"{where}-{number}" for number in range(REPLICAS)]
        until(lambda: all(path.exists() for path in arrived), TIMEOUT.total_seconds(), "the other replicas")


def local_step(replica: Replica, optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def farflung_rounds(replica: Replica, method: Any) -> Iterator[Step]:
    """Ours, over torch.distributed."""
    import torch.distributed as dist

    from farflung.networks import TorchNetwork

    network = TorchNetwork.from_env(starting=120)
    with method.attach(replica.model, replica.optimizer, network):
        yield lambda: local_step(replica, replica.optimizer)
    dist.barrier()


def diloco(replica: Replica) -> Any:
    from farflung import methods

    return farflung_rounds(replica, methods.diloco(replica.every, OUTER["lr"], OUTER["momentum"]))


def noloco(replica: Replica) -> Any:
    from farflung import methods

    return farflung_rounds(replica, methods.noloco(replica.every, OUTER["lr"], OUTER["momentum"]))


def averaging(replica: Replica) -> Any:
    """Weights averaged among all, which is what hivemind does below."""
    from farflung import methods

    return farflung_rounds(replica, methods.diloco(replica.every, outer_lr=1.0, outer_momentum=0.0))


@contextmanager
def torchft_diloco(replica: Replica) -> Iterator[Step]:
    """torchft's DiLoCo: a lighthouse, a manager for each replica, and its all-reduce over Gloo."""
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    lighthouse = LighthouseServer(bind=f"0.0.0.0:{PORT}", min_replicas=REPLICAS) if replica.number == 0 else None
    store = TCPStore(replica.address, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=lambda state: None,
        state_dict=lambda: {"nothing": 0},
        min_replica_size=REPLICAS,
        use_async_quorum=False,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=replica.address,
        store_port=store.port,
        lighthouse_addr=f"http://{os.environ['FIRST_ADDRESS']}:{PORT}",
        replica_id=f"replica-{replica.number}",
        hostname=replica.address,
        init_sync=False,  # all start from the same weights; it would ask a host by a name that nobody resolves
    )
    outer = torch.optim.SGD(replica.model.parameters(), **OUTER)
    with DiLoCo(manager, [replica.model], replica.optimizer, outer, sync_every=replica.every):
        yield lambda: local_step(replica, replica.optimizer)
    replica.meet("done")
    manager.shutdown(wait=False)
    del lighthouse


@contextmanager
def hivemind_dht(folder: Path, number: int, address: str, port: int) -> Iterator[Any]:
    """A DHT of all replicas; the first writes down where it is."""
    import hivemind

    meeting = folder / "hivemind"
    if number:
        until(meeting.exists, TIMEOUT.total_seconds(), "the first replica")
    peers = meeting.read_text().split() if number else None
    where = [f"/ip4/{address}/tcp/{port}"]
    dht = hivemind.DHT(initial_peers=peers, host_maddrs=where, start=True, nat_port_map=False, auto_nat=False)
    if not number:
        (folder / "new").write_text("\n".join(map(str, dht.get_visible_maddrs())))
        (folder / "new").rename(meeting)
    yield dht
    dht.shutdown()


def hivemind_mean(dht: Any, tensors: list[torch.Tensor], replicas: int) -> Any:
    """hivemind's averager of so many replicas' tensors."""
    import hivemind

    return hivemind.averaging.DecentralizedAverager(
        tensors,
        dht,
        prefix="bench",
        target_group_size=replicas,
        min_matchmaking_time=1.0,
        request_timeout=0.9,
        start=True,
    )


@contextmanager
def hivemind_averager(replica: Replica) -> Iterator[Step]:
    """hivemind's averager, given the weights every few steps."""
    parameters = list(replica.model.parameters())
    with hivemind_dht(replica.scratch, replica.number, replica.address, PORT) as dht:
        averager = hivemind_mean(dht, [p.detach().clone() for p in parameters], REPLICAS)
        steps = 0

        def step() -> None:
            nonlocal steps
            local_step(replica, replica.optimizer)
            steps += 1
            if steps % replica.every:
                return
            with averager.get_tensors() as shared, torch.no_grad():
                for mine, parameter in zip(shared, parameters, strict=True):
                    mine.copy_(parameter)
            averager.step(timeout=TIMEOUT.total_seconds())
            with averager.get_tensors() as shared, torch.no_grad():
                for mine, parameter in zip(shared, parameters, strict=True):
                    parameter.copy_(mine)

        yield step
        averager.shutdown()
        replica.meet("done")


@contextmanager
def hivemind_optimizer(replica: Replica) -> Iterator[Step]:
    """hivemind's Optimizer with local updates: weights averaged once all together have seen so many samples."""
    import hivemind

    with hivemind_dht(replica.scratch, replica.number, replica.address, PORT) as dht:
        optimizer = hivemind.Optimizer(
            dht=dht,
            run_id="beside",
            batch_size_per_step=replica.config.island.batch_size,
            target_batch_size=replica.config.island.batch_size * REPLICAS * replica.every,
            optimizer=replica.optimizer,
            use_local_updates=True,
            matchmaking_time=1.0,
            averaging_timeout=60.0,
            averager_opts={"request_timeout": 0.9},
        )
        yield lambda: local_step(replica, optimizer)
        optimizer.shutdown()
        replica.meet("done")


CONTENDERS: dict[str, tuple[str, Callable[[Replica], Any]]] = {
    "farflung diloco": ("farflung", diloco),
    "torchft DiLoCo": ("torchft", torchft_diloco),
    "farflung noloco": ("farflung", noloco),
    "farflung, averaging weights": ("farflung", averaging),
    "hivemind averager": ("hivemind", hivemind_averager),
    "hivemind Optimizer, local updates": ("hivemind", hivemind_optimizer),
}
"""Each one's library and rounds."""


def sent(interface: str) -> int:
    """Bytes that have left an interface of this host, headers and all."""
    return int(Path("/sys/class/net", interface, "statistics/tx_bytes").read_text())


def main() -> None:
    contender, number, address, settings, scratch = sys.argv[1:]
    replica = Replica(json.loads(settings), int(number), address, Path(scratch))
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    _, rounds = CONTENDERS[contender]
    with rounds(replica) as step:
        replica.meet("ready")
        before, began = sent(interface), time.monotonic()
        for number_of_step in range(replica.steps):
            replica.backward(number_of_step)
            step()
        seconds, bytes_sent = time.monotonic() - began, sent(interface) - before
    print(json.dumps({"loss": replica.validation_loss(), "seconds": seconds, "bytes_sent": bytes_sent}), flush=True)
    os._exit(0)  # their background threads need not be waited for


if __name__ == "__main__":
    main()
