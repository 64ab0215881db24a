"""farflung train."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO

from rich.console import Console
from typing_extensions import Doc

from farflung.cli.arguments import (
    FAILURE,
    flag,
    flags_among,
    free_folder,
    given,
    kinds_among,
    parse,
    under_new_names,
    unset,
    value_among,
    with_field,
)
from farflung.cli.previews import dry_run, print_config
from farflung.cli.printing import working
from farflung.cli.results import tell_result
from farflung.durations import TICKS_PER_SECOND
from farflung.errors import UserError, counted
from farflung.files import holds_no_run, typed
from farflung.settings import RunSettings, Settings, names_that_may_differ, read_settings
from farflung.signals import INTERRUPTED
from farflung.tables import AFTER_RESUME, new_names
from farflung.training.forks import BY_PEERS, BY_REPLICAS, import_ahead
from farflung.training.terminal import STARTED_HERE

FIRST = ("model", "data", "method", "every", "replicas", "steps", "batch_size", "lr", "network", "out")
"""The settings that whoever begins asks for."""
MAY_CHANGE = ", ".join(flag(name) for name in names_that_may_differ(AFTER_RESUME, Settings()))


@dataclass(frozen=True)
class TrainOptions:
    """What to train, or which run to go on with."""

    resume: Annotated[
        Path | None,
        Doc(f"Go on with the run in this folder, from its last whole checkpoint; only {MAY_CHANGE} can then change."),
    ] = None
    restart: bool = False
    """With --resume: start that run again from the beginning; its events and checkpoints are removed."""
    print_config: bool = False
    """Print the TOML file that the other flags mean, and train nothing."""
    dry_run: bool = False
    """Show what would be trained, its size, bytes, memory and time, and train nothing."""


@dataclass(frozen=True)
class _Resume:
    """Which run to go on with."""

    resume: Path
    """The run folder."""
    restart: bool = False
    """Start the run again from the beginning; its events and checkpoints are removed."""
    print_config: bool = False
    """Print the settings that it would go on with, and train nothing."""
    dry_run: bool = False
    """Show the whole run's size, bytes, memory and time, and train nothing."""


@dataclass(frozen=True)
class Asked:
    """A run that is asked for: its settings and folder, whether it goes on, and whether it begins anew there."""

    settings: Settings
    folder: Path
    resume: bool = False
    restart: bool = False
    instead: Callable[[Settings], None] | None = None
    """What to do with the settings in place of training."""


def train(arguments: list[str]) -> None:
    """Train a model with several replicas, or resume a run."""
    asked = what_is_asked(arguments)
    if asked.instead:
        asked.instead(asked.settings)
        return
    under_torchrun = "WORLD_SIZE" in os.environ
    if asked.resume and _step_at_end(asked.folder) >= asked.settings.run.steps and _shows():
        print(
            "farflung: this run has ended already: no step is left to train, and its results are written again; "
            f"to go on, give more than {_length_given(asked.settings)}",
            flush=True,
        )
    network = asked.settings.network
    if network.independent and under_torchrun:
        raise UserError("independent replicas are started by farflung train itself; start it without torchrun")
    if network.kind.elastic and not network.independent:
        raise UserError(
            "a run on the internet begins with farflung invite; peers join, and come back, with farflung join"
        )
    if network.kind.simulate and under_torchrun:
        raise UserError(f"network is {network.network!r}, which one process does alone; start it without torchrun")
    if not (network.kind.simulate or under_torchrun):
        import_ahead(BY_PEERS if network.independent else BY_REPLICAS)
    with working("importing torch"):
        from farflung.training.beginning import how_to_go_on

    by_torchrun = under_torchrun and STARTED_HERE not in os.environ  # which would start again what has not ended well
    check_trackers(asked.settings)
    hours = asked.settings.run.max_hours
    with telling_how_to_go_on(lambda: how_to_go_on(asked.folder), 0 if by_torchrun else INTERRUPTED, hours):
        if (_train_part if under_torchrun else _train_all)(asked):
            tell_result(asked.folder, simulated=network.kind.simulate is not None)


@contextlib.contextmanager
def telling_how_to_go_on(
    how: Callable[[], str], stopped: int = INTERRUPTED, max_hours: float | None = None
) -> Iterator[None]:
    """Where a run ends early, says why and `how` to go on, and exits.

    With `stopped` where it was asked to end, and with 0 after `max_hours`, as it was told to.
    """
    from farflung.training.failures import RUN_ERRORS
    from farflung.training.stopping import StoppedError, seconds_here

    try:
        yield
    except (StoppedError, *RUN_ERRORS) as error:
        over = max_hours is not None and seconds_here() > 3600 * max_hours and isinstance(error, StoppedError)
        why = f"max_hours is over: {error}" if over else str(error)
        print(f"farflung: {why}; {how()}", file=sys.stderr, flush=True)
        sys.exit(0 if over else stopped if isinstance(error, StoppedError) else FAILURE)


def _train_all(asked: Asked) -> bool:
    """Starts all replicas from here. Returns whether to tell what has come of them."""
    with working("importing torch"):
        from farflung.training import beginning, independent, launch

    apart = asked.settings.network.independent
    prepare, launch_all = (
        (independent.prepare, independent.launch_all) if apart else (launch.prepare, launch.launch_all)
    )
    with beginning.left_as_it_was(asked.folder):
        with working("checking settings, model and data"):
            prepare(asked.settings, asked.folder, asked.resume, asked.restart)
        launch.prepare_data(asked.settings)
        _announce(asked)
        with tracking(asked.settings, asked.folder), watched(asked.folder) as show:
            show()
            launch_all(asked.settings, asked.folder, asked.resume)
    return True


def _train_part(asked: Asked) -> bool:
    """Is one of the replicas, or a part of one. Returns whether to tell what has come of them."""
    from farflung.training.launch import run_torch_replica

    started_here, shows = STARTED_HERE in os.environ, _shows()
    run = asked.settings.run
    tracks = shows and (run.track_replicas == "all" or os.environ.get("GROUP_RANK", "0") == "0")
    with contextlib.ExitStack() as stack:
        show: Callable[[], None] = stack.enter_context(watched(asked.folder)) if shows else lambda: None

        def prepared() -> None:
            if shows:
                _announce(asked)

        def begun() -> None:
            show()
            if tracks:
                stack.enter_context(tracking(asked.settings, asked.folder))

        tells = run_torch_replica(asked.settings, asked.folder, asked.resume, asked.restart, prepared, begun)
    return bool(tells) and not started_here


def _shows() -> bool:
    """Whether this process tells the user of the run: the launcher, or of torchrun's processes the first one here."""
    return "LOCAL_RANK" not in os.environ or (os.environ["LOCAL_RANK"] == "0" and STARTED_HERE not in os.environ)


def _announce(asked: Asked) -> None:
    run, island = asked.settings.run, asked.settings.island
    shapes = f"stages x shards {island.islands}" if island.islands else str(island.shapes()[0])
    divided = f" of {shapes}" if island.divided else ""
    kind = "independent replica" if asked.settings.network.independent else "replica"
    what = f"{counted(run.replicas, kind)}{divided}, {asked.settings.rounds.method}, {asked.settings.length}"
    print(f"farflung: {what}; run folder {asked.folder}")
    print(f"farflung: starting; {'it' if run.replicas == 1 else 'each'} reads its data and makes its model", flush=True)


def _length_given(settings: Settings) -> str:
    """The flag that says how long a run is."""
    run = settings.run
    return f"--steps {run.steps}" if run.rounds is None else f"--rounds {run.rounds}"


def _step_at_end(folder: Path) -> int:
    """The step of a run's end; 0 where it has not come to that."""
    path = folder / "summary.json"
    return int(json.loads(path.read_text("utf-8"))["steps"]) if path.exists() else 0


def _last_step(folder: Path) -> int:
    """The step of a run's end, or before it of its last whole checkpoint."""
    from farflung.training.checkpoint import whole_steps

    return _step_at_end(folder) or max(whole_steps(folder), default=0)


def what_is_asked(arguments: list[str]) -> Asked:
    """The run that some arguments ask for: flags win over the file. Raises UserError."""
    arguments = under_new_names(arguments, new_names(map(type, vars(Settings()).values())))
    if "--resume" in flags_among(arguments):
        return _resumed(arguments)
    if value_among(arguments, "--steps") and value_among(arguments, "--rounds"):
        raise UserError("--steps and --rounds both say when the run ends; leave one of them out")
    over = kinds_among(arguments)
    if arguments and not arguments[0].startswith("-"):
        if (Path(arguments[0]) / "config.toml").exists():
            raise UserError(f"{arguments[0]} is a run; go on with it: farflung train --resume {arguments[0]}")
        defaults, arguments = read_settings(Path(arguments[0]), **over), arguments[1:]
    else:
        defaults = Settings.of(**over)
    found: Any = parse(with_field(TrainOptions, "settings", defaults), arguments, "train", HELP, FIRST)
    if found.restart:
        raise UserError("--restart begins a run anew that is there; say which: farflung train --resume RUN --restart")
    settings = _with_replicas(found.settings)
    folder = typed(Path(settings.run.out)) if settings.run.out else free_folder(settings.rounds.method)
    return Asked(settings.changed(out=str(folder)), folder, instead=_instead(found))


def _instead(options: Any) -> Callable[[Settings], None] | None:
    return print_config if options.print_config else dry_run if options.dry_run else None


def _resumed(arguments: list[str]) -> Asked:
    given_folder = value_among(arguments, "--resume") or ""
    if not given_folder or given_folder.startswith("--"):
        raise UserError("--resume needs the run's folder: farflung train --resume RUN")
    folder = typed(Path(given_folder))
    there = (folder / "config.toml").exists()
    before = read_settings(folder / "config.toml") if there else Settings()
    _refuse_what_is_settled(arguments, before)
    changes = unset(map(type, vars(before).values()), AFTER_RESUME)
    options: Any = parse(with_field(_Resume, "changes", changes), arguments, "train", train.__doc__)
    if not there:
        raise UserError(holds_no_run(folder, f"there is no config.toml to go on with; start one with --out {folder}"))
    settings = before.changed(**given(options.changes))
    from farflung.pipeline.check import refuse_other_weights

    longer = {"steps", "rounds"} & given(options.changes).keys()
    if longer and not options.restart and settings.run.steps < (reached := _last_step(folder)):
        at = f"{reached / TICKS_PER_SECOND:g} s" if settings.by_clock else f"step {reached}"
        raise UserError(f"{_length_given(settings)} is given, but {folder} has come to {at}; give more")
    refuse_other_weights(before.island, settings.island)
    return Asked(_with_replicas(settings), folder, not options.restart, options.restart, _instead(options))


def _refuse_what_is_settled(arguments: list[str], settings: Settings) -> None:
    """Refuses settings that a run which goes on keeps. Raises UserError."""
    free = [flag(name) for name in names_that_may_differ(AFTER_RESUME, settings)]
    settled = [one for one in flags_among(arguments) if one in map(flag, settings.flat()) and one not in free]
    if arguments[0].endswith(".toml"):
        settled.insert(0, arguments[0])
    if settled:
        raise UserError(
            f"{settled[0]} cannot go with --resume: a run that goes on keeps its settings; farflung train --help says "
            "at --resume which can change; for others, begin a run with another --out"
        )


def _with_replicas(settings: Settings) -> Settings:
    """As many replicas as there are islands, or under torchrun, as the processes that it has started make."""
    from farflung.pipeline.mesh import whole_replicas

    usual = settings.run.replicas == RunSettings.replicas
    if settings.island.islands and usual:
        settings = settings.changed(replicas=len(settings.island.shapes()))
    settings.mesh()
    if "WORLD_SIZE" not in os.environ:
        return settings
    processes, observers = int(os.environ["WORLD_SIZE"]), settings.run.observers
    if processes <= observers:
        raise UserError(f"{processes} processes are started, and observers is {observers}; start more")
    return settings.changed(replicas=whole_replicas(processes - observers, settings.island))


def check_trackers(settings: Settings) -> None:
    """Refuses trackers that there are not, or whose packages are missing. Raises UserError."""
    if settings.run.track:
        from farflung.report.trackers import named

        named(settings.run.track)


@contextlib.contextmanager
def tracking(settings: Settings, folder: Path) -> Iterator[None]:
    """Hands the run on to the trackers that are asked for."""
    from farflung.report.trackers import tracked
    from farflung.training.terminal import say

    with tracked(folder, settings.run.track, settings.run.track_replicas, say):
        yield


@contextlib.contextmanager
def watched(folder: Path, to: TextIO | None = None) -> Iterator[Callable[..., None]]:
    """Yields what begins to show the run folder's live view, until the end: once it is known to be this run's.

    It can be given what says of the other peers what is known of them.
    """
    from farflung.report import Others, Run, watch

    run, finished, views = Run(folder), threading.Event(), list[threading.Thread]()
    with contextlib.suppress(UserError):  # which preparing the run tells
        run.refresh()

    def show(others: Others | None = None) -> None:
        arguments = {"console": Console(file=to), "others": others}
        views.append(threading.Thread(target=watch, args=(run, finished), kwargs=arguments, daemon=True))
        views[0].start()

    try:
        yield show
    finally:
        finished.set()
        for view in views:
            view.join(timeout=10)


HELP = f"{train.__doc__}" + (
    "\n\nfarflung train [CONFIG.toml] [flags] starts a run: every flag is also a key of the file, and flags win. "
    "farflung train --resume RUN goes on with one from its last whole checkpoint. This is refused if the replicas have "
    "no checkpoint in common. --restart then begins the run anew, with its settings, and deletes what it had come to. "
    "Under torchrun, this process becomes one of the replicas, or a part of one."
)
