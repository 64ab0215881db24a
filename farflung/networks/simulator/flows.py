"""Links that several exchanges share, and the rate that each of them gets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from farflung.networks.simulator.clock import Clock, Event

NEGLIGIBLE = 1e-9
"""A flow ignores links that carry less than this share of it."""


class Flow:
    """Bytes under way: so many on each link it uses, which all end at the same moment.

    `rate` is in bytes a second on the link that carries most; a link that carries a share of that is used at that
    share of the rate.
    """

    __slots__ = ("done", "end", "left", "limit", "live", "rate", "shares", "since")

    def __init__(self, loads: Mapping[int, float], limit: float, now: float, done: Callable[[], None]) -> None:
        self.left = max(loads.values(), default=0.0)
        self.shares = {link: load / self.left for link, load in loads.items() if load > NEGLIGIBLE * self.left}
        self.limit = limit
        self.rate = 0.0
        self.since = now
        self.end: Event | None = None
        self.live = True
        self.done = done


class Links:
    """Shares each link (bytes a second) max-min fairly: nobody gets more at the cost of one who has less."""

    def __init__(self, clock: Clock, capacities: list[float]) -> None:
        self._clock = clock
        self.capacities = capacities
        self.carried = [0.0] * len(capacities)
        self._on: list[dict[Flow, None]] = [{} for _ in capacities]
        self._unsettled: dict[int, None] = {}

    def start(self, loads: Mapping[int, float], limit: float, done: Callable[[], None]) -> Flow:
        """Sends bytes, by link; `done` is called when the last has left. `limit` is the highest rate by itself."""
        flow = Flow(loads, limit, self._clock.now, done)
        for link in flow.shares:
            self._on[link][flow] = None
        self._changed(flow)
        return flow

    def set_limit(self, flow: Flow, limit: float) -> None:
        """From now on, a flow has another highest rate; 0 makes it stand still."""
        flow.limit = limit
        if flow.live:
            self._changed(flow)

    def stop(self, flow: Flow) -> None:
        """Ends a flow before its time; `done` is not called. Harmless when it has ended."""
        if flow.live:
            self._settle(flow)
            if flow.end:
                flow.end.cancel()
            self._remove(flow)

    def _finish(self, flow: Flow) -> None:
        for link, share in flow.shares.items():
            self.carried[link] += share * flow.left
        self._remove(flow)
        flow.done()

    def _remove(self, flow: Flow) -> None:
        flow.live = False
        for link in flow.shares:
            del self._on[link][flow]
        self._share_later(flow)

    def _changed(self, flow: Flow) -> None:
        rate = flow.limit
        for link, share in flow.shares.items():
            if len(self._on[link]) > 1:
                self._share_later(flow)
                return
            rate = min(rate, self.capacities[link] / share)
        self._set_rate(flow, rate)

    def _share_later(self, flow: Flow) -> None:
        """Shares out this flow's links anew, at the end of this instant, in which more may change."""
        for link in flow.shares:
            if self._on[link]:
                if not self._unsettled:
                    self._clock.at(self._clock.now, self._share_out)
                self._unsettled[link] = None

    def _share_out(self) -> None:
        """Sets the rates of all flows that this instant's changes concern."""
        links, self._unsettled = self._unsettled, {}
        done: set[Flow] = set()
        for link in links:
            for flow in list(self._on[link]):
                if flow not in done:
                    connected = self._connected(flow)
                    done.update(connected)
                    for other, rate in self._fair_rates(connected).items():
                        self._set_rate(other, rate)

    def _set_rate(self, flow: Flow, rate: float) -> None:
        if rate == flow.rate and flow.end:
            return
        self._settle(flow)
        flow.rate = rate
        if flow.end:
            flow.end.cancel()
            flow.end = None
        if rate > 0 or not flow.left:
            seconds = flow.left / rate if flow.left else 0.0
            flow.end = self._clock.at(self._clock.now + seconds, lambda: self._finish(flow))

    def _settle(self, flow: Flow) -> None:
        """Books what a flow has sent since its rate was set."""
        sent = min(flow.rate * (self._clock.now - flow.since), flow.left)
        flow.since = self._clock.now
        if sent:
            flow.left -= sent
            for link, share in flow.shares.items():
                self.carried[link] += share * sent

    def _connected(self, flow: Flow) -> list[Flow]:
        """A flow, and those it shares links with, directly or through others."""
        found: dict[Flow, None] = {flow: None}
        seen: set[int] = set()
        waiting = [flow]
        while waiting:
            for link in waiting.pop().shares:
                if link not in seen:
                    seen.add(link)
                    new = [other for other in self._on[link] if other not in found]
                    found.update(dict.fromkeys(new))
                    waiting += new
        return list(found)

    def _fair_rates(self, flows: list[Flow]) -> dict[Flow, float]:
        """Raises all rates together; whoever meets a full link, or its own limit, stays there."""
        rates: dict[Flow, float] = {}
        free: dict[int, float] = {}
        demand: dict[int, float] = {}
        users: dict[int, int] = {}
        for flow in flows:
            for link, share in flow.shares.items():
                free[link] = self.capacities[link]
                demand[link] = demand.get(link, 0.0) + share
                users[link] = users.get(link, 0) + 1
        rising = dict.fromkeys(flows)
        while rising:
            fullest = min(demand, key=lambda link: free[link] / demand[link], default=None)
            level = free[fullest] / demand[fullest] if fullest is not None else math.inf
            slowest = min(rising, key=lambda flow: flow.limit)
            if slowest.limit <= level:
                level, settled = slowest.limit, [slowest]
            else:
                settled = [flow for flow in self._on[fullest] if flow in rising]  # type: ignore[index]
            for flow in settled:
                del rising[flow]
                rates[flow] = level
                for link, share in flow.shares.items():
                    free[link] = max(free[link] - level * share, 0.0)
                    demand[link] -= share
                    users[link] -= 1
                    if not users[link]:
                        del demand[link]
        return rates
