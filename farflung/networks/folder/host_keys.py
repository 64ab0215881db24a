"""An SSH server's key is compared with what this machine has noted of it, before anybody logs in there."""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import paramiko
from fsspec.utils import infer_storage_options

from farflung.errors import UserError

NOTED = (Path("~/.ssh/known_hosts"), Path("/etc/ssh/ssh_known_hosts"))
"""Where OpenSSH notes the keys of servers."""
REVOKED = "@revoked"
SSH_PORT = 22
RSA, RSA_SIGNED = "ssh-rsa", "rsa-sha2-"
"""The type of an RSA key, and how the ways begin in which it signs."""


def comparing(url: str) -> dict[str, Any]:
    """What fsspec must be told so that the key of a URL's server is compared.

    A server that is not noted is taken as it is, and so is one in a file that cannot be read.
    """
    told = infer_storage_options(url)
    host, port = told.get("host", ""), int(told.get("port", SSH_PORT))
    name = host if port == SSH_PORT else f"[{host}]:{port}"
    return {"transport_factory": partial(ComparingTransport, name=name)}


class ComparingTransport(paramiko.Transport):  # type: ignore[misc]
    """A connection to a server that has a name in `known_hosts`, where it may be noted."""

    def __init__(self, *about: Any, name: str, **more: Any) -> None:
        super().__init__(*about, **more)
        self._name = name
        self._lines = [line for path in NOTED for line in _lines(path) if _is_named(name, line.names)]
        noted = {line.type for line in self._lines if not line.marker}
        security = self.get_security_options()
        security.key_types = sorted(security.key_types, key=lambda one: _type_of(one) not in noted)

    def start_client(self, event: Any = None, timeout: float | None = None) -> None:
        """As paramiko's; then compares the key. Raises UserError where it is another, or revoked."""
        super().start_client(event, timeout)
        key = self.get_remote_server_key()
        if fault := self._fault(key.get_name(), key.get_base64()):
            self.close()
            raise UserError(fault)

    def _fault(self, type_: str, key: str) -> str:
        """Why a key of the server's is refused; empty where it is not. Any one that is noted will do."""
        server, alike = f"the key of the SSH server {self._name}", [one for one in self._lines if one.key == key]
        if revoked := [one for one in alike if one.marker == REVOKED]:
            return f"{server} is revoked in {revoked[0].path}: do not log in there; ask who runs it for another key"
        noted = [one for one in self._lines if not one.marker]
        if not noted or any(one.type == type_ for one in alike if not one.marker):
            return ""
        return (
            f"{server} is not the one that {noted[0].path} has: somebody may stand in its place; if the server has a "
            f"new key, forget the old one with: ssh-keygen -R '{self._name}'"
        )


class _Line(NamedTuple):
    """What a file of known hosts says of a key, in base64."""

    path: Path
    marker: str
    names: str
    type: str
    key: str


def _lines(path: Path) -> Iterator[_Line]:
    """What a file says of keys. Those of authorities are left out: servers show no certificates to paramiko."""
    try:
        text = path.expanduser().read_text(errors="replace")
    except (OSError, RuntimeError):  # there may be no home
        return
    for line in text.splitlines():
        marked, fields = line.startswith("@"), line.split()
        marker = fields.pop(0) if marked else ""
        if marker in ("", REVOKED) and len(fields) > 2 and not fields[0].startswith("#"):
            yield _Line(path, marker, *fields[:3])


def _is_named(name: str, names: str) -> bool:
    """Whether names that a line is of are a server's: one that is hashed, or patterns with * and ?, or ! before."""
    if names.startswith("|"):
        try:
            return bool(paramiko.HostKeys.hash_host(name.lower(), names) == names)
        except (binascii.Error, AssertionError, IndexError):  # no hash
            return False
    found = [one for one in names.split(",") if _matches(name, one.removeprefix("!"))]
    return bool(found) and not any(one.startswith("!") for one in found)


def _matches(name: str, pattern: str) -> bool:
    parts = {"*": ".*", "?": "."}
    return bool(re.fullmatch("".join(parts.get(letter, re.escape(letter)) for letter in pattern), name, re.IGNORECASE))


def _type_of(signs: str) -> str:
    """The type of the keys that sign in a way."""
    return RSA if signs.startswith(RSA_SIGNED) else signs
