"""Files and folders that are asked for: what is not there is told with what is."""

from __future__ import annotations

import os
from pathlib import Path

from mlcompute.errors import DataError, where_to_look


def place_of(path: str | os.PathLike[str]) -> Path:
    """What a name of a file or folder stands for."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be the name of a file or folder, not of type {type(path).__name__}")
    return Path(path)


def existing(path: str | os.PathLike[str], *, folder: bool = False) -> Path:
    """A file, or a folder, that exists."""
    place = place_of(path)
    if not place.exists():
        raise DataError(f"{place}: there is no such file or folder", **where_to_look(place))
    if place.is_dir() != folder:
        raise DataError(f"{place}: is a {'file' if folder else 'folder'}", expected="a folder" if folder else "a file")
    return place
