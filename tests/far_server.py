"""A file server on loopback that a test can close and open again, and that remembers what it was asked for.

Of a file that is longer than `most`, it sends no more than so many bytes, and falls silent.
"""

from __future__ import annotations

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO


class FarServer:
    """Serves a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, list[str]()
        self.port = 0
        self.most = -1
        self._closed = threading.Event()
        self.open()

    def open(self) -> None:
        """Answers from now on, at the same address as before."""
        asked, server = self.asked, self
        self._closed.clear()

        class Handler(SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path.rpartition("/")[2])
                super().do_GET()

            def copyfile(self, source: IO[bytes], outputfile: IO[bytes]) -> None:
                outputfile.write(source.read(server.most))
                if source.read(1):
                    server._closed.wait(60)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), partial(Handler, directory=str(self.folder)))
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        """Refuses connections from now on."""
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"
