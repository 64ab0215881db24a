"""How Sphinx builds the site: `make docs` writes it to docs/_build/html."""

import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import made_pages  # noqa: E402

import farflung  # noqa: E402

project = "farflung"
copyright = "farflung's authors, Apache 2.0"
release = version = farflung.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["_build", "_made"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "cache"
nb_execution_timeout = 120
nb_execution_raise_on_error = True
nb_merge_streams = True

default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 90
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Capabilities", "params_style")]

html_theme = "furo"
html_title = f"farflung {release}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]


def as_restructured_text(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Makes formulas of a plain docstring literal blocks, and keeps absolute values from being substitutions."""
    written: list[str] = []
    formula = False
    for before, line in zip(["", *lines], lines, strict=False):
        starts = line.startswith("    ") and not before.strip()
        formula = (formula or starts) and (line.startswith("    ") or not line.strip())
        written += ["::", ""] if starts and formula else []
        written.append(line if formula else line.replace("|", "\\|"))
    lines[:] = [re.sub("^Floor \\d: (.)", lambda found: found[1].upper(), line) for line in written]


def with_short_types(app: Any, what: str, name: str, obj: Any, options: Any, given: str | None, returned: str) -> Any:
    """A signature without the modules of types, where a default that is no expression has kept them."""
    if not given:
        return None
    short = re.sub(r"~?\b(?:\w+\.)+(?=[A-Z])", "", given).replace("<factory>", "...")
    return re.sub(r"Inner\(.*?lr=[\d.]+\)", "MUON", short), returned


def setup(app: Any) -> None:
    """Writes the pages that are made from farflung itself, before Sphinx looks for pages."""
    made_pages.write(HERE)
    app.connect("autodoc-process-signature", with_short_types)
    app.connect("autodoc-process-docstring", as_restructured_text, priority=400)  # before napoleon
