"""A loop that goes back to an earlier state within a session comes to the same bits as one that never went on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from problem import flat, inner_steps, small_model
from torch import Tensor

from farflung import methods
from farflung.methods import Method
from farflung.networks import Conditions, SimulatedNetwork, Simulation
from farflung.networks.simulator.conditions import Cut
from farflung.outer import Round

EVERY = 4
METHODS: dict[str, Callable[[], Method]] = {
    "ddp": methods.ddp,
    "diloco": lambda: methods.diloco(every=EVERY, delay=2),
    "diloco, codec of means": lambda: methods.diloco(every=EVERY, delay=EVERY, codec="ef-lowrank2-int4"),
    "factored gossip": lambda: methods.factored_gossip(every=EVERY),
    "gasloc": lambda: methods.gasloc(every=EVERY),
    "streaming": lambda: methods.streaming_diloco(every=EVERY, delay=2, fragments=2),
}
WHERE_THERE_ARE_CUTS = Conditions(cuts=(Cut(replicas=(0,), from_s=1e6, until_s=1e7),))
"""Where replicas say which rounds they come to, though nobody is ever cut off."""


def train(network: SimulatedNetwork, name: str, at: int, times: int) -> tuple[Tensor, list[Round]]:
    """The weights at the end, and the rounds since a replica has last gone back to the state of a step."""
    model, rounds = small_model(), list[Round]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with METHODS[name]().attach(model, optimizer, network, on_round=rounds.append) as outer:
        things = (model, optimizer, outer)
        inner_steps(model, optimizer, network.rank, range(at))
        saved = [thing.state_dict() for thing in copy.deepcopy((model, optimizer))] + [
            copy.deepcopy(outer.state_dict())
        ]
        for time in range(times):  # on what the loop then leaves out
            inner_steps(model, optimizer, 10 * (1 + time) + network.rank, range(at, at + EVERY + 1 + time))
            for thing, state in zip(things, copy.deepcopy(saved), strict=True):
                thing.load_state_dict(state)
        rounds.clear()
        inner_steps(model, optimizer, network.rank, range(at, 4 * EVERY))
    return flat(model), rounds


@pytest.mark.parametrize("conditions", [Conditions(), WHERE_THERE_ARE_CUTS], ids=["all stay", "cuts"])
@pytest.mark.parametrize("name", METHODS)
def test_what_was_under_way_and_what_was_told_of_it_counts_no_more(name: str, conditions: Conditions) -> None:
    for at, times in ((5, 1), (EVERY + 2, 2)):
        once, again = (
            Simulation(4, conditions).run(partial(train, name=name, at=at, times=count)) for count in (0, times)
        )
        for (weights, rounds), (same, repeated) in zip(once, again, strict=True):
            assert [round.outcome for round in repeated] == [round.outcome for round in rounds]
            assert torch.equal(same, weights)
