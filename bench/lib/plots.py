"""Pictures as SVG, the same file for the same results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "farflung"
from matplotlib import pyplot as plt  # noqa: E402

__all__ = ["plt", "save"]


def save(figure: Any, path: Path) -> None:
    """Writes a figure, without the date."""
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
