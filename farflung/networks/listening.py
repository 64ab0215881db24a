"""Where a peer on the internet listens; importable without the extra that the internet needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ListenAddress:
    """Where a peer can be reached."""

    listen: str = "0.0.0.0"
    """The address to listen at. 0.0.0.0 is all of this machine's, and gets help to pass NAT."""
    port: int = 0
    """The TCP port to listen at; 0 takes a free one."""
    announce: tuple[str, ...] = ()
    """The addresses that others are told, in place of those that farflung finds, such as /ip4/203.0.113.7/tcp/4001."""
