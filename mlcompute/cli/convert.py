"""mlcompute convert: between checkpoint, ONNX and plain safetensors, told apart by what is in the files."""

from __future__ import annotations

import argparse
from pathlib import Path

import mlcompute as mlc
from mlcompute.cli import models
from mlcompute.cli.answer import Answer
from mlcompute.errors import DataError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """From where, to where."""
    parser.add_argument("source", help=models.HELP)
    parser.add_argument("target", help="MODEL.onnx, or MODEL.safetensors: a checkpoint, or the weights alone")
    parser.add_argument(
        "--weights-only", action="store_true", help="write plain safetensors: weights under PyTorch's names, no graph"
    )
    parser.add_argument("--batch", type=int, default=0, metavar="N", help="samples per run, where ONNX leaves it open")


def run(args: argparse.Namespace) -> Answer:
    """Load the one, write the other."""
    target = Path(args.target)
    if target.resolve() == Path(args.source).resolve():
        raise DataError(f"{args.target}: source and target are one file", fix="name another target")
    graph = models.load_model(args.source, args.batch)
    if target.suffix == ".onnx":
        import mlcompute.onnx

        mlcompute.onnx.save(models.compiled(graph, mlc.Device.cpu()), args.target)
        kind = "ONNX model"
    elif target.suffix == ".safetensors" and args.weights_only:
        from safetensors.numpy import save_file

        save_file(mlc.to_state_dict(graph), args.target)
        kind = "weights"
    elif target.suffix == ".safetensors":
        mlc.save(args.target, graph)
        kind = "checkpoint"
    else:
        raise DataError(f"{args.target}: unknown kind of file", expected="a name that ends in .onnx or .safetensors")
    size = target.stat().st_size
    return Answer(f"{kind} in {args.target}, {size:,} bytes", {"target": args.target, "kind": kind, "bytes": size})
