"""The rounds of replicas that each train some units of one model.

What all share is averaged, as in any round. Then the units of each group are dealt anew, and only those that change
hands travel, as they are: a unit has one holder, so there is nothing to average. Who gives a unit keeps a copy of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from farflung.codecs.packets import described
from farflung.errors import UserError
from farflung.hooks.digests import digest
from farflung.hooks.start import Fact
from farflung.networks import Group, PeerLostError
from farflung.networks.base import packet_of, seats_of, that_deals, words_of
from farflung.outer import Outcome, OuterLoop
from farflung.outer.exchange import Exchange
from farflung.outer.outcomes import Result
from farflung.outer.round import PendingRound, Sync
from farflung.outer.setup import Setup
from farflung.subnets.assembling import assemble
from farflung.subnets.holdings import Holdings, first_holdings
from farflung.subnets.parts import Parts
from farflung.subnets.units import Pool

if TYPE_CHECKING:
    from farflung.subnets.dealing import DealtUnits


class SubnetLoop(OuterLoop):
    """An OuterLoop of the parts that all share, whose rounds deal out the rest.

    From attach on the model is narrow: it has this replica's units only. When the rounds end it is whole again, with
    noughts for others' units, and with `finish(average_weights=True)` it has them all.
    """

    def __init__(self, setup: Setup, dealing: DealtUnits) -> None:
        network, schedule = setup.network, setup.method.schedule
        if network.islands:
            raise UserError("units are dealt among replicas of one process each; leave out stages and shards")
        if schedule.delay or schedule.fragments > 1:
            raise UserError(f"units change hands when a round ends, and yet {schedule} overlaps rounds; leave that out")
        everyone = seats_of(network)
        self._dealing, self._deals = dealing, that_deals(network, "this method")
        self._pools = dealing.pools(setup.model, len(everyone))
        _refuse_frozen(self._pools, setup.model)
        self._holdings = first_holdings([pool.units for pool in self._pools], everyone, dealing.seed)
        self._groups: list[Group] = []
        super().__init__(setup)
        device = torch.device(given) if (given := setup.options["outer_device"]) else None
        self._parts = Parts(setup.model, self._pools, device)
        self._parts.hold(self._holdings.of(network.rank))
        self.undo.callback(self._parts.end)
        self._forget_moments()
        self.averages.settle = self.inherit

    def inherit(self, members: Group) -> None:
        """Takes the units that others than some members held, where this one keeps them; the model's shapes are whole.

        On some networks the dead stay members, so that who is left shows only when the members meet.
        """
        if (left := self._holdings.among(members)) != self._holdings:
            self._parts.widen_with(left.of(self.network.rank))

    def _exchanged(self) -> Mapping[str, nn.Parameter]:
        dealt = {name for pool in self._pools for name in pool.cuts}
        return {name: one for name, one in super()._exchanged().items() if name not in dealt}

    def _group(self, sync: Sync[Tensor]) -> Group:
        self._groups = self.method.topology.groups(self.network.members(), sync.label)
        return super()._group(sync)

    def _fault(self, sync: Sync[Tensor]) -> str:
        if not self._parts.sound():
            self.spoil("the weights are not finite")
        if fault := super()._fault(sync):
            self._parts.restore()
        return fault

    def _absorb(
        self, sync: Sync[Tensor], pending: PendingRound[Tensor, Exchange], result: Result, starts: bool
    ) -> None:
        super()._absorb(sync, pending, result, starts)
        self._parts.note()
        before = self._holdings.among(self.network.members())
        later = before.dealt(self._groups, self._dealing.seed, f"round {pending.round}")
        self._swap(pending, result, before, later)
        self._holdings = later
        self._parts.hold(later.of(self.network.rank))
        self._forget_moments()

    def _forget_moments(self) -> None:
        """Has the inner optimizer's state of the units start anew: other ones were held when it was made."""
        for optimizer in self.trained.optimizers:
            for parameter in self._parts.named.values():
                optimizer.state.pop(parameter, None)

    def _swap(self, pending: PendingRound[Tensor, Exchange], result: Result, before: Holdings, later: Holdings) -> None:
        """Gives others their new units, and takes those that come here; without them, older copies do."""
        own, others = self.network.rank, [rank for rank in pending.group if rank != self.network.rank]
        agreed = packet_of(before.digest())
        packets = {rank: torch.cat([agreed, self._parts.values(before.moving(later, own, rank))]) for rank in others}
        key = f"{self._round_key(pending.fragment, pending.round)}, units"
        try:
            with self.departures.watched(pending.group, pending.fragment, pending.round):
                came = self._deals.all_to_all(packets, pending.group, key).wait(self.deadline_s)
        except PeerLostError as lost:
            result.note(Outcome.PEER_LOST, str(lost))
            came = {rank: packet for rank, packet in lost.delivered.items() if rank != own}
        for rank, packet in came.items():
            if words_of(packet[: len(agreed)]) != before.digest():
                raise UserError(
                    f"replica {rank} has lost others at another time, and knows other holders of the units than "
                    f"replica {own}; start the run again from its last checkpoint"
                )
            self._parts.learn(before.moving(later, rank, own), packet[len(agreed) :])

    def _settle_at_end(self) -> None:
        super()._settle_at_end()
        if not self._parts.sound():
            self._parts.restore()
        left = self._holdings.among(self.network.members())
        if left != self._holdings:  # units of those who are lost, as they are known here
            self._parts.note()
            self._parts.hold(left.of(self.network.rank))

    def finish(self, average_weights: bool = False) -> None:
        """See Session; with `average_weights` all replicas end with the whole model, branches unscaled."""
        super().finish(average_weights)
        if average_weights:
            assemble(dict(self.trained.model.named_parameters()), self._pools, len(self.averages.shared_by))

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """See Session: the model is whole, branches unscaled."""
        with self._parts.whole() as units, super().averaged_weights():
            assemble(units, self._pools, len(self.averages.shared_by))
            yield

    def _facts(self) -> list[Fact]:
        known = digest(list(self._parts.known.values())).tolist()
        return [*super()._facts(), Fact("weights of the units", (str(known),))]

    def choices(self) -> dict[str, str]:
        """See Session."""
        return {**super().choices(), "dealing": described(self._dealing)}

    def state_dict(self) -> dict[str, Any]:
        """See Session; with the units that are held, and what is known of others."""
        holdings = {"holders": self._holdings.holders, "givers": self._holdings.givers}
        return {**super().state_dict(), "holdings": holdings, "units": self._parts.state_dict()}

    def _check_state(self, state: dict[str, Any]) -> None:
        super()._check_state(state)
        dealt = {rank for pool in state["holdings"]["holders"] for rank in pool}
        if strange := sorted({*self.network.members()} - dealt):
            raise UserError(
                f"this state is of replicas {', '.join(map(str, sorted(dealt)))}, whose units nobody has dealt to "
                f"replica {', '.join(map(str, strange))}; go on with as many replicas"
            )

    @torch.no_grad()
    def _load(self, state: dict[str, Any]) -> None:
        super()._load(state)
        holders, givers = (tuple(map(tuple, state["holdings"][name])) for name in ("holders", "givers"))
        self._holdings = Holdings(holders, givers)
        self._parts.hold(self._holdings.of(self.network.rank))
        self._parts.load_state_dict(state["units"])


def _refuse_frozen(pools: Sequence[Pool], model: nn.Module) -> None:
    """Refuses layers with frozen weights: replicas compare those, and hold other layers. Raises UserError."""
    for name in (name for pool in pools if pool.modules for name in pool.cuts):
        if not model.get_parameter(name).requires_grad:
            raise UserError(f"{name} is frozen, but layers are dealt whole; train it, too, or choose method ist")
