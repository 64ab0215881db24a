"""Stores of all kinds do what a folder of peers needs, on real servers where these are installed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fsspec.config import conf
from patience import patience

from bench.lib.folders import FOLDERS, Disk, unavailable
from farflung.networks.base import Traffic
from farflung.networks.folder.store import Store

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=str(unavailable()))


@pytest.fixture(params=["disk", "webdav", "sftp"])
def server(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    with FOLDERS[request.param](tmp_path / "files") as server:
        base = server.environment.get("FSSPEC_WEBDAV_BASE_URL")
        if base:
            monkeypatch.setitem(conf, "webdav", {"base_url": base})
        yield server


@pytest.mark.slow
def test_objects_are_written_whole_read_in_parts_listed_and_removed_by_many_at_a_time(server: Disk) -> None:
    store = Store(server.url, patience(5), Traffic())
    store.begin()
    contents = {f"object-{number}": os.urandom(1 + 20_000 * number) for number in range(8)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(store.put, contents, contents.values()))
        assert store.names() == {name: len(content) for name, content in contents.items()}
        assert list(pool.map(store.get, contents)) == list(contents.values())
        assert store.get("object-3", 10, 20) == contents["object-3"][10:20]
        with pytest.raises(FileNotFoundError):
            store.get("none")
        assert sum(pool.map(lambda number: store.create("=one", bytes([number])), range(8))) == 1
    assert len(store.get("=one")) == 1
    store.remove(["=one", "none", *contents])
    assert store.names() == {} and server.left() == []


@pytest.mark.slow
def test_a_store_that_was_away_is_there_again_for_who_has_used_it_before(server: Disk) -> None:
    store = Store(server.url, patience(5), Traffic())
    store.begin()
    store.put("before", b"1")
    server.pause()
    server.resume()
    store.put("after", b"2")
    assert store.names() == {"before": 1, "after": 1}
