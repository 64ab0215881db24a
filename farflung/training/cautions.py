"""What to tell of settings that work, and that one may not have meant."""

from __future__ import annotations

from farflung.inner import INNER
from farflung.outer import AveragedMoments, FastWeights
from farflung.outer.companions.moments import kinds_kept
from farflung.settings import Settings

IDLE = "it changes nothing; leave it out"
"""What to do with a setting that is without effect."""


def cautions(settings: Settings) -> list[str]:
    """The lines to tell of a run's settings."""
    told = _without_rounds(settings) or _rest_alone(settings), _another_method(settings)
    return [line for line in (*told, _no_moments(settings), _not_averaged(settings), _short_tail(settings)) if line]


def of_observer(settings: Settings) -> list[str]:
    """The lines to tell of what an observer of peers that come and go sees: what a newcomer would begin with."""
    if not any(isinstance(one, FastWeights) for one in settings.method().companions):
        return []
    return [
        f"peers of {settings.rounds.method} hand on fast weights, which this observer judges; what they judge "
        "themselves, and the run ends with, is nearer to an average, and mostly better until the learning rate is "
        "low; see their own run folders for it"
    ]


def _without_rounds(settings: Settings) -> str:
    """A warning for a run that ends before its first round; "" for others."""
    if settings.run.replicas == 1 and not settings.network.kind.elastic:
        return ""  # there is nobody to hold it with
    schedule = settings.method().schedule
    first = min(schedule.first(fragment) for fragment in range(schedule.fragments))
    if first <= settings.run.steps:
        return ""
    if schedule.by_clock:
        return f"the run ends before its first round, which comes after {schedule.seconds:g} s; give --rounds"
    ends = f"the run ends at step {settings.run.steps}, before its first round, which comes after step {first}"
    return f"{ends}; its replicas exchange nothing; give a smaller --every"


def _rest_alone(settings: Settings) -> str:
    """A warning for a run that ends before the first round of what lies beside its core; "" for others."""
    core, schedule = settings.core, settings.method().schedule
    whole = settings.run.replicas - core.core_only_replicas
    if not core.core or schedule.by_clock or (whole < 2 and not settings.network.kind.elastic):
        return ""
    rest = schedule.times(core.rest_every)
    first = min(rest.first(fragment) for fragment in range(rest.fragments))
    if first <= settings.run.steps:
        return ""
    ends = f"the run ends at step {settings.run.steps}, before the first round of what lies beside the core"
    return f"{ends}, which comes after step {first}; replicas exchange the core alone; give a smaller --rest-every"


def _another_method(settings: Settings) -> str:
    """A warning for an inner optimizer that makes the method another one than was published; "" for others."""
    method = settings.method()
    makes = {name: getattr(inner.make, "func", inner.make) for name, inner in INNER.items()}
    if method.needs_inner is None or makes.get(settings.inner.inner or "", method.needs_inner) is method.needs_inner:
        return ""
    remedy = next((f"give --inner {name}" for name, made in makes.items() if made is method.needs_inner), "")
    return (
        f"{settings.rounds.method} is published with {method.needs_inner.__name__}, and is another method with inner "
        f"{settings.inner.inner}; {remedy or 'leave out --inner'}"
    )


def _no_moments(settings: Settings) -> str:
    """A warning for an inner optimizer that keeps nothing of what the method averages of it; "" for others."""
    method = settings.method()
    averaged = [kind for one in method.companions if isinstance(one, AveragedMoments) for kind in one.by_kind()]
    kept = set().union(*kinds_kept(method.inner, {"layers.0.weight": 2, "bias": 1}).values()) if averaged else set()
    if not averaged or kept.intersection(averaged):
        return ""
    return (
        f"{settings.rounds.method} averages {' or '.join(averaged)}, and inner {settings.inner.inner} keeps none, so "
        "that only weights are averaged; give another --inner, such as adamw"
    )


def _not_averaged(settings: Settings) -> str:
    """A warning for settings of what rounds tell inner optimizers, where they tell nothing; "" for others."""
    method, own, name = settings.method(), settings.inner, settings.rounds.method
    without_rounds = method.outer is None or method.schedule.every is None
    if own.muon_align and (without_rounds or method.dealing):
        return f"muon_align is {own.muon_align}, but {name} averages no matrices in rounds; {IDLE}"
    if own.slow_rounds and without_rounds:
        return f"slow_rounds is {own.slow_rounds}, but {name} averages no slow momenta; {IDLE}"
    return ""


def _short_tail(settings: Settings) -> str:
    """A warning for a tail average of one round, or none; "" for others."""
    share, schedule, name = settings.inner.tail_average, settings.method().schedule, settings.rounds.method
    if not share:
        return ""
    if schedule.every is None:
        return f"tail_average is {share}, over the run's last rounds, and {name} holds none; {IDLE}"
    apart = min(schedule.every, schedule.final or schedule.every)
    if schedule.fragments == 1 and share * settings.run.steps <= apart:
        return f"tail_average is {share}, in which one round ends at most; it averages nothing; give a larger part"
    return ""
