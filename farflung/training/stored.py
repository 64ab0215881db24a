"""Tensors of a checkpoint that stay in its file until something is computed with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from farflung.errors import UserError

SMALL = 1 << 16
"""Bytes below which a tensor is read at once: states of random numbers, counts, norms."""

_KNOWN = {"__get__", "__len__", "dim", "element_size", "is_floating_point", "numel", "size", "stride", "storage_offset"}
"""What is known of a tensor without its values: its attributes, and what these methods tell."""


class StoredTensor(Tensor):
    """A tensor in a file: all that is computed with it reads it anew, so that no more than one is near at a time.

    It cannot be changed in place.
    """

    path: Path
    begin: int
    """Where its storage begins in the file, in bytes."""

    def read(self) -> Tensor:
        """Its values, on the CPU. Raises UserError where the file has been cut short or cannot be read."""
        with torch._C.DisableTorchFunctionSubclass():
            shape, strides = self.shape, self.stride()
            span = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
            near = torch.empty(span if self.numel() else 0, dtype=self.dtype)
            begin = self.begin + int(self.storage_offset()) * self.element_size()
        try:
            with self.path.open("rb", 0) as file:
                file.seek(begin)
                left = memoryview(near.view(torch.uint8).numpy().data)
                while left:
                    if not (done := file.readinto(left)):
                        raise OSError("it has been cut short")
                    left = left[done:]
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror or error}; start again to resume") from error
        return near.as_strided(shape, strides)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Computes with what is read."""
        if func.__name__ in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        changes = func.__name__.endswith("_") and not func.__name__.endswith("__")
        assert not (changes and isinstance(args[0], cls)), f"{func.__name__} would change what is read only"
        args, kwargs = tree_map_only(cls, cls.read, (args, kwargs or {}))
        return func(*args, **kwargs)


def stored(path: Path) -> Any:
    """What torch.save wrote, with tensors that stay in the file but for small ones."""

    def kept(tensor: Tensor) -> Tensor:
        found = tensor.as_subclass(StoredTensor)
        begin = tensor.untyped_storage()._checkpoint_offset
        assert begin is not None  # torch tells it of what it loads onto no device
        found.path, found.begin = path, begin
        return found if tensor.nbytes >= SMALL else found.read()

    return tree_map_only(Tensor, kept, torch.load(path, map_location="meta", weights_only=True))
