"""The operator table: one row per ONNX operator, each written once, in ops.

A row's function describes the operator on symbolic values. The same function gives the shapes at import, the steps of
the layer at compile time, the gradient (ops have derivatives) and, on known arrays, the folded constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute import ops
from mlcompute.errors import CompileError, ShapeError
from mlcompute.onnx.budget import affordable
from mlcompute.ops.indexing import INT64
from mlcompute.ops.op import Array, Shape, Value

if TYPE_CHECKING:
    from mlcompute.onnx.operands import Operand, Scope, Use

Answer = Value | Array | None
Function = Callable[["Call"], "Answer | Sequence[Answer]"]


def through_double(x: Value, function: Callable[[Value], Value]) -> Value:
    """function(x); of integers in float64, cut toward zero and kept in the range of their type."""
    if x.is_floating:
        return function(x)
    y = function(ops.convert(x, np.dtype(np.float64)))
    if x.dtype.kind in "iu":
        bounds = np.iinfo(x.dtype.str)
        y = ops.minimum(ops.maximum(y, float(bounds.min)), float(bounds.max))
    return ops.convert(y, x.dtype)


class NeedsValueError(CompileError):
    """An operator has to know the numbers of an operand at import, and they are not known."""

    def __init__(self, message: str, *, operand: str = "", **facts: Any) -> None:
        super().__init__(message, **facts)
        self.operand = operand


class NotImportedError(CompileError):
    """An operator, or this use of it, is outside what a static graph of ops can say; the reason is the message."""


class Call:
    """One use of an operator while it is described: its operands as values or, where known, as arrays.

    batch   (samples at import, samples now) when a smaller batch is described than the model was imported for
    """

    def __init__(self, use: Use, scope: Scope) -> None:
        self._use, self._scope = use, scope
        self.kind, self.version, self.attributes, self.names = use.row.name, use.version, use.attributes, use.names
        self.count, self.output_count = len(use.operands), use.output_count
        self.trace, self.batch = scope.trace, scope.batch
        self.training, self.uniform = scope.training, scope.uniform

    def _operand(self, index: int) -> Operand | None:
        return self._use.operands[index] if index < self.count else None

    def optional(self, index: int) -> Value | None:
        """The value of an operand; None when it was left out."""
        operand = self._operand(index)
        return None if operand is None else self._scope.value_of(operand)

    def __getitem__(self, index: int) -> Value:
        value = self.optional(index)
        if value is None:
            raise ShapeError(f"{self.kind}: operand {index} is missing")
        return value

    def has(self, index: int) -> bool:
        return index < self.count and bool(self.names[index])

    def all_values(self) -> list[Value]:
        return [self[index] for index in range(self.count)]

    def array(self, index: int) -> Array:
        """The numbers of an operand, known at import; NeedsValueError when they are not."""
        found = self._scope.numbers(self._operand(index))
        if found is None:
            name = self.names[index] if index < len(self.names) else ""
            raise NeedsValueError(
                f"{self.kind}: the numbers of operand {index} '{name}' must be known at import",
                operand=name,
                fix=f"give them: load(..., constants={{{name!r}: array}})",
            )
        return found

    def known(self, index: int) -> Array | None:
        """The numbers of an operand when they are already known; never asks for more."""
        return self._scope.peek(self._operand(index))

    def follows(self, index: int) -> bool:
        """Was an operand computed from shapes, and so is right for the batch that is described?"""
        return getattr(self._operand(index), "made", None) is not None

    def shape_then(self, index: int) -> Shape:
        """The shape of an operand when the model was imported."""
        shape: Shape = getattr(self._operand(index), "shape", ())
        return shape

    def integers(self, index: int, name: str = "", default: Sequence[int] | None = None) -> list[int]:
        """A list of whole numbers that newer versions take as an operand and older ones as an attribute."""
        if name and name in self.attributes:
            return [int(number) for number in self.attributes[name]]
        if not self.has(index):
            if default is None:
                raise ShapeError(f"{self.kind}: {name or f'operand {index}'} is missing")
            return list(default)
        return [int(number) for number in self.array(index).reshape(-1)]

    def number(self, index: int, default: float) -> float:
        """One number of an operand; the default when it was left out."""
        return self.array(index).reshape(-1)[0].item() if self.has(index) else default

    def attribute(self, name: str, default: Any = None) -> Any:
        return self.attributes.get(name, default)

    def shape_now(self, shape: Sequence[int], index: int) -> list[int]:
        """A shape that operand `index` or an attribute gives, for the batch that is described.

        One that the model computes from other shapes is right; of one that is written down, the first extent counts
        samples.
        """
        found = list(shape)
        if self.follows(index):
            return found
        if self.batch is not None and found and found[0] > 0 and found[0] % self.batch[0] == 0:
            found[0] = found[0] // self.batch[0] * self.batch[1]
        return found

    def constant(self, array: Any, dtype: np.dtype[Any] | type | None = None) -> Value:
        return self.trace.constant(array, None if dtype is None else np.dtype(dtype))

    def affordable(self, *extents: int) -> None:
        """Refuse to build a constant of these extents that takes more memory than the import may."""
        affordable(self.trace, *extents)

    def wants(self, output: int) -> bool:
        return output < self.output_count


@dataclass(frozen=True)
class Row:
    """An operator: its function, and what is known about gradients.

    trains   do gradients flow from its results to its operands?
    frozen   operands that are never trained although they are floating: limits, statistics, scales
    needs    operands whose numbers must be known at import
    weights  operands where a constant of the model is a weight, even one that is not stored as such
    note     what is not imported, in words
    caution  what to know about one use of it, where programs compute it in different ways
    """

    name: str
    domain: str
    function: Function
    trains: bool = True
    frozen: frozenset[int] = frozenset()
    needs: frozenset[int] = frozenset()
    weights: frozenset[int] = frozenset()
    note: str = ""
    caution: Callable[[Any], str] | None = None


ROWS: dict[tuple[str, str], Row] = {}

#: Operators that are not imported by design, with the reason.
BY_DESIGN: dict[tuple[str, str], str] = {}


def operator(
    *names: str,
    domain: str = "",
    trains: bool = True,
    frozen: Sequence[int] = (),
    needs: Sequence[int] = (),
    weights: Sequence[int] = (),
    note: str = "",
    caution: Callable[[Any], str] | None = None,
) -> Callable[[Function], Function]:
    """Put an operator into the table."""

    def add(function: Function) -> Function:
        for name in names:
            assert (domain, name) not in ROWS, f"operator {name} is defined twice"
            ROWS[domain, name] = Row(
                name, domain, function, trains, frozenset(frozen), frozenset(needs), frozenset(weights), note, caution
            )
        return function

    return add


def front(axis: int, rank: int, who: str) -> int:
    """An axis counted from the front."""
    if not -rank <= axis < max(rank, 1):
        raise ShapeError(f"{who}: axis {axis} does not exist, the value has rank {rank}")
    return axis % rank if rank else 0


def whole(value: Value) -> Value:
    """Indices as int64."""
    return ops.convert(value, INT64)


def wrapped(indices: Value, extent: int) -> Value:
    """Indices that may count from the end, as indices from the front."""
    indices = whole(indices)
    return ops.select(indices < 0, indices + extent, indices)


def load_rows() -> None:
    """Fill the table."""
    from mlcompute.onnx import operators  # noqa: F401
