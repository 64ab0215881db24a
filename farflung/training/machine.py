"""Checks of what a machine needs to train: `farflung doctor` without a ticket."""

from __future__ import annotations

import ipaddress
import os
import platform
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch

from farflung.cores import usable_cores
from farflung.errors import counted
from farflung.findings import Finding
from farflung.formats import package_version
from farflung.networks.listening import ListenAddress

LEAST_DISK, LEAST_MEMORY = 1e9, 2e9
"""Bytes that a small run needs on the disk, and in memory."""


def checked(local: ListenAddress, folder: Path) -> Iterator[Finding]:
    """Versions, devices, cores, ports, disk and clock; `folder` is where runs would lie."""
    yield from _versions()
    yield _devices()
    yield _cores()
    yield _port(local)
    yield _name()
    yield _disk(folder)
    yield _clock()


def _versions() -> Iterator[Finding]:
    packages = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers"))
    yield Finding(True, f"farflung {package_version()}, Python {platform.python_version()}, {packages}")
    try:
        yield Finding(True, f"hivemind {metadata.version('hivemind')}, for runs on the internet")
    except metadata.PackageNotFoundError:
        remedy = "to train on the internet: pip install 'farflung[internet]'"
        yield Finding(True, "hivemind is not installed", remedy)


def _devices() -> Finding:
    if torch.cuda.is_available():
        devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return Finding(True, ", ".join(f"{one.name} with {one.total_memory / 1e9:.0f} GB" for one in devices))
    if torch.backends.mps.is_available():
        return Finding(True, "Apple's GPU, with --device mps")
    if shutil.which("nvidia-smi"):
        return Finding(False, "this torch does not see the GPU", "install torch for your CUDA: https://pytorch.org")
    return Finding(True, "no GPU: training runs on the CPU")


def _cores() -> Finding:
    told = counted(usable_cores(), "core")
    if threads := os.environ.get("OMP_NUM_THREADS"):
        told += f", of which each process uses {threads} (OMP_NUM_THREADS)"
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return Finding(True, told)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    few = free < LEAST_MEMORY
    return Finding(not few, f"{told}; {free / 1e9:.1f} GB of memory free", "close other programs" if few else "")


def _port(local: ListenAddress) -> Finding:
    where = f"{local.listen}, port {local.port or 'any'}"
    try:
        ipaddress.IPv4Address(local.listen)  # which peers listen at
        with socket.create_server((local.listen, local.port)):
            return Finding(True, f"programs here can listen at {where}")
    except (OSError, OverflowError, ValueError) as error:
        remedy = "choose another --port, or an address of this machine with --listen"
        why = getattr(error, "strerror", None) or error
        return Finding(False, f"nothing can listen at {where}: {why}", remedy)


def _name() -> Finding:
    name = socket.gethostname()
    try:
        return Finding(True, f"this machine's name, {name}, leads to {socket.gethostbyname(name)}")
    except OSError:
        remedy = "with torchrun, set GLOO_SOCKET_IFNAME to the network interface, such as eth0"
        return Finding(True, f"this machine's name, {name}, leads nowhere", remedy)


def _disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    few = free < LEAST_DISK
    return Finding(
        not few, f"{free / 1e9:.1f} GB free here", "make room, or give another folder with --out" if few else ""
    )


def _clock() -> Finding:
    says = f"the clock says {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} UTC"
    asked = ["timedatectl", "show", "-p", "NTPSynchronized"]
    try:
        kept = subprocess.run(asked, capture_output=True, text=True, timeout=10).stdout.strip().rpartition("=")[2]
    except (OSError, subprocess.TimeoutExpired):
        kept = ""
    if kept == "no":
        return Finding(True, f"{says}, and no time server keeps it", "peers must agree: timedatectl set-ntp true")
    return Finding(True, f"{says}, kept by a time server" if kept == "yes" else says)
