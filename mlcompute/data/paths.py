"""Files and folders that are asked for: what is not there is told with what is."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from mlcompute.errors import DataError


def existing(path: str | os.PathLike[str], *, folder: bool = False) -> Path:
    """A file, or a folder, that exists."""
    place = Path(path)
    if not place.exists():
        beside = {one.stem: one.name for one in place.parent.iterdir()} if place.parent.is_dir() else {}
        near = difflib.get_close_matches(place.stem, beside, n=1)  # endings are alike anyway
        where = os.path.abspath(place.parent)
        raise DataError(
            f"{place}: there is no such file or folder",
            where=where if place.parent.is_dir() else f"{where}, which does not exist either",
            fix=f"did you mean {place.parent / beside[near[0]]}?" if near else "check the path",
        )
    if place.is_dir() != folder:
        raise DataError(f"{place}: is a {'file' if folder else 'folder'}", expected="a folder" if folder else "a file")
    return place
