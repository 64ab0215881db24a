"""What a session trains: the model's parameters that its optimizers hold. And what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from threading import Lock
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farflung.errors import UserError
from farflung.hooks.digests import digest
from farflung.hooks.layouts import Layout, is_sharded, layout_of
from farflung.hooks.shards import own_of
from farflung.networks import Network

_ATTACHED: WeakSet[Trained] = WeakSet()
"""All sessions in use: parameters that one leaves alone, another may train."""
_CHANGES = Lock()
"""Replicas in threads attach at the same time."""


def attached() -> list[Trained]:
    """All sessions in use."""
    with _CHANGES:
        return list(_ATTACHED)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model that are to be trained, by name: beside adapters, others stay as they are."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


class Trained:
    """The parameters of a model that some optimizers train, and that are averaged over a network.

    Another network may average the same parameters, within a site, say. Raises UserError where an optimizer has
    parameters that are not the model's, or that are attached already, and where one has no values yet.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], network: Network) -> None:
        self.model = model
        self._network = network
        self.optimizers = tuple(optimizers)
        refuse_without_values(dict(model.named_parameters()))
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._shards = {name: parameter for parameter, name in self._names.items() if is_sharded(parameter)}
        for optimizer in self.optimizers:
            self._check_owner(optimizer)
        held = {parameter for optimizer in self.optimizers for parameter in held_by(optimizer)}
        self.named = {name: p for p, name in self._names.items() if p in held and p.requires_grad}
        self.parameters = list(self.named.values())
        self.restore: Callable[[], None] = lambda: None
        """Restores weights that are not finite, where a session has older ones."""
        self.steps, self.stepping = 0, False
        """Steps of these optimizers, and whether one is under way; see strangers.py."""
        self._left_alone: dict[nn.Parameter, Tensor] = {}
        if self.again():
            raise UserError(
                "these parameters are attached to this network already, so that each round would count twice; call "
                "finish() of the first session, or leave its with statement"
            )
        with _CHANGES:
            _ATTACHED.add(self)

    @cached_property
    def layout(self) -> Layout:
        """How the parameters lie in the replica."""
        return layout_of(self.model, self.named)

    def _check_owner(self, optimizer: Optimizer) -> None:
        for parameter in held_by(optimizer):
            if parameter not in self._names:
                raise UserError(
                    f"{type(optimizer).__name__} trains parameters that the model does not have (copies in another "
                    "precision?); make the optimizer of model.parameters(), or attach a module that has them all"
                )
            if parameter.is_complex():
                raise UserError(f"{self._names[parameter]} is complex, which no round can carry; use two real ones")
            if parameter.layout != torch.strided or (parameter.is_floating_point() and parameter.dtype.itemsize < 2):
                kind = parameter.dtype if parameter.layout == torch.strided else parameter.layout
                raise UserError(
                    f"{self._names[parameter]} is of {kind}, which no round can carry; train a dense one of float32, "
                    "float64, bfloat16 or float16"
                )

    def present(self) -> dict[str, nn.Parameter]:
        """The model's parameters as they are now, by name; shards even where FSDP2 shows what it gathered of them."""
        return {name: self._shards.get(name, parameter) for name, parameter in self.model.named_parameters()}

    def others(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters that these optimizers do not train, by name."""
        own = set(self.parameters)
        return ((name, parameter) for parameter, name in self._names.items() if parameter not in own)

    def averaged(self) -> set[nn.Parameter]:
        """The parameters that some session trains, of this model or another."""
        return {parameter for trained in attached() for parameter in trained.parameters}

    def begin(self) -> None:
        """Records the parameters that are left alone, for `check_left_alone`."""
        self._left_alone = {p: digest([own_of(p)]) for p in self._not_attached()}

    def check(self) -> None:
        """Checks that no other parameter is trained now. Raises UserError."""
        known = set(self.parameters)
        for optimizer in self.optimizers:
            for parameter in held_by(optimizer):
                if parameter.requires_grad and parameter not in known:
                    raise UserError(
                        f"{self._names.get(parameter, 'a parameter')} has come to be trained since attach; "
                        "before that, call finish(average_weights=True) on all replicas, leave the with statement and "
                        "attach again after it"
                    )

    def check_present(self) -> None:
        """Checks that the model still has the parameters that are trained. Raises UserError."""
        present = self.present()
        for name, parameter in self.named.items():
            if present.get(name, parameter) is not parameter:
                raise UserError(
                    f"{name} is no longer the tensor that the optimizer trains, as after load_state_dict(assign=True); "
                    "load without assign, or make a new optimizer and attach again"
                )

    def left_alone(self) -> list[nn.Parameter]:
        """The trainable parameters at the start that no session averages."""
        self._left_alone = {p: self._left_alone[p] for p in self._not_attached() if p in self._left_alone}
        return list(self._left_alone)

    def check_left_alone(self) -> None:
        """Checks that none of them has changed. Raises UserError."""
        for parameter in self.left_alone():
            if not torch.equal(digest([own_of(parameter)]), self._left_alone[parameter]):
                raise UserError(
                    f"{self._names[parameter]} is trained, but none of the attached optimizers holds it; "
                    "give attach all of the model's optimizers, as a list, or freeze what they do not train"
                )

    def again(self) -> bool:
        """Whether another session averages some of these parameters over the same network."""
        return any(not self.apart_from(trained.parameters) for trained in self._beside())

    def apart_from(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether none of some parameters is averaged here."""
        return self._own.isdisjoint(parameters)

    @cached_property
    def _own(self) -> frozenset[nn.Parameter]:
        return frozenset(self.parameters)

    def restore_beside(self) -> None:
        """Makes this replica's other sessions on the network restore their weights, too."""
        for trained in self._beside():
            trained.restore()

    def _beside(self) -> list[Trained]:
        return [trained for trained in attached() if trained is not self and trained._network is self._network]

    def end(self) -> None:
        """Says that these parameters are no longer averaged."""
        with _CHANGES:
            _ATTACHED.discard(self)

    def _not_attached(self) -> list[nn.Parameter]:
        """Trainable parameters that no session averages."""
        averaged = self.averaged()
        return [parameter for _, parameter in self.others() if parameter.requires_grad and parameter not in averaged]


def held_by(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters of an optimizer's groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def refuse_without_values(tensors: Mapping[str, Tensor]) -> None:
    """Raises UserError where a tensor has no values yet."""
    for name, tensor in tensors.items():
        if nn.parameter.is_lazy(tensor) or tensor.is_meta:
            raise UserError(f"{name} has no values yet; run the model on a batch, or load its weights, before attach")
