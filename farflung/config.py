"""The run's settings, as one dataclass: every field is a flag of `farflung train` and a key of its TOML file."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import tomllib
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from farflung import formats
from farflung.errors import UserError, suggestion
from farflung.formats import RUN_FOLDER

T = TypeVar("T")


@dataclass(frozen=True)
class Config:
    """Everything that a run is made from. Two runs of equal settings give equal weights."""

    # What is trained
    model: str = "tiny"
    """A preset (micro, tiny, small, llama-125m, llama-1.3b, llama-6.8b), or anything that AutoConfig loads."""
    pretrained: bool = False
    """Start from the model's published weights instead of random ones."""
    data: str = "stdlib"
    """stdlib, a path or glob of text, JSON Lines or Parquet files, or hf:NAME to stream from the hub."""
    tokenizer: str = "bytes"
    """bytes, or anything that AutoTokenizer loads."""
    text_column: str = "text"
    """The column of JSON Lines, Parquet and hub data that holds the text."""
    shares: Literal["alike", "apart"] = "alike"
    """Whether each replica draws from all of the data, or from a stretch of it that no other replica sees."""
    max_tokens: int = 100_000_000
    """Read at most this many tokens of the data."""
    sequence_length: int = 128
    """Tokens in one training sequence."""
    batch_size: int = 8
    """Sequences in one inner step of one replica."""

    # How the replicas work together
    method: str = "noloco"
    """The method: see `farflung methods`."""
    every: int | None = None
    """Inner steps between rounds; unset: the method's own default, as for all settings of a method."""
    delay: int | None = None
    """Inner steps between a round's start and its landing; training goes on meanwhile."""
    fragments: int | None = None
    """Parts of the parameters that have rounds of their own, spread over the steps between rounds."""
    outer_lr: float | None = None
    """Learning rate of the outer optimizer."""
    outer_momentum: float | None = None
    """Momentum of the outer optimizer."""
    codec: str | None = None
    """How messages become bytes, such as bfloat16, int8, modulo4, topk2-int2 or ef-lowrank64-int4 (see the README)."""
    merge: Literal["kept", "dropped", "mixed", "eager"] | None = None
    """What becomes of steps trained while a round is under way."""
    adapt: bool | None = None
    """Whether compression and steps between rounds follow the effective rank of what is exchanged."""
    gamma: float | None = None
    """How strongly the anchors of a group are pulled together (noloco)."""
    group_size: int | None = None
    """Replicas that average with each other in a round (noloco, diloco)."""
    averaging: Literal["whole", "parts"] | None = None
    """How more than two average (sparseloco, demo, dct): whole packets from everyone to everyone, as published, or in
    parts, each averaged by one and encoded again: another algorithm, whose bytes do not grow with the replicas."""
    every_final: int | None = None
    """Inner steps between rounds at the end of the run; from every, it gets there by equal factors."""
    robust: Literal["mean", "median", "clipped"] = "mean"
    """On the internet, how groups of more than two average: median and clipped bear a minority that sends anything."""
    outer_device: Literal["model", "cpu"] = "model"
    """Where anchors and outer momentum live: beside the model, or on the CPU."""

    # How one replica is divided among processes
    stages: int = 1
    """Processes that the layers of one replica are divided among: a pipeline."""
    shard: int = 1
    """Processes that the parameters of each stage are divided among (FSDP); they share its batch."""
    schedule: Literal["1f1b", "gpipe", "interleaved", "zero-bubble"] = "1f1b"
    """In what order stages compute microbatches."""
    microbatches: int | None = None
    """Parts that a batch is computed in, one after the other; unset: twice the stages, or one for a single stage."""
    routes: Literal["fixed", "random"] = "fixed"
    """Whether a microbatch stays in its replica, or goes to a random replica's next stage each time."""
    boundary: str = "float32"
    """What crosses from stage to stage: float32, bfloat16, int8, int4, topk10, subspace32 ... (see the README)."""
    recompute: bool = False
    """Keep no layer's inner activations; compute them once more in the backward pass."""
    offload: bool = False
    """Keep weights and the state of both optimizers on the CPU, and only what is computed with on the device."""

    # How long, and with what inner optimizer
    replicas: int = 4
    """Copies of the model; under torchrun as many as the processes that it started make."""
    steps: int = 400
    """Inner steps of each replica."""
    seed: int = 0
    """The seed of the weights, the data's order and the pairs."""
    inner: Literal["adamw", "muon", "sign"] | None = None
    """The inner optimizer; muon is for the layers' matrices, AdamW for the rest. Unset: muon, or adamw with shards."""
    lr: float | None = None
    """Highest learning rate of the inner optimizer; unset: 0.01, or 0.003 with adamw."""
    warmup: int = 40
    """Inner steps in which the learning rate rises; it then falls as lr_schedule says."""
    lr_schedule: Literal["cosine", "linear", "stable"] = "cosine"
    """How the learning rate falls: along a cosine, a line, or a line in the last fifth of the run only."""
    lr_final: float = 0.1
    """The share of the highest learning rate that is left at the end."""
    weight_decay: float = 0.1
    """The inner optimizer's weight decay."""
    late_average: float = 0.0
    """The share of the run, at its end, whose weights after each round are averaged into the final ones."""
    clip: float = 1.0
    """Largest norm of a replica's gradient; 0 does not clip."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Number format that the model computes in; weights stay float32."""

    # Where it runs
    network: Literal["torch", "simulated", "internet"] = "torch"
    """torch: real processes over torch.distributed; simulated: one process, a virtual clock; internet: see invite."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    starting: float = 600.0
    """Longest wait for the other replicas to start, in seconds."""
    deadline: float = 120.0
    """Longest wait for other replicas, in seconds."""
    conditions: str = ""
    """Simulated network: same-rack, two-data-centres, three-regions, home, world, or a TOML file (see the README)."""
    bandwidth_mbps: float | None = None
    """Simulated network: each replica's link, megabits a second each way; unset: the conditions' own (100)."""
    latency_ms: float | None = None
    """Simulated network: one way, milliseconds; unset: the conditions' own (20)."""
    step_ms: float | None = None
    """Simulated network: what the computation of one inner step takes, milliseconds; unset: the conditions' (100)."""

    # What is kept
    out: str = ""
    """The run folder; unset: runs/METHOD-N with the first N that is free."""
    log_every: int = 10
    """Inner steps between two lines of loss in the events."""
    eval_every: int = 50
    """Inner steps between two measurements of the validation loss."""
    eval_sequences: int = 64
    """Held-out sequences that a validation loss is measured on."""
    checkpoint_every: int = 100
    """Inner steps between two checkpoints; 0 writes none until the end."""
    keep_checkpoints: int = 2
    """Older checkpoints are removed once this many newer ones are whole."""

    def __post_init__(self) -> None:
        """Refuses what can never work. Raises UserError."""
        for field in dataclasses.fields(self):
            _check_type(field.name, getattr(self, field.name), _types()[field.name])
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise UserError(f"{name} is {value}; it must be at least {least}")
        for name in ("lr_final", "late_average"):
            if getattr(self, name) > 1:
                raise UserError(f"{name} is {getattr(self, name)}; it is a share, and can be at most 1")
        for name in ("lr", "deadline", "starting", "bandwidth_mbps"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"{name} is {getattr(self, name)}; it must be more than 0")

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one replica trains on in one inner step."""
        return self.batch_size * self.sequence_length


_LEAST = {
    "sequence_length": 2,
    **dict.fromkeys(("every", "every_final", "fragments", "group_size", "replicas", "steps"), 1),
    **dict.fromkeys(("stages", "shard", "microbatches"), 1),
    **dict.fromkeys(("batch_size", "log_every", "eval_every", "eval_sequences", "keep_checkpoints"), 1),
    **dict.fromkeys(("delay", "warmup", "weight_decay", "clip", "seed", "checkpoint_every"), 0),
    **dict.fromkeys(("latency_ms", "step_ms", "outer_momentum", "lr_final", "late_average"), 0),
    "max_tokens": 1000,
}


@dataclass(frozen=True)
class Resume:
    """Which run to go on with, and what may be otherwise from now on."""

    resume: Path
    """The run folder."""
    restart: bool = False
    """Begin the run anew, from its settings alone; its events and checkpoints are removed."""
    stages: int | None = None
    """Processes that the layers of one replica are divided among; unset, as all below: as before."""
    shard: int | None = None
    """Processes that the parameters of each stage are divided among."""
    schedule: str | None = None
    """In what order stages compute microbatches."""
    microbatches: int | None = None
    """Parts that a batch is computed in, one after the other."""
    boundary: str | None = None
    """What crosses from stage to stage."""
    device: str | None = None
    """What to train on."""
    deadline: float | None = None
    """Longest wait for other replicas, in seconds."""

    def applied(self, config: Config) -> Config:
        """The settings with those that are given here. Raises UserError."""
        given = {
            key: value for key, value in vars(self).items() if key not in ("resume", "restart") and value is not None
        }
        changed = dataclasses.replace(config, **given)
        fixed = ("stages", "schedule", "boundary")
        if any(getattr(config, key) != getattr(changed, key) for key in fixed):
            for boundary in (config.boundary, changed.boundary):
                if boundary.startswith("subspace"):
                    raise UserError(
                        f"boundary {boundary} decides which weights there are; resume with the same {', '.join(fixed)}"
                    )
        return changed


def read_toml(path: Path) -> Config:
    """The settings of a TOML file, perhaps a run folder's, over the defaults. Raises UserError."""
    table = toml_table(path)
    RUN_FOLDER.check(table, str(path))
    table.pop(formats.KEY, None)
    return from_table(Config, table, str(path))


def toml_table(path: Path) -> dict[str, Any]:
    """What a TOML file holds. Raises UserError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give the path of a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error


def from_table(kind: type[T], table: dict[str, Any], where: str) -> T:
    """A dataclass of a TOML table; fields that are tuples of dataclasses are arrays of tables. Raises UserError."""
    known = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(kind)
    values = {}
    for key, value in table.items():
        if key not in known:
            raise UserError(f"{where}: there is no setting {key!r}{suggestion(key, list(known))}")
        values[key] = _field_of(hints[key], key, value, where)
    for key, field in known.items():
        missing = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if missing and key not in table:
            raise UserError(f"{where}: {key} is missing; it must be given")
    try:
        return kind(**values)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _field_of(hint: Any, key: str, value: Any, where: str) -> Any:
    """One value of a table, arrays as tuples and tables as dataclasses."""
    if typing.get_origin(hint) is not tuple:
        try:
            _check_type(key, value, hint)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        return value
    if not isinstance(value, list):
        raise UserError(f"{where}: {key} is {value!r}; it must be a list")
    inner = typing.get_args(hint)[0]
    if dataclasses.is_dataclass(inner) and all(isinstance(item, dict) for item in value):
        return tuple(from_table(inner, item, f"{where}, {key} {number + 1}") for number, item in enumerate(value))  # type: ignore[arg-type]
    if dataclasses.is_dataclass(inner):
        raise UserError(f"{where}: {key} must be tables, each under [[{key}]]")
    return tuple(_field_of(inner, f"{key} {number + 1}", item, where) for number, item in enumerate(value))


def to_toml(config: Config) -> str:
    """The settings as TOML; those that are unset are left out."""
    lines = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is not None:
            # JSON's numbers, booleans and strings are valid TOML, but for one character that only JSON leaves as it is.
            text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
            lines.append(f"{field.name} = {text}")
    return "\n".join(lines) + "\n"


@functools.cache
def _types() -> dict[str, Any]:
    return typing.get_type_hints(Config)


def _check_type(name: str, value: object, kind: Any) -> None:
    choices = [k for k in (kind, *typing.get_args(kind)) if typing.get_origin(k) is Literal]
    if choices:
        if value is None and choices[0] is not kind:
            return
        kind = choices[0]
        if value not in typing.get_args(kind):
            raise UserError(f"{name} is {value!r}; it must be one of {', '.join(typing.get_args(kind))}")
        return
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    accepted = (*kinds, int) if float in kinds else kinds
    if type(value) not in accepted:
        wanted = " or ".join(k.__name__ for k in kinds if k is not types.NoneType)
        raise UserError(f"{name} is {value!r}; it must be of type {wanted}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{name} is {value}; it must be a finite number")
