"""A model that is fitted into its memory: a plan, what it was made from, and how it is carried out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farflung.errors import UserError
from farflung.files import write_text
from farflung.hooks.shards import own_of
from farflung.hooks.shared_memory import SHARED
from farflung.memory import modes
from farflung.memory.copies import copies_of
from farflung.memory.far import FileOf, HostMemory, check_room, far_homes
from farflung.memory.measure import bytes_of, in_use, return_what_is_free, tensors_in
from farflung.memory.moments import SMALLEST, FarMoments
from farflung.memory.plan import LayerCost, LayerPlan, Mode, Plan, Profile, State, from_json, to_json, worst
from farflung.memory.profile import Model, profiled
from farflung.memory.search import MODES, STATES, search
from farflung.memory.step import stays_bytes
from farflung.memory.updates import FarUpdates, FarWeights

LESS = 0.9
"""What a plan may take of the memory in which another one has found no room."""

WORDS: dict[str, str] = {
    "keep": "keep what they save",
    "recompute": "compute it again",
    "move": "move it out and back",
    "recompute-moved": "move their input and compute again",
}

FAR: dict[State, str] = {
    "moments-far": "moments",
    "optimizer-far": "gradients and moments",
    "weights-far": "weights, gradients and moments",
}


Tell = Callable[[tuple[int, Profile]], list[tuple[int, Profile]]]
"""Gives what each of some processes calls it with, in their order."""


@dataclass(frozen=True)
class Record:
    """What a run folder keeps of a plan.

    Args:
        memory: what the user said.
        cap_bytes: what that is.
        passes: forward and backward passes in a step; the plan's seconds are of one.
        far: the folder in which what is far lies; "" for the host's memory.
        device: the kind that it was measured on.
        compiled: whether layers were compiled.
    """

    memory: str
    cap_bytes: int
    passes: int
    far: str
    plan: Plan
    profile: Profile
    device: str = ""
    compiled: bool = False

    @property
    def seconds(self) -> float:
        """Predicted, of a step."""
        return self.passes * self.plan.seconds

    @property
    def made_for(self) -> tuple[object, ...]:
        """What a plan is of use for: the memory, and what computes in it how."""
        told = (self.memory, self.far, self.passes, self.device, self.compiled)
        return (*told, len(self.plan.layers), self.profile.in_flight)

    def write(self, path: Path, measured: dict[str, float]) -> None:
        """Keeps it, beside what was measured."""
        values = vars(self) | {name: json.loads(to_json(vars(self)[name])) for name in ("plan", "profile")}
        write_text(path, json.dumps(values | {"measured": measured}, indent=1))

    @classmethod
    def read(cls, path: Path) -> Record | None:
        """What was kept, if anything. Raises UserError for a file that holds something else."""
        if not path.exists():
            return None
        try:
            table: dict[str, Any] = json.loads(path.read_text("utf-8"))
            table.pop("measured", None)
            plan = from_json(Plan, json.dumps(table.pop("plan")), f"{path}, plan")
            profile = from_json(Profile, json.dumps(table.pop("profile")), str(path))
            if len(plan.layers) != len(profile.layers):
                raise ValueError(f"it is of {len(plan.layers)} layers, and {len(profile.layers)} were measured")
            return cls(plan=plan, profile=profile, **table)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} holds no plan of memory: {error}; remove it, and a new one is made") from error


def described(layers: Sequence[LayerPlan]) -> str:
    """A plan of layers in words."""
    counts = Counter(layer.mode for layer in layers)
    told = [f"{counts[mode]} {words}" for mode, words in WORDS.items() if counts[mode]]  # type: ignore[index]
    states = Counter(layer.state for layer in layers)
    far = [f"the {what} of {states[state]} are far" for state, what in FAR.items() if states[state]]
    return "; ".join([f"of {len(layers)} layers, {', '.join(told)}", *far])


class Fitted:
    """Carries out plans of one model and its optimizer.

    With `near_gradients`, others than the optimizer want all of them, so that none leave; with `near_moments`, it has
    those of all layers at once.

    Attributes:
        updates: what has the host step layers, where the plan has it do so.
    """

    def __init__(
        self, model: Model, optimizer: Optimizer, folder: str, near_gradients: bool, near_moments: bool = False
    ) -> None:
        self._model, self._optimizer, self._folder, self._near_moments = model, optimizer, folder, near_moments
        self._near_gradients, self._home = near_gradients, far_homes(folder)
        device = model.device
        return_what_is_free(device)
        self._copies = copies_of(device, FileOf(Path(folder)) if folder else HostMemory(device.type == "cuda"))
        self._states: list[FarMoments | FarUpdates | FarWeights] = []
        self.updates: FarUpdates | None = None

    def planned(self, memory: str, cap: int, clip: bool, passes: int, tell: Tell) -> Record:
        """Measures the model, and plans a step. Raises UserError where the memory is too little.

        `tell` gives what all have measured who have shards of the model: their plan is the same, and fits into each.
        """
        device, state = self._model.device, tensors_in([*self._optimizer.state.values()])
        own = [value for value in (*map(own_of, self._model.whole.parameters()), *state) if value.device == device]
        profile = profiled(self._model, self._copies, passes)
        return_what_is_free(device)
        besides = max(in_use(device) - bytes_of(own), 0)  # only now, since a first step has libraries loaded
        if self._model.sharded and device.type == "cpu":
            besides += SHARED  # shards swap through it, but have not yet
        profile = replace(profile, fixed_bytes=profile.fixed_bytes + besides)
        caps, profiles = zip(*tell((cap, profile)), strict=True)
        cap, profile = min(caps), worst(profiles)
        allowed, places = self._choices()
        plan = search(profile, cap, clip=clip, modes=allowed, states=places)
        return Record(memory, cap, passes, self._folder, plan, profile, device.type, self._model.compiled)

    def smaller(self, record: Record, clip: bool) -> Record:
        """Another plan, with less memory than one for which there was no room. Raises UserError."""
        cap = int(LESS * min(record.cap_bytes, record.plan.peak_bytes))
        allowed, states = self._choices()
        plan = search(record.profile, cap, clip=clip, modes=allowed, states=states)
        return replace(record, cap_bytes=cap, plan=plan)

    def _choices(self) -> tuple[tuple[Mode, ...], tuple[State, ...]]:
        modes, states = choices_of(self._model.device.type, bool(self._folder), self._near_gradients)
        return modes, states[:1] if self._near_moments else states

    def carry_out(self, record: Record) -> None:
        """Has the model compute as a plan says. Raises UserError where the far folder has no room for it."""
        plan, costs, layers = record.plan, record.profile.layers, self._model.layers
        if self._folder:
            flights = [self._model.in_flight] * len(layers)
            check_room(Path(self._folder), sum(map(far_bytes, costs, plan.layers, flights)))
        others = (self._model.in_flight - 1) * sum(map(stays_bytes, costs, plan.layers))
        near = others + plan.prefetch_bytes
        calling = modes.Calling(self._copies, near, self._model.compiled, record.profile.casts_again)
        modes.apply(layers, plan.layers, costs, calling)
        self._keep_states_far(plan.layers, plan.prefetch_bytes)
        return_what_is_free(self._model.device)

    def take(self, kept: dict[str, Any]) -> None:
        """Has the optimizer go on from a `state_dict`: moments that are far go to where they lie, one by one."""
        held = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        states = [state for state in self._states if not isinstance(state, FarWeights)]
        places = {parameter: homes for state in states for parameter, homes in state.places().items()}
        near: dict[int, dict[str, Any]] = {number: {} for number in kept["state"]}
        far: list[tuple[nn.Parameter, str, Tensor]] = []
        for number, values in kept["state"].items():
            for key, value in values.items():
                if held[number] in places and isinstance(value, Tensor) and value.numel() >= SMALLEST:
                    far.append((held[number], key, value))
                else:
                    near[number][key] = value
        self._optimizer.load_state_dict({**kept, "state": near})
        for parameter, key, value in far:
            home = places[parameter][parameter, key] = self._home(value)
            home.tensor.copy_(value)
            home.let_go()
            self._optimizer.state[parameter][key] = home.tensor

    def gradients_begin(self) -> None:
        """A step's gradients are to be computed: those that no step has taken are forgotten."""
        if self.updates:
            self.updates.forget()

    def clip(self, most: float) -> None:
        """Clips all gradients together, wherever they are."""
        parameters = self._model.whole.parameters()
        if self.updates:
            self.updates.clip(parameters, most)
        else:
            nn.utils.clip_grad_norm_(parameters, most)

    def _keep_states_far(self, plans: Sequence[LayerPlan], limit: int) -> None:
        for state in reversed(self._states):
            state.undo()
        self._states, self.updates = [], None
        model, owned = self._model, _each_once(map(self._model.named, self._model.layers))

        def having(*states: State) -> list[dict[str, nn.Parameter]]:
            return [named for named, plan in zip(owned, plans, strict=True) if plan.state in states]

        home, copies = self._home, copies_of(model.device, HostMemory(model.device.type == "cuda"))
        away = [layer for layer, plan in zip(model.layers, plans, strict=True) if plan.state == "weights-far"]
        weights = FarWeights(away, home)
        if far := having("optimizer-far", "weights-far"):
            self.updates = FarUpdates(self._optimizer, model.make, far, home, copies, weights.homes)
            self._states += [weights, self.updates]
        if far := having("moments-far"):
            room = limit // 2 if model.device.type == "cpu" else limit  # a file's pages are near, too, while copied
            self._states.append(FarMoments(self._optimizer, model.make, far, home, copies, room))


def _each_once(layers: Iterable[Mapping[str, nn.Parameter]]) -> list[dict[str, nn.Parameter]]:
    """Layers' parameters; one that several layers share is the first one's."""
    owned: list[dict[str, nn.Parameter]] = []
    known: set[nn.Parameter] = set()
    for named in layers:
        owned.append({name: parameter for name, parameter in named.items() if parameter not in known})
        known.update(named.values())
    return owned


def choices_of(device: str, folder: bool, near_gradients: bool) -> tuple[tuple[Mode, ...], tuple[State, ...]]:
    """What can become of layers on a kind of device: with one memory and no folder, nothing is far from anything."""
    processor = device == "cpu"
    if processor and not folder:
        return ("keep", "recompute"), ("near",)
    # Weights of a GPU that are far would have to come for rounds, too, and for whatever else reads them.
    return MODES, STATES[:2] if near_gradients else STATES if processor else STATES[:3]


def far_bytes(cost: LayerCost, plan: LayerPlan, in_flight: int) -> int:
    """What of a layer lies far, at most, with so many passes in flight."""
    gradients = cost.gradient_bytes * (plan.state in ("optimizer-far", "weights-far"))
    weights = cost.weight_bytes * (plan.state == "weights-far")
    moments = cost.moment_bytes * (plan.state != "near")
    return in_flight * modes.moved_bytes(plan.mode, cost) + moments + gradients + weights


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory left, on whatever device."""
    told = str(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and ("can't allocate memory" in told or "not enough memory" in told)
    )
