"""Tutorials run as notebooks, and print what their pages say."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel, to run notebooks")
nbformat = pytest.importorskip("nbformat", reason="comes with nbclient")
DOCS = Path(__file__).parents[2] / "docs"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("notebooks", DOCS / "notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


notebooks = _load()


def printed(cell: Any) -> str:
    return "".join(output["text"] for output in cell["outputs"] if output["output_type"] == "stream")


@pytest.mark.parametrize("page", notebooks.TUTORIALS, ids=lambda page: page.stem)
def test_tutorial(page: Path, tmp_path: Path) -> None:
    notebooks.write(tmp_path)
    notebook = nbformat.read(tmp_path / f"{page.stem}.ipynb", as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    said = [(code, output) for kind, code, output in notebooks.cells(page) if kind == "code"]
    ran = [cell for cell in notebook.cells if cell["cell_type"] == "code"]
    assert len(ran) == len(said) > 3
    for (code, output), cell in zip(said, ran, strict=True):
        if output:
            assert re.fullmatch(re.escape(output).replace("…", ".*?"), printed(cell)), f"{code}\n{printed(cell)}"


def test_notebooks_hold_no_outputs_and_no_links_between_pages(tmp_path: Path) -> None:
    notebooks.write(tmp_path)
    for path in tmp_path.glob("*.ipynb"):
        text = path.read_text("utf-8")
        assert all(not cell.get("outputs") for cell in json.loads(text)["cells"])
        assert ".md)" not in text
        assert "{download}" not in text
        assert "```" not in text
