"""Data on the command line: a folder in MNIST's file format, a .npz file, or scikit-learn's handwritten digits."""

from __future__ import annotations

import contextlib
import gzip
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlcompute.errors import DataError, Error

HELP = (
    "a folder of MNIST-format files (gzipped or not); or a .npz file with arrays x and y, and x_test and y_test if "
    "there are any; without it handwritten digits that come with scikit-learn"
)


@dataclass(frozen=True)
class Dataset:
    """Samples to learn from, and some for validation. x has samples on axis 0, y is integer class labels or targets.

    x_test, y_test  None where there are none
    held_out        are they a part of the samples there were, and not a set of their own?
    """

    name: str
    x: Any
    y: Any
    x_test: Any
    y_test: Any
    held_out: bool = False

    @property
    def class_count(self) -> int:
        """How many classes the labels name; DataError when they are no integer class labels."""
        labels = np.asarray(self.y)
        if labels.ndim != 1 or labels.dtype.kind not in "iu" or not labels.size or labels.min() < 0:
            given = f"{labels.dtype} of shape {labels.shape}"
            raise DataError(f"{self.name}: y must be integer class labels", given=given)
        largest = max(int(np.max(given)) for given in (self.y, self.y_test) if given is not None and len(given))
        return largest + 1

    @property
    def judged(self) -> tuple[Any, Any]:
        """What a model is judged by: the samples it has not learned from, or all where none were held out."""
        return (self.x, self.y) if self.x_test is None else (self.x_test, self.y_test)

    @property
    def everything(self) -> tuple[Any, Any]:
        """All samples."""
        if self.x_test is None:
            return self.x, self.y
        return np.concatenate([self.x, self.x_test]), np.concatenate([self.y, self.y_test])


@contextlib.contextmanager
def told(path: str | None) -> Iterator[None]:
    """Errors about data say where it came from when nobody has asked for it."""
    try:
        yield
    except Error as error:
        if path is None:
            error.add_fact("data", "scikit-learn's digits, because no --data was given")
        raise


def load_data(path: str | None) -> Dataset:
    """The data a path stands for."""
    if path is None:
        return _digits()
    place = Path(path)
    if place.is_dir():
        return _idx_folder(place)
    if place.suffix == ".npz" and place.exists():
        return _arrays(place)
    raise DataError(f"{path}: no data there", expected=HELP)


def _digits() -> Dataset:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise DataError("no --data was given", fix="give some, or pip install scikit-learn for its digits") from error
    pixels, classes = load_digits(return_X_y=True)
    images = (pixels.reshape(-1, 1, 8, 8) / 16.0).astype(np.float32)
    # The scans are sorted by writer; a fixed shuffle gives every run the same test images.
    return _held_out("digits", images, classes)


def _held_out(name: str, x: Any, y: Any) -> Dataset:
    """A fifth of the samples, always the same, for validation; of fewer than five samples none."""
    order = np.random.default_rng(0).permutation(len(x))
    x, y, count = x[order], y[order], len(x) // 5
    return Dataset(name, x[count:], y[count:], x[:count], y[:count], True) if count else Dataset(name, x, y, None, None)


def read_arrays(path: str | Path) -> dict[str, Any]:
    """The arrays in a .npz file."""
    try:
        file = np.load(path, allow_pickle=False)
        if isinstance(file, np.ndarray):
            raise DataError(f"{path}: holds one array without a name", fix="write it with np.savez(path, x=..., y=...)")
        with file:
            return {name: file[name] for name in file.files}
    except DataError:
        raise
    except (OSError, ValueError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: cannot be read as .npz: {error}") from error


def _arrays(path: Path) -> Dataset:
    found = read_arrays(path)
    missing = [name for name in ("x", "y") if name not in found]
    if missing:
        raise DataError(f"{path}: lacks {' and '.join(missing)}", found=", ".join(found) or "nothing", expected=HELP)
    if len(found["x"]) != len(found["y"]):
        raise DataError(f"{path}: {len(found['x'])} samples but {len(found['y'])} labels")
    if "x_test" in found and "y_test" in found:
        return Dataset(path.stem, found["x"], found["y"], found["x_test"], found["y_test"])
    return _held_out(path.stem, found["x"], found["y"])


def _idx_folder(folder: Path) -> Dataset:
    """train-images, train-labels, t10k-images and t10k-labels, each an IDX file."""
    parts = {}
    for part in ("train-images", "train-labels", "t10k-images", "t10k-labels"):
        found = sorted(path for path in folder.glob(f"{part}*") if path.is_file())
        if not found:
            raise DataError(f"{folder}: there is no file {part}-idx{3 if 'images' in part else 1}-ubyte[.gz]")
        parts[part] = read_idx(found[0])
    for kind in ("train", "t10k"):
        images, classes = parts[f"{kind}-images"], parts[f"{kind}-labels"]
        if images.ndim != 3 or classes.shape != images.shape[:1] or not len(images):
            raise DataError(f"{folder}: {kind} has images {images.shape} but labels {classes.shape}")
    scaled = {kind: (parts[f"{kind}-images"][:, None] / 255.0).astype(np.float32) for kind in ("train", "t10k")}
    labels = {kind: parts[f"{kind}-labels"].astype(np.int64) for kind in ("train", "t10k")}
    return Dataset(folder.resolve().name or "images", scaled["train"], labels["train"], scaled["t10k"], labels["t10k"])


def read_idx(path: Path) -> Any:
    """Two zero bytes, the type (8: unsigned bytes), the number of axes, each extent in four bytes, the data."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if len(raw) < 4 or raw[:3] != b"\0\0\x08" or len(raw) < 4 + 4 * raw[3]:
        raise DataError(f"{path}: this is no IDX file of unsigned bytes")
    start = 4 + 4 * raw[3]
    shape = tuple(np.frombuffer(raw[4:start], ">u4").tolist())
    needed = int(np.prod(shape, dtype=object))
    if len(raw) - start != needed:
        raise DataError(f"{path}: {shape} needs {needed} bytes of data, the file has {len(raw) - start}")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)
