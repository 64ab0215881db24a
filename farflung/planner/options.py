"""What `farflung plan` is asked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from farflung.errors import UserError
from farflung.pipeline.boundaries import boundary_named
from farflung.tables import Checked, setting


@dataclass(frozen=True)
class PlanOptions(Checked):
    """What to train, and on which machines. Settings that farflung train has too mean the same there."""

    model: str
    """A preset (micro, tiny, small, llama-125m, llama-1.3b, llama-6.8b), or anything that AutoConfig loads."""
    machines: Path
    """A TOML file of machines and links (docs: Plan before paying)."""
    tokens: float
    """Tokens to train on, such as 100e9."""
    tokenizer: str = "bytes"
    """bytes, or anything that AutoTokenizer loads; a preset has as many embeddings as it has tokens."""
    methods: str = "ddp,diloco,noloco,dilocox,nolocox"
    """Names, with commas between: see `farflung methods`. A single island trains with local."""
    every: str = ""
    """Inner steps between rounds to try, with commas between; unset: each method's own default."""
    delay: int | None = setting(None, least=0)
    """Training steps between sending an update and applying the result; unset: each method's own default."""
    codecs: str = ""
    """Codecs to try besides each method's own, with commas between, such as bfloat16,int8."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Number format that the model computes in; weights stay float32."""
    boundary: str = "float32"
    """What crosses from stage to stage: float32, bfloat16, int8, int4, topk10, subspace32 (docs: A pipeline)."""
    recompute: bool = False
    """Keep no layer's inner activations; compute them again in the backward pass."""
    offload: bool = False
    """Keep weights and the state of both optimizers on the CPU; the device holds only what it is computing with."""
    batch_tokens: float = setting(524288, least=1, most=1e12)
    """Tokens that all replicas together train on in one inner step."""
    sequence_length: int = setting(1024, least=2)
    """Tokens in one sequence."""
    micro_batch: int = setting(1, least=1, most=1e12)
    """Sequences that pass through a pipeline together."""
    search_s: float = setting(10.0, least=0, formerly="place")
    """Longest search for the best placement of stages on uneven links, seconds; 0 does not search."""
    show: int = setting(10, least=1)
    """Layouts to show."""

    def __post_init__(self) -> None:
        """Refuses impossible values. Raises UserError."""
        super().__post_init__()
        if not 1 <= self.tokens <= 1e18:
            raise UserError(f"tokens is {self.tokens}; it must be at least 1 and at most 1e+18")
        _ = self.everys, boundary_named(self.boundary)  # their own checks

    @property
    def everys(self) -> list[int | None]:
        """The steps between rounds to try; None is the method's own."""
        words = [word.strip() for word in self.every.split(",") if word.strip()]
        for word in words:
            if not re.fullmatch("[0-9]+", word) or int(word) < 1:
                raise UserError(f"every is {word!r}; give whole numbers of at least 1, with commas between")
        return [int(word) for word in words] or [None]

    @property
    def codec_names(self) -> list[str | None]:
        """The codecs to try; None is the method's own."""
        return [None, *(word.strip() for word in self.codecs.split(",") if word.strip())]
