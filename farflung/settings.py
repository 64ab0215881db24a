"""A run's settings: a table for each room, read from flags and files, where names stand without their tables."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from farflung import formats, methods
from farflung.durations import TICKS_PER_SECOND, duration, seconds_of, ticks_of
from farflung.errors import UserError, counted, suggestion
from farflung.figure import Figure, figure_of
from farflung.files import event_files
from farflung.formats import OWN_LOOP, RUN_FOLDER
from farflung.joint.settings import CoreSettings
from farflung.lazy import Later
from farflung.methods import RoundSettings
from farflung.networks.settings import NetworkSettings
from farflung.pipeline.mesh import Mesh
from farflung.pipeline.settings import IslandSettings
from farflung.tables import (
    AFTER_RESUME,
    BETWEEN_MACHINES,
    BETWEEN_PEERS,
    Checked,
    MayDiffer,
    as_hinted,
    flattened,
    hints_of,
    new_names,
    rule_of,
    setting,
    tell_renamed,
    to_toml,
    toml_table,
)
from farflung.workloads.dealing import Deal
from farflung.workloads.registry import WORKLOADS

if TYPE_CHECKING:
    from farflung import inner, outer
    from farflung.outer import Companion, Method
    from farflung.workloads import Workload
else:
    inner, outer = Later("farflung.inner"), Later("farflung.outer")

OF_INNER = ("muon_momentum", "muon_nesterov", "muon_scale", "muon_align", "slow_share", "slow_momentum")
"""Settings that only some inner optimizers have."""


@dataclass(frozen=True)
class RunSettings(Checked):
    """How long to train, where, and what to keep."""

    workload: str = "language"
    """What to train: language, graph, clicks, images, or your own class as MODULE:NAME; each has its own settings."""
    replicas: int = setting(4, least=1)
    """Copies of the model; under torchrun, set by the number of its processes."""
    steps: int = setting(400, least=1, may_differ=AFTER_RESUME)
    """Inner steps of each replica."""
    rounds: int | None = setting(None, least=1, may_differ=AFTER_RESUME)
    """Rounds of each replica, in place of --steps; by the clock (--every 30s) the run ends after so many."""
    max_hours: float | None = setting(None, above=0, may_differ=AFTER_RESUME | BETWEEN_MACHINES | BETWEEN_PEERS)
    """Stop after so many hours from this start, all replicas at one step and with a checkpoint to go on from."""
    observe: bool = setting(False, may_differ=BETWEEN_PEERS)
    """Train nothing: receive and judge what the peers of a run have after each round, and keep the best."""
    observers: int = setting(0, least=0)
    """Replicas more that train nothing: they receive and judge what the others have after rounds, and keep the best."""
    seed: int = setting(0, least=0)
    """The seed of the weights, the data's order and the pairs."""
    shares: Literal["alike", "apart"] = "alike"
    """alike: replicas deal all of the data out among them, anew in each epoch; apart: each has the same part always."""
    order: Literal["epochs", "draws"] = "epochs"
    """epochs: each sample comes once before any comes twice; draws: samples are drawn with replacement."""
    device: str = setting("auto", may_differ=AFTER_RESUME | BETWEEN_MACHINES | BETWEEN_PEERS)
    """auto, cpu, cuda, cuda:N or mps."""
    out: str = setting("", may_differ=BETWEEN_MACHINES | BETWEEN_PEERS)
    """The run folder; unset: runs/METHOD-N with the first N that is free."""
    log_every: int = setting(10, least=1, may_differ=AFTER_RESUME | BETWEEN_MACHINES | BETWEEN_PEERS)
    """Inner steps between two lines of loss in the events."""
    eval_every: int = setting(50, least=1, may_differ=AFTER_RESUME | BETWEEN_PEERS)
    """Inner steps between two times that the model is judged by held-out samples."""
    checkpoint_every: int = setting(100, least=0, may_differ=AFTER_RESUME | BETWEEN_PEERS)
    """Inner steps between two checkpoints; 0 writes none until the end."""
    keep_checkpoints: int = setting(2, least=1, may_differ=AFTER_RESUME | BETWEEN_MACHINES)
    """Checkpoints to keep. Older ones are removed, except the one that was judged best."""
    track: str = setting("", may_differ=AFTER_RESUME | BETWEEN_MACHINES | BETWEEN_PEERS)
    """Trackers that get the events' figures: tensorboard, wandb, trackio, mlflow, with commas between several."""
    track_replicas: Literal["first", "all"] = setting(
        "first", may_differ=AFTER_RESUME | BETWEEN_MACHINES | BETWEEN_PEERS
    )
    """Whose figures trackers get: the first replica's, or those of all, each as its own run in one group."""
    device_tflops: float | None = setting(None, above=0, may_differ=AFTER_RESUME | BETWEEN_MACHINES | BETWEEN_PEERS)
    """10^12 operations a second of each device at best, for the model FLOP utilisation (MFU); unset: known cards'."""
    profile: str = setting("", may_differ=AFTER_RESUME | BETWEEN_MACHINES | BETWEEN_PEERS)
    """Write a trace of these steps, such as 20..22, into the run folder; Perfetto shows it (docs: Speed)."""
    profile_replicas: Literal["first", "all"] = setting(
        "first", may_differ=AFTER_RESUME | BETWEEN_MACHINES | BETWEEN_PEERS
    )
    """Whose steps are traced: the first replica's, or those of all."""
    text_share: float = setting(0.02, least=0, most=1, may_differ=AFTER_RESUME | BETWEEN_MACHINES | BETWEEN_PEERS)
    """The share of its time, 0 to 1, that the first replica, or a peer, may spend on writing sample text."""

    def __post_init__(self) -> None:
        """Raises UserError."""
        super().__post_init__()
        _ = self.profiled

    @property
    def profiled(self) -> range:
        """The steps to trace, counted from 1. Raises UserError."""
        if not self.profile:
            return range(0)
        found = re.fullmatch(r"([1-9]\d*)(?:(?:\.\.|-)([1-9]\d*))?", self.profile)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if last < first:
            raise UserError(f"profile is {self.profile!r}; give the first and the last step to trace, such as 20..22")
        return range(first, last + 1)


@dataclass(frozen=True)
class InnerSettings(Checked):
    """How each replica trains."""

    inner: Literal["adamw", "muon", "muloco", "sign", "gpa"] | None = None
    """The inner optimizer; muon is for the layers' matrices, AdamW for the rest. Unset: the method's, mostly muon."""
    muon_momentum: float | None = setting(None, least=0, below=1)
    """Muon's momentum; unset: 0.95, or 0.9 with muloco."""
    muon_nesterov: bool | None = None
    """Whether Muon's momentum looks ahead, as Nesterov's does; unset: True, or False with muloco."""
    muon_scale: Literal["rms", "fans"] | None = None
    """Muon's steps; rms: as large as AdamW's; fans: by the root of rows / columns. Unset: rms, or fans with muloco."""
    muon_align: float | None = setting(None, above=0, most=1)
    """The part of Muon's steps that follows the mean step of all replicas in the last round (FedMuon); unset: none."""
    slow_share: float | None = setting(None, above=0, most=1)
    """The part of a step that follows a slow momentum, which replicas average (MT-DAO); unset: there is none."""
    slow_momentum: float | None = setting(None, least=0, below=1)
    """The slow momentum; unset: 0.999."""
    slow_rounds: int | None = setting(None, least=1)
    """Rounds from one average of the slow momenta to the next; unset: 4."""
    lr: float | None = setting(None, above=0, may_differ=AFTER_RESUME)
    """Highest learning rate of the inner optimizer; unset: 0.01, or 0.003 with adamw."""
    warmup: int = setting(40, least=0)
    """Inner steps in which the learning rate rises; it then falls as lr_schedule says."""
    lr_schedule: Literal["cosine", "linear", "stable"] = "cosine"
    """How the learning rate falls: along a cosine, a line, or a line in the last fifth of the run only."""
    lr_final: float = setting(0.1, least=0, most=1)
    """The final learning rate, as a part of the highest."""
    weight_decay: float = setting(0.1, least=0)
    """The inner optimizer's weight decay."""
    tail_average: float = setting(0.0, least=0, most=1, formerly="late_average")
    """The last part of the run, 0 to 1, over whose rounds the final weights are averaged; 0: no average."""

    def __post_init__(self) -> None:
        """Raises UserError."""
        super().__post_init__()
        for name in ("slow_momentum", "slow_rounds"):
            if getattr(self, name) is not None and self.slow_share is None:
                raise UserError(f"{name} is {getattr(self, name)}, but there is no slow momentum; add --slow-share 0.5")


@dataclass(frozen=True)
class Settings:
    """Everything that a run is made from. Two runs of equal settings give equal weights."""

    run: RunSettings = field(default_factory=RunSettings)
    workload: Any = field(default_factory=lambda: WORKLOADS["language"].Settings())
    inner: InnerSettings = field(default_factory=InnerSettings)
    rounds: RoundSettings = field(default_factory=RoundSettings)
    island: IslandSettings = field(default_factory=IslandSettings)
    core: CoreSettings = field(default_factory=CoreSettings)
    network: NetworkSettings = field(default_factory=NetworkSettings)

    def __post_init__(self) -> None:
        """Raises UserError for a workload, or a package's method, that calls a setting as another room does."""
        names = Counter(one.name for one in _fields(self))
        if twice := [name for name, count in names.items() if count > 1]:
            rounds = {one.name for one in dataclasses.fields(RoundSettings)}
            of_method = twice[0] in vars(self.rounds) and twice[0] not in rounds
            kinds, name = (methods.RECIPES, self.rounds.method) if of_method else (WORKLOADS, self.run.workload)
            raise UserError(f"{kinds.described(name)} has a setting {twice[0]}, which every run has; rename it")
        if self.run.rounds is not None:
            object.__setattr__(self, "run", replace(self.run, steps=self.run.rounds * self._steps_of_a_round()))

    def _steps_of_a_round(self) -> int:
        """Inner steps, or tenths of a second, between two rounds. Raises UserError for a method that has none."""
        every = self.rounds.every or methods.defaults_of(self.rounds.method).get("every")
        if every is None:
            raise UserError(f"rounds is {self.run.rounds}, but {self.rounds.method} counts none; give --steps")
        return every if isinstance(every, int) else ticks_of("every", seconds_of("every", every))

    @classmethod
    def of(cls, **values: Any) -> Settings:
        """From settings by their names, in whatever tables; others are at their defaults. Raises UserError."""
        return cls().changed(**values)

    def changed(self, **values: Any) -> Settings:
        """With other values of some settings, by their names. Raises UserError for a name or a value that is none."""
        tables: dict[str, Any] = {}
        workload = values.get("workload", self.run.workload)
        if workload != self.run.workload and isinstance(workload, str):
            tables["workload"] = WORKLOADS[workload].Settings()
            tables["run"] = replace(self.run, workload=workload)
        method = values.get("method", self.rounds.method)
        if method != self.rounds.method and isinstance(method, str) and method in methods.RECIPES:
            tables["rounds"] = self.rounds.of_method(method)
        values = _under_new_names(values, replace(self, **tables))
        if "steps" in values:
            values.setdefault("rounds", None)
        for name, table in (vars(self) | tables).items():
            known = {one.name for one in dataclasses.fields(table)} & values.keys()
            if known:
                hints = hints_of(type(table))
                tables[name] = replace(table, **{key: as_hinted(hints[key], values.pop(key)) for key in known})
        if values:
            raise UserError(f"there is no setting {(key := next(iter(values)))!r}{suggestion(key, list(self.flat()))}")
        return replace(self, **tables)

    def flat(self) -> dict[str, Any]:
        """All values, by the settings' names."""
        return {name: value for table in vars(self).values() for name, value in vars(table).items()}

    def changes(self) -> dict[str, Any]:
        """The values that are not at their defaults, by the settings' names."""
        usual = Settings(workload=type(self.workload)(), rounds=type(self.rounds)()).flat()
        return {name: value for name, value in self.flat().items() if value != usual[name]}

    def method(self) -> Method:
        """The method, with the inner optimizer that goes with it. Raises UserError."""
        method = methods.chosen(self.rounds, self.run.seed, self.run.steps)
        chosen, own = inner.INNER[self.inner.inner] if self.inner.inner else method.inner, self.inner
        of_inner = {name: value for name, value in vars(own).items() if name in OF_INNER}
        if own.slow_share and method.outer:
            rounds = own.slow_rounds or 4  # with the size that it is divided by, which one may have of other gradients
            rhythms = ("slow_momentum", rounds), ("exp_avg_sq", rounds)
            method = replace(method, companions=_averaging(method.companions, rhythms))
        if own.muon_align and method.outer:
            method = replace(method, companions=(*method.companions, outer.AlignedSteps()))
        return replace(method, inner=chosen.having(**of_inner))

    @property
    def by_clock(self) -> bool:
        """Whether rounds go by the clock: the run then counts tenths of a second where it else counts inner steps."""
        return isinstance(self.rounds.every, str)

    @property
    def length(self) -> str:
        """How long the run is, in words."""
        steps = self.run.steps
        return (
            f"{counted(self.run.rounds or 0, 'round')} in {duration(steps / TICKS_PER_SECOND)}"
            if self.by_clock
            else (counted(steps, "step"))
        )

    def mesh(self) -> Mesh:
        """Which process is which part of which replica. Raises UserError."""
        shapes, replicas = self.island.shapes(), self.run.replicas
        if self.island.swarm:  # whose peers are one process each
            return Mesh.alike(replicas)
        if self.island.islands and len(shapes) != replicas:
            raise UserError(f"islands names {len(shapes)} replicas, and replicas is {replicas}; give the same number")
        return Mesh(tuple(shapes) if self.island.islands else tuple(shapes * replicas))

    def made_workload(self) -> Workload:
        """What is trained. Raises UserError for a workload that there is not."""
        known = None if self.network.kind.elastic else self.run.replicas
        deal = Deal(known, apart=self.run.shares == "apart", draws=self.run.order == "draws", cut=self.method().cut)
        return WORKLOADS[self.run.workload](self.workload, deal)

    @property
    def figure(self) -> Figure:
        """What the run is judged by. Raises UserError for a workload that there is not."""
        return figure_of(self.made_workload())

    def settled(self) -> Settings:
        """With what a run takes where they do not say, such as the learning rate. Raises UserError."""
        usual = methods.chosen(self.rounds, self.run.seed, self.run.steps).inner
        own = next((name for name, known in inner.INNER.items() if known is usual), None)  # None: a method's very own
        return self.changed(
            inner=self.inner.inner or own, lr=self.inner.lr or self.method().inner.lr
        ).with_settled_workload()

    def with_settled_workload(self) -> Settings:
        """With what only the workload finds out, as the hash of the base that adapters are for. Raises UserError."""
        return replace(self, workload=self.workload.settled()) if isinstance(self.workload, Checked) else self


def _averaging(companions: Sequence[Companion], rhythms: tuple[tuple[str, int], ...]) -> tuple[Companion, ...]:
    """Companions of which one averages some moments, too."""
    rest = tuple(one for one in companions if not isinstance(one, outer.AveragedMoments))
    own = (one for one in companions if isinstance(one, outer.AveragedMoments))
    return *rest, outer.AveragedMoments((*chain.from_iterable(one.rhythms for one in own), *rhythms))


def names_that_may_differ(where: MayDiffer, settings: Settings) -> list[str]:
    """The settings that may be other ones there."""
    return [one.name for one in _fields(settings) if where in rule_of(one).may_differ]


def _fields(settings: Settings) -> list[dataclasses.Field[Any]]:
    return [one for table in vars(settings).values() for one in dataclasses.fields(table)]


def _under_new_names(values: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    renamed = new_names(map(type, vars(settings).values()))
    for old in renamed.keys() & values.keys():
        if renamed[old] in values:
            raise UserError(f"{renamed[old]} is given twice, once by its old name {old}; remove one of them")
        tell_renamed(old, renamed[old])
    return {renamed.get(name, name): value for name, value in values.items()}


def read_settings(path: Path, **over: Any) -> Settings:
    """The settings of a TOML file, in tables or without, and those given here over them. Raises UserError."""
    table = toml_table(path)
    version = RUN_FOLDER.check(table, str(path))
    table.pop(formats.KEY, None)
    if version == 1 or (version == 0 and event_files(path.parent)):
        over = {"order": "draws"} | over  # as all runs then had; a user's own file says no version
    if table.get("workload") == OWN_LOOP:
        raise UserError(f"{path}: this run is a training loop of its own; start that again, and it resumes the run")
    tables = [one.name for one in dataclasses.fields(Settings)]
    try:
        for key, value in table.items():
            if isinstance(value, dict) and key not in tables:
                raise UserError(f"there is no table [{key}]{suggestion(key, tables)}")
        return Settings.of(**flattened(table) | over)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def settings_toml(settings: Settings) -> str:
    """The settings as TOML, a table for each room; those that are unset are left out."""
    return "\n".join(f"[{name}]\n{to_toml(vars(table))}" for name, table in vars(settings).items())
