"""Only the low-order part of each value, for receivers who hold nearly the same themselves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from farflung.codecs.base import Name, Traits
from farflung.codecs.bits import pack_bits, unpack_bits
from farflung.codecs.chain import Transform
from farflung.codecs.dither import Dither
from farflung.codecs.flat import count_of, expected, flatten, row_pieces, rows
from farflung.codecs.grid import Grid, checked, counted, valued
from farflung.codecs.packets import Packet, PacketError
from farflung.codecs.ranges import RangeTracker
from farflung.codecs.values import norm
from farflung.errors import UserError
from farflung.renamed import Formerly, renamed_argument

_NUMBERS_BYTES = 32
"""What four int64 take."""


@renamed_argument("turns", "round_robin")
@dataclass
class Modulo(Transform):
    """Sends round(u / s) mod 2^bits; the receiver takes the value congruent to it that is nearest its own.

        s = R / 2^bits;   k = floor(u / s + d);   sent: k mod 2^bits;   u' = s · (k + 1/2 - d)

    where d is dither that both know, so that u' errs by at most s / 2, and not always to the same side (Moniqua,
    arXiv 2002.11787). The error is in proportion to R, which need only exceed twice the distance between sender and
    receiver, and not to the values; the sender chooses it for each block (see RangeTracker). Where the two are farther
    apart, the receiver would take a wrong value. A byte of checksum of the part of k that was not sent tells; it then
    keeps its own values of the block, and doubles R for it.

    No block counts for one of two alone: one would be drawn to the other, not the other to it, and their mean would
    move. So a receiver takes the value that is nearest u' of its own last message. Either of the two then knows both
    u', and where they are too far apart for one of both R, each sees it, and both keep their own values.

    It must be a codec's only transform, since it needs the receiver's own values.

    Args:
        bits: 2 to 8. With 1, equal values could be R / 2 apart as sent.
        block: values that share R, a multiple of 8.
        margin: room for distances to grow within a round.
        round_robin: only every so many-th block travels in a round, others in the next; receivers keep their own.
    """

    bits: int = 4
    block: int = 256
    margin: float = 2.0
    round_robin: int = 1
    turns = Formerly("round_robin")
    _tracker: RangeTracker = field(init=False, repr=False, compare=False)
    _every: int = field(init=False, repr=False, compare=False)
    _round: int = field(default=0, init=False, repr=False, compare=False)
    _sent: tuple[int, int, int] | None = field(default=None, init=False, repr=False, compare=False)
    _dither: Dither = field(default_factory=Dither, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise UserError(f"Modulo has bits={self.bits}; choose 2 to 8")
        if self.block < 8 or self.block % 8:
            raise UserError(f"Modulo has block={self.block}; choose a multiple of 8")
        if self.round_robin < 1:
            raise UserError(f"Modulo has round_robin={self.round_robin}; choose at least 1")
        self._tracker = RangeTracker(self.bits, self.block, self.margin)
        self._every = self.round_robin

    @property
    def traits(self) -> Traits:
        """See Codec: packets of a round robin differ in length by a block."""
        return Traits(needs_receiver=True, composable=False, fixed_length=self._every == 1, remembers=True)

    def outline(self, like: Sequence[Tensor]) -> list[Tensor]:
        """See Transform."""
        blocks = -(-count_of(like) // (self.block * self._every))
        sizes = blocks * self.block * self.bits // 8, 2 * blocks, blocks, _NUMBERS_BYTES
        return [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes]

    def state_nbytes(self, like: Sequence[Tensor]) -> int:
        """See Codec."""
        return self._tracker.state_nbytes(-(-count_of(like) // self.block))

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Packed codes, ranges and checks of this round's blocks; which these are, and what dither was taken."""
        flat, chosen = flatten(tensors), slice(self._round % self._every, None, self._every)
        self._sent = chosen.start, chosen.step, self._dither.count
        sent_ranges = self._tracker.next(flat)[chosen].bfloat16().clone(memory_format=torch.contiguous_format)
        steps = Grid(sent_ranges, self.bits).steps
        codes = torch.empty(len(steps), self.block * self.bits // 8, dtype=torch.uint8, device=flat.device)
        checks = torch.empty(len(steps), dtype=torch.uint8, device=flat.device)
        numbers = torch.tensor([chosen.start, chosen.step, self._dither.seed, self._dither.count])
        for u, step, code, check in self._pieces(flat, chosen, steps, codes, checks):
            k = counted(u, step, self._dither.take(u)).int()
            # Casts to bytes keep the low bits, and bytes are a quarter of the work.
            code.copy_(pack_bits(k.to(torch.int8).view(torch.uint8) & ((1 << self.bits) - 1), self.bits))
            check.copy_(checked(k.bitwise_right_shift_(self.bits)))
        self._round += 1
        return [codes, sent_ranges.view(torch.uint8), checks, numbers.view(torch.uint8).to(flat.device)]

    def inverse(self, parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """See Transform. `like` are the receiver's own values, of which its last message was."""
        flat = flatten(like)
        out = flat.new_empty(-(-flat.numel() // self.block), self.block)
        rows_now, dither, codes, sent_ranges, checks = self._read(parts, len(out))
        if rows_now.step > 1:
            out.view(-1)[: flat.numel()] = flat  # blocks that have not travelled stay as they are
        grid = Grid(sent_ranges, self.bits)
        said, own_errors, reach = self._said(flat, rows_now, len(out))
        farthest, surely = torch.empty(2, len(sent_ranges), dtype=torch.float32, device=flat.device)
        numbers = grid.zeros, grid.steps, grid.errors, own_errors, reach.minimum(grid.reach), farthest, surely
        pieces = self._pieces(flat, rows_now, codes, checks, *numbers, out[rows_now])
        span = 2.0**self.bits
        for here, piece in zip(said, pieces, strict=True):
            own, code, check, zero, step, error, own_error, near, far, sure, found = piece
            noise = dither.take(own)
            found.copy_(unpack_bits(code, self.bits))
            high = (here / step[:, None]).add_(noise).sub_(found).sub_(0.5).div_(span).round_()
            readable = (checked(high.int()) == check) | zero
            valued(found.add_(high, alpha=span), step, noise)
            if grid.any_zeros:
                found.masked_fill_(zero[:, None], 0.0)
            distance = torch.sub(here, found, out=high).abs_().amax(1)
            far.copy_(torch.where(readable, (distance - own_error).maximum(error), step * (span / self.margin)))
            # The coarse steps of one who has just come look like a distance, which is gone the next time.
            sure.copy_(torch.where(readable & (far < 2 * error), far - error, far))
            taken = readable & (distance < near)
            if found.device.type != "cpu" or not bool(taken.all()):  # another device would have to wait
                torch.where(taken[:, None], found, own, out=found)
        self._tracker.saw(rows_now, farthest, surely, len(out))
        return list(torch.split(out.view(-1)[: flat.numel()], [tensor.numel() for tensor in like]))

    def _said(self, flat: Tensor, chosen: slice, count: int) -> tuple[Iterable[Tensor], Tensor, Tensor]:
        """The chosen blocks as the last message says them, piece by piece; by how much that errs; how far it is read.

        What was not in the message is read nowhere. Who has sent none need not keep in step with anybody.
        """
        none = torch.zeros(count, dtype=torch.float32, device=flat.device)
        if self._sent is None or self._tracker.ranges is None or len(self._tracker.ranges) != count:
            return rows(flat, self.block, chosen), none[chosen], none[chosen] + math.inf
        first, every, taken = self._sent
        mine = slice(first, None, every)
        grid = Grid(self._tracker.ranges[mine].bfloat16(), self.bits)
        said = self._read_back(flat, mine, grid, Dither(self._dither.seed, taken))
        if mine == chosen:
            return said, grid.errors, grid.reach
        # Each sends other blocks, as where adaptation has gone different ways.
        values, errors, reach = torch.cat(rows(flat, self.block)), none.clone(), none.clone()
        values[mine], errors[mine], reach[mine] = torch.cat(list(said)), grid.errors, grid.reach
        return row_pieces(values[chosen], self.block), errors[chosen], reach[chosen]

    def _read_back(self, flat: Tensor, chosen: slice, grid: Grid, dither: Dither) -> Iterator[Tensor]:
        """Values as a message says them, piece by piece."""
        for u, step, zero in self._pieces(flat, chosen, grid.steps, grid.zeros):
            noise = dither.take(u)
            said = valued(counted(u, step, noise), step, noise)
            yield said.masked_fill_(zero[:, None], 0.0) if grid.any_zeros else said

    def _read(self, parts: Sequence[Tensor], blocks: int) -> tuple[slice, Dither, Tensor, Tensor, Tensor]:
        """Which blocks have travelled, the dither, and the blocks' codes, ranges and checks."""
        if len(parts) != 4 or parts[3].nbytes != _NUMBERS_BYTES:
            raise PacketError("packet does not hold codes, ranges, checks and four numbers")
        first, every, seed, count = parts[3].view(torch.int64).tolist()
        if not 0 <= first < every:
            raise PacketError(f"packet has block {first} of every {every}")
        sent, width = len(range(first, blocks, every)), self.block * self.bits // 8
        sizes = sent * width, 2 * sent, sent, _NUMBERS_BYTES
        codes, ranges, checks, _ = expected(parts, *((torch.uint8, size) for size in sizes))
        ranges = ranges.view(torch.bfloat16)
        if not bool(((ranges >= 0) & ~torch.isinf(ranges)).all()):
            raise PacketError("packet has ranges that are not positive numbers")
        return slice(first, None, every), Dither(seed, count), codes.view(sent, width), ranges, checks

    def _pieces(self, flat: Tensor, chosen: slice, *tensors: Tensor) -> Any:
        """Chosen rows of a flat tensor, and tensors with an entry for each of these, piece by piece."""
        cut = (row_pieces(tensor, self.block) for tensor in tensors)
        return zip(rows(flat, self.block, chosen), *cut, strict=True)

    def error_of(self, packet: Packet, tensors: Sequence[Tensor]) -> float:
        """See Codec; as if every value erred evenly by up to half a step, which spares a decoding."""
        ranges = self._tracker.ranges
        if ranges is None or not len(ranges):
            return 0.0
        sizes = math.sqrt(self.block / 12) / 2.0**self.bits
        return sizes * norm([ranges]) / max(norm([flatten(tensors)]), 1e-30)

    def state_dict(self) -> dict[str, Any]:
        """What is known of the blocks' ranges, which blocks travel, and how many random numbers have been taken."""
        return {
            "tracker": self._tracker.state_dict(),
            "every": self._every,
            "round": self._round,
            "sent": self._sent,
            "count": self._dither.count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Codec."""
        self._tracker.load_state_dict(state["tracker"])
        self._every, self._round = state["every"], state["round"]
        self._sent, self._dither.count = state["sent"], state["count"]

    def seed(self, seed: int) -> None:
        """See Codec."""
        self._dither.seed = seed

    def set_budget(self, share: float) -> None:
        """See Codec: fewer blocks a round, by halves: so all that one sends is among what another sends more of."""
        self._every = self.round_robin * 2 ** max(0, round(-math.log2(share)))

    def set_round(self, round: int) -> None:
        """See Codec: it says which blocks travel, so that a pair that has not met for long sends the same."""
        self._round = round

    @property
    def wants_reference(self) -> bool:
        """See Codec: before the first message, and as long as each brings more news than the last."""
        return self._tracker.news_grow

    def set_reference(self, tensors: Sequence[Tensor]) -> None:
        """See Codec: the first R is four times as far as this replica's message is from it, times `margin`."""
        self._tracker.reference = flatten(tensors)

    def set_change(self, tensors: Sequence[Tensor]) -> None:
        """See Codec: R is at least `margin` times twice the largest change in a block."""
        self._tracker.set_change(flatten(tensors))


NAME = Name(
    pattern=r"modulo(\d+)(?:x(\d+))?",
    make=lambda bits, blocks: Modulo(bits=int(bits), round_robin=int(blocks or 1)),
    examples=("modulo4", "modulo4x2"),
    travels="for gossip: the low 4 bits; the partner, whose values are close, knows the rest; `x2` sends every second "
    "block",
)
