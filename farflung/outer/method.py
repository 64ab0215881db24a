"""A method: the choices that its rounds are made of."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Unpack, get_args

import torch
from torch import nn
from typing_extensions import get_protocol_members

from farflung.codecs import Codec, Dense, as_codec
from farflung.errors import UserError
from farflung.hooks.data_parallel import warn_of_gradients_between_replicas
from farflung.hooks.shards import check_shards, reshard
from farflung.inner import MUON, Inner
from farflung.networks import Network
from farflung.outer.adaptation import Adapt
from farflung.outer.aggregation import ROBUST
from farflung.outer.averaging import Way
from farflung.outer.companions.base import Companion
from farflung.outer.dealing import Dealing
from farflung.outer.elastic import ElasticLoop
from farflung.outer.fusing import Fuse
from farflung.outer.gradients import GradientLoop
from farflung.outer.loop import OuterLoop
from farflung.outer.merges import Keep, Merge, as_merge
from farflung.outer.momentum import MomentumSchedule
from farflung.outer.optimizers import OuterFactory
from farflung.outer.options import Options, completed
from farflung.outer.schedules import Schedule
from farflung.outer.session import Session
from farflung.outer.setup import Setup
from farflung.outer.topologies import Everyone, Topology
from farflung.renamed import Formerly


@dataclass(frozen=True)
class Method:
    """The choices that make a method.

    Args:
        schedule: when rounds start, and when their results are applied.
        topology: who averages with whom.
        codec: how a message becomes bytes; a name will do, such as int4.
        outer: makes the outer optimizer of the anchors; None keeps no anchors and averages gradients before each
            inner step instead.
        merge: what becomes of the steps that are trained during a round; a name will do, such as kept.
        adapt: whether the codec's rank and the steps between rounds follow the messages' effective rank.
        averaging: how groups of more than two average packets: "whole" by all-gather, or in "parts" by reduce-scatter
            and all-gather, encoded twice, so that bytes do not grow with the group.
        fuse: how pseudo-gradients become one: by their "mean", or by "rda", the means of their lengths and directions.
        momentum: how the outer momentum changes while the run goes on; None leaves it as `outer` has it.
        inner: the inner optimizer that goes with it. Muon lowered the loss under every method (docs/evidence.md).
        needs_inner: whether the method is only the published one with that inner optimizer.
        quorum: members, this one among them, that must come to a round where peers come and go; else it counts for
            nobody, and what was trained goes into the next one.
        companions: what goes along with rounds, such as MixedAnchors.
        dealing: what units of the model replicas deal out among them; None for replicas that train all of it.
        cut: how a graph is cut into the replicas' parts, where its settings do not say; "" trains on all of it.
    """

    schedule: Schedule
    topology: Topology = field(default_factory=Everyone)
    codec: Codec = field(default_factory=Dense)
    outer: OuterFactory | None = None
    merge: Merge = field(default_factory=Keep)
    adapt: Adapt | None = None
    averaging: Way = "parts"
    inner: Inner = MUON
    needs_inner: type[torch.optim.Optimizer] | None = None
    fuse: Fuse = "mean"
    momentum: MomentumSchedule | None = None
    quorum: int = 1
    companions: tuple[Companion, ...] = ()
    dealing: Dealing | None = None
    cut: str = ""
    check_open = Formerly("check_elastic")

    def __post_init__(self) -> None:
        """Refuses choices that are none, or do not go together. Raises UserError."""
        object.__setattr__(self, "codec", as_codec(self.codec))
        object.__setattr__(self, "merge", as_merge(self.merge))
        self._check_kinds()
        if self.outer is None and (self.schedule, self.merge, self.adapt) != (Schedule(every=1), Keep(), None):
            raise UserError(
                f"a method without `outer` averages gradients at every step, and yet it is given {self.schedule}, "
                f"{self.merge} and adapt={self.adapt}; give it an outer optimizer, such as partial(torch.optim.SGD, "
                "lr=0.7), or Schedule(every=1) alone"
            )
        if self.schedule.final is not None and self.adapt and self.adapt.steps:
            raise UserError(
                "adapt changes the steps between rounds itself; leave out every_final, or add --adapt False"
            )
        if self.merge.eager and (self.schedule.delay != self.schedule.every or self.schedule.final is not None):
            raise UserError("eager needs a delay of a whole round; set delay to the same as every, without every_final")
        if self.topology.identical and self.codec.traits.needs_receiver:
            raise UserError(
                f"codec {self.codec!r} reads messages by the receiver's own values, so that replicas which must end "
                "alike would drift apart; use it with noloco or in groups, or choose another codec, such as int4"
            )
        if self.merge.only_sent and self.codec.traits.feeds_back:
            raise UserError(
                f"merge 'sent' leaves in the weights what was not sent, and {self.codec!r} feeds it back, so that it "
                "would count twice; choose a codec without feedback, such as topk2-int2, or another merge"
            )
        if self.merge.turn and not self.schedule.delay:
            raise UserError("merge 'turned' is for rounds that are late, and delay is 0; give a delay, or leave it out")
        if self.momentum and self.outer is None:
            raise UserError("an outer momentum is to change, and this method has no outer optimizer; leave it out")
        if self.companions and self.outer is None:
            raise UserError(f"{self.companions[0]} goes along with rounds, and a method without `outer` has none")
        kinds = [type(companion).__name__ for companion in self.companions]
        if twice := next((kind for kind in kinds if kinds.count(kind) > 1), ""):
            raise UserError(f"companions has {twice} twice, and their exchanges one name; give one that does both")
        if self.fuse != "mean":
            self._check_fuse()

    def _check_fuse(self) -> None:
        faults = {
            "there are none: gradients, or units, are exchanged": self.outer is None or self.dealing is not None,
            "eager takes a replica's own part out of the mean again": self.merge.eager,
            f"{self.codec!r} sends some of the values, which would get the length of all": self.codec.traits.sparse,
            f"{self.codec!r} reads messages by the receiver's own": self.codec.traits.needs_receiver,
        }
        for why in (why for why, holds in faults.items() if holds):
            raise UserError(f"fuse is {self.fuse!r}, which is for pseudo-gradients, and {why}; leave it out")

    def _check_kinds(self) -> None:
        """Raises UserError for a choice that is nothing of its kind."""
        for name, kind in (("schedule", Schedule), ("adapt", Adapt | None)):
            if not isinstance(value := getattr(self, name), kind):
                raise UserError(f"{name} is {value!r}; give a farflung.outer.{name.capitalize()}")
        _check_role("topology", self.topology, Topology)
        _check_role("merge", self.merge, Merge)
        for name, known in (("averaging", get_args(Way)), ("fuse", get_args(Fuse))):
            if (value := getattr(self, name)) not in known:
                raise UserError(f"{name} is {value!r}; choose one of {', '.join(known)}")
        if not (self.outer is None or callable(self.outer)):
            raise UserError(f"outer is {self.outer!r}; give what makes an optimizer, such as torch.optim.SGD")

    @property
    def exchanges(self) -> bool:
        """Whether replicas ever exchange anything."""
        return self.outer is None or self.schedule.every is not None

    @property
    def sends_more(self) -> bool:
        """Whether what goes along with its rounds exchanges more than their messages."""
        return any(companion.sends_more for companion in self.companions)

    @property
    def needs_equal_anchors(self) -> bool:
        """Whether only replicas with the same anchors may average; else rounds draw them together."""
        plain = self.fuse == "mean" and not (self.merge.turn or self.merge.only_sent)
        return self.topology.identical and not (self.codec.traits.lossless and plain)

    def check_elastic(self) -> None:
        """Refuses what needs replicas to stay, for networks on which they come and go. Raises UserError."""
        if self.outer is None:
            raise UserError("this method needs all replicas at every step; on the internet use noloco or diloco")
        if self.dealing:
            raise UserError(
                "this method deals out one model among replicas that stay; on the internet use noloco or diloco"
            )
        faults = []
        if self.needs_equal_anchors and self.schedule.delay == self.schedule.every:
            faults.append(
                "this method needs equal anchors everywhere, and its rounds never pause, so that nobody could join; "
                "on the internet use nolocox, a smaller delay, or --codec float32"
            )
        if self.adapt and self.adapt.steps:
            faults.append(
                "the steps between rounds adapt, on which peers that come and go cannot agree; add --adapt False"
            )
        if self.schedule.final is not None:
            faults.append("on the internet rounds must be equally far apart; leave out every_final")
        if faults:
            raise UserError("; and ".join(faults))

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        network: Network,
        **options: Unpack[Options],
    ) -> Session:
        """Hooks the method to the steps of the model's optimizers, for use in a `with` statement. Raises UserError.

        Args:
            model: what is trained.
            optimizer: the inner optimizer, or several, in the order in which they step; a step of the last one is an
                inner step. Those that step within backward step from the last layer to the first.
            network: the replica's seat.
            options: see Options.
        """
        optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        chosen = completed(options)
        _check_given(model, optimizers)
        _check_role("the network given to attach", network, Network)
        self._check_network(network, chosen["robust"])
        self._check_weighting(network, chosen["weighting"])
        if chosen["clock"] and not self.schedule.by_clock:
            told = f"clock is given, but every is {self.schedule.every}"
            raise UserError(f"{told}; leave it out, or give every as a time, such as '30s'")
        self._look_at_inner(optimizers)
        reshard(model)
        check_shards(model, network)
        warn_of_gradients_between_replicas(model, network)
        usual = GradientLoop if self.outer is None else ElasticLoop if network.elastic else OuterLoop
        loop = self.dealing.session if self.dealing else usual
        undo = ExitStack()
        try:
            return loop(Setup(self, model, optimizers, network, chosen, undo))
        except BaseException:
            undo.close()
            raise

    def _check_network(self, network: Network, robust: str) -> None:
        if robust not in ROBUST:
            raise UserError(f"robust is {robust!r}; choose one of {', '.join(ROBUST)}")
        if network.elastic:
            self.check_elastic()
        elif self.quorum > 1:
            raise UserError(f"quorum is {self.quorum}, but only on the internet do peers stay away; leave it out")
        elif robust != "mean":
            raise UserError(f"robust is {robust!r}, but only peers on the internet need it; leave it out")

    def _check_weighting(self, network: Network, weighting: str | None) -> None:
        if weighting == "steps" and self.outer is None:
            raise UserError("weighting is 'steps', but this method averages gradients in each step; leave it out")
        if weighting == "steps" and self.schedule.delay and not network.elastic:
            raise UserError(
                f"weighting is 'steps', which members tell each other before a round, and delay is "
                f"{self.schedule.delay}; choose one of them"
            )

    def _look_at_inner(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Says so where the method would be another one."""
        for optimizer in optimizers:
            if self.needs_inner and not isinstance(optimizer, self.needs_inner):
                kind = self.needs_inner.__name__
                warnings.warn(
                    f"this method is published with {kind}, and is another one with {type(optimizer).__name__}; "
                    f"give attach farflung.inner.{kind}",
                    stacklevel=3,
                )


def _check_given(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    if not isinstance(model, nn.Module):
        raise UserError(f"attach was given a {type(model).__name__} for the model; give the model first")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UserError(f"attach was given a {type(optimizer).__name__} for an optimizer; give one of torch's kind")
    if not optimizers:
        raise UserError("attach was given no optimizer; give the model's")
    if len(set(map(id, optimizers))) < len(optimizers):
        raise UserError("attach was given an optimizer twice, so that its gradients would count twice; give each once")


def _check_role(what: str, given: Any, role: type) -> None:
    """Raises UserError for what lacks members of a protocol."""
    lacks = ", ".join(name for name in sorted(get_protocol_members(role)) if not hasattr(given, name))
    if lacks or isinstance(given, type):
        why = "it is a class; make one of it" if isinstance(given, type) else f"it lacks {lacks}"
        raise UserError(f"{what} is {given!r}, which is no farflung {role.__name__}: {why}")
