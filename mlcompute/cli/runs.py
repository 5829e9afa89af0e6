"""Folders of training runs: every run has its own, and none replaces another unasked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from mlcompute.errors import DataError, FileError

LAST, BEST, REPORT = "last.safetensors", "best.safetensors", "report.html"


def chosen(model: str, out: str | None, resume: str | None, overwrite: bool) -> tuple[Path | None, Path | None]:
    """(the checkpoint to go on from, the folder of this run or None: a new one). Refused when a run lies there already.

    resume  a checkpoint, or empty: the last one of the folder, or of the model's newest run
    """
    folder = None if out is None else Path(out)
    if resume is None:
        if overwrite:
            return None, folder or _usual(model)
        return None, folder and _without_another_run(folder, None)
    path = Path(resume) if resume else (folder or _newest(model)) / LAST
    if not path.exists():
        raise DataError(f"{path}: there is no checkpoint to go on from", fix="train without --resume first")
    if folder is not None:
        return path, _without_another_run(folder, path)
    # Whoever goes on from an earlier checkpoint than the last one keeps what came after it.
    return path, path.parent if path.name == LAST else None


def _without_another_run(folder: Path, resumed: Path | None) -> Path:
    is_same = resumed is not None and resumed.resolve().parent == folder.resolve()
    found = [name for name in (LAST, BEST, REPORT) if (folder / name).exists()]
    if found and not is_same:
        raise DataError(
            f"{folder}: holds a run already ({', '.join(found)})",
            fix="--resume goes on with it, --overwrite replaces it, another --out keeps both",
        )
    return folder


def _usual(model: str) -> Path:
    return Path("runs") / Path(model).stem


def _numbered(model: str) -> dict[int, Path]:
    """The folders of a model's runs so far: runs/MODEL, runs/MODEL-2 ..."""
    usual = _usual(model)
    found = {1: usual} if usual.exists() else {}
    for path in usual.parent.glob(f"{usual.name}-*"):
        number = path.name.removeprefix(f"{usual.name}-")
        if number.isdecimal() and int(number) > 1:
            found[int(number)] = path
    return found


def _newest(model: str) -> Path:
    saved = [path for path in _numbered(model).values() if (path / LAST).exists()]
    return max(saved, key=lambda path: (path / LAST).stat().st_mtime_ns, default=_usual(model))


@contextlib.contextmanager
def made(model: str, folder: Path | None) -> Iterator[Path]:
    """The folder, made; removed again when nothing came of the run. None: a new one with the next number."""
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        while folder is None:
            number = max(_numbered(model), default=0) + 1
            wanted = _usual(model) if number == 1 else Path(f"{_usual(model)}-{number}")
            with contextlib.suppress(FileExistsError):  # another run was faster
                wanted.mkdir(parents=True)
                folder = wanted
    except OSError as error:
        who = folder or _usual(model)
        raise FileError(f"{who}: cannot be made: {error.strerror}", fix="name another folder with --out") from error
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()  # an empty one only


def clear(folder: Path) -> None:
    """Remove what an earlier run wrote."""
    for name in (LAST, BEST, REPORT):
        with contextlib.suppress(FileNotFoundError):
            (folder / name).unlink()
