"""Peers behind NAT, whom nobody can call, meet through a bootstrap node alone, and more than a few bytes go through."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.lib.homes import Homes, unavailable
from bench.lib.store import Store
from bench.resilience.nat import Options, met

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


@pytest.mark.slow
def test_two_behind_nat_exchange_megabytes_through_the_only_public_peer(tmp_path: Path) -> None:
    store = Store("nat", tmp_path / "results", tmp_path / "scratch")
    store.scratch.mkdir()
    ((one, other, way, *_, up, down, remarks),) = met(Options(settle_s=45), store, ["symmetric"])
    assert (one, other, way, remarks) == ("symmetric", "symmetric", "relay", "")
    assert up > 0 and down > 0


def test_homes_are_built_and_nothing_is_left_behind() -> None:
    with Homes(["public", "cone"], rate_mbit=100) as homes:
        namespaces = [Path("/run/netns", home.host.namespace) for home in homes]
        assert all(path.exists() for path in namespaces)
    assert not any(path.exists() for path in namespaces)
