"""mlcompute doctor: what of an ONNX model imports, what trains, and the memory it takes."""

from __future__ import annotations

import argparse
import dataclasses

from mlcompute.cli.answer import FAILED, SUCCESS, Answer
from mlcompute.cli.arguments import count
from mlcompute.cli.onnx_options import add_onnx_arguments, onnx_arguments

EXAMPLES = (
    "mlcompute doctor model.onnx --batch 8",
    "mlcompute doctor model.onnx --dimension sequence=128 --trainable 'classifier.*'",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, at which batch size."""
    parser.add_argument("model", help="an ONNX model")
    parser.add_argument("--batch", type=count, default=1, metavar="N", help="samples per run, if it is left open (1)")
    add_onnx_arguments(parser)


def run(args: argparse.Namespace) -> Answer:
    """Everything that stands in the way, at once; fails when something does."""
    import mlcompute.onnx

    report = mlcompute.onnx.doctor(args.model, batch=args.batch, **onnx_arguments(args))
    data = {**dataclasses.asdict(report), "healthy": report.healthy}
    return Answer(str(report), data, code=SUCCESS if report.healthy else FAILED)
