"""Codecs by name, as settings give them; a package adds one with an entry point of the group `farflung.codecs`."""

from __future__ import annotations

import re

from farflung.codecs import (
    block_dct,
    block_float,
    dense,
    feedback,
    lowrank,
    modulo,
    quantize,
    rows,
    sampled,
    statistical,
    threshold,
    topk,
)
from farflung.codecs.base import Codec, Name
from farflung.codecs.chain import join
from farflung.errors import UserError
from farflung.registry import Registry


def _check(row: Name) -> None:
    if not isinstance(row, Name):
        raise TypeError(f"it is {row!r}, which is no farflung.codecs.Name")
    re.compile(row.pattern)


CODECS: Registry[Name] = Registry(
    "codec",
    {
        "dense": dense.NAME,
        "block-float": block_float.NAME,
        "int": quantize.NAME,
        "stat": statistical.NAME,
        "lowrank": lowrank.NAME,
        "topk": topk.NAME,
        "rows": rows.NAME,
        "threshold": threshold.NAME,
        "random": sampled.NAME,
        "block-dct": block_dct.NAME,
        "modulo": modulo.NAME,
        "ef": feedback.NAME,
    },
    _check,
    renamed={"frequency": "block-dct"},
)
"""All codecs that settings can name."""


def as_codec(given: Codec | str) -> Codec:
    """A codec, or the one of a name. Raises UserError."""
    return given if isinstance(given, Codec) else codec_named(given)


def codec_named(name: str) -> Codec:
    """The codec of a name such as `ef-lowrank64-int4`. Raises UserError."""
    if not isinstance(name, str):
        raise UserError(f"{name!r} is no codec; give one, or a name such as int4")
    name = re.sub("(?<![^-])frequency(?![^-])", lambda found: CODECS.current(found[0]), name)
    return _codec(name, name)


def _known() -> str:
    """What can be written, in one line."""
    plain, wraps = (
        ", ".join(example for _, row in CODECS.usable() if row.wraps == wraps for example in row.examples)
        for wraps in (False, True)
    )
    return f"{plain}; joined with -, as in lowrank64-int4; or with error feedback and the like, as in {wraps}"


def _codec(name: str, whole: str) -> Codec:
    """The codec of what is left of a name, `whole`."""
    kind, found = _row_of(name)
    row = CODECS[kind]
    rest = name[found.end() :]
    if row.wraps and not rest:
        raise UserError(f"there is no codec {name!r} by itself; say what follows, as in {row.examples[0]}")
    following = _codec(rest[1:], whole) if rest else None
    try:
        codec = row.make(following) if row.wraps else row.make(*found.groups())
        if not isinstance(codec, Codec):
            raise TypeError(f"it is {codec!r}, which is no codec")
        return join(codec, following) if following and not row.wraps else codec
    except ValueError as error:
        raise UserError(f"codec {whole!r}: {error}") from error
    except Exception as error:
        told = f"{CODECS.described(kind)} cannot be made of {whole!r}: {type(error).__name__}: {error}"
        raise UserError(told) from error


def _row_of(name: str) -> tuple[str, re.Match[str]]:
    """The row that a name begins with, and what its pattern finds there. Raises UserError."""
    for kind, row in CODECS.usable():
        if found := re.match(rf"(?:{row.pattern})(?=-|$)", name):
            return kind, found
    word = name.partition("-")[0]
    if word in CODECS:
        _ = CODECS[word]  # says why it cannot be used, if that is so
    raise UserError(f"there is no codec {word!r}; there are: {_known()}")
