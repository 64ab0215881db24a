"""States that were read in part are refused: torch.distributed.checkpoint reads what a new session has by then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as sharded
from problem import flat, inner_steps, small_model
from torch import Tensor

from farflung import methods
from farflung.errors import UserError
from farflung.methods import Method
from farflung.networks import SimulatedNetwork, Simulation

SAVED, STEPS = 5, 14
MADE: dict[str, Callable[[], Method]] = {
    "feedback": methods.demo,
    "noted": lambda: methods.factored_gossip(every=4),
    "momentum": lambda: methods.diloco(every=4),
    "all there at once": lambda: methods.des_loc(every=2),
}


def trained(network: SimulatedNetwork, method: Method, folder: Path, resumed: str = "") -> Tensor:
    """The small problem, saved after some steps, or `resumed` from there: by "torch", or by its own "in parts"."""
    model, own = small_model(), folder / str(network.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with method.attach(model, optimizer, network) as outer:
        if resumed:
            saved: dict[str, Any] = torch.load(own / "state.pt")
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            rounds = {"rounds": saved["rounds"] if resumed == "torch" else outer.state_dict()}
            if resumed == "in parts":
                sharded.load(rounds, checkpoint_id=own, no_dist=True)
            outer.load_state_dict(rounds["rounds"])
        inner_steps(model, optimizer, network.rank, range(SAVED if resumed else 0, SAVED))
        if not resumed:
            sharded.save({"rounds": outer.state_dict()}, checkpoint_id=own, no_dist=True)
            whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rounds": outer.state_dict()}
            torch.save(whole, own / "state.pt")
        inner_steps(model, optimizer, network.rank, range(SAVED, STEPS))
    return flat(model)


@pytest.mark.parametrize("name", MADE)
def test_a_state_that_was_read_in_part_is_refused_and_never_gone_on_with(name: str, tmp_path: Path) -> None:
    def run(resumed: str = "") -> list[Tensor]:
        return Simulation(2).run(lambda network: trained(network, MADE[name](), tmp_path, resumed))

    undisturbed = run()
    assert all(map(torch.equal, run("torch"), undisturbed))
    if name == "all there at once":
        assert all(map(torch.equal, run("in parts"), undisturbed))
        return
    with pytest.raises(
        UserError, match=r"lacks what was saved of .*; load all that state_dict\(\) gave, as torch.save"
    ):
        run("in parts")
