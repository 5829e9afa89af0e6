"""From a model to a graph: every node becomes a constant, a layer, or a part of the layers that use it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.errors import DataError, Error, ShapeError
from mlcompute.onnx import control
from mlcompute.onnx.attributes import attribute_value
from mlcompute.onnx.budget import ExhaustedError, model_budget
from mlcompute.onnx.files import ModelFile, read_model, tensor_array
from mlcompute.onnx.functions import body_of, has_body, inline
from mlcompute.onnx.imported import ImportedGraph
from mlcompute.onnx.inputs import GivenInputs
from mlcompute.onnx.layer import OperatorLayer
from mlcompute.onnx.layers import layer_for
from mlcompute.onnx.names import Names, Place, operator_sets
from mlcompute.onnx.operands import Derived, Failed, Known, Listed, Operand, Source, Use, Weight, folded, sketch
from mlcompute.onnx.operators.reductions import MASKED
from mlcompute.onnx.problems import ModelError, Problem, failure
from mlcompute.onnx.rows import BY_DESIGN, ROWS, NeedsValueError, NotImportedError, load_rows
from mlcompute.onnx.types import INEXACT, UnknownTypeError, carried, descriptor_of, folded_shape, is_carried, numpy_type
from mlcompute.onnx.uniform import UniformTensor
from mlcompute.ops.op import Array, Shape
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto


class _AgainError(Exception):
    """More inputs are constants than was known when the import began."""

    def __init__(self, fixed: frozenset[str]) -> None:
        super().__init__()
        self.fixed = fixed


class Importer:
    """One import. `problems` grows; the graph is used only when it stays empty."""

    def __init__(
        self,
        file: ModelFile,
        *,
        batch: int | None,
        dimensions: Mapping[str, int],
        shapes: Mapping[str, Sequence[int]],
        constants: Mapping[str, Any],
        memory_limit: int | None,
        node_limit: int | None,
        fixed: frozenset[str] = frozenset(),
    ) -> None:
        load_rows()
        self.file, self.model = file, file.proto
        model = file.proto
        self.given = GivenInputs(batch, dimensions, shapes, constants)
        self.budget = model_budget(model, memory_limit, node_limit)
        #: Inputs known to be needed as constants, from an earlier attempt.
        self.preset = fixed
        self.graph = ImportedGraph()
        self.problems: list[Problem] = []
        self.names = Names()
        #: Nodes that became layers or parts of them, in order: (use, names of operands, names of results).
        self.history: list[tuple[Use, Sequence[str], Sequence[str]]] = []
        self.functions = {(f.domain, f.name, getattr(f, "overload", "")): f for f in model.functions}
        #: Tensors stored in a graph are read once, however often a loop runs over them.
        self.read: dict[int, tuple[GraphProto, dict[str, Operand]]] = {}
        self.lifted: dict[int, Weight] = {}
        #: Inputs that are constants from the start; and, by tensor, the inputs a computed value comes from.
        self.stored_inputs: set[str] = set()
        self.origins: dict[Tensor, frozenset[str]] = {}

    # The model ------------------------------------------------------------------------------------------------

    def run(self) -> ImportedGraph:
        graph = self.model.graph
        place = Place(operator_sets(self.model) or {"": 1})
        self._initializers(graph, self.names, outermost=True)
        for info in graph.input:
            if info.name not in self.names.operands:
                self._input(info)
        self.nodes(graph.node, self.names, place)
        for info in graph.output:
            self._output(info.name, place)
        if self.graph.fixed.keys() - self.preset - self.stored_inputs:
            # An input turned out to be needed as a constant: what was imported before that took it as computed.
            raise _AgainError(self.preset | self.graph.fixed.keys())
        if self.problems:
            raise failure(self.problems)
        self.graph.order = [info.name for info in graph.output]
        self._name_weights()
        return self.graph

    def _initializers(self, graph: GraphProto, names: Names, outermost: bool = False) -> None:
        if id(graph) not in self.read:
            found: dict[str, Operand] = {}
            for number, tensor in enumerate(graph.initializer):
                raw = self.file.raw(number) if outermost else None
                found[tensor.name] = self.stored(tensor, tensor.name, raw)
            for sparse in graph.sparse_initializer:
                found[sparse.values.name] = Failed("sparse tensors are not imported")
            self.read[id(graph)] = graph, found
        names.operands.update(self.read[id(graph)][1])

    def stored(self, tensor: Any, name: str, raw: Any = None) -> Operand:
        """A tensor of the file: a weight when it is floating and has axes, else a constant."""
        try:
            array = self.array(tensor, raw)
        except DataError as error:
            if tensor.data_type == 8:  # strings: an operand nobody may use
                return Failed(error.message)
            self.problems.append(Problem("initializer", name, error.message))
            return Failed()
        if array.ndim and array.size and is_carried(array.dtype) and carried(array.dtype).kind == "f":
            return self.weight(array, name)
        return Known(array, name)

    def array(self, tensor: TensorProto, raw: Any = None) -> Array:
        """The numbers of a tensor of the file."""
        limit = None if self.budget.grows else self.budget.bytes
        return self.budget.stored(tensor_array(tensor, self.file.folder, limit, raw))

    def weight(self, array: Array, name: str) -> Weight:
        to = carried(array.dtype)
        if array.dtype != to:
            self.note(INEXACT.get(array.dtype.name, ""), name)
            with np.errstate(all="ignore"):
                array = (
                    array.astype(to) if any(array.strides) else np.broadcast_to(array.flat[0].astype(to), array.shape)
                )
        if not any(array.strides):  # one number, repeated
            if not self.budget.grows:
                self.budget.check(array.nbytes)
                self.budget.bytes -= array.nbytes
            tensor: Tensor = UniformTensor(descriptor_of(array.shape, to), array.reshape(-1)[0].item())
        else:
            data = np.ascontiguousarray(array).reshape(folded_shape(array.shape))
            tensor = Tensor(descriptor_of(array.shape, to), data=data)
        tensor.label = name
        return Weight(tensor, array.shape, name)

    def note(self, text: str, name: str) -> None:
        if text and text not in self.graph.notes:
            self.graph.notes.append(text)

    # Inputs -----------------------------------------------------------------------------------------------------

    def _input(self, info: ValueInfoProto) -> None:
        name = info.name
        kind = info.type.WhichOneof("value")
        if kind != "tensor_type":
            what = {"sequence_type": "a sequence", "optional_type": "an optional value", "map_type": "a map"}
            self.names.operands[name] = Failed(f"input '{name}' is {what.get(kind or '', 'no tensor')}")
            return
        try:
            dtype = numpy_type(info.type.tensor_type.elem_type)
            shape = self.given.shape_of(info)
        except Error as error:
            if info.type.tensor_type.elem_type == 8 or isinstance(error, DataError):
                self.names.operands[name] = Failed(f"input '{name}': {error.message}")
            else:
                self.problems.append(Problem("input", name, error.message))
                self.names.operands[name] = Failed()
            return
        self.graph.shapes[name], self.graph.types[name] = shape, dtype
        if 0 in shape:
            self.names.operands[name] = Known(np.empty(shape, dtype), name)
            return
        if name in self.preset or (name in self.given.constants and not is_carried(dtype)):
            self.graph.fixed[name] = self.given.constant(name, shape, dtype)
            self.stored_inputs.add(name)
            self.names.operands[name] = Known(self.graph.fixed[name], name)
            return
        if not is_carried(dtype):
            self.names.operands[name] = Failed(f"input '{name}': {dtype.name} cannot be computed with")
            return
        self.note(INEXACT.get(dtype.name, ""), name)
        tensor = Tensor(descriptor_of(shape, dtype))
        tensor.label = name
        self.graph.inputs[name] = tensor
        self.origins[tensor] = frozenset({name})
        self.names.operands[name] = Source(tensor, shape, carried(dtype), name)

    def fixed(self, source: Source) -> Array | None:
        """The numbers of an input the caller gave, now that some shape depends on them."""
        if self.graph.inputs.get(source.name) is not source.tensor:
            # Computed: known when all inputs it comes from are. They are folded in the next attempt.
            origins = self.origins.get(source.tensor, frozenset())
            if origins and origins <= self.given.constants.keys():
                for name in origins:
                    self.graph.fixed[name] = self.given.constant(name, self.graph.shapes[name], self.graph.types[name])
            return None
        if source.name not in self.given.constants:
            return None
        array = self.given.constant(source.name, source.shape, self.graph.types[source.name])
        self.graph.fixed[source.name] = array
        return array

    # Nodes --------------------------------------------------------------------------------------------------------

    def nodes(self, nodes: Sequence[NodeProto], names: Names, place: Place) -> None:
        for node in nodes:
            if place.depth:  # the others are in the file
                self.budget.spend_nodes(1)
            self._node(node, names, place)

    def _node(self, node: NodeProto, names: Names, place: Place) -> None:
        domain = "" if node.domain == "ai.onnx" else node.domain
        title = f"{domain}.{node.op_type}" if domain else node.op_type
        label = place.prefix + (node.name or next(iter(filter(None, node.output)), node.op_type))
        try:
            answers = self._answers(node, domain, names, place, label)
        except (ModelError, RecursionError):
            raise
        except NeedsValueError as error:
            self._fail(node, names, Problem(title, label, error.message, True, error.operand))
        except (NotImportedError, UnknownTypeError) as error:
            self._fail(node, names, Problem(title, label, error.message, True))
        except Error as error:
            self._fail(node, names, Problem(title, label, error.message))
            if isinstance(error, ExhaustedError):
                raise failure(self.problems) from None
        except MemoryError:
            self._fail(node, names, Problem(title, label, "takes more memory than there is"))
        except Exception as error:  # what a malformed model can cause is anybody's guess
            reason = f"has no meaning as it stands ({type(error).__name__}: {error})"
            self._fail(node, names, Problem(title, label, reason))
        else:
            if answers is not None:
                names.operands.update({name: a for name, a in zip(node.output, answers, strict=False) if name})

    def _fail(self, node: NodeProto, names: Names, problem: Problem) -> None:
        self.problems.append(problem)
        names.operands.update({name: Failed() for name in node.output if name})

    def _answers(
        self, node: NodeProto, domain: str, names: Names, place: Place, label: str
    ) -> Sequence[Operand] | None:
        operands: list[Operand | None] = []
        failed = False
        for name in node.input:
            operand = names.find(name) if name else None
            if name and operand is None:
                raise ShapeError(f"its operand '{name}' is not defined")
            if isinstance(operand, Failed):
                if operand.reason:
                    raise NotImportedError(operand.reason)
                failed = True
            operands.append(operand)
        key = (domain, node.op_type)
        local = self.functions.get((node.domain, node.op_type, getattr(node, "overload", "")))
        handler = control.HANDLERS.get(key) if local is None else None
        if failed:
            if local is None and handler is None and key not in ROWS and not self._defined(node, domain, place):
                raise self._unknown(domain, node.op_type)
            return [Failed() for _ in node.output]
        if handler is not None:
            return handler(self, node, operands, names, place, label)
        if local is not None:
            below = Place(operator_sets(local), {}, f"{label}/", place.depth + 1)
            return inline(self, local, node, operands, below, place)
        row = ROWS.get(key)
        if row is None:
            body = body_of(node, domain, operands, place)
            if body is None:
                raise self._unknown(domain, node.op_type)
            attends = place.attends or node.op_type.endswith("Attention")
            below = Place(body[1], {}, f"{label}/", place.depth + 1, attends)
            return inline(self, body[0], node, operands, below, place, body[2])
        attributes = self.attributes(node, place)
        version = place.versions.get(domain, place.versions.get("", 1) if not domain else 1)
        if place.attends and node.op_type == "Softmax":
            attributes[MASKED] = 1
        use = Use(row, version, attributes, operands, list(node.input), len(node.output))
        return self.apply(use, label, list(node.output))

    def _defined(self, node: NodeProto, domain: str, place: Place) -> bool:
        return has_body(node.op_type, domain, place.versions.get(domain, 1))

    def _unknown(self, domain: str, name: str) -> NotImportedError:
        reason = BY_DESIGN.get((domain, name))
        return NotImportedError(reason or "there is no such operator in the operator table")

    # One operator -------------------------------------------------------------------------------------------------

    def apply(self, use: Use, label: str, outputs: Sequence[str]) -> list[Operand]:
        """The results of one operator: folded, aliased, derived from weights, or computed by a new layer."""
        for index, operand in enumerate(use.operands):
            if isinstance(operand, Listed):
                raise NotImportedError("sequences are taken apart at import only")
            if index in use.row.weights and isinstance(operand, Known) and use.has_source():
                use.operands[index] = self.lift(operand)  # type: ignore[index]
        if use.is_known():
            return self._all_folded(use, outputs)
        answers, same = sketch(use, self.fixed, self.budget)
        results: list[Operand] = []
        computed: list[tuple[int, Shape, np.dtype[Any]]] = []
        for index, answer in enumerate(answers):
            if isinstance(answer, np.ndarray):
                results.append(self._folded(answer, outputs[index] if index < len(outputs) else ""))
            elif answer is None:
                results.append(Failed(f"{use.row.name} does not give result {index} here"))
            elif id(answer) in same:
                results.append(same[id(answer)])
            elif 0 in answer.shape:
                results.append(Known(np.empty(answer.shape, answer.dtype)))
            else:
                if index >= len(outputs) or outputs[index] or index == 0:
                    computed.append((index, answer.shape, answer.dtype))
                results.append(Failed("the result was not asked for"))
        if not computed:
            return results
        if not use.has_source():
            if all(dtype.kind != "f" for _, _, dtype in computed):
                return self._all_folded(use, outputs)
            for index, shape, dtype in computed:
                results[index] = Derived(use, index, shape, dtype)
            self.history.append((use, use.names, outputs))
            return results
        tensors = self._add(use, computed, label)
        origins = frozenset().union(*(self.origins.get(source.tensor, frozenset()) for source in use.sources()))
        self.origins.update(dict.fromkeys(tensors, origins))
        for (index, shape, dtype), tensor in zip(computed, tensors, strict=True):
            name = outputs[index] if index < len(outputs) else ""
            results[index] = Source(tensor, shape, dtype, name)
        self.history.append((use, use.names, outputs))
        return results

    def _all_folded(self, use: Use, outputs: Sequence[str]) -> list[Operand]:
        arrays = folded(use, self.budget)
        names = [*outputs, *[""] * len(arrays)]
        return [self._folded(array, name) for array, name in zip(arrays, names, strict=False)]

    def _folded(self, array: Array | None, name: str) -> Operand:
        if array is None:
            return Failed("the result is not given")
        return Known(self.budget.hold(np.asarray(array)), name)

    def lift(self, known: Known) -> Operand:
        """A constant used where a weight is expected becomes one."""
        array = known.array
        if array.ndim == 0 or array.size < 2 or not is_carried(array.dtype) or carried(array.dtype).kind != "f":
            return known
        if id(known) not in self.lifted:
            self.lifted[id(known)] = self.weight(array, known.name or f"constant{len(self.lifted)}")
        return self.lifted[id(known)]

    def _add(self, use: Use, computed: list[tuple[int, Shape, np.dtype[Any]]], label: str) -> list[Tensor]:
        for _, shape, _ in computed:
            if math.prod(shape) > 2**40:
                raise ShapeError(f"a result of shape {shape}")
        layer = layer_for(use, computed)
        if layer is not None:
            layer.label = label
            return self.graph._add(layer, [source.tensor for source in use.sources()], [], True)
        operator_layer = OperatorLayer(use, computed, label)
        return self.graph._add(operator_layer, [source.tensor for source in operator_layer.sources], [], True)

    def attributes(self, node: NodeProto, place: Place) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for attribute in node.attribute:
            actual = attribute
            if attribute.ref_attr_name:
                referred = place.attributes.get(attribute.ref_attr_name)
                if referred is None:
                    continue
                actual = referred
            found[attribute.name] = attribute_value(actual, self.array)
        return found

    # Outputs --------------------------------------------------------------------------------------------------------

    def _output(self, name: str, place: Place) -> None:
        operand = self.names.find(name)
        if isinstance(operand, Failed):
            if operand.reason:
                self.problems.append(Problem("output", name, operand.reason, True))
            return
        if operand is None:
            self.problems.append(Problem("output", name, "is computed by no node"))
            return
        if isinstance(operand, Listed):
            self.problems.append(Problem("output", name, "is a sequence", True))
            return
        array = operand.array if isinstance(operand, Known) else None
        if array is not None:
            self.graph.known[name] = array
            self.graph.shapes[name], self.graph.types[name] = array.shape, array.dtype
            return
        if isinstance(operand, (Weight, Derived)):
            found = operand.array if isinstance(operand, Weight) else folded(operand.use, self.budget)[operand.index]
            assert found is not None
            self.graph.known[name] = found
            self.graph.shapes[name], self.graph.types[name] = found.shape, found.dtype
            return
        if not isinstance(operand, Source):
            return
        if operand.tensor in self.graph.inputs.values() or operand.tensor in self.graph.outputs.values():
            use = Use(ROWS["", "Identity"], 13, {}, [operand], [operand.name], 1)
            (tensor,) = self._add(use, [(0, operand.shape, operand.dtype)], name)
            operand = Source(tensor, operand.shape, operand.dtype, name)
        self.graph.outputs[name] = operand.tensor
        self.graph.shapes[name] = operand.shape
        declared = next((info for info in self.model.graph.output if info.name == name), None)
        self.graph.types[name] = operand.dtype
        if declared is not None and declared.type.tensor_type.elem_type:
            with contextlib.suppress(DataError):
                self.graph.types[name] = numpy_type(declared.type.tensor_type.elem_type)

    def _name_weights(self) -> None:
        trained: dict[str, Tensor] = {}
        read: dict[str, Tensor] = {}
        for node in self.graph._all_nodes():
            trained.update({slot.tensor.label: slot.tensor for slot in node.layer.parameters.values()})
            read.update({tensor.label: tensor for tensor in node.layer.statistics.values()})
        self.graph.weights = trained
        self.graph.statistics = {name: tensor for name, tensor in read.items() if name not in trained}


def load(
    model: Any,
    *,
    batch: int | None = None,
    dimensions: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    constants: Mapping[str, Any] | None = None,
    memory_limit: int | None = None,
    node_limit: int | None = None,
) -> ImportedGraph:
    """A model as a graph whose weights can be trained.

    model         a path, the bytes of a file, or an onnx.ModelProto
    batch         the first extent of inputs that leave it open; with it, every extent of the same name
    dimensions    other open extents by their name in the model; `shapes`: whole shapes by the input's name
    constants     numbers of inputs that shapes depend on; they are taken only where an operator needs them
    memory_limit  bytes all constants and weights together may take; by default what the file holds, 8 more for each of
                  its numbers, and 32 MiB: a small file cannot make a large import
    node_limit    nodes loops and functions may unfold into; by default 4000, and 8 for each node of the model

    Weights are the model's floating initializers that have axes, and constants used where an operator has weights.
    What cannot be imported is listed in one ModelError, all of it; then nothing has been imported.

    >>> import mlcompute as mlc
    >>> graph = mlc.onnx.load("model.onnx", batch=32)  # doctest: +SKIP
    >>> training = mlc.TrainingGraph([graph], loss, optimizer)  # doctest: +SKIP
    >>> training.add_inputs(graph.inputs, {"labels": labels})  # doctest: +SKIP
    """
    file = read_model(model)
    fixed: frozenset[str] = frozenset()
    while True:
        importer = Importer(
            file, batch=batch, dimensions=dimensions or {}, shapes=shapes or {}, constants=constants or {},
            memory_limit=memory_limit, node_limit=node_limit, fixed=fixed,
        )  # fmt: skip
        try:
            return importer.run()
        except _AgainError as again:
            fixed = again.fixed
        except Error:
            raise
        except Exception as error:
            # A damaged file can be wrong in ways nobody thought of; the caller gets one kind of error for all of them.
            raise ModelError(
                "onnx.load: the model has no meaning as it stands", reason=f"{type(error).__name__}: {error}"
            ) from error
