"""A method: each replica averages with its neighbours on a ring, with one and the other in turn."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from farflung.codecs import Codec, codec_named
from farflung.outer import Method, Schedule


@dataclass(frozen=True)
class Neighbours:
    """Pairs of neighbours on a ring of all members."""

    identical = False

    def groups(self, members: tuple[int, ...], round: str) -> list[tuple[int, ...]]:
        number = int(round.split()[1])
        turned = members[number % 2 :] + members[: number % 2]
        pairs = zip(turned[::2], turned[1::2], strict=False)
        return [(min(pair), max(pair)) for pair in pairs]


def ring(every: int = 10, codec: Codec | str = "float32", pull: float = 1.0) -> Method:
    """Progress averaged between neighbours on a ring.

    Paper: none
    """
    made = codec_named(codec) if isinstance(codec, str) else codec
    return Method(
        Schedule(every), topology=Neighbours(), codec=made, outer=partial(torch.optim.SGD, lr=pull), averaging="whole"
    )
