"""A state on its way: what has come of it, which is kept on the disk, so that a download that was cut off goes on."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import statistics
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch

from farflung.files import beside
from farflung.networks.base import SharedState
from farflung.networks.peers.believing import Source
from farflung.networks.peers.frames import digest
from farflung.networks.peers.manifests import Manifest

SOURCES = 3
"""Peers that a state is fetched from at a time, with two pieces from each under way."""
ASKED_FOR = "snapshots.json"
"""The file with what donors call the snapshots that pieces come from."""


class Kept:
    """Pieces that came and were found good, each in a file named by its digest; without a folder, none.

    A full disk, or one that cannot be written, ends no download.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def snapshots(self) -> list[str]:
        """What was last given to `begin`."""
        with contextlib.suppress(OSError, ValueError):
            if self._folder:
                return [str(name) for name in json.loads((self._folder / ASKED_FOR).read_text())]
        return []

    def begin(self, snapshots: Collection[str], digests: Collection[str]) -> None:
        """Keeps pieces of these snapshots from now on, and no longer those of others."""
        with contextlib.suppress(OSError):
            if self._folder:
                self._write(ASKED_FOR, json.dumps(list(snapshots)).encode())
                for path in self._folder.iterdir():
                    if path.name not in (ASKED_FOR, *digests):
                        path.unlink()

    def put(self, name: str, content: memoryview) -> None:
        """Keeps a piece."""
        with contextlib.suppress(OSError):
            self._write(name, content)

    def get(self, name: str, into: memoryview) -> bool:
        """Whether a piece is kept, and whole; it is then in place."""
        with contextlib.suppress(OSError):
            if self._folder:
                with (self._folder / name).open("rb") as file:
                    return file.readinto(into) == len(into) and digest(into) == name
        return False

    def clear(self) -> None:
        """Keeps nothing any more."""
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, name: str, content: bytes | memoryview) -> None:
        """Whole or not at all, but for a power cut: who reads a piece checks it."""
        if self._folder:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / name
            new = beside(path)
            new.write_bytes(content)
            new.rename(path)


class Download:
    """A state whose pieces are being downloaded, from sources whose states have the same tensors."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.sources: Sequence[Source] = ()
        self.content = torch.empty(manifest.size, dtype=torch.uint8)
        self.present: dict[int, str] = {}
        self.left: list[int] = []

    @property
    def share(self) -> float:
        """How much of it is there, in percent."""
        return 100 * (1 - len(self.left) / len(self.manifest.pieces))

    def room(self, number: int) -> memoryview:
        """Where a piece goes."""
        return self.content.numpy().data[self.manifest.pieces[number]]

    def go_on(self, sources: Sequence[Source], kept: Kept, sound: Callable[[int, memoryview], bool]) -> None:
        """Takes what is left from the first of these; what came or was kept of any of them stays, where `sound`."""
        self.sources = sources[:SOURCES]
        said = list(zip(*(manifest.digests for _, manifest in sources), strict=True))
        kept.begin([manifest.id for _, manifest in sources], set(itertools.chain(*said)))
        self.left = []
        for number, digests in reversed(list(enumerate(said))):
            if self.present.get(number) not in digests:
                self.present[number] = next((name for name in digests if kept.get(name, self.room(number))), "")
            if not (self.present[number] and sound(number, self.room(number))):
                self.left.append(number)

    def came(self, number: int, name: str, kept: Kept) -> None:
        """Notes that a piece is in place."""
        self.present[number] = name
        kept.put(name, self.room(number))

    def state(self) -> SharedState:
        """The whole."""
        names, lengths = zip(*self.manifest.tensors, strict=True)
        parts = torch.split(self.content.view(torch.float32), list(lengths))
        step = statistics.median_low(manifest.step for _, manifest in self.sources)
        facts = {"step": step, "history": self.sources[0][1].history}
        givers = tuple(sorted(member.rank for member, _ in self.sources))
        return SharedState(dict(zip(names, parts, strict=True)), facts, givers)
