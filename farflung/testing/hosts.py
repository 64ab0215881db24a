"""Hosts in network namespaces of this machine, joined by links of a given rate, and processes on them.

with NetLab(hosts=4, rate_mbit=100) as lab:
    outputs = torch_everywhere(lab.hosts, ["-m", "my_replica"], timeout_s=60)
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

Process = subprocess.Popen[str]


def unavailable() -> str | None:
    """Why this machine can't have such hosts, and what to do; None when it can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root; run with sudo"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} is missing; install iproute2"
    probe = subprocess.run(["ip", "netns", "add", f"ff{os.getpid()}probe"], capture_output=True, text=True)
    if probe.returncode:
        return f"network namespaces are not allowed here: {probe.stderr.strip()}"
    ip("netns", "del", f"ff{os.getpid()}probe")
    return None


@dataclass(frozen=True)
class Host:
    """Where processes run: a namespace with one interface, or this machine's loopback, which has no namespace."""

    namespace: str
    interface: str
    address: str

    def popen(self, arguments: list[str], env: Mapping[str, str] | None = None, **options: Any) -> Process:
        """Starts a process on this host; `options` are subprocess.Popen's."""
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": self.interface, **(env or {})}
        enter = ["ip", "netns", "exec", self.namespace] if self.namespace else []
        return subprocess.Popen([*enter, *arguments], env=environment, text=True, **options)


def processes_of(folder: Path) -> list[int]:
    """The processes that a run's launcher has started, in the order of their logs in the run's folder."""
    logs = (folder / "logs").resolve()
    found = {}
    for entry in Path("/proc").glob("[0-9]*/fd/2"):
        with contextlib.suppress(OSError):  # it has ended
            if (log := entry.resolve()).is_relative_to(logs):
                found[log] = int(entry.parts[2])
    return [found[log] for log in sorted(found, key=lambda log: (len(str(log)), log))]


LOOPBACK = Host("", "lo", "127.0.0.1")
"""This machine, on its loopback: several processes on it share one address."""


class Lab(ABC):
    """Namespaces of this machine and what joins them, as long as it is entered. Leaves nothing behind.

    Raises RuntimeError when this machine can't have them.
    """

    def __init__(self, hosts: Sequence[Host], others: Sequence[str]) -> None:
        if reason := unavailable():
            raise RuntimeError(reason)
        self._namespaces = [*(host.namespace for host in hosts), *others]

    @abstractmethod
    def _build(self) -> None:
        """Makes them."""

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            remove(self._namespaces)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        remove(self._namespaces)


class NetLab(Lab):
    """Hosts with addresses 10.77.0.1, 10.77.0.2, …, each on a link of `rate_mbit` each way into one switch.

    `rates` gives single hosts links of their own, by number.
    """

    def __init__(self, hosts: int, rate_mbit: float, rates: dict[int, float] | None = None) -> None:
        prefix = f"ff{os.getpid()}"
        self._switch = f"{prefix}s"
        self._rates = {number: (rates or {}).get(number, rate_mbit) for number in range(hosts)}
        self.hosts = [Host(f"{prefix}h{number}", f"eth{number}", f"10.77.0.{number + 1}") for number in range(hosts)]
        super().__init__(self.hosts, [self._switch])

    def _build(self) -> None:
        ip("netns", "add", self._switch)
        for bridge in ("bridge", "island"):
            ip("-n", self._switch, "link", "add", bridge, "type", "bridge")
            ip("-n", self._switch, "link", "set", bridge, "up")
        for number, host in enumerate(self.hosts):
            self._plug_in(host, f"port{number}", self._rates[number])

    def part(self, hosts: Iterable[int]) -> None:
        """Cuts some hosts off from the rest; among themselves they still reach each other."""
        for number in hosts:
            ip("-n", self._switch, "link", "set", f"port{number}", "master", "island")

    def heal(self) -> None:
        """Brings all hosts together again."""
        for number in self._rates:
            ip("-n", self._switch, "link", "set", f"port{number}", "master", "bridge")

    def _plug_in(self, host: Host, port: str, rate: float) -> None:
        ip("netns", "add", host.namespace)
        ip("-n", host.namespace, "link", "set", "lo", "up")
        ends = ("link", "add", host.interface, "type", "veth", "peer", "name", port, "netns", self._switch)
        ip("-n", host.namespace, *ends)
        ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
        ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
        ip("-n", host.namespace, "link", "set", host.interface, "up")
        shape(host.namespace, host.interface, rate)
        shape(self._switch, port, rate)


def shape(namespace: str, device: str, rate_mbit: float) -> None:
    """Limits what a device of a namespace sends."""
    # A longer queue than 20 ms would make acknowledgements wait behind data.
    limits = ["rate", f"{rate_mbit}mbit", "burst", "64k", "latency", "20ms"]
    _run(["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *limits])


def remove(namespaces: Iterable[str]) -> None:
    """Removes those namespaces that there are."""
    for namespace in namespaces:
        if Path("/run/netns", namespace).exists():
            ip("netns", "del", namespace)


def run_everywhere(
    hosts: Sequence[Host],
    arguments: Callable[[int], list[str]],
    env: Callable[[int], Mapping[str, str]],
    timeout_s: float,
) -> list[str]:
    """Runs one process a host, side by side; returns what each printed. `arguments` and `env` get the host's number.

    Raises RuntimeError with the end of its complaint if one fails or `timeout_s` seconds pass.
    """
    processes = [
        host.popen(arguments(number), env(number), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for number, host in enumerate(hosts)
    ]
    ends = time.monotonic() + timeout_s
    outputs = []
    try:
        for process in processes:
            out, complaint = process.communicate(timeout=max(0.1, ends - time.monotonic()))
            if process.returncode:
                raise RuntimeError(f"a host's process failed: {complaint[-2000:]}")
            outputs.append(out)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the hosts' processes did not end within {timeout_s:g} s") from error
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return outputs


def torch_everywhere(hosts: Sequence[Host], arguments: list[str], timeout_s: float) -> list[str]:
    """Runs `python ARGUMENTS` once a host, as the ranks of one torch.distributed world; returns what each printed."""
    rendezvous, command = torch_rendezvous(len(hosts), hosts[0].address), [sys.executable, *arguments]
    return run_everywhere(hosts, lambda _: command, lambda number: {**rendezvous, "RANK": str(number)}, timeout_s)


def torch_rendezvous(world_size: int, address: str = "127.0.0.1") -> dict[str, str]:
    """The environment variables, but for RANK, with which processes of one thread each find each other."""
    return {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }


def free_port() -> int:
    """A port that no other process gets by chance: those from 32768 on go to whoever asks for any."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def ip(*arguments: str) -> None:
    """Runs ip(8). Raises RuntimeError."""
    _run(["ip", *arguments])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
