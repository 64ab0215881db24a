"""What answers in a folder's place may answer anything: that is a store that is away, and fills no memory."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from threading import Thread

import pytest
from fsspec.config import conf
from patience import patience

from farflung.errors import UserError
from farflung.networks.base import Traffic
from farflung.networks.folder.store import Store, StoreAwayError

pytestmark = pytest.mark.skipif(not find_spec("webdav4"), reason="webdav4 is missing; pip install 'farflung[dev]'")

ENDLESS = 1 << 40


class Portal(BaseHTTPRequestHandler):
    """A page to log in to, whatever one asks for; to who reads, without an end."""

    protocol_version = "HTTP/1.1"
    sent = 0

    def do_GET(self) -> None:
        self._answer(ENDLESS)
        with contextlib.suppress(OSError):
            while Portal.sent < ENDLESS:
                Portal.sent += self.wfile.write(bytes(1 << 16))

    def do_PROPFIND(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(5)
        self.wfile.write(b"hello")

    def do_OPTIONS(self) -> None:
        self._answer(0)

    def _answer(self, size: int) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(size))
        self.end_headers()

    def log_message(self, *told: object) -> None:
        """Nothing."""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Portal) as server:
        server.daemon_threads = True
        thread = Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setitem(conf, "webdav", {"base_url": f"http://127.0.0.1:{server.server_address[1]}"})
        try:
            yield Store("webdav://server/run", 0.2, Traffic())
        finally:
            server.shutdown()
            thread.join(patience(5))


def test_a_listing_that_is_none_counts_as_a_store_that_is_away(store: Store) -> None:
    with pytest.raises(StoreAwayError, match="not a multistatus response"):
        store.names()


def test_of_an_answer_without_an_end_only_what_was_asked_for_is_kept(store: Store) -> None:
    Portal.sent = 0
    assert store.get("one", 10, 1000) == bytes(990)
    assert Portal.sent < 1 << 24


def test_an_ssh_server_that_ends_at_once_is_told_of_in_one_line_without_the_password(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("paramiko")
    monkeypatch.setattr(logging.root, "handlers", [])  # as where nobody has asked for logs

    def hang_up(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                server.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        Thread(target=hang_up, args=(server,), daemon=True).start()
        address = f"127.0.0.1:{server.getsockname()[1]}/run"
        with pytest.raises(UserError, match=f"cannot open sftp://peer@{address}: .*; see that"):
            Store(f"sftp://peer:word@{address}", 0.2, Traffic())
    assert capsys.readouterr().err == ""
