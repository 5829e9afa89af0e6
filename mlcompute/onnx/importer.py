"""From a model to a graph: every node becomes a constant, a layer, or a part of the layers that use it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.errors import DataError, Error, ShapeError
from mlcompute.onnx import control
from mlcompute.onnx.attributes import attribute_value
from mlcompute.onnx.budget import ExhaustedError, model_budget
from mlcompute.onnx.choices import Choices, floating_names
from mlcompute.onnx.dequantize import dequantize, quantize
from mlcompute.onnx.files import ModelFile, tensor_array
from mlcompute.onnx.functions import body_of, has_body, inline
from mlcompute.onnx.imported import ImportedGraph
from mlcompute.onnx.imported_weights import find_inner_weights, find_weights, name_weights, note_training, weight
from mlcompute.onnx.inputs import GivenInputs
from mlcompute.onnx.layer import OperatorLayer
from mlcompute.onnx.layers import layer_for
from mlcompute.onnx.names import Names, Place, operator_sets
from mlcompute.onnx.operands import Derived, Failed, Known, Listed, Operand, Source, Use, Weight, folded, sketch
from mlcompute.onnx.operators.reductions import MASKED
from mlcompute.onnx.order import in_order
from mlcompute.onnx.outputs import add_output, choose_output
from mlcompute.onnx.problems import ModelError, Problem, failure
from mlcompute.onnx.reach import INTEGER, WAY_OUT
from mlcompute.onnx.rows import BY_DESIGN, ROWS, NeedsValueError, NotImportedError, load_rows
from mlcompute.onnx.ties import Ties
from mlcompute.onnx.types import (
    INEXACT,
    UnknownTypeError,
    carried,
    descriptor_of,
    is_carried,
    numpy_type,
)  # fmt: skip
from mlcompute.onnx.uses import Uses
from mlcompute.onnx.weights import Judgement, chosen
from mlcompute.ops.bfloat16 import is_floating
from mlcompute.ops.op import Array, Shape
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto


class AgainError(Exception):
    """More inputs are constants than was known when the import began."""

    def __init__(self, fixed: frozenset[str]) -> None:
        super().__init__()
        self.fixed = fixed


def _told(error: Error) -> str:
    """What is wrong and what to do about it, in one line."""
    return f"{error.message}; {error.fix}" if error.fix else error.message


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
        choices: Choices,
        fixed: frozenset[str] = frozenset(),
    ) -> None:
        load_rows()
        self.file, self.model = file, file.proto
        model = file.proto
        self.choices = choices
        self.given = GivenInputs(batch, dimensions, shapes, constants)
        self.budget = model_budget(model, memory_limit, node_limit)
        #: Inputs known to be needed as constants, from an earlier attempt.
        self.preset = fixed
        self.graph = ImportedGraph()
        self.problems: list[Problem] = []
        self.names = Names()
        #: What is said about tensors -> their names.
        self.noted: dict[str, list[str]] = {}
        #: Nodes that became layers or parts of them, in order: (use, names of operands, names of results).
        self.history: list[tuple[Use, Sequence[str], Sequence[str]]] = []
        self.functions = {(f.domain, f.name, getattr(f, "overload", "")): f for f in model.functions}
        #: Tensors stored in a graph are read once, however often a loop runs over them.
        self.read: dict[int, tuple[GraphProto, dict[str, Operand]]] = {}
        self.lifted: dict[int, Weight] = {}
        #: Who uses what, what the caller says is trained, and which uses of one tensor have copies of their own.
        self.uses = Uses.of(model, self.budget.nodes)
        self.said = chosen(choices.trainable, floating_names(model, choices.dequantize))
        self.ties = Ties()
        #: Inputs that are constants from the start; and, by tensor, the inputs a computed value comes from.
        self.stored_inputs: set[str] = set()
        self.origins: dict[Tensor, frozenset[str]] = {}

    # The model ------------------------------------------------------------------------------------------------

    def run(self) -> ImportedGraph:
        graph = self.model.graph
        place = Place(operator_sets(self.model) or {"": 1})
        self.read_initializers(graph, self.names, outermost=True)
        self.given.check(self.uses)
        self._note_versions(place)
        for info in graph.input:
            if info.name not in self.names.operands:
                self._input(info)
        self.nodes(graph.node, self.names, place)
        for info in graph.output:
            add_output(self, info.name)
        choose_output(self)
        if self.graph.fixed.keys() - self.preset - self.stored_inputs:
            # An input turned out to be needed as a constant: what was imported before that took it as computed.
            raise AgainError(self.preset | self.graph.fixed.keys())
        if self.problems:
            raise failure(self.problems)
        self.graph.order = [info.name for info in graph.output]
        name_weights(self)
        note_training(self)
        return self.graph

    def _note_versions(self, place: Place) -> None:
        from onnx import defs

        version, newest = place.versions.get("", 1), defs.onnx_opset_version()
        if version > newest:
            self.graph.notes.append(
                f"operator set {version} is newer than {newest}, the newest this version of onnx knows: "
                "what changed since is not known here"
            )

    def read_initializers(self, graph: GraphProto, names: Names, outermost: bool = False) -> None:
        if id(graph) not in self.read:
            found: dict[str, Operand] = {}
            for number, tensor in enumerate(graph.initializer):
                raw = self.file.raw(number) if outermost else None
                found[tensor.name] = self.stored(tensor, tensor.name, raw)
            for sparse in graph.sparse_initializer:
                found[sparse.values.name] = Failed("sparse tensors are not imported")
            self.read[id(graph)] = graph, found
            find_weights(self, found) if outermost else find_inner_weights(self, found)
        names.operands.update(self.read[id(graph)][1])

    def stored(self, tensor: Any, name: str, raw: Any = None) -> Operand:
        """A tensor of the file, as numbers; which of them are weights is decided when all are there."""
        try:
            return Known(self.array(tensor, raw), name)
        except DataError as error:
            if tensor.data_type == 8:  # strings: an operand nobody may use
                return Failed(error.message)
            self.problems.append(Problem("initializer", name, error.message))
            return Failed()

    def array(self, tensor: TensorProto, raw: Any = None) -> Array:
        """The numbers of a tensor of the file."""
        limit = None if self.budget.grows else self.budget.bytes
        return self.budget.stored(tensor_array(tensor, self.file.folder, limit, raw))

    def note(self, text: str, name: str) -> None:
        """Say something about a tensor; the same is said once, with the names of all it is true of."""
        if not text:
            return
        names = self.noted.setdefault(text, [])
        names.append(name)
        notes = [note for note in self.graph.notes if not note.startswith(f"{text}: ")]
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        self.graph.notes = [*notes, f"{text}: {', '.join(map(repr, names[:5]))}{more}"]

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
                self.problems.append(Problem("input", name, _told(error)))
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

    def fixed(self, source: Source, name: str = "") -> Array | None:
        """The numbers of an input, or of a computed value, that the caller gave, now that the import depends on them.

        name   what the value is called where they are needed
        """
        is_input = self.graph.inputs.get(source.name) is source.tensor
        for called in () if is_input else (name, source.name):
            if called in self.given.constants:
                return self.given.constant(called, source.shape, source.dtype)
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
        for node in in_order(nodes):
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
            self._fail(node, names, Problem(title, label, _told(error), True))
        except Error as error:
            self._fail(node, names, Problem(title, label, _told(error)))
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
        for index, name in enumerate(node.input):
            if not place.depth and self.ties.renamed:
                name = self.ties.renamed.get((next(iter(node.output), ""), index), name)
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
            is_known = local is not None or handler is not None or key in ROWS
            if not is_known and not has_body(node.op_type, domain, place.versions.get(domain, 1)):
                raise self._unknown(domain, node.op_type)
            return [Failed() for _ in node.output]
        if handler is not None:
            return handler(control.Handled(self, node, operands, names, place, label))
        if self.choices.dequantize and local is None and not domain and node.op_type in INTEGER:
            raise NotImportedError("dequantize=True does not make it an operator of floating numbers", fix=WAY_OUT)
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
        if self.choices.dequantize and key == ("", "QuantizeLinear"):
            return quantize(self, use, label)
        if self.choices.dequantize and key == ("", "DequantizeLinear"):
            return dequantize(self, use, list(node.output), node.input[0])
        return self.apply(use, label, list(node.output))

    def _unknown(self, domain: str, name: str) -> NotImportedError:
        reason = BY_DESIGN.get((domain, name))
        if reason:
            return NotImportedError(reason)
        fix = "define it as a function of the model, or export it as standard operators"
        if domain.startswith("com.microsoft"):
            fix = "save the model before onnxruntime optimizes its graph, or quantize it in the format QDQ"
        return NotImportedError("there is no such operator in the operator table", fix=fix)

    # One operator -------------------------------------------------------------------------------------------------

    def apply(self, use: Use, label: str, outputs: Sequence[str]) -> list[Operand]:
        """The results of one operator: folded, aliased, derived from weights, or computed by a new layer."""
        for index, operand in enumerate(use.operands):
            if isinstance(operand, Listed):
                raise NotImportedError("sequences are taken apart at import only")
            lifts = isinstance(operand, Known) and (operand.is_fill or index in use.row.frozen)
            if lifts and index in use.row.weights and use.has_source():
                use.operands[index] = self.lift(operand)  # type: ignore[index, arg-type]
        if use.is_known():
            return self.all_folded(use, outputs)
        answers, same = sketch(use, self.fixed, self.budget)
        results: list[Operand] = []
        computed: list[tuple[int, Shape, np.dtype[Any]]] = []
        if use.row.caution is not None:
            self.note(use.row.caution(use), label)
        for index, answer in enumerate(answers):
            if isinstance(answer, np.ndarray):
                known = self._folded(answer, outputs[index] if index < len(outputs) else "")
                if isinstance(known, Known):
                    known.made = use, index
                results.append(known)
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
            if not any(is_floating(dtype) for _, _, dtype in computed):
                return self.all_folded(use, outputs)
            for index, shape, dtype in computed:
                results[index] = Derived(use, index, shape, dtype)
            self.history.append((use, use.names, outputs))
            return results
        tensors = self.add(use, computed, label)
        origins = frozenset().union(*(self.origins.get(source.tensor, frozenset()) for source in use.sources()))
        self.origins.update(dict.fromkeys(tensors, origins))
        for (index, shape, dtype), tensor in zip(computed, tensors, strict=True):
            name = outputs[index] if index < len(outputs) else ""
            results[index] = Source(tensor, shape, dtype, name)
        self.history.append((use, use.names, outputs))
        return results

    def all_folded(self, use: Use, outputs: Sequence[str]) -> list[Operand]:
        """The results of an operator whose operands are all known."""
        arrays = folded(use, self.budget)
        names = [*outputs, *[""] * len(arrays)]
        results = [self._folded(array, name) for array, name in zip(arrays, names, strict=False)]
        if any(isinstance(operand, Known) and operand.made is not None for operand in use.operands):
            for index, result in enumerate(results):
                if isinstance(result, Known):
                    result.made = use, index
        if use.row.name == "ConstantOfShape" and isinstance(results[0], Known):
            results[0].is_fill = True
        return results

    def _folded(self, array: Array | None, name: str) -> Operand:
        if array is None:
            return Failed("the result is not given")
        return Known(self.budget.hold(np.asarray(array)), name)

    def lift(self, known: Known) -> Operand:
        """A shape filled with one number, used where a weight is expected, stands for one; so do running statistics."""
        array = known.array
        fewest = 2 if known.is_fill else 1  # one filled number is a number, but one channel has statistics
        if known.made is not None and not known.is_fill:
            return known  # statistics repeated for every sample: a tensor would keep them for this batch
        if array.ndim == 0 or array.size < fewest or not is_carried(array.dtype):
            return known
        if not is_floating(carried(array.dtype)):
            return known
        if id(known) not in self.lifted:
            name = known.name or f"constant{len(self.lifted)}"
            self.lifted[id(known)] = weight(self, array, name, deferred=True)
            if known.is_fill:
                self.graph.judgements[name] = Judgement(True, "a shape to fill, used where an operator has weights")
        return self.lifted[id(known)]

    def add(self, use: Use, computed: list[tuple[int, Shape, np.dtype[Any]]], label: str) -> list[Tensor]:
        """A layer that computes these results; its result tensors."""
        for _, shape, _ in computed:
            if math.prod(shape) > 2**40:
                raise ShapeError(f"a result of shape {shape}")
        layer = layer_for(use, computed, self.choices.batch_norm)
        if layer is not None:
            layer.label = label
            self.graph.node(layer, sources=[source.tensor for source in use.sources()])
            return self.graph.result_tensors(layer)
        operator_layer = OperatorLayer(use, computed, label)
        self.graph.node(operator_layer, sources=[source.tensor for source in operator_layer.sources])
        return self.graph.result_tensors(operator_layer)

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
