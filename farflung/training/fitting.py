"""Fitting a replica's steps into the memory that it is given: planned at its first step, measured, planned anew."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farflung.errors import UserError
from farflung.events import MemoryEvent
from farflung.inner import MuonAdamW
from farflung.memory.far import MakeHome, far_homes, near_home
from farflung.memory.fitted import Fitted, Record, described, is_out_of_memory
from farflung.memory.profile import Make, Model, Sharded
from farflung.memory.room import cap_of
from farflung.memory.search import TooLittleError
from farflung.memory.updates import FarUpdates
from farflung.outer.method import Method
from farflung.pipeline.compiling import telling_of_compilers
from farflung.pipeline.divided import DividedIsland
from farflung.pipeline.island import Island, WholeIsland
from farflung.pipeline.settings import IslandSettings
from farflung.training.measures import peak_memory, reset_peak_memory
from farflung.training.run_log import RunLog

UNMEASURED, MEASURED = 2, 8
"""Steps after a plan that do not count, as they warm up; and those that do, before it is told of them."""
BEYOND, SLIGHT = 0.1, 1 << 27
"""The part by which what was predicted may differ from what is measured without a warning; and so many bytes."""


class Computing(NamedTuple):
    """A replica's steps, in the memory that it is given.

    Args:
        gradients: see Island.gradients.
        take: has the inner optimizer go on from a state_dict, and the replica from so many steps.
        far: what keeps gradients far, if anything does now; None where memory is not planned, or gradients stay near.
    """

    gradients: Callable[[int], tuple[float, str]]
    take: Callable[[dict[str, Any], int], None]
    far: Callable[[], FarUpdates | None] | None = None


Fittable = WholeIsland | DividedIsland


def fitting(island: Island, optimizer: Optimizer, make: Make, method: Method, path: Path, log: RunLog) -> Computing:
    """What computes a step's gradients: the island, in the memory that its settings give it. Keeps its plan in `path`.

    Gradients may leave unless the method deals out units of the model, or islands that exchange them are unlike.

    Raises UserError when it takes a state, or else at the first step, where the memory is too little.
    """
    if not island.settings.memory:
        return Computing(island.gradients, lambda kept, _: optimizer.load_state_dict(kept))
    assert isinstance(island, Fittable)  # see limits.check_memory
    unlike = method.outer is None and len(set(island.mesh.shapes)) > 1
    near_gradients = bool(method.dealing) or unlike or isinstance(island, DividedIsland)
    made = _Fitting(island, optimizer, make, near_gradients, path, log)
    return Computing(made.gradients, made.take, None if near_gradients else made.far)


def mean_home(settings: IslandSettings) -> MakeHome:
    """Where the mean of late weights lies, which plans do not count: far, where memory is planned."""
    return far_homes(settings.far_folder) if settings.memory else near_home


def host_is_planned(settings: IslandSettings, device: torch.device) -> bool:
    """Whether this machine's own memory is planned: then there is none for copies, such as of a checkpoint."""
    return bool(settings.memory) and device.type == "cpu"


def layers_of(island: Fittable) -> list[nn.Module]:
    """A process's layers, each once, which are fitted one by one. Raises UserError where they cannot be told apart."""
    if found := island.layers():
        return [*dict.fromkeys(found)]
    raise UserError(f"the layers of {type(island.model).__name__} cannot be told apart to fit them; leave out --memory")


class _Fitting:
    """Has an island compute its gradients as a plan says."""

    def __init__(
        self,
        island: Fittable,
        optimizer: Optimizer,
        make: Make,
        near_gradients: bool,
        path: Path,
        log: RunLog,
    ) -> None:
        self._island, self._optimizer, self._make, self._path, self._log = island, optimizer, make, path, log
        self._near_gradients = near_gradients
        self._fitted: Fitted | None = None
        self._record: Record | None = None
        self._anew = True
        """Whether another plan may be made where this one finds no room."""
        self._began: list[float] = []

    def take(self, kept: dict[str, Any], step: int) -> None:
        """Plans first, so that what is to be far never lies near; who has no moments, nor taken a step, has nothing."""
        if not step and not kept["state"]:
            self._optimizer.load_state_dict(kept)
            return
        self._begin(step)
        assert self._fitted
        self._fitted.take(kept)

    def far(self) -> FarUpdates | None:
        """What keeps gradients far, if anything does."""
        return self._fitted.updates if self._fitted else None

    def gradients(self, step: int) -> tuple[float, str]:
        """See Island.gradients."""
        if self._fitted is None:
            self._begin(step)
        self._measure()
        assert self._fitted
        self._fitted.gradients_begin()
        random = _random(self._island.device)
        try:
            loss, fault = self._island.gradients(step)
            if fault:
                self._fitted.gradients_begin()
            return loss, fault
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            told = str(error).partition("\n")[0]
        self._plan_anew(told)  # out of the handler, since the error holds what the step has made
        _restore(self._island.device, random)
        return self.gradients(step)

    def _begin(self, step: int) -> None:
        """Takes the plan that is kept, or makes one."""
        island = self._island
        settings = island.settings
        loss = island.rehearsal(step)
        sharded = None
        if isinstance(island, DividedIsland) and island.rows:
            sharded = Sharded(island.pieces[0], island.rows)
        model = Model(
            island.model,
            layers_of(island),
            loss,
            self._make,
            island.device,
            island.in_flight,
            sharded,
            compiled=settings.compile,
        )
        # Of rows Muon makes whole matrices of all layers at once, for which shards come together.
        together = sharded is not None and isinstance(self._optimizer, MuonAdamW)
        self._fitted = Fitted(model, self._optimizer, settings.far_folder, self._near_gradients, together)
        if isinstance(island, WholeIsland):
            island.clip = self._fitted.clip
        kept = Record.read(self._path)
        passes = settings.parts
        told = (settings.memory, settings.far_folder, passes, island.device.type, settings.compile)
        fits = kept and kept.made_for == (*told, len(model.layers), model.in_flight)
        plans = island.told_by_shards(kept.plan if kept and fits else None)
        record = kept if kept and all(plan == kept.plan for plan in plans) else self._planned()
        # Stages need unlike amounts: all are told, so that what the error says is enough for each of them.
        short = record if isinstance(record, TooLittleError) else None
        if needs := [each for each in island.told((short.least_bytes, short.cap_bytes) if short else None) if each]:
            raise TooLittleError(*max(needs))
        assert isinstance(record, Record)
        self._follow(record)

    def _planned(self) -> Record | TooLittleError:
        """A plan that is made now, or why there is none."""
        assert self._fitted
        island, settings = self._island, self._island.settings
        cap = cap_of(settings.memory, island.device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        try:
            with telling_of_compilers(settings.compile):
                return self._fitted.planned(
                    settings.memory, cap, settings.clip > 0, settings.parts, island.told_by_shards
                )
        except TooLittleError as error:
            return error

    def _follow(self, record: Record) -> None:
        """Carries a plan out, and tells of it."""
        assert self._fitted
        self._fitted.carry_out(record)
        self._record = record
        record.write(self._path, {})
        self._began.clear()
        reset_peak_memory(self._island.device)
        self._tell(None, None)

    def _plan_anew(self, told: str) -> None:
        """After an error that told of too little memory. Raises UserError where that came before."""
        assert self._fitted and self._record
        self._island.model.zero_grad()
        if isinstance(self._island, DividedIsland):  # whose other processes are in the middle of the step
            raise UserError(f"out of memory ({told}); give this stage a smaller --memory, or more --microbatches")
        if not self._anew:
            raise UserError(
                f"out of memory again ({told}), with a plan of {self._record.plan.peak_bytes / 1e9:.3g} GB; give a "
                "smaller --memory or --batch-size"
            )
        self._anew = False
        if self._island.device.type == "cuda":
            torch.cuda.empty_cache()
        self._log.warn(f"out of memory ({told}); a new plan takes 10% less")
        self._follow(self._fitted.smaller(self._record, self._island.settings.clip > 0))

    def _measure(self) -> None:
        """A step begins, and the one before has ended."""
        began, record = self._began, self._record
        assert record
        if len(began) > UNMEASURED + MEASURED:
            return
        began.append(self._log.spent.working())  # what it waits for others is in no plan
        if len(began) <= UNMEASURED + MEASURED:
            return
        times = [after - before for before, after in zip(began[UNMEASURED:], began[UNMEASURED + 1 :], strict=False)]
        seconds, nbytes = median(times), peak_memory(self._island.device)
        record.write(self._path, {"peak_bytes": nbytes, "seconds": seconds})
        self._tell(nbytes, seconds)
        plan = record.plan
        if abs(nbytes - plan.peak_bytes) > max(BEYOND * plan.peak_bytes, SLIGHT):
            self._log.warn(
                f"memory: a step holds {nbytes / 1e9:.3g} GB at most, and {plan.peak_bytes / 1e9:.3g} GB were "
                f"predicted; where that is too much, give a smaller --memory"
            )
        # A stage waits for others, too.
        alone = isinstance(self._island, WholeIsland)
        if alone and abs(seconds - record.seconds) > BEYOND * record.seconds:
            self._log.warn(
                f"memory: a step takes {seconds:.3g} s, and {record.seconds:.3g} s were predicted; where that stays "
                f"so, remove {self._path}, and a new plan is made when the run goes on"
            )

    def _tell(self, nbytes: int | None, seconds: float | None) -> None:
        assert self._record
        plan = self._record.plan
        self._log.memory(
            MemoryEvent(
                step=self._log.progress.step,
                plan=described(plan.layers),
                cap=self._record.cap_bytes,
                predicted_bytes=plan.peak_bytes,
                predicted_seconds=self._record.seconds,
                measured_bytes=nbytes,
                measured_seconds=seconds,
            )
        )


def _random(device: torch.device) -> list[Tensor]:
    """The states that random numbers come from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _restore(device: torch.device, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
