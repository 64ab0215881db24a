import os
import subprocess

import pytest
from patience import patience

from farflung.testing import hosts

pytestmark = pytest.mark.skipif(hosts.unavailable() is not None, reason=str(hosts.unavailable()))


def own_namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"ff{os.getpid()}")]


def test_the_link_is_as_slow_as_it_should_be_and_nothing_is_left_behind() -> None:
    with hosts.NetLab(hosts=2, rate_mbit=50) as lab:
        assert len(own_namespaces()) == 3
        seconds = hosts.transfer_seconds(*lab.hosts, 5_000_000)
    assert seconds >= 0.9 * 5_000_000 * 8e-6 / 50  # no link is faster than its rate
    assert own_namespaces() == []


def test_a_failing_host_is_reported_and_nothing_is_left_behind() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"), hosts.NetLab(hosts=2, rate_mbit=100) as lab:
        hosts.torch_everywhere(lab.hosts, ["-c", "1 / 0"], timeout_s=patience(30))
    assert own_namespaces() == []
