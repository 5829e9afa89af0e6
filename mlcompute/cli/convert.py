"""mlcompute convert: between checkpoint, ONNX and plain safetensors, told apart by what is in the files."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import mlcompute as mlc
from mlcompute.cli import models, trainers
from mlcompute.cli.answer import Answer
from mlcompute.cli.arguments import count
from mlcompute.cli.onnx_options import add_onnx_arguments, onnx_arguments
from mlcompute.errors import DataError
from mlcompute.saving.atomic import replace_file

EXAMPLES = (
    "mlcompute convert runs/0001-cnn/best.safetensors cnn.onnx",
    "mlcompute convert runs/0001-cnn/best.safetensors weights.safetensors --weights-only",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """From where, to where."""
    parser.add_argument("source", help=models.HELP)
    parser.add_argument("target", help="MODEL.onnx, or MODEL.safetensors: a checkpoint, or the weights alone")
    parser.add_argument(
        "--weights-only", action="store_true", help="write plain safetensors: weights under PyTorch's names, no graph"
    )
    parser.add_argument("--batch", type=count, default=0, metavar="N", help="samples per run, if left open (1)")
    add_onnx_arguments(parser)


def run(args: argparse.Namespace) -> Answer:
    """Load the one, write the other."""
    target = Path(args.target)
    if target.resolve() == Path(args.source).resolve():
        raise DataError(f"{args.target}: source and target are one file", fix="name another target")
    if args.weights_only and target.suffix != ".safetensors":
        raise DataError(
            f"{args.target}: --weights-only writes safetensors", fix="name a target that ends in .safetensors"
        )
    graph = models.load_model(args.source, args.batch, onnx_arguments(args))
    if target.suffix == ".onnx":
        import mlcompute.onnx

        if isinstance(graph, mlc.TrainingGraph):  # what runs elsewhere is the model, without dropout and loss
            graph = trainers.trainer_of(graph, mlc.Device.cpu(), args.source).inference
        mlcompute.onnx.save(models.compiled(graph, mlc.Device.cpu()), args.target)
        kind = "ONNX model"
    elif target.suffix == ".safetensors" and args.weights_only:
        _save_weights(args.target, graph)
        kind = "weights"
    elif target.suffix == ".safetensors":
        mlc.save(args.target, graph)
        kind = "checkpoint"
    else:
        raise DataError(f"{args.target}: unknown kind of file", expected="a name that ends in .onnx or .safetensors")
    size = target.stat().st_size
    return Answer(f"{kind} in {args.target}, {size:,} bytes", {"target": args.target, "kind": kind, "bytes": size})


def _save_weights(path: str, graph: mlc.Graph) -> None:
    """A file any reader of safetensors opens, replaced whole or not at all."""
    import safetensors.numpy

    arrays = {name: np.ascontiguousarray(array) for name, array in mlc.to_state_dict(graph).items()}
    content = safetensors.numpy.save(arrays, metadata={"format": "np"})
    replace_file(path, lambda file: file.write(content), "convert")
