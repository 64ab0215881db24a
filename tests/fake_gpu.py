"""What a GPU would say, without one: `fake_gpu.py` prints, as JSON, what each case has waited for, or its error.

Tensors are fake ones on a device `gpu`, that refuse to be mixed with the host's. It stands for CUDA, whose own name
fake tensors can only have where torch is built for it; and it is known to all of a process, so that cases run in one of
their own. A wait is what stops the program until the device has caught up: a number or a size that is read from it, or
values that are copied to the host.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from farflung.codecs import CODECS, Chain, ErrorFeedback, codec_named
from farflung.codecs.chain import Transform
from farflung.codecs.values import finite, norm
from farflung.inner import INNER
from farflung.outer import Average, Drop, Eager, GossipNesterov, Keep, Mix
from farflung.outer.fragments import Weights, split
from farflung.outer.merges import Merge

GPU = "gpu"
ops = torch.ops.aten

ANSWERS: dict[str, list[float | bool]] = {
    "codec lowrank64": [64],
    "codec ef-lowrank64-int4": [64],
    "codec modulo4": [0, 1, 1, 1, True],  # the first block, of every so many; dither's two numbers; sound ranges
    "codec modulo4x2": [0, 2, 1, 1, True, 1, 2, 1, 1, True],
    "codec rows": [
        5,
        5,
        2,
        35,
        35,
        0,
        0,
    ],  # largest gaps; lists, and of each 32 lengths and 3 bits; rows
    "codec threshold1": [0.5, 0.5, 3, False, 1],  # two thresholds; values; whether a count is negative; a place
}
"""What is read from the device, over and over, where it is more than whether all is well."""


class Waits(FakeTensorMode):
    """Counts waits by the function of farflung that causes them, and answers with a stand-in."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.answers: Iterator[float | bool] = iter(())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if function is ops._local_scalar_dense.default:
            assert first is not None
            if first.device.type == GPU:
                self.seen[caller()] += 1
            return next(self.answers, first.dtype == torch.bool or 1)
        if first is not None and first.device.type == GPU:
            if function is ops.nonzero.default:
                self.seen[caller()] += 1
                with self:
                    return torch.zeros(1, first.dim(), dtype=torch.int64, device=GPU)
            if function is ops._to_copy.default and (kwargs or {}).get("device") == torch.device("cpu"):
                self.seen[caller()] += 1
        return super().__torch_dispatch__(function, types, args, kwargs)


def caller() -> str:
    """The innermost function of farflung that is running."""
    frame = sys._getframe()
    while frame and "/farflung/" not in frame.f_code.co_filename:
        frame = frame.f_back  # type: ignore[assignment]
    return frame.f_code.co_qualname if frame else "none of farflung"


class Model(nn.Module):
    """A model of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 24, device=GPU), nn.Linear(24, 16, device=GPU)])
        self.norm = nn.LayerNorm(16, device=GPU)

    def forward(self, entering: Tensor) -> Tensor:
        """(n, 16) to (n, 16)."""
        for layer in self.layers:
            entering = torch.tanh(layer(entering))
        out: Tensor = self.norm(entering)
        return out


def check_there(tensors: Iterable[Tensor]) -> None:
    """All must still be on the device."""
    assert all(tensor.device.type == GPU for tensor in tensors)


def inner_steps(name: str) -> None:
    """Two inner steps."""
    model = Model()
    optimizer = INNER[name].make(model.named_parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(2):
        model(torch.randn(4, 16, device=GPU)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    check_there(model.parameters())


OUTERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "GossipNesterov": GossipNesterov,
    "Average": Average,
    "SGD": partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
}
MERGES: tuple[Merge, ...] = (Keep(), Drop(), Mix(), Eager())


def outer_steps(outer: str, merge: Merge) -> None:
    """A round of each of two fragments, from the weights to a message and from a mean to the weights."""
    model = Model()
    fragments = split(model, 2)
    anchors = [fragment.read() for fragment in fragments]
    optimizer = OUTERS[outer](anchors)
    with torch.no_grad():
        for fragment, anchor in zip(fragments, anchors, strict=True):
            weights = Weights(fragment, anchor, optimizer, merge, torch.no_grad)
            offers = [weights.offer("") for _ in range(2)]
            for offer in offers:
                weights.keep(offer, delayed=True)
            mean = offers[0].message.clone()
            check_there([mean, anchor])
            weights.absorb(offers[0], mean, offers[1] if merge.eager else None, delayed=True)
    check_there(model.parameters())


def transforms_of(name: str) -> tuple[Transform, ...]:
    """Those of a codec; what feeds its errors back only adds and subtracts besides."""
    codec: Any = codec_named(name)
    if isinstance(codec, ErrorFeedback):
        codec = codec.codec
    return codec.transforms if isinstance(codec, Chain) else (codec,)


def both_ways(name: str) -> None:
    """A codec's transforms there and back, twice, since some remember; without the packet's bytes."""
    message = [torch.randn(200, 192, device=GPU), torch.randn(70, device=GPU)]
    transforms = transforms_of(name)
    for _ in range(2):
        table = [message if transforms[0].sees_shapes else [tensor.reshape(-1) for tensor in message]]
        for transform in transforms:
            table.append(transform.forward(table[-1]))
            check_there(table[-1])
        parts = table.pop()
        for transform, before in zip(reversed(transforms), reversed(table), strict=True):
            parts = transform.inverse(parts, before)
            check_there(parts)
        assert [part.numel() for part in parts] == [tensor.numel() for tensor in message]


def values() -> None:
    """What codecs ask of a message of several tensors."""
    message = [torch.randn(200, 192, device=GPU), torch.randn(70, device=GPU)]
    assert finite(*message)
    norm(message)


CASES: dict[str, Callable[[], None]] = {
    **{f"inner {name}": partial(inner_steps, name) for name in INNER},
    **{f"outer {name}, {type(m).__name__}": partial(outer_steps, name, m) for name in OUTERS for m in MERGES},
    **{f"codec {example}": partial(both_ways, example) for row in CODECS.values() for example in row.examples},
    "values": values,
}


def main() -> None:
    """Runs all cases."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(GPU)
    found: dict[str, tuple[dict[str, int], str]] = {}
    waits = Waits()
    for name, case in CASES.items():
        waits.seen.clear()
        waits.answers = cycle(ANSWERS.get(name, ()))
        with waits:
            try:
                case()
                error = ""
            except Exception as failed:
                error = f"{type(failed).__name__}: {failed}"
        found[name] = dict(waits.seen), error
    print(json.dumps(found))


if __name__ == "__main__":
    main()
