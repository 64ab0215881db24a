"""Folders on real servers of this machine, which can be stopped for a while: a shared disk, S3, WebDAV and SFTP.

    python -m bench.lib.folders KIND FOLDER ADDRESS PORT      serves a folder, where its kind needs a server

S3 is moto's server, with s3fs, in a folder of packages of its own; WebDAV is wsgidav and nginx; SFTP is asyncssh's
server and OpenSSH's.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self
from urllib.request import Request, urlopen

from bench.lib.environments import packages_of
from bench.lib.processes import children
from bench.lib.store import ROOT
from farflung.testing.hosts import LOOPBACK, Host, Process, free_port
from farflung.testing.waiting import until

BUCKET = "bucket"
PACKAGES = {"nginx": "nginx and libnginx-mod-http-dav-ext", "sshd": "openssh-server"}


class Disk:
    """A folder of this machine, as it would be of a shared disk."""

    program = ""
    """What the machine must have for it."""

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
    """A folder that a process serves, at a port of a host; of this machine unless told."""

    kind = ""

    def __init__(self, folder: Path, host: Host = LOOPBACK) -> None:
        super().__init__(folder)
        self.host, self.port = host, free_port()
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
        with self.folder.with_name(f"{self.kind}.log").open("a") as log:
            self._process = self.host.popen(self.command(), self.environment, cwd=ROOT, stdout=log, stderr=log)
        if self.host == LOOPBACK:  # else this process may not reach it
            until(self._answers, 60, f"the {self.kind} server; see {self.folder.with_name(self.kind)}.log")

    def command(self) -> list[str]:
        """What serves the folder until it is killed."""
        return [
            sys.executable,
            "-m",
            "bench.lib.folders",
            self.kind,
            str(self.folder),
            self.host.address,
            str(self.port),
        ]

    def _answers(self) -> bool:
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", self.port)) == 0


class WebDav(Served):
    """wsgidav."""

    kind = "webdav"

    def __init__(self, folder: Path, host: Host = LOOPBACK) -> None:
        super().__init__(folder, host)
        self.url = "webdav://server/run"
        self.environment = {"FSSPEC_WEBDAV_BASE_URL": f"http://{host.address}:{self.port}"}


class Sftp(Served):
    """asyncssh's server, which takes any password."""

    kind = "sftp"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.url = f"sftp://peer:word@127.0.0.1:{self.port}/run"


NGINX = """
load_module {modules}/ngx_http_dav_ext_module.so;
daemon off;
master_process off;
pid {scratch}/nginx.pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_max_body_size 0;
    client_body_temp_path {scratch}/body;
    proxy_temp_path {scratch}/proxy;
    fastcgi_temp_path {scratch}/fastcgi;
    uwsgi_temp_path {scratch}/uwsgi;
    scgi_temp_path {scratch}/scgi;
    server {{
        listen {address};
        root {folder};
        dav_methods PUT DELETE MKCOL COPY MOVE;
        dav_ext_methods PROPFIND OPTIONS;
    }}
}}
"""
"""One process, so that it ends with its connections when it is killed."""


class Nginx(WebDav):
    """nginx, with its modules for WebDAV."""

    kind = "nginx"
    program = "nginx"

    def command(self) -> list[str]:
        built = subprocess.run(["nginx", "-V"], capture_output=True, text=True, check=True).stderr
        modules = re.search(r"--modules-path=(\S+)", built)
        scratch = self.folder.parent
        told = {"modules": modules[1] if modules else "modules", "scratch": scratch, "folder": self.folder}
        address = f"{self.host.address}:{self.port}"
        (scratch / "nginx.conf").write_text(NGINX.format(address=address, **told))
        return ["nginx", "-p", str(scratch), "-c", str(scratch / "nginx.conf")]


class OpenSsh(Served):
    """OpenSSH's server, for this machine's user with a key made for it."""

    kind = "openssh"
    program = "sshd"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.host_keys = {kind: folder.parent / f"host-{kind}" for kind in ("rsa", "ecdsa", "ed25519")}
        self._user = folder.parent / "user"
        self.url = f"sftp://{getpass.getuser()}@127.0.0.1:{self.port}{folder.resolve()}/run"
        self.environment = {"FSSPEC_SFTP_KEY_FILENAME": str(self._user)}
        for kind, key in [*self.host_keys.items(), ("ed25519", self._user)]:
            subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", str(key)], check=True)

    def command(self) -> list[str]:
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # it separates privileges there
        options = {
            "ListenAddress": f"127.0.0.1:{self.port}",
            "AuthorizedKeysFile": self._user.with_suffix(".pub"),
            "StrictModes": "no",  # the folder of a bench may be anybody's
            "PidFile": "none",
            "PermitRootLogin": "prohibit-password",
            "Subsystem": "sftp internal-sftp",
        }
        program = shutil.which(self.program)
        assert program
        told = [*options.items(), *(("HostKey", key) for key in self.host_keys.values())]
        return [program, "-D", "-e", "-f", "/dev/null", *(f"-o{name} {value}" for name, value in told)]

    def pause(self) -> None:
        assert self._process
        sessions = list(_below(self._process.pid))
        super().pause()
        for pid in sessions:  # which may outlive what has begun them
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _below(pid: int) -> Iterator[int]:
    """The processes that one has begun, and those that these have."""
    for child in children(pid):
        yield child
        yield from _below(child)


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


FOLDERS: dict[str, type[Disk]] = {
    "disk": Disk,
    "s3": S3,
    "webdav": WebDav,
    "nginx": Nginx,
    "sftp": Sftp,
    "openssh": OpenSsh,
}


def missing(name: str) -> str:
    """What this machine lacks for a kind of folder, and what to do; empty where it has all."""
    program = FOLDERS[name].program if name in FOLDERS else ""
    return f"{program} is missing; install {PACKAGES[program]}" if program and not shutil.which(program) else ""


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
