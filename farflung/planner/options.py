"""What `farflung plan`, `farflung simulate` and `farflung recommend` are asked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from farflung.errors import UserError
from farflung.lazy import Later
from farflung.networks.simulator.conditions import SMALLEST
from farflung.tables import Checked, required, setting
from farflung.workloads.settings import LanguageSettings

if TYPE_CHECKING:
    from farflung.pipeline import boundaries
else:
    boundaries = Later("farflung.pipeline.boundaries")


@dataclass(frozen=True)
class PlanOptions(Checked):
    """What to train, and on which machines. Settings that farflung train has too mean the same there."""

    model: str
    """A preset (micro, tiny, small, llama-125m, llama-1.3b, llama-6.8b), or anything that AutoConfig loads."""
    machines: Path
    """A TOML file of machines and links (docs: Plan before paying)."""
    tokens: float = required(least=1, most=1e18)
    """Tokens to train on, such as 100e9."""
    tokenizer: str | None = None
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
    far_folder: str = ""
    """Where it fits with a plan of memory only: a folder for what has no room near; unset: a GPU's goes to its host."""
    folder: bool = False
    """Replicas meet in a folder, at the prices of the file's table [folder], or else at those of a common store."""
    batch_tokens: float = setting(524288, least=1, most=1e12)
    """Tokens that all replicas together train on in one inner step."""
    sequence_length: int = setting(LanguageSettings.sequence_length, least=2)
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
        _ = self.everys, boundaries.boundary_named(self.boundary)  # their own checks

    @property
    def everys(self) -> list[int | None]:
        """The steps between rounds to try; None is the method's own."""
        words = [word.strip() for word in self.every.split(",") if word.strip()]
        for word in words:
            if not re.fullmatch("[0-9]+", word) or int(word) < 1:
                raise UserError(
                    f"every is {word!r}; give whole numbers of inner steps, at least 1, with commas between"
                )
        return [int(word) for word in words] or [None]

    @property
    def codec_names(self) -> list[str | None]:
        """The codecs to try; None is the method's own."""
        return [None, *(word.strip() for word in self.codecs.split(",") if word.strip())]


@dataclass(frozen=True)
class SwarmOptions(Checked):
    """Which model a swarm is to train, and on which machines. Settings that farflung train has too mean the same."""

    model: str
    """A preset (micro, tiny, small, llama-125m, llama-1.3b, llama-6.8b), or anything that AutoConfig loads."""
    machines: Path
    """A TOML file of machines and links (docs: Plan before paying)."""
    swarm: bool = False
    """Each worker serves one of the stages (docs: A swarm)."""
    tokenizer: str | None = None
    """bytes, or anything that AutoTokenizer loads; a preset has as many embeddings as it has tokens."""
    stages: int | None = setting(None, least=2)
    """Parts that the layers are cut into; unset: the number with the most tokens a second."""
    boundaries: str = "float32,bfloat16,int8,subspace64"
    """What may cross from stage to stage, with commas between, the most exact first."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Number format that the model computes in; weights stay float32."""
    recompute: bool = False
    """Keep no layer's inner activations; compute them again in the backward pass."""
    sequence_length: int = setting(LanguageSettings.sequence_length, least=2)
    """Tokens in one sequence."""
    micro_batch: int = setting(1, least=1, most=1e12)
    """Sequences that pass through the stages together."""

    def __post_init__(self) -> None:
        """Refuses impossible values. Raises UserError."""
        super().__post_init__()
        if not self.boundary_names:
            raise UserError("boundaries names none; leave it out, or give some with commas between, such as int8,int4")
        for name in self.boundary_names:
            boundaries.boundary_named(name)

    @property
    def boundary_names(self) -> list[str]:
        """The boundaries to try."""
        return [word.strip() for word in self.boundaries.split(",") if word.strip()]


@dataclass(frozen=True)
class RecommendOptions(Checked):
    """Which links there are, and what is to be trained over them."""

    link: str
    """Bandwidth of each replica's link, such as 100mbps, 1gbps or 20mbps."""
    params: float = required(least=1, most=1e12)
    """Parameters of the model, such as 1e9."""
    step_ms: float = required(least=SMALLEST, most=1e12)
    """How long an inner step computes, milliseconds."""
    replicas: int = setting(8, least=2, most=10_000)
    """Copies of the model."""
    latency_ms: float = setting(20.0, least=0, most=1e6)
    """Latency of the links, milliseconds."""
    steps: int = setting(10_000, least=1, most=1e12)
    """Inner steps of the run; gaps close in longer ones."""
    wait: float = setting(0.1, above=0, below=1)
    """The share of their time, 0 to 1, that replicas may at most wait for links."""

    def __post_init__(self) -> None:
        """Refuses impossible values. Raises UserError."""
        super().__post_init__()
        _ = self.mbps

    @property
    def mbps(self) -> float:
        """The links' bandwidth in Mbit/s. Raises UserError."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg])(?:bps|bit/s)", self.link.lower())
        rate = float(found[1]) * {"k": 1e-3, "m": 1.0, "g": 1e3}[found[2]] if found else 0.0
        if not SMALLEST <= rate <= 1e9:
            raise UserError(f"link is {self.link!r}; give a bandwidth such as 100mbps, or 1gbps")
        return rate


@dataclass(frozen=True)
class SimulateOptions(Checked):
    """Which methods to simulate, the model's size, and the network's conditions."""

    methods: str = "ddp,diloco,noloco,dilocox,nolocox"
    """Names, with commas between: see `farflung methods`."""
    replicas: int = setting(64, least=1, most=1e12)
    """Copies of the model."""
    params: float | None = setting(None, least=1, most=1e12)
    """Parameters of the model, such as 1.3e9; or else give --model."""
    model: str | None = None
    """A preset, or anything that AutoConfig loads."""
    conditions: str = "two-data-centres"
    """same-rack, two-data-centres, three-regions, home, world, or a TOML file (docs: Conditions)."""
    rounds: int = setting(100, least=1, most=1e12)
    """Rounds of each replica."""
    every: int | str | None = setting(None, least=1)
    """Inner steps between rounds, or by the clock: 30s, 2min; unset: each method's own default."""
    step_ms: float | None = setting(None, least=SMALLEST, most=1e12)
    """How long an inner step computes, milliseconds; unset: the conditions' own."""
    work_ms: float = setting(0.0, least=0, most=1e12)
    """A replica's own time for each round (encoding, decoding, outer step), milliseconds."""
    deadline: float | None = setting(None, least=SMALLEST, most=1e12)
    """Longest wait for other replicas, seconds; unset: for ever."""
    seed: int | None = None
    """Seed of everything random; unset: the conditions' own."""
    out: Path | None = None
    """The folder for simulation.html and events; unset: runs/simulation-N with the first N that is free."""

    def __post_init__(self) -> None:
        """Refuses impossible values. Raises UserError."""
        super().__post_init__()
        if (self.params is None) == (self.model is None):
            raise UserError("how large is the model? give either --params, such as 1.3e9, or --model")
