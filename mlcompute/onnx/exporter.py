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
from mlcompute.errors import DataError, Error, GraphError
from mlcompute.graph import Node
from mlcompute.inference import InferenceGraph
from mlcompute.onnx.imported import ImportedGraph
from mlcompute.onnx.layer import OperatorLayer
from mlcompute.onnx.operands import Derived, Known, Operand, Source, Use, Weight
from mlcompute.onnx.operators.reductions import MASKED
from mlcompute.onnx.symbolic import Rewriter, Sizes, StaticError
from mlcompute.onnx.types import carried, element_type, folded_shape, unfolded_shape
from mlcompute.onnx.writing import CannotExportError, Writer
from mlcompute.ops.op import Step, Value
from mlcompute.programs import without_losses
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


def save(graph: Any, path: Any, *, name: str = "mlcompute", any_batch: bool = True) -> None:
    """Write a graph as an ONNX model (operator set 18), checked by ONNX's checker; the old file stays until it is done.

    graph   an InferenceGraph or a graph made by `load`: the forward pass.
            A TrainingGraph: one training step, with `Gradient` and `Adam` or `Momentum` of ai.onnx.preview.training;
            other optimizers, clipping, L1 penalties and dropout have no such operator: CannotExportError
    any_batch   write the number of samples as the symbol `batch`, so that the model runs with any; where the graph does
            not allow it, or with False, the number is the graph's own. The model's metadata say which, and why

    >>> import mlcompute as mlc
    >>> mlc.onnx.save(inference_graph, "model.onnx")  # doctest: +SKIP
    """
    target = Path(path)
    if target.is_dir() or not target.parent.is_dir():
        raise DataError(f"onnx.save: '{target}' cannot be written", expected="a file name in a folder that exists")
    write_model(to_model(graph, name=name, any_batch=any_batch), target)


def to_model(graph: Any, *, name: str = "mlcompute", any_batch: bool = True) -> ModelProto:
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
        model = inference_model(graph, name, any_batch)
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

    def __init__(self, graph: DescribedGraph, description: Description, *, training: bool, batch: int = 0) -> None:
        """batch   samples to write it for; the graph's own number if not given."""
        self.graph, self.description = graph, description
        self.batch = batch or description.batch_size
        self.run = Lowering(training)
        self.run.weights_of = description.label_weights
        self.parts: list[_Part] = []
        #: Results of operators on weights only, by the use that gives them; and which uses can be written as they are.
        self._derived: dict[int, list[str]] = {}
        self._natives: dict[int, bool] = {}
        self.writer = Writer(OPSET)
        self._lower()
        self.outputs = self._named_outputs()
        self._name()

    # Lowering ---------------------------------------------------------------------------------------------------

    def _lower(self) -> None:
        run = self.run
        for tensor, rows in self.description.inputs.items():
            shape = tensor.descriptor.shape
            run.input(tensor, (rows * self.batch, *shape[1:]) if rows else shape)
        for tensor, array in self.description.constants.items():
            run.values[tensor] = run.trace.constant(array)
        for node in self.description.nodes:
            start = len(run.trace.steps)
            run.add(node.layer, [*node.sources, *node.labels], node.results, node.updates)
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
            if isinstance(operand, Derived):
                key = id(operand.use)
                if key not in self._natives:
                    self._natives[key] = self._is_native(operand.use)
                if not self._natives[key]:
                    return False
            if isinstance(operand, Known) and operand.array.dtype.name not in _PLAIN:
                return False
        return True

    # Names ----------------------------------------------------------------------------------------------------------

    def _named_outputs(self) -> dict[str, Tensor]:
        declared = {name: tensor for name, tensor in self.graph._declared.outputs.items() if tensor in self.run.values}
        if declared:
            return declared
        last = self.description.result
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
                after.append((outputs[index], self.run.values[tensor].shape, name))
        self._write_use(layer.use, outputs, layer.label)
        for inner, shape, name in after:
            writer.node("Reshape", [inner, writer.constant(np.array(shape, np.int64))], [name])

    def _write_use(self, use: Use, outputs: list[str], label: str) -> None:
        inputs = ["" if operand is None else self._operand(operand) for operand in use.operands]
        shape = use.operands[1] if use.row.name in ("Reshape", "Expand") and len(use.operands) > 1 else None
        if isinstance(shape, Known):
            inputs[1] = self.writer.constant(np.array(self._shape_now(use, shape.array.tolist()), np.int64))
        while inputs and not inputs[-1]:
            inputs.pop()
        attributes = {
            key: _stored(value, f"{label}/{key}") if isinstance(value, np.ndarray) else value
            for key, value in use.attributes.items()
            if not (isinstance(value, list) and not value)
        }
        self.writer.node(use.row.name, inputs, outputs, name=self.writer.unique(f"node {label}"), **attributes)

    def _shape_now(self, use: Use, shape: list[int]) -> list[int]:
        """A shape known at import, for the batch that is written: its first extent counts samples."""
        for source in use.sources():
            then, now = source.shape[:1], self.run.values[source.tensor].shape[:1]
            if then and then != now and shape and shape[0] > 0 and shape[0] % then[0] == 0:
                return [shape[0] // then[0] * now[0], *shape[1:]]
        return shape

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
            value = self.run.values[operand.tensor]
            return self._unfolded(writer.name(value), unfolded_shape(operand.shape, value.shape))
        assert isinstance(operand, Derived)
        key = id(operand.use)
        if key not in self._derived:  # written once, however many use it
            count = max(operand.use.output_count, operand.index + 1)
            self._derived[key] = [writer.unique("derived") for _ in range(count)]
            self._write_use(operand.use, self._derived[key], self._derived[key][0])
        return self._derived[key][operand.index]

    def _tensor_name(self, tensor: Tensor) -> str:
        return self.writer.name(self.run.value_of(tensor))

    def _unfolded(self, name: str, shape: tuple[int, ...]) -> str:
        if folded_shape(shape) == shape:
            return name
        return self.writer.value("Reshape", name, self.writer.constant(np.array(shape, np.int64)))

    def values(self) -> tuple[dict[str, Value], dict[str, Value]]:
        """What goes in and what comes out, by name."""
        inputs = {given: self.run.values[tensor] for given, tensor in self.inputs.items()}
        return inputs, {wish: self.run.values[tensor] for wish, tensor in self.outputs.items()}

    def model(self, name: str, symbols: Mapping[str, list[int | str]] | None = None) -> ModelProto:
        """The whole model, once it is written."""
        weights = {given: _host(tensor) for given, tensor in self.weights.items()}
        return assemble(self.writer, name, *self.values(), weights, symbols or {})


def inference_model(graph: DescribedGraph, name: str, any_batch: bool) -> ModelProto:
    """The forward pass, for any number of samples where that is possible."""
    description = without_losses(graph._describe())
    out = GraphWriter(graph, description, training=False)
    out.write()
    symbols: dict[str, list[int | str]] = {}
    told = "as asked"
    if any_batch:
        try:
            symbols = _opened_batch(graph, description, out)
        except StaticError as error:
            told = str(error)
    model = out.model(name, symbols)
    entry = model.metadata_props.add()
    entry.key, entry.value = "batch", "any" if symbols else f"{description.batch_size}: {told}"
    return model


def _opened_batch(graph: DescribedGraph, description: Description, out: GraphWriter) -> dict[str, list[int | str]]:
    """Make what was written serve any batch; the extents of inputs and outputs, with symbols."""
    size = description.batch_size
    if size > 1 and any(array.shape[:1] == (size,) for array in description.constants.values()):
        raise StaticError("a tensor of the graph has numbers for each sample")
    scaled = [(given, rows) for given, rows in zip(out.inputs, description.inputs.values(), strict=True) if rows]
    if not scaled:
        raise StaticError("no input has an axis of samples")
    try:
        other = GraphWriter(graph, description, training=False, batch=size + 1)
        other.write()
    except Error as error:
        raise StaticError(f"for another batch: {error.message}") from None
    sizes = Sizes(size, size + 1)
    symbols = {}
    for mine, others in zip(out.values(), other.values(), strict=True):
        symbols.update({given: sizes.extents(mine[given].shape, others[given].shape) for given in mine})
    out.writer.nodes = Rewriter(out.writer, other.writer, sizes, scaled[0]).rewritten()
    return symbols


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
    writer: Writer,
    name: str,
    inputs: Mapping[str, Value],
    outputs: Mapping[str, Value],
    weights: Mapping[str, Any],
    symbols: Mapping[str, list[int | str]] | None = None,
) -> ModelProto:
    """Nodes, stored tensors and the declarations of what goes in and out; nodes nobody needs are left out.

    symbols   extents of those of them that are not fixed
    """
    from onnx import helper, numpy_helper

    nodes = _needed(writer.nodes, set(outputs))
    used = {given for node in nodes for given in node.input}
    stored = {**weights, **writer.stored}
    initializers = [
        numpy_helper.from_array(np.ascontiguousarray(array).reshape(np.shape(array)), given)
        for given, array in stored.items()
        if given in used
    ]

    def declared(given: str, value: Value) -> Any:
        return helper.make_tensor_value_info(given, element_type(value.dtype), (symbols or {}).get(given, value.shape))

    graph = helper.make_graph(
        nodes, name, [declared(*one) for one in inputs.items()], [declared(*one) for one in outputs.items()],
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
