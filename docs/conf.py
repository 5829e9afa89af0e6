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

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_class_signature = "separated"
nitpicky = False
html_theme = "furo"
html_title = "mlcompute"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_js_files = ["copy.js"]
pygments_style = "default"
pygments_dark_style = "github-dark"


def _plain(sentence: str) -> str:
    """A sentence as it is: `code` becomes a literal, nothing else is markup."""
    parts = sentence.split("`")
    text = [re.sub(r"([\\*|_])", r"\\\1", part) for part in parts[::2]]
    code = [f"``{part}``" for part in parts[1::2]]
    return "".join(one for pair in itertools.zip_longest(text, code, fillvalue="") for one in pair)


def _is_prose(block: list[str]) -> bool:
    """Sentences, in contrast to formulas, aligned columns and examples."""
    return not any(line.startswith((" ", ">>>")) or "  " in line for line in block)


def _readable_docstring(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Sentences become paragraphs; formulas, aligned columns and examples keep their own lines."""
    written: list[str] = []
    for block in "\n".join(lines).strip().split("\n\n"):
        block_lines = block.split("\n")
        if not written or _is_prose(block_lines):
            # A first line is a sentence or a formula of its own; columns may follow it at once.
            prose = block_lines if written or _is_prose(block_lines) else block_lines[:1]
            written += [*(_plain(line) for line in prose), ""]
            block_lines = block_lines[len(prose) :]
        if block_lines:
            written += [".. code-block:: text", "", *[f"   {line}" for line in block_lines], ""]
    lines[:] = written


def setup(app: object) -> None:
    """Write the generated pages, and say how docstrings are read."""
    reference.write_pages(Path(__file__).parent / "generated")
    app.connect("autodoc-process-docstring", _readable_docstring)  # type: ignore[attr-defined]
