"""Nodes that speak of other nodes or of sequences: constants, branches, loops, lists, gradients."""

# ruff: noqa: D103  (a handler is the ONNX operator it names: the standard is its docstring)

from __future__ import annotations

from collections.abc import Callable, Sequence
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

Handler = Callable[..., "Sequence[Operand] | None"]
HANDLERS: dict[tuple[str, str], Handler] = {}


def _handles(name: str, domain: str = "") -> Callable[[Handler], Handler]:
    def add(handler: Handler) -> Handler:
        HANDLERS[domain, name] = handler
        return handler

    return add


def shape_of(operand: Operand) -> tuple[int, ...]:
    if isinstance(operand, Known):
        return tuple(operand.array.shape)
    if isinstance(operand, (Source, Derived, Weight)):
        return operand.shape
    raise ShapeError("a sequence has no shape")


def numbers(importer: Importer, operand: Operand | None, what: str, name: str) -> Array:
    """The numbers of an operand that steer the import."""
    found = None if operand is None else known_array(operand, importer.budget)
    if found is None and isinstance(operand, Source):
        found = importer.fixed(operand, name)
    if found is None:
        raise NeedsValueError(f"{what} '{name}' must be known at import", operand=name)
    return found


@_handles("Constant")
def constant(
    importer: Importer, node: NodeProto, operands: list[Operand], names: Names, place: Place, label: str
) -> list[Operand]:
    attributes = importer.attributes(node, place)
    for name, dtype in (
        ("value_float", np.float32),
        ("value_floats", np.float32),
        ("value_int", np.int64),
        ("value_ints", np.int64),
    ):
        if name in attributes:
            return [Known(np.asarray(attributes[name], dtype), node.output[0])]
    if "value" not in attributes:
        raise NotImportedError("constants of strings and sparse tensors")
    array = attributes["value"]
    name = node.output[0]
    if place.depth == 0 and is_floating(array) and array.ndim:
        # A Constant node is how a model says that something is no weight; only the caller may say otherwise.
        trained = importer.said.get(name, False)
        reason = "trainable= says so" if name in importer.said else STATED
        importer.graph.judgements[name] = Judgement(trained, reason)
        if trained:
            return [weight(importer, array, name)]
    return [Known(array, name)]


# Branches and loops -------------------------------------------------------------------------------------------------


def _subgraph(importer: Importer, graph: Any, names: Names, place: Place, given: dict[str, Operand]) -> list[Operand]:
    """The results of a sub-graph whose inputs are given."""
    if place.depth > 32:
        raise NotImportedError("sub-graphs are nested too deeply")
    inner = Names(dict(given), names)
    importer.read_initializers(graph, inner)
    before = len(importer.problems)
    below = Place(place.versions, place.attributes, place.prefix, place.depth + 1, place.attends)
    importer.nodes(graph.node, inner, below)
    if len(importer.problems) > before:
        return [Failed() for _ in graph.output]
    answers = []
    for info in graph.output:
        found = inner.find(info.name)
        if found is None:
            raise ShapeError(f"output '{info.name}' of a sub-graph is not defined")
        answers.append(found)
    return answers


@_handles("If")
def if_(
    importer: Importer, node: NodeProto, operands: list[Operand], names: Names, place: Place, label: str
) -> list[Operand]:
    condition = numbers(importer, operands[0], "the condition", node.input[0])
    branch = importer.attributes(node, place)["then_branch" if condition.reshape(-1)[0] else "else_branch"]
    return _subgraph(importer, branch, names, place, {})


def _apply(
    importer: Importer, name: str, operands: Sequence[Operand | None], label: str, outputs: int = 1, **attributes: Any
) -> list[Operand]:
    """One more operator that the model does not name but means."""
    names = [f"{label}:{k}" for k in range(len(operands))]
    use = Use(ROWS["", name], 18, attributes, list(operands), names, outputs)
    return importer.apply(use, f"{label}/{name}", [f"{label}/{name}:{k}" for k in range(outputs)])


def _stacked(importer: Importer, parts: list[Operand], axis: int, label: str) -> Operand:
    """Values one behind the other along a new axis."""
    axes = Known(np.array([axis], np.int64))
    wide = [_apply(importer, "Unsqueeze", [part, axes], label)[0] for part in parts]
    return _apply(importer, "Concat", wide, label, axis=axis)[0]


def _at(importer: Importer, operand: Operand, axis: int, index: int, label: str) -> Operand:
    return _apply(importer, "Gather", [operand, Known(np.array(index, np.int64))], label, axis=axis)[0]


@_handles("Loop")
def loop(
    importer: Importer, node: NodeProto, operands: list[Operand | None], names: Names, place: Place, label: str
) -> list[Operand]:
    body = importer.attributes(node, place)["body"]
    limit = None
    if operands and operands[0] is not None:
        limit = int(numbers(importer, operands[0], "the trip count", node.input[0]).reshape(-1)[0])
    going = True
    if len(operands) > 1 and operands[1] is not None:
        going = bool(numbers(importer, operands[1], "the condition", node.input[1]).reshape(-1)[0])
    carried = list(operands[2:])
    scanned: list[list[Operand]] = [[] for _ in range(len(body.output) - 1 - len(carried))]
    turn = 0
    while going and (limit is None or turn < limit):
        if turn > 1024:
            raise NotImportedError("loops of more than 1024 turns")
        given: dict[str, Operand] = {body.input[0].name: Known(np.array(turn, np.int64))}
        given[body.input[1].name] = Known(np.array(True))
        given.update({info.name: operand for info, operand in zip(body.input[2:], carried, strict=True) if operand})
        answers = _subgraph(importer, body, names, place, given)
        if any(isinstance(answer, Failed) for answer in answers):
            return [Failed() for _ in node.output]
        going = bool(numbers(importer, answers[0], "the condition", body.output[0].name).reshape(-1)[0])
        carried = list(answers[1 : 1 + len(carried)])
        for collected, answer in zip(scanned, answers[1 + len(carried) :], strict=True):
            collected.append(answer)
        turn += 1
    if any(not collected for collected in scanned):
        raise NotImportedError("loops that make no turn but collect results")
    results: list[Operand] = [operand if operand is not None else Failed("left out") for operand in carried]
    return [*results, *(_stacked(importer, collected, 0, label) for collected in scanned)]


@_handles("Scan")
def scan(
    importer: Importer, node: NodeProto, operands: list[Operand], names: Names, place: Place, label: str
) -> list[Operand]:
    attributes = importer.attributes(node, place)
    body, count = attributes["body"], int(attributes["num_scan_inputs"])
    old = place.versions.get("", 9) < 9
    if old:
        return _scan_8(importer, node, operands, names, place, label, body, count)
    states, scanned = operands[: len(operands) - count], operands[len(operands) - count :]
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
        return [_at(importer, value, axis, steps - 1 - step if back else step, label) for value, axis, back in places]

    found = _scanned(importer, body, names, place, states, steps, slices)
    if found is None:
        return [Failed() for _ in node.output]
    results, collected = found
    for parts, axis, back in zip(collected, out_axes, out_back, strict=True):
        rank = len(shape_of(parts[0])) + 1
        results.append(_stacked(importer, parts[::-1] if back else parts, axis % rank, label))
    return results


def _scanned(
    importer: Importer, body: Any, names: Names, place: Place,
    states: Sequence[Operand], steps: int, slices: Callable[[int], list[Operand]],
) -> tuple[list[Operand], list[list[Operand]]] | None:  # fmt: skip
    """The last states, and by output what every step has given; None where a step cannot be imported.

    slices   what a step is given of the values that are scanned
    """
    now = list(states)
    collected: list[list[Operand]] = [[] for _ in body.output[len(now) :]]
    for step in range(steps):
        inputs = zip(body.input, [*now, *slices(step)], strict=True)
        answers = _subgraph(importer, body, names, place, {info.name: operand for info, operand in inputs})
        if any(isinstance(answer, Failed) for answer in answers):
            return None
        now = list(answers[: len(now)])
        for target, answer in zip(collected, answers[len(now) :], strict=True):
            target.append(answer)
    return now, collected


def _scan_8(
    importer: Importer, node: NodeProto, operands: list[Operand], names: Names, place: Place, label: str,
    body: Any, count: int,
) -> list[Operand]:  # fmt: skip
    """The first version: a batch axis in front of everything, and time behind it."""
    if operands[0] is not None:
        raise NotImportedError("Scan of version 8 with sequence lengths")
    values = operands[1:]
    states, scanned = values[: len(values) - count], values[len(values) - count :]
    batch, steps = shape_of(scanned[0])[:2]
    samples: list[list[Operand]] = []
    for sample in range(batch):
        now = [_at(importer, state, 0, sample, label) for state in states]
        rows = [_at(importer, value, 0, sample, label) for value in scanned]

        def slices(step: int, rows: list[Operand] = rows) -> list[Operand]:
            return [_at(importer, value, 0, step, label) for value in rows]

        found = _scanned(importer, body, names, place, now, steps, slices)
        if found is None:
            return [Failed() for _ in node.output]
        samples.append([*found[0], *(_stacked(importer, parts, 0, label) for parts in found[1])])
    outputs = [[results[k] for results in samples] for k in range(len(body.output))]
    return [_stacked(importer, parts, 0, label) for parts in outputs]


# Sequences ------------------------------------------------------------------------------------------------------------


def _items(operand: Operand | None) -> list[Operand]:
    if not isinstance(operand, Listed):
        raise ShapeError("a sequence is expected")
    return operand.items


def _position(importer: Importer, operand: Operand | None, name: str, count: int) -> int:
    index = int(numbers(importer, operand, "the position", name).reshape(-1)[0])
    if not -count <= index < max(count, 1):
        raise ShapeError(f"position {index} in a sequence of {count}")
    return index % count if count else 0


@_handles("SequenceConstruct")
def sequence_construct(importer: Importer, node: NodeProto, operands: list[Operand], *_: Any) -> list[Operand]:
    return [Listed(list(operands))]


@_handles("SequenceEmpty")
def sequence_empty(importer: Importer, node: NodeProto, operands: list[Operand], *_: Any) -> list[Operand]:
    return [Listed([])]


@_handles("SequenceLength")
def sequence_length(importer: Importer, node: NodeProto, operands: list[Operand], *_: Any) -> list[Operand]:
    return [Known(np.array(len(_items(operands[0])), np.int64))]


@_handles("SequenceAt")
def sequence_at(importer: Importer, node: NodeProto, operands: list[Operand], *_: Any) -> list[Operand]:
    items = _items(operands[0])
    return [items[_position(importer, operands[1], node.input[1], len(items))]]


@_handles("SequenceInsert")
def sequence_insert(importer: Importer, node: NodeProto, operands: list[Operand], *_: Any) -> list[Operand]:
    items = list(_items(operands[0]))
    index = len(items)
    if len(operands) > 2 and operands[2] is not None:
        given = int(numbers(importer, operands[2], "the position", node.input[2]).reshape(-1)[0])
        index = given + len(items) if given < 0 else given
    items.insert(index, operands[1])
    return [Listed(items)]


@_handles("SequenceErase")
def sequence_erase(importer: Importer, node: NodeProto, operands: list[Operand], *_: Any) -> list[Operand]:
    items = list(_items(operands[0]))
    index = len(items) - 1
    if len(operands) > 1:
        index = _position(importer, operands[1], node.input[1], len(items))
    del items[index]
    return [Listed(items)]


@_handles("ConcatFromSequence")
def concat_from_sequence(
    importer: Importer, node: NodeProto, operands: list[Operand], names: Names, place: Place, label: str
) -> list[Operand]:
    attributes = importer.attributes(node, place)
    items, axis = _items(operands[0]), int(attributes["axis"])
    if not items:
        raise ShapeError("an empty sequence cannot be joined")
    if attributes.get("new_axis", 0):
        return [_stacked(importer, items, axis % (len(shape_of(items[0])) + 1), label)]
    return _apply(importer, "Concat", items, label, axis=axis)


@_handles("SplitToSequence")
def split_to_sequence(
    importer: Importer, node: NodeProto, operands: list[Operand | None], names: Names, place: Place, label: str
) -> list[Operand]:
    attributes = importer.attributes(node, place)
    x = operands[0]
    assert x is not None
    shape = shape_of(x)
    axis = int(attributes.get("axis", 0)) % len(shape)
    extent, drop = shape[axis], False
    if len(operands) > 1 and operands[1] is not None:
        given = numbers(importer, operands[1], "the lengths", node.input[1])
        each = int(given.reshape(-1)[0])
        if given.ndim == 0 and each < 1:
            raise ShapeError(f"parts of {each}")
        count = -(-extent // each) if given.ndim == 0 else given.size
    else:
        given, each, count, drop = np.array(1), 1, extent, not attributes.get("keepdims", 1)
    importer.budget.spend_nodes(count)  # before a list of so many is made
    lengths = [min(each, extent - k) for k in range(0, extent, each)] if given.ndim == 0 else given.tolist()
    parts = _apply(importer, "Split", [x, Known(np.array(lengths, np.int64))], label, len(lengths), axis=axis)
    if drop:
        axes = Known(np.array([axis], np.int64))
        parts = [_apply(importer, "Squeeze", [part, axes], label)[0] for part in parts]
    return [Listed(parts)]


@_handles("SequenceMap")
def sequence_map(
    importer: Importer, node: NodeProto, operands: list[Operand], names: Names, place: Place, label: str
) -> list[Operand]:
    body = importer.attributes(node, place)["body"]
    count = len(_items(operands[0]))
    collected: list[list[Operand]] = [[] for _ in body.output]
    for index in range(count):
        values = [o.items[index] if isinstance(o, Listed) else o for o in operands]
        given = {info.name: value for info, value in zip(body.input, values, strict=True)}
        for target, answer in zip(collected, _subgraph(importer, body, names, place, given), strict=True):
            target.append(answer)
    return [Listed(parts) for parts in collected]


@_handles("Identity")
def identity(importer: Importer, node: NodeProto, operands: list[Operand], *_: Any) -> list[Operand]:
    if isinstance(operands[0], (Source, Derived, Weight)):  # what a Gradient differentiates may lead through it
        names = list(node.input)
        use = Use(ROWS["", "Identity"], 13, {}, operands, names, 1)
        importer.history.append((use, names, list(node.output)))
    return [operands[0]]


# Gradients ------------------------------------------------------------------------------------------------------------


@_handles("Gradient", "ai.onnx.preview.training")
def gradient(
    importer: Importer, node: NodeProto, operands: list[Operand], names: Names, place: Place, label: str
) -> list[Operand]:
    from mlcompute.onnx.gradient import gradient_row

    attributes = importer.attributes(node, place)
    row = gradient_row(importer.history, attributes, list(node.input), names.find)
    xs = list(attributes["xs"])
    use = Use(row, 1, attributes, row.operands, row.names, len(xs))
    return importer.apply(use, label, list(node.output))
