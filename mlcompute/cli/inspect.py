"""mlcompute inspect: a model's layers, memory and plan, and what else a checkpoint holds."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import mlcompute as mlc
from mlcompute.cli import models
from mlcompute.cli.answer import Answer
from mlcompute.seeing.files import write_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, and how much of it."""
    parser.add_argument("model", help=models.HELP)
    parser.add_argument("--batch", type=int, default=0, metavar="N", help="memory at this batch size (the model's own)")
    parser.add_argument("--plan", action="store_true", help="every step with its kernel and where its result lies")
    parser.add_argument("--svg", metavar="FILE", help="draw the graph into a file")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")


def run(args: argparse.Namespace) -> Answer:
    """Load, compile, describe."""
    lines: list[str] = []
    data: dict[str, Any] = {"model": args.model}
    if Path(args.model).suffix == ".safetensors":
        checkpoint = mlc.Checkpoint(args.model)
        data["facts"], data["progress"] = checkpoint.facts, checkpoint.progress
        lines += [f"{name}: {value}" for name, value in checkpoint.facts.items()]
        if isinstance(checkpoint.progress, dict):
            lines += [f"progress: {', '.join(checkpoint.progress)}"]
        if checkpoint.description is None:
            names = {name: list(checkpoint[name].shape) for name in checkpoint.names}
            data["tensors"] = names
            lines += ["weights only, no graph", *(f"  {n}  {s}" for n, s in names.items())]
            return Answer("", data, table="\n".join(lines))
        lines.append("")
    graph = models.compiled(models.load_model(args.model, args.batch), models.device_named(args.device))
    summary = graph.summary()
    lines.append(str(summary))
    data["parameters"] = summary.parameters
    data["device_memory_size"] = graph.device_memory_size
    batch = args.batch or graph._compile_if_needed().batch_size
    style = "fused" if isinstance(graph, mlc.TrainingGraph) else "inference"
    program = graph._program(style, graph._batch(args.batch, "inspect"))
    data["memory"] = {"batch": batch, "bytes": program.plan.nbytes}
    lines.append(f"memory at batch {batch}: {program.plan.nbytes:,} bytes in one {style} run")
    if args.plan:
        graph.programs  # noqa: B018  built, so that kernels are known
        lines += ["", str(program)]
        data["plan"] = str(program).splitlines()
    drawn = ""
    if args.svg:
        write_text(Path(args.svg), graph.svg(), "inspect")
        drawn = f"drawn into {args.svg}"
        data["svg"] = args.svg
    data["layers"] = [_plain(row) for row in summary.layers]
    return Answer(drawn, data, table="\n".join(lines))


def _plain(row: Any) -> dict[str, Any]:
    """A row of the summary as plain data; tuples are lists in JSON."""
    return dataclasses.asdict(row)
