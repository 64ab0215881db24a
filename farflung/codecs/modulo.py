"""Only the low-order part of each value, for receivers who hold nearly the same themselves."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from farflung.codecs.base import norm
from farflung.codecs.bits import pack_bits, unpack_bits
from farflung.codecs.dither import Dither
from farflung.codecs.flat import FlatStage, flatten, row_pieces, rows
from farflung.codecs.packets import Packet, PacketError
from farflung.config import UserError

_PRECISION = 2.0**-20
"""The finest step, relative to a block's largest value: beyond it float32 cannot count in steps."""

_KEPT = 0.9
"""How much of a distance is still expected a round later: who has sat out is far away, and one partner in a few has."""


@dataclass
class Modulo(FlatStage):
    """Sends round(u / s) mod 2^bits; the receiver takes the value congruent to it that is nearest its own.

        s = R / 2^bits;   k = floor(u / s + d);   sent: k mod 2^bits;   u' = s · (k + 1/2 - d)

    where d is dither that both know, so that u' errs by at most s / 2, and not always to the same side (Moniqua,
    arXiv 2002.11787). The error is in proportion to R, which need only exceed twice the distance between sender and
    receiver, and not to the values. R is chosen by the sender for each block: `margin` times twice the largest
    distance that it saw in the last round, or the largest change that it was told of, or a little less than R was.
    Where the two are farther apart, the receiver would take a wrong value. A byte of checksum of the part of k that
    was not sent tells; it then keeps its own values of the block, and doubles R for it.

    No block counts for one of two alone, or one would be drawn to the other and not the other to it, and the mean
    of both would move. So the receiver takes the value that is nearest its own last message, u' of its own: both know
    both of these, and where they are too far apart for one R, both see it and both keep their own values. It must be a
    codec's only stage, since it needs the receiver's own values.

    Args:
        bits: 2 to 8. With 1, what both know of each other's values would be coarser than R allows.
        block: values that share R, a multiple of 8.
        margin: room for distances to grow within a round.
        turns: only every so many-th block travels in a round, others in the next; receivers keep their own.
    """

    bits: int = 4
    block: int = 256
    margin: float = 2.0
    turns: int = 1
    _ranges: Tensor | None = field(default=None, init=False, repr=False, compare=False)
    _farthest: Tensor | None = field(default=None, init=False, repr=False, compare=False)
    _lately: Tensor | None = field(default=None, init=False, repr=False, compare=False)
    _expected: Tensor | None = field(default=None, init=False, repr=False, compare=False)
    _change: Tensor | None = field(default=None, init=False, repr=False, compare=False)
    _turns_now: int = field(default=0, init=False, repr=False, compare=False)
    _round: int = field(default=0, init=False, repr=False, compare=False)
    _sent: tuple[int, int, int] | None = field(default=None, init=False, repr=False, compare=False)
    _dither: Dither = field(default_factory=Dither, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise UserError(f"Modulo has bits={self.bits}; choose 2 to 8")
        if self.block < 8 or self.block % 8:
            raise UserError(f"Modulo has block={self.block}; choose a multiple of 8")
        if self.turns < 1:
            raise UserError(f"Modulo has turns={self.turns}; choose at least 1")
        self._turns_now = self.turns

    @property
    def needs_receiver(self) -> bool:
        """See Codec."""
        return True

    def compress(self, flat: Tensor) -> list[Tensor]:
        """Packed codes, ranges and checks of this turn's blocks; turn and turns, and what dither was taken."""
        ranges = self._ranges_for(flat)
        self._sent = self._round % self._turns_now, self._turns_now, self._dither.count
        turn = slice(self._sent[0], None, self._turns_now)
        sent_ranges = ranges[turn].bfloat16().clone(memory_format=torch.contiguous_format)
        steps = _steps(sent_ranges, self.bits)
        codes = torch.empty(len(steps), self.block * self.bits // 8, dtype=torch.uint8, device=flat.device)
        checks = torch.empty(len(steps), dtype=torch.uint8, device=flat.device)
        numbers = torch.tensor([self._sent[0], self._turns_now, self._dither.seed, self._dither.count])
        for u, step, code, check in self._pieces(flat, turn, steps, codes, checks):
            k = _counts(u, step, self._dither.take(u)).int()
            # Casts to bytes keep the low bits, and bytes are a quarter of the work.
            code.copy_(pack_bits(k.to(torch.int8).view(torch.uint8) & ((1 << self.bits) - 1), self.bits))
            check.copy_(_check(k.bitwise_right_shift_(self.bits)))
        self._ranges, self._farthest = ranges, None
        self._round += 1
        return [codes, sent_ranges.view(torch.uint8), checks, numbers.view(torch.uint8).to(flat.device)]

    def expand(self, parts: Sequence[Tensor], like: Sequence[Tensor]) -> Tensor:
        """See FlatStage. `like` are the receiver's own values, of which its last message was."""
        flat = flatten(like)
        out = flat.new_empty(-(-flat.numel() // self.block), self.block)
        rows_now, dither, codes, sent_ranges, checks = self._read(parts, len(out))
        if rows_now.step > 1:
            out.view(-1)[: flat.numel()] = flat  # blocks that are not on turn stay as they are
        steps = _steps(sent_ranges, self.bits)
        zeros = sent_ranges == 0  # only of blocks of zeros
        any_zeros = bool(zeros.any())
        farthest, surely = torch.empty(2, len(steps), device=flat.device)
        span = 2.0**self.bits
        said, blur, reach = self._said(flat, rows_now, len(out))
        reach = reach.minimum(_reach(sent_ranges, self.bits))
        pieces = self._pieces(flat, rows_now, zeros, steps, codes, checks, blur, reach, farthest, surely, out[rows_now])
        for here, (own, zero, step, code, check, off, most, far, sure, found) in zip(said, pieces, strict=True):
            noise = dither.take(own)
            found.copy_(unpack_bits(code, self.bits))
            high = (here / step[:, None]).add_(noise).sub_(found).sub_(0.5).div_(span).round_()
            readable = (_check(high.int()) == check) | zero
            _values(found.add_(high, alpha=span), step, noise)
            if any_zeros:
                found.masked_fill_(zero[:, None], 0.0)
            distance = torch.sub(here, found, out=high).abs_().amax(1)
            far.copy_(torch.where(readable, distance - off, step * (span / self.margin)))
            sure.copy_(torch.where(readable & (far < step), far - step / 2, far))
            taken = readable & (distance < most)
            if not bool(taken.all()):
                found[~taken] = own[~taken]
        self._remember(rows_now, farthest, surely, len(out))
        return out.view(-1)[: flat.numel()]

    def _said(self, flat: Tensor, chosen: slice, count: int) -> tuple[Iterable[Tensor], Tensor, Tensor]:
        """Own values of the chosen blocks as the last message says them, by how much these err, and how far they reach.

        What was not in the message reaches nobody. Who has sent none is in step with all.
        """
        none = torch.zeros(count, device=flat.device)
        if self._sent is None or self._ranges is None or len(self._ranges) != count:
            return rows(flat, self.block, chosen), none[chosen], none[chosen] + math.inf
        turn, turns, taken = self._sent
        mine, dither = slice(turn, None, turns), Dither(self._dither.seed, taken)
        ranges = self._ranges[mine].bfloat16()
        steps = _steps(ranges, self.bits)
        said = (
            _values(_counts(u, step, noise), step, noise).masked_fill_(zero[:, None], 0.0)
            for u, step, zero in self._pieces(flat, mine, steps, ranges == 0)
            for noise in [dither.take(u)]
        )
        off, reach = steps / 2, _reach(ranges, self.bits)
        if mine == chosen:
            return said, off, reach
        # Each has turns of its own, as where adaptation has gone different ways.
        values = torch.cat(list(rows(flat, self.block)))
        values[mine], errors, reaches = torch.cat(list(said)), none.clone(), none
        errors[mine], reaches[mine] = off, reach
        return row_pieces(values[chosen], self.block), errors[chosen], reaches[chosen]

    def _read(self, parts: Sequence[Tensor], blocks: int) -> tuple[slice, Dither, Tensor, Tensor, Tensor]:
        """Which blocks are on turn, the dither, and the blocks' codes, ranges and checks."""
        if len(parts) != 4 or any(part.dtype != torch.uint8 for part in parts) or parts[3].numel() != 32:
            raise PacketError("packet does not hold codes, ranges, checks and four numbers")
        turn, turns, seed, count = parts[3].view(torch.int64).tolist()
        if not 0 <= turn < turns:
            raise PacketError(f"packet has turn {turn} of {turns}")
        on_turn = len(range(turn, blocks, turns))
        sizes = [part.numel() for part in parts[:3]]
        if sizes != [on_turn * self.block * self.bits // 8, 2 * on_turn, on_turn]:
            raise PacketError(f"packet has parts of {sizes} bytes for {on_turn} blocks")
        ranges = parts[1].view(torch.bfloat16)
        if not bool(((ranges >= 0) & ~torch.isinf(ranges)).all()):
            raise PacketError("packet has ranges that are not positive numbers")
        return (
            slice(turn, None, turns),
            Dither(seed, count),
            parts[0].view(on_turn, self.block * self.bits // 8),
            ranges,
            parts[2],
        )

    def _ranges_for(self, flat: Tensor) -> Tensor:
        """R for each block: from the distances seen since the last message, else as it was."""
        largest = self._largest(flat)
        if self._ranges is None or len(self._ranges) != len(largest):
            # Nobody has been heard yet. Each is as far from what was expected as this replica, at most, it is hoped.
            news = largest if self._expected is None else self._largest(flat - self._expected)
            self._expected = None
            ranges = news * (4 * self.margin)
        elif self._farthest is None:
            ranges = self._ranges
        else:
            assert self._lately is not None
            distances = self._farthest.maximum(self._lately)
            heard = self._farthest >= 0
            ranges = torch.where(heard, 2 * self.margin * distances, self._ranges)
            self._lately = torch.where(heard, _KEPT * self._lately, self._lately)
        if self._change is not None and len(self._change) == len(ranges):
            ranges = ranges.maximum(2 * self.margin * self._change)
        self._change = None
        ranges = ranges.maximum(largest * (_PRECISION * 2.0**self.bits))
        return ranges.clamp(max=torch.finfo(torch.bfloat16).max)

    def _remember(self, rows_now: slice, distances: Tensor, surely: Tensor, count: int) -> None:
        """Keeps the largest distance of each block for the next message; below 0 for what has not been heard."""
        if self._farthest is None or len(self._farthest) != count:
            self._farthest = torch.full((count,), -1.0, device=distances.device)
        if self._lately is None or len(self._lately) != count:
            self._lately = torch.zeros(count, device=distances.device)
        self._farthest[rows_now] = self._farthest[rows_now].maximum(distances)
        self._lately[rows_now] = self._lately[rows_now].maximum(surely)

    def _largest(self, flat: Tensor) -> Tensor:
        """The largest magnitude of each block."""
        return torch.cat([piece.abs().amax(1) for piece in rows(flat, self.block)])

    def _pieces(self, flat: Tensor, chosen: slice, *tensors: Tensor) -> Any:
        """Chosen rows of a flat tensor, and tensors with an entry for each of these, piece by piece."""
        cut = (row_pieces(tensor, self.block) for tensor in tensors)
        return zip(rows(flat, self.block, chosen), *cut, strict=True)

    def error_of(self, packet: Packet, tensors: Sequence[Tensor]) -> float:
        """See Codec; as if every value erred evenly by up to half a step, which spares a decoding."""
        ranges = self._ranges
        if ranges is None or not len(ranges):
            return 0.0
        sizes = math.sqrt(self.block / 12) / 2.0**self.bits
        return sizes * norm([ranges]) / max(norm([flatten(tensors)]), 1e-30)

    def state_dict(self) -> dict[str, Any]:
        """Ranges and distances of the blocks, whose turn it is, and how many random numbers have been taken."""
        return {
            "ranges": self._ranges,
            "farthest": self._farthest,
            "lately": self._lately,
            "expected": self._expected,
            "round": self._round,
            "sent": self._sent,
            "turns": self._turns_now,
            "count": self._dither.count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Codec."""
        self._ranges, self._farthest, self._lately = state["ranges"], state["farthest"], state["lately"]
        self._expected = state["expected"]
        self._round, self._sent = state["round"], state["sent"]
        self._turns_now, self._dither.count = state["turns"], state["count"]

    def seed(self, seed: int) -> None:
        """See Codec."""
        self._dither.seed = seed

    def shrink_to(self, share: float) -> None:
        """See Codec: fewer blocks a round, by halves: so all that one sends is among what another sends more of."""
        self._turns_now = self.turns * 2 ** max(0, round(-math.log2(share)))

    def turn_to(self, round: int) -> None:
        """See Codec: it says which blocks are on turn, so that a pair that has not met for long sends the same."""
        self._round = round

    def expect(self, tensors: Sequence[Tensor]) -> None:
        """See Codec: the first R is four times as far as this replica's message is from it, times `margin`."""
        self._expected = flatten(tensors)

    def expect_change(self, tensors: Sequence[Tensor]) -> None:
        """See Codec: R is at least `margin` times twice the largest change in a block."""
        self._change = self._largest(flatten(tensors))


def _steps(ranges: Tensor, bits: int) -> Tensor:
    steps = ranges.float() / 2.0**bits
    return torch.where(steps > 0, steps, 1.0)


def _reach(ranges: Tensor, bits: int) -> Tensor:
    """How far values may be from a message's, to be read for sure: half of R, less what float32 may round."""
    return torch.where(ranges > 0, ranges.float() * (0.5 - 0.125 / 2.0**bits), math.inf)


def _counts(u: Tensor, step: Tensor, noise: Tensor) -> Tensor:
    """k = floor(u / s + d)."""
    return (u / step[:, None]).add_(noise).floor_()


def _values(k: Tensor, step: Tensor, noise: Tensor) -> Tensor:
    """u' = s · (k + 1/2 - d), in the memory of k; to the bit the same for sender and receiver."""
    return k.add_(0.5).sub_(noise).mul_(step[:, None])


def _check(high: Tensor) -> Tensor:
    """A byte for each row of what was not sent; neighbours weigh differently, or opposite errors would cancel out."""
    # Bytes wrap around, which is all that a sum modulo 256 needs, and are a quarter of the work.
    low = high.to(torch.int8).view(torch.uint8)
    return (low * _weights(high.shape[1], high.device)).sum(1, dtype=torch.uint8)


@functools.cache
def _weights(block: int, device: torch.device) -> Tensor:
    """1 to 255 for each place; an odd sum, or a block that is off everywhere by the same would look right."""
    weights = torch.randint(1, 256, (block,), generator=torch.Generator().manual_seed(block), dtype=torch.int32)
    weights[0] += 1 - weights.sum() % 2
    return weights.to(torch.uint8).to(device)
