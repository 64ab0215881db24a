"""A training step, second by second: what `farflung.memory.step` says of one, and none of its code.

What is near is found anew each second from what has begun and ended. Durations are whole seconds, at least 1.
"""

from __future__ import annotations

from collections.abc import Iterator

from farflung.memory.plan import LayerPlan, Profile

Event = tuple[str, int, int]
"""What happens, in which step, to which layer.

F and B compute; WF and WB bring weights for them. O takes saved tensors away and I brings them back. U steps near; MI
and MO bring its moments and take them back. G takes a gradient away, H steps on the host, WI brings what that has made.
"""


class SlowStep:
    def __init__(self, profile: Profile, plan: tuple[LayerPlan, ...], prefetch: int, clip: bool) -> None:
        self.profile, self.prefetch, self.clip = profile, prefetch, clip
        self.costs = [profile.before, *profile.layers, profile.head]
        self.plan = [LayerPlan(), *plan, LayerPlan()]
        self.numbers = range(len(self.costs))
        self.steps = 2 if any(layer.state != "near" for layer in plan) else 1
        self.began: dict[Event, int] = {}
        self.ended: dict[Event, int] = {}
        self.now = self.peak = 0
        self.order = list(self._order())

    def _order(self) -> Iterator[Event]:
        for step in range(self.steps):
            yield from (("F", step, number) for number in self.numbers)
            yield from (("B", step, number) for number in reversed(self.numbers))
            if step == 0:
                yield from (("U", step, number) for number in self.numbers if self.plan[number].state == "near")
                yield from (("U", step, number) for number in self.numbers if self.plan[number].state == "moments-far")

    # What is near

    def moved(self, number: int) -> int:
        cost = self.costs[number]
        return {"move": cost.saved_bytes, "recompute-moved": cost.input_bytes}.get(self.plan[number].mode, 0)

    def again(self, number: int) -> bool:
        return self.plan[number].mode.startswith("recompute")

    def saved(self, step: int, number: int) -> int:
        cost = self.costs[number]
        if ("F", step, number) not in self.began or ("B", step, number) in self.ended:
            return 0
        if ("B", step, number) in self.began:
            return cost.saved_bytes
        if self.moved(number) and ("O", step, number) in self.ended and ("I", step, number) not in self.began:
            return 0
        return cost.input_bytes if self.again(number) else cost.saved_bytes

    def comes_and_goes(self, step: int, number: int) -> int:
        cost = self.costs[number]
        spans = [("WF", "F", cost.weight_bytes), ("WB", "B", cost.weight_bytes), ("MI", "MO", cost.moment_bytes)]
        spans.append(("B", "G" if self.on_host(number) else "U", cost.gradient_bytes))
        spans.append(("U", "U", cost.step_bytes))
        return sum(
            nbytes
            for begin, end, nbytes in spans
            if (begin, step, number) in self.began and (end, step, number) not in self.ended
        )

    def on_host(self, number: int) -> bool:
        return self.plan[number].state in ("optimizer-far", "weights-far")

    def room_taken(self) -> int:
        return sum(self.saved(step, number) for step in range(self.steps) for number in self.numbers)

    def room(self) -> int:
        stay = (cost.saved_bytes for cost, layer in zip(self.costs, self.plan, strict=True) if layer.mode == "keep")
        inputs = (c.input_bytes for c, layer in zip(self.costs, self.plan, strict=True) if layer.mode == "recompute")
        return sum(stay) + sum(inputs) + self.prefetch

    def memory(self) -> int:
        always = self.profile.fixed_bytes
        for cost, layer in zip(self.costs, self.plan, strict=True):
            always += cost.weight_bytes if layer.state != "weights-far" else 0
            always += cost.moment_bytes if layer.state == "near" else 0
        comes = sum(self.comes_and_goes(step, number) for step in range(self.steps) for number in self.numbers)
        return always + self.room_taken() + comes

    # What may begin

    def leaving(self) -> bool:
        return any(
            self.moved(number) and ("F", step, number) in self.ended and ("O", step, number) not in self.ended
            for step in range(self.steps)
            for number in self.numbers
        )

    def needs(self, event: Event) -> list[Event]:
        """What must have ended before an event that computes."""
        what, step, number = event
        place = self.order.index(event)
        needed = [self.order[place - 1]] if place else []
        if what in "FB" and self.plan[number].state == "weights-far":
            needed.append(("W" + what, step, number))
        if what == "F" and step and self.plan[number].state == "optimizer-far":
            needed.append(("WI", 0, number))
        if what == "B" and self.moved(number):
            needed.append(("I", step, number))
        if what == "U" and self.plan[number].state == "moments-far":
            needed.append(("MI", step, number))
        return needed

    def computes_next(self) -> Event | None:
        return next((event for event in self.order if event not in self.began), None)

    def may_compute(self) -> Event | None:
        event = self.computes_next()
        if event is None or any(needed not in self.ended for needed in self.needs(event)):
            return None
        what, _, number = event
        cost = self.costs[number]
        more = 0
        if what == "F":
            more = cost.input_bytes if self.again(number) else cost.saved_bytes
        if what == "B" and self.again(number):
            more = cost.saved_bytes - cost.input_bytes
        return None if self.leaving() and self.room_taken() + more > self.room() else event

    def may_come(self) -> Event | None:
        """Weights that are far, then saved tensors, then moments, then what the host has made."""
        head = len(self.costs) - 1
        passes = [event for event in self.order if event[0] in "FB" and self.plan[event[2]].state == "weights-far"]
        for event in passes:
            fetched = ("W" + event[0], event[1], event[2])
            if fetched not in self.began:
                place = self.order.index(event)
                updated = event[0] == "B" or not event[1] or ("H", 0, event[2]) in self.ended
                if updated and (place < 2 or self.order[place - 2] in self.ended):
                    return fetched
                break
        for event in (event for event in self.order if event[0] == "B" and self.moved(event[2])):
            back = ("I", event[1], event[2])
            if back not in self.began:
                gone = ("O", event[1], event[2]) in self.ended and ("F", event[1], head) in self.ended
                fits = self.room_taken() + self.moved(event[2]) <= self.room()
                if gone and (fits or (self.waited_for(back) and not self.leaving())):
                    return back
                break
        for event in (event for event in self.order if event[0] == "U" and self.plan[event[2]].state == "moments-far"):
            if ("MI", 0, event[2]) not in self.began:
                if ("B", 0, 0) in self.ended and self.moments_fit(event[2]):
                    return ("MI", 0, event[2])
                break
        made = (n for n in self.numbers if self.plan[n].state == "optimizer-far" and ("H", 0, n) in self.ended)
        return next((("WI", 0, number) for number in made if ("WI", 0, number) not in self.began), None)

    def waited_for(self, event: Event) -> bool:
        following = self.computes_next()
        if following is None or (place := self.order.index(following)) == 0 or self.order[place - 1] not in self.ended:
            return False
        return [needed for needed in self.needs(following) if needed not in self.ended] == [event]

    def moments_fit(self, number: int) -> bool:
        near = [n for n in self.numbers if ("MI", 0, n) in self.began and ("MO", 0, n) not in self.ended]
        taken = sum(self.costs[n].moment_bytes for n in near)
        return not near or taken + self.costs[number].moment_bytes <= self.prefetch

    def may_leave(self) -> Event | None:
        """Saved tensors, then gradients, the smallest layer's first; then moments."""
        ways = [("O", "F"), ("G", "B"), ("MO", "U")]
        for what, before in ways:
            for step in range(self.steps):
                for number in self.numbers:
                    leaves = {"O": self.moved(number) > 0, "G": self.on_host(number)}
                    leaves["MO"] = self.plan[number].state == "moments-far"
                    known = (before, step, number) in self.ended and (what, step, number) not in self.began
                    if leaves[what] and known:
                        return (what, step, number)
        return None

    def may_update(self) -> Event | None:
        far = [number for number in self.numbers if self.on_host(number)]
        if self.clip and not (all(("G", 0, number) in self.ended for number in far) and ("B", 0, 0) in self.ended):
            return None
        for number in far:
            if ("G", 0, number) in self.ended and ("H", 0, number) not in self.began:
                return ("H", 0, number)
        return None

    # Time

    def lasts(self, event: Event) -> float:
        what, _, number = event
        cost, out, back = self.costs[number], self.profile.out_bytes_s, self.profile.in_bytes_s
        return {
            "F": cost.forward_s,
            "B": cost.backward_s + (cost.forward_s - cost.spared_s if self.again(number) else 0),
            "U": cost.near_step_s,
            "H": cost.far_step_s,
            "O": self.moved(number) / out,
            "G": cost.gradient_bytes / out,
            "MO": cost.moment_bytes / out,
            "I": self.moved(number) / back,
            "MI": cost.moment_bytes / back,
        }.get(what, cost.weight_bytes / back)

    def run(self) -> tuple[float, int]:
        """The seconds of a step, and its peak."""
        until: dict[str, tuple[Event, float]] = {}
        may = {"compute": self.may_compute, "in": self.may_come, "out": self.may_leave, "host": self.may_update}
        while self.order[-1] not in self.ended:
            for worker, (event, end) in list(until.items()):
                if end == self.now:
                    self.ended[event] = self.now
                    del until[worker]
            for worker, choose in may.items():
                if worker not in until and (event := choose()):  # type: ignore[assignment]
                    self.began[event] = self.now
                    until[worker] = event, self.now + self.lasts(event)
            self.peak = max(self.peak, self.memory())
            self.now += 1
            assert self.now < 100_000, "nothing goes on"
        if self.steps == 1:
            return self.ended[self.order[-1]], self.peak
        return self.ended["B", 1, 0] - self.ended["B", 0, 0], self.peak
