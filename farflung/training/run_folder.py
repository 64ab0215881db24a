"""A run folder for a training loop of one's own: its events and its checkpoints, as the trainer writes them."""

from __future__ import annotations

import base64
import dataclasses
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch import Tensor

from farflung import formats
from farflung.errors import UserError
from farflung.events import CheckpointEvent, EndEvent, EvaluationEvent, StartEvent, StepEvent, WarningEvent
from farflung.figure import LOSS, Figure
from farflung.files import write_text
from farflung.formats import OWN_LOOP, RUN_FOLDER
from farflung.hooks.layouts import is_sharded
from farflung.networks.torchrun import log
from farflung.outer import Round, Session
from farflung.tables import to_toml
from farflung.training import checkpoint
from farflung.training.events import EventLog
from farflung.training.measures import peak_memory, sampled
from farflung.training.own_state import Kept, OwnCheckpoint, agreed_step, plain, random_state, set_random_state
from farflung.training.resharding import buffer_names, mean_weights

SAMPLED_WEIGHTS = 1024
"""Weights that an evaluation writes down, by which reports estimate the consensus distance of the replicas."""

SHARDED = (
    "a run folder keeps replicas that one process has whole, and this one is several; save model and optimizer with "
    "torch.distributed.checkpoint, and outer.state_dict() of each process with torch.save, in a file of its own"
)


class RunFolder:
    """Writes what one replica's loop does, and resumes it: in a `with` statement around that of `attach`.

    All replicas use one alike, whether they share a file system or not. `farflung report` reads the folder. A
    checkpoint is whole or not there, whenever processes are killed; `begin` goes on from the last one that is whole on
    all replicas.

    Args:
        folder: where it lies; made if there is none.
        units: what is counted of the data, such as tokens.
        measure: what losses are measured in.
        figure: what `evaluated` is told of; unset: a validation loss.
        log_every: inner steps between two lines of loss.
        keep: older checkpoints are removed once so many newer ones are whole on all replicas.
    """

    def __init__(
        self,
        folder: str | Path,
        units: str = "samples",
        measure: str = "loss",
        log_every: int = 10,
        keep: int = 2,
        figure: Figure | None = None,
    ) -> None:
        if log_every < 1 or keep < 1:
            raise UserError(f"log_every is {log_every} and keep is {keep}; give 1 or more")
        self.folder = Path(folder)
        self._units, self._measure, self._log_every, self._keep = units, measure, log_every, keep
        self._figure = (figure or LOSS._replace(unit=measure)).checked()
        self._session: Session | None = None
        self._stays = set[str]()
        self._counted = self._rate_from = 0
        self._since = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close("finished" if kind is None else "stopped")

    def begin(self, outer: Session, **settings: Any) -> dict[str, Any]:
        """Begins the run, or loads all that the last whole checkpoint has: model, optimizers, rounds, random numbers.

        To be called once, before the first step, by all replicas; they wait for each other as at the start. Returns
        what the loop has given to `save`, {} where the run is new. Raises UserError where replicas have no checkpoint
        in common, or the run had another number of them, and PeerLostError.

        Args:
            outer: what `attach` has returned.
            settings: what the report is to show; `steps` is how many the run is to have.
        """
        _check(outer, self._session)
        network = outer.network
        # A replica alone has no clock but its machine's, and peers on the internet have no numbers.
        self._alone = not (network.elastic or network.processes) and outer.replicas == 1
        self._clock: Callable[[], float] = time.monotonic if self._alone else network.now
        self._replica = 0 if network.elastic else network.rank
        self._stem = f"replica-{self._replica}"
        self._kept = Kept(self.folder, outer, self._keep)
        step = agreed_step(self.folder, self._replica, self._stem, outer)
        saved = self._read(step, outer) if step else None
        begun = (self.folder / "events" / f"{self._stem}.jsonl").exists()
        self._write_settings(outer, settings)
        self._events = EventLog(
            self.folder,
            self._replica,
            self._stem,
            self._clock,
            keep=saved["events_size"] if saved else 0 if begun else None,
            elapsed_s=saved["elapsed"] if saved else 0.0,
        )
        checkpoint.forget_after(self.folder, self._replica, step)
        self._session = outer
        if saved:
            self._load(saved, outer)
        self._kept.tell(self._replica)
        self._start(outer, int(settings.get("steps", 0)), resumed=begun)
        outer.on_round(self._round)
        return saved["own"] if saved else {}

    def log(self, loss: float | Tensor, count: int = 1) -> None:
        """Says how a step went that was trained on `count` units; a line is written each `log_every` steps.

        A loss that is a tensor is only read, and waited for, where a line is written.
        """
        outer = self._begun()
        self._counted += count
        if outer.step % self._log_every == 0:
            now, traffic = self._events.elapsed_s(), outer.network.traffic
            rate = (self._counted - self._rate_from) / max(now - self._since, 1e-9)
            self._rate_from, self._since = self._counted, now
            self._events.write(
                StepEvent(
                    step=outer.step,
                    tokens=self._counted,
                    loss=_number(loss),
                    lr=float(outer.trained.optimizers[0].param_groups[0]["lr"]),
                    tokens_per_second=rate,
                    rounds=outer.rounds,
                    bytes_sent=traffic.bytes_sent,
                    seconds_blocked=traffic.seconds_blocked,
                    peak_memory=peak_memory(outer.trained.parameters[0].device),
                )
            )

    def evaluated(self, score: float | Tensor) -> None:
        """Says what the weights as they are now come to on held-out data: a loss, or the run's `figure`."""
        outer = self._begun()
        sample = sampled(outer.trained.named, outer.trained.layout, SAMPLED_WEIGHTS).numpy().astype(np.dtype("<f4"))
        self._events.write(
            EvaluationEvent(
                step=outer.step,
                tokens=self._counted,
                bytes_sent=outer.network.traffic.bytes_sent,
                score=_number(score),
                sample=base64.b64encode(sample.tobytes()).decode(),
            )
        )

    def warn(self, message: str) -> None:
        """Tells the report's reader something, in one line."""
        self._events.write(WarningEvent(step=self._begun().step, message=message))

    def save(self, **own: Any) -> None:
        """Writes a checkpoint, with what the loop itself keeps: plain values, tensors, and what `state_dict` gives.

        All replicas are to save at the same steps. What is logged after it is lost where the run resumes from here, so
        save last. Where the disk is full, a line tells, and the last checkpoint stays.
        Raises UserError for what is not plain.
        """
        outer = self._begun()
        began = time.monotonic()
        state = self._state(outer, {name: plain(value, name) for name, value in own.items()})
        try:
            self._events.flush_to_disk()
            checkpoint.write(checkpoint.path_of(self.folder, outer.step, self._stem), state)
        except OSError as error:
            fault = f"no checkpoint of step {outer.step}: {error.strerror or error}; see to {self.folder}"
            log.warning("%s; the last one stays", fault)
            self.warn(fault)
            return
        self._kept.add(self._replica, outer.step)
        faults = checkpoint.prune(self.folder, self._replica, before=self._kept.oldest_needed(self._replica))
        for fault in set(faults) - self._stays:
            self._stays.add(fault)
            log.warning("%s", fault)
            self.warn(fault)
        self._events.write(CheckpointEvent(step=outer.step, seconds=time.monotonic() - began))

    def weights(self) -> dict[str, Tensor]:
        """The mean of the replicas' weights at the last checkpoint that is whole in this folder, as a `state_dict`.

        Raises UserError where there is none.
        """
        if (step := checkpoint.last_sound(self.folder)) is None:
            raise UserError(f"{self.folder} has no whole checkpoint; let the loop call save() of its run folder")
        replicas = checkpoint.replicas_of(self.folder)
        return mean_weights([checkpoint.complete(self.folder, step, replica) for replica in replicas])

    def close(self, reason: str = "finished") -> None:
        """Ends the events; leaving the `with` statement does."""
        if self._session is not None:
            self._events.write(EndEvent(step=self._session.step, reason=reason))
            self._events.close()
            self._session = None

    def _begun(self) -> Session:
        if self._session is None:
            raise UserError("this run folder has not begun, or is closed; call begin() with what attach has returned")
        return self._session

    def _write_settings(self, outer: Session, settings: dict[str, Any]) -> None:
        network = outer.network
        if network.processes and network.rank and os.environ.get("LOCAL_RANK", "0") != "0":
            return  # another process on this machine writes the same
        if not network.processes and not network.elastic and network.rank != min(network.members()):
            return
        kind = "internet" if network.elastic else "torch" if network.processes or self._alone else "simulated"
        told = {name.replace(" ", "_"): value.strip("'") for name, value in outer.choices().items()}
        shown = {name: value if _fits_toml(value) else str(value) for name, value in settings.items()}
        head = {formats.KEY: RUN_FOLDER.version, "workload": OWN_LOOP, "network": kind, "replicas": outer.replicas}
        write_text(self.folder / "config.toml", to_toml({**head, **told, **shown}))

    def _start(self, outer: Session, steps: int, resumed: bool) -> None:
        self._since = self._events.elapsed_s()
        count = sum(parameter.numel() for parameter in outer.trained.model.parameters())
        choices = outer.choices()
        self._events.write(
            StartEvent(
                step=outer.step,
                method=f"{choices['topology']}, {choices['codec']}",
                replicas=outer.replicas,
                steps=steps,
                parameters=count,
                own_parameters=count,
                host=socket.gethostname(),
                device=str(outer.trained.parameters[0].device),
                units=self._units,
                measure=self._measure,
                judged_by=self._figure.name,
                judged_in=self._figure.unit,
                more_is_better=self._figure.more_is_better,
                resumed=resumed,
                clock=time.time() if outer.network.elastic else None,
            )
        )

    def _round(self, ended: Round) -> None:
        if self._session is not None and not self._alone:
            self._events.round(ended)
            if ended.reason:
                self.warn(f"round {ended.round}: {ended.outcome}: {ended.reason}")

    def _state(self, outer: Session, own: dict[str, Any]) -> OwnCheckpoint:
        model = outer.trained.model
        return {
            "shard": 0,
            "model": model.state_dict(),
            "buffers": buffer_names(model),
            "optimizers": [plain(one.state_dict(), type(one).__name__) for one in outer.trained.optimizers],
            "outer": outer.state_dict(),
            "random": random_state(),
            "own": own,
            "replicas": outer.replicas,
            "counted": self._counted,
            "traffic": dataclasses.asdict(outer.network.traffic),
            "elapsed": self._events.elapsed_s(),
            "events_size": self._events.size(),
        }

    def _read(self, step: int, outer: Session) -> OwnCheckpoint:
        path = checkpoint.path_of(self.folder, step, self._stem)
        state: Any = checkpoint.read(path)
        if "own" not in state:
            raise UserError(f"{path} was written by farflung train; give a loop of your own another folder")
        if not outer.network.elastic and state["replicas"] != outer.replicas:
            raise UserError(
                f"{path} is of a run of {state['replicas']} replicas, and {outer.replicas} are here; start as many, or "
                f"load farflung.RunFolder({str(self.folder)!r}).weights() into the model, and give a new folder"
            )
        return state  # type: ignore[no-any-return]

    def _load(self, state: OwnCheckpoint, outer: Session) -> None:
        outer.trained.model.load_state_dict(state["model"])
        for optimizer, saved in zip(outer.trained.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for name, value in state["traffic"].items():
            setattr(outer.network.traffic, name, value)
        outer.load_state_dict(state["outer"])
        self._counted = self._rate_from = state["counted"]
        set_random_state(state["random"])


def _check(outer: Session, begun: Session | None) -> None:
    if begun is not None:
        raise UserError("this run folder has begun already; make one for each attach, with a folder of its own")
    if outer.step:
        raise UserError(f"{outer.step} steps were made before begin(); call it right after attach")
    if outer.trained.layout.processes > 1 or outer.network.islands or any(map(is_sharded, outer.trained.parameters)):
        raise UserError(SHARDED)


def _number(value: float | Tensor) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


def _fits_toml(value: Any) -> bool:
    return isinstance(value, str | int | float)
