"""From a model to a graph: every node becomes a constant, a layer, or a part of the layers that use it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.errors import DataError, Error, ShapeError, warn
from mlcompute.onnx import control
from mlcompute.onnx.attributes import attribute_value
from mlcompute.onnx.budget import ExhaustedError, model_budget
from mlcompute.onnx.choices import Choices, floating_names
from mlcompute.onnx.dequantize import dequantize, quantize
from mlcompute.onnx.files import ModelFile, read_model, tensor_array
from mlcompute.onnx.functions import body_of, has_body, inline
from mlcompute.onnx.imported import ImportedGraph
from mlcompute.onnx.inputs import GivenInputs
from mlcompute.onnx.layer import OperatorLayer
from mlcompute.onnx.layers import layer_for
from mlcompute.onnx.names import Names, Place, operator_sets
from mlcompute.onnx.operands import Derived, Failed, Known, Listed, Operand, Source, Use, Weight, folded, sketch
from mlcompute.onnx.operators.reductions import MASKED
from mlcompute.onnx.order import in_order
from mlcompute.onnx.problems import ModelError, Problem, failure
from mlcompute.onnx.reach import quantized_weights, unreached
from mlcompute.onnx.rows import BY_DESIGN, ROWS, NeedsValueError, NotImportedError, load_rows
from mlcompute.onnx.ties import Ties, find_ties
from mlcompute.onnx.types import (
    INEXACT,
    UnknownTypeError,
    carried,
    descriptor_of,
    folded_shape,
    is_carried,
    is_floating,
    numpy_type,
)  # fmt: skip
from mlcompute.onnx.uniform import CopiedTensor, UniformTensor
from mlcompute.onnx.uses import Uses
from mlcompute.onnx.weights import Judgement, Trainable, chosen, judge_all, states_weights
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
        for info in graph.input:
            if info.name not in self.names.operands:
                self._input(info)
        self.nodes(graph.node, self.names, place)
        for info in graph.output:
            self._output(info.name, place)
        self._choose_output()
        if self.graph.fixed.keys() - self.preset - self.stored_inputs:
            # An input turned out to be needed as a constant: what was imported before that took it as computed.
            raise _AgainError(self.preset | self.graph.fixed.keys())
        if self.problems:
            raise failure(self.problems)
        self.graph.order = [info.name for info in graph.output]
        self._name_weights()
        self._note_training()
        return self.graph

    def read_initializers(self, graph: GraphProto, names: Names, outermost: bool = False) -> None:
        if id(graph) not in self.read:
            found: dict[str, Operand] = {}
            for number, tensor in enumerate(graph.initializer):
                raw = self.file.raw(number) if outermost else None
                found[tensor.name] = self.stored(tensor, tensor.name, raw)
            for sparse in graph.sparse_initializer:
                found[sparse.values.name] = Failed("sparse tensors are not imported")
            self.read[id(graph)] = graph, found
            if outermost:
                self._find_weights(found)
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

    def _find_weights(self, found: dict[str, Operand]) -> None:
        """Make weights of the tensors that are judged to be some, and copies where an exporter merged several."""
        known = {name: operand.array for name, operand in found.items() if isinstance(operand, Known)}
        floats = {name: array for name, array in known.items() if is_floating(array)}
        stated = states_weights(self.model)
        judged = judge_all(floats, self.uses, self.said, stated)
        self.ties = find_ties(floats, judged, self.uses, self.model.producer_name, stated)
        shared = set(self.ties.copies.values())
        for name, judgement in judged.items():
            self.graph.judgements[name] = judgement
            if judgement.trained:
                found[name] = self.weight(floats[name], name, deferred=name in shared)
        for copy, name in self.ties.copies.items():
            trained = judged[name].trained and copy not in self.ties.statistics
            role = "running statistics, " if copy in self.ties.statistics else ""
            self.graph.judgements[copy] = Judgement(trained, f"{role}equal to '{name}' when the model was exported")
            found[copy] = self.weight(floats[name], copy, deferred=True) if trained else Known(floats[name], copy)
        self.graph.copies, self.graph.tied = dict(self.ties.copies), dict(self.ties.tied)

    def array(self, tensor: TensorProto, raw: Any = None) -> Array:
        """The numbers of a tensor of the file."""
        limit = None if self.budget.grows else self.budget.bytes
        return self.budget.stored(tensor_array(tensor, self.file.folder, limit, raw))

    def weight(self, array: Array, name: str, deferred: bool = False) -> Weight:
        """A tensor to train, or one of running statistics.

        deferred   others are made of the same numbers: its own memory is made when it is first used
        """
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
            tensor: Tensor = UniformTensor(descriptor_of(array.shape, to), array.reshape(-1)[0])
        elif deferred:
            tensor = CopiedTensor(descriptor_of(array.shape, to), array.reshape(folded_shape(array.shape)))
        else:
            data = np.ascontiguousarray(array).reshape(folded_shape(array.shape))
            tensor = Tensor(descriptor_of(array.shape, to), shared_data=data)
        tensor.label = name
        return Weight(tensor, array.shape, name)

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
        if self.choices.dequantize and key == ("", "QuantizeLinear"):
            return quantize(self, use, label)
        if self.choices.dequantize and key == ("", "DequantizeLinear"):
            return dequantize(self, use, list(node.output), node.input[0])
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
            lifts = isinstance(operand, Known) and (operand.is_fill or index in use.row.frozen)
            if lifts and index in use.row.weights and use.has_source():
                use.operands[index] = self.lift(operand)  # type: ignore[index, arg-type]
        if use.is_known():
            return self.all_folded(use, outputs)
        answers, same = sketch(use, self.fixed, self.budget)
        results: list[Operand] = []
        computed: list[tuple[int, Shape, np.dtype[Any]]] = []
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
            if all(dtype.kind != "f" for _, _, dtype in computed):
                return self.all_folded(use, outputs)
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
        if array.ndim == 0 or array.size < fewest or not is_carried(array.dtype) or carried(array.dtype).kind != "f":
            return known
        if id(known) not in self.lifted:
            name = known.name or f"constant{len(self.lifted)}"
            self.lifted[id(known)] = self.weight(array, name, deferred=True)
            if known.is_fill:
                self.graph.judgements[name] = Judgement(True, "a shape to fill, used where an operator has weights")
        return self.lifted[id(known)]

    def _add(self, use: Use, computed: list[tuple[int, Shape, np.dtype[Any]]], label: str) -> list[Tensor]:
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

    def _choose_output(self) -> None:
        """Make the output that a loss is put on the last result of the graph, which is where losses are put."""
        graph, wanted = self.graph, self.choices.output
        floating = [name for name, tensor in graph.outputs.items() if tensor.descriptor.data_type.is_floating]
        if wanted is not None and wanted not in floating and not self.problems:
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
            (graph.outputs[name],) = self._add(use, [(0, operand.shape, operand.dtype)], name)

    def _note_training(self) -> None:
        """Say what cannot be trained although a user may expect it."""
        graph = self.graph
        self._note_transposed()
        arrays = {name: o.array for name, o in self.names.operands.items() if isinstance(o, Known)}
        if not self.choices.dequantize:
            graph.quantized = quantized_weights(arrays, self.uses)
        graph.unreached = unreached(graph)
        count, lost = len(graph.weights), len(graph.unreached)
        if lost:
            reason = next(iter(graph.unreached.values()))
            graph.notes.append(f"{lost} of {count} weights cannot be trained: {reason}")
        if graph.quantized:
            quantized = f"{len(graph.quantized)} tensors of weights are quantized and are not trained"
            graph.notes.append(f"{quantized}; load(..., dequantize=True) makes floating weights of them")
            if lost == count:
                warn(
                    f"onnx.load: no weight of this model can be trained: {quantized}; "
                    "load(..., dequantize=True) makes floating weights of them"
                )

    def _note_transposed(self) -> None:
        """An embedding that is also the head of a network is often written twice, once transposed."""
        weights = self.graph.weights
        matrices = {
            name: tensor.storage.array() for name, tensor in weights.items()  # `data` would copy all of them
            if len(tensor.descriptor.shape) == 2 and not isinstance(tensor, CopiedTensor) and tensor.storage
        }  # fmt: skip
        reasons = {name: judgement.reason for name, judgement in self.graph.judgements.items()}
        for table in [name for name in matrices if "of Gather" in reasons.get(name, "")][:16]:
            ours = matrices[table]
            for name, theirs in matrices.items():
                if name == table or ours is None or theirs is None or ours.shape != theirs.shape[::-1]:
                    continue
                if np.array_equal(ours[0], theirs[:, 0]) and np.array_equal(ours.T, theirs):
                    self.graph.notes.append(f"'{name}' is '{table}' transposed: here they are trained apart")

    def _name_weights(self) -> None:
        trained: dict[str, Tensor] = {}
        read: dict[str, Tensor] = {}
        for node in self.graph.nodes:
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
    trainable: Trainable | None = None,
    batch_norm: str = "train",
    dequantize: bool = False,
    output: str | None = None,
) -> ImportedGraph:
    """A model as a graph whose weights can be trained.

    model         a path, the bytes of a file, or an onnx.ModelProto
    batch         the first extent of inputs that leave it open; with it, every extent of the same name
    dimensions    other open extents by their name in the model; `shapes`: whole shapes by the input's name
    constants     numbers of inputs, or of values the model computes, that shapes and branches depend on; they are taken
                  only where an operator needs them
    memory_limit  bytes all constants and weights together may take; by default what the file holds, 8 more for each of
                  its numbers, and 32 MiB: a small file cannot make a large import
    node_limit    nodes loops and functions may unfold into; by default 4000, and 8 for each node of the model
    trainable     which stored tensors are weights: patterns such as "classifier.*", and then no others are; or a
                  function of a name that answers True, False, or None to leave it to the guess; by default, the guess
    batch_norm    "train": batch normalization uses the batch's statistics in training graphs and keeps the running
                  ones; "frozen": it uses the running ones everywhere and leaves them as they are
    dequantize    read a quantized model as one of floating numbers, whose weights can be trained
    output        the output a loss is put on, for models with several

    A file does not say what was trained: `ImportedGraph.judgements` and `doctor` list what was taken for a weight or a
    constant, and why. What cannot be imported is listed in one ModelError, all of it; then nothing has been imported.

    >>> import mlcompute as mlc
    >>> graph = mlc.onnx.load("model.onnx", batch=32)  # doctest: +SKIP
    >>> training = mlc.TrainingGraph([graph], loss, optimizer)  # doctest: +SKIP
    >>> training.add_inputs(graph.inputs, {"labels": labels})  # doctest: +SKIP
    """
    choices = Choices(trainable, batch_norm, dequantize, output)
    file = read_model(model)
    fixed: frozenset[str] = frozenset()
    while True:
        try:
            return Importer(
                file, batch=batch, dimensions=dimensions or {}, shapes=shapes or {}, constants=constants or {},
                memory_limit=memory_limit, node_limit=node_limit, choices=choices, fixed=fixed,
            ).run()  # fmt: skip
        except _AgainError as again:
            fixed = again.fixed
        except Error:
            raise
        except Exception as error:
            # A damaged file can be wrong in ways nobody thought of; the caller gets one kind of error for all of them.
            raise ModelError(
                "onnx.load: the model has no meaning as it stands", reason=f"{type(error).__name__}: {error}"
            ) from error
