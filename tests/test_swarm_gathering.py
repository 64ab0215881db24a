"""What peers have of a run: all of a swarm's weights, from those that serve its stages; or nothing."""

from __future__ import annotations

import resource
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from patience import patience
from processes import free_port
from test_internet import Run
from torch import Tensor

from farflung.errors import UserError
from farflung.events import WarningEvent, events_in
from farflung.hooks.trained import trainable
from farflung.networks import SharedState
from farflung.networks.internet import Identity, InternetNetwork, Peers, newcomer_info
from farflung.networks.listening import ListenAddress
from farflung.pipeline.build import pieces_of
from farflung.pipeline.division import divisible, division_of
from farflung.settings import Settings
from farflung.swarm.states import given
from farflung.testing.peers import write_ticket
from farflung.training import launch
from farflung.training.gathering import whole_swarm
from farflung.training.island import coordination
from farflung.training.peer import model_of
from farflung.training.trainer import Trainer

SHARED = {"swarm": True, "stages": 2, "model": "micro", "batch_size": 4, "method": "noloco"}


@pytest.mark.slow
def test_a_swarms_model_is_gathered_from_who_serves_its_stages_where_there_is_room(tmp_path: Path) -> None:
    port, settings = free_port(), Settings.of(**SHARED, network="internet")
    ticket, networks = write_ticket(tmp_path / "run.ticket", tmp_path / "0.key", "127.0.0.1", port, **SHARED), []
    for number in range(2):
        local = ListenAddress("127.0.0.1", 0 if number else port)
        info = newcomer_info(ticket) | {"trains": True}
        peers = Peers(ticket, Identity(tmp_path / f"{number}.key"), local, info, print, first=not number)
        networks.append(InternetNetwork(peers, deadline=patience(20)))
    workload = divisible(settings.made_workload())
    division = division_of(settings.island, workload, 0)
    models = [pieces_of(settings.island, workload, division, stage, seed)[0].model for stage, seed in ((0, 5), (1, 6))]

    def gathered() -> dict[str, Tensor]:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(whole_swarm, ticket, settings, model_of(settings))
            while not asked.done():
                for network, model in zip(networks, models, strict=True):
                    if network.wanted:
                        facts = {"step": 7, "until": 8, "history": ""}
                        network.give(SharedState(given(trainable(model)), facts))
                time.sleep(0.05)
            weights, origin = asked.result()
            assert origin == "what the swarm's peers had at step 7"
            return weights

    try:
        for stage, network in enumerate(networks):
            network.expect_model(*model_of(settings))
            network.peers.background.run(network.peers.announce(stage=stage), patience(20))
        weights = gathered()
        for model in models:
            for name, one in trainable(model).items():
                assert torch.equal(weights[name], one)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))  # as on a disk that fills up
        try:
            with pytest.raises(
                UserError, match=r"cannot write to .*; make room, or have TMPDIR name a folder with more"
            ):
                gathered()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        networks[1].close()
        with pytest.raises(UserError, match=r"not every stage of test can be had now: .*; try again soon"):
            gathered()
    finally:
        for network in networks:
            network.close()


@pytest.mark.slow
def test_who_goes_on_with_what_nobody_has_says_that_it_begins_anew(tmp_path: Path) -> None:
    """As a peer that takes over a stage of which all copies are gone, where one with a checkpoint may come back."""
    run, length = Run(tmp_path), {"sequence_length": 16, "max_tokens": 50_000, "eval_sequences": 2}
    settings = Settings.of(network="internet", model="micro", method="noloco", steps=1, batch_size=2, **length)
    try:
        launch.prepare(settings, tmp_path, False)
        whole = coordination(None, settings.figure)
        trainer = Trainer(settings, run.join(), tmp_path, whole, torch.device("cpu"))
        with trainer.stop.listening():
            trainer.train(catch_up=True)
        trainer.log.events.close()
    finally:
        run.close()
    (path,) = (tmp_path / "events").iterdir()
    told = [event.message for event in events_in(path.read_bytes(), str(path))[0] if isinstance(event, WarningEvent)]
    assert any("no other peer has the run's state; this one begins anew: stop it" in one for one in told)
