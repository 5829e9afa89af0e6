"""Every Python block of the documentation runs, page by page, in order; the pages build without a warning."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Pages whose Python blocks form one program each.
PAGES = sorted(path for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
_BLOCK = re.compile(r"^```\{?(?:code-block\} )?python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[int, str]]:
    """(line number, code) of every Python block of a page."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, m.start(1)), textwrap.dedent(m.group(1))) for m in _BLOCK.finditer(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for line, code in blocks(page):
        # Blank lines in front, so that a traceback shows the page's own line numbers.
        exec(compile("\n" * line + code, str(page), "exec"), names)


def test_there_are_pages_and_blocks() -> None:
    assert sum(len(blocks(page)) for page in PAGES) > 20


def test_pages_build_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("furo", reason="the documentation needs mlcompute[docs]")
    options = ["-W", "--keep-going", "-q", "-b", "html"]
    command = [sys.executable, "-m", "sphinx", *options, str(ROOT / "docs"), str(tmp_path)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "index.html").exists()
