"""A member of a run in a folder may lie in all that it writes: it is struck, and the others' rounds go on."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from folder_seats import met, seats
from patience import patience

from farflung.networks import Party, PeerLostError
from farflung.networks.folder import FolderNetwork
from farflung.networks.folder.sealing import Kind


@pytest.mark.parametrize("weight", [math.nan, math.inf, -0.9])
def test_who_says_an_impossible_weight_comes_to_no_round(tmp_path: Path, weight: float) -> None:
    with seats((tmp_path / "store").as_uri(), tmp_path, 3) as run:
        liar, *others = run.open
        ranks = tuple(sorted(network.rank for network in run.open))
        all_placed = threading.Barrier(3)

        def then(party: Party) -> Party:
            all_placed.wait(patience(10))  # all see the liar's note
            return party

        pending = [
            network.meet(ranks, "round 1 of 0", 1, weight if network is liar else 1.0, "", then) for network in run.open
        ]
        honest = [one.wait(patience(20)) for one in pending[1:]]
        assert [party.group for party in honest] == [tuple(sorted(network.rank for network in others))] * 2
        assert [party.weights for party in honest] == [{network.rank: 1.0 for network in others}] * 2
        assert all(set(network.refused) == {"unknown object"} for network in others)


def test_who_writes_fewer_parts_than_there_are_members_is_lost_and_nobody_else(tmp_path: Path) -> None:
    with seats((tmp_path / "store").as_uri(), tmp_path, 3) as run:
        run.open.sort(key=lambda network: network.rank)
        liar, one, last = run.open
        over = threading.Barrier(3)

        def then(network: FolderNetwork, party: Party) -> object:
            if network is not liar:
                packets = {rank: torch.ones(3, dtype=torch.uint8) for rank in party.group if rank != network.rank}
                with pytest.raises(PeerLostError) as lost:
                    network.all_to_all(packets, party.group, "parts").wait(patience(10))
                over.wait(patience(10))
                return tuple(lost.value.ranks), tuple(lost.value.delivered)
            notes, said = network.peers.notes, network.peers.said
            subject = notes.seals.subject("packet", "parts", party.group)
            notes.post(Kind.PACKET, lambda **who: replace(said(**who), subject=subject, count=3), [b"one part"])
            over.wait(patience(10))
            return None

        _, *seen = met(run.open, "round 1 of 0", then)
        assert seen == [((liar.rank,), (last.rank,)), ((liar.rank,), (one.rank,))]
