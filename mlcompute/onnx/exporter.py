"""From a graph to a model: operators that came from ONNX go back as they were, every other layer as the ops it is."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.compiler import Request
from mlcompute.compiler.lower import Lowering
from mlcompute.errors import DataError, GraphError
from mlcompute.graph import Node
from mlcompute.inference import InferenceGraph
from mlcompute.layers.layer import Layer
from mlcompute.layers.names import has_default_label, layer_names
from mlcompute.layers.normalization import BatchNormalizationLayer
from mlcompute.layers.parameter import ParameterLayer
from mlcompute.onnx.imported import ImportedGraph
from mlcompute.onnx.layer import OperatorLayer, array_now
from mlcompute.onnx.layer_writing import write_layer
from mlcompute.onnx.model_writer import Border, CannotExportError, Writer, assemble, needed
from mlcompute.onnx.native_operators import OPSET, is_native
from mlcompute.onnx.operands import Derived, Known, Operand, Source, Use, Weight
from mlcompute.onnx.storing import Model, tensor_message
from mlcompute.onnx.types import INEXACT, carried, element_type, folded_shape, unfolded_shape
from mlcompute.onnx.writing import write_step
from mlcompute.ops.op import Shape, Step
from mlcompute.runtime.compiled_graph import without_losses
from mlcompute.runtime.definition import definition_of
from mlcompute.runtime.session import Session, session_of
from mlcompute.runtime.sizes import Sizes as InputSizes
from mlcompute.runtime.sizes import described
from mlcompute.runtime.tensor_state import current_values, state_of
from mlcompute.tensor import Tensor
from mlcompute.training import TrainingGraph

if TYPE_CHECKING:
    from onnx import ModelProto

#: What the model's metadata say about its initializers: they are the weights, and nothing else is.
STATED = "weights"


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
            not allow it, or with False, the number is the graph's own. The model's metadata say which, and why. Axes of
            inputs that vary become symbols too, named after input and axis (`words_1`), where the graph allows it

    >>> import mlcompute as mlc
    >>> mlc.onnx.save(inference_graph, "model.onnx")  # doctest: +SKIP
    """
    if not isinstance(path, (str, os.PathLike)):
        advice = "; write mlc.onnx.save(graph, path)" if isinstance(graph, (str, os.PathLike)) else ""
        raise TypeError(f"onnx.save: path must be the name of a file, not {type(path).__name__}{advice}")
    target = Path(path)
    if target.is_dir() or not target.parent.is_dir():
        raise DataError(f"onnx.save: '{target}' cannot be written", expected="a file name in a folder that exists")
    _model(graph, name, any_batch).save(target)


def to_model(graph: Any, *, name: str = "mlcompute", any_batch: bool = True) -> ModelProto:
    """The graph as an ONNX model, checked by ONNX's own checker."""
    return _model(graph, name, any_batch).message()


def _model(graph: Any, name: str, any_batch: bool) -> Model:
    if isinstance(graph, ImportedGraph):
        wrapped = InferenceGraph([graph])
        wrapped.add_inputs(graph.inputs)
        wrapped.add_outputs(graph.outputs)
        graph = wrapped
    if isinstance(graph, TrainingGraph):
        from mlcompute.onnx.training import training_model

        model = training_model(graph, name)
    elif isinstance(graph, InferenceGraph):
        model = inference_model(graph, name, any_batch)
    else:
        raise GraphError(
            f"onnx.save: cannot write a {type(graph).__name__}",
            expected="an InferenceGraph, a TrainingGraph or a graph made by onnx.load",
            fix="trainer.inference is that of a Trainer, mlc.InferenceGraph([graph]) that of a Graph",
        )
    model.check(full=not isinstance(graph, TrainingGraph))
    return model


class GraphWriter:
    """Lowers a graph and writes it, layer by layer."""

    def __init__(
        self,
        graph: TrainingGraph | InferenceGraph,
        request: Request,
        *,
        training: bool,
        batch: int = 0,
        sizes: InputSizes = (),
    ) -> None:
        """batch   samples to write it for; the graph's own number if not given
        sizes   inputs with other extents than their own
        """
        if sizes:
            request = dataclasses.replace(request, described=described(request, sizes))
        self.declared, self.request = definition_of(graph).declared, request
        self.batch = batch or request.batch_size
        self.run = Lowering(training)
        self.run.weights_of, self.run.shape_with_full_batch = request.label_weights, request.shape_of
        self.parts: list[_Part] = []
        #: Results of operators on weights only, by the use that gives them; and which uses can be written as they are.
        self._derived: dict[int, list[str]] = {}
        self._natives: dict[int, bool] = {}
        self.writer = Writer(OPSET)
        self._layer_names = layer_names(node.layer for node in request.nodes)
        #: What the model says otherwise than the graph.
        self.notes: list[str] = []
        #: (type in the model, type that is computed in) -> inputs and outputs.
        self._inexact: dict[tuple[str, str], list[str]] = {}
        self._borders = _borders(graph)
        #: Weights and statistics that are stored with another shape than their tensor's.
        self._shapes = {} if training else _stored_shapes(request)
        self._lower()
        self.outputs = self._named_outputs()
        self._name()

    # Lowering ---------------------------------------------------------------------------------------------------

    def _lower(self) -> None:
        run = self.run
        for tensor, rows in self.request.inputs.items():
            shape = self.request.shape_of(tensor)
            run.input(tensor, (rows * self.batch, *shape[1:]) if rows else shape)
        for tensor, array in self.request.constants.items():
            run.values[tensor] = run.trace.constant(array)
        for node in self.request.nodes:
            start = len(run.trace.steps)
            run.add(node.layer, [*node.sources, *node.labels], node.results, node.updates)
            layer = node.layer
            native = isinstance(layer, OperatorLayer) and not run.training and is_native(layer.use, self._natives)
            # A graph that was applied again has operators that read other tensors than the model said.
            if isinstance(layer, OperatorLayer):
                native = native and [source.tensor for source in layer.sources] == node.sources
            self.parts.append(_Part(node, run.trace.steps[start:], native))
        if run.random_keys:
            raise CannotExportError(
                "onnx.save: the graph draws random numbers, which ONNX has no operator for that repeats them",
                fix="export an InferenceGraph, in which dropout is off; make random numbers an input of the graph",
            )

    # Names ----------------------------------------------------------------------------------------------------------

    def _named_outputs(self) -> dict[str, Tensor]:
        declared = {name: tensor for name, tensor in self.declared.outputs.items() if tensor in self.run.values}
        if declared:
            return declared
        last = self.request.result
        if last is None:
            raise GraphError("onnx.save: the graph has no layers")
        return {"output": last}

    def _name(self) -> None:
        writer, values = self.writer, self.run.values
        self.inputs: dict[str, Tensor] = {}
        for tensor in self.request.inputs:
            name = writer.unique(self.declared.name_of(tensor))
            self.inputs[name] = tensor
            writer.names[values[tensor]] = self._carried_input(name, tensor)
        produced = {value for part in self.parts for step in part.steps for value in step.results}
        #: Outputs that are another's value, an input or a constant, or are carried in another shape or type: copied.
        self.copies: list[tuple[Tensor, str]] = []
        for wish, tensor in self.outputs.items():
            name = writer.unique(wish)
            value = values[tensor]
            if value in writer.names or value not in produced or self._is_carried(tensor):
                self.copies.append((tensor, name))
            else:
                writer.names[value] = name
        self.weights: dict[str, Tensor] = {}
        for tensor in self.run.persistent:
            self._name_weight(tensor)

    def _name_weight(self, tensor: Tensor) -> None:
        value, writer = self.run.value_of(tensor), self.writer
        # Models keep the names they came with; other weights are called as in checkpoints.
        name = writer.unique(value.label if has_default_label(tensor) else tensor.label)
        self.weights[name] = tensor
        if self._shapes.get(tensor, value.shape) != value.shape:
            name = writer.value("Reshape", name, self._ints(value.shape))
        writer.names[value] = name

    # What the model has at its border ------------------------------------------------------------------------------

    def _is_carried(self, tensor: Tensor) -> bool:
        """Does the model have another shape or type at its border than the tensor?"""
        shape, dtype = self.border(tensor)
        value = self.run.values[tensor]
        return (shape, dtype) != (value.shape, value.dtype)

    def border(self, tensor: Tensor) -> tuple[Shape, np.dtype[Any]]:
        """Shape and type of an input or output of the model."""
        value = self.run.values[tensor]
        if tensor not in self._borders:
            return value.shape, value.dtype
        shape, dtype = self._borders[tensor]
        return unfolded_shape(shape, value.shape), dtype

    def _carried_input(self, name: str, tensor: Tensor) -> str:
        """The name of an input as the tensor carries it."""
        value = self.run.values[tensor]
        (shape, dtype), writer = self.border(tensor), self.writer
        if dtype != value.dtype:
            self._say_type(name, dtype, value.dtype)
            name = writer.value("Cast", name, to=element_type(value.dtype))
        return name if shape == value.shape else writer.value("Reshape", name, self._ints(value.shape))

    def _write_copy(self, tensor: Tensor, name: str) -> None:
        """An output from the value of its tensor."""
        value = self.run.values[tensor]
        (shape, dtype), writer = self.border(tensor), self.writer
        inner = writer.name(value)
        if shape != value.shape:
            inner = writer.value("Reshape", inner, self._ints(shape))
        if dtype != value.dtype:
            self._say_type(name, dtype, value.dtype)
            writer.node("Cast", [inner], [name], to=element_type(dtype))
        else:
            writer.node("Identity", [inner], [name])

    def _ints(self, numbers: Shape) -> str:
        return self.writer.constant(np.array(numbers, np.int64).reshape(-1))

    def _say_type(self, name: str, dtype: np.dtype[Any], computed: np.dtype[Any]) -> None:
        if dtype.name in INEXACT and name not in self._inexact.setdefault((dtype.name, computed.name), []):
            self._inexact[dtype.name, computed.name].append(name)

    def all_notes(self) -> list[str]:
        """What the model says otherwise than the graph, or computes otherwise than its types say."""
        typed = [
            f"{', '.join(map(repr, names))}: {dtype} in the model, which computes in {computed}"
            for (dtype, computed), names in self._inexact.items()
        ]
        return [*dict.fromkeys(self.notes), *typed]

    def note(self, layer: Layer, why: str) -> None:
        """Something about a layer that the model cannot say."""
        self.notes.append(f"{layer.who} {why}: the model does what inference does, also where it is trained further")

    # Writing --------------------------------------------------------------------------------------------------------

    def write(self) -> Writer:
        for part in self.parts:
            if isinstance(part.node.layer, ParameterLayer) and part.node.results[0] not in self.outputs.values():
                continue  # whoever reads it reads the weight itself
            if part.native:
                self._write_operator(part)
            elif self.run.training or not write_layer(self, part.node):
                for step in part.steps:
                    try:
                        write_step(self.writer, step)
                    except CannotExportError as error:
                        raise CannotExportError(f"onnx.save: {part.node.layer.who}: {error.message}") from None
        for tensor, name in self.copies:
            self._write_copy(tensor, name)
        return self.writer

    def write_node(self, kind: str, node: Node, *more: str, **attributes: Any) -> None:
        """A layer with one source and one result as one operator; `more`: its operands after the source."""
        source, result = (self.writer.name(self.run.values[tensor]) for tensor in (node.sources[0], node.results[0]))
        name = self.writer.unique(f"node {self._layer_names[node.layer]}")
        self.writer.node(kind, [source, *more], [result], name=name, **attributes)

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
            now = array_now(shape, self.run).tolist()
            now = now if shape.made is not None else self._shape_now(use, now)
            inputs[1] = self.writer.constant(np.array(now, np.int64))
        while inputs and not inputs[-1]:
            inputs.pop()
        attributes = {
            key: tensor_message(value, f"{label}/{key}") if isinstance(value, np.ndarray) else value
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
            array = array_now(operand, self.run)
            to = carried(array.dtype)
            return writer.constant(array if array.dtype == to else array.astype(to))
        if isinstance(operand, Weight):
            return self.weight_name(operand.tensor, operand.shape)
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

    def tensor_name(self, tensor: Tensor) -> str:
        """The name of a tensor that is kept between runs, also of one whose numbers were only needed for shapes."""
        if tensor not in self.run.values:
            self._name_weight(tensor)
        return self.writer.name(self.run.value_of(tensor))

    def weight_name(self, tensor: Tensor, shape: Shape) -> str:
        """The name of a tensor that is kept between runs, with a shape."""
        name = self.tensor_name(tensor)
        if self._shapes.get(tensor) == shape:
            return next(given for given, one in self.weights.items() if one is tensor)
        if tensor.descriptor.shape == shape:
            return name
        return self.writer.value("Reshape", name, self._ints(shape))

    def _unfolded(self, name: str, shape: tuple[int, ...]) -> str:
        if folded_shape(shape) == shape:
            return name
        return self.writer.value("Reshape", name, self.writer.constant(np.array(shape, np.int64)))

    def borders(self) -> tuple[dict[str, Border], dict[str, Border]]:
        """Shapes and types of what goes in and what comes out, by name."""
        inputs = {given: self.border(tensor) for given, tensor in self.inputs.items()}
        return inputs, {wish: self.border(tensor) for wish, tensor in self.outputs.items()}

    def model(self, name: str, symbols: Mapping[str, list[int | str]] | None = None) -> Model:
        """The whole model, once it is written."""
        weights, trained = {}, self._trained()
        self.writer.nodes = needed(self.writer.nodes, set(self.outputs))
        for given, tensor in self.weights.items():
            array = host_values(tensor).reshape(self._shapes.get(tensor, tensor.descriptor.shape))
            if tensor in trained or self._is_statistic(given):
                weights[given] = array
            else:  # nothing trains it: a constant
                self.writer.stored[given] = array
        return assemble(self.writer, name, *self.borders(), weights, symbols or {})

    def _trained(self) -> set[Tensor]:
        """The tensors an optimizer may change."""
        slots = [slot for node in self.request.nodes if node.updates for slot in node.layer.parameters.values()]
        for tensor in self.run.persistent:
            for resident in state_of(tensor).residents:
                learning = resident.definition.learning if isinstance(resident, Session) else None
                if learning is not None:
                    slots += [slot for slot in learning.training_parameters if slot.tensor is tensor]
        return {slot.tensor for slot in slots if slot.is_updatable}

    def _is_statistic(self, name: str) -> bool:
        """Does nothing but batch normalizations read it, as their running statistics?"""
        readers = [(node, k) for node in self.writer.nodes for k, given in enumerate(node.input) if given == name]
        return bool(readers) and all(node.op_type == "BatchNormalization" and k > 2 for node, k in readers)


def inference_model(graph: TrainingGraph | InferenceGraph, name: str, any_batch: bool) -> Model:
    """The forward pass, for any number of samples and any size along axes that vary, where that is possible."""
    from mlcompute.onnx.opened import opened

    request = without_losses(session_of(graph).request())
    out, symbols, told = opened(graph, request, any_batch)
    model = out.model(name, symbols)
    notes = out.all_notes()
    facts = {name: reason or "any" for name, reason in told.items()} | {STATED: "initializers"}
    if notes:
        facts["notes"] = "; ".join(notes)
    for key, value in facts.items():
        entry = model.proto.metadata_props.add()
        entry.key, entry.value = key, value
    for note in notes:
        warnings.warn(f"onnx.save: {note}", UserWarning, stacklevel=4)
    return model


def _borders(graph: TrainingGraph | InferenceGraph) -> dict[Tensor, Border]:
    """Shapes and types that inputs and outputs have in the models a graph was imported from."""
    found: dict[Tensor, Border] = {}
    for part in definition_of(graph).graphs:
        if isinstance(part, ImportedGraph):
            for name, tensor in {**part.inputs, **part.outputs}.items():
                found[tensor] = part.shapes[name], part.types[name]
    return found


def _stored_shapes(request: Request) -> dict[Tensor, Shape]:
    """Shapes of weights of five axes and more, which tensors carry folded into four, and of running statistics."""
    found: dict[Tensor, Shape] = {}
    for node in request.nodes:
        if isinstance(node.layer, BatchNormalizationLayer):
            shape = (node.layer.feature_channel_count,)
            found.update(dict.fromkeys((node.layer.mean, node.layer.variance), shape))
    seen: set[int] = set()
    uses = [node.layer.use for node in request.nodes if isinstance(node.layer, OperatorLayer)]
    while uses:
        use = uses.pop()
        for operand in use.operands:
            if isinstance(operand, Weight) and folded_shape(operand.shape) != operand.shape:
                found.setdefault(operand.tensor, operand.shape)
            elif isinstance(operand, Derived) and id(operand.use) not in seen:
                seen.add(id(operand.use))
                uses.append(operand.use)
    return found


def host_values(tensor: Tensor) -> Any:
    """The numbers of a tensor that is kept between runs."""
    data = current_values(tensor)  # large, and written out at once
    assert data is not None
    return data
