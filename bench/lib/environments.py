"""Other libraries, each in an environment or a folder of its own below runs/others, beside this repository's code."""

from __future__ import annotations

import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

from bench.lib.store import ROOT

NEEDED = ("torch", "transformers", "numpy", "safetensors", "tyro", "rich")
"""What a replica of ours needs, in the versions that are installed here."""

LIBRARIES = {"farflung": "", "torchft": "torchft==0.2.0", "hivemind": "hivemind==1.1.12"}


def python_of(library: str) -> str:
    """The interpreter of an environment that has a library; makes it if need be."""
    if not LIBRARIES[library]:
        return sys.executable
    folder = ROOT / "runs" / "others" / library
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        print(f"making an environment for {library} in {folder}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        pins = [f"{name}=={version(name).partition('+')[0]}" for name in NEEDED]
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, *pins, LIBRARIES[library]], check=True)
        subprocess.run([*install, "--no-deps", "-e", str(ROOT)], check=True)
        (folder / "ready").touch()
    return str(python)


PACKAGES = {"s3": ("s3fs==2026.9.0", "moto[s3]==5.2.5", "flask==3.1.3", "flask-cors==6.0.5")}
"""What needs older versions of what others need: botocore an older python-dateutil."""


def packages_of(name: str) -> Path:
    """A folder of packages for PYTHONPATH, which comes before what is installed; makes it if need be."""
    folder = ROOT / "runs" / "others" / name
    if not (folder / "ready").exists():
        print(f"installing {', '.join(PACKAGES[name])} in {folder}", flush=True)
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, "--upgrade", "--target", str(folder), *PACKAGES[name]], check=True)
        (folder / "ready").touch()
    return folder
