"""One training step as its events: computing, copies out and in, and the host's updates, each one thing at a time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from farflung.memory.plan import LayerCost, LayerPlan, Profile

COMPUTE, OUT, IN, HOST = range(4)
"""What works at the same time: the device, copies to the far tier, copies from it, the host."""

ACTIVATIONS, GRADIENTS, MOMENTS = 0, 1, (2, 0)
"""Which copies out go first."""

KEPT = LayerPlan()
"""What comes before the layers, and the head."""


@dataclass(frozen=True)
class Step:
    """A step's seconds, one after the other for a long time, and the most of the device's memory at any time."""

    seconds: float
    peak_bytes: int


def simulate(
    profile: Profile, plan: Sequence[LayerPlan], *, prefetch_bytes: int, clip: bool, smallest_first: bool = True
) -> Step:
    """Predicts a step.

    The forward pass goes through the chain of layers, the backward pass back; recomputed layers compute their forward
    again. Moved tensors leave after their layer's forward pass, and come back in the order of the backward pass, which
    begins when the head has computed. Weights that are far come before either pass and are dropped after it, one
    layer ahead.

    Where several passes are in flight, what the others leave near is there, too: what of them is moved is far.

    Room: saved tensors take at most `prefetch_bytes` more than what stays near of all layers (kept ones' saved tensors,
    recomputed ones' inputs). In the forward pass a layer that does not fit waits as long as copies leave. In the
    backward pass a copy comes back when it fits, or when the layer that computes next waits for it alone.

    Updates: near layers step after the backward pass; moments that are far come for that, at most `prefetch_bytes` at
    a time, or one layer's. Gradients of layers whose optimizer is far leave at once, and the host updates them: with
    `clip` when all gradients are known, else as they come. Of what is ready the smallest layer goes first, since the
    next forward pass waits for it; or the largest, whose gradient came first. Where the host does not update beside
    the computing, it does so after the backward pass and before all else. Of a step's several passes each is taken to
    have its part of what the updates take.
    """
    building = _Building(profile, plan, clip, smallest_first)
    far = any(layer.state != "near" for layer in plan)
    ends = [building.step(updates=True)]
    if far:  # the second step's forward pass waits for the first one's updates
        ends.append(building.step(updates=False))
    run = _Run(building, prefetch_bytes)
    run.until_computed()
    seconds = ends[1].ended - ends[0].ended if far else run.now
    return Step(seconds, building.always + run.peak)


@dataclass(slots=True, eq=False)
class _Task:
    """Something that one of the four does.

    Args:
        takes, gives: bytes of the room, at its start and end.
        allocates, frees: other bytes of the device.
        first: of those that are ready, the least goes first; None where all go in the order of the step.
        waits: for so many tasks.
        then: those that wait for it.
    """

    stream: int
    seconds: float
    takes: int = 0
    gives: int = 0
    allocates: int = 0
    frees: int = 0
    first: tuple[int, int] | None = None
    waits: int = 0
    then: list[_Task] = field(default_factory=list)
    ended: float = math.inf

    def after(self, others: Iterable[_Task | None]) -> _Task:
        """Waits for others that are still to be done."""
        for other in others:
            if other is not None:
                other.then.append(self)
                self.waits += 1
        return self


class _Building:
    """The tasks of steps one after the other.

    Attributes:
        compute, weights, saved, moments: what is computed and comes in, in the order of the step; the rest goes as it
            is ready.
        stays: bytes of the room that stay near from forward to backward.
        always: bytes that are near all the time.
    """

    def __init__(self, profile: Profile, plan: Sequence[LayerPlan], clip: bool, smallest_first: bool) -> None:
        self._profile, self._clip = profile, clip
        self._sign = 1 if smallest_first else -1
        self._part = 1 / profile.passes
        self._chain = list(zip(profile.chain, (KEPT, *plan, KEPT), strict=True))
        self.compute: list[_Task] = []
        self.weights: list[_Task] = []
        self.saved: list[_Task] = []
        self.moments: list[_Task] = []
        self._updated: dict[int, _Task] = {}
        self.stays = sum(stays_bytes(cost, layer) for cost, layer in self._chain)
        self.always = profile.fixed_bytes + sum(state_bytes(cost, layer) for cost, layer in self._chain)
        self.always += (profile.in_flight - 1) * self.stays
        self.always += sum(cost.gradient_bytes for cost, layer in self._chain if self._accumulates(layer))

    def step(self, updates: bool) -> _Task:
        """Adds a step, and says what ends its backward pass."""
        gone = [self._forward(number) for number in range(len(self._chain))]
        head = self.compute[-1]
        leaving = [self._backward(number, gone[number], head) for number in reversed(range(len(self._chain)))]
        last = self.compute[-1]
        if updates:
            self._far_updates([task for task in leaving if task], last)
            self._near_updates(last)
        return last

    def _accumulates(self, layer: LayerPlan) -> bool:
        """Whether a layer's gradient is near all the time."""
        return self._profile.passes > 1 and layer.state in ("near", "moments-far")

    def _forward(self, number: int) -> _Task | None:
        """A layer's forward pass, and the copy of what it saves out, if any."""
        cost, layer = self._chain[number]
        saves = cost.saved_bytes if layer.mode in ("keep", "move") else cost.input_bytes
        task = _Task(COMPUTE, cost.forward_s, takes=saves)
        self._compute(task, cost, layer, self._updated.pop(number, None))
        if layer.mode not in ("move", "recompute-moved"):
            return None
        seconds = saves / self._profile.out_bytes_s
        return _Task(OUT, seconds, gives=saves, first=(ACTIVATIONS, number)).after([task])

    def _backward(self, number: int, gone: _Task | None, head: _Task) -> _Task | None:
        """A layer's backward pass, and the copy of its gradient out, if any."""
        cost, layer = self._chain[number]
        again = layer.mode in ("recompute", "recompute-moved")
        task = _Task(
            COMPUTE,
            cost.backward_s + again * cost.again_s,
            takes=again * (cost.saved_bytes - cost.input_bytes),
            gives=cost.saved_bytes,
            allocates=cost.gradient_bytes * (not self._accumulates(layer)),
        )
        self._compute(task, cost, layer, None)
        if gone:
            nbytes = gone.gives
            self.saved.append(_Task(IN, nbytes / self._profile.in_bytes_s, takes=nbytes).after([gone, head]))
            task.after([self.saved[-1]])
        if layer.state in ("near", "moments-far"):
            return None
        seconds, first = cost.gradient_bytes / self._profile.out_bytes_s, (GRADIENTS, self._sign * number)
        return _Task(OUT, seconds, frees=cost.gradient_bytes, first=first).after([task])

    def _compute(self, task: _Task, cost: LayerCost, layer: LayerPlan, updated: _Task | None) -> None:
        """Adds a pass through a layer, once it is updated; weights that are far come while the one before computes."""
        if layer.state == "weights-far":
            nbytes = cost.weight_bytes
            fetched = _Task(IN, nbytes / self._profile.in_bytes_s, allocates=nbytes)
            self.weights.append(fetched.after([updated, *self.compute[-2:-1]]))
            task.frees += nbytes
            updated = fetched
        self.compute.append(task.after([updated]))

    def _near_updates(self, last: _Task) -> None:
        """First those whose moments are near, while others' come."""
        for far in (False, True):
            for cost, layer in self._chain:
                if layer.state != ("moments-far" if far else "near"):
                    continue
                seconds = self._part * cost.near_step_s
                gradient = cost.gradient_bytes * (not self._accumulates(layer))
                task = _Task(COMPUTE, seconds, allocates=cost.step_bytes, frees=cost.step_bytes + gradient)
                self.compute.append(task)
                if far:
                    nbytes = cost.moment_bytes
                    near = nbytes if self._profile.beside else 2 * nbytes  # a file's pages are near, too, while copied
                    came = _Task(IN, self._part * nbytes / self._profile.in_bytes_s, allocates=near).after([last])
                    self.moments.append(came)
                    task.after([came])
                    seconds = self._part * nbytes / self._profile.out_bytes_s
                    _Task(OUT, seconds, frees=near, first=MOMENTS).after([task])

    def _far_updates(self, leaving: list[_Task], last: _Task) -> None:
        """On the host; `leaving` are the copies of gradients, the last layer's first."""
        beside = self._profile.beside
        known = _Task(HOST, 0.0, first=(-1, 0)).after([*leaving, last]) if self._clip or not beside else None
        numbers = [n for n, (_, layer) in enumerate(self._chain) if layer.state in ("optimizer-far", "weights-far")]
        for number, left in zip(reversed(numbers), leaving, strict=True):
            cost, layer = self._chain[number]
            first = (0, self._sign * number)
            near = (not beside) * (cost.gradient_bytes + cost.moment_bytes + cost.step_bytes)
            seconds = self._part * cost.far_step_s
            task = _Task(HOST, seconds, allocates=near, frees=near, first=first).after([known or left])
            if layer.state == "optimizer-far":
                seconds = self._part * cost.weight_bytes / self._profile.in_bytes_s
                task = _Task(IN, seconds, first=first).after([task])
            self._updated[number] = task
        if not beside and numbers:
            self.compute.append(_Task(COMPUTE, 0.0).after(self._updated.values()))


class _Run:
    """Does the tasks, in time."""

    def __init__(self, building: _Building, prefetch_bytes: int) -> None:
        self.now, self.peak = 0.0, 0
        self._room, self._moments_room = building.stays + prefetch_bytes, prefetch_bytes
        self._taken = self._others = self._moments_near = self._leaving = 0
        self._compute, self._saved = building.compute[::-1], building.saved[::-1]
        self._weights, self._moments = building.weights[::-1], building.moments[::-1]
        self._ready: list[list[tuple[tuple[int, int], int, _Task]]] = [[], [], [], []]
        self._count = 0
        self._running: list[_Task | None] = [None] * 4
        self._ends = [math.inf] * 4

    def until_computed(self) -> None:
        """Until the device has computed all that it is to compute."""
        while self._compute or self._running[COMPUTE]:
            self._start_all()
            now = self.now = min(self._ends)
            for stream in range(4):
                if self._ends[stream] == now:
                    self._end(stream)

    def _start_all(self) -> None:
        if not self._running[COMPUTE] and self._can_compute():
            self._start(self._compute.pop())
        if not self._running[IN]:
            if self._weights and not self._weights[-1].waits:
                self._start(self._weights.pop())
            elif self._saved and not self._saved[-1].waits and self._can_come(self._saved[-1]):
                self._start(self._saved.pop())
            elif self._moments and not self._moments[-1].waits and self._moments_fit(self._moments[-1]):
                self._moments_near += self._moments[-1].allocates
                self._start(self._moments.pop())
        for stream in (OUT, IN, HOST):
            if not self._running[stream] and self._ready[stream]:
                self._start(heapq.heappop(self._ready[stream])[2])

    def _can_compute(self) -> bool:
        if not self._compute or self._compute[-1].waits:
            return False
        return not self._leaving or self._taken + self._compute[-1].takes <= self._room

    def _can_come(self, task: _Task) -> bool:
        if self._taken + task.takes <= self._room:
            return True
        following = self._compute[-1]
        return not self._running[COMPUTE] and not self._leaving and following is task.then[0] and following.waits == 1

    def _moments_fit(self, task: _Task) -> bool:
        return not self._moments_near or self._moments_near + task.allocates <= self._moments_room

    def _start(self, task: _Task) -> None:
        self._running[task.stream] = task
        self._ends[task.stream] = self.now + task.seconds
        self._taken += task.takes
        self._others += task.allocates
        self.peak = max(self.peak, self._taken + self._others)

    def _end(self, stream: int) -> None:
        task = self._running[stream]
        assert task
        self._running[stream], self._ends[stream] = None, math.inf
        task.ended = self.now
        self._taken -= task.gives
        self._others -= task.frees
        if stream == OUT:
            self._leaving -= task.gives
            self._moments_near -= task.frees * (task.first == MOMENTS)
        for other in task.then:
            other.waits -= 1
            if not other.waits and other.first is not None:
                self._leaving += other.gives
                self._count += 1
                heapq.heappush(self._ready[other.stream], (other.first, self._count, other))


def stays_bytes(cost: LayerCost, layer: LayerPlan) -> int:
    """What of a layer's saved tensors stays near from its forward pass to its backward pass."""
    return {"keep": cost.saved_bytes, "recompute": cost.input_bytes}.get(layer.mode, 0)


def state_bytes(cost: LayerCost, layer: LayerPlan) -> int:
    """What of a layer's state is near all the time."""
    return (layer.state != "weights-far") * cost.weight_bytes + (layer.state == "near") * cost.moment_bytes
