"""A graph by the name of its data: a folder of arrays, a folder in OGB's format, or debian."""

from __future__ import annotations

from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from farflung.errors import UserError, disk_errors
from farflung.workloads.graph import debian, ogb
from farflung.workloads.graph.data import GraphData
from farflung.workloads.graph.kept import checksum

REMEDY = "give a folder with edges.npy and features.npy, a folder in OGB's format, or debian"


def read(name: str) -> GraphData:
    """The graph of that name. Raises UserError."""
    if name == "debian":
        return debian.read()
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise UserError(f"data is {name}, and there is no such folder; {REMEDY}")
    with disk_errors(f"read the graph in {folder}", REMEDY):
        return ogb.read(folder) if ogb.is_ogb(folder) else read_arrays(folder)


def read_arrays(folder: Path) -> GraphData:
    """A folder of edges.npy and features.npy, and perhaps labels, names and what is held out. Raises UserError."""
    nothing = np.empty(0, np.int64)
    features, edges = _array(folder / "features.npy", "numbers", "uif"), _numbers(folder / "edges.npy")
    assert features is not None and edges is not None
    labels = _numbers(folder / "labels.npy", needed=False)
    with np.errstate(over="ignore"):  # GraphData tells of what is too large
        numbers = features.astype(np.float32)
    return GraphData(
        where=str(folder),
        features=numbers,
        edges=edges,
        checksum=checksum(path for path in sorted(folder.iterdir()) if path.suffix in (".npy", ".txt")),
        labels=nothing if labels is None else labels,
        names=_lines(folder / "names.txt"),
        classes=_lines(folder / "classes.txt"),
        held_out_nodes=_numbers(folder / "held_out_nodes.npy", needed=False),
        held_out_links=_numbers(folder / "held_out_links.npy", needed=False),
    )


def _array(path: Path, what: str, kinds: str, needed: bool = True) -> NDArray[np.generic] | None:
    """An array whose dtype is of one of numpy's `kinds`. Raises UserError."""
    if not path.exists():
        if needed:
            raise UserError(f"there is no {path}; {REMEDY}")
        return None
    try:
        with path.open("rb") as file:  # which an archive of arrays would keep open
            found = np.load(file, allow_pickle=False)
    except (ValueError, EOFError, BadZipFile) as error:
        raise UserError(f"{path} is no array of numbers: {error}; write it with numpy.save") from error
    if not isinstance(found, np.ndarray):
        raise UserError(f"{path} is an archive of arrays; write the array alone, with numpy.save")
    if found.dtype.kind not in kinds:
        raise UserError(f"{path} holds {found.dtype}; give {what}")
    return found


def _numbers(path: Path, needed: bool = True) -> NDArray[np.int64] | None:
    found = _array(path, "whole numbers", "ui", needed)
    if found is not None and found.size and found.max() > np.iinfo(np.int64).max:
        raise UserError(f"{path} has {found.max()}, which is too large; give numbers of 64 bits with a sign")
    return None if found is None else found.astype(np.int64)


def _lines(path: Path) -> tuple[str, ...]:
    if not path.exists():
        return ()
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text in UTF-8: {error}; save it as such") from error
    return tuple(text.removesuffix("\n").split("\n")) if text else ()  # other marks may be part of a name
