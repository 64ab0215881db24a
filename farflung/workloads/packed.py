"""Files that are packed, and what unpacks them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PACKED = {".gz", ".bz2", ".xz", ".zst"}
"""How their names end."""


def opened(path: Path) -> Any:
    """A context with a file's bytes, unpacked if it is packed, as fsspec opens it."""
    import fsspec

    know_zstandard()
    return fsspec.open(str(path), "rb", compression="infer")


def know_zstandard() -> None:
    """Lets fsspec, and with it datasets, unpack .zst, for which they have no package of their own on all Pythons."""
    from fsspec.compression import compr, register_compression

    if "zstd" not in compr:
        register_compression("zstd", _zstandard, "zst")


def _zstandard(file: Any, mode: str = "rb", **_: Any) -> Any:
    import io

    import pyarrow  # which datasets needs, too

    return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))
