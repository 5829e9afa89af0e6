"""Outputs of a model: what a graph computes or knows under their names, and which of them a loss is put on."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from mlcompute.errors import DataError
from mlcompute.onnx.operands import Failed, Listed, Source, Use, known_array
from mlcompute.onnx.problems import Problem
from mlcompute.onnx.rows import ROWS
from mlcompute.onnx.types import carried, numpy_type

if TYPE_CHECKING:
    from mlcompute.onnx.importer import Importer


def add_output(importer: Importer, name: str) -> None:
    """Let the graph have an output of the model, under its name."""
    operand = importer.names.find(name)
    if isinstance(operand, Failed):
        if operand.reason:
            importer.problems.append(Problem("output", name, operand.reason, True))
        return
    if operand is None:
        importer.problems.append(Problem("output", name, "is computed by no node"))
        return
    if isinstance(operand, Listed):
        importer.problems.append(Problem("output", name, "is a sequence", True))
        return
    if not isinstance(operand, Source):
        array = known_array(operand, importer.budget)
        assert array is not None
        importer.graph.known[name] = array
        importer.graph.shapes[name], importer.graph.types[name] = array.shape, array.dtype
        return
    if operand.tensor in importer.graph.inputs.values() or operand.tensor in importer.graph.outputs.values():
        use = Use(ROWS["", "Identity"], 13, {}, [operand], [operand.name], 1)
        (tensor,) = importer.add(use, [(0, operand.shape, operand.dtype)], name)
        operand = Source(tensor, operand.shape, operand.dtype, name)
    importer.graph.outputs[name] = operand.tensor
    importer.graph.shapes[name] = operand.shape
    declared = next((info for info in importer.model.graph.output if info.name == name), None)
    importer.graph.types[name] = operand.dtype
    if declared is not None and declared.type.tensor_type.elem_type:
        with contextlib.suppress(DataError):
            importer.graph.types[name] = numpy_type(declared.type.tensor_type.elem_type)


def choose_output(importer: Importer) -> None:
    """Make the output that a loss is put on the last result of the graph, which is where losses are put."""
    graph, wanted = importer.graph, importer.choices.output
    floating = [name for name, tensor in graph.outputs.items() if tensor.descriptor.data_type.is_floating]
    if wanted is not None and wanted not in floating and not importer.problems:
        names = ", ".join(floating) or "none"
        raise DataError(f"onnx.load: output: '{wanted}' is no floating output of the model", outputs=names)
    if not floating:
        return
    name = floating[0] if wanted is None else wanted
    graph.loss_output = name
    graph.is_output_chosen = wanted is not None or len(floating) == 1
    if graph.nodes[-1].results[0] is not graph.outputs[name]:
        operand = Source(graph.outputs[name], graph.shapes[name], carried(graph.types[name]), name)
        use = Use(ROWS["", "Identity"], 13, {}, [operand], [name], 1)
        (graph.outputs[name],) = importer.add(use, [(0, operand.shape, operand.dtype)], name)
