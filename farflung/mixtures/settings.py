"""How a text is split among experts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farflung.errors import UserError
from farflung.tables import rule_of, setting

OWN = ("workload", "data", "out", "deadline")
"""What each of several machines says for itself: paths are its own."""


@dataclass(frozen=True, kw_only=True)
class SplitSettings:
    """Which text to split, among how many experts, and how the routers learn to."""

    workload: str = "language"
    """What is split: language, or images, which has flags of its own: split --workload images --help."""
    data: tuple[str, ...]
    """What to split, each as for train --data; of several, the routers' table shows who gets which."""
    out: Path
    """The folder to write; it must not exist, or be empty."""
    experts: int = setting(4, least=2)
    """How many models the mixture is to have."""
    tokenizer: str = "bytes"
    """bytes, or anything that AutoTokenizer loads: the one that all experts will be trained with."""
    text_column: str = "text"
    """The column of JSON Lines, CSV and Parquet that holds the text."""
    max_tokens: int | None = setting(None, least=1000)
    """Read at most this many tokens of each of the data; unset: all."""
    sequence_length: int = setting(128, least=2)
    """Tokens in one sequence, all of which go to one expert; train the experts with the same."""
    prefix: int = setting(32, least=1)
    """Tokens at a sequence's begin by which routers tell who gets it."""
    router: str = "micro"
    """The routers' model: a preset, or anything that AutoConfig loads; a small one is enough."""
    rounds: int = setting(6, least=1)
    """How often the routers learn from the sequences that they have, and deal new ones among themselves."""
    router_sequences: int = setting(2048, least=1)
    """Sequences that each router gets in a round; where the text has too few for all, they come again."""
    batch_size: int = setting(32, least=1)
    """Sequences in a router's training step."""
    lr: float = setting(1e-3, above=0)
    """The routers' learning rate, which stays the same."""
    seed: int = setting(0, least=0)
    """Of the routers' first weights, and of the order of the sequences."""
    deadline: float = setting(3600.0, above=0)
    """Seconds that one of several machines waits for the others to come, or for what they send."""

    def __post_init__(self) -> None:
        """Raises UserError."""
        for field in dataclasses.fields(self):
            rule_of(field).check(field.name, getattr(self, field.name))
        if not self.data:
            raise UserError("no data is given; give at least one text with --data")
        if len({*self.data}) < len(self.data):
            raise UserError("some data is given twice; give each once")
        if self.prefix > self.sequence_length:
            raise UserError(
                f"prefix is {self.prefix} and sequence_length {self.sequence_length}; a prefix is a part of a sequence"
            )

    @property
    def shared(self) -> dict[str, Any]:
        """Those that are the same on all machines that split together, as far as they are set."""
        every = {field.name: getattr(self, field.name) for field in dataclasses.fields(SplitSettings)}
        return {name: value for name, value in every.items() if name not in OWN and value is not None}

    @property
    def round_sequences(self) -> int:
        """Those of all routers together."""
        return self.experts * self.router_sequences
