"""Arrays: in memory, in .npz and .npy files, in MNIST's file format, and the digits that come with the package."""

from __future__ import annotations

import gzip
import os
import zipfile
import zlib
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path as FilePath
from typing import Any, Literal

import numpy as np

from mlcompute.data.dataset import Dataset
from mlcompute.data.paths import existing, is_built_in
from mlcompute.data.preprocessing import Path, Preprocessing
from mlcompute.data.splitting import Split
from mlcompute.data.target import Array, Target, Task, listed
from mlcompute.devices.foreign_array import host_array
from mlcompute.errors import DataError
from mlcompute.ops.bfloat16 import computed

Layout = Literal["images", "channels last images", "grey images", "samples"]
_HERE = FilePath(__file__).parent
#: Numbers of channels by which images with channels last are told apart.
_CHANNELS = (1, 3, 4)


@dataclass(frozen=True)
class ArrayPreprocessing(Preprocessing):
    """What becomes of arrays.

    shape      of a sample as it is fed
    layout     how samples are given: as they are fed, or as images of another layout
    mean, std  of every feature, or empty: x = (given - mean) / std;   images: x = given / std
    """

    kind = "arrays"
    shape: tuple[int, ...]
    layout: Layout
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def read(self, path: Any, *, labels: bool = True) -> Dataset:
        from mlcompute.data.image_folder import is_images, read_images

        place = FilePath(path)
        if place.is_dir() and any(place.glob("t10k-images*")):
            found = read_idx_folder(place)
        elif is_built_in(place, "digits"):
            found = _digits()
        elif len(self.shape) == 3 and is_images(place):
            x, names = read_images(place, self.shape)
            return Dataset(place.name, x, None, self, sample_names=names)
        elif existing(place).suffix not in (".npz", ".npy"):
            images = ", an image or a folder of images" if len(self.shape) == 3 else ""
            raise DataError(
                f"{place}: the model was trained on samples of shape {self.shape}, {place.suffix} files hold others",
                expected=f"arrays in a .npz or .npy file{images}",
            )
        else:
            found = read_arrays(place)
        who, name = str(path), "test" if "x_test" in found else "train"
        if labels and name == "train" and {"x_val", "y_val"} <= found.keys():
            name = "val"  # what such a model was not trained on
        if f"x_{name}" not in found:
            raise DataError(f"{who}: lacks x", found=listed(list(found)), expected="samples as x or x_test")
        y = found.get(f"y_{name}") if labels else None
        if labels and y is None:
            raise DataError(f"{who}: lacks labels", found=listed(list(found)), expected=f"y or y_{name}")
        return self.dataset(who, found[f"x_{name}"], y)

    def dataset(self, who: str, x: Array, y: Array | None) -> Dataset:
        """Samples, checked and prepared."""
        moved = _channels_first(numeric(who, "x", x), self.layout)
        if moved.shape[1:] != self.shape:
            raise DataError(
                f"{who}: samples of shape {moved.shape[1:]}, the model was trained with {self.shape}",
                given=f"{x.dtype} array of shape {x.shape}",
            )
        if y is not None and len(x) != len(y):
            raise DataError(f"{who}: {len(x)} samples but {len(y)} labels", fix="give a label for every sample")
        labels = y if y is None or self.target is None else self.target.encode(who, y)
        return Dataset(FilePath(who).stem, self.standardized(moved), labels, self)

    def standardized(self, x: Array) -> Array:
        """Samples as a network is fed them."""
        if self.layout != "samples":
            return x / np.float32(self.std[0]) if self.std[0] != 1 else x
        return ((x - np.array(self.mean)) / np.array(self.std)).astype(np.float32) if self.mean else x


def arrays(
    x: Any,
    y: Any,
    *,
    task: Task | None = None,
    images: bool | None = None,
    standardize: bool = True,
    validation: float | tuple[Any, Any] = 0.2,
    test: float = 0.0,
    seed: int = 0,
    name: str = "arrays",
) -> Dataset:
    """Samples in memory, on axis 0 of arrays.

    x            (n, features); images (n, h, w), (n, h, w, c) or (n, c, h, w); sequences (n, length, features)
    y            labels: text or whole numbers for classes, other numbers to be predicted
    images       are samples with two axes, (n, h, w), images? By default those of bytes are
    standardize  features get mean 0 and standard deviation 1, images of bytes values from 0 to 1
    validation   the share that is held out, of every class alike; or (x, y), samples of their own
    """
    given = {"x_train": x, "y_train": y}
    share: Any = validation
    if isinstance(validation, (tuple, list)) and len(validation) == 2:
        given |= {"x_val": validation[0], "y_val": validation[1]}
        share = 0.0
    found = {one: computed(host_array(values)) for one, values in given.items()}
    return dataset_of(name, found, task, images, standardize, Split(share, test, seed))


def read_npz(
    path: Path,
    *,
    task: Task | None = None,
    images: bool | None = None,
    standardize: bool = True,
    validation: float | Path = 0.2,
    test: float = 0.0,
    seed: int = 0,
) -> Dataset:
    """A .npz file with arrays x and y, or x_train and y_train; x_val, x_test and their labels if there are any.

    Without x_val, x_test is used for validation; without both, a share is held out. See `arrays`.
    """
    other, share = (validation, 0.0) if isinstance(validation, (str, os.PathLike)) else (None, validation)
    found = read_arrays(existing(path))
    data = dataset_of(str(path), found, task, images, standardize, Split(share, test, seed))
    return data if other is None else data.validated_with(other)


def read_idx(path: Path, *, validation: float = 0.2, seed: int = 0) -> Dataset:
    """A folder in MNIST's file format: train-images, train-labels and, for validation, t10k-images, t10k-labels."""
    return dataset_of(str(path), read_idx_folder(existing(path, folder=True)), split=Split(validation, 0.0, seed))


def digits(*, validation: float = 0.2, test: float = 0.0, seed: int = 0) -> Dataset:
    """1,797 handwritten digits, 8 x 8 grey pixels: the test set of the UCI Optical Recognition of Handwritten Digits.

    E. Alpaydin and C. Kaynak, 1998, as scikit-learn distributes it (BSD licence); it comes with the package.
    """
    return dataset_of("digits", _digits(), split=Split(validation, test, seed))


def _digits() -> dict[str, Array]:
    found = read_arrays(_HERE / "digits.npz")
    # Pixels are counts from 0 to 16; those of the others would be bytes.
    return {**found, "x_train": found["x_train"][:, None].astype(np.float32) / 16}


def dataset_of(
    who: str,
    found: dict[str, Array],
    task: Task | None = None,
    images: bool | None = None,
    standardize: bool = True,
    split: Split = Split(),  # noqa: B008  frozen
) -> Dataset:
    """A dataset from arrays by their usual names."""
    for name in ("x_train", "y_train"):
        if name not in found:
            raise DataError(
                f"{who}: lacks {name.removesuffix('_train')}",
                found=listed([name.removesuffix("_train") for name in found]) or "nothing",
                expected="arrays x and y, or x_train and y_train; np.savez(path, x=..., y=...) writes them",
            )
    given, y = numeric(who, "x", found["x_train"]), _labels(who, found["y_train"])
    if given.ndim < 2 or not len(given):
        what = "there are no samples" if given.size == 0 else f"x has shape {given.shape}"
        raise DataError(f"{who}: {what}", expected="samples on axis 0: (n, features), (n, height, width) ...")
    layout = _layout(given, images)
    x = _channels_first(given, layout)
    if len(x) != len(y):
        raise DataError(f"{who}: {len(x)} samples but {len(y)} labels", fix="give a label for every sample")
    # A label for every step of a sequence, or every pixel, is fed as it is.
    is_plain = y.ndim > 2 or (y.ndim == 2 and y.dtype.kind in "iu")
    every = np.concatenate([y, *(_labels(who, found[k]) for k in ("y_val", "y_test") if k in found)])
    target = None if is_plain else Target.of(who, "y", every, task, every.dtype.kind in "iu")
    codes = y if target is None else target.encode(who, y)
    own = [name for name in ("val", "test") if f"x_{name}" in found and f"y_{name}" in found]
    if own:  # what is there is not held out besides; a file with x_val alone may still give a share for testing
        split = replace(split, validation=0.0, test=split.test if own == ["val"] else 0.0)
    parts = split.parts(who, len(x), codes if target and target.classes else None)
    if standardize and target:
        target = target.standardized(codes[parts.train])
    mean, std = _statistics(x[parts.train], layout, standardize)
    if not np.isfinite([*mean, *std]).all():
        raise DataError(f"{who}: x has numbers too large to be standardised", fix="scale them, to about 1")
    preprocessing = ArrayPreprocessing(who, target, split, x.shape[1:], layout, mean, std)
    whole = preprocessing.dataset(who, given, y)
    data = replace(whole, notes=_notes(preprocessing, given, codes)).with_held_out(parts)
    held = {name: preprocessing.dataset(who, found[f"x_{name}"], _labels(who, found[f"y_{name}"])) for name in own}
    if "val" in held:
        return replace(data, validation=held["val"], test=held.get("test", data.test))
    return replace(data, validation=held["test"]) if held else data


def _notes(preprocessing: ArrayPreprocessing, given: Array, codes: Array) -> tuple[str, ...]:
    shape, target = preprocessing.shape, preprocessing.target
    notes = [f"x  {given.dtype} {given.shape}"]
    if preprocessing.layout == "grey images":
        notes[0] += f": grey images, fed as {shape} each"
    elif preprocessing.layout == "channels last images":
        notes[0] += f": images with channels last, fed with channels first, {shape} each"
    if preprocessing.mean:
        notes[0] += ", standardised"
    elif preprocessing.layout != "samples" and preprocessing.std[0] != 1:
        notes[0] += f", divided by {preprocessing.std[0]:g}"
    what = target.described(codes if target.classes else None) if target else f"{codes.dtype} {codes.shape}"
    return (*notes, f"y  {what}")


def numeric(who: str, name: str, array: Array) -> Array:
    """An array of finite numbers."""
    if array.dtype.kind not in "biuf":
        raise DataError(f"{who}: {name} is made of {array.dtype}", expected="numbers")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        where = np.argwhere(~np.isfinite(array))[0]
        raise DataError(
            f"{who}: {name} is {array[tuple(where)]} in sample {where[0]}",
            fix="fill in what is missing, or leave these samples out",
        )
    return array


def _labels(who: str, y: Array) -> Array:
    """Labels (n,) or numbers (n, outputs); one-hot rows become the number of their 1."""
    if not y.ndim:
        raise DataError(
            f"{who}: y is {y.item()!r}",
            expected="a label for every sample",
            fix="samples without labels are given to fit as they are: trainer.fit(x)",
        )
    if y.dtype.kind == "f":
        numeric(who, "y", y)
    kinds = {_kind(one) for one in y.flat} if y.dtype.kind == "O" else set()
    if len(kinds) > 1:
        raise DataError(
            f"{who}: y has values of different types: {listed(sorted(kinds))}",
            expected="text for every sample, or a number",
            fix="leave samples without a label out; text and numbers become text by y.astype(str)",
        )
    y = y.reshape(len(y)) if y.ndim == 2 and y.shape[1] == 1 else y
    if y.ndim != 2 or y.dtype.kind not in "buif" or y.shape[1] < 2:
        return y
    is_one_hot = bool(((y == 0) | (y == 1)).all() and (y.sum(axis=1) == 1).all())
    return y.argmax(axis=1) if is_one_hot else y


def _kind(label: Any) -> str:
    return "text" if isinstance(label, str) else "number" if isinstance(label, Real) else type(label).__name__


def _layout(x: Array, images: bool | None) -> Layout:
    if x.ndim == 3 and (images or (images is None and x.dtype == np.uint8)):
        return "grey images"
    if x.ndim != 4 or images is False:
        return "samples"
    return "channels last images" if x.shape[3] in _CHANNELS and x.shape[1] not in _CHANNELS else "images"


def _channels_first(x: Array, layout: Layout) -> Array:
    if layout == "grey images" and x.ndim == 3:
        return x[:, None]
    if layout == "channels last images" and x.ndim == 4:
        return np.ascontiguousarray(np.moveaxis(x, 3, 1))
    return x


def _statistics(x: Array, layout: Layout, standardize: bool) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(mean, std) of the features; of images nothing and the largest value, where they are bytes."""
    if layout != "samples":
        is_bytes = standardize and (x.dtype == np.uint8 or (x.size > 0 and float(x.max()) > 32 and float(x.min()) >= 0))
        return (), (255.0 if is_bytes else 1.0,)
    if not standardize or not len(x):
        return (), ()
    axes = tuple(range(x.ndim - 1))
    with np.errstate(over="ignore", invalid="ignore"):  # refused where it is infinite
        mean, std = x.mean(axis=axes, dtype=np.float64), x.std(axis=axes, dtype=np.float64)
    return tuple(map(float, mean)), tuple(float(one) if one > 0 else 1.0 for one in std)


def read_arrays(path: FilePath) -> dict[str, Array]:
    """The arrays in a .npz file, those called x and y as x_train and y_train; of a .npy file its only one."""
    usual = {"": "x_train", "x": "x_train", "y": "y_train", "x_valid": "x_val", "y_valid": "y_val"}
    found: dict[str, Array] = {}
    for name, array in named_arrays(path).items():
        small = name[:1].lower() + name[1:]  # X and X_train, as scikit-learn's users write them
        known = usual.get(small, small if small[:2] in ("x_", "y_") else name)
        if known in found:
            raise DataError(f"{path}: holds {known} more than once", fix="leave one out: X is x, and x is x_train")
        found[known] = array
    return found


def named_arrays(path: FilePath) -> dict[str, Array]:
    """The arrays in a .npz file by their names; of a .npy file its only one, without a name."""
    try:
        file = np.load(path, allow_pickle=False)
        if isinstance(file, np.ndarray):
            return {"": file}
        with file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        is_object = "Object arrays" in str(error)
        if "pickle" in str(error) and not is_object:  # what NumPy takes other files for
            raise DataError(
                f"{path}: is no .npz or .npy file", fix="write it with np.savez(path, x=..., y=...)"
            ) from error
        fix = "write text labels as y.astype(str), and samples as one array of numbers" if is_object else ""
        kind = path.suffix if path.suffix in (".npz", ".npy") else ".npz"
        raise DataError(f"{path}: cannot be read as {kind}: {error}", fix=fix) from error


def read_idx_folder(folder: FilePath) -> dict[str, Array]:
    """Images as bytes and their labels, from IDX files."""
    found = {}
    for part, name in (("train", "train"), ("t10k", "test")):
        for kind, short in (("images", "x"), ("labels", "y")):
            files = sorted(path for path in folder.glob(f"{part}-{kind}*") if path.is_file())
            if files:
                found[f"{short}_{name}"] = read_idx_file(files[0])
            elif f"x_{name}" in found or name == "train":
                axes = 3 if kind == "images" else 1
                raise DataError(f"{folder}: there is no file {part}-{kind}-idx{axes}-ubyte[.gz]")
    for name in ("train", "test"):
        if f"x_{name}" in found:
            x, y = found[f"x_{name}"], found[f"y_{name}"]
            if x.ndim != 3 or y.shape != x.shape[:1] or not len(x):
                raise DataError(f"{folder}: {name} has images {x.shape} but labels {y.shape}")
    return found


def read_idx_file(path: FilePath) -> Array:
    """The array in an IDX file of unsigned bytes, gzipped or not: 0, 0, 8, axes, then big-endian extents, then data."""
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
