"""Puts the tables and plots of bench/results into docs/evidence.md: between its marks, and beside it.

    python bench/evidence.py

The words around the tables are written by hand; no figure between marks is.
"""

from __future__ import annotations

import re
from pathlib import Path

import evidence_plots as plots
import evidence_tables as tables

from farflung.files import write_text

PAGE = Path(__file__).parent.parent / "docs" / "evidence.md"

TABLES = {
    "frontier": tables.frontier,
    "hours": tables.hours,
    "inner": tables.inner,
    "gap": tables.gap,
    "gap regimes": tables.gap_regimes,
    "gap alternatives": tables.gap_alternatives,
    "ablation": tables.ablation,
    "scaling": tables.scaling,
    "scaling fits": tables.scaling_fits,
    "others": tables.others,
    "machines": tables.machines,
}


def filled(page: str) -> str:
    """The page with each table between its marks made anew. Raises KeyError for a mark of no table."""

    def fill(mark: re.Match[str]) -> str:
        return f"{mark[1]}\n{TABLES[mark[2]]()}\n{mark[3]}"

    return re.sub(r"(<!-- table: (.+?) -->)\n.*?(<!-- end -->)", fill, page, flags=re.DOTALL)


def main() -> None:
    write_text(PAGE, filled(PAGE.read_text()))
    for name, plot in {"frontier": plots.frontier, "hours": plots.hours, "scaling": plots.scaling}.items():
        plot(PAGE.parent / f"evidence-{name}.svg")


if __name__ == "__main__":
    main()
