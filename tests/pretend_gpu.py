"""`python pretend_gpu.py ARGUMENTS`: the command farflung, on a machine with a device `gpu` that is pretended.

Its tensors lie in the host's memory, and say that they do not. As on a real one, operations refuse to mix devices, and
who sends over Gloo, or asks NumPy, must have brought the values to the host before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

GPU = "gpu"
ops = torch.ops.aten

CROSSING = (ops._to_copy.default, ops.copy_.default)


class OnGpu(Tensor):
    """A tensor that pretends; `there` are its values."""

    there: Tensor

    @staticmethod
    def __new__(cls, there: Tensor) -> OnGpu:
        made: OnGpu = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            there.shape,
            strides=there.stride(),
            storage_offset=there.storage_offset(),
            dtype=there.dtype,
            device=torch.device(GPU, 0),
        )
        made.there = there
        return made

    def __init__(self, there: Tensor) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})

    def tolist(self) -> Any:
        """Waits for the device."""
        return self.there.tolist()

    def untyped_storage(self) -> Any:
        """Of which views of the same memory are known."""
        return self.there.untyped_storage()

    def data_ptr(self) -> int:
        """Where it begins."""
        return self.there.data_ptr()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnGpu({self.there!r})"


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operation comes to, on the device where its tensors lie or where it is asked to."""
    given = list(tensors((args, kwargs)))
    pretending = [tensor for tensor in given if isinstance(tensor, OnGpu)]
    asked = kwargs.get("device")
    there = torch.device(asked).type == GPU if asked is not None else bool(pretending)
    if not pretending and not there:
        return func(*args, **kwargs)
    if func.namespace == "c10d":
        raise RuntimeError(f"{func} was given memory of a GPU, which Gloo cannot read")
    if pretending and func not in CROSSING and any(t.dim() and not isinstance(t, OnGpu) for t in given):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found {GPU} and cpu")
    inner = tree_map(lambda one: one.there if isinstance(one, OnGpu) else one, (args, kwargs))
    if asked is not None:
        inner[1]["device"] = torch.device("cpu")
    found = func(*inner[0], **inner[1])
    if func._schema.name.endswith("_") and not func._schema.name.endswith("__"):
        return args[0] if found is not None else None
    if not there:
        return found
    outs = {id(tensor.there): tensor for tensor in pretending}
    return tree_map(lambda one: outs.get(id(one), OnGpu(one)) if isinstance(one, Tensor) else one, found)


def tensors(tree: Any) -> Iterator[Tensor]:
    """All tensors in arguments."""
    found: list[Tensor] = []
    tree_map(lambda one: found.append(one) if isinstance(one, Tensor) else None, tree)
    return iter(found)


def empty(size: Any, *, dtype: Any = None, **_: Any) -> OnGpu:
    """Memory of the device, in any thread."""
    return OnGpu(torch.empty(size, dtype=dtype))


def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> OnGpu:
    """So, with strides."""
    return OnGpu(torch.empty_strided(size, stride, dtype=dtype))


def copy_from(given: Tensor, to: Tensor, non_blocking: bool = False) -> Tensor:
    """Copies, where torch has its own Python numbers brought to the device."""
    to.there.copy_(given.there if isinstance(given, OnGpu) else given)  # type: ignore[attr-defined]
    return to


def main() -> None:
    """Runs the command."""
    from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

    module = _DummyBackendModule()
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]  # type: ignore[attr-defined]
    _setup_privateuseone_for_python_backend(GPU, module)
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    library.impl("_copy_from", copy_from, "PrivateUse1")
    from farflung import cli

    sys.argv = ["farflung", *sys.argv[1:]]
    cli.main()


if __name__ == "__main__":
    main()
