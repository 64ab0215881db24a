"""Codecs by name, as settings give them; a package adds one with an entry point of the group `farflung.codecs`."""

from __future__ import annotations

import re
import warnings

from farflung.codecs import (
    block_dct,
    block_float,
    dense,
    feedback,
    lowrank,
    modulo,
    quantize,
    threshold,
    topk,
)
from farflung.codecs.base import Codec
from farflung.codecs.chain import join
from farflung.codecs.names import Name
from farflung.errors import UserError
from farflung.registry import Registry

CODECS: Registry[Name] = Registry(
    "codec",
    {
        "dense": dense.NAME,
        "block-float": block_float.NAME,
        "int": quantize.NAME,
        "lowrank": lowrank.NAME,
        "topk": topk.NAME,
        "threshold": threshold.NAME,
        "block-dct": block_dct.NAME,
        "modulo": modulo.NAME,
        "ef": feedback.NAME,
    },
)
"""All codecs that settings can name."""

_RENAMED = {"frequency": "block-dct"}


def codec_named(name: str) -> Codec:
    """The codec of a name such as `ef-lowrank64-int4`. Raises UserError."""
    for old, new in _RENAMED.items():
        if old in name.split("-"):
            warnings.warn(
                f"the codec {old} is called {new} now; the old name goes with the next version",
                FutureWarning,
                stacklevel=2,
            )
            name = name.replace(old, new)
    return _codec(name, name)


def codec_names() -> str:
    """What can be written, in one line."""
    plain, wraps = (
        ", ".join(example for row in CODECS.values() if row.wraps == wraps for example in row.examples)
        for wraps in (False, True)
    )
    return f"{plain}; joined with -, as in lowrank64-int4; or with error feedback and the like, as in {wraps}"


def _codec(name: str, whole: str) -> Codec:
    """The codec of what is left of a name, `whole`."""
    for row in CODECS.values():
        if found := re.match(rf"(?:{row.pattern})(?=-|$)", name):
            break
    else:
        raise UserError(f"there is no codec {name.partition('-')[0]!r}; there are: {codec_names()}")
    rest = name[found.end() :]
    if row.wraps and not rest:
        raise UserError(f"there is no codec {name!r} by itself; say what follows, as in {row.examples[0]}")
    following = _codec(rest[1:], whole) if rest else None
    try:
        codec = row.make(following) if row.wraps else row.make(*found.groups())
        return join(codec, following) if following and not row.wraps else codec
    except ValueError as error:
        raise UserError(f"codec {whole!r}: {error}") from error
