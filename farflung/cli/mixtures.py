"""farflung mixture: experts that never talk to each other, and routers between them."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from farflung.cli.arguments import parse
from farflung.cli.printing import working
from farflung.errors import UserError, counted, suggestion
from farflung.files import refuse_taken
from farflung.mixtures.settings import SplitSettings
from farflung.tables import Checked, setting

if TYPE_CHECKING:
    from farflung.mixtures.folder import Mixture
    from farflung.mixtures.joined import MixtureScore
    from farflung.mixtures.routers import RouterRound

EXAMPLE = 100
"""Characters of an example of an expert's text."""

MixturePath = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="MIX")]


@dataclass(frozen=True)
class RouterOptions:
    """Which mixture's routers to show."""

    mixture: MixturePath
    """The folder that farflung mixture split has made."""
    text: str | None = None
    """Show how likely each router finds the begin of this text, and so which expert would continue it."""


@dataclass(frozen=True)
class EvaluateOptions(Checked):
    """Which mixture to judge, and beside what."""

    mixture: MixturePath
    """The folder that farflung mixture split has made, with the experts' runs in MIX/runs/0, MIX/runs/1 and so on."""
    dense: Path | None = None
    """The run of one model, or what farflung export has made of it, to judge by the same sequences."""
    prefix: int | None = setting(None, least=1)
    """Tokens that the routers read; unset: as many as they have learnt to."""


@dataclass(frozen=True)
class ExportOptions:
    """Which mixture to export, and where to."""

    mixture: MixturePath
    """The folder that farflung mixture split has made, with the experts' runs in MIX/runs/0, MIX/runs/1 and so on."""
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """The folder to write; it must not exist, or be empty."""


MixtureOptions = (
    Annotated[SplitSettings, tyro.conf.subcommand("split", prefix_name=False)]
    | Annotated[RouterOptions, tyro.conf.subcommand("router", prefix_name=False)]
    | Annotated[EvaluateOptions, tyro.conf.subcommand("evaluate", prefix_name=False)]
    | Annotated[ExportOptions, tyro.conf.subcommand("export", prefix_name=False)]
)
"""The arguments of all actions, for shells to complete."""


def mixture(arguments: list[str]) -> None:
    """Split a text among experts that never talk to each other, show who got what, judge them, or join them."""
    actions = {"split": split, "router": router, "evaluate": evaluate, "export": export}
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: farflung mixture ACTION [options], with --help for an action's options\n")
        print("\n".join(f"  {name:9} {action.__doc__}" for name, action in actions.items()))
        return
    if arguments[0] not in actions:
        raise UserError(f"mixture does not know {arguments[0]!r}{suggestion(arguments[0], [*actions])}")
    actions[arguments[0]](arguments[1:])


def split(arguments: list[str]) -> None:
    """Train routers, and deal a text among as many experts; under torchrun, on several machines."""
    settings = parse(SplitSettings, arguments, "mixture split", split.__doc__)

    from farflung.mixtures.split import split as make_split
    from farflung.networks import from_env

    network = from_env()
    first = network.rank == network.members()[0]
    made = make_split(settings, network, _tell_round if first else lambda _: None)
    if not first:
        return
    print(_table_of(made))
    if network.traffic.bytes_sent:
        print(f"sent to each other machine, scores and routers: {network.traffic.bytes_sent:,} bytes in all")
    print(f"farflung: {made.folder} has a part for each of {made.experts} experts; train each, anywhere, by itself:")
    length = f"--sequence-length {made.sequence_length}"
    print(f"  farflung train --data {made.store(0)} {length} --out {made.run(0)}    and so on")


def router(arguments: list[str]) -> None:
    """Show how the routers have learnt, who got what, and an example of each expert's text."""
    options = parse(RouterOptions, arguments, "mixture router", router.__doc__)

    from farflung.mixtures import joined
    from farflung.mixtures.folder import read
    from farflung.mixtures.routers import RouterRound

    found = read(options.mixture)
    if options.text is not None:
        scores = joined.route(found, options.text)
        print("\n".join(f"expert {number}: {-score:.3f} nats a token" for number, score in enumerate(scores)))
        print(f"farflung: expert {scores.argmax()} continues this text")
        return
    for one in found.rounds:
        _tell_round(RouterRound(**one))
    print(_table_of(found))
    for number in range(found.experts):
        print(f"expert {number}: {joined.example(found, number)[:EXAMPLE]!r}")


def evaluate(arguments: list[str]) -> None:
    """Judge each held-out sequence by the expert that it is routed to, and a dense model beside them."""
    options = parse(EvaluateOptions, arguments, "mixture evaluate", evaluate.__doc__)

    from farflung.mixtures.folder import read
    from farflung.mixtures.joined import evaluate as judge

    found = read(options.mixture)
    with tempfile.TemporaryDirectory() as name, working("judging"):
        experts = _experts(found, Path(name))
        dense = _exported(options.dense, Path(name) / "dense") if options.dense else None
        score = judge(found, experts, dense, options.prefix)
    print(_told(score))


def export(arguments: list[str]) -> None:
    """Join all experts and routers in one folder that AutoModelForCausalLM loads with trust_remote_code=True."""
    options = parse(ExportOptions, arguments, "mixture export", export.__doc__)

    from farflung.mixtures.folder import read, written_beside
    from farflung.mixtures.joined import join

    found = read(options.mixture)
    refuse_taken(options.folder, "give a folder that does not, or an empty one")
    with tempfile.TemporaryDirectory() as name, working("joining the experts"):
        experts = _experts(found, Path(name))
        with written_beside(options.folder) as folder:
            join(found, experts, folder)
    print(f"farflung: {options.folder} holds {len(experts)} of {found.experts} experts and their routers")


def _experts(found: Mixture, folder: Path) -> dict[int, Path]:
    """The experts that are trained, exported into a folder; tells of those that are not."""
    runs = {number: found.run(number) for number in range(found.experts)}
    there = {number: run for number, run in runs.items() if run.exists()}
    for number in runs.keys() - there.keys() if there else ():
        missing = f"expert {number} is missing: there is no {runs[number]}; its sequences go to the next best"
        print(f"farflung: {missing}", file=sys.stderr)
    return {number: _exported(run, folder / str(number)) for number, run in there.items()}


def _exported(run: Path, folder: Path) -> Path:
    """A run's model as a folder that transformers loads: made there, unless it is one already."""
    if (run / "config.json").exists():
        return run
    from farflung.training.export import export as write_export

    write_export(run, folder)
    return folder


def _tell_round(one: RouterRound) -> None:
    pure = "" if one.purity is None else f", purity {one.purity:.3f}"
    chosen = ", ".join(f"{share:.0%}" for share in one.chosen)
    print(f"round {one.number}: {one.loss:.3f} nats a token{pure}; without seats they would take {chosen}", flush=True)


def _table_of(found: Mixture) -> str:
    """How many sequences each expert has, of each source."""
    lines = []
    for number, (dealt, judged) in enumerate(zip(found.dealt, found.held_out, strict=True)):
        of = ", ".join(f"{count:,} of {source}" for count, source in zip(dealt, found.data, strict=True) if count)
        lines.append(f"expert {number}: {counted(sum(dealt), 'sequence')} ({of}), {judged:,} held out")
    return "\n".join(lines)


def _told(score: MixtureScore) -> str:
    def told(what: str, loss: float | None) -> str:
        return "" if loss is None else f"{what}{loss:.4f} nats a token, perplexity {exp(loss):.2f}"

    lines = []
    for one in score.experts:
        instead = f" ({one.instead} of them of missing experts)" if one.instead else ""
        lines.append(f"expert {one.number}: {counted(one.sequences, 'sequence')}{instead}{told(', ', one.loss)}")
    lines.append(told("mixture: ", score.loss))
    return "\n".join(filter(None, [*lines, told("dense: ", score.dense)]))
