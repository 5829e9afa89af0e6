"""Sphinx configuration: `make docs` builds the pages into docs/_build/html, warnings are errors."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import reference  # docs/reference.py: the pages that are made from code

import mlcompute

project = "mlcompute"
author = "the mlcompute developers"
copyright = "the mlcompute developers, Apache License 2.0"
version = release = mlcompute.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_class_signature = "separated"
# Docstrings are plain text with formulas and aligned columns; as literal blocks they look as they were written.
nitpicky = False
html_theme = "furo"
html_title = "mlcompute"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
pygments_style = "default"
pygments_dark_style = "github-dark"


def _plain(sentence: str) -> str:
    """A sentence as it is: `code` becomes a literal, nothing else is markup."""
    parts = sentence.split("`")
    text = [re.sub(r"([\\*|_])", r"\\\1", part) for part in parts[::2]]
    code = [f"``{part}``" for part in parts[1::2]]
    return "".join(one for pair in itertools.zip_longest(text, code, fillvalue="") for one in pair)


def _literal_docstring(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Keep a docstring's own lines: everything after its first sentence is formulas and aligned columns."""
    body = lines[1:]
    while body and not body[0].strip():
        body = body[1:]
    while body and not body[-1].strip():
        body = body[:-1]
    lines[:] = [_plain(lines[0]) if lines else ""]
    if body:
        lines += ["", ".. code-block:: text", "", *[f"   {line}" for line in body], ""]


def setup(app: object) -> None:
    """Write the generated pages, then let docstrings through as they are."""
    reference.write_pages(Path(__file__).parent / "generated")
    app.connect("autodoc-process-docstring", _literal_docstring)  # type: ignore[attr-defined]
