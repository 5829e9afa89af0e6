"""Options for ONNX models on the command line: the arguments of `mlc.onnx.load`."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from mlcompute.errors import DataError
from mlcompute.onnx.choices import BATCH_NORMS


def add_onnx_arguments(parser: argparse.ArgumentParser) -> None:
    """Extents, shapes and numbers a model leaves open, and what of it is trained."""
    group = parser.add_argument_group("ONNX models")
    group.add_argument(
        "--dimension", action="append", type=_dimension, metavar="NAME=N", help="an extent the model leaves open"
    )
    group.add_argument(
        "--shape", action="append", type=_shape, metavar="INPUT=N,N,..", help="the whole shape of an input"
    )
    group.add_argument(
        "--constant", action="append", type=_constant, metavar="NAME=X,X,..",
        help="numbers of a value that shapes or branches depend on, or FILE.npy",
    )  # fmt: skip
    group.add_argument(
        "--trainable", action="append", metavar="PATTERN", help="train the tensors of this name, and no others"
    )
    group.add_argument("--batch-norm", choices=BATCH_NORMS, help="keep running statistics, or leave them (train)")
    group.add_argument("--dequantize", action="store_true", help="make floating weights of quantized ones")
    group.add_argument("--output", metavar="NAME", help="the output a loss is put on, if there are several")


def onnx_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments for `load` and `doctor`; only those that were given."""
    given: dict[str, Any] = {
        "dimensions": dict(args.dimension or ()), "shapes": dict(args.shape or ()),
        "constants": dict(args.constant or ()), "trainable": args.trainable, "batch_norm": args.batch_norm,
        "dequantize": args.dequantize, "output": args.output,
    }  # fmt: skip
    return {name: value for name, value in given.items() if value}


def refuse_onnx_arguments(path: str, given: dict[str, Any]) -> None:
    """A DataError when something was said about an ONNX model and there is none."""
    if given:
        names = ", ".join(sorted(given))
        raise DataError(f"{path}: is no ONNX model", reason=f"{names} was given", fix="leave out the options for ONNX")


def _named(text: str, expected: str) -> tuple[str, str]:
    name, equals, value = text.rpartition("=")
    if not equals or not name or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    return name, value


def _dimension(text: str) -> tuple[str, int]:
    name, value = _named(text, "NAME=N")
    return name, _whole(value)


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, value = _named(text, "INPUT=N,N,..")
    return name, tuple(_whole(part) for part in value.replace("x", ",").split(","))


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _constant(text: str) -> tuple[str, Any]:
    name, value = _named(text, "NAME=X,X,..")
    if value.endswith(".npy"):
        try:
            return name, np.load(value, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise argparse.ArgumentTypeError(f"{value}: cannot be read ({error})") from None
    words = {"true": 1.0, "false": 0.0}
    try:
        numbers = [words.get(part.lower()) if part.lower() in words else float(part) for part in value.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} is neither numbers nor a .npy file") from None
    # One number may stand for a scalar or for a list of one: the model says which.
    return name, np.array(numbers[0] if len(numbers) == 1 else numbers)
