"""What files of known hosts say of an SSH server, compared with what OpenSSH's own program reads in them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import patience, until
from test_folder_stores import serving

from bench.lib.folders import OpenSsh, missing, unavailable
from farflung.errors import UserError
from farflung.networks.base import Traffic
from farflung.networks.folder import FolderNetwork, Identity, Presence, newcomer_info
from farflung.networks.folder.store import Store
from farflung.networks.peers.ticket import Ticket

pytest.importorskip("paramiko")
from farflung.networks.folder import host_keys

needs_server = pytest.mark.skipif(bool(unavailable() or missing("openssh")), reason="needs OpenSSH's server")


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This machine's file of known hosts."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    path = tmp_path / "home" / ".ssh" / "known_hosts"
    path.parent.mkdir(parents=True)
    return path


def new_key(path: Path) -> str:
    """The type and the text of a new key."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    return " ".join(path.with_suffix(".pub").read_text().split()[:2])


@pytest.mark.slow
@needs_server
def test_a_servers_key_is_compared_with_each_line_that_is_of_it(noted: Path, tmp_path: Path) -> None:
    with serving("openssh", tmp_path) as server:
        assert isinstance(server, OpenSsh)
        right = " ".join(server.host_keys["ed25519"].with_suffix(".pub").read_text().split()[:2])
        other, at = new_key(tmp_path / "other"), f"[127.0.0.1]:{server.port}"
        taken = {
            "of authorities": f"@cert-authority *.org {other}\n{at} {right}",
            "of another's revoked key": f"@revoked * {other}\n{at} {right}",
            "that is none": f"{at} ssh-ed25519 none\n|1|no|hash {other}\n@revoked\n# {at}\n{at}\t {right}  mine",
            "of two keys": f"{at} {other}\n{at} {right}",
            "of others": f"[127.0.0.1]:1,127.0.0.1 {other}\n*,!{at} {other}",
            "that is no text": f"\udcff {other}",
        }
        refused = {
            "revoked": f"{at} {right}\n@revoked {at} {right}",
            "not the one": f"[127.*]:{server.port} {other}",
            "is not the one": f"@cert-authority * {right}\n{at} {other}",
        }
        for lines in taken.values():
            noted.write_text(lines, errors="surrogateescape")
            Store(server.url, patience(5), Traffic()).begin()
        for why, lines in refused.items():
            noted.write_text(lines)
            with pytest.raises(UserError, match=why) as told:
                Store(server.url, patience(5), Traffic())
            assert "\n" not in str(told.value)


@pytest.mark.slow
@needs_server
def test_while_a_server_shows_another_key_a_peer_says_so_and_joins_again_when_it_has_its_own(
    noted: Path, tmp_path: Path
) -> None:
    told: list[str] = []
    with serving("openssh", tmp_path) as server:
        assert isinstance(server, OpenSsh)
        right = server.host_keys["ed25519"].with_suffix(".pub").read_text()
        noted.write_text(f"[127.0.0.1]:{server.port} {right}")
        ticket = Ticket.new("test", {}).at((server.url,))
        info = newcomer_info(ticket, "peer")
        network = FolderNetwork(Presence(ticket, Identity(tmp_path / "peer.key"), info, told.append, 3.0))
        server.pause()
        own, kept = server.host_keys["ed25519"], tmp_path / "kept"
        own.rename(kept)
        own.with_suffix(".pub").rename(kept.with_suffix(".pub"))
        new_key(own)
        server.resume()
        until(lambda: any("is not the one that" in line for line in told))
        assert "trains on alone" in told[-1] and "\n" not in told[-1]
        server.pause()
        shutil.move(kept, own)
        server.resume()
        until(lambda: any("is there again" in line for line in told))
        network.close()


@pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="needs OpenSSH's programs")
@settings(max_examples=12, deadline=None)
@given(
    name=st.sampled_from(["a.org", "A.org", "b.a.org", "[a.org]:2200", "10.0.0.1"]),
    names=st.lists(
        st.sampled_from(["a.org", "A.ORG", "*.org", "!a.org", "?.org", "[*]:2200", "10.*", "*"]), min_size=1
    ),
)
def test_names_are_read_as_openssh_reads_them(
    tmp_path_factory: pytest.TempPathFactory, name: str, names: list[str]
) -> None:
    path = tmp_path_factory.mktemp("noted") / "known_hosts"
    key = "AAAAC3NzaC1lZDI1NTE5AAAAIKCggXpe7KMjBXgmyAOTz5567T9OeJl8aLc0E7jNGDCz"
    path.write_text(f"{','.join(names)} ssh-ed25519 {key}\n")
    found = subprocess.run(["ssh-keygen", "-F", name, "-f", path], capture_output=True).returncode == 0
    assert host_keys._is_named(name, ",".join(names)) == found
