"""Pictures as SVG, the same file for the same results."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "farflung"
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.transforms import Bbox  # noqa: E402

__all__ = ["MARKERS", "name_points", "plt", "save"]

MARKERS = "osD^v<>pPX*hd8"
"""Of the rows of a picture, so that they are not told apart by colours alone."""
PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
"""Behind a name, so that no line goes through it."""
WIDE = 7.0
"""A point's width, and how far from it its name is, in points of type."""
ACROSS = {"left": WIDE, "right": -WIDE, "center": 0}
UP = {"center": 0, "bottom": WIDE, "top": -WIDE}
"""How a name may be aligned to its point, and how far off that puts it."""


def name_points(axes: Any, points: Mapping[str, tuple[float, float]]) -> None:
    """Writes each point's name beside it, from the lowest point up, where it covers no point and no other name.

    Where there is no such place, it covers some: a point without a name would say nothing.
    """
    axes.figure.draw_without_rendering()
    half = WIDE / 2 * axes.figure.dpi / 72
    middles = axes.transData.transform([*points.values()])
    taken = [Bbox([middle - half, middle + half]) for middle in middles]
    for name, point in sorted(points.items(), key=lambda item: item[1][1]):
        for across, up in product(ACROSS, UP):
            offset = ACROSS[across], UP[up]
            text = axes.annotate(
                name, point, offset, textcoords="offset points", ha=across, va=up, fontsize=8, bbox=PAPER
            )
            box = text.get_window_extent()
            if axes.bbox.contains(*box.p0) and axes.bbox.contains(*box.p1) and not box.count_overlaps(taken):
                taken.append(box)
                break
            text.remove()
        else:
            axes.annotate(name, point, (WIDE, 0), textcoords="offset points", va="center", fontsize=8)


def save(figure: Any, path: Path) -> None:
    """Writes a figure, without the date."""
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
