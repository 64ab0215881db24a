"""Tables of embeddings that replicas hold together, each table at one of them (model parallelism)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from farflung.embeddings.crossings import Asked, Bags, Crossing, DistinctRows
from farflung.errors import UserError
from farflung.networks import Network
from farflung.networks.base import Packets, packet_of, that_deals

NOTHING = packet_of(b"-")
"""Goes to who owns no tables, or comes from there."""


class ShardedTables(nn.Module):
    """Tables dealt to the replicas, so that each holds and trains only its own, and looks rows up in all of them.

    The largest table goes to the replica with the least. Each forward pass, and each backward pass, is an exchange of
    all replicas, which are those of the network when it is made: they call both equally often, and in the same order.
    A table's gradient is the mean over the replicas of their losses' gradients, as averaged gradients of a whole copy
    would be; so an optimizer for `parameters()` goes beside the method that averages the rest of the model, and the
    method is attached to that rest alone. Own rows never cross, and are exact.

    Args:
        tables: of sums or means, all of one width; alike on all replicas, where they are not to be on the meta device.
        network: of the replicas.
        crossing: how rows and gradients travel.
        deadline_s: how long others are waited for, in seconds.

    Raises UserError for tables that it cannot divide, and for bags that do not fit them; and out of forward and
    backward passes PeerLostError, after which the others' tables are gone: go on from a checkpoint.
    """

    def __init__(
        self,
        tables: Sequence[nn.EmbeddingBag],
        network: Network,
        crossing: Crossing | None = None,
        deadline_s: float = 120.0,
    ) -> None:
        super().__init__()
        _check(tables)
        self.network = that_deals(network, "ShardedTables")
        self.crossing, self.deadline_s = crossing or DistinctRows(), deadline_s
        self.group = network.members()
        self.owners = _owners(tables, self.group)
        self.rows = [table.num_embeddings for table in tables]
        mine = {number: table for number, table in enumerate(tables) if self.owners[number] == network.rank}
        self.own = nn.ModuleDict({str(number): table for number, table in mine.items()})
        self._outlines = [_outline(table) for table in tables]
        self._key = f"tables {network.attachment()}"
        self._lookups = 0
        # Its gradient has nowhere to go; a replica that owns no table calls backward for it.
        self._starter = torch.zeros((), requires_grad=True)

    def owned_by(self, rank: int) -> list[int]:
        """The numbers of the tables that a replica holds."""
        return [number for number, owner in enumerate(self.owners) if owner == rank]

    def forward(self, bags: Sequence[Bags]) -> Tensor:
        """(samples, tables, width) sums or means of the rows of each sample, of the bags of each table in order."""
        self._check_fit(bags)
        self._lookups += 1
        lookup = _Lookup(self, bags, f"{self._key}, lookup {self._lookups}")
        activations = _Cross.apply(lookup, self._starter, *self.weights())  # type: ignore[no-untyped-call]
        pooled = []
        for owner, found in zip(lookup.asked, activations, strict=True):
            tables = [self._outlines[number] for number in self.owned_by(owner)]
            pooled.append(self.crossing.pool(found, lookup.asked[owner].bags, tables))
        places = torch.tensor([number for owner in lookup.asked for number in self.owned_by(owner)])
        return torch.cat(pooled, dim=1)[:, places.argsort()]

    def weights(self) -> list[Tensor]:
        """Those of the tables here, in order."""
        return [table.weight for table in self.tables_here()]

    def tables_here(self) -> list[nn.EmbeddingBag]:
        """The tables here, in order."""
        return [table for table in self.own.values() if isinstance(table, nn.EmbeddingBag)]

    @torch.no_grad()
    def whole_weights(self) -> list[Tensor]:
        """The weights of all tables, on every replica, which all call it: to evaluate and to keep. On the CPU."""
        self._lookups += 1
        own = [weight.detach().cpu().float().reshape(-1) for weight in self.weights()]
        packet = torch.cat(own).view(torch.uint8) if own else NOTHING
        pending = self.network.exchange(packet, self.group, f"{self._key}, whole weights {self._lookups}")
        whole: dict[int, Tensor] = {}
        for owner, packet in pending.wait(self.deadline_s).items():
            shapes = {number: self._outlines[number].weight.shape for number in self.owned_by(owner)}
            if shapes:
                flat = packet.cpu().view(torch.float32).split([shape.numel() for shape in shapes.values()])
                whole |= {n: part.view(shape) for (n, shape), part in zip(shapes.items(), flat, strict=True)}
        return [whole[number] for number in range(len(self.owners))]

    def _check_fit(self, bags: Sequence[Bags]) -> None:
        if len(bags) != len(self.rows):
            raise UserError(f"there are {len(self.rows)} tables, and bags for {len(bags)}; give bags for each table")
        if wrong := [one for one in bags if not isinstance(one, Bags)]:
            kind = type(wrong[0]).__name__
            raise UserError(f"bags of a table are a {kind}; give farflung.embeddings.Bags(ids, offsets)")
        if len({one.offsets.numel() for one in bags}) > 1:
            raise UserError("bags of one batch are of unequal numbers of samples; give each sample a bag in each table")
        for number, (one, rows) in enumerate(zip(bags, self.rows, strict=True)):
            _check_bags(number, one)
            least, most = (int(end) for end in one.ids.aminmax()) if one.ids.numel() else (0, 0)
            if least < 0 or most >= rows:
                asked = least if least < 0 else most
                raise UserError(f"table {number} has rows 0 to {rows - 1}, and is asked for {asked}; make it larger")


class _Lookup:
    """One forward pass, and what its backward pass needs."""

    def __init__(self, tables: ShardedTables, bags: Sequence[Bags], key: str) -> None:
        self.tables, self.key = tables, key
        owned = {owner: tables.owned_by(owner) for owner in tables.group}
        self.asked: dict[int, Asked] = {
            owner: tables.crossing.ask([bags[n] for n in numbers], [tables._outlines[n] for n in numbers])
            for owner, numbers in owned.items()
            if numbers
        }
        """Of each owner of tables."""
        self._device = bags[0].ids.device
        self._learns = torch.is_grad_enabled()
        self._leaves: list[Tensor] = []
        self._answers: dict[int, Tensor] = {}
        self._sent: dict[int, Any] = {}
        self._received: dict[int, Any] = {}
        self._gradients = 0

    def forward(self, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The activations that each owner has found."""
        rank, crossing = self.tables.network.rank, self.tables.crossing
        requests = self._swap({owner: asked.packet for owner, asked in self.asked.items()}, "asked for")
        answers = {}
        if weights:
            with torch.set_grad_enabled(self._learns):
                self._leaves = [weight.detach().requires_grad_(self._learns) for weight in weights]
                for asker, packet in requests.items():
                    self._answers[asker] = crossing.look_up(packet, self.tables.tables_here(), self._leaves)
            for asker, answer in self._answers.items():
                if asker != rank:
                    answers[asker], self._sent[asker] = crossing.send(answer.detach())
        arrived = self._swap(answers, "found")
        found = []
        for owner, asked in self.asked.items():
            if owner == rank:
                found.append(self._answers[rank].detach())
                continue
            like = torch.empty(asked.shape, device=self._device)
            activations, self._received[owner] = crossing.receive(arrived[owner], like)
            found.append(activations)
        return tuple(found)

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of the own weights, by the mean of the replicas' losses."""
        rank, crossing = self.tables.network.rank, self.tables.crossing
        own = dict(zip(self.asked, gradients, strict=True))
        packets = {
            owner: crossing.send_gradient(gradient, self._received[owner])
            for owner, gradient in own.items()
            if owner != rank
        }
        self._gradients += 1
        arrived = self._swap(packets, f"gradient {self._gradients}")
        if not self._leaves:
            return []
        back = []
        for asker, answer in self._answers.items():
            if asker == rank:
                back.append(own[rank])
            else:
                back.append(crossing.receive_gradient(arrived[asker], answer.detach(), self._sent[asker]))
        means = [gradient / len(self.tables.group) for gradient in back]
        # Kept for another backward pass through the same forward pass, as a loop may ask for.
        return list(torch.autograd.grad(list(self._answers.values()), self._leaves, means, retain_graph=True))

    def _swap(self, packets: Packets, what: str) -> Packets:
        """Sends the packets and yields those that came, by rank; one to itself stays here."""
        network = self.tables.network
        group = self.tables.group
        going = {peer: packets.get(peer, NOTHING) for peer in group if peer != network.rank}
        came = network.all_to_all(going, group, f"{self.key}, {what}").wait(self.tables.deadline_s)
        kept = {network.rank: packets[network.rank]} if network.rank in packets else {}
        return dict(sorted((came | kept).items()))


class _Cross(Function):
    """The activations as a function of the weights here, of all replicas' weights by way of the network."""

    @staticmethod
    def forward(ctx: Any, lookup: _Lookup, starter: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.lookup = lookup
        return lookup.forward(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.lookup.backward(gradients)


def _owners(tables: Sequence[nn.EmbeddingBag], group: Sequence[int]) -> list[int]:
    """The owner of each table: all get about as many values."""
    loads = dict.fromkeys(group, 0)
    owners = dict.fromkeys(range(len(tables)), 0)
    for number in sorted(owners, key=lambda number: -tables[number].num_embeddings):
        owners[number] = min(loads, key=loads.__getitem__)
        loads[owners[number]] += tables[number].num_embeddings
    return list(owners.values())


def _outline(table: nn.EmbeddingBag) -> nn.EmbeddingBag:
    """The table without memory for its rows."""
    rows, width = table.num_embeddings, table.embedding_dim
    return nn.EmbeddingBag(rows, width, mode=table.mode, sparse=table.sparse, device="meta")


def _check_bags(number: int, bags: Bags) -> None:
    """Raises UserError for what nn.EmbeddingBag would not take, before it is on its way."""
    for name, given in bags._asdict().items():
        if given.dtype not in (torch.int64, torch.int32) or given.dim() != 1:
            shape = f"{tuple(given.shape)} of {given.dtype}"
            raise UserError(f"{name} of table {number} are {shape}; give whole numbers, (n,) of torch.int64")
    ids, offsets = bags
    end = offsets.new_tensor([ids.numel()])
    if int(torch.cat([offsets, end])[0]) != 0 or bool((offsets.diff(append=end) < 0).any()):
        raise UserError(
            f"offsets of table {number} do not rise from 0 to its {ids.numel()} ids; say where each sample's begin"
        )


def _check(tables: Sequence[nn.EmbeddingBag]) -> None:
    """Raises UserError for tables that cannot be divided."""
    if not tables:
        raise UserError("there are no tables to deal out; give at least one")
    if len({id(table) for table in tables}) < len(tables):
        raise UserError("one table is given more than once, and would become several; give it once, with all its bags")
    for number, table in enumerate(tables):
        if not isinstance(table, nn.EmbeddingBag):
            raise UserError(f"table {number} is a {type(table).__name__}; make it an nn.EmbeddingBag")
        if table.embedding_dim != tables[0].embedding_dim:
            widths = f"{table.embedding_dim} wide, and table 0 {tables[0].embedding_dim}"
            raise UserError(f"table {number} is {widths}; give them one width")
        if table.weight.dtype != torch.float32:
            raise UserError(f"table {number} is of {table.weight.dtype}; make it float32")
        if table.mode not in ("sum", "mean"):
            raise UserError(f"table {number} has mode={table.mode!r}; choose sum or mean")
        given = {
            name: getattr(table, name)
            for name in ("max_norm", "padding_idx", "scale_grad_by_freq", "include_last_offset")
        }
        if told := [f"{name}={value}" for name, value in given.items() if value is not None and value is not False]:
            raise UserError(f"table {number} has {told[0]}, which a divided table cannot have; leave it out")
