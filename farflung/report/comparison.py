"""Which of several runs is better, and whether their losses can be compared at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from farflung.methods import RECIPES
from farflung.report.facts import Facts
from farflung.report.numbers import number
from farflung.report.read import Run

JUDGED_BY = ("workload", "data", "text_column", "max_tokens", "sequence_length", "eval_sequences")
"""Settings that decide on which held-out samples a run is judged."""

SAME_BYTES = 0.01
"""Tokens of so nearly the same length may well be of one tokenizer under two names."""


def bits_per_byte(run: Facts, loss: float | None) -> float | None:
    """A loss in nats a token as bits for each byte of text; None where that is not known."""
    length = run.bytes_per_unit
    return None if loss is None or not length else loss / math.log(2) / length


def unlike_tokens(runs: Sequence[Facts]) -> bool:
    """Whether runs count loss for each token, and their tokens are of different tokenizers."""
    told = [run for run in runs if run.tokenizer]
    lengths = [run.bytes_per_unit for run in told]
    known = [length for length in lengths if length]
    alike = len(known) == len(told) and max(known, default=1) <= (1 + SAME_BYTES) * min(known, default=1)
    return len({run.tokenizer for run in told}) > 1 and not alike


def scores(runs: Sequence[Run]) -> list[float | None]:
    """What each run is judged by: of the averaged weights where they were judged; a loss in bits a byte if need be."""
    found = [(run.results(), run.figure.key) for run in runs]
    raw = [one.get(f"{key}_averaged", one.get(key)) for one, key in found]
    if unlike_tokens(runs):
        return [bits_per_byte(run, loss) for run, loss in zip(runs, raw, strict=True)]
    return raw


def best_of(runs: Sequence[Run]) -> int | None:
    """The place of the run that is judged best; None for a single one, and where they cannot be compared."""
    if len(runs) < 2 or cautions(runs, about_tokens=False):
        return None
    judged = scores(runs)
    if any(score is None or not math.isfinite(score) for score in judged) or len(set(judged)) < 2:
        return None
    return judged.index(runs[0].figure.best(score for score in judged if score is not None))


def best_word(run: Run) -> str:
    """What to call the run that is judged best, as HTML."""
    figure = run.figure
    return escape(f"highest {figure.name}") if figure.more_is_better else "lowest loss"


def verdict(runs: Sequence[Run]) -> str:
    """One line on which run is better, and what keeps runs from being compared, as HTML."""
    lines = [f'<p class="caution">{escape(line)}</p>' for line in cautions(runs)]
    if (best := best_of(runs)) is not None:
        judged, figure = [float(score) for score in scores(runs) if score is not None], runs[best].figure
        second = judged.index(figure.best(score for place, score in enumerate(judged) if place != best))
        value = f"{number(judged[best])} {'bits a byte' if unlike_tokens(runs) else figure.unit}".rstrip()
        apart = abs(1 - judged[best] / judged[second]) if judged[second] else 0.0
        most, than = ("highest", "above") if figure.more_is_better else ("lowest", "below")
        lines.append(
            f'<p class="verdict"><b>{escape(runs[best].name)}</b> has the {most} {escape(figure.name)}: '
            f"{escape(value)}, {apart:.1%} {than} {escape(runs[second].name)}{escape(_unequal_work(runs))}.</p>"
        )
    return "".join(lines)


def cautions(runs: Sequence[Run], about_tokens: bool = True) -> list[str]:
    """Why the runs' losses cannot be compared as they are."""
    if len(runs) < 2:
        return []
    lines = []
    if len(told := sorted({run.figure.told("in").removesuffix(" in") for run in runs})) > 1:
        lines.append(f"Runs are measured in different things ({', '.join(told)}), so no run is marked as better.")
    elif unlike_tokens(runs) and not all(run.bytes_per_unit for run in runs):
        lines.append("Losses are of different tokenizers and cannot be compared: a longer token is harder to foretell.")
    elif unlike_tokens(runs) and about_tokens:
        lengths = ", ".join(f"{run.bytes_per_unit:.2f} bytes in {run.name}" for run in runs)
        lines.append(
            f"Losses are of different tokenizers, so only bits a byte can be compared: a token has {lengths}. The "
            "pictures of loss show bits a byte."
        )
    differ = [name for name in JUDGED_BY if len({repr(run.settings.get(name)) for run in runs}) > 1]
    if differ and not (differ == ["sequence_length"] and unlike_tokens(runs)):
        named = ", ".join(differ)
        lines.append(f"Runs are judged by different held-out samples (see {named}), so none is marked as better.")
    if apart := [run.name for run in runs if _kept_apart(run)]:
        lines.append(
            f"No round was held in {', '.join(apart)}: the replicas trained alone there, so no run is marked as "
            "better; give a smaller --every."
        )
    return lines


def _kept_apart(run: Run) -> bool:
    """Whether a run has held no round though its method holds some, as one that ends before the first."""
    found = run.results()
    method = str(found.get("method"))
    holds = method not in RECIPES or RECIPES[method]().exchanges  # a loop of one's own tells no recipe's name
    return found.get("replicas", 1) > 1 and not found.get("rounds") and holds


def _unequal_work(runs: Sequence[Run]) -> str:
    """How many units the runs have trained on, where that differs."""
    counts = [run.results().get("tokens", 0) for run in runs]
    if max(counts) <= 1.01 * min(counts):
        return ""
    told = ", ".join(f"{run.name} {count:,}" for run, count in zip(runs, counts, strict=True))
    return f", but not after the same {runs[0].units}: {told}"
