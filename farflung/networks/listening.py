"""Where a peer on the internet listens; importable without the extra that the internet needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ListenAddress:
    """Where a peer can be reached."""

    listen: str = "0.0.0.0"
    """The address of the interface to listen at; 0.0.0.0 for all, with help to get through NAT."""
    port: int = 0
    """The TCP port to listen at; 0 takes a free one."""
    announce: tuple[str, ...] = ()
    """libp2p addresses to tell others instead of those found out, such as /ip4/203.0.113.7/tcp/4001."""
