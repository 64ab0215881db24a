"""When replicas with equal anchors give their state, and how soon one that has it averages with them; step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from problem import inner_steps, small_model
from torch import Tensor

from farflung import methods
from farflung.codecs import ErrorFeedback, Quantize
from farflung.methods import Method
from farflung.networks import Finished, PeerLostError, SharedState, SimulatedNetwork
from farflung.outer import ElasticLoop
from farflung.outer.exchange import Exchange
from farflung.outer.outcomes import Outcome, Result, Round
from farflung.outer.round import Offer, Sync

LATE = 40
"""The step at which the others are when a newcomer comes."""


class Coming:
    """A state that comes some steps after it was given."""

    finished_at = 0.0

    def __init__(self, giver: Replica, takes: int) -> None:
        self._giver, self._takes = giver, takes
        self._comes: int | None = None
        self._state: SharedState | None = None

    def give(self, state: SharedState) -> None:
        copies = {name: tensor.clone() for name, tensor in state.tensors.items()}
        self._state, self._comes = SharedState(copies, dict(state.facts)), self._giver.loop.step + self._takes

    def done(self) -> bool:
        return self._comes is not None and self._comes <= self._giver.loop.step

    def wait(self, timeout: float) -> SharedState:
        while timeout and not self.done():
            self._giver.train()
        if self._state is None:
            raise PeerLostError([0], "no peer has the run's state to give")
        return self._state


class Desk:
    """What a network of peers does beside moving packets: here, one asks and the other gives."""

    keeps = False

    def __init__(self) -> None:
        self.asked: list[Coming] = []
        self.fetch: Callable[[bool], Any] = lambda _: None
        self.gave: list[SharedState] = []

    @property
    def wanted(self) -> bool:
        return bool(self.asked)

    def paced(self, step: int, every: int, rate: float = 0.0) -> int:
        return step

    def give(self, state: SharedState) -> None:
        self.gave.append(state)
        while self.asked:
            self.asked.pop().give(state)

    def others_told(self, fact: str) -> list[float]:
        return []

    def telling(self, fact: str) -> tuple[int, ...]:
        return ()

    def nothing(self, *_: Any, **__: Any) -> None: ...

    keep = tell_others = accept = reject = blame = nothing


class Compared:
    """A round's result, once it is due: by then others have started theirs, and tell what their anchors were."""

    finished_at = 0.0

    def __init__(self, result: Callable[[], Result]) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def wait(self, timeout: float) -> Result:
        return self._result()


class Replica:
    """One replica, and what its rounds came to. The first of two averages with others who are as it is."""

    def __init__(self, method: Method, others: dict[tuple[int, int], tuple[str, Tensor]], late: bool = False) -> None:
        self.model, self.desk, self.late = small_model(), Desk(), late
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        network: Any = SimulatedNetwork.alone()
        network.elastic, network.members = self.desk, lambda: (0, 1)
        self.rounds: list[Round] = []
        session = method.attach(self.model, self.optimizer, network, on_round=self.rounds.append)
        assert isinstance(session, ElasticLoop)
        self.loop, self._others, self.first = session, others, self
        self.loop._exchange = self._exchange  # type: ignore[method-assign]

    def _exchange(self, sync: Sync[Tensor], offer: Offer[Tensor], group: Any) -> Exchange:
        at, own = (sync.index, sync.rounds), self.loop._lineage(sync.index)
        if not self.late:
            self._others[at] = own, offer.message.clone()
            return Exchange(0.0, Finished(Result(offer.message, (0, 1), Outcome.AVERAGED), 0.0))

        def result() -> Result:
            while at not in self._others:  # it waits for them
                self.first.train()
            lineage, mean = self._others[at]
            if lineage != own:
                return Result(offer.message, (), Outcome.BEHIND, "its anchors are not the others'", host=at[1] % 2)
            return Result(mean.clone(), (0, 1), Outcome.AVERAGED)

        return Exchange(0.0, Compared(result))

    def train(self) -> None:
        with torch.enable_grad():  # one may train while another waits for it in its own step
            inner_steps(self.model, self.optimizer, int(self.late), range(self.loop.step, self.loop.step + 1))

    @property
    def outcomes(self) -> list[str]:
        return [round.outcome for round in self.rounds]


def pair(method: Method, ahead: int, takes: int) -> tuple[Replica, Replica]:
    """Two in step, of whom the second has just come, with a count of so many steps more than the first one's."""
    rounds: dict[tuple[int, int], tuple[str, Tensor]] = {}
    first, late = Replica(method, rounds), Replica(method, rounds, late=True)

    def fetch(_: bool) -> Coming:
        coming = Coming(first, takes)
        first.desk.asked.append(coming)
        return coming

    late.desk.fetch, late.first = fetch, first
    while first.loop.step < LATE:
        first.train()
    late.loop.step = LATE + ahead
    for sync in late.loop._rounds.syncs:
        sync.skip_to(late.loop.step + 1)
    return first, late


def equal_anchors(every: int, delay: int, fragments: int = 1) -> Method:
    return methods.diloco(every=every, delay=delay, fragments=fragments, codec=ErrorFeedback(Quantize(bits=8)))


@pytest.mark.parametrize("takes", [0, 2])
@pytest.mark.parametrize("ahead", [-3, 0, 1, 3, 4])
@pytest.mark.parametrize("pace", [(20, 5), (10, 5), (10, 0), (20, 12)], ids=str)
def test_one_that_is_behind_averages_after_one_round(pace: tuple[int, int], ahead: int, takes: int) -> None:
    """However many steps it is ahead of who gives it the state."""
    first, late = pair(equal_anchors(*pace), ahead, takes)
    while len(late.rounds) < 5:
        late.train()
        first.train()
    assert late.outcomes[0] == "behind" and late.outcomes[-3:] == ["averaged"] * 3, late.outcomes


@pytest.mark.parametrize("ahead", [-3, 0, 3])
def test_one_that_is_behind_in_fragments_averages_all_of_them_soon(ahead: int) -> None:
    """Also where there is always a round of one of them under way."""
    first, late = pair(equal_anchors(every=30, delay=10, fragments=3), ahead, takes=2)
    while len(late.rounds) < 15:
        late.train()
        first.train()
    assert late.outcomes[-6:] == ["averaged"] * 6, late.outcomes


def test_a_state_is_given_when_the_last_round_has_landed() -> None:
    first, _ = pair(equal_anchors(every=10, delay=5), 0, 0)
    first.desk.asked.append(Coming(first, 0))
    while not first.desk.gave:
        first.train()
    (state,) = first.desk.gave
    assert state.facts["step"] == LATE + 6 and state.facts["until"] == LATE + 10


def test_a_state_that_holds_no_longer_leaves_a_round_under_way_and_is_asked_for_again_once() -> None:
    first, late = pair(equal_anchors(every=10, delay=5), 0, takes=9)
    while late.loop.step < LATE + 60:
        late.train()
        first.train()
    assert len(first.desk.gave) <= 2 * len(late.rounds)
