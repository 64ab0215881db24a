"""Stores of all kinds do what a folder of peers needs, on real servers where these are installed."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest
from fsspec.config import conf, set_conf_env
from patience import patience

from bench.lib.folders import FOLDERS, Disk, OpenSsh, missing, unavailable
from farflung.errors import UserError
from farflung.networks.base import Traffic
from farflung.networks.folder.store import Store, StoreAwayError

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=str(unavailable()))


@contextmanager
def serving(name: str, folder: Path) -> Iterator[Disk]:
    """A server's folder, of which this process is told what others are by their environment."""
    if lacking := missing(name):
        pytest.skip(lacking)
    with FOLDERS[name](folder / "files") as server, pytest.MonkeyPatch.context() as patch:
        told: dict[str, dict[str, object]] = {}
        set_conf_env(told, dict(server.environment))
        for protocol, settings in told.items():
            patch.setitem(conf, protocol, settings)
        yield server


@pytest.fixture(params=["disk", "webdav", "nginx", "sftp", "openssh"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    with serving(request.param, tmp_path) as server:
        yield server


@pytest.mark.slow
def test_objects_are_written_whole_read_in_parts_listed_and_removed_by_many_at_a_time(server: Disk) -> None:
    store = Store(server.url, patience(5), Traffic())
    store.begin()
    contents = {f"object-{number}": os.urandom(1 + 20_000 * number) for number in range(8)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(store.put, contents, contents.values()))
        assert store.names() == {name: len(content) for name, content in contents.items()}
        assert list(pool.map(lambda name: store.get(name, 0, len(contents[name])), contents)) == list(contents.values())
        assert store.get("object-3", 10, 20) == contents["object-3"][10:20]
        with pytest.raises(FileNotFoundError):
            store.get("none", 0, 9)
        assert sum(pool.map(lambda number: store.create("=one", bytes([number])), range(8))) == 1
    assert len(store.get("=one", 0, 9)) == 1
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


@pytest.mark.slow
def test_a_folder_that_somebody_removes_is_made_again_but_not_where_a_disk_may_be_missing(server: Disk) -> None:
    on_disk = server.url.startswith("file:")
    store = Store(server.url, 0.2 if on_disk else patience(5), Traffic())
    store.begin()
    store.put("before", b"1")
    shutil.rmtree(server.folder / "run")
    if on_disk:
        with pytest.raises(StoreAwayError, match="has gone"):
            store.put("after", b"2")
    else:
        store.put("after", b"2")
        assert store.names() == {"after": 1}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["webdav", "nginx"])
def test_a_webdav_server_is_asked_no_more_than_it_must_be(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(name, tmp_path) as server:
        store = Store(server.url, patience(5), Traffic())
        store.begin()
        assert [folder.name for folder in server.folder.iterdir()] == ["run"]  # as the URL says

        def asked(request: Callable[[], object]) -> list[str]:
            caplog.clear()
            with caplog.at_level("INFO", "httpx"):
                request()
            return [record.getMessage().split()[2] for record in caplog.records if record.name == "httpx"]

        assert asked(lambda: store.put("empty", b"")) == ["PUT"]
        assert asked(lambda: store.put("one", bytes(100_000))) == ["PUT", "MOVE"]
        assert asked(store.names) == ["PROPFIND"]
        assert asked(lambda: store.get("one", 0, 100_000)) == ["GET"]
        assert asked(lambda: store.get("one", 10, 20)) == ["GET"]
        assert asked(lambda: store.get("one", 10, 10)) == []
        assert asked(lambda: store.remove(["one", "empty"])) == ["DELETE"] * 2


@contextmanager
def far_away(port: int, seconds: float) -> Iterator[int]:
    """A port behind which there is what is behind another one of this machine, so many seconds away."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(1 << 16):
            loop.call_later(seconds, writer.write, data)
        loop.call_later(seconds, writer.close)

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, back), copy(there, writer), return_exceptions=True)

    async def serve() -> None:
        async with await asyncio.start_server(pass_on, "127.0.0.1", 0) as server:
            serving.set_result((asyncio.get_running_loop(), server.sockets[0].getsockname()[1]))
            await over.wait()

    serving, over = Future[tuple[asyncio.AbstractEventLoop, int]](), asyncio.Event()
    thread = Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    loop, own_port = serving.result(patience(5))
    try:
        yield own_port
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sftp", "openssh"])
def test_an_ssh_server_far_away_is_not_waited_for_with_each_part_of_an_object(name: str, tmp_path: Path) -> None:
    """Of a megabyte 128 parts were read, and 32 written, one after the other."""
    content = os.urandom(1 << 20)
    with serving(name, tmp_path) as server, far_away(int(server.port), 0.05) as port:  # type: ignore[attr-defined]
        store = Store(server.url.replace(str(server.port), str(port)), patience(30), Traffic())  # type: ignore[attr-defined]
        store.begin()

        def seconds(request: Callable[[], object]) -> float:
            began = time.monotonic()
            request()
            return time.monotonic() - began

        listing = seconds(store.names)  # which takes four answers
        assert seconds(lambda: store.put("one", content)) < 6 * listing
        assert seconds(lambda: store.get("one", 0, 1 << 20)) < 6 * listing
        assert store.get("one", 0, 2 << 20) == content and store.get("one", 5, 600_000) == content[5:600_000]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ed25519", "rsa", "ecdsa"])
def test_an_ssh_server_with_another_key_than_is_noted_of_it_is_refused_before_one_logs_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Whatever type of key is noted, the server, which has one of each, shows that."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    noted = tmp_path / "home" / ".ssh" / "known_hosts"
    noted.parent.mkdir(parents=True)
    with serving("openssh", tmp_path) as server:
        assert isinstance(server, OpenSsh)
        name = f"[127.0.0.1]:{server.port}"
        noted.write_text(f"{name} {server.host_keys[kind].with_suffix('.pub').read_text()}")
        Store(server.url, patience(5), Traffic()).begin()
        subprocess.run(["ssh-keygen", "-H", "-f", noted], check=True, capture_output=True)
        assert name not in noted.read_text(), "names may be written so that nobody can read them"
        Store(server.url, patience(5), Traffic()).begin()
        other = tmp_path / "other"
        subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", other], check=True)
        noted.write_text(f"{name} {other.with_suffix('.pub').read_text()}")
        with pytest.raises(UserError, match=r"is not the one that ~/\.ssh/known_hosts has") as told:
            Store(server.url, patience(5), Traffic())
        assert "ssh-keygen -R" in str(told.value) and "\n" not in str(told.value)
        subprocess.run(["ssh-keygen", "-R", name, "-f", noted], check=True, capture_output=True)
        Store(server.url, patience(5), Traffic()).begin()
