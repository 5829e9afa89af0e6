"""mlcompute inspect: a model's layers, memory and plan, and what else a checkpoint holds."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import mlcompute as mlc
from mlcompute.cli import models
from mlcompute.cli.answer import Answer, summary_of
from mlcompute.cli.arguments import count
from mlcompute.cli.onnx_options import add_onnx_arguments, onnx_arguments
from mlcompute.runtime.call_data import batch_of
from mlcompute.runtime.session import session_of
from mlcompute.saving.atomic import write_text
from mlcompute.seeing.table import Table
from mlcompute.seeing.units import shape, size

EXAMPLES = (
    "mlcompute inspect runs/0001-cnn/last.safetensors",
    "mlcompute inspect net.py --plan --svg net.svg",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, and how much of it."""
    parser.add_argument("model", help=models.HELP)
    parser.add_argument("--batch", type=count, default=0, metavar="N", help="memory at this batch size (its own)")
    add_onnx_arguments(parser)
    parser.add_argument("--plan", action="store_true", help="every step with its kernel and where its result lies")
    parser.add_argument("--svg", metavar="FILE", help="draw the graph into a file")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where it runs (cpu)")


def run(args: argparse.Namespace) -> Answer:
    """Load, compile, describe."""
    args.model = models.model_at(args.model)
    lines: list[str] = []
    data: dict[str, Any] = {"model": args.model}
    if models.existing(args.model, models.HELP).suffix == ".safetensors":
        checkpoint = mlc.Checkpoint(args.model)
        data["facts"], data["progress"] = checkpoint.facts, checkpoint.progress
        lines += _described(checkpoint)
        if checkpoint.description is None:
            arrays = {name: checkpoint[name] for name in checkpoint.names}
            data["tensors"] = {name: list(array.shape) for name, array in arrays.items()}
            lines += ["weights only, no graph", "", str(_tensors(arrays))]
            return Answer("", data, table="\n".join(lines))
        lines.append("")
    model = models.load_model(args.model, args.batch, onnx_arguments(args))
    graph = models.compiled(model, models.device_named(args.device))
    summary = graph.summary()
    lines.append(summary_of(graph))
    data["parameters"] = summary.parameters
    data["device_memory_size"] = graph.device_memory_size
    session = session_of(graph)
    batch = args.batch or session.compile_if_needed().batch_size
    style = "fused" if isinstance(graph, mlc.TrainingGraph) else "inference"
    program = session.program(style, batch_of(session, args.batch, "inspect"))
    data["memory"] = {"batch": batch, "bytes": program.plan.nbytes}
    lines.append(f"memory at batch {batch}: {program.plan.nbytes:,} bytes in one {style} run")
    if args.plan:
        graph.programs  # noqa: B018  built, so that kernels are known
        lines += ["", str(program)]
        if sys.stdout.isatty():
            lines.append("(cut to the width of the terminal; `| less -S` shows whole lines)")
        data["plan"] = str(program).splitlines()
    drawn = ""
    if args.svg:
        write_text(Path(args.svg), graph.svg(), "inspect")
        drawn = f"drawn into {args.svg}"
        data["svg"] = args.svg
    data["layers"] = [dataclasses.asdict(row) for row in summary.layers]
    return Answer(drawn, data, table="\n".join(lines))


def _tensors(arrays: dict[str, Any]) -> Table:
    rows = [[name, str(array.dtype), shape(array.shape), size(array.nbytes)] for name, array in arrays.items()]
    total = ["total", "", "", size(sum(array.nbytes for array in arrays.values()))]
    return Table(["tensor", "type", "shape", "size"], rows, frozenset({3}), foot=[total])


def _described(checkpoint: mlc.Checkpoint) -> list[str]:
    """Who wrote the file, with what, and how far training had come."""
    facts: dict[str, Any] = checkpoint.facts
    lines = []
    if facts:
        machine = f"Python {facts['python']}, NumPy {facts['numpy']}, {facts['machine']}"
        lines.append(f"written by  mlcompute {facts['library']} ({machine})")
        lines += [f"compiled    {', '.join(f'{name} {fact}' for name, fact in facts['device'].items())}"]
        lines.append(f"graph       {facts['graph_hash'][:16]}, {', '.join(facts['data_types']).lower()}")
    progress = checkpoint.progress
    if isinstance(progress, dict) and isinstance(progress.get("trainer"), dict):
        run = progress["trainer"]
        epochs = f"{run['epoch']:,} epoch{'' if run['epoch'] == 1 else 's'}"
        more = f" and {run['batch']:,} steps of the next" if run["batch"] else ""
        lines.append(f"trained     {epochs}{more}, {run['step']:,} steps in all")
    elif progress:
        lines.append(f"progress    {', '.join(map(str, progress))}")
    return lines
