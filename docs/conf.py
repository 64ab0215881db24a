"""How Sphinx builds the site: `make docs` writes it to docs/_build/html."""

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
autodoc_default_options = {"members": True, "member-order": "bysource", "show-inheritance": True}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"farflung {release}"
html_static_path = ["_static"]
html_css_files = ["wide-tables.css"]


def setup(app: Any) -> None:
    """Writes the pages that are made from farflung itself, before Sphinx looks for pages."""
    made_pages.write(HERE)
