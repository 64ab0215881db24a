"""One replica's whole run, from its first step to its part of the summary."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from farflung.errors import LostDataError, UserError
from farflung.hooks.trained import trainable
from farflung.networks import Group, Network
from farflung.outer import Round, Session
from farflung.outer.elastic import CATCH_UP_SECONDS
from farflung.pipeline.compiling import telling_of_compilers
from farflung.settings import Settings
from farflung.training import checkpoint
from farflung.training.checkpoint import Checkpoint
from farflung.training.core import holders_of
from farflung.training.dealt_tables import DealtTables
from farflung.training.events import event_log, scores
from farflung.training.fitting import fitting, host_is_planned, mean_home
from farflung.training.kept import Coordination
from farflung.training.learning_rate import lr_scale
from farflung.training.profiling import Profile
from farflung.training.resharding import load_state
from farflung.training.run_log import Progress, RunLog
from farflung.training.saving import Saving
from farflung.training.seats import seated
from farflung.training.state import restore, state_of
from farflung.training.stopping import StoppedError, seconds_here
from farflung.training.tail import TailAverage
from farflung.training.writing import Writing
from farflung.workloads import Workload

if TYPE_CHECKING:
    from farflung.training.observing import Source


class Trainer:
    """Trains one replica.

    Args:
        settings: the same for every replica.
        network: of all of the run's processes.
        folder: the run folder.
        coordination: asked after each step whether it was the last, and which checkpoints can go.
        resume_step: the checkpoint to go on from; 0 for the beginning of a run that has none, None for a new run.
        workload: if another replica in this process has read its data already.

    Raises:
        UserError: settings, data or folder cannot be used.
    """

    def __init__(
        self,
        settings: Settings,
        network: Network,
        folder: Path,
        coordination: Coordination,
        device: torch.device,
        resume_step: int | None = None,
        workload: Workload | None = None,
    ) -> None:
        self.settings, self.folder, self.device = settings, folder, device
        self.stop, self.kept, self.shown = coordination.stop, coordination.kept, coordination.shown
        self.workload = workload or settings.made_workload()
        self.stop.at_once.append(getattr(self.workload, "let_go", lambda: None))
        self.island, self.network = seated(settings, self.workload, network, folder, device, self.stop)
        self.model = self.island.model
        mesh, coordinates = self.island.mesh, self.island.coordinates
        self.process = mesh.process(coordinates.replica, coordinates.stage, coordinates.shard)
        self.file_stem = mesh.file_stem(coordinates)
        make = self._make_optimizer()
        torch.manual_seed(settings.run.seed * 1_000_003 + mesh.first + self.process)  # processes differ in dropout
        self.progress = Progress(resume_step or 0, trained=resume_step or 0)
        share = settings.inner.tail_average
        after = settings.run.steps * (1 - share) if share else math.inf
        self.tail = TailAverage(self.model, after, mean_home(settings.island))
        self._lost: LostDataError | None = None
        self._score: float | None = None
        """What the model was judged by at this step, if it was."""
        self.settle: Callable[[Group], object] = lambda group: None
        """See Averages."""
        self._judged_at = 0
        """The last step that was looked at for what is due."""
        self._saved = self._load(resume_step)
        if self._saved and network.timed:
            network.timed.resume(self._saved["clock"])
        events = event_log(folder, self.island, network.now, self._saved, resume_step is not None)
        self.log = RunLog(settings, self.workload, self.island, self.network, events, self.progress, self.averaged)
        plan = folder / "memory" / f"{self.file_stem}.json"
        self.computing = fitting(self.island, self.optimizer, make, self.method, plan, self.log)
        # Replicas that are simulated write at moments of their own clock, and there may be many.
        background = not (network.timed or host_is_planned(settings.island, device))
        self.saving = Saving(folder, self.file_stem, events.flush_to_disk, background)
        first = coordinates.replica == 0 or network.elastic is not None
        traced = settings.run.profiled if settings.run.profile_replicas == "all" or first else range(0)
        self.profile = Profile(traced, folder / "profile" / f"{self.file_stem}-steps-{settings.run.profile}.json")
        self._resumed = resume_step is not None
        # All processes of an island would have to agree on the time; and a simulated run is the same each time.
        alone = not (settings.island.divided or network.timed or self.dealt)
        writes = first and alone and device.type in ("cpu", "cuda")
        self.writing = Writing(self.island, settings.run.text_share if writes else 0.0)

    def _make_optimizer(self) -> Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]:
        """Makes the inner optimizer, and that of dealt tables; what makes another one like it."""
        settings = self.settings
        self.method = dataclasses.replace(settings.method(), needs_inner=None)  # of which launch.prepare has told
        self.lr = settings.inner.lr or self.method.inner.lr
        inner, decay = dataclasses.replace(self.method.inner, lr=self.lr), settings.inner.weight_decay
        make = partial(inner.make, lr=self.lr, weight_decay=decay)
        self.dealt = DealtTables.of(self.workload, self.model, self.network, settings.network.deadline)
        self.averaged = self.dealt.rest if self.dealt else self.model
        held = set(self.averaged.parameters())
        self.optimizer = make((name, one) for name, one in trainable(self.model).items() if one in held)
        self.island.steps_with(self.optimizer)
        if self.dealt:
            self.dealt.step_after(self.optimizer, inner, decay)
        return make

    @property
    def step(self) -> int:
        """Inner steps of the run so far."""
        return self.progress.step

    def train(self, catch_up: bool = False, at_the_end: Callable[[Session], object] = lambda _: None) -> None:
        """Trains to the last step. Raises StoppedError when asked to stop before, after a checkpoint where that can be.

        To `catch_up` is to take the others' state first, on an elastic network where this replica was away. What is to
        be done `at_the_end`, while the last round's state is there, is called with the session.
        """
        with contextlib.closing(self.saving):
            with self._attached() as session:
                if catch_up:
                    self._catch_up(session)
                self._judged_at = self.step
                while self.step < self.settings.run.steps:
                    self._train_step(session)
                at_the_end(session)
            self.island.after_step()  # leaving has applied what was pending
            self.island.stay()
            self._score = self.log.evaluate()  # first, so that the events that go with the checkpoint tell of it
            self.save(session)
            self._end_saving(wait=True)
            self.log.end("finished")

    def observe(self, source: Source) -> None:
        """Takes what a source has, as long as more comes; judges it, and keeps the best. It trains nothing.

        Raises StoppedError.
        """
        with contextlib.closing(self.saving), self._attached() as session:
            while not source.over:
                began = time.monotonic()
                if source.take(session):
                    self._count(session)
                    self.island.after_step()
                    self._score = self.log.evaluate()
                    self.save(session)
                self._end_saving(wait=False)
                # It takes no step of its own, so that the next one, after which the others would stop, may never come.
                if self.stop.due_after(self.process, self.step) or self.stop.requested:
                    self._end_saving(wait=True)
                    self.log.end("stopped")
                    raise StoppedError(f"stopped after step {self.step}")
                source.pause(time.monotonic() - began)
            self._end_saving(wait=True)
            self.log.end("finished" if self.step >= self.settings.run.steps else "stopped")

    @contextlib.contextmanager
    def _attached(self) -> Iterator[Session]:
        """The method's session, as it was saved, until the island is done with."""
        self._forget_the_rest()
        self.log.start(self.device, self._resumed)
        if slow := self.island.slow_link():
            self.log.warn(slow)
        rounds, network = self.settings.rounds, self.settings.network
        session = self.method.attach(
            self.averaged,
            self.optimizer,
            self.network,
            outer_device=None if rounds.outer_device == "model" else rounds.outer_device,
            deadline_s=network.deadline,
            starting_s=network.starting,
            robust=rounds.robust,
            step_weight=float(self.log.units_per_step),
            weighting=rounds.weighting,
            holders=holders_of(self.settings),
            on_round=self._after_round,
        )
        self.settle = session.averages.settle
        self.island.gives_with(session.give)
        if self.computing.far:
            session.gradients_from(self.computing.far)
        with contextlib.closing(self.island), session:
            if self._saved:
                restore(self, self._saved, session)
                self._saved = None
            yield session

    def _train_step(self, session: Session) -> None:
        number = self.step + 1
        self._score = None
        with self.profile.step(number):
            told = self._computed(session)
            self.progress.trained += 1
            self._tell(*told)
        self.profile.end(number, self.settings.run.profile, self.log.warn)
        if session.together:
            self._judge_and_keep(session)

    def _computed(self, session: Session) -> tuple[float | None, float]:
        """Takes an inner step. Returns its loss, if it has one, and its learning rate."""
        spent = self.log.spent
        with spent.on("gradients"), telling_of_compilers(self.settings.island.compile):
            loss, fault = self._gradients()
        self._count(session)
        lr = self.lr * lr_scale(self.settings.inner, self.step, self.settings.run.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if fault:
            # Without gradients the optimizer changes nothing, but the step still counts for the rounds.
            self.log.warn(f"{fault} at step {self.step + 1}: its gradient is not used")
            session.spoil(f"{fault} at step {self.step + 1}")
        with spent.on("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.island.after_step()
        self._count(session)
        return None if math.isnan(loss) and not fault else loss, lr

    def _tell(self, loss: float | None, lr: float) -> None:
        """Writes the events that are due after a step; one that had nothing to learn from has no loss to tell of."""
        run = self.settings.run
        self.log.rate.count(self.log.units_per_step)
        self.log.learnt(self.island.ledger())
        if loss is None:
            self.log.no_loss()
        elif self.progress.trained % run.log_every == 0 or self.step >= run.steps:
            self.log.step(loss, lr, self.device)
            if self.writing.due():
                self.log.text(self.writing, self.device)

    def _judge_and_keep(self, session: Session) -> None:
        """After a step of all: evaluates, writes a checkpoint, or stops where it is due. Raises StoppedError."""
        run, last = self.settings.run, self.step >= self.settings.run.steps
        before, self._judged_at = self._judged_at, self.step

        def comes(every: int) -> bool:
            """Whether a multiple was reached or passed."""
            return self.step // every > before // every

        every = self.method.schedule.every or run.eval_every
        if self.shown and comes(every) and not last:
            self.shown.after_round(self.step // every, self.step, self.model)
        if comes(run.eval_every) and not last:
            session.average_buffers()
            self._score = self.log.evaluate()
        self._end_saving(wait=False)
        if run.checkpoint_every and comes(run.checkpoint_every) and not last:
            self.save(session)
        if run.max_hours and seconds_here() > 3600 * run.max_hours:
            self.stop.request()
        if self.stop.due_after(self.process, self.step) and not last:
            self.save(session)
            self._end_saving(wait=True)
            self.log.end("stopped")
            if str(self._lost or ""):
                raise UserError(f"{self._lost}; stopped after step {self.step}, with a checkpoint to go on from")
            raise StoppedError(f"stopped after step {self.step}")

    def _gradients(self) -> tuple[float, str]:
        """See Island.gradients; without data, the run stops at a step that all replicas agree on."""
        if not self._lost:
            try:
                return self.computing.gradients(self.progress.trained)
            except LostDataError as error:
                self._lost = error
                self.stop.request()
        return math.nan, "there is no data"

    def _count(self, session: Session) -> None:
        """Goes on from the step that the rounds count, since others may have gone on; or that the island does."""
        if (at := self.island.at) is not None:
            session.step = at
        self.progress.step = min(session.step, self.settings.run.steps)

    def save(self, session: Session) -> None:
        """Has this process's part of a checkpoint written; the one before is waited for."""
        with self.log.rate.paused(), self.log.spent.on("checkpoints"):
            self._end_saving(wait=True)
            session.saved()
            self.saving.begin(self.step, state_of(self, session), self._score)

    def _end_saving(self, wait: bool) -> None:
        """Tells of the last checkpoint once it is written, and removes those that nobody needs any more."""
        if (saved := self.saving.ended(wait)) is None:
            return
        if saved.fault:
            self.log.warn(
                f"no checkpoint of step {saved.step}: {saved.fault}; see to {self.folder}; the last one stays"
            )
            return
        self.kept.add(self.process, saved.step, saved.score)
        self.prune()
        self.log.checkpoint(saved.step, saved.seconds, saved.delayed)

    def show_the_end(self) -> None:
        """Shows observers the weights as they are now, which are the run's result."""
        if self.shown:
            self.shown.at_the_end(self.step, self.model)

    def prune(self) -> None:
        """Removes old checkpoints but the best, once all are known to have as many newer ones as are to be kept."""
        oldest, best = self.kept.needed(self.process, self.settings.run.keep_checkpoints)
        for fault in checkpoint.prune(self.folder, self.island.coordinates.replica, before=oldest, best=best):
            self.log.warn_once(fault)

    def _load(self, resume_step: int | None) -> Checkpoint | None:
        """The checkpoint that the run resumes from; tells the others which ones are there."""
        mesh, coordinates = self.island.mesh, self.island.coordinates
        state = None
        first = mesh.part(coordinates) == 0
        # Looked for now, since other parts remove them once all have begun.
        self._damaged = checkpoint.damaged(self.folder, coordinates.replica, self.step) if first else []
        if resume_step:
            state = load_state(self.folder, resume_step, mesh, coordinates, self.model, self.optimizer)
        there, judged = checkpoint.steps_of(self.folder, coordinates.replica), scores(self.folder, coordinates.replica)
        self.kept.tell(self.process, {step: judged.get(step) for step in there if step <= self.step})
        return state

    def _forget_the_rest(self) -> None:
        """Removes checkpoints of later steps than that which the run goes on from, and names the damaged ones."""
        for path in self._damaged:
            self.log.warn(f"{path} is damaged, so this run goes on from step {self.step}")
        checkpoint.forget_after(self.folder, self.island.coordinates.replica, self.step)
        if self.step < self.settings.run.steps:
            checkpoint.forget_results(self.folder, self.island.part_stem)

    def _catch_up(self, session: Session) -> None:
        began = self.network.now()
        if session.catch_up(CATCH_UP_SECONDS):
            self.progress.step = session.step
            self.log.joined(self.network.now() - began)
        else:
            own = "resumes from its own" if self.step else "begins anew: stop it if one that has it can come back"
            self.log.warn(f"no other peer has the run's state; this one {own}")

    def _after_round(self, ended: Round) -> None:
        self.progress.rounds += ended.held
        if ended.group:
            self.tail.add(ended.step)
        self.log.round(ended)
