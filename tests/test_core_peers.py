"""Peers that hold the core of the model only, among others that hold all of it, on the internet and in a folder."""

from __future__ import annotations

import signal

import pytest
from patience import patience, until
from swarm import Swarm

from farflung.events import JoinedEvent, RoundEvent, StartEvent
from farflung.training import checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("in_folder", [False, True])
def test_weak_peers_join_with_the_core_and_strong_ones_with_all(swarm: Swarm, in_folder: bool) -> None:
    """Each takes the state of what it holds; all hold rounds of the core, and the strong ones those of the rest."""
    at = ("--at", (swarm.folder / "store").as_uri()) if in_folder else ()
    first = swarm.invite("--core", "heads2", "--method", "noloco", *at)
    until(lambda: swarm.step("first") > 5)
    weak = swarm.join("weak", "--core-only")
    until(lambda: swarm.averaged("weak") > 1)
    swarm.join("strong")
    until(lambda: {one.fragment for one in averaged(swarm, "strong")} == {0, 1})
    assert {one.fragment for one in swarm.events("weak", RoundEvent)} == {0}
    weights = [one.own_parameters for name in ("weak", "strong") for one in swarm.events(name, StartEvent)]
    assert weights[0] < weights[1]
    for name in ("weak", "strong"):
        assert swarm.events(name, JoinedEvent), "it has fetched the state of the others"
    ranks = [path.stem for path in (swarm.folder / "weak" / "events").glob("*.jsonl")]
    weak.send_signal(signal.SIGINT)
    assert weak.wait(patience(60)) == 130
    paths = list((swarm.folder / "weak" / "checkpoints").rglob("*.pt"))
    assert paths and first.poll() is None
    for path in paths:
        saved = checkpoint.read(path)
        assert path.stem in ranks and not [name for name in saved["model"] if ".rest." in name]
        assert sum(cell["values"] for cell in saved["outer"]["cells"].values()) == weights[0]


def averaged(swarm: Swarm, name: str) -> list[RoundEvent]:
    return [one for one in swarm.events(name, RoundEvent) if one.outcome == "averaged"]
