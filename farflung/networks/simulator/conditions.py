"""What a simulated network is like: links, sites, computation, and what goes wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, combinations_with_replacement

from farflung.errors import UserError
from farflung.networks.simulator.randomness import largest_factor, uniform

SEGMENT = 1448
"""Bytes of payload in one TCP segment on Ethernet."""

HEADERS = 66 / SEGMENT
"""What Ethernet, IP and TCP add to each byte of payload."""


SMALLEST, LARGEST = 1e-6, 1e12
"""The limits of all numbers; within them nothing overflows."""

MOST_WEIGHT = 1_000_000
"""Turns of a site, each of which is kept."""

WIDEST = 10.0
"""Log-normal spread at most: of a thousand draws, the largest is some e^30 times the middle one."""


def check_number(name: str, value: float, least: float = 0.0, most: float = LARGEST) -> None:
    """Refuses values out of range, or not finite. Raises UserError."""
    if not isinstance(value, int | float):
        raise UserError(f"{name} is {value!r}; it must be a number")
    if not least <= value <= most:
        raise UserError(f"{name} is {value}; it must be at least {least:g} and at most {most:g}")


@dataclass(frozen=True)
class Site:
    """A place where replicas are, by which links refer to it. It gets `weight` replicas where others get one."""

    name: str
    weight: int = 1


@dataclass(frozen=True)
class Link:
    """The link between two sites, or within one; the same both ways.

    Args:
        between: the names of two sites; twice the same for what is within it.
        latency_ms: one way, milliseconds.
        bandwidth_mbps: what one connection reaches, megabits a second; unset: what the replicas' own links allow.
        shared: whether all connections together share that bandwidth.
    """

    between: tuple[str, str]
    latency_ms: float
    bandwidth_mbps: float = math.inf
    shared: bool = False


@dataclass(frozen=True)
class Cut:
    """A partition: these replicas reach each other but nobody else, for a while. They train on.

    One replica that is cut off from 0 s joins late; one that is cut off later has gone and comes back.

    Both moments are seconds since the run began.
    """

    replicas: tuple[int, ...]
    from_s: float
    until_s: float


@dataclass(frozen=True)
class Death:
    """A replica that stops for good, so many seconds after the run began."""

    replica: int
    at_s: float


@dataclass(frozen=True)
class Conditions:
    """A world for simulated replicas. All that is random follows from the seed.

    Args:
        bandwidth_mbps: each replica's own link, megabits a second each way.
        up_mbps: the same for sending, where it is less.
        latency_ms: between replicas of one site, one way, milliseconds.
        step_ms: what the computation of one inner step takes, milliseconds.
        bandwidth_sigma: spread of the replicas' links (log-normal).
        latency_sigma: spread of the messages' latencies (log-normal).
        speeds: how fast single replicas compute, in order, as a multiple of all others: 1, 0.25 is a slow second one.
        speed_sigma: spread of the replicas' speeds (log-normal).
        step_sigma: spread of one replica's steps (log-normal).
        slow_share, slow_factor: this share of steps takes so many times as long.
        loss: the share of TCP segments that is lost and sent again.
        headers: what protocols add to each byte.
        store_ms: replicas meet in a folder, whose store answers a request in so many milliseconds: packets go up to it
            once, and then down to each who reads them. Unset: they go straight to each other.
        sites, links: places and what joins them; without sites all replicas are in one place.
        cuts, deaths: what goes wrong.
        seed: of everything random.

    Raises:
        UserError: the values are impossible.
    """

    bandwidth_mbps: float = 100.0
    latency_ms: float = 20.0
    step_ms: float = 100.0
    up_mbps: float | None = None
    bandwidth_sigma: float = 0.0
    latency_sigma: float = 0.0
    speeds: tuple[float, ...] = ()
    speed_sigma: float = 0.0
    step_sigma: float = 0.0
    slow_share: float = 0.0
    slow_factor: float = 1.0
    loss: float = 0.0
    headers: float = 0.0
    store_ms: float | None = None
    sites: tuple[Site, ...] = ()
    links: tuple[Link, ...] = ()
    cuts: tuple[Cut, ...] = ()
    deaths: tuple[Death, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("bandwidth_mbps", "slow_factor", "up_mbps"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), SMALLEST)
        for name in ("latency_ms", "step_ms", "headers", "store_ms"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name))
        if self.store_ms is not None and self.links:
            raise UserError(
                "store_ms is of a store that replicas reach by links of their own; leave out sites and links"
            )
        for name in ("bandwidth_sigma", "latency_sigma", "speed_sigma", "step_sigma"):
            check_number(name, getattr(self, name), most=WIDEST)
        for name in ("loss", "slow_share"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it is a share, and must be from 0 to less than 1")
        for rank, speed in enumerate(self.speeds):
            check_number(f"the speed of replica {rank}", speed, SMALLEST)
        check_number("seed", self.seed, most=2**64 - 1)
        _check_sites(self.sites, self.links)
        for number, cut in enumerate(self.cuts, start=1):
            if not 0 <= cut.from_s < cut.until_s <= LARGEST:
                raise UserError(
                    f"cut {number} is from_s {cut.from_s} until_s {cut.until_s}; it must end after it begins, "
                    f"and both be at least 0 and at most {LARGEST:g}"
                )
            for replica in cut.replicas:
                check_number(f"cut {number}: replica", replica)
        for number, death in enumerate(self.deaths, start=1):
            check_number(f"death {number}: replica", death.replica)
            check_number(f"death {number}, of replica {death.replica}: at_s", death.at_s)

    def site_of(self, rank: int) -> int:
        """The number of the site that a replica is at."""
        return self._turns[rank % len(self._turns)]

    def link(self, one: int, other: int) -> Link:
        """What joins two sites, by their numbers."""
        return self._links[one, other]

    def up_bytes(self, rank: int) -> float:
        """A replica's link for sending, bytes a second."""
        mbps = min(self.up_mbps or self.bandwidth_mbps, self.bandwidth_mbps)
        return mbps * 125e3 * self._spread("bandwidth", self.bandwidth_sigma, rank)

    def down_bytes(self, rank: int) -> float:
        """A replica's link for receiving, bytes a second."""
        return self.bandwidth_mbps * 125e3 * self._spread("bandwidth", self.bandwidth_sigma, rank)

    def step_seconds(self, rank: int) -> float:
        """A replica's typical inner step."""
        speed = self.speeds[rank] if rank < len(self.speeds) else 1.0
        return self.step_ms / 1000 / speed * self._spread("speed", self.speed_sigma, rank)

    def latency_seconds(self, places: dict[int, int], key: str) -> float:
        """How long the last message of all to all takes, among so many replicas at each site, apart from its bytes."""
        longest = 0.0
        for one, other in combinations_with_replacement(places, 2):
            messages = places[one] * (places[one] - 1 if one == other else 2 * places[other])
            if messages:
                seconds = self._links[one, other].latency_ms / 1000
                if self.latency_sigma:
                    chance = uniform(self.seed, "latency", key, one, other)
                    seconds *= largest_factor(chance, messages, self.latency_sigma)
                longest = max(longest, seconds)
        return longest

    def request_seconds(self, members: int, key: str) -> float:
        """How long the last of so many members' requests to the store takes, apart from its bytes."""
        seconds = (self.store_ms or 0.0) / 1000
        if not self.latency_sigma:
            return seconds
        return seconds * largest_factor(uniform(self.seed, "request", key), members, self.latency_sigma)

    def resendings(self, nbytes: float, key: str) -> int:
        """How many times over the segments that are still missing have to be sent again, one round trip each.

        Each time, a segment is lost with probability `loss`; the last of all decides.
        """
        if not self.loss or not nbytes:
            return 0
        segments = math.ceil(nbytes / SEGMENT)
        chance = uniform(self.seed, "loss", key)
        # P(all have come after r sendings) = (1 - loss^r)^segments
        missing = -math.expm1(math.log(chance) / segments)
        return max(math.ceil(math.log(missing) / math.log(self.loss)) - 1, 0)

    def _spread(self, what: str, sigma: float, rank: int) -> float:
        return largest_factor(uniform(self.seed, what, rank), 1, sigma) if sigma else 1.0

    @cached_property
    def _turns(self) -> list[int]:
        """Sites by the ranks of replicas, over and over."""
        return [number for number, site in enumerate(self.sites) for _ in range(site.weight)] or [0]

    @cached_property
    def _links(self) -> dict[tuple[int, int], Link]:
        numbers = {site.name: number for number, site in enumerate(self.sites)}
        links = {(n, n): Link((name, name), self.latency_ms) for name, n in (numbers or {"": 0}).items()}
        for link in self.links:
            one, other = (numbers[name] for name in link.between)
            links[one, other] = links[other, one] = link
        return links


def _check_sites(sites: tuple[Site, ...], links: tuple[Link, ...]) -> None:
    names = [site.name for site in sites]
    if len(set(names)) < len(names):
        raise UserError(f"two sites have the same name: {', '.join(names)}")
    joined = {frozenset(link.between) for link in links}
    if len(joined) < len(links):
        raise UserError("two links join the same sites; give one for each pair")
    for site in sites:
        check_number(f"site {site.name}: weight", site.weight, 1, MOST_WEIGHT)
    for link in links:
        if len(link.between) != 2:
            raise UserError(f"a link is between {link.between}; it needs the names of two sites")
        for name in link.between:
            if name not in names:
                raise UserError(f"a link names the site {name!r}; there are: {', '.join(names) or 'none'}")
        called = f"the link between {' and '.join(link.between)}"
        check_number(f"{called}: latency_ms", link.latency_ms)
        if link.bandwidth_mbps != math.inf:  # which is what it is where it is left out
            check_number(f"{called}: bandwidth_mbps", link.bandwidth_mbps, SMALLEST)
    for one, other in combinations(names, 2):
        if frozenset((one, other)) not in joined:
            raise UserError(f"there is no link between {one} and {other}; add one")
