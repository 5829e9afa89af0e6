"""mlcompute convert: between checkpoint, ONNX, plain safetensors and folders of the Hugging Face Hub."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

import mlcompute as mlc
from mlcompute.cli import models, trainers
from mlcompute.cli.answer import Answer
from mlcompute.cli.arguments import count
from mlcompute.cli.onnx_options import add_onnx_arguments, onnx_arguments
from mlcompute.errors import DataError
from mlcompute.saving.atomic import replace_file
from mlcompute.saving.checkpoint import HUB_MODEL
from mlcompute.saving.names import layer_names_of

EXAMPLES = (
    "mlcompute convert runs/0001-cnn/best.safetensors cnn.onnx",
    "mlcompute convert runs/0001-cnn/best.safetensors weights.safetensors --weights-only",
    "mlcompute convert runs/0001-cnn/best.safetensors cnn --hub",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """From where, to where."""
    parser.add_argument("source", help=models.HELP)
    parser.add_argument("target", help="MODEL.onnx, or MODEL.safetensors: a checkpoint, or the weights alone; a folder")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--hub", action="store_true", help="write a folder for the Hugging Face Hub: model.safetensors and config.json"
    )
    kinds.add_argument(
        "--weights-only", action="store_true", help="write plain safetensors: weights under PyTorch's names, no graph"
    )
    parser.add_argument("--batch", type=count, default=0, metavar="N", help="samples per run, if left open (1)")
    add_onnx_arguments(parser)


def run(args: argparse.Namespace) -> Answer:
    """Load the one, write the other."""
    target, args.source = Path(args.target), models.model_at(args.source)
    if target.resolve() == Path(args.source).resolve():
        raise DataError(f"{args.target}: source and target are one file", fix="name another target")
    if args.weights_only and target.suffix != ".safetensors":
        raise DataError(
            f"{args.target}: --weights-only writes safetensors", fix="name a target that ends in .safetensors"
        )
    if args.hub and (target.is_file() or target.suffix in (".onnx", ".safetensors")):
        raise DataError(f"{args.target}: --hub writes a folder", fix="name a folder as the target")
    graph = models.load_model(args.source, args.batch, onnx_arguments(args))
    if isinstance(graph, mlc.TrainingGraph) and (args.hub or target.suffix == ".onnx"):
        # What runs elsewhere is the model, without dropout and optimizer.
        graph = trainers.trainer_of(graph, mlc.Device.cpu(), args.source).inference
    if args.hub:
        _save_folder(target, graph, args.source)
        target /= HUB_MODEL
        kind = "model"
    elif target.suffix == ".onnx":
        import mlcompute.onnx

        mlcompute.onnx.save(models.compiled(graph, mlc.Device.cpu()), args.target)
        kind = "ONNX model"
    elif target.suffix == ".safetensors" and args.weights_only:
        _save_weights(args.target, graph)
        kind = "weights"
    elif target.suffix == ".safetensors":
        mlc.save(args.target, graph)
        kind = "checkpoint"
    else:
        raise DataError(f"{args.target}: unknown kind of file", expected=".onnx, .safetensors; a folder with --hub")
    size = target.stat().st_size
    return Answer(f"{kind} in {args.target}, {size:,} bytes", {"target": args.target, "kind": kind, "bytes": size})


def _save_folder(folder: Path, graph: mlc.Graph, source: str) -> None:
    """The model without what only training needs, for `mlc.load(folder)`; config.json is what people and sites read."""
    prepared = {}
    if models.existing(source, models.HELP).suffix == ".safetensors":
        with mlc.Checkpoint(source) as checkpoint:  # how its data was prepared goes along
            progress = checkpoint.progress if isinstance(checkpoint.progress, dict) else {}
            prepared = {"data": progress["data"]} if "data" in progress else {}
    read = {tensor for node in graph.nodes for tensor in node.sources}  # labels are not
    folder.mkdir(parents=True, exist_ok=True)
    mlc.save(folder / HUB_MODEL, graph, progress=prepared)
    config = {
        "model_type": "mlcompute",
        "architectures": [type(graph).__name__],
        "mlcompute_version": mlc.__version__,
        "inputs": {tensor.label: list(tensor.descriptor.shape) for tensor in graph.input_tensors if tensor in read},
        "layers": {name: type(layer).__name__ for layer, name in layer_names_of(graph).items()},
    }
    content = json.dumps(config, indent=2).encode() + b"\n"
    replace_file(str(folder / "config.json"), lambda file: file.write(content), "convert")


def _save_weights(path: str, graph: mlc.Graph) -> None:
    """A file any reader of safetensors opens, replaced whole or not at all."""
    import safetensors.numpy

    arrays = {name: np.ascontiguousarray(array) for name, array in mlc.to_state_dict(graph).items()}
    content = safetensors.numpy.save(arrays, metadata={"format": "pt"})  # which readers of the Hugging Face Hub want
    replace_file(path, lambda file: file.write(content), "convert")
