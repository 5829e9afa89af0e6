"""Arithmetic on the tensors of a graph: functions over a tensor, which `Tensor` has as operators and methods.

Each adds plain layers to the graph the tensor belongs to; `building/expressions.py` says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeAlias

from mlcompute.enums import DataType
from mlcompute.errors import GraphError
from mlcompute.layers.factories import named
from mlcompute.layers.layer_state import layer_state
from mlcompute.runtime.tensor_state import state_of

if TYPE_CHECKING:
    from mlcompute.building import expressions
    from mlcompute.building.choices import ComparisonName
    from mlcompute.graph import Graph
    from mlcompute.tensor import Tensor
    from mlcompute.tensor_data import Array
else:

    class _ImportedAtFirstUse:
        """Layers are made of tensors, so what makes layers cannot be imported before there are tensors."""

        def __getattr__(self, name: str) -> Any:
            from mlcompute.building import expressions

            return getattr(expressions, name)

    expressions = _ImportedAtFirstUse()

Axis = int | Sequence[int] | None
Index: TypeAlias = "int | slice | EllipsisType | list[int] | Array | None"


def graph(self: Tensor) -> Graph | None:
    """The graph the tensor belongs to: that of the layer that computes it, or the one it is an input of; None: none."""
    state = state_of(self)
    reference = state.graph_reference if state.node is None else layer_state(state.node.layer).graph_reference
    return reference() if reference is not None else None


# Arithmetic -----------------------------------------------------------------------------------------------------------


def _arithmetic(kind: Any, self: Tensor, other: Tensor | float | Array) -> Tensor:
    return expressions.arithmetic(kind, self, other)


def _reversed(kind: Any, self: Tensor, other: float | Array) -> Tensor:
    return expressions.arithmetic(kind, other, self)


def _function(kind: Any, self: Tensor) -> Tensor:
    return expressions.arithmetic(kind, self)


def _activation(kind: Any, self: Tensor) -> Tensor:
    return expressions.activation(kind, self)


add = named(_arithmetic, "add", "x + y with broadcasting; one of them may be a number.")
add_to = named(_reversed, "add", "y + x.")
subtract = named(_arithmetic, "subtract", "x - y.")
subtract_from = named(_reversed, "subtract", "y - x.")
multiply = named(_arithmetic, "multiply", "x y, element by element.")
multiply_with = named(_reversed, "multiply", "y x, element by element.")
divide = named(_arithmetic, "divide", "x / y.")
divide_into = named(_reversed, "divide", "y / x.")
floor_divide = named(_arithmetic, "floor_divide", "x // y, rounded down.")
floor_divide_into = named(_reversed, "floor_divide", "y // x, rounded down.")
remainder = named(_arithmetic, "remainder", "x % y, of y's sign.")
remainder_of = named(_reversed, "remainder", "y % x, of x's sign.")
power = named(_arithmetic, "pow", "x to the power of y.")
power_of = named(_reversed, "pow", "y to the power of x.")
exp = named(_function, "exp", "e^x")
log = named(_function, "log", "The natural logarithm.")
sqrt = named(_function, "sqrt", "The square root.")
absolute = named(_activation, "absolute", "|x|")
sigmoid = named(_activation, "sigmoid", "1 / (1 + e^-x)")
tanh = named(_activation, "tanh", "tanh x")
relu = named(_activation, "relu", "max(x, 0)")


def negate(self: Tensor) -> Tensor:
    """-x"""
    return expressions.arithmetic("multiply", self, -1)


def matmul(self: Tensor, other: Tensor | Array) -> Tensor:
    """x y, products of matrices.   x (*, m, k)   y (*, k, n)   ->   (*, m, n);   of a vector y (k,)   ->   (*, m)"""
    return expressions.matmul(self, other)


def matmul_from(self: Tensor, other: Array) -> Tensor:
    """y x, products of matrices."""
    return expressions.matmul(other, self)


def clip(self: Tensor, low: float | None = None, high: float | None = None) -> Tensor:
    """x, but `low` where it is below and `high` where it is above; None: no bound on that side."""
    return expressions.clip(self, low, high)


def softmax(self: Tensor, axis: int) -> Tensor:
    """e^x / sum e^x along an axis."""
    return expressions.softmax(self, axis, logarithm=False)


def log_softmax(self: Tensor, axis: int) -> Tensor:
    """x - log sum e^x along an axis: the logarithm of the softmax, with all its digits."""
    return expressions.softmax(self, axis, logarithm=True)


def detach(self: Tensor) -> Tensor:
    """The same values without a gradient, for computed targets for example."""
    return expressions.detach(self)


# Comparison and logic -------------------------------------------------------------------------------------------------


def _compare(kind: Any, self: Tensor, other: Tensor | float | Array) -> Tensor:
    return expressions.compare(kind, self, other)


def _equality(kind: Any, self: Tensor, other: Tensor | float | Array) -> Tensor:
    """Called by name, so there is no other operand that Python could ask."""
    found = expressions.compare(kind, self, other)
    if not isinstance(found, type(self)):
        raise TypeError(f"Tensor.{kind}: needs a Tensor, a number or an array, not {type(other).__name__}")
    return found


def _logical(sign: str, self: Tensor, other: Tensor | Array) -> Tensor:
    return expressions.logical(_SIGNS[sign], sign, self, other)


_SIGNS: dict[str, ComparisonName] = {"&": "logical_and", "|": "logical_or", "^": "logical_xor"}

less = named(_compare, "less", "BOOLEAN: x < y.")
less_or_equal = named(_compare, "less_or_equal", "BOOLEAN: x <= y.")
greater = named(_compare, "greater", "BOOLEAN: x > y.")
greater_or_equal = named(_compare, "greater_or_equal", "BOOLEAN: x >= y.")
equal = named(
    _equality,
    "equal",
    "BOOLEAN: is x = y? (`x == y` asks whether both are the same tensor: tensors are keys of dictionaries.)",
)
not_equal = named(_equality, "not_equal", "BOOLEAN: is x unlike y?")
logical_and = named(_logical, "&", "BOOLEAN: are both true?", "logical_and")
logical_or = named(_logical, "|", "BOOLEAN: is one of them true?", "logical_or")
logical_xor = named(_logical, "^", "BOOLEAN: is exactly one of them true?", "logical_xor")


def logical_not(self: Tensor) -> Tensor:
    """BOOLEAN: is it false?"""
    return expressions.logical("logical_not", "~", self)


def truth(self: Tensor) -> bool:
    """True, as of any object; of what a comparison computes there is no truth while the graph is built."""
    if state_of(self).producer is not None and self.descriptor.data_type == DataType.BOOLEAN:
        raise GraphError(
            f"Tensor '{self.label}': whether it is true is known only when the graph runs",
            fix="choose with mlc.where(condition, x, y); join conditions with & and |; read `.data` after a run",
        )
    return True


# Reduction ------------------------------------------------------------------------------------------------------------


def _reduce(kind: Any, self: Tensor, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    return expressions.reduce(kind, self, axis, keepdims)


mean = named(_reduce, "mean", "The mean along one axis or several; None: of all elements, (1,).")
sum = named(_reduce, "sum", "The sum along one axis or several; None: of all elements, (1,).")
max = named(_reduce, "max", "The largest element along one axis or several; None: of all, (1,).")
min = named(_reduce, "min", "The smallest element along one axis or several; None: of all, (1,).")


def argmax(self: Tensor, axis: int, *, keepdims: bool = False) -> Tensor:
    """The index of the first largest element along an axis, as INT64; no gradient passes."""
    return expressions.argmax(self, axis, keepdims)


def var(self: Tensor, axis: Axis = None, *, correction: int = 0, keepdims: bool = False) -> Tensor:
    """The variance along one axis or several; None: of all elements, (1,).

    correction  what is taken off the number of elements to divide by: 0 as in NumPy, Keras and batch normalization; 1
                is PyTorch's default
    """
    return expressions.variance(self, axis, correction, keepdims)


# Shape ----------------------------------------------------------------------------------------------------------------


def reshape(self: Tensor, *shape: int | Sequence[int]) -> Tensor:
    """The same elements, row by row, in another shape; one extent may be -1: whatever is left over."""
    return expressions.reshape(self, shape)


def flatten(self: Tensor, first: int = 1) -> Tensor:
    """All axes from `first` on become one. Unless told otherwise, the axis of the samples stays."""
    return expressions.flatten(self, first)


def transpose(self: Tensor, *axes: int | Sequence[int]) -> Tensor:
    """Axes in another order: axis k of the result is axis axes[k] of x. Two axes of more: these are exchanged."""
    return expressions.transpose(self, axes)


def transposed(self: Tensor) -> Tensor:
    """A matrix with rows and columns exchanged."""
    return expressions.transposed(self)


def split(self: Tensor, lengths: Sequence[int], axis: int) -> list[Tensor]:
    """Consecutive pieces of these lengths along an axis."""
    return expressions.split(self, axis, lengths=lengths)


def chunk(self: Tensor, count: int, axis: int) -> list[Tensor]:
    """Split an axis into `count` pieces of equal length; the last may be smaller."""
    return expressions.split(self, axis, count=count)


def gather(self: Tensor, axis: int, indices: Tensor) -> Tensor:
    """y[i, j] = x[i, indices[i, j]] for axis 1, and so on; the indices have the rank of x, y is shaped as they are."""
    return expressions.gather(self, axis, indices)


def index(self: Tensor, key: Index | tuple[Index, ...]) -> Tensor:
    """x[:, 1:], x[:, -1], x[..., None], x[:, ::-1], x[:, [0, 2]]: as in NumPy; one list of whole numbers at most."""
    from mlcompute.building.indexing import index as indexed  # as `expressions`, which it is made of

    return indexed(self, key)
