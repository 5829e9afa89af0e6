"""Writing a page or a trace: whole or not at all."""

from __future__ import annotations

from pathlib import Path


def write_text(path: Path, text: str, who: str) -> Path:
    """Replace a file by a new one; FileError, and the old one stays as it was, when that fails."""
    from mlcompute.saving.atomic import replace_file

    replace_file(str(path), lambda writer: writer.write(text.encode("utf-8", "replace")), who)
    return path
