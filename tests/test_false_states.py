"""A newcomer to a run on the internet, to whom a liar offers a state that cannot be, or does not fit."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from patience import patience, until
from problem import small_model
from test_internet import Run

from farflung import methods
from farflung.errors import UserError
from farflung.networks import SharedState
from farflung.networks.internet import InternetNetwork
from farflung.outer.fragments import split
from farflung.testing.liars import Liar, manifest_of

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path, quick: None) -> Iterator[Run]:
    made = Run(tmp_path)
    made.join(trains=False)
    yield made
    made.close()


LIES = {
    "an infinite length": ([["anchor 0", float("inf")]], torch.ones(4)),
    "nothing at all": ([], torch.ones(0)),
    "a value that is not finite": ([["anchor 0", 4]], torch.tensor([1.0, float("nan"), 1.0, 1.0])),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_state_that_cannot_be_is_fetched_from_another(run: Run, liar: Liar, lie: str) -> None:
    one, newcomer = run.join(), run.join()
    tensors, values = LIES[lie]
    content = values.view(torch.uint8).numpy().tobytes()
    digests = [hashlib.sha256(content).hexdigest()] if content else []
    described = {"id": "a", "digests": digests, "tensors": tensors, "facts": {"step": 30, "until": 40}}
    liar.serve(described, content)
    until(lambda: liar.peers.identity.rank in newcomer.members())
    with training(one, SharedState({"anchor 0": torch.arange(4.0)}, {"step": 7, "until": 10**6})):
        state = newcomer.fetch(identical=True).wait(patience(60))
    assert state.tensors["anchor 0"].tolist() == [0.0, 1.0, 2.0, 3.0] and state.facts["step"] == 7
    assert newcomer.refused["bad state"] + newcomer.refused["bad piece"] > 0


def joins_after(liar: Liar, network: InternetNetwork, tensors: dict[str, int]) -> bool:
    """Whether a newcomer has caught up where a liar says that it has gone furthest, and serves such tensors."""
    content = torch.full((sum(tensors.values()),), 0.01).view(torch.uint8).numpy().tobytes()
    liar.serve(manifest_of(content, list(tensors.items())), content)
    until(lambda: liar.peers.identity.rank in network.members())
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with methods.diloco(every=10).attach(model, optimizer, network) as outer:
        return outer.catch_up(patience(60))


CELLS = [cell for fragment in split(small_model(), 1) for cell in fragment.cells]
ANCHORS = {f"anchor of {cell.name}": cell.numel for cell in CELLS}
UNFIT = {
    "another model's": {**ANCHORS, "anchor of 0.weight": ANCHORS["anchor of 0.weight"] + 1},
    "a cell less": {name: count for name, count in ANCHORS.items() if "4" not in name},
    "a short momentum": {**ANCHORS, "momentum_buffer of 0.weight": 3},
    "an unknown name": {**ANCHORS, "evil of 0.weight": ANCHORS["anchor of 0.weight"]},
    "an unknown cell": {**ANCHORS, "anchor of 9.weight": 3},
}


@pytest.mark.parametrize("lie", UNFIT)
def test_a_newcomer_takes_no_state_that_does_not_fit_but_another_peer_s(run: Run, liar: Liar, lie: str) -> None:
    one, newcomer = run.join(), run.join()
    fits = {name: torch.full((count,), 2.0) for name, count in ANCHORS.items()}
    with training(one, SharedState(fits, {"step": 7, "until": 10**6})):
        assert joins_after(liar, newcomer, UNFIT[lie])
    assert newcomer.refused["bad state"] == 1


def test_a_newcomer_to_whom_all_give_what_does_not_fit_is_told_so_in_one_line(run: Run, liar: Liar) -> None:
    with pytest.raises(UserError, match="other shapes") as error:
        joins_after(liar, run.join(), {"anchor of 0.weight": 5})
    assert "\n" not in str(error.value)


@contextlib.contextmanager
def training(peer: InternetNetwork, state: SharedState) -> Iterator[None]:
    """A peer that goes from step to step, so that it can be asked for its state."""
    stop = threading.Event()

    def steps() -> None:
        while not stop.wait(0.02):
            peer.paced(8, 10)
            if peer.wanted:
                peer.give(state)

    thread = threading.Thread(target=steps)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
