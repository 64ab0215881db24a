"""A run's ticket: how to reach its peers, what proves membership, and the settings that all peers share."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from farflung.errors import UserError
from farflung.files import write_text, written_by_farflung
from farflung.networks.peers.addresses import leads_to
from farflung.tables import to_toml

LONGEST_NAME = 64
SIZE = "machines"
"""The setting that a ticket has to a group of so many peers."""


class NobodyAnswersError(UserError):
    """No peer is found where a ticket leads."""


@dataclass(frozen=True)
class Ticket:
    """Whoever has the ticket can join."""

    name: str
    secret: str
    """64 hexadecimal digits that every peer knows, and nobody else."""
    addresses: tuple[str, ...]
    """libp2p's, of peers that were there when it was written; or the folder through which they meet, as a URL."""
    settings: dict[str, Any]
    """Those that are not at their defaults."""

    @classmethod
    def new(cls, name: str, settings: dict[str, Any]) -> Ticket:
        """A ticket for a new run, with a new secret. Raises UserError for a name that no folder may have."""
        check_name(name)
        return cls(name, secrets.token_hex(32), (), settings)

    @property
    def run(self) -> str:
        """The run's name on the wire; it reveals nothing of the secret."""
        return hashlib.sha256(f"run {self.secret}".encode()).hexdigest()[:16]

    @property
    def folder(self) -> str:
        """The URL of the folder through which its peers meet; "" where they have addresses of their own."""
        return next((address for address in self.addresses if is_folder(address)), "")

    @property
    def size(self) -> int | None:
        """How many peers it is for, where these stay the same ones; None for a run, whose peers come and go."""
        size = self.settings.get(SIZE)
        return size if type(size) is int and size > 1 else None

    @property
    def settings_hash(self) -> str:
        """Equal for equal settings."""
        return hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:16]

    def at(self, addresses: tuple[str, ...]) -> Ticket:
        """The same run's ticket, with other addresses."""
        return replace(self, addresses=addresses)

    def proof(self, *parts: str) -> str:
        """A proof of `parts` that only the secret can make."""
        return hmac.new(bytes.fromhex(self.secret), json.dumps(parts).encode(), hashlib.sha256).hexdigest()

    def proves(self, proof: object, *parts: str) -> bool:
        """Whether `proof` was made of these parts by one who knows the secret."""
        return isinstance(proof, str) and hmac.compare_digest(proof.encode(), self.proof(*parts).encode())

    def text(self) -> str:
        """The ticket as a TOML file."""
        about = "# A ticket to a farflung run. Whoever has it can take part: hand it over as you would a password.\n"
        own = to_toml({"name": self.name, "secret": self.secret})
        addresses = "".join(f"    {json.dumps(address)},\n" for address in self.addresses)
        return f"{about}{own}addresses = [\n{addresses}]\n\n[settings]\n{to_toml(dict(sorted(self.settings.items())))}"

    def write(self, path: Path) -> None:
        """Writes the ticket, readable by its owner only."""
        write_text(path, self.text(), private=True)


def is_folder(address: str) -> bool:
    """Whether an address is the URL of a folder."""
    return re.fullmatch(r"[a-z][a-z0-9]*://.*", address) is not None


def _is_address(address: str) -> bool:
    return is_folder(address) or leads_to(address, address.rpartition("/p2p/")[2])


def check_name(name: str) -> None:
    """Refuses a run's name that would lead out of the folder of runs, or cannot be shown. Raises UserError."""
    if not (0 < len(name) <= LONGEST_NAME and name.isprintable()) or name[0] == "." or set(name) & set("/\\"):
        raise UserError(
            f"the run's name is {name[:80]!r}; choose one of at most {LONGEST_NAME} letters, digits, spaces and the "
            "like, without / and with no dot in front"
        )


def read_ticket(path: Path) -> Ticket:
    """The ticket in a file, or the newest one of a run folder. Raises UserError."""
    if path.is_dir():
        folder, path = path, path / "run.ticket"
        if written_by_farflung(folder) and not path.exists():
            raise UserError(
                f"the run in {folder} is not on the internet; see it with: farflung report {quote(str(folder))}"
            )
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        json.dumps(table)  # as the hash of settings is made, in which TOML's dates have no place
    except OSError as error:
        raise UserError(f"cannot read the ticket {path}: {error.strerror}; give the path of a ticket file") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is no ticket: {error}; ask for a new one") from error
    kinds = {"name": str, "secret": str, "addresses": list, "settings": dict}
    for key, kind in kinds.items():
        if not isinstance(table.get(key), kind):
            raise UserError(f"the ticket {path} is empty or incomplete: it has no {key}; ask for a new one")
    check_name(table["name"])
    secret, addresses = table["secret"], table["addresses"]
    if len(secret) != 64 or set(secret) - set("0123456789abcdef"):
        raise UserError(f"{path} is damaged: its secret is not 64 hexadecimal digits; ask for a new one")
    if not all(isinstance(address, str) and _is_address(address) for address in addresses):
        raise UserError(
            f"{path} is damaged: an address is not of the form /ip4/HOST/tcp/PORT/p2p/ID, or a folder's URL; ask for a "
            "new one"
        )
    return Ticket(table["name"], secret, tuple(addresses), table["settings"])
