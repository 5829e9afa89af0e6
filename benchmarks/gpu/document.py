"""Write the table of docs/performance.md from measured numbers: `python -m benchmarks.gpu.document [FILE]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.gpu.table import markdown

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "gpu.json", ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- GPU table: python -m benchmarks.gpu.document -->\n", "<!-- end of the GPU table -->\n"


def replaced(page: str, table: str) -> str:
    """A page with another table between its two marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no lines {BEGIN.strip()!r} and {END.strip()!r}")
    return f"{before}{begin}\n{table}\n\n{end}{after}"


def main(results: Path = RESULTS, page: Path = PAGE) -> None:
    page.write_text(replaced(page.read_text(), markdown(json.loads(results.read_text()))))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
