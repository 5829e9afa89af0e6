"""Nodes that speak of other nodes or of sequences: constants, branches, loops, lists, gradients."""

# ruff: noqa: D103  (a handler is the ONNX operator it names: the standard is its docstring)

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.errors import ShapeError
from mlcompute.onnx.imported_weights import weight
from mlcompute.onnx.names import Names, Place
from mlcompute.onnx.operands import Derived, Failed, Known, Listed, Operand, Source, Use, Weight, known_array
from mlcompute.onnx.rows import ROWS, NeedsValueError, NotImportedError
from mlcompute.onnx.types import is_floating
from mlcompute.onnx.weights import STATED, Judgement
from mlcompute.ops.op import Array

if TYPE_CHECKING:
    from onnx import NodeProto

    from mlcompute.onnx.importer import Importer


@dataclass(eq=False)
class Handled:
    """A node that a handler imports: what it is given, and where it stands."""

    importer: Importer
    node: NodeProto
    operands: Sequence[Operand | None]
    names: Names
    place: Place
    label: str

    @functools.cached_property
    def attributes(self) -> dict[str, Any]:
        return self.importer.attributes(self.node, self.place)

    def given(self, index: int) -> Operand | None:
        """An operand; None where it was left out."""
        return self.operands[index] if index < len(self.operands) else None

    def numbers(self, operand: Operand | None, what: str, name: str) -> Array:
        """The numbers of an operand that steer the import."""
        found = None if operand is None else known_array(operand, self.importer.budget)
        if found is None and isinstance(operand, Source):
            found = self.importer.fixed(operand, name)
        if found is None:
            raise NeedsValueError(f"{what} '{name}' must be known at import", operand=name)
        return found

    def number(self, index: int, what: str) -> Any:
        """The first number of an operand that steers the import."""
        return self.numbers(self.operands[index], what, self.node.input[index]).reshape(-1)[0]

    def subgraph(self, graph: Any, given: Mapping[str, Operand]) -> list[Operand]:
        """The results of a sub-graph whose inputs are given."""
        place = self.place
        if place.depth > 32:
            raise NotImportedError("sub-graphs are nested too deeply")
        inner = Names(dict(given), self.names)
        self.importer.read_initializers(graph, inner)
        before = len(self.importer.problems)
        below = Place(place.versions, place.attributes, place.prefix, place.depth + 1, place.attends)
        self.importer.nodes(graph.node, inner, below)
        if len(self.importer.problems) > before:
            return [Failed() for _ in graph.output]
        answers = []
        for info in graph.output:
            found = inner.find(info.name)
            if found is None:
                raise ShapeError(f"output '{info.name}' of a sub-graph is not defined")
            answers.append(found)
        return answers

    def apply(
        self, name: str, operands: Sequence[Operand | None], outputs: int = 1, **attributes: Any
    ) -> list[Operand]:
        """One more operator that the model does not name but means."""
        names = [f"{self.label}:{k}" for k in range(len(operands))]
        use = Use(ROWS["", name], 18, attributes, list(operands), names, outputs)
        made = [f"{self.label}/{name}:{k}" for k in range(outputs)]
        return self.importer.apply(use, f"{self.label}/{name}", made)

    def stacked(self, parts: Sequence[Operand], axis: int) -> Operand:
        """Values one behind the other along a new axis."""
        axes = Known(np.array([axis], np.int64))
        wide = [self.apply("Unsqueeze", [part, axes])[0] for part in parts]
        return self.apply("Concat", wide, axis=axis)[0]

    def at(self, operand: Operand | None, axis: int, index: int) -> Operand:
        """What lies at one place along an axis."""
        return self.apply("Gather", [operand, Known(np.array(index, np.int64))], axis=axis)[0]

    def failed(self) -> list[Operand]:
        """Its results, where something inside cannot be imported."""
        return [Failed() for _ in self.node.output]


Handler = Callable[[Handled], "Sequence[Operand]"]
HANDLERS: dict[tuple[str, str], Handler] = {}


def _handles(name: str, domain: str = "") -> Callable[[Handler], Handler]:
    def add(handler: Handler) -> Handler:
        HANDLERS[domain, name] = handler
        return handler

    return add


def shape_of(operand: Operand | None) -> tuple[int, ...]:
    if isinstance(operand, Known):
        return tuple(operand.array.shape)
    if isinstance(operand, (Source, Derived, Weight)):
        return operand.shape
    raise ShapeError("a sequence has no shape")


@_handles("Constant")
def constant(here: Handled) -> list[Operand]:
    importer, attributes, name = here.importer, here.attributes, here.node.output[0]
    for value, dtype in (
        ("value_float", np.float32),
        ("value_floats", np.float32),
        ("value_int", np.int64),
        ("value_ints", np.int64),
    ):
        if value in attributes:
            return [Known(np.asarray(attributes[value], dtype), name)]
    if "value" not in attributes:
        raise NotImportedError("constants of strings and sparse tensors")
    array = attributes["value"]
    if here.place.depth == 0 and is_floating(array) and array.ndim:
        # A Constant node is how a model says that something is no weight; only the caller may say otherwise.
        trained = importer.said.get(name, False)
        reason = "trainable= says so" if name in importer.said else STATED
        importer.graph.judgements[name] = Judgement(trained, reason)
        if trained:
            return [weight(importer, array, name)]
    return [Known(array, name)]


# Branches and loops -------------------------------------------------------------------------------------------------


@_handles("If")
def if_(here: Handled) -> list[Operand]:
    branch = "then_branch" if here.number(0, "the condition") else "else_branch"
    return here.subgraph(here.attributes[branch], {})


@_handles("Loop")
def loop(here: Handled) -> list[Operand]:
    body = here.attributes["body"]
    limit = None if here.given(0) is None else int(here.number(0, "the trip count"))
    going = here.given(1) is None or bool(here.number(1, "the condition"))
    carried = list(here.operands[2:])
    scanned: list[list[Operand]] = [[] for _ in range(len(body.output) - 1 - len(carried))]
    turn = 0
    while going and (limit is None or turn < limit):
        if turn > 1024:
            raise NotImportedError("loops of more than 1024 turns")
        given: dict[str, Operand] = {body.input[0].name: Known(np.array(turn, np.int64))}
        given[body.input[1].name] = Known(np.array(True))
        given.update({info.name: operand for info, operand in zip(body.input[2:], carried, strict=True) if operand})
        answers = here.subgraph(body, given)
        if any(isinstance(answer, Failed) for answer in answers):
            return here.failed()
        going = bool(here.numbers(answers[0], "the condition", body.output[0].name).reshape(-1)[0])
        carried = list(answers[1 : 1 + len(carried)])
        for collected, answer in zip(scanned, answers[1 + len(carried) :], strict=True):
            collected.append(answer)
        turn += 1
    if any(not collected for collected in scanned):
        raise NotImportedError("loops that make no turn but collect results")
    results: list[Operand] = [operand if operand is not None else Failed("left out") for operand in carried]
    return [*results, *(here.stacked(collected, 0) for collected in scanned)]


@_handles("Scan")
def scan(here: Handled) -> list[Operand]:
    if here.place.versions.get("", 9) < 9:
        return _scan_8(here)
    attributes = here.attributes
    body, count = attributes["body"], int(attributes["num_scan_inputs"])
    states, scanned = here.operands[: len(here.operands) - count], here.operands[len(here.operands) - count :]
    in_axes = attributes.get("scan_input_axes") or [0] * count
    in_back = attributes.get("scan_input_directions") or [0] * count
    outs = len(body.output) - len(states)
    out_axes = attributes.get("scan_output_axes") or [0] * outs
    out_back = attributes.get("scan_output_directions") or [0] * outs
    in_axes = [axis % len(shape_of(value)) for axis, value in zip(in_axes, scanned, strict=True)]
    steps = shape_of(scanned[0])[in_axes[0]]
    if not 0 < steps <= 4096:
        raise NotImportedError(f"scans over {steps} steps")

    def slices(step: int) -> list[Operand]:
        places = zip(scanned, in_axes, in_back, strict=True)
        return [here.at(value, axis, steps - 1 - step if back else step) for value, axis, back in places]

    found = _scanned(here, body, states, steps, slices)
    if found is None:
        return here.failed()
    results, collected = found
    for parts, axis, back in zip(collected, out_axes, out_back, strict=True):
        rank = len(shape_of(parts[0])) + 1
        results.append(here.stacked(parts[::-1] if back else parts, axis % rank))
    return results


def _scanned(
    here: Handled, body: Any, states: Sequence[Any], steps: int, slices: Callable[[int], list[Operand]]
) -> tuple[list[Operand], list[list[Operand]]] | None:
    """The last states, and by output what every step has given; None where a step cannot be imported.

    slices   what a step is given of the values that are scanned
    """
    now = list(states)
    collected: list[list[Operand]] = [[] for _ in body.output[len(now) :]]
    for step in range(steps):
        inputs = zip(body.input, [*now, *slices(step)], strict=True)
        answers = here.subgraph(body, {info.name: operand for info, operand in inputs})
        if any(isinstance(answer, Failed) for answer in answers):
            return None
        now = list(answers[: len(now)])
        for target, answer in zip(collected, answers[len(now) :], strict=True):
            target.append(answer)
    return now, collected


def _scan_8(here: Handled) -> list[Operand]:
    """The first version: a batch axis in front of everything, and time behind it."""
    if here.operands[0] is not None:
        raise NotImportedError("Scan of version 8 with sequence lengths")
    body, count = here.attributes["body"], int(here.attributes["num_scan_inputs"])
    values = here.operands[1:]
    states, scanned = values[: len(values) - count], values[len(values) - count :]
    batch, steps = shape_of(scanned[0])[:2]
    samples: list[list[Operand]] = []
    for sample in range(batch):
        now = [here.at(state, 0, sample) for state in states]
        rows = [here.at(value, 0, sample) for value in scanned]

        def slices(step: int, rows: list[Operand] = rows) -> list[Operand]:
            return [here.at(value, 0, step) for value in rows]

        found = _scanned(here, body, now, steps, slices)
        if found is None:
            return here.failed()
        samples.append([*found[0], *(here.stacked(parts, 0) for parts in found[1])])
    outputs = [[results[k] for results in samples] for k in range(len(body.output))]
    return [here.stacked(parts, 0) for parts in outputs]


# Sequences ------------------------------------------------------------------------------------------------------------


def _items(operand: Operand | None) -> list[Operand]:
    if not isinstance(operand, Listed):
        raise ShapeError("a sequence is expected")
    return operand.items


def _position(here: Handled, count: int) -> int:
    index = int(here.number(1, "the position"))
    if not -count <= index < max(count, 1):
        raise ShapeError(f"position {index} in a sequence of {count}")
    return index % count if count else 0


@_handles("SequenceConstruct")
def sequence_construct(here: Handled) -> list[Operand]:
    return [Listed(list(here.operands))]  # type: ignore[arg-type]


@_handles("SequenceEmpty")
def sequence_empty(here: Handled) -> list[Operand]:
    return [Listed([])]


@_handles("SequenceLength")
def sequence_length(here: Handled) -> list[Operand]:
    return [Known(np.array(len(_items(here.operands[0])), np.int64))]


@_handles("SequenceAt")
def sequence_at(here: Handled) -> list[Operand]:
    items = _items(here.operands[0])
    return [items[_position(here, len(items))]]


@_handles("SequenceInsert")
def sequence_insert(here: Handled) -> list[Operand]:
    items = list(_items(here.operands[0]))
    index = len(items)
    if here.given(2) is not None:
        given = int(here.number(2, "the position"))
        index = given + len(items) if given < 0 else given
    items.insert(index, here.operands[1])  # type: ignore[arg-type]
    return [Listed(items)]


@_handles("SequenceErase")
def sequence_erase(here: Handled) -> list[Operand]:
    items = list(_items(here.operands[0]))
    del items[_position(here, len(items)) if len(here.operands) > 1 else len(items) - 1]
    return [Listed(items)]


@_handles("ConcatFromSequence")
def concat_from_sequence(here: Handled) -> list[Operand]:
    items, axis = _items(here.operands[0]), int(here.attributes["axis"])
    if not items:
        raise ShapeError("an empty sequence cannot be joined")
    if here.attributes.get("new_axis", 0):
        return [here.stacked(items, axis % (len(shape_of(items[0])) + 1))]
    return here.apply("Concat", items, axis=axis)


@_handles("SplitToSequence")
def split_to_sequence(here: Handled) -> list[Operand]:
    x = here.operands[0]
    shape = shape_of(x)
    axis = int(here.attributes.get("axis", 0)) % len(shape)
    extent, drop = shape[axis], False
    if here.given(1) is not None:
        given = here.numbers(here.operands[1], "the lengths", here.node.input[1])
        each = int(given.reshape(-1)[0])
        if given.ndim == 0 and each < 1:
            raise ShapeError(f"parts of {each}")
        count = -(-extent // each) if given.ndim == 0 else given.size
    else:
        given, each, count, drop = np.array(1), 1, extent, not here.attributes.get("keepdims", 1)
    here.importer.budget.spend_nodes(count)  # before a list of so many is made
    lengths = [min(each, extent - k) for k in range(0, extent, each)] if given.ndim == 0 else given.tolist()
    parts = here.apply("Split", [x, Known(np.array(lengths, np.int64))], len(lengths), axis=axis)
    if drop:
        axes = Known(np.array([axis], np.int64))
        parts = [here.apply("Squeeze", [part, axes])[0] for part in parts]
    return [Listed(parts)]


@_handles("SequenceMap")
def sequence_map(here: Handled) -> list[Operand]:
    body = here.attributes["body"]
    collected: list[list[Operand]] = [[] for _ in body.output]
    for index in range(len(_items(here.operands[0]))):
        values = [o.items[index] if isinstance(o, Listed) else o for o in here.operands]
        given: dict[str, Any] = {info.name: value for info, value in zip(body.input, values, strict=True)}
        for target, answer in zip(collected, here.subgraph(body, given), strict=True):
            target.append(answer)
    return [Listed(parts) for parts in collected]


@_handles("Identity")
def identity(here: Handled) -> list[Operand]:
    (operand,) = here.operands[:1]
    if isinstance(operand, (Source, Derived, Weight)):  # what a Gradient differentiates may lead through it
        names = list(here.node.input)
        use = Use(ROWS["", "Identity"], 13, {}, here.operands, names, 1)
        here.importer.history.append((use, names, list(here.node.output)))
    return [operand]  # type: ignore[list-item]


# Gradients ------------------------------------------------------------------------------------------------------------


@_handles("Gradient", "ai.onnx.preview.training")
def gradient(here: Handled) -> list[Operand]:
    from mlcompute.onnx.gradient import gradient_row

    importer, attributes = here.importer, here.attributes
    row = gradient_row(importer.history, attributes, list(here.node.input), here.names.find)
    use = Use(row, 1, attributes, row.operands, row.names, len(attributes["xs"]))
    return importer.apply(use, here.label, list(here.node.output))
