"""farflung doctor without a ticket: a line for each thing that training needs, and what to do about it."""

from __future__ import annotations

import os
import shutil
import socket
from collections import namedtuple
from importlib import metadata
from pathlib import Path

import pytest
from processes import run_here


def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> list[str]:
    """Its exit code, then its lines."""
    code = run_here(monkeypatch, folder, "doctor", *words)
    return [str(code), *capsys.readouterr().out.splitlines()]


def test_a_machine_is_described_without_advice_before_ok(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, *lines = doctor(monkeypatch, capsys, tmp_path, "--listen", "127.0.0.1")
    assert code == "0" or any(line.startswith("BAD ") for line in lines)
    said = "\n".join(lines)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    for word in (
        f"torch {metadata.version('torch')}",
        f" {cores} core",
        "127.0.0.1, port any",
        " GB free here",
        " UTC",
    ):
        assert word in said
    assert all(line[:5] in ("ok   ", "note ", "BAD  ") for line in lines) and not any(tmp_path.iterdir())


def test_what_is_missing_has_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**9, 10**9 - 5, 5))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, *lines = doctor(monkeypatch, capsys, tmp_path, "--listen", "127.0.0.1", "--port", str(port))
    bad = [line for line in lines if line.startswith("BAD ")]
    assert code == "1" and any("give another folder with --out" in line for line in bad)
    assert any(f"127.0.0.1, port {port}: " in line and "choose another --port" in line for line in bad)


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--port", "70000", "0.0.0.0, port 70000: bind(): port must be 0-65535"),
        ("--listen", "localhost", "localhost, port any: Expected 4 octets"),
    ],
)
def test_where_no_peer_can_listen_is_told_in_a_line(
    flag: str,
    value: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, *lines = doctor(monkeypatch, capsys, tmp_path, flag, value)
    (told,) = [line for line in lines if "can listen" in line]
    assert code != "0" and told.startswith("BAD ") and says in told and "choose another --port, or an address" in told
