"""Sphinx configuration: `make docs` builds the pages into docs/_build/html, warnings are errors."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import notebooks  # docs/notebooks.py: tutorials for download
import reference  # docs/reference.py: the pages that are made from code

import mlcompute

project = "mlcompute"
author = "the mlcompute developers"
copyright = "the mlcompute developers, Apache License 2.0"
version = release = mlcompute.__version__

extensions = ["myst_parser", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
nitpicky = False
html_theme = "furo"
html_title = "mlcompute"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_js_files = ["copy.js"]
pygments_style = "default"
pygments_dark_style = "github-dark"


def setup(app: object) -> None:
    """Write the generated pages and notebooks."""
    reference.write_pages(Path(__file__).parent / "generated")
    notebooks.write(Path(__file__).parent / "generated" / "notebooks")
