"""NoLoCo and its kin: averages in random pairs or small groups, without any all-reduce."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from farflung import codecs, outer
from farflung.methods.limits import check_limits, codec_of

if TYPE_CHECKING:
    from farflung.codecs import Codec
    from farflung.outer import Method


def noloco(
    every: int | str = 50,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    gamma: float = 0.7,
    group_size: int = 2,
    delay: int | str = 0,
    fragments: int = 1,
    codec: Codec | str | None = None,
    merge: str = "kept",
    seed: int = 0,
) -> Method:
    """Averages in random pairs only, with a pull that keeps the pairs' anchors together; no all-reduce.

    Paper: Kolehmainen and others 2025, arXiv 2506.10911
    """
    codec = codec_of(codec, codecs.Dense())
    check_limits(outer_lr=outer_lr, outer_momentum=outer_momentum, gamma=gamma)
    # Rounding must be in proportion to what is new, and whole anchors are not: modulo sends what differs of them.
    together = codec.traits.keeps_weights
    if not (together or codec.traits.halves):
        codec = codecs.SplitCodec(codec, codecs.Modulo(bits=4, round_robin=2))
    kind = outer.GossipNesterov if together else outer.SplitGossip
    return outer.Method(
        schedule=outer.Schedule(every, fragments, delay),
        topology=outer.RandomGroups(group_size, seed),
        codec=codec,
        outer=partial(kind, lr=outer_lr, momentum=outer_momentum, gamma=gamma),
        merge=outer.merge_named(merge),
        averaging="whole",
    )


def gasloc(
    every: int | str = 50,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    gamma: float = 1.0,
    group_size: int = 2,
    codec: Codec | str | None = None,
    seed: int = 0,
) -> Method:
    """Averages in random pairs; the momentum is of each replica's own movement, and nothing else pulls on anchors.

    Paper: GASLoC 2026, arXiv 2606.11081
    """
    check_limits(outer_lr=outer_lr, outer_momentum=outer_momentum, gamma=gamma)
    return outer.Method(
        schedule=outer.Schedule(every),
        topology=outer.RandomGroups(group_size, seed),
        codec=codec_of(codec, codecs.Dense()),
        outer=partial(outer.GossipDrift, lr=outer_lr, momentum=outer_momentum, gamma=gamma),
        averaging="whole",
    )


def factored_gossip(
    every: int | str = 50,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    group_size: int = 2,
    codec: Codec | str | None = None,
    seed: int = 0,
) -> Method:
    """Averages in random pairs, which wait, and of anchors among all, beside the next steps, for which nobody waits.

    Paper: Hewa Koneputugodage and others 2026, arXiv 2606.22768
    """
    pairs = noloco(every, outer_lr, outer_momentum, 1.0, group_size, codec=codec, seed=seed)
    return replace(pairs, companions=(outer.MixedAnchors(),))


def nolocox(
    every: int | str = 125,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    gamma: float = 0.7,
    codec: Codec | str | None = None,
    merge: str = "kept",
    adapt: bool = True,
    seed: int = 0,
) -> Method:
    """NoLoCo's random pairs with DiLoCoX's overlap, compression and adaptation: nobody waits, few bytes.

    Paper: none; both arXiv 2506.10911 and arXiv 2506.21263
    """
    codec = codec_of(codec, codecs.Modulo(bits=3, round_robin=2))
    method = noloco(every, outer_lr, outer_momentum, gamma, delay=every, codec=codec, merge=merge, seed=seed)
    return replace(method, adapt=outer.Adapt(steps=False) if adapt else None)
