"""farflung mixture: experts that never talk to each other, and routers between them."""

from __future__ import annotations

import dataclasses
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from farflung.cli.arguments import flag, parse
from farflung.cli.printing import working
from farflung.cli.splitting import SplitOptions, split
from farflung.errors import UserError, suggestion
from farflung.files import refuse_taken
from farflung.mixtures.kinds import Kind, kind_of
from farflung.tables import Checked, setting

if TYPE_CHECKING:
    from farflung.mixtures.folder import Split

MixturePath = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="MIX")]


@dataclass(frozen=True)
class RouterOptions:
    """Which mixture's routers to show."""

    mixture: MixturePath
    """The folder that farflung mixture split has made."""
    text: str | None = None
    """Of text: show how likely each router finds the begin of this one, and so which expert would continue it."""


@dataclass(frozen=True)
class EvaluateOptions(Checked):
    """Which mixture to judge, and beside what."""

    mixture: MixturePath
    """The folder that farflung mixture split has made, with the experts' runs in MIX/runs/0, MIX/runs/1 and so on."""
    dense: Path | None = None
    """The run of one model, or what farflung export has made of it, to judge by the same data."""
    prefix: int | None = setting(None, least=1)
    """Of text: tokens that the routers read; unset: as many as they have learnt to."""
    top: int | None = setting(None, least=1)
    """Of pictures: how many experts work on one, beside one and all; unset: 2."""
    all_above: float | None = setting(None, least=0, most=1)
    """Of pictures: the share of noise above which all experts work, and below only one; unset: 0.5."""
    drawn_pictures: int | None = setting(None, least=0)
    """Of pictures: how many are drawn for the Frechet distance of each; 0 leaves it out; unset: 128."""
    grid: Path | None = None
    """Of pictures: a PNG file to write, of what each draws from the same noise, side by side."""


@dataclass(frozen=True)
class ExportOptions:
    """Which mixture to export, and where to."""

    mixture: MixturePath
    """The folder that farflung mixture split has made, with the experts' runs in MIX/runs/0, MIX/runs/1 and so on."""
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """The folder to write; it must not exist, or be empty."""


MixtureOptions = (
    Annotated[SplitOptions, tyro.conf.subcommand("split", prefix_name=False)]
    | Annotated[RouterOptions, tyro.conf.subcommand("router", prefix_name=False)]
    | Annotated[EvaluateOptions, tyro.conf.subcommand("evaluate", prefix_name=False)]
    | Annotated[ExportOptions, tyro.conf.subcommand("export", prefix_name=False)]
)
"""The arguments of all actions, for shells to complete."""


def mixture(arguments: list[str]) -> None:
    """Split data among experts that never talk to each other, show who got what, judge them, or join them."""
    actions = {"split": split, "router": router, "evaluate": evaluate, "export": export}
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: farflung mixture ACTION [options], with --help for an action's options\n")
        print("\n".join(f"  {name:9} {action.__doc__}" for name, action in actions.items()))
        return
    if arguments[0] not in actions:
        raise UserError(f"mixture does not know {arguments[0]!r}{suggestion(arguments[0], [*actions])}")
    actions[arguments[0]](arguments[1:])


def router(arguments: list[str]) -> None:
    """Show what has been learnt of who gets what, who got what, and an example of each expert's data."""
    options = parse(RouterOptions, arguments, "mixture router", router.__doc__)
    kind, found = _read(options.mixture)
    _tell_all(kind.told(found, **_own(kind, options)))


def evaluate(arguments: list[str]) -> None:
    """Judge what is held out by the expert that it is routed to, and one model beside them."""
    options = parse(EvaluateOptions, arguments, "mixture evaluate", evaluate.__doc__)
    kind, found = _read(options.mixture)
    own = _own(kind, options)
    with tempfile.TemporaryDirectory() as name, working("judging"), _named(found, options.dense, Path(name)):
        experts = _experts(kind, found, Path(name))
        dense = _exported(options.dense, Path(name) / "dense") if options.dense else None
        lines = [*kind.judged(found, experts, dense, **own)]
    _tell_all(lines)


def export(arguments: list[str]) -> None:
    """Join all experts, and what routes between them, in one folder that needs no farflung."""
    options = parse(ExportOptions, arguments, "mixture export", export.__doc__)

    from farflung.mixtures.folder import written_beside

    kind, found = _read(options.mixture)
    refuse_taken(options.folder, "give a folder that does not, or an empty one")
    with tempfile.TemporaryDirectory() as name, working("joining the experts"):
        experts = _experts(kind, found, Path(name))
        with _named(found, None, Path(name)), written_beside(options.folder) as folder:
            kind.join(found, experts, folder)
    held = f"{len(experts)} of {found.experts} experts, and what routes between them"
    print(f"farflung: {options.folder} holds {held}; {kind.exported}")


def _read(folder: Path) -> tuple[Kind, Split]:
    from farflung.mixtures.folder import workload_of

    kind = kind_of(workload_of(folder))
    found: Split = kind.read(folder)
    return kind, found


def _own(kind: Kind, options: Any) -> dict[str, Any]:
    """What was given of what only some kinds of mixtures take. Raises UserError where this one does not."""
    given = {one.name: getattr(options, one.name) for one in dataclasses.fields(options)}
    own = {name: value for name, value in given.items() if value is not None and name not in ("mixture", "dense")}
    if strange := sorted(own.keys() - kind.options):
        raise UserError(
            f"{flag(strange[0])} is not for mixtures of {kind.noun}s, as {options.mixture} is; leave it out"
        )
    return own


def _experts(kind: Kind, found: Split, folder: Path) -> dict[int, Path]:
    """The experts that are trained, exported into a folder; tells of those that are not."""
    runs = {number: found.run(number) for number in range(found.experts)}
    there = {number: run for number, run in runs.items() if run.exists()}
    for number in runs.keys() - there.keys() if there else ():
        missing = f"expert {number} is missing: there is no {runs[number]}; its {kind.noun}s go to the next best"
        print(f"farflung: {missing}", file=sys.stderr)
    return {number: _exported(run, folder / str(number)) for number, run in there.items()}


@contextmanager
def _named(found: Split, dense: Path | None, folder: Path) -> Iterator[None]:
    """Lets errors name the runs, and not the folder that they were exported into, which is gone when one reads them."""
    runs = {str(number): found.run(number) for number in range(found.experts)} | {"dense": dense}
    try:
        yield
    except UserError as error:
        told = re.sub(rf"{re.escape(str(folder))}/(\w+)", lambda one: str(runs[one[1]]), str(error))
        raise UserError(told) from error


def _exported(run: Path, folder: Path) -> Path:
    """A run's model as a folder that transformers loads: made there, unless it is one already. Raises UserError."""
    if run.is_file():
        raise UserError(f"{run} is a file; in its place, give the folder of a run, or of an exported model")
    if (run / "config.json").exists():
        return run
    from farflung.training.export import export as write_export

    write_export(run, folder)
    return folder


def _tell_all(lines: Iterable[str]) -> None:
    print("\n".join(lines))
