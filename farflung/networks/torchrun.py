"""Joining the processes that torchrun started, with errors that say what to do."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from farflung.errors import UserError
from farflung.networks.base import PeerLostError
from farflung.networks.board import connected_anew

log = logging.getLogger(__name__)

REMINDER_SECONDS = 15.0
"""Seconds between two lines about whom it waits for."""


def join(starting_s: float) -> tuple[dict[int, str], Store, Store]:
    """Joins the process group that torchrun's environment variables describe.

    Returns how each process is called in messages, and a store where they can leave each other word, with another
    connection to it. Raises UserError.
    """
    limit = timedelta(seconds=starting_s)
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = _meeting_place(rank, limit)
        another = connected_anew(store)  # before any can know of all others, and end: the first takes the store along
        addresses = _check_in(store, rank, size, starting_s)
        dist.init_process_group("gloo", store=PrefixStore("gloo", store), rank=rank, world_size=size, timeout=limit)
    except (dist.DistError, RuntimeError, ValueError, LookupError, TimeoutError) as error:
        raise UserError(_explain(error)) from error
    return addresses, store, another


def tell_launcher(error: BaseException, kind: str = "") -> None:
    """Leaves torchrun an error, with which it then ends; ours in one line; of a `kind`, which launchers read.

    Does nothing elsewhere. Raises OSError where it cannot be written.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        ours = type(error).__module__.startswith("farflung.")
        printed = f"none is needed: {error}" if ours else "".join(traceback.format_exception(error))
        # torchrun names the earliest, by whole seconds: who has lost another one comes after that one's own error.
        when = int(time.time()) + isinstance(error, PeerLostError)
        extra = {"py_callstack": printed, "timestamp": str(when)}
        kept = {"message": {"message": f"{kind or type(error).__name__}: {error}", "extraInfo": extra}}
        Path(path).write_text(json.dumps(kept), "utf-8")


def _meeting_place(rank: int, limit: timedelta) -> Store:
    """The store at MASTER_ADDR and MASTER_PORT, which torchrun or else replica 0 keeps."""
    kept_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and not kept_by_torchrun,
        timeout=limit,
        wait_for_workers=False,
    )
    return PrefixStore(f"farflung/attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _check_in(store: Store, rank: int, size: int, starting_s: float) -> dict[int, str]:
    """Publishes this replica's address, and waits for all others'; without this, joining hangs when one is missing."""
    host = socket.gethostname()
    store.set(f"address/{rank}", f"{host}, process {os.getpid()}")
    began = time.monotonic()
    for other in range(size):
        while not store.check([f"address/{other}"]):
            waited = time.monotonic() - began
            if waited >= starting_s:
                raise TimeoutError(f"replica {other} of {size} has not come within {starting_s:g} s (--starting)")
            if waited >= REMINDER_SECONDS:
                log.warning("replica %d waits for replica %d to start: %.0f of %g s", rank, other, waited, starting_s)
            with contextlib.suppress(dist.DistError, RuntimeError):  # that is the next turn's question
                store.wait(
                    [f"address/{other}"], timedelta(seconds=max(0.1, min(REMINDER_SECONDS, starting_s - waited)))
                )
    return {other: store.get(f"address/{other}").decode() for other in range(size)}


def _explain(error: Exception) -> str:
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    text = str(error)
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return f"port {where} is in use; choose another with MASTER_PORT or torchrun's --master-port"
    if isinstance(error, ValueError | LookupError):
        return f"cannot join the other replicas: bad or missing {text}; start with torchrun, or set RANK and MASTER_*"
    first_line = text.splitlines()[0] if text else type(error).__name__
    return (
        f"cannot join the other replicas at {where}: {first_line}; see that this host can reach that one, "
        "that each process has been started, and which interface GLOO_SOCKET_IFNAME names"
    )
