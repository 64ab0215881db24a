"""Installs the package in tests/package as a user would: pip, from a wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from patience import patience

HERE = Path(__file__).parent

ENTRY_POINTS = """[farflung.methods]
ring = harbour.ring:ring
[farflung.codecs]
places = harbour.places:NAME
[farflung.networks]
bay = harbour.bay:BAY
[farflung.workloads]
regression = harbour.regression:Regression
"""


def install_package(folder: Path) -> Path:
    """The folder in which it is installed."""
    wheel, about = folder / "harbour-1.0-py3-none-any.whl", "harbour-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in sorted((HERE / "package" / "harbour").glob("*.py")):
            archive.write(path, f"harbour/{path.name}")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: harbour\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/entry_points.txt", ENTRY_POINTS)
        archive.writestr(f"{about}/RECORD", "")
    target = folder / "installed"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel]
    subprocess.run(command, check=True, timeout=patience(60), env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    return target


def farflung_with(package: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The command line where that package is installed, too."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package), str(HERE.parent)])}
    command = [sys.executable, "-m", "farflung", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patience(60))
