"""Codecs by name, as settings give them."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from farflung.codecs.base import Chain, Codec, Transform
from farflung.codecs.block_dct import BlockDCT
from farflung.codecs.block_float import BlockFloat
from farflung.codecs.dense import Dense
from farflung.codecs.feedback import ErrorFeedback
from farflung.codecs.lowrank import LowRank
from farflung.codecs.modulo import Modulo
from farflung.codecs.quantize import Quantize
from farflung.codecs.threshold import Threshold
from farflung.codecs.topk import TopK
from farflung.errors import UserError

_TRANSFORMS: dict[str, Callable[[str], Transform]] = {
    "float32": lambda _: Dense(),
    "bfloat16": lambda _: Dense(torch.bfloat16),
    "float16": lambda _: Dense(torch.float16),
    r"int([842])": lambda bits: Quantize(bits=int(bits)),
    "e3m0": lambda _: BlockFloat("e3m0"),
    "e4m3": lambda _: BlockFloat("e4m3"),
    r"lowrank(\d+)": lambda rank: LowRank(rank=int(rank)),
    r"topk([\d.]+)": lambda percent: TopK(share=float(percent) / 100),
    r"threshold([\d.]+)": lambda percent: Threshold(share=float(percent) / 100),
    "frequency": lambda _: BlockDCT(),
    r"modulo(\d)": lambda bits: Modulo(bits=int(bits)),
    r"modulo(\dx\d)": lambda text: Modulo(bits=int(text[0]), round_robin=int(text[2])),
}

CODEC_NAMES = (
    "float32, bfloat16, float16, int8, int4, int2, e4m3, e3m0, modulo4 (bits), modulo4x2 (every second block in turn), "
    "lowrank64 (rank), topk2 and threshold1 (per cent kept), frequency; "
    "joined with -, as in lowrank64-int4; a leading ef- adds error feedback"
)


def codec_named(name: str) -> Codec:
    """The codec of a name such as `ef-lowrank64-int4`. Raises UserError."""
    words = name.split("-")
    feedback = words[0] == "ef"
    transforms = [_transform(word, name) for word in words[feedback:]]
    if not transforms:
        raise UserError(f"there is no codec {name!r}; there are: {CODEC_NAMES}")
    if any(transform.needs_receiver for transform in transforms) and (len(transforms) > 1 or feedback):
        raise UserError(f"codec {name!r} joins modulo to others; it only works alone")
    codec = transforms[0] if len(transforms) == 1 else Chain(tuple(transforms))
    return ErrorFeedback(codec) if feedback else codec


def _transform(word: str, name: str) -> Transform:
    for pattern, make in _TRANSFORMS.items():
        if found := re.fullmatch(pattern, word):
            try:
                return make(found.group(1) if found.groups() else "")
            except ValueError as error:
                raise UserError(f"codec {name!r}: {error}") from error
    raise UserError(f"there is no codec {word!r}; there are: {CODEC_NAMES}")
