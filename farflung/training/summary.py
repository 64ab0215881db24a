"""What a run tells of itself at its end, of what each of its replicas has told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from farflung.figure import Figure, figure_of
from farflung.pipeline import Island
from farflung.settings import Settings
from farflung.workloads import Workload


def summary_of(
    settings: Settings, island: Island, workload: Workload, step: int, facts: list[dict[str, Any]]
) -> dict[str, Any]:
    """What a run tells of itself at its end, for JSON.

    Args:
        island: has the weights that the run ends with.
        step: the last one.
        facts: what each replica has told of its run.
    """
    seen = sum(fact["tokens"] for fact in facts)
    replicas, count, parameters = settings.run.replicas, len(facts), facts[0]["parameters"]
    figure, judged = figure_of(workload), island.evaluate()
    # By the clock, a run counts no steps, and some replicas have more of them than others.
    of_a_step = workload.units_per_sample * settings.island.batch_size
    trained = seen // (count * of_a_step) if settings.by_clock else settings.run.steps
    # On the internet, replicas have other numbers.
    missing = set(range(replicas)) - {fact["replica"] for fact in facts} if count < replicas else set()
    return {
        "method": settings.rounds.method,
        "units": workload.units,
        "measure": workload.measure,
        "judged_by": figure._asdict(),
        "replicas": replicas,
        "missing": sorted(missing),
        "steps": step,
        "stages": island.settings.stages,
        "shards": island.settings.shard,
        "islands": settings.island.islands,
        "parameters": parameters,
        "tokens": seen,
        **_epochs(workload, seen / workload.units_per_sample),
        figure.key: sum(fact["score"] for fact in facts) / count,
        f"{figure.key}_per_replica": [fact["score"] for fact in facts],
        **by_source(figure, [fact["scores"] for fact in facts]),
        f"{figure.key}_averaged": judged.value if judged else None,
        **({"others_averaged": dict(judged.others)} if judged and judged.others else {}),
        "bytes_sent": sum(fact["sent"] for fact in facts),
        "boundary_bytes": sum(fact["boundary"] for fact in facts),
        "ddp_bytes": ddp_bytes(parameters, settings, count, trained),
        **({"steps_trained": trained} if settings.by_clock else {}),
        "rounds": max(fact["rounds"] for fact in facts),
        "seconds": max(fact["seconds"] for fact in facts),
        "seconds_blocked": sum(fact["blocked"] for fact in facts) / count,
        **_speed(facts),
        **({"memory": told} if (told := [fact["memory"] for fact in facts if "memory" in fact]) else {}),
        **({"weight_spread": (sum(fact["deviation"] for fact in facts) / count) ** 0.5} if count > 1 else {}),
    }


def _epochs(workload: Workload, samples: float) -> dict[str, Any]:
    """How often each sample has come where that is known, or each of a source."""
    if available := getattr(workload, "available", None):
        return {"epochs": samples / available}
    epochs_of: Callable[[float], dict[str, float]] = getattr(workload, "epochs", lambda _: {})
    return {"epochs_of_sources": of} if (of := epochs_of(samples)) else {}


def by_source(figure: Figure, scores: list[dict[str, float]]) -> dict[str, Any]:
    """The replicas' mean scores of each source, as the first one names it: machines may have other paths.

    Nothing where there is one source, or more for some replicas than for others.
    """
    if len({*map(len, scores)}) > 1:
        return {}
    each = zip(*(own.values() for own in scores), strict=True)
    found = {name: sum(own) / len(scores) for name, own in zip(scores[0], each, strict=True)}
    return {figure.key_of_sources: found} if found else {}


def _speed(facts: list[dict[str, Any]]) -> dict[str, Any]:
    """The replicas' units a second together, their mean MFU where it is known, and where their time went.

    Nothing of simulated ones, or where no step was left to train.
    """
    spent, used = Counter[str](), [fact["mfu"] for fact in facts if fact["mfu"]]
    for fact in facts:
        spent.update(fact["spent"])
    if not spent:
        return {}
    together = {"tokens_per_second": sum(fact["speed"] for fact in facts)}
    mfu = {"mfu": sum(used) / len(used)} if used else {}
    return together | mfu | {"spent": dict(spent.most_common())}


def ddp_bytes(parameters: int, settings: Settings, count: int, steps: int) -> int:
    """The bytes of so many of N replicas that average float32 gradients every step: 2 (N - 1) / N messages each."""
    return 4 * parameters * 2 * (settings.run.replicas - 1) * steps * count // settings.run.replicas
