"""Every Python block of the documentation runs, page by page, in order; the pages build without a warning.

Tutorials run as notebooks: test_tutorials.py.

A `text` block right behind a Python block is what the Python block prints; … stands for what differs from run to run.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Pages whose Python blocks form one program each.
PAGES = sorted(path for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")] if path.stem != "start")
_BLOCK = re.compile(
    r"^```\{?(?:code-block\} )?python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL
)


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """(line number, code, what it prints) of every Python block of a page; "" where the page does not say."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, m.start(1)), textwrap.dedent(m[1]), m[2] or "") for m in _BLOCK.finditer(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_blocks_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for line, code, output in blocks(page):
        capsys.readouterr()
        # Blank lines in front, so that a traceback shows the page's own line numbers.
        exec(compile("\n" * line + code, str(page), "exec"), names)
        printed = capsys.readouterr().out
        if output:
            assert re.fullmatch(re.escape(output).replace("…", ".*?"), printed), printed


def test_there_are_pages_and_blocks() -> None:
    assert sum(len(blocks(page)) for page in PAGES) > 20


def test_pages_build_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("furo", reason="the documentation needs mlcompute[docs]")
    # Without pages of the source code, which take longest and have no links of ours.
    options = ["-W", "--keep-going", "-q", "-b", "html", "-D", "extensions=myst_parser"]
    command = [sys.executable, "-m", "sphinx", *options, str(ROOT / "docs"), str(tmp_path)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "index.html").exists()
