"""Numbered folders: runs/0001-cnn, runs/0002-mlp. A number is given once, also when two runs begin together."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlcompute.errors import DataError, FileError

LAST, BEST, REPORT = "last.safetensors", "best.safetensors", "report.html"
FACTS, EVALUATION = "run.json", "evaluation.json"
#: Everything that training writes into the folder of a run.
FILES = (LAST, BEST, REPORT, FACTS, EVALUATION)

_NUMBERED = re.compile(r"(\d{4,})-(.+)")


def new_folder(name: str, root: str | Path = "runs") -> Path:
    """Make the next folder: runs/0007-NAME."""
    root, name = Path(root), re.sub(r"[^\w.+-]+", "-", name).strip("-.") or "run"
    try:
        root.mkdir(parents=True, exist_ok=True)
        number = max((number_of(path) or 0 for path in root.iterdir()), default=0) + 1
        while True:
            # Names differ, so making the folder alone would not keep two runs from taking one number.
            claim = root / f".claim-{number:04}"
            try:
                claim.mkdir()
            except FileExistsError:
                number += 1
                continue
            try:
                if not any(number_of(path) == number for path in root.iterdir()):
                    folder = root / f"{number:04}-{name}"
                    folder.mkdir()
                    return folder
            finally:
                claim.rmdir()
            number += 1
    except OSError as error:
        raise FileError(f"{root}/{name}: cannot be made: {error}", fix="name another folder") from error


def number_of(folder: Path) -> int | None:
    """7 of 0007-cnn; None where the name has no number."""
    found = _NUMBERED.fullmatch(folder.name)
    return int(found[1]) if found else None


def name_of(folder: Path) -> str:
    """cnn of 0007-cnn."""
    found = _NUMBERED.fullmatch(folder.name)
    return found[2] if found else folder.name


def run_folders(root: str | Path) -> Iterator[Path]:
    """The folders in `root` that hold a run, oldest first."""
    try:
        inside = [path for path in Path(root).iterdir() if path.is_dir()]
    except FileNotFoundError:
        raise FileError(f"{root}: there is no such folder", fix="`mlcompute train` makes runs/") from None
    except OSError as error:
        raise FileError(f"{root}: cannot be read: {error.strerror}") from error
    for path in sorted(inside, key=lambda path: (number_of(path) or 0, path.name)):
        if is_run(path):
            yield path


def is_run(folder: Path) -> bool:
    """Does it hold what training writes? Runs from before there was a run.json have checkpoints alone."""
    return any((folder / name).exists() for name in (FACTS, LAST, BEST))


def found_run(text: str) -> Path:
    """The folder a user means: a path, the beginning of one (runs/0003), or a number (3)."""
    path = Path(text)
    if path.is_dir() and is_run(path):
        return path
    if path.is_file() and path.name in FILES:
        return path.parent
    inside = Path("runs") if path.parent == Path() and not path.is_dir() else path.parent
    if path.name.isdecimal() and inside.is_dir():
        found = [one for one in run_folders(inside) if number_of(one) == int(path.name)]
        if found:
            return found[0]
    if path.is_dir():
        raise DataError(f"{text}: holds no run", expected=f"a folder with {FACTS}, as `mlcompute train` writes it")
    known = ", ".join(one.name for one in run_folders(inside)) if inside.is_dir() else ""
    raise DataError(f"{text}: there is no such run", known=known, expected="its folder, or its number: runs/0003, or 3")


def write_json(path: Path, data: Any) -> None:
    """Replace a file by a new one, whole; without waiting for the disk, as weights must."""
    beside = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise FileError(
            f"Run: {path} could not be written: {error}", fix="free space, or choose another folder"
        ) from error


def clear(folder: Path) -> None:
    """Remove what an earlier run wrote."""
    for name in FILES:
        with contextlib.suppress(FileNotFoundError):
            (folder / name).unlink()
