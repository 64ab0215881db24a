"""An SSH server's key is compared with what this machine has noted of it, before anybody logs in there."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import paramiko
from fsspec.utils import infer_storage_options

from farflung.errors import UserError

NOTED = (Path("~/.ssh/known_hosts"), Path("/etc/ssh/ssh_known_hosts"))
"""Where OpenSSH notes the keys of servers."""
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
        self._noted, self._noted_in = _noted(name)
        security = self.get_security_options()
        security.key_types = sorted(security.key_types, key=lambda one: _type_of(one) not in self._noted)

    def start_client(self, event: Any = None, timeout: float | None = None) -> None:
        """As paramiko's; then compares the key. Raises UserError where it is another."""
        super().start_client(event, timeout)
        key = self.get_remote_server_key()
        if self._noted and self._noted.get(key.get_name()) != key:
            self.close()
            raise UserError(
                f"the key of the SSH server {self._name} is not the one that {self._noted_in} has: somebody may stand "
                f"in its place; if the server has a new key, forget the old one with: ssh-keygen -R '{self._name}'"
            )


def _noted(name: str) -> tuple[dict[str, paramiko.PKey], str]:
    """The keys that are noted of a server, by type, and the file that has them."""
    for path in NOTED:
        keys = paramiko.HostKeys()
        try:
            keys.load(str(path.expanduser()))
        except OSError:
            continue
        if found := keys.lookup(name):
            return dict(found), str(path)
    return {}, ""


def _type_of(signs: str) -> str:
    """The type of the keys that sign in a way."""
    return RSA if signs.startswith(RSA_SIGNED) else signs
