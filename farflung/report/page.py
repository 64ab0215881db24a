"""The page around a report's sections, and plotly's program: inside the page, or in one file that pages share."""

from __future__ import annotations

import base64
import functools
import gzip
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs, get_plotlyjs_version

from farflung.files import write_text


def picture(figure: go.Figure) -> str:
    """A figure as HTML, which the page's script draws."""
    if len(figure.data) == 1 and not figure.layout.showlegend:  # which has no legend, nor room for one
        figure.update_layout(margin_b=60, height=figure.layout.height - 44)
    inside = str(figure.to_json()).replace("<", "\\u003c")  # or a name could end the script
    height = figure.layout.height
    return f'<div style="height:{height}px"></div><script type="application/json" class="figure">{inside}</script>'


def sample_html(text: str, png: str | None) -> str:
    """A sample of what a model makes: text, or a picture (base64) and what it is of."""
    if not png:
        return f"<pre>{escape(text)}</pre>"
    told = escape(text)
    return f'<img class="sample" src="data:image/png;base64,{escape(png)}" alt="{told}"><p class="muted">{told}</p>'


def page(title: str, sections: Sequence[str], plotly: str, state: Mapping[str, object] | None = None) -> str:
    """The whole page; `plotly` is what brings the program.

    With the `state` of what is shown, which its main element then has as data, it asks for news.
    """
    scripts = ["draw.js"] if state is None else ["draw.js", "news.js"]
    whole = Template(_asset("page.html")).substitute(
        title=escape(title),
        style=_asset("look.css"),
        plotly=plotly,
        state="".join(f' data-{name}="{escape(str(value))}"' for name, value in (state or {}).items()),
        body="\n".join(sections),
        script="".join(map(_asset, scripts)),
    )
    return whole.encode("utf-8", "replace").decode()  # names of files may hold what no text can


@functools.cache
def _asset(name: str) -> str:
    return (Path(__file__).parent / "look" / name).read_text("utf-8")


@functools.cache
def plotly_inside() -> str:
    """The program within the page, compressed: 2 MB where the program has 5."""
    packed = base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
    return f'<script type="application/gzip" id="plotly">{packed}</script>'


def plotly_shared(folder: Path, out: Path) -> str:
    """A link to the program in a folder, where this writes it if it is not there yet."""
    path = folder / f"plotly-{get_plotlyjs_version()}.min.js"
    if not path.exists():
        write_text(path, get_plotlyjs())
    link = Path(os.path.relpath(path, out.parent)).as_posix()
    return f'<script src="{escape(link)}" id="plotly"></script>'
