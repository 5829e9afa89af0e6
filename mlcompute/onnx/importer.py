"""From a model to a graph: every node becomes a constant, a layer, or a part of the layers that use it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.errors import CompileError, DataError, Error, ShapeError
from mlcompute.graph import Graph
from mlcompute.onnx import control
from mlcompute.onnx.budget import ExhaustedError, model_budget
from mlcompute.onnx.files import ModelFile, read_model, tensor_array
from mlcompute.onnx.layer import OperatorLayer
from mlcompute.onnx.layers import layer_for
from mlcompute.onnx.operands import Derived, Failed, Known, Listed, Operand, Source, Use, Weight, folded, sketch
from mlcompute.onnx.operators.reductions import MASKED
from mlcompute.onnx.rows import BY_DESIGN, ROWS, NeedsValueError, NotImportedError, load_rows
from mlcompute.onnx.types import INEXACT, UnknownTypeError, carried, descriptor_of, folded_shape, is_carried, numpy_type
from mlcompute.onnx.uniform import UniformTensor
from mlcompute.ops.op import Array, Shape
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, ValueInfoProto


@dataclass(frozen=True)
class Problem:
    """Something in a model that cannot be imported."""

    operator: str
    node: str
    reason: str
    #: An operator that is left out on purpose, as opposed to something wrong with the model.
    by_design: bool = False
    #: The operand whose numbers have to be given.
    needs: str = ""

    def __str__(self) -> str:
        return f"{self.operator} '{self.node}': {self.reason}"


class ModelError(CompileError):
    """A model cannot be imported; `problems` lists everything that stands in the way."""

    def __init__(self, message: str, *, problems: Sequence[Problem] = (), **facts: Any) -> None:
        super().__init__(message, **facts)
        self.problems = list(problems)


class _AgainError(Exception):
    """More inputs are constants than was known when the import began."""

    def __init__(self, fixed: frozenset[str]) -> None:
        super().__init__()
        self.fixed = fixed


class ImportedGraph(Graph):
    """A graph made from a model.

    inputs, outputs   tensors by the model's names, ready for `add_inputs` and `add_outputs`
    weights           trainable tensors by the model's names; `statistics`: tensors that are read but never trained
    shapes            the true shape of every input and output: tensors carry more than four axes folded into four
    types             their element types in the model
    known             outputs that do not depend on any input, as arrays
    fixed             inputs that were given as constants, because a shape depends on them
    order             the names of all outputs, in the model's order
    notes             what is computed otherwise than the model says
    """

    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}
        self.statistics: dict[str, Tensor] = {}
        self.shapes: dict[str, Shape] = {}
        self.types: dict[str, np.dtype[Any]] = {}
        self.known: dict[str, Array] = {}
        self.fixed: dict[str, Array] = {}
        self.order: list[str] = []
        self.notes: list[str] = []


@dataclass(eq=False)
class Names:
    """What the names of a graph stand for; those of a sub-graph also see the graph around it."""

    operands: dict[str, Operand] = field(default_factory=dict)
    outer: Names | None = None

    def find(self, name: str) -> Operand | None:
        here: Names | None = self
        while here is not None:
            if name in here.operands:
                return here.operands[name]
            here = here.outer
        return None


@dataclass(eq=False)
class Place:
    """Where nodes stand: versions of the operator sets, attributes of the function around, a prefix for labels."""

    versions: Mapping[str, int]
    attributes: Mapping[str, AttributeProto] = field(default_factory=dict)
    prefix: str = ""
    depth: int = 0
    #: Inside the definition of an attention operator.
    attends: bool = False


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
        self.batch, self.dimensions, self.given_shapes = batch, dict(dimensions), dict(shapes)
        self.given = {name: np.asarray(array) for name, array in constants.items()}
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
        place = Place(_versions(self.model) or {"": 1})
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
            raise self.failure()
        self.graph.order = [info.name for info in graph.output]
        self._name_weights()
        return self.graph

    def failure(self) -> ModelError:
        count = len(self.problems)
        shown = {f"{number}": str(problem) for number, problem in enumerate(self.problems[:100], 1)}
        if count > 100:
            shown["..."] = f"and {count - 100} more"
        needed = sorted({problem.needs for problem in self.problems if problem.needs})
        fix = ""
        if needed:
            fix = "give the numbers of " + ", ".join(map(repr, needed)) + " with constants={name: array}"
        return ModelError(
            f"onnx.load: {count} thing{'s' if count > 1 else ''} in this model cannot be imported",
            problems=self.problems, fix=fix, **shown,
        )  # fmt: skip

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
            shape = self._input_shape(info)
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
        if name in self.preset or (name in self.given and not is_carried(dtype)):
            self.graph.fixed[name] = self._given(name, shape, dtype)
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

    def _input_shape(self, info: ValueInfoProto) -> Shape:
        """Extents of an input: the model's, with symbols replaced by what the caller gave."""
        name, tensor_type = info.name, info.type.tensor_type
        if name in self.given_shapes:
            shape = tuple(int(extent) for extent in self.given_shapes[name])
        elif name in self.given and not tensor_type.HasField("shape"):
            shape = self.given[name].shape
        elif not tensor_type.HasField("shape"):
            raise ShapeError("its rank is not known", fix="give shapes={name: ..}")
        else:
            shape = tuple(self._extent(dim, axis, name) for axis, dim in enumerate(tensor_type.shape.dim))
        if min(shape, default=0) < 0 or len(shape) > 32:
            raise ShapeError(f"its shape is {shape}")
        if math.prod(max(extent, 1) for extent in shape) > 2**40:
            raise ShapeError(f"its shape is {shape}, more elements than any memory")
        return shape

    def _extent(self, dim: Any, axis: int, name: str) -> int:
        kind = dim.WhichOneof("value")
        if kind == "dim_value" and (dim.dim_value > 0 or axis > 0):
            return int(dim.dim_value)
        if kind == "dim_value" and dim.dim_value == 0 and self.batch is None:
            return 0
        symbol = dim.dim_param if kind == "dim_param" else ""
        if symbol and symbol in self.dimensions:
            return int(self.dimensions[symbol])
        if axis == 0 and self.batch is not None:
            if symbol:
                self.dimensions[symbol] = self.batch
            return self.batch
        if axis == 0:
            raise ShapeError("its batch extent is not fixed by the model: give batch=..")
        known = f"dimensions={{{symbol!r}: ..}}" if symbol else f"shapes={{{name!r}: (..)}}"
        raise ShapeError(f"extent {axis} is not fixed by the model: give {known}")

    def fixed(self, source: Source) -> Array | None:
        """The numbers of an input the caller gave, now that some shape depends on them."""
        if self.graph.inputs.get(source.name) is not source.tensor:
            # Computed: known when all inputs it comes from are. They are folded in the next attempt.
            origins = self.origins.get(source.tensor, frozenset())
            if origins and origins <= self.given.keys():
                for name in origins:
                    self.graph.fixed[name] = self._given(name, self.graph.shapes[name], self.graph.types[name])
            return None
        if source.name not in self.given:
            return None
        array = self._given(source.name, source.shape, self.graph.types[source.name])
        self.graph.fixed[source.name] = array
        return array

    def _given(self, name: str, shape: Shape, dtype: np.dtype[Any]) -> Array:
        array = self.given[name].astype(dtype, copy=False)
        if array.shape != shape:
            raise ShapeError(f"constants: '{name}' has shape {array.shape}, the model says {shape}")
        return array

    # Nodes --------------------------------------------------------------------------------------------------------

    def nodes(self, nodes: Sequence[NodeProto], names: Names, place: Place) -> None:
        for node in nodes:
            if place.depth:  # the others are in the file
                self.budget.spend_node()
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
                raise self.failure() from None
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
            below = Place(_versions(local), {}, f"{label}/", place.depth + 1)
            return self.inline(local, node, operands, below, place)
        row = ROWS.get(key)
        if row is None:
            body = self._body(node, domain, operands, place)
            if body is None:
                raise self._unknown(domain, node.op_type)
            attends = place.attends or node.op_type.endswith("Attention")
            below = Place(body[1], {}, f"{label}/", place.depth + 1, attends)
            return self.inline(body[0], node, operands, below, place, body[2])
        attributes = self.attributes(node, place)
        version = place.versions.get(domain, place.versions.get("", 1) if not domain else 1)
        if place.attends and node.op_type == "Softmax":
            attributes[MASKED] = 1
        use = Use(row, version, attributes, operands, list(node.input), len(node.output))
        return self.apply(use, label, list(node.output))

    def _defined(self, node: NodeProto, domain: str, place: Place) -> bool:
        return self.has_body(node.op_type, domain, place.versions.get(domain, 1))

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

    # Attributes and functions ---------------------------------------------------------------------------------------

    def attributes(self, node: NodeProto, place: Place) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for attribute in node.attribute:
            actual = attribute
            if attribute.ref_attr_name:
                referred = place.attributes.get(attribute.ref_attr_name)
                if referred is None:
                    continue
                actual = referred
            found[attribute.name] = self._attribute(actual)
        return found

    def _attribute(self, attribute: AttributeProto) -> Any:
        from onnx import AttributeProto

        kind = attribute.type
        if kind == AttributeProto.FLOAT:
            return float(attribute.f)
        if kind == AttributeProto.INT:
            return int(attribute.i)
        if kind == AttributeProto.STRING:
            return attribute.s.decode("utf-8", "replace")
        if kind == AttributeProto.TENSOR:
            return self.array(attribute.t)
        if kind == AttributeProto.FLOATS:
            return [float(number) for number in attribute.floats]
        if kind == AttributeProto.INTS:
            return [int(number) for number in attribute.ints]
        if kind == AttributeProto.STRINGS:
            return [text.decode("utf-8", "replace") for text in attribute.strings]
        if kind == AttributeProto.GRAPH:
            return attribute.g
        raise NotImportedError(f"attribute '{attribute.name}' is of a kind that is not imported")

    @staticmethod
    def has_body(name: str, domain: str, version: int) -> bool:
        """Does ONNX define the operator as a function of smaller ones?"""
        import onnx.defs

        try:
            schema: Any = onnx.defs.get_schema(name, max(version, 1), domain)
        except onnx.defs.SchemaError:
            return False
        return bool(schema.has_function or schema.has_context_dependent_function)

    def _body(
        self, node: NodeProto, domain: str, operands: Sequence[Operand | None], place: Place
    ) -> tuple[Any, dict[str, int], dict[str, AttributeProto]] | None:
        """The operator as a function of smaller ones, when ONNX defines it so."""
        import onnx
        import onnx.defs

        version = place.versions.get(domain, 1)
        try:
            schema: Any = onnx.defs.get_schema(node.op_type, version, domain)
        except onnx.defs.SchemaError:
            return None
        if schema.has_function:
            body = schema.function_body
        elif schema.has_context_dependent_function:
            resolved = onnx.NodeProto()
            resolved.CopyFrom(node)
            types = [control.type_of(operand) for operand in operands]
            data = schema.get_context_dependent_function(
                resolved.SerializeToString(), [t.SerializeToString() for t in types]
            )
            if not data:
                return None
            body = onnx.FunctionProto.FromString(data)
        else:
            return None
        versions = _versions(body)
        defaults = {
            name: attribute.default_value
            for name, attribute in schema.attributes.items()
            if attribute.default_value.name
        }
        return body, versions or dict(place.versions), defaults

    def inline(
        self,
        body: Any,
        node: NodeProto,
        operands: Sequence[Operand | None],
        place: Place,
        outer: Place,
        defaults: Mapping[str, AttributeProto] | None = None,
    ) -> list[Operand]:
        """A function's nodes with its inputs bound, as if they stood in place of the node."""
        if place.depth > 32:
            raise NotImportedError("functions are nested too deeply")
        given = {a.name: a for a in body.attribute_proto} | dict(defaults or {})
        for attribute in node.attribute:
            referred = outer.attributes.get(attribute.ref_attr_name) if attribute.ref_attr_name else attribute
            if referred is not None:
                given[attribute.name] = referred
        place = Place(place.versions, given, place.prefix, place.depth, place.attends)
        names = Names()
        for index, name in enumerate(body.input):
            operand = operands[index] if index < len(operands) else None
            if operand is not None:
                names.operands[name] = operand
            else:
                names.operands[name] = None  # type: ignore[assignment]
        before = len(self.problems)
        self.nodes(_without_missing(body.node, names), names, place)
        if len(self.problems) > before:
            return [Failed() for _ in node.output]
        answers = []
        for name in body.output:
            found = names.find(name)
            answers.append(found if found is not None else Failed(f"'{name}' is not defined"))
        return answers

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


def _versions(proto: Any) -> dict[str, int]:
    """Versions of the operator sets a model or function is written in."""
    return {"" if entry.domain == "ai.onnx" else entry.domain: int(entry.version) for entry in proto.opset_import}


def _without_missing(nodes: Sequence[NodeProto], names: Names) -> list[NodeProto]:
    """Nodes of a function body whose optional inputs were left out name nothing there."""
    missing = {name for name, operand in names.operands.items() if operand is None}
    if not missing:
        return list(nodes)
    for name in missing:
        del names.operands[name]
    kept = []
    for node in nodes:
        if missing.isdisjoint(node.input):
            kept.append(node)
            continue
        copied = type(node)()
        copied.CopyFrom(node)
        for index, name in enumerate(node.input):
            if name in missing:
                copied.input[index] = ""
        kept.append(copied)
    return kept


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
