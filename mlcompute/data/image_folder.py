"""Folders of images, a folder per class, read through Pillow."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from mlcompute.data.dataset import Dataset
from mlcompute.data.paths import existing
from mlcompute.data.preprocessing import Path, Preprocessing
from mlcompute.data.splitting import Split, share_of
from mlcompute.data.target import Array, Target, listed
from mlcompute.errors import DataError
from mlcompute.layers.arguments import integer, whole_list

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
#: Folders of images that together have more bytes are read again and again, batch by batch, instead of once.
MOST_BYTES = 1 << 30
_SETS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
#: What systems leave in folders.
_LITTER = ("thumbs.db", "desktop.ini")


@dataclass(frozen=True)
class ImagePreprocessing(Preprocessing):
    """Every image becomes bytes of one shape (channels, height, width), and x = bytes / 255."""

    kind = "images"
    shape: tuple[int, ...]

    def read(self, path: Any, *, labels: bool = True) -> Dataset:
        place = FilePath(path)
        if not is_images(place):
            existing(place, folder=place.is_dir())
            raise DataError(f"{place}: holds no images", expected="an image, or a folder of images")
        sets = _sets(place) if labels else {}
        place = sets.get("test", sets.get("validation", place))  # what such a model was not trained on
        files = image_files(place)
        return self.dataset(str(path), files, [_class_of(file, place) for file in files] if labels else None)

    def dataset(self, who: str, files: list[FilePath], classes: list[str] | None) -> Dataset:
        """The images of some files."""
        x: Any = ImageFiles(files, self.shape)
        if x.nbytes <= MOST_BYTES:
            x = x[np.arange(len(x))]
        y = None
        if classes is not None and self.target is not None:
            y = self.target.encode(who, np.array(classes), [str(file) for file in files])
        return Dataset(FilePath(who).name, x, y, self, scale=1 / 255, sample_names=tuple(map(str, files)))


class ImageFiles:
    """Images of one shape as an array of bytes (n, channels, height, width) that is read where it is looked at."""

    dtype = np.dtype(np.uint8)

    def __init__(self, files: Sequence[FilePath], shape: tuple[int, ...]) -> None:
        self.files, self.shape = files, (len(files), *shape)

    def __len__(self) -> int:
        return len(self.files)

    @property
    def nbytes(self) -> int:
        """Bytes of all images together."""
        return int(np.prod(self.shape, dtype=object))

    def subset(self, indices: Array) -> ImageFiles:
        """Some of the files."""
        return ImageFiles([self.files[k] for k in indices], self.shape[1:])

    def __getitem__(self, indices: Array) -> Array:
        found = np.empty((len(indices), *self.shape[1:]), np.uint8)

        def put(place: int) -> None:
            found[place] = decoded(self.files[indices[place]], self.shape[1:])

        _on_threads(put, range(len(indices)))
        return found


def images(
    folder: Path,
    *,
    size: int | tuple[int, int] | None = None,
    grey: bool | None = None,
    validation: float | Path = 0.2,
    test: float = 0.0,
    seed: int = 0,
) -> Dataset:
    """Images in a folder per class: `cats/1.jpg`, `dogs/1.jpg` ... Needs `pip install "mlcompute[images]"`.

    size        (height, width), or one number for both: images are cut to this form and scaled; by default all images
                must have one size already
    grey        one channel instead of red, green and blue; by default where all images are grey
    validation  share of the images that is held out, of every class alike; or another folder
    test        share that is held out besides

    A folder with `train`, and `val` or `test` in it, is taken as it is divided.
    """
    place = existing(folder, folder=True)
    sets = _sets(place)
    root = sets.pop("train", place)
    found = _by_class(root)
    files = [file for members in found.values() for file in members]
    labels = np.array([name for name, members in found.items() for _ in members])
    target = Target.of(str(root), "folder", labels, "classification", True)
    shape = _shape(str(root), files, size, grey)
    is_place = isinstance(validation, (str, os.PathLike))
    share = 0.0 if is_place or sets else share_of(str(place), "validation", validation)
    split = Split(share, 0.0 if sets else test, seed)
    preprocessing = ImagePreprocessing(str(place), target, split, shape)
    parts = split.parts(str(root), len(files), target.encode(str(root), labels))
    whole = preprocessing.dataset(str(place), files, list(map(str, labels)))
    kind = "grey" if shape[0] == 1 else "colour"
    notes = (f"{kind} images, {shape[1]} x {shape[2]} pixels", target.described(whole.y), *_left_out(root))
    data = replace(whole, notes=notes).with_held_out(parts)
    others: dict[str, Any] = {name: preprocessing.read(one) for name, one in sets.items()}
    if isinstance(validation, (str, os.PathLike)):
        return replace(data, **others).validated_with(validation)
    if "validation" not in others and "test" in others:
        others["validation"] = others.pop("test")
    return replace(data, **others)


def is_images(place: FilePath) -> bool:
    """Is it an image, or a folder with images in it or in its folders?"""
    return place.suffix.lower() in SUFFIXES if place.is_file() else any(map(_is_image, _files(place)))


def image_files(place: FilePath) -> list[FilePath]:
    """An image, or all images of a folder and its folders, in the order of their names."""
    return sorted(filter(_is_image, _files(place))) if place.is_dir() else [place]


def _is_image(file: FilePath) -> bool:
    return file.suffix.lower() in SUFFIXES


def _files(folder: FilePath) -> Iterator[FilePath]:
    """All files in a folder and its folders, but for those that systems hide from people: ._1.png, __MACOSX."""
    for one in folder.rglob("*"):
        hidden = any(part.startswith((".", "__")) for part in one.relative_to(folder).parts)
        if not hidden and one.is_file():
            yield one


def _left_out(root: FilePath) -> tuple[str, ...]:
    """What lies beside the images and is not read, in a line."""
    others = (one for one in _files(root) if not _is_image(one) and one.name.lower() not in _LITTER)
    kinds = sorted(Counter(one.suffix.lower() or one.name for one in others).items(), key=lambda one: (-one[1], one[0]))
    return (f"not read: {listed([f'{count:,} {kind}' for kind, count in kinds])}",) if kinds else ()


def _sets(place: FilePath) -> dict[str, FilePath]:
    """The folders of a folder that is divided already, into train and at least one other."""
    folders = _folders(place) if place.is_dir() else []
    sets = {_SETS[one.name.lower()]: one for one in folders if one.name.lower() in _SETS}
    return sets if "train" in sets and len(sets) > 1 else {}


def _class_of(file: FilePath, place: FilePath) -> str:
    """The folder right below `place`; of an image, or of the images of one class, the folder they lie in."""
    below = file.relative_to(place).parts
    return below[0] if len(below) > 1 else file.parent.name


def read_images(place: FilePath, shape: tuple[int, ...]) -> tuple[Array, tuple[str, ...]]:
    """Images as float32 from 0 to 1, brought to a shape, and their files."""
    files = image_files(place)
    x = ImageFiles(files, shape)[np.arange(len(files))]
    return x.astype(np.float32) / np.float32(255), tuple(map(str, files))


def _by_class(root: FilePath) -> dict[str, list[FilePath]]:
    folders = _folders(root)
    if not folders:
        if is_images(root):
            raise DataError(
                f"{root}: the images lie in one folder, nothing says what they show",
                fix=f"make a folder for every class and put its images there: {root / 'cat'}, {root / 'dog'} ...",
            )
        kinds = Counter(one.suffix or one.name for one in root.iterdir())
        raise DataError(
            f"{root}: there are no images in the folder",
            found=listed([f"{count} {suffix}" for suffix, count in kinds.most_common()]) or "nothing",
            expected=f"a folder per class, with {', '.join(SUFFIXES[:4])} ... files",
        )
    found = {one.name: image_files(one) for one in folders}
    empty = [name for name, files in found.items() if not files]
    if empty:
        raise DataError(f"{root / empty[0]}: there are no images in the folder", fix="fill the folder, or remove it")
    if len(found) == 1:
        (only,) = folders
        inner = [one.name for one in _folders(only)]
        raise DataError(
            f"{root}: every sample has the class {only.name!r}: there is nothing to tell apart",
            fix=f"give {only}: it has {listed(inner, 4)}"
            if len(inner) > 1
            else "give at least two classes, a folder each",
        )
    return found


def _folders(root: FilePath) -> list[FilePath]:
    return sorted(one for one in root.iterdir() if one.is_dir() and not one.name.startswith((".", "__")))


def _shape(
    who: str, files: list[FilePath], size: int | tuple[int, int] | None, grey: bool | None
) -> tuple[int, int, int]:
    """(channels, height, width) of all images; refused when they differ and nothing says what to make of it."""
    heads = _on_threads(_head, files)
    channels = 1 if (grey is None and all(head[2] for head in heads)) or grey else 3
    if size is not None:
        if isinstance(size, (tuple, list)):
            extents = whole_list(who, "size", size)
        else:
            extents = (integer(who, "size", size),) * 2
        if len(extents) != 2 or min(extents) < 1:
            raise DataError(f"{who}: size is {size}", expected="pixels: one number, or (height, width)")
        return (channels, *extents)
    sizes = Counter((height, width) for height, width, _ in heads)
    if len(sizes) > 1:
        (common, count), *others = sizes.most_common()
        other = next(file for file, head in zip(files, heads, strict=True) if head[:2] == others[0][0])
        likely = min(256, max(8, int(np.median([min(one) for one in sizes.elements()]))))
        raise DataError(
            f"{who}: images of {len(sizes)} sizes",
            most=f"{count} of {len(files)} have {common[0]} x {common[1]} pixels (height x width)",
            others=f"{other} has {others[0][0][0]} x {others[0][0][1]}",
            fix=f"let them be made one size: size={likely} (--size {likely})",
        )
    return (channels, *next(iter(sizes)))


def _head(file: FilePath) -> tuple[int, int, bool]:
    """(height, width, is it grey?), as it is shown."""
    with _opened(file) as image:
        width, height = image.size
        is_turned = image.getexif().get(274, 1) > 4  # the camera was held upright
        grey = image.mode in ("1", "L", "LA") or image.mode.startswith("I")
        return (width, height, grey) if is_turned else (height, width, grey)


def decoded(file: FilePath, shape: tuple[int, ...]) -> Array:
    """An image as bytes (channels, height, width): cut to the form, scaled to the size."""
    channels, height, width = shape
    with _opened(file) as image:
        from PIL import ImageOps

        upright = ImageOps.exif_transpose(image)
        if upright.mode == "F" or (upright.mode == "I" and image.format not in ("PNG", "PPM")):
            bits = "numbers with a fraction" if upright.mode == "F" else "32 bits"
            raise ValueError(f"its pixels have {bits}, nothing says which is white; save it with 8 or 16 bits")
        if upright.mode.startswith("I"):  # 16 bits
            upright = upright.point(lambda value: value / 256)
        plain = upright.convert("L" if channels == 1 else "RGB")
        if plain.size != (width, height):
            plain = ImageOps.fit(plain, (width, height))
        pixels = np.asarray(plain)
    return pixels[None] if channels == 1 else np.moveaxis(pixels, 2, 0)


@contextlib.contextmanager
def _opened(file: FilePath) -> Iterator[Any]:
    """An image to look at; what cannot be read in it is said with its name."""
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise DataError(f"{file}: images need Pillow", fix='pip install "mlcompute[images]"') from error
    try:
        with Image.open(file) as image:
            yield image
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        why = "the file is empty" if file.stat().st_size == 0 else str(error).replace(f" {str(file)!r}", "")
        fix = "replace it, or take it out of the folder"
        raise DataError(f"{file}: cannot be read as an image: {why}", fix=fix) from error


def _on_threads(work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1), "mlcompute images") as pool:
        return list(pool.map(work, items))
