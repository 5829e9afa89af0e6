"""Paths of data: an error for a missing file or folder names similar ones."""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path

from mlcompute.errors import DataError, where_to_look


def place_of(path: str | os.PathLike[str]) -> Path:
    """What a name of a file or folder stands for."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be the name of a file or folder, not of type {type(path).__name__}")
    return Path(path)


def is_built_in(path: str | os.PathLike[str], name: str) -> bool:
    """Is this the name of data that comes with the package, and not of a file or folder?"""
    return os.fspath(path) == name and not Path(name).exists()


def existing(path: str | os.PathLike[str], *, folder: bool = False) -> Path:
    """A file, or a folder, that exists."""
    place = place_of(path)
    if not place.exists():
        raise DataError(f"{place}: there is no such file or folder", **where_to_look(place))
    if place.is_dir() != folder:
        raise DataError(f"{place}: is a {'file' if folder else 'folder'}", expected="a folder" if folder else "a file")
    return place


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """The text in a file, compressed or not; what a byte order mark says counts more than `encoding`."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix.lower() == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}", fix="fetch or write the file again") from error
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):  # what Windows calls Unicode text
        encoding = "utf-16"
    try:
        text = raw.decode("utf-8-sig" if encoding.lower() in ("utf-8", "utf8") else encoding)
    except LookupError as error:
        raise DataError(f"{path}: there is no encoding {encoding!r}", expected="utf-8, cp1252, latin-1 ...") from error
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise DataError(
            f"{path}: line {line} is not {encoding} text",
            fix="save the file as UTF-8, or name its encoding, that of Windows: encoding='cp1252' (--encoding cp1252)",
        ) from error
    if "\0" in text:
        raise DataError(f"{path}: this is no text: it contains zero bytes", fix="export it as text")
    return text
