"""mlcompute check: are the gradients right?"""

from __future__ import annotations

import argparse

import mlcompute as mlc
from mlcompute.cli import models, samples
from mlcompute.cli.answer import FAILED, SUCCESS, Answer
from mlcompute.cli.arguments import count
from mlcompute.debug.gradients import check_gradients
from mlcompute.errors import GraphError

EXAMPLES = (
    "mlcompute check net.py",
    "mlcompute check runs/0001-cnn/last.safetensors --directions 10",
)


_MEANING = """
relative errors, beyond what rounding explains:
differences  of the derivative against finite differences
compiled     of the gradient on the device against float64"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, on what data."""
    parser.add_argument("model", help=models.HELP)
    parser.add_argument("--data", metavar="FILE", help=samples.HELP)
    parser.add_argument("--directions", type=count, default=3, metavar="N", help="random directions per gradient (3)")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where it runs (cpu)")


def run(args: argparse.Namespace) -> Answer:
    """Compare with finite differences; fails when a gradient is wrong."""
    graph = models.compiled(models.load_model(args.model), models.device_named(args.device))
    if not isinstance(graph, mlc.TrainingGraph):
        raise GraphError(f"{args.model}: is no training graph", fix="gradients need a loss: save a TrainingGraph")
    inputs, labels = samples.samples_for(graph, args.data)
    report = check_gradients(graph, inputs, labels, directions=args.directions)
    rows = [{**vars(row), "right": row.is_right} for row in report.rows]
    data = {"model": args.model, "right": bool(report), "gradients": rows}
    return Answer(_MEANING, data, table=str(report), code=SUCCESS if report else FAILED)
