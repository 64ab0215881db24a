"""Rounds of peers in a folder that count only where enough of them came."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from folder_seats import seats
from patience import patience
from problem import inner_steps, replica, small_model, trainer

from farflung import methods
from farflung.errors import UserError
from farflung.networks import Simulation
from farflung.networks.base import ALONE
from farflung.outer import Outcome, Round
from farflung.settings import Settings


@pytest.mark.parametrize("quorum", [2, 3])
def test_two_peers_average_where_two_are_enough(tmp_path: Path, quorum: int) -> None:
    seen: dict[int, list[Round]] = {}
    method = replace(methods.decoupled_diloco(every=4, delay=0, fragments=1), quorum=quorum)
    together = threading.Barrier(2)
    with seats(f"file://{tmp_path}/run", tmp_path, 2) as run:

        def work(seat: int) -> None:
            model, ended = small_model(), list[Round]()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            together.wait(patience(20))
            with method.attach(model, optimizer, run.open[seat], on_round=ended.append):
                for step in range(24):
                    inner_steps(model, optimizer, seat, range(step, step + 1))
                    time.sleep(0.02)
            seen[seat] = ended

        threads = [threading.Thread(target=work, args=(seat,)) for seat in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(patience(60))
    assert len(seen) == 2
    rounds = [one for each in seen.values() for one in each]  # on a busy machine the two may miss some of them
    if quorum == 2:
        assert any(one.outcome == Outcome.AVERAGED and len(one.group) == 2 for one in rounds)
    else:  # who sees it first leaves, and the other one may find nobody
        assert {one.outcome for one in rounds} == {Outcome.SAT_OUT}
        assert {one.reason for one in rounds} <= {"2 of a quorum of 3 came", ALONE["nobody"]}


def test_who_is_alone_is_not_told_of_a_slow_link(tmp_path: Path) -> None:
    with seats(f"file://{tmp_path}/run", tmp_path, 1) as run:
        rounds = trainer(lambda: methods.diloco(every=1), 2, deadline_s=patience(4))(run.open[0]).rounds
    assert {(one.outcome, one.reason) for one in rounds} == {(Outcome.SAT_OUT, ALONE["nobody"])}


def test_where_all_stay_a_quorum_is_refused_and_the_recipe_is_what_its_parts_are() -> None:
    parts = {"method": "diloco", "every": 4, "delay": 2, "fragments": 2, "fuse": "rda"}
    settings = [Settings.of(**parts), Settings.of(**parts | {"method": "decoupled-diloco", "fuse": None})]
    one, other = (Simulation(2).run(replica(each.method, 14)) for each in settings)
    assert all((a.weights == b.weights).all() for a, b in zip(one, other, strict=True))
    with pytest.raises(UserError, match="quorum is 3, but only on the internet do peers stay away; leave it out"):
        Simulation(2).run(replica(Settings.of(method="decoupled-diloco", quorum=3).method, 2))
    with pytest.raises(UserError, match="quorum is 0; it must be at least 1"):
        methods.decoupled_diloco(quorum=0)
    methods.decoupled_diloco(quorum=3).check_elastic()
