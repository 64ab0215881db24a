"""What observers are shown of a run: they receive what the replicas have, judge it, and add nothing."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.distributed import HashStore

from farflung.errors import UserError
from farflung.networks import Network, PeerLostError, SimulatedNetwork
from farflung.networks.base import packet_of, words_of
from farflung.outer import Session
from farflung.outer.elastic import CATCH_UP_SECONDS
from farflung.settings import Settings
from farflung.training import beginning, checkpoint
from farflung.training.finish import finish, write_results
from farflung.training.kept import Coordination, Kept
from farflung.training.showing import meeting
from farflung.training.stopping import Stop
from farflung.training.trainer import Trainer
from farflung.workloads import Workload

if TYPE_CHECKING:
    from farflung.training.onlooker import OpenNetwork

WHEN = "observe it once farflung status shows somebody who trains"
"""What to do where there was nothing to observe."""
LOOK_SECONDS = 0.5
"""How often an observer looks whether there is something new."""
NOTHING = packet_of(b"-")
"""What an observer sends."""


def folder_of(folder: Path, observer: int) -> Path:
    """The run folder of a run's observer, in the run's own."""
    return folder / f"observer-{observer}"


class Source(Protocol):
    """Where an observer has what it judges from."""

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        ...

    def take(self, session: Session) -> bool:
        """Loads what is new into the model, and sets the session's step; whether there was anything."""
        ...

    def pause(self, seconds: float) -> None:
        """Passes some time until it is looked again."""
        ...


class Replicas:
    """What a fixed number of replicas show; see `Shown`."""

    def __init__(self, network: Network, replicas: int, model: nn.Module, tell: Callable[[str], None]) -> None:
        self._network, self._model, self._tell = network, model, tell
        self._received = dict.fromkeys(range(replicas), 0)
        self._pending = {rank: meeting(network, NOTHING, rank, 1) for rank in self._received}
        self.over = False

    def take(self, session: Session) -> bool:
        """See Source."""
        came = [told for rank in list(self._pending) if (told := self._from(rank))]
        if not came:
            if not self._pending:
                self.over = True
                self._tell("the replicas have left, and shown nothing of their end; the best of before is kept")
            return False
        newest = max(came, key=lambda told: (told["last"], told["step"]))
        if newest["step"] < session.step:  # of an earlier round, over a slower link
            return False
        self._model.load_state_dict(newest["model"])
        session.step, self.over = newest["step"], newest["last"]
        return True

    def _from(self, rank: int) -> dict[str, Any] | None:
        """What a replica has sent, if it has."""
        if not self._pending[rank].done():
            return None
        pending = self._pending.pop(rank)
        try:
            packet = pending.wait(0.0)[rank]
        except PeerLostError:
            return None
        self._received[rank] += 1
        self._pending[rank] = meeting(self._network, NOTHING, rank, self._received[rank] + 1)
        told: dict[str, Any] = torch.load(io.BytesIO(words_of(packet)), map_location="cpu", weights_only=True)
        return told

    def pause(self, seconds: float) -> None:
        """See Source. A simulated observer looks once in the time of a step."""
        if self._network.timed:
            self._network.advance()
        else:
            time.sleep(LOOK_SECONDS)


class Peers:
    """What the peers of a run give to those who ask: once after each of their rounds."""

    def __init__(self, network: OpenNetwork, settings: Settings, step: int) -> None:
        self._network, self._settings, self._step = network, settings, step
        self._every = settings.method().schedule.every or 1
        self._heard = time.monotonic()
        network.tell_others(observes=1.0, observed=float(step))

    @property
    def over(self) -> bool:
        """See Source: the run has ended, or nobody has trained for a deadline.

        Raises UserError where there is nothing then of which it could keep the best.
        """
        deadline = self._settings.network.deadline
        gone = time.monotonic() > self._heard + deadline
        if gone and not self._step:
            raise UserError(
                f"nobody has trained for {deadline:g} s, and this observer has seen nothing of the run; {WHEN}"
            )
        return gone or self._step >= self._settings.run.steps

    def take(self, session: Session) -> bool:
        """See Source."""
        if (ahead := self._network.behind(self._step)) is None:
            return False
        self._heard = time.monotonic()
        # The last interval may be a shorter one.
        due = min((self._step // self._every + 1) * self._every, self._settings.run.steps)
        if self._step + ahead < due or not session.catch_up(CATCH_UP_SECONDS):
            return False
        self._step = session.step
        self._network.tell_others(observed=float(self._step))
        return self._step >= due

    def pause(self, seconds: float) -> None:
        """See Source. It asks the others for at most half of the time."""
        time.sleep(max(LOOK_SECONDS, seconds))


def is_observed(network: OpenNetwork, steps: int) -> bool:
    """Whether somebody who is there observes the run, and has not seen its last step."""
    facts = [member.facts for member in network.peers.members.all() if member.alive]
    return any(one.get("observes") and one.get("observed", 0.0) < steps for one in facts)


def observe(trainer: Trainer, source: Source) -> None:
    """Observes until nothing more comes; the model then has the weights that were judged best. Raises StoppedError."""
    trainer.observe(source)
    found = checkpoint.best_step(trainer.folder, trainer.settings.figure)
    if found:
        (path,) = checkpoint.complete(trainer.folder, found[0], trainer.island.coordinates.replica)
        trainer.model.load_state_dict(checkpoint.read(path)["model"])


def observe_replicas(
    settings: Settings,
    network: Network,
    seat: Network,
    step: int | None,
    stop: Stop,
    device: torch.device,
    workload: Workload | None = None,
) -> None:
    """The whole life of an observer of replicas that train from a `step` on, None for a new run. Raises StoppedError.

    Args:
        network: of the replicas and, after them, the observers.
        seat: the network on which this observer is alone.
        stop: of this observer alone.
    """
    replicas = settings.run.replicas
    folder = folder_of(Path(settings.run.out), network.rank - replicas)
    own = settings.changed(replicas=1, observers=0, observe=True, out=str(folder))
    beginning.write_settings(own, folder)
    if step is not None:
        there = checkpoint.sound_steps(folder, seat.rank, f"replica-{seat.rank}")
        step = max((one for one in there if one <= step), default=0)
    coordination = Coordination(stop, Kept(HashStore(), lambda: [0], settings.figure))
    trainer = Trainer(own, seat, folder, coordination, device, step, workload)
    with contextlib.closing(trainer.log.events):
        observe(trainer, Replicas(network, replicas, trainer.model, trainer.log.warn))
        if trainer.step:  # else it was shown nothing
            write_results(trainer, finish(trainer, lambda ended: ended(SimulatedNetwork.alone())), tells=True)


def stop_alone() -> Stop:
    """For an observer, which ends when it is told, or when the replicas do."""
    return Stop(HashStore(), [0], [0])
