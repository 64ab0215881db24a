"""What sessions keep, as plain values and tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from farflung.networks import Finished
from farflung.outer.exchange import Exchange
from farflung.outer.outcomes import Outcome, Result
from farflung.outer.round import Offer, PendingRound


def copied(state: Any, device: torch.device) -> Any:
    """The same containers with copies of all tensors in them, on `device`: what is loaded twice must not change."""
    if isinstance(state, Tensor):
        return state.to(device, copy=True)
    if isinstance(state, dict):
        return {key: copied(value, device) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(copied(value, device) for value in state)
    return state


def packed(
    pending: PendingRound[Tensor, Exchange], result: Result, now: float
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A round that has come to a result; times as ages, since clocks start at their own zeros."""
    exchange = pending.exchange
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
