"""What a codec is, what others may ask of it, and how it is written in settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from farflung.codecs.packets import Packet
from farflung.codecs.values import norm
from farflung.errors import UserError
from farflung.renamed import Formerly, refuse_old_names


class NotFiniteError(ValueError):
    """A message holds NaN or infinity, which are never sent."""


@dataclass(frozen=True)
class Traits:
    """A codec's capabilities; nothing asks for its type.

    Args:
        lossless: each float32 value comes back as it was sent; such messages may be averaged without a codec.
        needs_receiver: `decode` needs the receiver's own values, in `like`. Receivers then decode slightly different
            messages, so that a group cannot end a round with equal weights.
        composable: it may be joined to others with `|`, and fed back.
        fixed_length: a packet's size follows from its tensors' shapes, and `nbytes` is exact; else it is about right.
        remembers: a packet depends on messages before it.
        omits_zeros: noughts cost it next to nothing, so that a message of few values is small.
        feeds_back: what a packet leaves out is added to the next message.
        sparse: a packet holds some of the values, and the others come back as 0.
        halves: of the codecs of a message's two halves, where each has one of its own.
    """

    lossless: bool = False
    needs_receiver: bool = False
    composable: bool = True
    fixed_length: bool = True
    remembers: bool = False
    omits_zeros: bool = False
    feeds_back: bool = False
    sparse: bool = False
    halves: tuple[Traits, Traits] | None = None

    @property
    def keeps_weights(self) -> bool:
        """Whether a message may be whole weights: no small step beside large values is rounded away."""
        parts = self.halves or (self,)
        return all(part.lossless or part.needs_receiver for part in parts)


class Codec:
    """Turns the tensors of a message into a packet and back.

    A codec may have state: every stream of messages needs a copy of its own, and `state_dict` holds the state. Codecs
    without state do not override the last methods.
    """

    lossless, needs_receiver = Formerly("traits.lossless"), Formerly("traits.needs_receiver")
    shrink_to, turn_to = Formerly("set_budget"), Formerly("set_round")
    wants_expectation, expect = Formerly("wants_reference"), Formerly("set_reference")
    expect_change = Formerly("set_change")

    def __init_subclass__(cls) -> None:
        """Raises UserError for a class written for the version before."""
        super().__init_subclass__()
        refuse_old_names(cls)

    @property
    def traits(self) -> Traits:
        """Its capabilities, for all messages."""
        return Traits()

    def encode(self, tensors: Sequence[Tensor]) -> Packet:
        """The tensors as one packet, which lies in the host's memory. Raises NotFiniteError."""
        raise NotImplementedError(f"{type(self).__name__} has no encode; define it")

    def decode(self, packet: Packet, like: Sequence[Tensor]) -> list[Tensor]:
        """New tensors of the shapes and dtypes of `like`, which may also be the receiver's own. Raises PacketError."""
        raise NotImplementedError(f"{type(self).__name__} has no decode; define it")

    def nbytes(self, like: Sequence[Tensor]) -> int:
        """The bytes of a packet of such tensors, which need no memory (`device="meta"`); see Traits.fixed_length."""
        raise NotImplementedError(f"{type(self).__name__} has no nbytes; define it")

    def state_nbytes(self, like: Sequence[Tensor]) -> int:
        """The bytes of its state between messages of such tensors."""
        return 0

    def error_of(self, packet: Packet, tensors: Sequence[Tensor]) -> float:
        """How much of a message its packet, just encoded, leaves out: |x - decode(packet)| / |x|, Euclidean norms."""
        decoded = self.decode(packet, tensors)
        missing = norm([tensor - sent for tensor, sent in zip(tensors, decoded, strict=True)])
        return missing / max(norm(tensors), 1e-30)

    def state_dict(self) -> dict[str, Any]:
        """Its state: tensors, numbers and containers of them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a `state_dict`."""

    def seed(self, seed: int) -> None:
        """Seeds its random numbers, if it has any."""

    def set_budget(self, share: float) -> None:
        """Sends less from now on: `share` (0 to 1) of what the codec was made for, where it can."""

    def set_round(self, round: int) -> None:
        """Sets the number of the next message's round, the same for all members of a group."""

    @property
    def wants_reference(self) -> bool:
        """Whether `set_reference` would help before the next message."""
        return False

    def set_reference(self, tensors: Sequence[Tensor]) -> None:
        """Sets the reference: the next message as a replica without progress would send it."""

    def set_change(self, tensors: Sequence[Tensor]) -> None:
        """Sets about how far each value may have moved away from the others' values since the last message."""


class Compound(Codec):
    """A codec made of others, which have their own state."""

    parts: tuple[Codec, ...]
    """The others."""

    @property
    def traits(self) -> Traits:
        """Those of all parts together."""
        each = [vars(part.traits) for part in self.parts]
        of_all = "lossless", "composable", "fixed_length"
        of_any = "needs_receiver", "remembers", "omits_zeros", "feeds_back", "sparse"
        found: dict[str, Any] = {name: all(one[name] for one in each) for name in of_all}
        return Traits(**found | {name: any(one[name] for one in each) for name in of_any})

    def state_dict(self) -> dict[str, Any]:
        """Each part's."""
        return {str(number): part.state_dict() for number, part in enumerate(self.parts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Codec."""
        for number, part in enumerate(self.parts):
            part.load_state_dict(state[str(number)])

    def seed(self, seed: int) -> None:
        """See Codec."""
        for part in self.parts:
            part.seed(seed)

    def set_budget(self, share: float) -> None:
        """See Codec."""
        for part in self.parts:
            part.set_budget(share)

    def set_round(self, round: int) -> None:
        """See Codec."""
        for part in self.parts:
            part.set_round(round)


@dataclass(frozen=True)
class Name:
    """A codec's row in the registry: one beside each codec is all that it needs.

    Args:
        pattern: what is written, as a regular expression.
        make: the codec, given what the pattern's groups match; of a wrapper, given the codec that follows.
        examples: what may be written, each a complete name; all of them where there are few.
        travels: what its packets hold, in one line for people.
        wraps: whether it goes before another codec, with a hyphen between.
    """

    pattern: str
    make: Callable[..., Codec]
    examples: tuple[str, ...]
    travels: str
    wraps: bool = False


def share_of(percent: str) -> float:
    """The share that is written in per cent in a codec's name. Raises UserError."""
    if not 0 < float(percent) <= 100:
        raise UserError(f"it would send {percent}% of the values; choose more than 0 and at most 100")
    return float(percent) / 100
