"""docs/evidence.md: its tables, between marks, and the pictures beside it, made of kept results alone.

The words around the tables are written by hand; no figure between marks is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.lib import recommended
from bench.lib.catalog import Bench, benches
from bench.lib.store import RESULTS, ROOT, Store
from bench.lib.table import Part, Table, markdown
from farflung.files import write_text

PAGE = ROOT / "docs" / "evidence.md"


def stored() -> dict[str, Bench]:
    """The benches that have kept results."""
    return {name: bench for name, bench in benches().items() if (RESULTS / f"{name}.json").exists()}


def tables_of(bench: Bench) -> dict[str, list[Part]]:
    """What a bench's kept results say, by name."""
    module, store = bench.load(), Store(bench.name)
    if hasattr(module, "tables"):
        tables: dict[str, list[Part]] = module.tables(store, module.Options())
        return tables
    return {", ".join(f"{key} {value}" for key, value in options.items()): parts for options, parts in store.told()}


def plots_of(bench: Bench) -> dict[str, Callable[[Path], None]]:
    """The pictures of a bench's kept results, by name."""
    module = bench.load()
    found: dict[str, Callable[[Path], None]] = module.plots(Store(bench.name)) if hasattr(module, "plots") else {}
    return found


def all_tables() -> dict[str, list[Part]]:
    """The tables that a page can have, by the names of their marks."""
    shown = [bench for bench in stored().values() if hasattr(bench.load(), "tables")]
    found = {name: parts for bench in shown for name, parts in tables_of(bench).items()}
    rows = [(bench.name, "<br>".join(Store(bench.name).made_on())) for bench in shown]
    return {**found, "machines": [Table({"table": "", "made on": ""}, rows)]}


def filled(page: str, tables: dict[str, Any]) -> str:
    """The page with each table between its marks made anew. Raises KeyError for a mark of no table."""

    def fill(mark: re.Match[str]) -> str:
        return f"{mark[1]}\n{markdown(tables[mark[2]])}\n{mark[3]}"

    return re.sub(r"(<!-- table: (.+?) -->)\n.*?(<!-- end -->)", fill, page, flags=re.DOTALL)


def write() -> None:
    """Makes the page's tables and pictures anew, and the table that `farflung recommend` goes by."""
    recommended.write()
    page = PAGE.read_text()
    write_text(PAGE, filled(page, all_tables()))
    for bench in stored().values():
        for name, draw in plots_of(bench).items():
            if f"(evidence-{name}.svg)" in page:
                draw(PAGE.parent / f"evidence-{name}.svg")
