"""Checks of what a machine needs to join a run through a folder; each finding says what to fix."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from farflung.errors import counted
from farflung.findings import Finding
from farflung.networks.folder.presence import Presence
from farflung.networks.folder.store import StoreAwayError, clock_of
from farflung.networks.peers.member import CLOCK_SECONDS

PROBE = 1 << 22
"""Bytes that are written and read to measure the store."""


def examine(presence: Presence) -> Iterator[Finding]:
    """The checks of a folder, and who is there."""
    yield from _speed(presence)
    members = presence.members.all()
    training = [member for member in members if member.alive and member.trains]
    over = "" if training else "the run may be over, or nobody has begun: ask whoever invited you"
    were = "was" if len(members) == 1 else "were"
    yield Finding(True, f"{counted(len(training), 'peer')} in training; {len(members)} {were} heard of", over)
    for kind, times in sorted(presence.guard.refused.items()):
        yield Finding(True, f"{kind}: {times}", "somebody changes what is in the folder")


def _speed(presence: Presence) -> Iterator[Finding]:
    """How fast the folder is written, listed and read, and whether its clock is this machine's."""
    store, name = presence.notes.store, f".probe-{os.urandom(8).hex()}"
    try:
        began = time.monotonic()
        store.put(name, os.urandom(PROBE))
        written, about = time.monotonic(), clock_of(store, name)
        store.names()
        listed = time.monotonic()
        store.get(name, 0, PROBE)
        ended = time.monotonic()
        store.remove([name])
    except StoreAwayError as error:
        yield Finding(False, str(error), "see that this machine reaches it, and may write and remove there")
        return
    up, down = PROBE * 8e-6 / (written - began), PROBE * 8e-6 / (ended - listed)
    listing = f"{(listed - written) * 1e3:.0f} ms to list"
    yield Finding(True, f"{store.url}: {up:.0f} Mbit/s to it, {down:.0f} back, {listing}")
    if about is not None and abs(ahead := time.time() - about) > CLOCK_SECONDS + ended - began:
        where = "ahead of" if ahead > 0 else "behind"
        said = f"this machine's clock is {abs(ahead):.0f} s {where} the folder's"
        yield Finding(False, said, "set it, for example with: timedatectl set-ntp true")
