"""Which folder a run is written to, and which checkpoint it resumes from: no run is replaced unless asked."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from mlcompute.errors import DataError, FileError
from mlcompute.runs.folders import BEST, EVALUATION, FACTS, LAST, REPORT, name_of, new_folder, run_folders

ROOT = Path("runs")


def chosen(model: str, out: str | None, resume: str | None, overwrite: bool) -> tuple[Path | None, Path | None]:
    """(the checkpoint to go on from, the folder of this run or None: a new one). Refused when a run lies there already.

    resume  a checkpoint, or empty: the last one of the folder, or of the model's newest run
    """
    folder = None if out is None else Path(out)
    if resume is None:
        if overwrite:
            return None, folder or _newest(model)
        return None, folder and _without_another_run(folder, None)
    newest = folder or _newest(model)
    if not resume and newest is None:
        raise DataError(f"{ROOT}: there is no run of {model} to go on with", fix="train without --resume first")
    path = Path(resume) if resume else newest / LAST  # type: ignore[operator]
    if path.is_dir():
        path = path / LAST
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


def _newest(model: str) -> Path | None:
    """The folder of the model's newest run that has a checkpoint."""
    stem = Path(model).stem
    if not ROOT.is_dir():
        return None
    # runs/net-2 is what a second run was called before runs had numbers.
    of_model = [path for path in run_folders(ROOT) if re.sub(r"-\d+$", "", name_of(path)) == stem]
    saved = [path for path in of_model if (path / LAST).exists()]
    return max(saved, key=lambda path: (path / LAST).stat().st_mtime_ns, default=None)


@contextlib.contextmanager
def made(model: str, folder: Path | None) -> Iterator[Path]:
    """The folder, made; removed again when nothing came of the run. None: a new one with the next number."""
    if folder is None:
        folder = new_folder(Path(model).stem, ROOT)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise FileError(f"{folder}: is a file, not a folder", fix="name another folder with --out") from error
    except OSError as error:
        raise FileError(f"{folder}: cannot be made: {error.strerror}", fix="name another folder with --out") from error
    try:
        yield folder
    finally:
        if not any((folder / name).exists() for name in (LAST, BEST, REPORT, EVALUATION)):
            with contextlib.suppress(OSError):
                (folder / FACTS).unlink()
        with contextlib.suppress(OSError):
            folder.rmdir()  # an empty one only
