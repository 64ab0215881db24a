"""One self-contained HTML page of all kept results, by question."""

from __future__ import annotations

import re
import tempfile
from html import escape
from itertools import groupby
from pathlib import Path

from bench.lib.catalog import ROOT, Bench, benches, docstring_of
from bench.lib.evidence import plots_of, stored, tables_of
from bench.lib.store import Store
from bench.lib.table import Part, Table
from farflung.files import write_text

STYLE = """
:root { color-scheme: light dark; --line: color-mix(in srgb, currentColor 20%, transparent) }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem }
h2 { margin-top: 3rem; border-bottom: 2px solid var(--line) }
h3 { margin: 2.5rem 0 0.3rem }
p { max-width: 60rem; margin: 0.4rem 0 }
nav { display: flex; flex-wrap: wrap; gap: 0.2rem 1.2rem }
.none, .made { opacity: 0.65; font-size: 13px }
.wide { overflow-x: auto }
table { border-collapse: collapse; margin: 0.8rem 0; font-size: 13px; font-variant-numeric: tabular-nums }
caption { text-align: left; font-weight: 600; padding-bottom: 0.2rem }
th, td { padding: 0.15rem 0.7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left; padding-left: 0 }
.plot { background: white; max-width: 60rem }
.plot svg { width: 100%; height: auto }
"""


def write(path: Path) -> Path:
    """Writes the page; returns where it is."""
    every, kept = benches(), stored()
    links = " ".join(f'<a href="#{name}">{name}</a>' for name in every if name in kept)
    sections = [
        section(question, list(group), kept) for question, group in groupby(every.values(), key=lambda b: b.question)
    ]
    body = f"<h1>farflung, measured</h1><nav>{links}</nav>{''.join(sections)}"
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    write_text(path, f"<!doctype html>{meta}<title>farflung, measured</title><style>{STYLE}</style>{body}")
    return path


def section(question: str, group: list[Bench], kept: dict[str, Bench]) -> str:
    """All benches of one question; of those without results, how to make them."""
    about = docstring_of(ROOT / question / "__init__.py")
    shown = "".join(article(bench) for bench in group if bench.name in kept)
    missing = ", ".join(f"<code>{bench.name}</code>" for bench in group if bench.name not in kept)
    rest = f'<p class="none">No results are kept of {missing}; <code>python -m bench run NAME</code> makes them.</p>'
    return f"<h2>{question}</h2><p>{escape(about)}</p>{shown}{rest if missing else ''}"


def article(bench: Bench) -> str:
    """One bench: its question, its tables and pictures, and what they were made on."""
    question, _, rest = bench.docstring.partition("\n")
    head = f'<h3 id="{bench.name}">{escape(question)}</h3><p>{escape(rest)}</p>'
    tables = "".join(shown(part) for parts in tables_of(bench).values() for part in parts)
    made = "".join(f'<p class="made">{escape(line)}</p>' for line in Store(bench.name).made_on())
    return f"{head}{tables}{plots(bench)}{made}"


def shown(part: Part) -> str:
    """A table or a paragraph."""
    return f'<div class="wide">{part.html()}</div>' if isinstance(part, Table) else f"<p>{escape(part)}</p>"


def plots(bench: Bench) -> str:
    """A bench's pictures, inside the page; none without matplotlib."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, draw in plots_of(bench).items():
                path = Path(folder, f"{name}.svg")
                draw(path)
                svg = path.read_text()
                svg = svg[svg.index("<svg") :]
                # Ids are of one document now, which has all pictures.
                svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{bench.name}-{name}-", svg)
                found.append(f'<div class="plot">{svg}</div>')
        except ModuleNotFoundError:
            return '<p class="none">Pictures need matplotlib.</p>'
    return "".join(found)
