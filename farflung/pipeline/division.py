"""How the settings divide a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from farflung.codecs import Codec
from farflung.config import Config
from farflung.pipeline.balance import Span
from farflung.pipeline.boundaries import boundary_named
from farflung.pipeline.split import is_tied, spans_of
from farflung.pipeline.subspace import Subspace, subspace_of

PIECES_EACH = {"1f1b": 1, "gpipe": 1, "zero-bubble": 1, "interleaved": 2}
"""How many pieces of the model a process has, by schedule."""


@dataclass(frozen=True)
class Division:
    """How the settings divide a model: its spans, in order, the codec between them, and the subspace if there is one.

    `tied` says whether the head is the embeddings again.
    """

    spans: list[Span]
    codec: Codec
    subspace: Subspace | None
    tied: bool

    @property
    def confined_layers(self) -> int:
        """The layers before the last boundary; those after it stay free."""
        return self.spans[-1].begin


def microbatches_of(config: Config) -> int:
    """Parts that a process's share of a batch is computed in."""
    return config.microbatches or (2 * config.stages if config.stages > 1 else 1)


def division_of(config: Config, model: Any) -> Division:
    """How a model, which needs no memory yet, is divided. Raises UserError."""
    rank, codec = boundary_named(config.boundary)
    subspace = subspace_of(model.config, rank, config.seed) if rank else None
    spans = spans_of(model, config.stages * PIECES_EACH[config.schedule])
    return Division(spans, codec, subspace, is_tied(model))
