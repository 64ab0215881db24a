"""Islands over links that are too slow for them, between hosts in namespaces."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from patience import patience
from processes import SMALL

from farflung.events import WarningEvent
from farflung.report.read import read_run
from farflung.testing import hosts

pytestmark = pytest.mark.skipif(hosts.unavailable() is not None, reason=str(hosts.unavailable()))


@pytest.mark.slow
def test_shards_on_machines_joined_by_a_slow_link_are_told_of_with_what_it_carries(tmp_path: Path) -> None:
    train = ["-m", "farflung", "train", *SMALL, "--shard", "2", "--steps", "2", "--out", str(tmp_path / "run")]
    with hosts.NetLab(hosts=2, rate_mbit=50) as lab:
        hosts.torch_everywhere(lab.hosts, train, timeout_s=patience(60))
    (warning,) = [event.message for event in read_run(tmp_path / "run").of(0, WarningEvent)]
    told = re.fullmatch(r"the shards of stage 0 are joined by a slow link, (\d+) Mbit/s as measured, .*", warning)
    assert told and 0 < int(told[1]) <= 55, warning  # what the link carries, and no more


@pytest.mark.slow
def test_shards_on_one_machine_are_not_warned_of(tmp_path: Path) -> None:
    train = ["-m", "farflung", "train", *SMALL, "--shard", "2", "--steps", "2", "--out", str(tmp_path / "run")]
    with hosts.NetLab(hosts=1, rate_mbit=50) as lab:
        hosts.torch_everywhere([*lab.hosts, *lab.hosts], train, timeout_s=patience(60))
    assert not read_run(tmp_path / "run").of(0, WarningEvent)
