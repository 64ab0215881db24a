"""The plan that takes the least time in a given memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, permutations, product
from typing import get_args

from farflung.errors import UserError
from farflung.memory.plan import LayerPlan, Mode, Plan, Profile, State
from farflung.memory.step import simulate, state_bytes, stays_bytes

MODES: tuple[Mode, ...] = get_args(Mode)
STATES: tuple[State, ...] = get_args(State)

MOST = 40_000
"""Layers that a search simulates at most, all simulations together: about two seconds."""

HALVINGS = 6
"""How closely the most prefetch that fits is found."""

STARTS = 3
"""How many plans are improved, first by counts and then layer by layer."""

FEW = 8
"""Up to so many layers, any three of them change together."""

STARTS_APART = 1.003
"""How much more than now a process may have taken when the same plan is asked for at its next start."""
FIXED_APART = 0.015
"""The part of what a process takes at all times that may come on top: systems bring libraries near page by page."""

Layers = tuple[LayerPlan, ...]


class TooLittleError(UserError):
    """No step can be made with the memory that there is, `cap_bytes`; `least_bytes` is the smallest cap that works."""

    def __init__(self, least_bytes: int, cap_bytes: int) -> None:
        self.least_bytes, self.cap_bytes = least_bytes, cap_bytes
        super().__init__(
            f"a step cannot be made with {cap_bytes / 1e9:.4g} GB of memory; give at least {gigabytes(least_bytes)} "
            "GB, a smaller batch or shorter sequences"
        )


def search(
    profile: Profile,
    cap_bytes: int,
    *,
    clip: bool,
    modes: tuple[Mode, ...] = MODES,
    states: tuple[State, ...] = STATES,
) -> Plan:
    """The fastest plan found whose peak is at most `cap_bytes`. Raises TooLittleError.

    Layers are more or less alike. So first only how many have each mode and state is searched, kept ones last and the
    others spread evenly. Then single layers change, and change places. Plans are simulated, but for those that cannot
    be faster than the best, whatever the order of things.
    """
    trials = _Trials(profile, cap_bytes, clip, modes, states)
    trials.of((LayerPlan(),) * len(profile.layers))
    for mode, state in product(modes, states):
        trials.of((LayerPlan(mode, state),) * len(profile.layers))
    for trial in trials.foremost():
        trials.by_counts(trial)
    for trial in trials.unlike():
        trials.by_layers(trial)
    best = trials.foremost()[0].plan
    if best.peak_bytes > cap_bytes:
        best = leanest(profile, clip=clip, modes=modes, states=states)
    if best.peak_bytes > cap_bytes:
        told = STARTS_APART * best.peak_bytes + FIXED_APART * profile.fixed_bytes
        raise TooLittleError(int(told), cap_bytes)
    return best


def leanest(
    profile: Profile, *, clip: bool, modes: tuple[Mode, ...] = MODES, states: tuple[State, ...] = STATES
) -> Plan:
    """The plan found that needs the least memory: all layers alike; where there are few, each one changed in turn."""

    def plan(layers: Layers) -> Plan:
        step = simulate(profile, layers, prefetch_bytes=0, clip=clip)
        return Plan(layers, 0, step.peak_bytes, step.seconds)

    def cost(plan: Plan) -> tuple[float, float]:
        return plan.peak_bytes, plan.seconds

    kinds = [LayerPlan(mode, state) for mode, state in product(modes, states)]
    best = min((plan((kind,) * len(profile.layers)) for kind in kinds), key=cost)
    for number in reversed(range(len(profile.layers) if len(profile.layers) <= 2 * FEW else 0)):
        best = min([best, *(plan(_with(best.layers, {number: kind})) for kind in kinds)], key=cost)
    return best


def gigabytes(nbytes: int) -> str:
    """Four digits, rounded up."""
    unit = 10 ** max(0, math.floor(math.log10(max(nbytes, 1))) - 3)
    return f"{math.ceil(nbytes / unit) * unit / 1e9:.10g}"


@dataclass(frozen=True)
class _Trial:
    """A plan, and how many bytes its peak is above the cap."""

    plan: Plan
    excess: int

    @property
    def rank(self) -> tuple[float, float, float]:
        """Less is better."""
        return self.excess, self.plan.seconds, self.plan.peak_bytes


class _Trials:
    """Plans that were simulated, each with the most prefetch that fits."""

    def __init__(
        self, profile: Profile, cap: int, clip: bool, modes: tuple[Mode, ...], states: tuple[State, ...]
    ) -> None:
        self._profile, self._cap, self._clip = profile, cap, clip
        self._modes, self._states = modes, states
        self._known: dict[Layers, _Trial] = {}
        self._simulated = 0
        self._fastest = math.inf
        self._stateful = any(cost.weight_bytes + cost.moment_bytes for cost in profile.layers)

    def foremost(self) -> list[_Trial]:
        """The best, those that fit first."""
        return sorted(self._known.values(), key=lambda trial: trial.rank)[:STARTS]

    def unlike(self) -> list[_Trial]:
        """The best of those that keep as many layers as each other, the best of all first."""
        best: dict[int, _Trial] = {}
        for trial in sorted(self._known.values(), key=lambda trial: trial.rank):
            best.setdefault(sum(layer.mode == "keep" for layer in trial.plan.layers), trial)
        return list(best.values())[: 2 * STARTS]

    def of(self, layers: Layers) -> _Trial | None:
        """None where it cannot be the best, or the time is over."""
        if layers not in self._known:
            if self._simulated > MOST or self._at_least(layers) >= self._fastest:
                return None
            self._known[layers] = trial = self._fitted(layers)
            if not trial.excess:
                self._fastest = min(self._fastest, trial.plan.seconds)
        return self._known[layers]

    def _at_least(self, layers: Layers) -> float:
        """Seconds that nothing could be faster than: those of each of the four that work at the same time."""
        profile, part = self._profile, 1 / self._profile.passes
        compute = sum(cost.forward_s + cost.backward_s for cost in profile.chain)
        compute += part * (profile.before.near_step_s + profile.head.near_step_s)
        out = back = host = 0.0
        for cost, layer in zip(profile.layers, layers, strict=True):
            compute += cost.again_s * (layer.mode in ("recompute", "recompute-moved"))
            moved = {"move": cost.saved_bytes, "recompute-moved": cost.input_bytes}.get(layer.mode, 0)
            near = layer.state in ("near", "moments-far")
            moments = part * cost.moment_bytes * (layer.state == "moments-far")
            compute += part * cost.near_step_s * near
            host += part * cost.far_step_s * (not near)
            out += moved + moments + cost.gradient_bytes * (not near)
            weights = {"optimizer-far": part, "weights-far": 2}.get(layer.state, 0)
            back += moved + moments + cost.weight_bytes * weights
        return max(compute, out / profile.out_bytes_s, back / profile.in_bytes_s, host)

    def _fitted(self, layers: Layers) -> _Trial:
        profile, chain = self._profile, [*zip(self._profile.layers, layers, strict=True)]
        always = profile.fixed_bytes + sum(state_bytes(cost, layer) + stays_bytes(cost, layer) for cost, layer in chain)
        always += sum(state_bytes(cost, LayerPlan()) + cost.saved_bytes for cost in (profile.before, profile.head))
        comes = any(layer.mode in ("move", "recompute-moved") or layer.state == "moments-far" for layer in layers)
        fits = too_much = self._trial(layers, max(0, self._cap - always) * comes)
        while fits.excess and fits.plan.prefetch_bytes:
            less = max(fits.excess, fits.plan.prefetch_bytes // 8)
            too_much, fits = fits, self._trial(layers, max(0, fits.plan.prefetch_bytes - less))
        for _ in range(HALVINGS):  # more may fit, and where it would be faster it is worth knowing
            if fits.excess or too_much.plan.seconds >= min(fits.plan.seconds, self._fastest):
                break
            trial = self._trial(layers, (fits.plan.prefetch_bytes + too_much.plan.prefetch_bytes) // 2)
            fits, too_much = (fits, trial) if trial.excess else (trial, too_much)
        return fits

    def _trial(self, layers: Layers, prefetch: int) -> _Trial:
        self._simulated += len(layers) * (1 + any(layer.state != "near" for layer in layers))
        step = simulate(self._profile, layers, prefetch_bytes=prefetch, clip=self._clip)
        return _Trial(Plan(layers, prefetch, step.peak_bytes, step.seconds), max(0, step.peak_bytes - self._cap))

    def by_counts(self, trial: _Trial) -> None:
        """Improves how many layers have each mode and state, many at a time and then one."""
        modes = [sum(layer.mode == mode for layer in trial.plan.layers) for mode in MODES]
        states = [sum(layer.state == state for layer in trial.plan.layers) for state in STATES]
        by = len(trial.plan.layers)
        while by := by // 3 or by // 2:
            improved = True
            while improved:
                improved = False
                allowed = [MODES.index(mode) for mode in self._modes], [STATES.index(state) for state in self._states]
                for counts, kinds in [(modes, allowed[0]), (states, allowed[1])][: 1 + self._stateful]:
                    for one, other in permutations(kinds, 2):
                        if counts[one] < by:
                            continue
                        counts[one] -= by
                        counts[other] += by
                        found = self.of(spread(modes, states))
                        if found and found.rank < trial.rank:
                            trial, improved = found, True
                        else:
                            counts[one] += by
                            counts[other] -= by

    def by_layers(self, trial: _Trial) -> None:
        """Improves which layers have which mode and state."""
        improved = True
        while improved:
            improved = False
            for layers in self._neighbours(trial.plan.layers):
                found = self.of(layers)
                if found and found.rank < trial.rank:
                    trial, improved = found, True
                    break

    def _neighbours(self, layers: Layers) -> Iterator[Layers]:
        """One changes; two change places; where there are few, up to three of them change."""
        count = len(layers)
        single = [
            [replace(layer, mode=mode) for mode in self._modes if mode != layer.mode]
            + [replace(layer, state=state) for state in self._states if self._stateful and state != layer.state]
            for layer in layers
        ]
        for number, others in enumerate(single):
            for changed in others:
                yield _with(layers, {number: changed})
        for one, other in combinations(range(count), 2):
            if layers[one] != layers[other] and (count <= 2 * FEW or other == one + 1):
                yield _with(layers, {one: layers[other], other: layers[one]})
        if count <= FEW:
            for changing in (2, 3):
                for numbers in combinations(range(count), changing):
                    for together in product(*(single[number] for number in numbers)):
                        yield _with(layers, dict(zip(numbers, together, strict=True)))


def spread(modes: list[int], states: list[int]) -> Layers:
    """So many layers of each: kept ones last, the others evenly; far optimizers last, far weights first."""
    keep, *others = modes
    places = sorted(
        ((n + 0.5) / count, mode) for mode, count in zip(MODES[1:], others, strict=True) for n in range(count)
    )
    along = [mode for _, mode in places] + [MODES[0]] * keep
    near, moments, optimizers, weights = states
    state = [STATES[3]] * weights + [STATES[1]] * moments + [STATES[0]] * near + [STATES[2]] * optimizers
    return tuple(LayerPlan(*each) for each in zip(along, state, strict=True))


def _with(layers: Layers, changed: dict[int, LayerPlan]) -> Layers:
    return tuple(changed.get(number, layer) for number, layer in enumerate(layers))
