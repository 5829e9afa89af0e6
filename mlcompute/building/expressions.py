"""What `0.5 * x + y`, `x[:, 1:]` and `x.mean(-1)` become: plain layers, named as builders name them.

They go into the graph the tensors belong to: that of the layer that computes a tensor, or that it is an input of. Of a
graph and one that is made of it (`TrainingGraph([graph])`), into the outer one. `with graph:` says where, whatever the
tensors belong to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mlcompute.building.builder import Operand, build, building, constant_like, is_operand, label_constants
from mlcompute.building.choices import AnyActivationName, ArithmeticName, ComparisonName, LossReduction, ReductionName
from mlcompute.building.contents import undone_on_error
from mlcompute.enums import DataType, SoftmaxOperation
from mlcompute.errors import GraphError, ShapeError
from mlcompute.foreign_names import answers_foreign_keywords
from mlcompute.layers.arguments import whole
from mlcompute.layers.concatenation import ConcatenationLayer
from mlcompute.layers.indexing import GatherLayer
from mlcompute.layers.shaping import ReshapeLayer, TransposeLayer
from mlcompute.layers.softmax import SoftmaxLayer
from mlcompute.layers.split import SplitLayer
from mlcompute.layers.stop_gradient import StopGradientLayer
from mlcompute.tensor import Tensor
from mlcompute.tensor_data import Array, ArrayLike

if TYPE_CHECKING:
    from mlcompute.graph import Graph

__all__ = ["concatenate", "cross_entropy", "maximum", "minimum", "stack", "where"]


#: Python asks the other operand, and then says which types do not go together.
_NOT_MINE = cast("Tensor", NotImplemented)


def graph_of(who: str, *operands: object) -> Graph:
    """The graph that an expression of these operands is added to."""
    if building():
        return building()[-1]
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    graphs = list(dict.fromkeys(tensor.graph for tensor in tensors if tensor.graph is not None))
    if not graphs:
        label = tensors[0].label if tensors else "x"
        raise GraphError(
            f"{who}: the tensor '{label}' belongs to no graph",
            fix="make it with graph.input(shape, name), or write the expression inside `with graph:`; "
            "numbers that are known now are `tensor.data`",
        )
    outer = [graph for graph in graphs if set(graphs) <= {graph, *_inside(graph)}]
    if not outer:
        raise GraphError(
            f"{who}: the operands belong to {len(graphs)} graphs",
            operands=", ".join(f"'{tensor.label}'" for tensor in tensors),
            fix="say which graph the result belongs to: write the expression inside `with graph:`",
        )
    return outer[0]


def _inside(graph: Graph) -> list[Graph]:
    """The graphs a graph is made of, at any depth."""
    return [inner for part in graph.graph_objects for inner in (part, *_inside(part))]


def _tensor(who: str, x: object) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"{who}: needs a Tensor, not {type(x).__name__}")
    return x


def _tensors(who: str, given: Sequence[Tensor]) -> list[Tensor]:
    if not isinstance(given, Iterable):
        raise TypeError(f"{who}: needs a list of Tensors, not one {type(given).__name__}")
    return [_tensor(who, tensor) for tensor in given]


# Element by element ---------------------------------------------------------------------------------------------------


def arithmetic(kind: ArithmeticName, *operands: Operand) -> Tensor:
    """One operation on one or two operands; NotImplemented, for Python to say so, where one cannot be an operand."""
    if not all(map(is_operand, operands)):
        return _NOT_MINE
    return graph_of(f"Tensor.{kind}", *operands).arithmetic(kind, *operands)


def compare(kind: ComparisonName, *operands: Operand) -> Tensor:
    """One comparison."""
    if not all(map(is_operand, operands)):
        return _NOT_MINE
    return graph_of(f"Tensor.{kind}", *operands).compare(kind, *operands)


def logical(kind: ComparisonName, sign: str, *operands: Operand) -> Tensor:
    """& | ^ ~ of what is true or false. Of whole numbers they would be operations on bits, which there are none of."""
    for one in operands:
        if isinstance(one, Tensor) and one.descriptor.data_type != DataType.BOOLEAN:
            raise TypeError(
                f"{sign} of the tensor '{one.label}', which is {one.descriptor.data_type.name}: it is for BOOLEAN "
                "tensors; compare first, as in (x > 0) & (y != 3), with parentheses"
            )
        if not isinstance(one, Tensor) and np.ndim(one) == 0:
            return _NOT_MINE
    return compare(kind, *operands)


def activation(kind: AnyActivationName, x: Tensor, **constants: Any) -> Tensor:
    """One function of every element."""
    return graph_of(f"Tensor.{kind}", x).activation(x, kind, **constants)


def matmul(x: Tensor | Array, y: Tensor | Array) -> Tensor:
    """Products of matrices; NotImplemented for what is no matrix."""
    if not (is_operand(x) and is_operand(y)) or np.isscalar(x) or np.isscalar(y):
        return _NOT_MINE
    graph = graph_of("Tensor.matmul", x, y)
    first, second = constant_like("Tensor.matmul", x, y), constant_like("Tensor.matmul", y, x)
    with graph, undone_on_error(graph):
        # A vector is a row on the left and a column on the right; the axis it was given goes again.
        rows = first[None, ...] if len(first.shape) == 1 else first
        columns = second[..., None] if len(second.shape) == 1 else second
        result = label_constants(graph.matmul(rows, columns), (first, second), (x, y))
        rank = len(result.shape)
        kept = [axis for axis in range(rank) if not (axis == rank - 2 and rows is not first)]
        kept = [axis for axis in kept if not (axis == rank - 1 and columns is not second)]
        if len(kept) == rank:
            return result
        return build(graph, arranged(result.shape, [[axis] for axis in kept]), [result], "", "reshape")


def clip(x: Tensor, low: float | None, high: float | None) -> Tensor:
    """x within bounds."""
    if low is None and high is None:
        raise ShapeError("Tensor.clip: neither low nor high is given", fix="give one of them, or both")
    bounds = -math.inf if low is None else low, math.inf if high is None else high
    return activation("clamp", x, min_value=bounds[0], max_value=bounds[1])


def softmax(x: Tensor, axis: int, *, logarithm: bool) -> Tensor:
    """Probabilities along an axis, or their logarithms."""
    operation = SoftmaxOperation.LOG_SOFTMAX if logarithm else SoftmaxOperation.SOFTMAX
    layer = SoftmaxLayer(operation, axis)
    return build(graph_of("Tensor.softmax", x), layer, [x], "", "log_softmax" if logarithm else "softmax")


def detach(x: Tensor) -> Tensor:
    """The same numbers without a gradient."""
    return build(graph_of("Tensor.detach", x), StopGradientLayer(), [x], "", "detach")


def where(condition: Tensor | Array, x: Operand, y: Operand) -> Tensor:
    """Element by element x where the condition holds, else y, with broadcasting.

    condition  a tensor, or an array of booleans that is constant, such as a mask

    >>> import mlcompute as mlc
    >>> graph = mlc.Graph()
    >>> x = graph.input((2, 3), "x")
    >>> mlc.where(x > 0, x, 0.1 * x).descriptor.shape
    (2, 3)
    """
    return graph_of("where", condition, x, y).where(condition, x, y)


def maximum(x: Operand, y: Operand) -> Tensor:
    """The larger of two, element by element, with broadcasting."""
    return graph_of("maximum", x, y).arithmetic("max", x, y)


def minimum(x: Operand, y: Operand) -> Tensor:
    """The smaller of two, element by element, with broadcasting."""
    return graph_of("minimum", x, y).arithmetic("min", x, y)


def cross_entropy(
    logits: Tensor,
    labels: Tensor | Array,
    *,
    ignore_index: int | None = None,
    class_weights: Tensor | ArrayLike | None = None,
    label_smoothing: float = 0.0,
    weights: Tensor | None = None,
    reduction: LossReduction = "mean",
    class_axis: int | None = None,
) -> Tensor:
    """-log softmax(logits)[label], averaged: `Graph.cross_entropy`, for functions that are given tensors.

    >>> import mlcompute as mlc
    >>> graph = mlc.Graph()
    >>> y = graph.dense(graph.input((8, 4), "x"), 3)
    >>> trainer = mlc.Trainer(graph, loss=lambda y, t: mlc.cross_entropy(y, t, label_smoothing=0.1))
    """
    return graph_of("cross_entropy", logits, labels).cross_entropy(
        logits, labels, ignore_index=ignore_index, class_weights=class_weights, label_smoothing=label_smoothing,
        weights=weights, reduction=reduction, class_axis=class_axis,
    )  # fmt: skip


# Reduction ------------------------------------------------------------------------------------------------------------


def reduce(kind: ReductionName, x: Tensor, axis: int | Sequence[int] | None, keepdims: bool) -> Tensor:
    """The elements along some axes become one."""
    axes = range(len(x.shape)) if axis is None else axis
    return graph_of(f"Tensor.{kind}", x).reduce(x, kind, dimensions=axes, keeps_dimensions=keepdims)


def argmax(x: Tensor, axis: int, keepdims: bool) -> Tensor:
    """Where the first largest element along an axis is, as whole numbers: the layer gives floating ones."""
    found = reduce("argmax", x, axis, keepdims)
    return graph_of("Tensor.argmax", found).cast(found, DataType.INT64)


def variance(x: Tensor, axis: int | Sequence[int] | None, correction: int, keepdims: bool) -> Tensor:
    """mean (x - mean x)^2, for a correction times n / (n - correction)."""
    graph = graph_of("Tensor.var", x)
    with undone_on_error(graph):
        difference = x - reduce("mean", x, axis, True)
        result = reduce("mean", difference**2, axis, keepdims)
        if whole("Tensor.var", "correction", correction) == 0:
            return result
        given = range(len(x.shape)) if axis is None else [axis] if isinstance(axis, int) else axis
        axes = [one % len(x.shape) for one in given]
        count = math.prod(x.shape[one] for one in axes)
        if 0 in axes or count <= correction:
            raise ShapeError(
                f"Tensor.var: a correction of {correction} along axes {axes} of {x.shape}",
                expected="more elements than the correction, and not those of the batch, of which a run may have fewer",
                fix="leave correction out",
            )
        if any(tensor.varies for tensor in graph.input_tensors):
            number = reduce("sum", where(x.equal(x), 1.0, 1.0), axis, keepdims)
            return result * number / (number - correction)
        return result * (count / (count - correction))


# Shape ----------------------------------------------------------------------------------------------------------------


def _flat(who: str, numbers: Sequence[Any]) -> tuple[int, ...]:
    """f(2, 3) and f((2, 3)) mean the same."""
    if len(numbers) == 1 and isinstance(numbers[0], Sequence):
        numbers = numbers[0]
    return tuple(whole(who, "an axis or extent", number, -(1 << 62)) for number in numbers)


def arranged(shape: Sequence[int], axes: Sequence[Sequence[int]]) -> ReshapeLayer:
    """The layer whose axes are made of these, for every size they have in a run; [] is a new one."""
    if not axes:
        return ReshapeLayer([1], [[]])
    return ReshapeLayer([math.prod(shape[axis] for axis in group) for group in axes], axes)


def gather(x: Tensor, axis: int, indices: Tensor) -> Tensor:
    """Elements of x at indices along an axis."""
    layer = GatherLayer(axis)
    return build(graph_of("Tensor.gather", x, indices), layer, [x, _tensor("Tensor.gather", indices)], "", "gather")


def reshape(x: Tensor, shape: Sequence[int | Sequence[int]]) -> Tensor:
    """The same elements in another shape."""
    layer = ReshapeLayer(_flat("Tensor.reshape", shape))
    return build(graph_of("Tensor.reshape", x), layer, [x], "", "reshape")


def flatten(x: Tensor, first: int) -> Tensor:
    """All axes from `first` on become one."""
    rank = len(x.shape)
    if not -rank <= whole("Tensor.flatten", "first", first, -rank) < rank:
        raise ShapeError(f"Tensor.flatten: first is {first}, the tensor has {rank} axes", expected=f"0 to {rank - 1}")
    axes = range(rank)
    layer = arranged(x.shape, [*([axis] for axis in axes[:first]), axes[first:]])
    return build(graph_of("Tensor.flatten", x), layer, [x], "", "flatten")


def transpose(x: Tensor, axes: Sequence[int | Sequence[int]]) -> Tensor:
    """Axes in another order."""
    who, rank = "Tensor.transpose", len(x.shape)
    order = [axis + rank if axis < 0 else axis for axis in _flat(who, axes)] or list(reversed(range(rank)))
    if rank == 2 and order == [0, 1] and axes:
        raise ShapeError(
            f"{who}: (0, 1) of a matrix names its axes in the order they have, or the two to exchange",
            fix="write x.T to exchange them",
        )
    if len(order) == 2 != rank and max(order) < rank and min(order) >= 0:
        first, second = order
        order = list(range(rank))
        order[first], order[second] = second, first
    return build(graph_of(who, x), TransposeLayer(order), [x], "", "transpose")


def transposed(x: Tensor) -> Tensor:
    """Rows and columns exchanged."""
    if len(x.shape) != 2:
        raise ShapeError(
            f"Tensor.T: the tensor '{x.label}' has shape {x.shape}",
            expected="two axes",
            fix="name the axes to exchange: x.transpose(-1, -2)",
        )
    return transpose(x, ())


def split(x: Tensor, axis: int, *, lengths: Sequence[int] | None = None, count: int | None = None) -> list[Tensor]:
    """Consecutive pieces along an axis."""
    if isinstance(lengths, int):
        raise TypeError(
            f"Tensor.split: lengths is {lengths}; x.chunk({lengths}, axis) makes {lengths} pieces, "
            "x.split([2, 3, ...], axis) pieces of these lengths"
        )
    layer = SplitLayer(split_count=count, split_section_lengths=lengths, dimension=axis)
    graph = graph_of("Tensor.split", x)
    build(graph, layer, [x], "", "split")
    return graph.result_tensors(layer)


@answers_foreign_keywords
def concatenate(tensors: Sequence[Tensor], axis: int) -> Tensor:
    """Tensors one after another along an axis, where their extents add up; all others are equal."""
    listed = _tensors("concatenate", tensors)
    return build(graph_of("concatenate", *listed), ConcatenationLayer(axis), listed, "", "concatenate")


@answers_foreign_keywords
def stack(tensors: Sequence[Tensor], axis: int) -> Tensor:
    """Tensors of one shape side by side along an axis of their own.

    >>> import mlcompute as mlc
    >>> graph = mlc.Graph()
    >>> x = graph.input((2, 3), "x")
    >>> mlc.stack([x, 2 * x, 3 * x], axis=1).descriptor.shape
    (2, 3, 3)
    """
    listed = _tensors("stack", tensors)
    if not listed:
        raise ShapeError("stack: there are no tensors")
    rank = len(listed[0].shape)
    place = whole("stack", "axis", axis, -(rank + 1))
    if place > rank:
        raise ShapeError(f"stack: axis is {axis}, the result has {rank + 1} axes", expected=f"{-rank - 1} to {rank}")
    place %= rank + 1
    for number, tensor in enumerate(listed):
        if tensor.shape != listed[0].shape:
            raise ShapeError(
                f"stack: source {number} has shape {tensor.shape}, source 0 has {listed[0].shape}",
                expected="equal shapes",
                fix="mlc.concatenate joins along an axis that is there",
            )
    with graph_of("stack", *listed) as graph, undone_on_error(graph):
        axes = [[axis] for axis in range(rank)]
        axes.insert(place, [])
        longer = [build(graph, arranged(tensor.shape, axes), [tensor], "", "reshape") for tensor in listed]
        return longer[0] if len(longer) == 1 else concatenate(longer, place)
