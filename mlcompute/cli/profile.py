"""mlcompute profile: where the time of a step goes."""

from __future__ import annotations

import argparse
import dataclasses

from mlcompute.cli import models, samples
from mlcompute.cli.answer import Answer
from mlcompute.cli.arguments import count

EXAMPLES = (
    "mlcompute profile net.py",
    "mlcompute profile runs/0001-cnn/last.safetensors --trace step.json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, on what data."""
    parser.add_argument("model", help=models.HELP)
    parser.add_argument("--data", metavar="FILE", help=samples.HELP)
    parser.add_argument("--steps", type=count, default=10, metavar="N", help="steps to time (10)")
    parser.add_argument("--trace", metavar="FILE", help="write a trace for ui.perfetto.dev")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where it runs (cpu)")


def run(args: argparse.Namespace) -> Answer:
    """Time some steps, layer by layer."""
    graph = models.compiled(models.load_model(args.model), models.device_named(args.device))
    inputs, labels = samples.samples_for(graph, args.data)
    profile = graph.profile(inputs, labels, steps=args.steps)
    if args.trace:
        profile.save_trace(args.trace)
    data = {
        "model": args.model,
        "device": profile.device,
        "batch": profile.batch_size,
        "seconds_per_run": profile.step_time,
        "rows": [dataclasses.asdict(row) for row in profile.rows],
        "trace": args.trace,
    }
    return Answer(f"trace in {args.trace}" if args.trace else "", data, table=str(profile))
