"""Models on the command line: a checkpoint, an ONNX file, or a Python file that builds one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import mlcompute as mlc
from mlcompute.errors import DataError, FileError

HELP = "a checkpoint (.safetensors), an ONNX model (.onnx), or a Python file that defines `build()`"


def load_model(path: str, batch_size: int = 0) -> mlc.Graph:
    """The graph in a file, not compiled."""
    file = Path(path)
    if not file.exists():
        raise FileError(f"{path}: there is no such file", expected=HELP)
    if file.suffix == ".py":
        return built_by(file)
    if file.suffix == ".onnx":
        import mlcompute.onnx

        return mlcompute.onnx.load(path, batch=batch_size or None)
    if file.suffix == ".safetensors":
        return mlc.load(path)
    raise FileError(f"{path}: not a model", expected=HELP)


def built_by(file: Path) -> mlc.Graph:
    """What the `build` function of a Python file returns: a Graph, TrainingGraph or InferenceGraph, or a Trainer."""
    module = import_file(file)
    build = getattr(module, "build", None)
    if not callable(build):
        raise DataError(f"{file}: defines no function `build`", expected="def build() -> mlc.TrainingGraph")
    model = build()
    model = getattr(model, "training", model)  # a Trainer has its training graph
    if not isinstance(model, mlc.Graph):
        raise DataError(f"{file}: build() returned a {type(model).__name__}", expected="a graph or a Trainer")
    return model


def import_file(file: Path) -> ModuleType:
    """A Python file as a module; the file's folder is where it finds its neighbours."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise DataError(f"{file}: {why}", fix="run the file by itself to see where") from error
    finally:
        sys.path.pop(0)
    return module


def compiled(graph: mlc.Graph, device: mlc.Device) -> mlc.TrainingGraph | mlc.InferenceGraph:
    """A graph ready to run: as it is when it was compiled already, an inference graph over it when it is plain."""
    if not isinstance(graph, (mlc.TrainingGraph, mlc.InferenceGraph)):
        inference = mlc.InferenceGraph([graph])
        inference.add_inputs(inputs_of(graph))
        graph = inference
    if graph.device is None:
        graph.compile(device=device)
    return graph


def inputs_of(graph: mlc.Graph) -> dict[str, mlc.Tensor]:
    """What a plain graph must be fed: sources nobody computes, that have no data of their own."""
    from mlcompute.saving.names import names_of

    names = names_of(graph)
    computed = {result for node in graph._all_nodes() for result in node.results}
    sources = dict.fromkeys(source for node in graph._all_nodes() for source in node.sources)
    return {names[tensor]: tensor for tensor in sources if tensor not in computed and tensor._host is None}


def device_named(name: str) -> mlc.Device:
    """The device the user asked for."""
    found = {"cpu": mlc.Device.cpu, "gpu": mlc.Device.gpu, "any": mlc.Device}[name]()
    if found is None:
        raise mlc.DeviceError(f"there is no {name} device here", fix="use --device cpu; `mlcompute devices` lists all")
    return found
