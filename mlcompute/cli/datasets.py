"""Data on the command line: what the user names, or what a recipe brings."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mlcompute.cli.arguments import count
from mlcompute.data import Augment, Dataset, load, preprocessing_of
from mlcompute.data.array_file import named_arrays, read_arrays
from mlcompute.data.columns import KINDS
from mlcompute.data.loading import BUILT_IN, FORMATS
from mlcompute.data.paths import existing
from mlcompute.errors import DataError, Error
from mlcompute.graph import Graph
from mlcompute.runtime.definition import definition_of
from mlcompute.saving import Checkpoint
from mlcompute.tensor import Tensor

HELP = f"{FORMATS}; or {', '.join(BUILT_IN)}, which come with the package"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which data, and what it means. Each option is for some kinds of data, and refused for others."""
    parser.add_argument("--data", metavar="PATH", help=HELP)
    group = parser.add_argument_group("data")
    group.add_argument("--target", metavar="COLUMN", help="of a table: the column to be predicted")
    group.add_argument("--task", choices=("classification", "regression"), help="what numbers in it are (guessed)")
    group.add_argument(
        "--column",
        action="append",
        type=checked(_kind),
        metavar="NAME=KIND",
        help=f"what a column is ({', '.join(KINDS)}), where it would be taken for something else; again for others",
    )
    group.add_argument("--no-header", action="store_true", help="the first line of a table is a sample")
    group.add_argument("--separator", metavar="CHARACTER", help="of a table: between fields (found out)")
    group.add_argument("--decimal", choices=(".", ","), help="of a table: the mark before decimals (found out)")
    group.add_argument(
        "--encoding", metavar="NAME", help="of a table or text: cp1252, say, as Windows writes it (utf-8)"
    )
    group.add_argument("--window", type=count, metavar="N", help="a table is a time series: samples are N lines")
    group.add_argument("--horizon", type=count, metavar="N", help="forecast so many lines after the window (1)")
    group.add_argument("--size", type=checked(_size), metavar="N or HxW", help="bring images to this size, in pixels")
    group.add_argument("--grey", action="store_true", help="images as grey ones")
    group.add_argument("--length", type=count, metavar="N", help="characters of a text in a sample (64)")
    group.add_argument("--level", choices=("character", "byte"), help="what a text is made of (character)")
    group.add_argument(
        "--validation", metavar="SHARE", help="hold out this share (0.2; of a text 0.1), or another file"
    )
    group.add_argument("--test", type=float, metavar="SHARE", help="hold out this share besides, for `evaluate` (0)")
    group.add_argument(
        "--augment",
        type=checked(_augment),
        metavar="CHANGES",
        help="change images at random while learning: flip,crop=4,rotate=10,colour=0.2,mixup=0.2",
    )


#: Options that say what the data is. Most are arguments of its readers as they are typed; these are not.
_ABOUT_DATA = (
    "target", "task", "window", "horizon", "size", "grey", "length", "level", "validation", "test", "column",
    "no_header", "separator", "decimal", "encoding",
)  # fmt: skip
_READ: dict[str, Callable[[Any], dict[str, Any]]] = {
    "size": lambda text: {"size": _size(text)},
    "validation": lambda text: {"validation": _share(text)},
    "column": lambda texts: {"kinds": dict(map(_kind, texts))},
    "no_header": lambda flag: {"header": not flag},
}
OPTIONS = (*_ABOUT_DATA, "augment")


#: What `mlc.data.table` and `mlc.data.arrays` call data that comes from no file.
_IN_MEMORY = {"table": "a table", "arrays": "arrays"}


def loaded(args: argparse.Namespace, **options: Any) -> Dataset:
    """The data that --data names."""
    for name in _given(args):
        typed = getattr(args, name)
        options |= _READ[name](typed) if name in _READ else {name: typed}
    return augmented(args, load(args.data, **options))


def _given(args: argparse.Namespace) -> list[str]:
    return [name for name in _ABOUT_DATA if getattr(args, name) not in (None, False)]


def augmented(args: argparse.Namespace, data: Dataset) -> Dataset:
    """With the changes that --augment asks for."""
    return data if args.augment is None else data.augmented(_augment(args.augment))


def expect_no_options(args: argparse.Namespace, who: str) -> None:
    """Refuse options about data that is not read from --data."""
    given = [f"--{name.replace('_', '-')}" for name in _given(args)]
    if given:
        says = "says" if len(given) == 1 else "say"
        raise DataError(
            f"{who}: {' and '.join(given)} {says} what --data is, and none was given", fix="give --data PATH"
        )


def read_for(
    checkpoint: str, graph: Graph, path: str | None, *, labels: bool, everything: bool
) -> tuple[Dataset, bool]:
    """(data for the trained model in a checkpoint, is it the part that was held out?).

    Without a path, and for the data it was trained on, what was held out in training unless everything is wanted.
    """
    preprocessing = preprocessing_of(checkpoint)
    if preprocessing is None:
        definition = definition_of(graph)
        inputs = definition.declared.inputs if definition else {}
        compared = definition.declared.labels if definition else {}
        return _plain(checkpoint, path, inputs, compared if labels else None), False
    if path is None and preprocessing.source in _IN_MEMORY and not os.path.exists(preprocessing.source):
        raise DataError(
            f"{checkpoint}: was trained on {_IN_MEMORY[preprocessing.source]} in memory, which nothing keeps",
            fix="name data: --data PATH to evaluate, a file to predict",
        )
    labels = labels or path is None  # which samples were held out depends on them
    where = path or preprocessing.source
    split = preprocessing.split
    if path is None and split.other and not split.test and not everything:
        return preprocessing.read(split.other), True
    data = preprocessing.read(where, labels=labels)
    if everything or not _is_same(where, preprocessing.source):
        return data, False
    parts = preprocessing.parts(data)
    held = parts.test if len(parts.test) else parts.validation
    if not len(held):
        return data, False
    _expect_trained_on(checkpoint, where, len(parts.train))
    return data.subset(held), True


def _is_same(path: str, source: str) -> bool:
    """Are these one file or folder, or one name of data of the package's?"""
    return path == source or (os.path.exists(path) and os.path.exists(source) and os.path.samefile(path, source))


def _expect_trained_on(checkpoint: str, path: str, samples: int) -> None:
    """Refuse data that has changed since: which samples were held out follows from how many there are."""
    with Checkpoint(checkpoint) as file:
        trained = file.progress.get("trainer", {}).get("settings", {}).get("samples")
    if trained not in (None, samples):
        raise DataError(
            f"{path}: has changed since {checkpoint} was trained, on {trained:,} samples of it: now they would be "
            f"{samples:,}, and nobody can tell which ones were held out then",
            fix="name other data: --data PATH to evaluate (--all takes all samples), a file to predict",
        )


def _plain(
    checkpoint: str, path: str | None, inputs: Mapping[str, Tensor], labels: Mapping[str, Tensor] | None
) -> Dataset:
    """Data for a model that does not know what it was trained on: its own test samples, else all.

    labels  what the model compares with; None: none are wanted
    """
    if path is None:
        raise DataError(
            f"{checkpoint}: was trained on arrays, and nothing in it says which",
            fix="name data: --data PATH to evaluate, a file to predict",
        )
    is_array = Path(path).suffix in (".npy", ".npz")
    if is_array and (len(inputs) > 1 or len(labels or ()) > 1):
        return _by_name(path, inputs, labels or {})
    if is_array and labels is None:
        found = read_arrays(existing(path))
        if "x_train" not in found and "x_test" not in found:
            raise DataError(f"{path}: lacks x", found=", ".join(found) or "nothing", expected="samples as x or x_test")
        return Dataset(Path(path).stem, found.get("x_test", found.get("x_train")), None)
    # Arrays are fed to a network of the user's as they are.
    data = load(path, validation=0.0, **({"images": False, "standardize": False} if is_array else {}))
    return data if data.validation is None else data.validation


def _by_name(path: str, inputs: Mapping[str, Tensor], labels: Mapping[str, Tensor]) -> Dataset:
    """Arrays called as inputs and labels of a graph are, or NAME_test; x and y of the only one."""
    found = named_arrays(existing(path))
    parts: list[dict[str, Any]] = []
    for tensors, usual in ((inputs, "x"), (labels, "y")):
        part = {}
        for name in tensors:
            keys = [name] if len(tensors) > 1 else [name, usual]
            known = [key for one in keys for key in (f"{one}_test", one) if key in found]
            if known:
                part[name] = found[known[0]]
        parts.append(part)
    x, y = parts
    missing = [name for name in labels if name not in y] + ([] if x else list(inputs))
    if missing:  # which inputs predictions need is for the model to say
        wanted = ", ".join(f"{name} {tensor.descriptor.shape}" for name, tensor in {**inputs, **labels}.items())
        raise DataError(
            f"{path}: lacks {', '.join(missing)}",
            found=", ".join(found) or "nothing",
            expected=f"an array for each of {wanted}; np.savez(path, {missing[0]}=..., ...) writes them",
        )
    return Dataset(Path(path).stem, x, y or None)


@contextlib.contextmanager
def told(path: str | None, used: Dataset) -> Iterator[None]:
    """Errors about data say where it came from when nobody has asked for it."""
    try:
        yield
    except Error as error:
        if path is None:
            error.add_fact("data", f"{used.name}, because no data was named")
        raise


def checked(read: Callable[[str], object]) -> Callable[[str], str]:
    """A type for argparse: text that can be read so, as it was typed."""

    def same(text: str) -> str:
        read(text)
        return text

    return same


def _kind(text: str) -> tuple[str, str]:
    name, _, kind = text.rpartition("=")
    if not name or kind not in KINDS:
        raise argparse.ArgumentTypeError(f"{text!r}: must be NAME=KIND, kinds are {', '.join(KINDS)}")
    return name, kind


def _size(text: str) -> int | tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: must be pixels, 64 or 48x64 (height x width)")
    return int(parts[0]) if len(parts) == 1 else (int(parts[0]), int(parts[1]))


def _share(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _augment(text: str) -> Augment:
    changes: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in ("flip", "crop", "rotate", "colour", "mixup") or bool(value) == (name == "flip"):
            raise argparse.ArgumentTypeError(f"{part!r}: must be flip, crop=N, rotate=DEGREES, colour=SHARE or mixup=X")
        try:
            changes[name] = True if name == "flip" else int(value) if name == "crop" else float(value)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part!r}: {value!r} is no number") from None
    try:
        return Augment(**changes)
    except DataError as error:
        raise argparse.ArgumentTypeError(error.message) from None
