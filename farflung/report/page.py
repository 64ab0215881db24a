"""The page around a report's sections, and plotly's program: inside the page, or in one file that pages share."""

from __future__ import annotations

import base64
import functools
import gzip
import os
from html import escape
from pathlib import Path

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs, get_plotlyjs_version

from farflung.files import write_text


def picture(figure: go.Figure) -> str:
    """A figure as HTML, which the page's script draws."""
    inside = str(figure.to_json()).replace("<", "\\u003c")  # or a name could end the script
    height = figure.layout.height
    return f'<div style="height:{height}px"></div><script type="application/json" class="figure">{inside}</script>'


def page(title: str, sections: list[str], plotly: str) -> str:
    """The whole page; `plotly` is what brings the program."""
    return _PAGE.format(title=escape(title), plotly=plotly, body="\n".join(sections))


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


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
  body {{ font: 15px/1.5 system-ui, sans-serif; color: #24292f; background: #f6f8fa; margin: 0; }}
  main {{ max-width: 1080px; margin: 0 auto; padding: 24px 16px 64px; }}
  h1 {{ font-size: 24px; margin: 8px 0 16px; }}
  h2 {{ font-size: 16px; margin: 0 0 12px; }}
  section {{ background: white; border: 1px solid #d8dee4; border-radius: 8px; padding: 16px 20px; margin: 16px 0; }}
  table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
  th, td {{ text-align: left; padding: 4px 24px 4px 0; border-bottom: 1px solid #eaeef2; white-space: nowrap; }}
  td:first-child {{ color: #57606a; }}
  .best {{ color: #116329; background: #dafbe1; border-radius: 8px; padding: 0 8px; font-size: 13px; }}
  .verdict {{ border-left: 4px solid #2da44e; padding-left: 12px; }}
  .caution {{ border-left: 4px solid #d4a72c; padding-left: 12px; }}
  pre {{ white-space: pre-wrap; background: #f6f8fa; padding: 12px; border-radius: 6px; overflow-wrap: anywhere; }}
  li {{ overflow-wrap: anywhere; }}
  .wide {{ overflow-x: auto; padding-bottom: 4px; scrollbar-width: thin; scrollbar-color: #8c959f #eaeef2; }}
  .wide::-webkit-scrollbar {{ height: 8px; background: #eaeef2; border-radius: 4px; }}
  .wide::-webkit-scrollbar-thumb {{ background: #8c959f; border-radius: 4px; }}
  .wide.scrolls {{ box-shadow: inset -14px 0 10px -10px #8c959f; }}
  .wide.scrolls.ended {{ box-shadow: none; }}
  .run {{ display: inline-block; width: 10px; height: 10px; border-radius: 5px; margin-right: 6px; }}
  @media (max-width: 640px) {{
    section {{ padding: 12px; }}
    th, td {{ padding-right: 12px; vertical-align: top; }}
    th:first-child, td:first-child {{ white-space: normal; min-width: 100px; max-width: 140px; }}
    th:first-child, td:first-child {{ position: sticky; left: 0; background: white; }}
    td:not(:first-child) {{ white-space: normal; min-width: 96px; }}
  }}
</style>
{plotly}
</head>
<body><main><h1>{title}</h1>
{body}
</main>
<script>
  async function unpack() {{
    const packed = document.getElementById("plotly");
    if (packed.type !== "application/gzip") return;
    const bytes = Uint8Array.from(atob(packed.textContent), letter => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const program = document.createElement("script");
    program.textContent = await new Response(stream).text();
    document.head.append(program);
  }}
  function draw() {{
    for (const figure of document.querySelectorAll("script.figure")) {{
      const {{data, layout}} = JSON.parse(figure.textContent);
      Plotly.newPlot(figure.previousElementSibling, data, layout, {{displaylogo: false, responsive: true}});
    }}
  }}
  function apologise(error) {{
    for (const figure of document.querySelectorAll("script.figure"))
      figure.previousElementSibling.textContent = "The pictures cannot be drawn: " + error +
        ". A report that was written with --small needs plotly's file where it was; one without --small needs nothing.";
  }}
  function mark(box) {{
    box.classList.toggle("scrolls", box.scrollWidth > box.clientWidth + 1);
    box.classList.toggle("ended", box.scrollLeft + box.clientWidth >= box.scrollWidth - 1);
  }}
  for (const box of document.querySelectorAll(".wide")) {{
    box.addEventListener("scroll", () => mark(box));
    new ResizeObserver(() => mark(box)).observe(box);
  }}
  unpack().then(draw).catch(apologise);
</script>
</body>
</html>
"""
