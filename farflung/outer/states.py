"""What sessions keep, as plain values and tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from farflung.cells import Cell
from farflung.errors import UserError
from farflung.networks import Finished
from farflung.outer.exchange import Exchange
from farflung.outer.fragments import Weights
from farflung.outer.outcomes import Outcome, Result
from farflung.outer.pace import Pace
from farflung.outer.round import Offer, PendingRound

HOLDS = "holds"
"""What a cell's state was, when it was told, is noted as."""


@contextmanager
def refusing_others() -> Iterator[None]:
    """A context in which a state is loaded. Raises UserError for what another method's, or another model's, ends in."""
    try:
        yield
    except UserError:
        raise
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"this state belongs to another method or model ({type(error).__name__}: {reason}); attach that one"
        ) from error


def of_cell(kept: dict[str, Any], cell: Cell) -> dict[str, Any]:
    """What is told of a cell, with its size, and with what there is of it, so that it is seen where some is lost."""
    told = kept | {"values": cell.numel}
    return told | {HOLDS: sorted(_outline(told))}


def check_cell(kept: Mapping[str, Any], cell: Cell) -> None:
    """Refuses what is not of a cell, or not all that was told of it. Raises UserError."""
    if kept.get("values") != cell.numel:
        raise UserError(f"this state belongs to another model: it has no {cell.name} of {cell.numel} values")
    if lacks := sorted({*kept.get(HOLDS, ())} - {*_outline(kept)}):  # earlier releases do not tell
        raise UserError(
            f"this state lacks what was saved of {cell.name}: {', '.join(lacks)}; load all that state_dict() gave, as "
            "torch.save and torch.load keep it: torch.distributed.checkpoint reads only what a new session has by then"
        )


def _outline(told: Any, name: str = "") -> list[str]:
    """The names of the tensors in nested tables and lists."""
    if isinstance(told, Tensor):
        return [name]
    if not isinstance(told, Mapping | list | tuple):
        return []
    each = told.items() if isinstance(told, Mapping) else enumerate(told)
    return [found for key, one in each for found in _outline(one, f"{name}.{key}" if name else str(key))]


def copied(state: Any, device: torch.device) -> Any:
    """The same containers with copies of all tensors in them, on `device`: what is loaded twice must not change."""
    if isinstance(state, Tensor):
        return state.to(device, copy=True)
    if isinstance(state, dict):
        return {key: copied(value, device) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(copied(value, device) for value in state)
    return state


def packed(pending: PendingRound[Tensor, Exchange], now: float) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A round that has come to a result; times as ages, since clocks start at their own zeros."""
    exchange, result = pending.exchange, pending.exchange.result.wait(0.0)
    times = {"started": exchange.started_s - now, "finished": exchange.result.finished_at - now}
    offer = {**vars(pending.offer), "message": result.mean.clone()}
    tensors = {name: value for name, value in offer.items() if isinstance(value, Tensor)}
    became = {**vars(result), "mean": None, "outcome": result.outcome.value}
    del became["missing"]  # earlier releases know nothing of it
    offer = {name: value for name, value in offer.items() if name not in tensors}
    told = {**vars(pending), **times, "offer": offer, "exchange": became, "tensors": list(tensors)}
    return told, tensors


def unpacked(saved: dict[str, Any], tensors: dict[str, Tensor], now: float) -> PendingRound[Tensor, Exchange]:
    """The round that was `packed`."""
    values = {name: value for name, value in saved.items() if name != "tensors"}
    started_s, finished = values.pop("started") + now, values.pop("finished") + now
    offer = Offer(**values.pop("offer") | tensors)
    result = Result(**values.pop("exchange") | {"mean": offer.message})
    result.outcome = Outcome(result.outcome)
    return PendingRound(**values, offer=offer, exchange=Exchange(started_s, Finished(result, finished)))


def paced(pace: Pace, weights: Weights) -> dict[str, Any]:
    """What is kept of a fragment's rounds, besides of its cells."""
    return pace.told() | {"sync": pace.sync.state_dict(), "noted": weights.notes()}


def cells_kept(
    weights: Weights, codecs: Mapping[str, Any], pending: Mapping[int, Mapping[str, Tensor]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is kept of each cell of a fragment by its name, also in its pending rounds, which are told by their places.

    `codecs` are the states of the cells' codecs.
    """
    kept = weights.kept()
    for place, tensors in pending.items():
        kept |= {_of_pending(place, name): tensor for name, tensor in tensors.items()}
    for cell, values in zip(weights.fragment.cells, weights.fragment.apart(kept).values(), strict=True):
        yield cell.name, of_cell(values | {"codecs": codecs.get(cell.name, {})}, cell)


def take_cells(
    weights: Weights, kept_cells: Mapping[str, dict[str, Any]], pending: Mapping[int, Sequence[str]]
) -> tuple[dict[str, Any], dict[int, dict[str, Tensor]]]:
    """Gives a fragment its `cells_kept`, of those of all fragments.

    Returns the codecs' states, and the tensors of its pending rounds, of which `pending` tells the names.
    """
    cells = copied({cell.name: kept_cells[cell.name] for cell in weights.fragment.cells}, weights.anchor.device)
    codecs = {name: kept.pop("codecs") for name, kept in cells.items()}
    kept = weights.fragment.together(cells)
    weights.take(kept)
    none = weights.anchor[:0]  # where no cell of the fragment is kept
    return codecs, {
        place: {name: kept.get(_of_pending(place, name), none) for name in names} for place, names in pending.items()
    }


def _of_pending(place: int, name: str) -> str:
    """What a pending round's tensor is called among those of its cells."""
    return f"pending {place} {name}"
