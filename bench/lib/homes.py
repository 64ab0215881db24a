"""Homes on an internet of their own, each behind a router or a firewall of some kind, in network namespaces.

with Homes(["public", "cone", "symmetric"], rate_mbit=100) as homes: homes[1].host.popen(...)
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from farflung.testing import hosts
from farflung.testing.hosts import Host, Lab, ip

PORT, LET_OUT = 4600, 443
"""Where peers listen; the one port to which the strictest router lets connections out."""
LAN, INSIDE, OUTSIDE = "192.168.1.1", "192.168.1.2", "5.0.0"
"""A router's address at home, the host's, and the internet's, which are global: libp2p does not test others."""

REPLIES = "ct state established,related accept"
FILTER = "chain {hook} {{ type filter hook {hook} priority 0; policy drop; " + REPLIES + "; {let} }}"
SOURCE = "chain source {{ type nat hook postrouting priority srcnat; oifname wan masquerade {how}; }}"
TARGET = f"chain target {{ type nat hook prerouting priority dstnat; iifname wan tcp dport {PORT} dnat to {INSIDE}; }}"
NOTHING_IN = FILTER.format(hook="input", let="iifname lo accept;")


def nat(how: str, let: str = "iifname lan accept;") -> tuple[str, ...]:
    """A router's rules: it forwards what is let, in a way to translate addresses, and lets nothing in to itself."""
    return NOTHING_IN, FILTER.format(hook="forward", let=let), SOURCE.format(how=how)


KINDS = {
    "public": (),
    "forwarded": (*nat("persistent", "iifname lan accept; ct status dnat accept;"), TARGET),
    "firewall": (NOTHING_IN,),
    "cone": nat("persistent"),
    "symmetric": nat("random,fully-random"),
    "one port": nat("persistent", f"iifname lan tcp dport {LET_OUT} accept;"),
}
"""The rules of each kind of place: at a router if it has one, else at the host."""
ROUTED = {kind for kind, rules in KINDS.items() if any(rule.startswith("chain source") for rule in rules)}
OPEN = {"public", "forwarded"}
"""Where others can call."""


def unavailable() -> str | None:
    """Why this machine cannot have such homes, and what to do; None when it can."""
    return hosts.unavailable() or (None if shutil.which("nft") else "nft is missing; install nftables")


@dataclass(frozen=True)
class Home:
    """A host, the kind of its place, and the address that the internet sees."""

    host: Host
    kind: str
    seen: str

    @property
    def announced(self) -> tuple[str, ...]:
        """What its user has to tell with --announce."""
        return (f"/ip4/{self.seen}/tcp/{PORT}",) if self.kind == "forwarded" else ()


class Homes(Lab):
    """One home of each kind that is asked for, each on a link of `rate_mbit` each way."""

    def __init__(self, kinds: Sequence[str], rate_mbit: float) -> None:
        self._prefix = f"ff{os.getpid()}"
        self._internet = f"{self._prefix}i"
        self._rate = rate_mbit
        self._homes = [self._planned(number, kind) for number, kind in enumerate(kinds)]
        routers = [self._router(number) for number in range(len(kinds))]
        super().__init__([home.host for home in self._homes], [*routers, self._internet])

    def __getitem__(self, number: int) -> Home:
        return self._homes[number]

    def __len__(self) -> int:
        return len(self._homes)

    def __iter__(self) -> Iterator[Home]:
        return iter(self._homes)

    def _build(self) -> None:
        ip("netns", "add", self._internet)
        ip("-n", self._internet, "link", "add", "bridge", "type", "bridge")
        ip("-n", self._internet, "link", "set", "bridge", "up")
        for number, home in enumerate(self._homes):
            self._join_in(number, home)

    def _planned(self, number: int, kind: str) -> Home:
        seen = f"{OUTSIDE}.{number + 1}"
        place = ("lan", INSIDE) if kind in ROUTED else ("wan", seen)
        return Home(Host(f"{self._prefix}h{number}", *place), kind, seen)

    def _router(self, number: int) -> str:
        return f"{self._prefix}r{number}"

    def _join_in(self, number: int, home: Home) -> None:
        inside, routed = home.host.namespace, home.kind in ROUTED
        edge = self._router(number) if routed else inside
        for namespace in {edge, inside}:
            ip("netns", "add", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
        _join(edge, "wan", f"{home.seen}/24", self._internet, f"port{number}")
        ip("-n", self._internet, "link", "set", f"port{number}", "master", "bridge", "up")
        ip("-n", edge, "route", "add", "default", "dev", "wan")  # others' private addresses lead nowhere, slowly
        hosts.shape(edge, "wan", self._rate)
        hosts.shape(self._internet, f"port{number}", self._rate)
        if routed:
            _join(inside, "lan", f"{INSIDE}/24", edge, "lan")
            ip("-n", edge, "addr", "add", f"{LAN}/24", "dev", "lan")
            ip("-n", edge, "link", "set", "lan", "up")
            ip("-n", inside, "route", "add", "default", "via", LAN)
            _in(edge, ["sysctl", "-qw", "net.ipv4.ip_forward=1"])
        if rules := KINDS[home.kind]:
            _in(edge, ["nft", "-f", "-"], "\n".join(("table ip home {", *rules, "}")))


def _join(namespace: str, device: str, address: str, other: str, port: str) -> None:
    """A link from one namespace to a port in another, with an address at the near end."""
    ip("-n", namespace, "link", "add", device, "type", "veth", "peer", "name", port, "netns", other)
    ip("-n", namespace, "addr", "add", address, "dev", device)
    ip("-n", namespace, "link", "set", device, "up")


def _in(namespace: str, command: list[str], told: str = "") -> None:
    done = subprocess.run(["ip", "netns", "exec", namespace, *command], input=told, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
