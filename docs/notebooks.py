"""Notebooks made from pages: text becomes Markdown cells, Python blocks become code cells, outputs are left out.

`make docs` writes them beside the pages, for download; `python docs/notebooks.py FOLDER` writes them anywhere.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
#: Pages that are tutorials; the tests run them as notebooks and compare what they print with the page.
TUTORIALS = [DOCS / "start.md", *sorted((DOCS / "tutorials").glob("*.md"))]
_PYTHON = re.compile(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
_IMAGE = re.compile(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)[^)]*\)")
_DOWNLOAD = re.compile(r"^\{download\}.*\n", re.MULTILINE)


def cells(page: Path) -> list[tuple[str, str, str]]:
    """(kind, text, what it prints) of every cell; "" where it prints nothing, or the page does not say."""
    text = page.read_text(encoding="utf-8")
    found, at = [], 0
    for block in [*_PYTHON.finditer(text), None]:
        # Links between pages lead nowhere from a notebook: their words stay. Pictures are not beside it.
        words = _IMAGE.sub("", _DOWNLOAD.sub("", text[at : block.start() if block else len(text)]))
        words = _LINK.sub(r"\1", words).strip()
        found += [("markdown", words, "")] if words else []
        if block:
            found.append(("code", block[1].rstrip("\n"), block[2] or ""))
            at = block.end()
    return found


def notebook(page: Path) -> dict[str, object]:
    """A page as Jupyter's format has it."""
    made = []
    for number, (kind, text, _) in enumerate(cells(page)):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text.splitlines(keepends=True)}
        made.append(cell | ({"outputs": [], "execution_count": None} if kind == "code" else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def write(folder: Path) -> None:
    """All tutorials, as FOLDER/NAME.ipynb."""
    folder.mkdir(parents=True, exist_ok=True)
    for page in TUTORIALS:
        text = json.dumps(notebook(page), indent=1, ensure_ascii=False) + "\n"
        (folder / f"{page.stem}.ipynb").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
