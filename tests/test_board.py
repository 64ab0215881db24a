"""Words that replicas leave each other, in a store that takes its time."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from patience import patience, until
from torch.distributed import HashStore, Store
from warm import Python

from farflung.networks.board import Board, connected_anew

SLOW_SECONDS = 0.3


class SlowStore:
    """A store in memory that writes late, and whose answers come late."""

    def __init__(self) -> None:
        self._store = HashStore()
        self.asked = threading.Event()

    def append(self, key: str, value: str) -> None:
        threading.Event().wait(SLOW_SECONDS)
        self._store.append(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def get(self, key: str) -> bytes:
        told = self._store.get(key)
        self.asked.set()
        threading.Event().wait(SLOW_SECONDS)
        return told


def test_a_word_is_there_when_it_has_been_left_though_the_process_may_end_at_once() -> None:
    store: Any = SlowStore()
    Board(store, [0, 1], 1).leave("end", 3)
    assert store.check(["words/end"])


def test_a_look_that_began_before_a_word_was_left_does_not_hide_it() -> None:
    store: Any = SlowStore()
    one, other = Board(store, [0, 1], 0), Board(store, [0, 1], 1)
    one.leave("end", 3)
    assert other.words("end") == {}
    assert store.asked.wait(patience(5))
    store._store.append("words/end", "[1, 4]\n")
    assert other.words("end", patience(5)) == {0: 3, 1: 4}


def test_a_store_of_a_users_own_need_not_know_how_to_connect_anew() -> None:
    class Own(Store):
        pass

    own = Own()
    assert connected_anew(own) is own
    assert connected_anew(HashStore()) is not own


SERVER = """
import time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""
LEAVES = """
import sys
import torch.distributed as dist
from farflung.networks import TorchNetwork, works
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
network = TorchNetwork()
print("there", flush=True)
try:
    while True:
        store.check(["any"])
except dist.DistError:
    network.among([0]).board.leave("end", 3)
    print(len(works._threads), "under way", flush=True)
"""


@pytest.mark.slow
def test_who_leaves_when_the_store_is_gone_does_not_try_to_get_there_again(tmp_path: Path) -> None:
    """It would be tried for long, and so end a replica's process long after its launcher."""
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "leaves.py").write_text(LEAVES)
    server = Python(tmp_path / "server.py")
    until(lambda: server.out.read_text().endswith("\n"))
    leaves = Python(tmp_path / "leaves.py", server.out.read_text().strip())
    until(lambda: leaves.out.read_text() == "there\n" or leaves.poll() is not None)
    server.kill()
    said, errors = leaves.communicate(patience(60))
    assert said == "there\n0 under way\n", errors
