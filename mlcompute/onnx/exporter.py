"""From a graph to a model: operators that came from ONNX go back as they were, every other layer as the ops it is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.compiler import Description
from mlcompute.compiler.lower import Lowering
from mlcompute.described import DescribedGraph
from mlcompute.errors import DataError, GraphError
from mlcompute.graph import Node
from mlcompute.inference import InferenceGraph
from mlcompute.onnx.importer import ImportedGraph
from mlcompute.onnx.layer import OperatorLayer
from mlcompute.onnx.operands import Derived, Known, Operand, Source, Use, Weight
from mlcompute.onnx.operators.reductions import MASKED
from mlcompute.onnx.types import carried, element_type, folded_shape
from mlcompute.onnx.writing import CannotExportError, Writer
from mlcompute.ops.op import Step, Value
from mlcompute.programs import final_result, without_losses
from mlcompute.tensor import Tensor
from mlcompute.training import TrainingGraph

if TYPE_CHECKING:
    from onnx import ModelProto

#: Operators are written as of this version of the standard: old enough for the programs in use.
OPSET = 18
#: Models larger than this keep their weights in a file beside them: one message holds at most 2 GiB.
_LARGEST = (1 << 31) - (1 << 24)


@dataclass(eq=False)
class _Part:
    """One layer of the lowered graph: its steps, or its operator when that can be written as it is."""

    node: Node
    steps: list[Step] = field(default_factory=list)
    native: bool = False


def save(graph: Any, path: Any, *, name: str = "mlcompute") -> None:
    """Write a graph as an ONNX model (operator set 18), checked by ONNX's checker; the old file stays until it is done.

    graph   an InferenceGraph or a graph made by `load`: the forward pass, with the graph's own batch size.
            A TrainingGraph: one training step, with `Gradient` and `Adam` or `Momentum` of ai.onnx.preview.training;
            other optimizers, clipping, L1 penalties and dropout have no such operator: CannotExportError

    >>> import mlcompute as mlc
    >>> mlc.onnx.save(inference_graph, "model.onnx")  # doctest: +SKIP
    """
    target = Path(path)
    if target.is_dir() or not target.parent.is_dir():
        raise DataError(f"onnx.save: '{target}' cannot be written", expected="a file name in a folder that exists")
    write_model(to_model(graph, name=name), target)


def to_model(graph: Any, *, name: str = "mlcompute") -> ModelProto:
    """The graph as an ONNX model, checked by ONNX's own checker."""
    import onnx

    if isinstance(graph, ImportedGraph):
        wrapped = InferenceGraph([graph])
        wrapped.add_inputs(graph.inputs)
        wrapped.add_outputs(graph.outputs)
        graph = wrapped
    if isinstance(graph, TrainingGraph):
        from mlcompute.onnx.training import training_model

        model = training_model(graph, name)
    elif isinstance(graph, DescribedGraph):
        graph_writer = GraphWriter(graph, without_losses(graph._describe()), training=False)
        model = graph_writer.model(name)
    else:
        raise GraphError(
            f"onnx.save: cannot write a {type(graph).__name__}",
            expected="an InferenceGraph, a TrainingGraph or a graph made by onnx.load",
        )
    if model.ByteSize() < _LARGEST:
        onnx.checker.check_model(model, full_check=not isinstance(graph, TrainingGraph))
    return model


def write_model(model: ModelProto, target: Path) -> None:
    """Replace the file whole, or leave the old one."""
    import onnx

    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    data = target.with_name(f"{target.name}.data")
    try:
        if model.ByteSize() < _LARGEST:
            temporary.write_bytes(model.SerializeToString())
        else:
            onnx.save_model(model, temporary, save_as_external_data=True, location=data.name)
        os.replace(temporary, target)
    except OSError as error:
        raise DataError(f"onnx.save: '{target}' cannot be written", reason=error.strerror) from None
    finally:
        temporary.unlink(missing_ok=True)


class GraphWriter:
    """Lowers a graph and writes it, layer by layer."""

    def __init__(self, graph: DescribedGraph, description: Description, *, training: bool) -> None:
        self.graph, self.description = graph, description
        self.run = Lowering(training)
        self.run.weights_of = description.label_weights
        self.parts: list[_Part] = []
        self.writer = Writer(OPSET)
        self._lower()
        self.outputs = self._named_outputs()
        self._name()

    # Lowering ---------------------------------------------------------------------------------------------------

    def _lower(self) -> None:
        run = self.run
        for tensor in self.description.inputs:
            run.input(tensor)
        for tensor, array in self.description.constants.items():
            run.values[tensor] = run.trace.constant(array)
        for node in self.description.nodes:
            start = len(run.trace.steps)
            run.add(node.layer, [*node.sources, *node.labels], node.results)
            layer = node.layer
            native = isinstance(layer, OperatorLayer) and not run.training and self._is_native(layer.use)
            self.parts.append(_Part(node, run.trace.steps[start:], native))
        if run.random_keys:
            raise CannotExportError(
                "onnx.save: the graph draws random numbers, which ONNX has no operator for that repeats them",
                fix="export an InferenceGraph, in which dropout is off",
            )

    def _is_native(self, use: Use) -> bool:
        """Does the operator mean the same in the version that is written, in the programs that will read it?"""
        row, given = use.row, use.attributes
        if row.domain or row.name in _AS_OPS or MASKED in given or given.get("layout") or given.get("mode") == "wrap":
            return False
        if given.get("coordinate_transformation_mode") in ("align_corners", "tf_crop_and_resize"):
            return False
        if not _same_meaning(row.name, use.version, bool(given.get("ceil_mode"))) or not _accepts(use):
            return False
        plain = (int, float, str, list, np.ndarray)
        if not all(isinstance(value, plain) for value in use.attributes.values()):
            return False
        for operand in use.operands:
            if isinstance(operand, Derived) and not self._is_native(operand.use):
                return False
            if isinstance(operand, Known) and operand.array.dtype.name not in _PLAIN:
                return False
        return True

    # Names ----------------------------------------------------------------------------------------------------------

    def _named_outputs(self) -> dict[str, Tensor]:
        declared = {
            name: tensor for name, tensor in self.graph._declared.outputs.items() if tensor in self.run.values
        }
        if declared:
            return declared
        last = final_result(self.description.nodes)
        if last is None:
            raise GraphError("onnx.save: the graph has no layers")
        return {"output": last}

    def _name(self) -> None:
        writer, values = self.writer, self.run.values
        self.inputs: dict[str, Tensor] = {}
        for tensor in self.description.inputs:
            name = writer.unique(self.graph._declared.name_of(tensor))
            writer.names[values[tensor]] = name
            self.inputs[name] = tensor
        produced = {value for part in self.parts for step in part.steps for value in step.results}
        #: Outputs that are another's value, an input or a constant: copied.
        self.copies: list[tuple[Tensor, str]] = []
        for wish, tensor in self.outputs.items():
            name = writer.unique(wish)
            value = values[tensor]
            if value in writer.names or value not in produced:
                self.copies.append((tensor, name))
            else:
                writer.names[value] = name
        self.output_names = dict(zip(self.outputs, [*self.outputs], strict=True))
        self.weights: dict[str, Tensor] = {}
        for tensor, value in self.run.persistent.items():
            name = writer.unique(tensor.label)
            writer.names[value] = name
            self.weights[name] = tensor

    # Writing --------------------------------------------------------------------------------------------------------

    def write(self) -> Writer:
        for part in self.parts:
            if part.native:
                self._write_operator(part)
            else:
                for step in part.steps:
                    try:
                        self.writer.step(step)
                    except CannotExportError as error:
                        raise CannotExportError(f"onnx.save: {part.node.layer.who}: {error.message}") from None
        for tensor, name in self.copies:
            self.writer.node("Identity", [self.writer.name(self.run.values[tensor])], [name])
        return self.writer

    def _write_operator(self, part: _Part) -> None:
        layer = part.node.layer
        assert isinstance(layer, OperatorLayer)
        writer, after = self.writer, []
        outputs = [writer.unique("unused") for _ in range(layer.use.output_count)]
        for (index, shape, _), tensor in zip(layer.outputs, part.node.results, strict=True):
            name = writer.name(self.run.values[tensor])
            if folded_shape(shape) == shape:
                outputs[index] = name
            else:
                outputs[index] = writer.unique("whole")
                after.append((outputs[index], folded_shape(shape), name))
        self._write_use(layer.use, outputs, layer.label)
        for inner, shape, name in after:
            writer.node("Reshape", [inner, writer.constant(np.array(shape, np.int64))], [name])

    def _write_use(self, use: Use, outputs: list[str], label: str) -> None:
        inputs = ["" if operand is None else self._operand(operand) for operand in use.operands]
        while inputs and not inputs[-1]:
            inputs.pop()
        attributes = {
            key: _stored(value, f"{label}/{key}") if isinstance(value, np.ndarray) else value
            for key, value in use.attributes.items()
            if not (isinstance(value, list) and not value)
        }
        self.writer.node(use.row.name, inputs, outputs, name=self.writer.unique(f"node {label}"), **attributes)

    def _operand(self, operand: Operand) -> str:
        writer = self.writer
        if isinstance(operand, Known):
            array = operand.array
            to = carried(array.dtype)
            return writer.constant(array if array.dtype == to else array.astype(to))
        if isinstance(operand, Weight):
            name = self._tensor_name(operand.tensor)
            return self._unfolded(name, operand.shape)
        if isinstance(operand, Source):
            return self._unfolded(writer.name(self.run.values[operand.tensor]), operand.shape)
        assert isinstance(operand, Derived)
        outputs = [""] * (operand.index + 1)
        outputs[operand.index] = writer.unique("derived")
        self._write_use(operand.use, outputs, outputs[operand.index])
        return outputs[operand.index]

    def _tensor_name(self, tensor: Tensor) -> str:
        return self.writer.name(self.run.value_of(tensor))

    def _unfolded(self, name: str, shape: tuple[int, ...]) -> str:
        if folded_shape(shape) == shape:
            return name
        return self.writer.value("Reshape", name, self.writer.constant(np.array(shape, np.int64)))

    def model(self, name: str) -> ModelProto:
        """The whole model."""
        writer = self.write()
        outputs = {wish: self.run.values[tensor] for wish, tensor in self.outputs.items()}
        inputs = {given: self.run.values[tensor] for given, tensor in self.inputs.items()}
        weights = {given: _host(tensor) for given, tensor in self.weights.items()}
        return assemble(writer, name, inputs, outputs, weights)


#: Operators that are written as the ops they are: types are carried here, or programs disagree about them.
_AS_OPS = {
    "Cast", "CastLike", "QuantizeLinear", "ConvInteger", "DFT", "STFT", "MaxUnpool", "MeanVarianceNormalization",
    "Mod", "Scatter", "Upsample",
}  # fmt: skip


def _accepts(use: Use) -> bool:
    """Does the version that is written accept the types of the operands?"""
    import onnx.defs

    schema = onnx.defs.get_schema(use.row.name, OPSET, "")
    for index, operand in enumerate(use.operands):
        if operand is None:
            continue
        formal = schema.inputs[min(index, len(schema.inputs) - 1)]
        dtype = operand.dtype if isinstance(operand, (Source, Derived)) else getattr(operand, "array", _NOTHING).dtype
        dtype = carried(dtype)
        if f"tensor({'float' if dtype == np.float32 else dtype.name})" not in formal.types:
            return False
    return True


_NOTHING = np.zeros(0, np.float32)


def _same_meaning(name: str, version: int, ceil: bool) -> bool:
    """Is an operator of some version the same in the version that is written, apart from the types it accepts?"""
    import onnx.defs

    try:
        then, now = onnx.defs.get_schema(name, version, ""), onnx.defs.get_schema(name, OPSET, "")
    except onnx.defs.SchemaError:
        return False
    if now.deprecated or then.since_version == now.since_version:
        return not now.deprecated
    # Later versions count the windows of a rounded-up pooling otherwise, and name the modes of grids otherwise.
    if then.since_version < now.since_version or ceil or name == "GridSample":
        return False
    same_inputs = [part.name for part in then.inputs] == [part.name for part in now.inputs]
    return same_inputs and sorted(then.attributes) == sorted(now.attributes)


#: Types of constants that are written as they are.
_PLAIN = {"float32", "float16", "bool", "int8", "uint8", "int32", "int64"}


def _stored(array: Any, name: str) -> Any:
    from onnx import numpy_helper

    return numpy_helper.from_array(np.ascontiguousarray(array), name)


def _host(tensor: Tensor) -> Any:
    data = tensor.data
    assert data is not None
    return data


def assemble(
    writer: Writer, name: str, inputs: Mapping[str, Value], outputs: Mapping[str, Value], weights: Mapping[str, Any]
) -> ModelProto:
    """Nodes, stored tensors and the declarations of what goes in and out; nodes nobody needs are left out."""
    from onnx import helper, numpy_helper

    nodes = _needed(writer.nodes, set(outputs))
    used = {given for node in nodes for given in node.input}
    stored = {**weights, **writer.stored}
    initializers = [
        numpy_helper.from_array(np.ascontiguousarray(array).reshape(np.shape(array)), given)
        for given, array in stored.items()
        if given in used
    ]
    graph = helper.make_graph(
        nodes, name,
        [helper.make_tensor_value_info(n, element_type(v.dtype), list(v.shape)) for n, v in inputs.items()],
        [helper.make_tensor_value_info(n, element_type(v.dtype), list(v.shape)) for n, v in outputs.items()],
        initializers,
    )  # fmt: skip
    opsets = [helper.make_opsetid("", writer.opset), *(helper.make_opsetid(d, 1) for d in sorted(writer.domains))]
    model = helper.make_model(graph, opset_imports=opsets, producer_name="mlcompute")
    model.ir_version = max(helper.find_min_ir_version_for(opsets, ignore_unknown=True), 8)
    return model


def _needed(nodes: list[Any], wanted: set[str]) -> list[Any]:
    kept = []
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.output):
            kept.append(node)
            wanted.update(node.input)
    return kept[::-1]
