"""A page of how data was split among experts: who got what, and examples."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from html import escape
from pathlib import Path

from farflung.files import write_text
from farflung.report.page import page, sample_html


def write_split(out: Path, title: str, lines: Iterable[str], png: bytes | None) -> None:
    """Writes the page: what is told, line by line, and a picture of examples where there is one."""
    sections = [f"<section><h2>Who got what</h2><pre>{escape(chr(10).join(lines))}</pre></section>"]
    if png:
        shown = sample_html("a row for each expert", base64.b64encode(png).decode())
        sections.append(f"<section><h2>Examples</h2>{shown}</section>")
    write_text(out, page(title, sections, plotly=""))
