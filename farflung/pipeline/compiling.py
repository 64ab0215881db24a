"""Compiling a model's layers with torch.compile: all layers of a kind share one graph."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from farflung.errors import UserError

ANYWAY = "or leave out --compile"


def compile_layers(model: nn.Module) -> None:
    """Has each of a model's layers compiled when it is first computed; a model without a list of layers, as a whole.

    Layers are what its outermost lists of modules hold. The model keeps its modules, and the names of its weights.
    """
    # One graph for a shape: which shape comes first must not decide how others are computed.
    for layer in _layers(model) or [model]:
        layer.compile(dynamic=False)


def _layers(model: nn.Module) -> list[nn.Module]:
    """What the outermost lists of a model hold; but for what has no weights, as what another stage has."""
    found: list[nn.Module] = []
    for child in model.children():
        held = list(child.children()) if isinstance(child, nn.ModuleList) else _layers(child)
        found += [layer for layer in held if any(True for _ in layer.parameters())]
    return found


def eagerly(compiled: bool) -> contextlib.AbstractContextManager[Any]:
    """A context without the layers' compiled forms, if they are: texts and evaluations have shapes of their own."""
    return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()


def check_compiler() -> None:
    """Raises UserError where there is no C++ compiler, which torch.compile needs."""
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(name.split()[0]) is None:
        raise UserError(
            f"compile needs a C++ compiler, and there is no {name} here; install one (on Debian: apt install g++), "
            f"name one in CXX, {ANYWAY}"
        )


@contextlib.contextmanager
def telling_of_compilers(compiled: bool) -> Iterator[None]:
    """Raises UserError, in a line, where torch cannot compile a model that is to be."""
    if not compiled:  # looking for such errors would import the compiler
        yield
        return
    try:
        yield
    except torch._dynamo.exc.TorchDynamoException as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        told, remedy = lines[0] if lines else type(error).__name__, f"mend that, {ANYWAY}"
        if isinstance(getattr(error, "inner_exception", None), ImportError):  # of what it has compiled before
            remedy = f"remove {os.environ.get('TORCHINDUCTOR_CACHE_DIR')}, which a killed run may have spoilt"
        raise UserError(f"torch.compile cannot compile this model here: {told}; {remedy}") from error
