"""Folders on real servers of this machine, which can be stopped for a while: a shared disk, S3, WebDAV and SFTP.

    python -m bench.lib.folders KIND FOLDER ADDRESS PORT      serves a folder, where its kind needs a server

S3 is moto's server, with s3fs, in a folder of packages of its own; WebDAV is wsgidav; SFTP is asyncssh's server.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self
from urllib.request import Request, urlopen

from bench.lib.environments import packages_of
from bench.lib.store import ROOT
from farflung.testing.hosts import LOOPBACK, Process, free_port
from farflung.testing.waiting import until

BUCKET = "bucket"


class Disk:
    """A folder of this machine, as it would be of a shared disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = (folder / "run").as_uri()
        self.environment: Mapping[str, str] = {}
        folder.mkdir(parents=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left that runs."""

    def pause(self) -> None:
        """Nobody reaches it any more."""
        self.folder.rename(self.folder.with_name("away"))
        self.folder.touch()  # else who comes meanwhile would make it again

    def resume(self) -> None:
        """It is there again, as it was."""
        self.folder.unlink()
        self.folder.with_name("away").rename(self.folder)

    def left(self) -> list[str]:
        """The names of the objects that are there."""
        return [path.name for path in self.folder.rglob("*") if path.is_file()]


class Served(Disk):
    """A folder that a process serves, at a port of this machine."""

    kind = ""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.port = free_port()
        self._process: Process | None = None

    def __enter__(self) -> Self:
        self.resume()
        return self

    def __exit__(self, *_: object) -> None:
        self.pause()

    def pause(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()

    def resume(self) -> None:
        command = [sys.executable, "-m", "bench.lib.folders", self.kind, str(self.folder), "127.0.0.1", str(self.port)]
        with self.folder.with_name(f"{self.kind}.log").open("a") as log:
            self._process = LOOPBACK.popen(command, self.environment, cwd=ROOT, stdout=log, stderr=log)
        until(self._answers, 60, f"the {self.kind} server; see {self.folder.with_name(self.kind)}.log")

    def _answers(self) -> bool:
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", self.port)) == 0


class WebDav(Served):
    """wsgidav."""

    kind = "webdav"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.url = "webdav://127.0.0.1/run"
        self.environment = {"FSSPEC_WEBDAV_BASE_URL": f"http://127.0.0.1:{self.port}"}


class Sftp(Served):
    """asyncssh's server, which takes any password."""

    kind = "sftp"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.url = f"sftp://peer:word@127.0.0.1:{self.port}/run"


class S3(Served):
    """moto's server. What it holds is in its memory, so it is made to stand still and not ended."""

    kind = "s3"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.url = f"s3://{BUCKET}/run"
        self._address = f"http://127.0.0.1:{self.port}"
        self.environment = {
            "PYTHONPATH": os.pathsep.join([str(packages_of("s3")), str(ROOT)]),
            "AWS_ENDPOINT_URL": self._address,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "word",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def __enter__(self) -> Self:
        super().resume()
        urlopen(Request(f"{self._address}/{BUCKET}", method="PUT"), timeout=60).close()
        return self

    def __exit__(self, *_: object) -> None:
        super().pause()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def left(self) -> list[str]:
        with urlopen(f"{self._address}/{BUCKET}?list-type=2", timeout=60) as answer:
            keys = answer.read().decode().split("<Key>")[1:]
        return [key.partition("</Key>")[0].rpartition("/")[2] for key in keys]

    def _signal(self, number: signal.Signals) -> None:
        assert self._process
        self._process.send_signal(number)


FOLDERS: dict[str, type[Disk]] = {"disk": Disk, "s3": S3, "webdav": WebDav, "sftp": Sftp}


def unavailable() -> str | None:
    """Why this machine has no such servers, and what to do; None where it has."""
    missing = [name for name in ("asyncssh", "paramiko", "wsgidav", "cheroot", "webdav4") if not find_spec(name)]
    return f"{', '.join(missing)} missing; pip install 'farflung[dev]'" if missing else None


def _serve_s3(_: Path, address: str, port: int) -> None:
    from moto.server import main as serve

    serve(["-H", address, "-p", str(port)])


def _serve_webdav(folder: Path, address: str, port: int) -> None:
    from cheroot.wsgi import Server
    from wsgidav.wsgidav_app import WsgiDAVApp

    how: dict[str, Any] = {
        "provider_mapping": {"/": str(folder)},
        "simple_dc": {"user_mapping": {"*": True}},
        "lock_storage": False,
        "verbose": 1,
    }
    Server((address, port), WsgiDAVApp(how), numthreads=16).start()


def _serve_sftp(folder: Path, address: str, port: int) -> None:
    import asyncssh

    class Anybody(asyncssh.SSHServer):
        def password_auth_supported(self) -> bool:
            return True

        def validate_password(self, username: str, password: str) -> bool:
            return True

    async def serve() -> None:
        def files(channel: Any) -> asyncssh.SFTPServer:
            return asyncssh.SFTPServer(channel, chroot=os.fsencode(folder))

        key = asyncssh.generate_private_key("ssh-ed25519")
        await asyncssh.listen(address, port, server_factory=Anybody, server_host_keys=[key], sftp_factory=files)
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    kind, folder, address, port = sys.argv[1:]
    {"s3": _serve_s3, "webdav": _serve_webdav, "sftp": _serve_sftp}[kind](Path(folder), address, int(port))
