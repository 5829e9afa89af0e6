"""Load any file or folder: its kind is detected from name and contents."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any

from mlcompute.data.array_file import digits, read_idx, read_npz
from mlcompute.data.dataset import Dataset
from mlcompute.data.image_folder import SUFFIXES, images, is_images
from mlcompute.data.paths import existing, place_of
from mlcompute.data.preprocessing import Path
from mlcompute.data.table import iris, read_csv, read_parquet
from mlcompute.data.target import listed
from mlcompute.data.text_file import sums, text
from mlcompute.errors import DataError

_BY_SUFFIX: dict[str, tuple[str, Callable[..., Dataset]]] = {
    ".csv": ("a table", read_csv),
    ".tsv": ("a table", read_csv),
    ".parquet": ("a table", read_parquet),
    ".npz": ("arrays", read_npz),
    ".txt": ("a text", text),
    ".md": ("a text", text),
}
#: What comes with the package, by the name it can be asked for.
BUILT_IN: dict[str, Callable[..., Dataset]] = {"digits": digits, "iris": iris, "sums": sums}
FORMATS = (
    "a .csv, .tsv or .parquet table, a folder of images with a folder per class, a .npz file of arrays, a .txt file, "
    "or a folder of MNIST-format files"
)
_INSTEAD = {
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "save the sheet as CSV"),
    **dict.fromkeys((".zip", ".tar", ".tgz"), "unpack it, and give the folder or file that was in it"),
    **dict.fromkeys((".json", ".jsonl"), "write it as CSV, a line per sample"),
    ".npy": "write samples and labels together: np.savez('data.npz', x=x, y=y)",
    ".pkl": "write it as CSV, or as arrays: np.savez('data.npz', x=x, y=y)",
    ".pt": "write it as arrays: np.savez('data.npz', x=x.numpy(), y=y.numpy())",
    **dict.fromkeys((".h5", ".mat"), "write it as arrays: np.savez('data.npz', x=x, y=y)"),
}


def load(path: Path, **options: Any) -> Dataset:
    """The data in any file or folder, by the reader for its kind; options are those of that reader.

    tables: `read_csv`, `read_parquet`;   images: `images`;   arrays: `read_npz`;   texts: `text`;   MNIST's: `read_idx`
    """
    place = place_of(path)
    kind, reader = _reader(place, "target" in options)
    known = inspect.signature(BUILT_IN.get(kind, reader)).parameters
    for name in options:
        if name not in known:
            raise DataError(
                f"{place}: this is {kind}, and {name} is not for it",
                expected=listed([one for one in known if one not in ("path", "folder")]),
                fix="leave it out",
            )
    return reader(path, **options)


def _reader(place: FilePath, has_target: bool) -> tuple[str, Callable[..., Dataset]]:
    if str(place) in BUILT_IN and not place.exists():
        return str(place), lambda path, **options: BUILT_IN[str(path)](**options)
    existing(place, folder=place.is_dir())
    if place.is_dir():
        return _of_folder(place)
    suffix = place.suffixes[-2] if place.suffix.lower() == ".gz" and len(place.suffixes) > 1 else place.suffix
    suffix = suffix.lower()
    if suffix == ".txt" and has_target:
        return _BY_SUFFIX[".csv"]
    if suffix in _BY_SUFFIX:
        return _BY_SUFFIX[suffix]
    if suffix in SUFFIXES:
        raise DataError(f"{place}: is one image", fix="give a folder that has a folder of images for every class")
    what = f"{suffix} files are not read" if suffix else "its name does not tell what it is (.csv, .npz ...)"
    raise DataError(f"{place}: {what}", expected=FORMATS, fix=_INSTEAD.get(suffix, ""))


def _of_folder(place: FilePath) -> tuple[str, Callable[..., Dataset]]:
    if any(place.glob("train-images*")) or any(place.glob("t10k-*")):
        return "a folder of MNIST-format files", read_idx
    inside = sorted(one for one in place.iterdir() if one.is_file() and one.suffix.lower() in _BY_SUFFIX)
    if inside and not is_images(place):
        names = listed([one.name for one in inside])
        raise DataError(
            f"{place}: is a folder, and there are no images in it",
            found=names,
            expected="for images a folder per class",
            fix=f"give the file: {inside[0]}",
        )
    return "a folder of images", images
