"""Arithmetic: one operation on one or two sources, element by element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from mlcompute import ops
from mlcompute.enums import ArithmeticOperation
from mlcompute.errors import DataError, ShapeError
from mlcompute.layers.arguments import constant_for, member, real, same_type
from mlcompute.layers.layer import AS_FLOATS, FLOATS, INDICES, Forward, Layer
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.elementwise import broadcast_shape
from mlcompute.ops.op import Shape, Value, emit
from mlcompute.tensor import TensorDescriptor


def common_shape(layer: Layer, *shapes: Shape) -> Shape:
    """The shape several shapes broadcast to: aligned at the last axis, an extent of 1 repeats."""
    try:
        return broadcast_shape(*shapes)
    except ValueError:
        raise ShapeError(
            f"{layer.who}: the sources {' and '.join(map(str, shapes))} have no common shape",
            expected="from the last axis backwards, equal extents or an extent of 1",
            fix="reshape one of them",
        ) from None


def _multiply_no_nan(x: Value, y: Value) -> Value:
    # Choosing before multiplying keeps NaN and infinities out of the gradients as well.
    return ops.select(ops.equal(y, 0.0), 0.0, x) * y


def _divide_no_nan(x: Value, y: Value) -> Value:
    is_zero = ops.equal(y, 0.0)
    return ops.select(is_zero, 0.0, x) / ops.select(is_zero, 1.0, y)


_BINARY: dict[ArithmeticOperation, Callable[[Value, Value], Value]] = {
    ArithmeticOperation.ADD: ops.add,
    ArithmeticOperation.SUBTRACT: ops.subtract,
    ArithmeticOperation.MULTIPLY: ops.multiply,
    ArithmeticOperation.DIVIDE: ops.divide,
    ArithmeticOperation.POW: ops.pow_,
    ArithmeticOperation.MULTIPLY_NO_NAN: _multiply_no_nan,
    ArithmeticOperation.DIVIDE_NO_NAN: _divide_no_nan,
    ArithmeticOperation.MIN: ops.minimum,
    ArithmeticOperation.MAX: ops.maximum,
    ArithmeticOperation.FLOOR_DIVIDE: ops.floor_divide,
    ArithmeticOperation.REMAINDER: ops.remainder,
}

#: Powers that need no logarithm.
_POWERS: dict[float, Callable[[Value], Value]] = {
    -1.0: lambda x: 1.0 / x,
    0.5: ops.sqrt,
    1.0: lambda x: x,
    2.0: lambda x: x * x,
    3.0: lambda x: x * x * x,
}

#: All others; their ops have their names.
_UNARY: dict[ArithmeticOperation, Callable[[Value], Value]] = {
    operation: partial(emit, operation.name.lower())
    for operation in ArithmeticOperation
    if operation not in _BINARY and operation.name not in ("COUNT", "INVALID")
}

_ROUNDING = frozenset({ArithmeticOperation.FLOOR, ArithmeticOperation.ROUND, ArithmeticOperation.CEIL})
_ON_INTEGERS = _ROUNDING | {
    ArithmeticOperation.ADD,
    ArithmeticOperation.SUBTRACT,
    ArithmeticOperation.MULTIPLY,
    ArithmeticOperation.MIN,
    ArithmeticOperation.MAX,
    ArithmeticOperation.FLOOR_DIVIDE,
    ArithmeticOperation.REMAINDER,
}


class ArithmeticLayer(Layer):
    """z = x op y, or z = op x.   x, y broadcast against each other   ->   z their common shape

    constant        a number that stands for y, so that there is one source: x op constant
    constant_first  it stands for the other: constant op x

    ADD, SUBTRACT, MULTIPLY, DIVIDE, POW, MIN, MAX, FLOOR_DIVIDE, REMAINDER and the NO_NAN pair take two sources, all
    others one. Integers (INT32, INT64) can be added, subtracted, multiplied, compared by MIN and MAX, divided by
    FLOOR_DIVIDE and REMAINDER, with 0 where y is 0, and rounded, which leaves them as they are. REMAINDER has y's sign.
    ROUND takes halves to the even neighbour. The NO_NAN pair gives 0 wherever y is 0.
    Outside an operation's domain the result is NaN or an infinity, as IEEE 754 has it.
    """

    default_label = "Arithmetic"
    source_types = FLOATS | INDICES
    source_count = (1, 2)

    operation = ReadOnly[ArithmeticOperation]("What is computed.")
    constant = ReadOnly[float | None]("The number that is one of the operands; None: both are sources.")
    constant_first = ReadOnly[bool]("Is the constant the first operand?")

    def __init__(
        self, operation: ArithmeticOperation, *, constant: float | None = None, constant_first: bool = False
    ) -> None:
        super().__init__()
        self._operation = member(self.who, "operation", ArithmeticOperation, operation)
        self._constant = None if constant is None else real(self.who, "constant", constant)
        self._constant_first = bool(constant_first)
        self.expect(
            constant is None or self._operation in _BINARY,
            f"{self._operation.name} has one operand, the constant would be a second",
            fix="leave it out",
            error=DataError,
        )
        self.expect(
            constant is not None or not self._constant_first, "constant_first without a constant", error=DataError
        )

    def check_sources(self, sources: Sequence[TensorDescriptor]) -> None:
        wanted = 2 if self._operation in _BINARY and self._constant is None else 1
        self.expect(
            len(sources) == wanted,
            f"{self._operation.name} takes {wanted} source(s), {len(sources)} were given",
        )
        super().check_sources(sources)

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        same_type(self.who, sources)
        kind = sources[0].data_type
        self.expect(
            kind.is_floating or self._operation in _ON_INTEGERS,
            f"{self._operation.name} is not defined for {kind.name}",
            expected="FLOAT32, FLOAT16 or BFLOAT16",
            fix=AS_FLOATS,
            error=DataError,
        )
        if self._constant is not None:
            constant_for(self.who, self._constant, kind)
        shape = common_shape(self, *(source.shape for source in sources))
        if shape == sources[0].shape:
            return [sources[0]]
        return [TensorDescriptor(shape, data_type=kind)]

    def forward(self, run: Forward, *sources: Value) -> Value:
        if self._operation in _BINARY and self._constant is None:
            x, y = sources
            common_shape(self, x.shape, y.shape)
            return _BINARY[self._operation](x, y)
        (x,) = sources
        if self._constant is not None:
            return self._with_constant(x, self._constant)
        if self._operation in _ROUNDING and not x.is_floating:
            return x
        return _UNARY[self._operation](x)

    def _with_constant(self, x: Value, number: float) -> Value:
        if self._operation == ArithmeticOperation.POW and not self._constant_first and number in _POWERS:
            return _POWERS[number](x)
        constant = x.trace.number(number if x.is_floating else int(number), x.dtype)
        return _BINARY[self._operation](*((constant, x) if self._constant_first else (x, constant)))
