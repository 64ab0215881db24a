import os
import subprocess
import sys

import pytest
from patience import patience

from farflung.testing import hosts

pytestmark = pytest.mark.skipif(hosts.unavailable() is not None, reason=str(hosts.unavailable()))


TRANSFER = """
import socket, sys, time
nbytes = int(sys.argv[2])
if sys.argv[1] == "listen":
    with socket.create_server(("0.0.0.0", 5001)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        received, began = 0, time.monotonic()
        while received < nbytes and (part := connection.recv(1 << 18)):
            received += len(part)
        print(time.monotonic() - began)
else:
    with socket.create_connection((sys.argv[3], 5001), timeout=10) as connection:
        connection.sendall(bytes(nbytes))
"""


def transfer_seconds(sender: hosts.Host, receiver: hosts.Host, nbytes: int) -> float:
    """How long one TCP connection takes from one host to another."""
    listening = receiver.popen([sys.executable, "-c", TRANSFER, "listen", str(nbytes)], stdout=subprocess.PIPE)
    try:
        assert listening.stdout is not None
        listening.stdout.readline()
        sender.popen([sys.executable, "-c", TRANSFER, "send", str(nbytes), receiver.address]).wait(timeout=60)
        return float(listening.communicate(timeout=60)[0])
    finally:
        listening.kill()
        listening.wait()


def own_namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"ff{os.getpid()}")]


def test_the_link_is_as_slow_as_it_should_be_and_nothing_is_left_behind() -> None:
    with hosts.NetLab(hosts=2, rate_mbit=50) as lab:
        assert len(own_namespaces()) == 3
        seconds = transfer_seconds(*lab.hosts, 5_000_000)
    assert seconds >= 0.9 * 5_000_000 * 8e-6 / 50  # no link is faster than its rate
    assert own_namespaces() == []


def test_a_failing_host_is_reported_and_nothing_is_left_behind() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"), hosts.NetLab(hosts=2, rate_mbit=100) as lab:
        hosts.torch_everywhere(lab.hosts, ["-c", "1 / 0"], timeout_s=patience(30))
    assert own_namespaces() == []
