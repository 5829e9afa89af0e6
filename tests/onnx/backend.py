"""A backend for `onnx.backend.test`, so that ONNX's own cases judge the operators here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.device import Device
from mlcompute.enums import ExecutionOptions
from mlcompute.errors import DataError
from mlcompute.inference import InferenceGraph
from mlcompute.onnx.imported import ImportedGraph
from mlcompute.onnx.loading import load
from mlcompute.ops.op import Array
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from onnx import ModelProto


def run_model(model: ModelProto, inputs: Sequence[Any], device: Device) -> tuple[list[Array], ImportedGraph]:
    """The outputs of a model, in its own types; inputs a shape depends on are taken as constants."""
    stored = {tensor.name for tensor in model.graph.initializer}
    names = [info.name for info in model.graph.input if info.name not in stored]
    if len(inputs) > len(names):  # all inputs are given, initializers included
        names = [info.name for info in model.graph.input]
    arrays = [None if array is None or isinstance(array, list) else np.asarray(array) for array in inputs]
    given = {name: array for name, array in zip(names, arrays, strict=False) if array is not None}
    shapes = {name: array.shape for name, array in given.items() if array.dtype != object}
    graph = load(model, shapes=shapes, constants={name: a for name, a in given.items() if a.dtype != object})
    return run_graph(graph, given, device), graph


def _carried(array: Array, tensor: Tensor, name: str) -> Array:
    """An input in the type its tensor carries it in; doubles beyond float32's range are refused."""
    with np.errstate(all="ignore"):
        found = array.reshape(tensor.descriptor.shape).astype(tensor.descriptor.data_type.numpy)
    if array.dtype == np.float64:
        tiny = (found == 0) != (array.reshape(found.shape) == 0)
        if np.any(tiny | (np.isfinite(found) != np.isfinite(array.reshape(found.shape)))):
            raise DataError(f"'{name}' has numbers outside of float32's range")
    return found


def run_graph(graph: ImportedGraph, given: dict[str, Array], device: Device) -> list[Array]:
    """The outputs of an imported graph in the model's order, shapes and types."""
    results = dict(graph.known)
    if graph.outputs:
        used = {tensor for node in graph.nodes for tensor in node.sources}
        inputs = {name: tensor for name, tensor in graph.inputs.items() if tensor in used}
        run = InferenceGraph([graph])
        run.add_inputs(inputs)
        run.add_outputs(graph.outputs)
        run.compile(device=device)
        data = {name: _carried(given[name], tensor, name) for name, tensor in inputs.items()}
        run.execute(data, options=ExecutionOptions.SYNCHRONOUS)
        for name, tensor in graph.outputs.items():
            array = tensor.data
            assert array is not None
            results[name] = array.reshape(graph.shapes[name])
    return [results[name].astype(graph.types[name], copy=False) for name in graph.order]
