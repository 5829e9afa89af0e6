"""Values, steps and the closed table of ops: the language between layers and devices.

A `Value` is a symbolic array, a `Step` is one op applied to values, a `Trace` is a growing list of steps.
Every op says three things in one place: the shape of its result, its NumPy meaning and its derivative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from mlcompute.errors import CompileError
from mlcompute.ops.bfloat16 import FLOAT32 as FLOAT32
from mlcompute.ops.bfloat16 import computed, is_floating

Shape = tuple[int, ...]
Array = np.ndarray[Any, np.dtype[Any]]

BOOL = np.dtype(np.bool_)


class Typed(Protocol):
    """Anything with a shape and a dtype: a `Value`, an `ArrayType` or a NumPy array."""

    @property
    def shape(self) -> Shape: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...


class ArrayType(NamedTuple):
    """What is known of an array before it exists."""

    shape: Shape
    dtype: np.dtype[Any]


class Value:
    """A symbolic array: what a step produces and other steps consume. Arithmetic on it emits steps."""

    __slots__ = ("dtype", "index", "kind", "label", "shape", "trace")

    # Who owns the memory: "temporary" values live in the arena, "constant" ones in the program, the others
    # ("input", "parameter", "state", "scalar") are supplied by whoever runs the program.
    def __init__(self, trace: Trace, index: int, shape: Shape, dtype: np.dtype[Any], kind: str, label: str) -> None:
        self.trace = trace
        self.index = index
        self.shape = shape
        self.dtype = dtype
        self.kind = kind
        self.label = label

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_floating(self) -> bool:
        return is_floating(self.dtype)

    def __repr__(self) -> str:
        return f"%{self.index}:{self.dtype}[{','.join(map(str, self.shape))}]"

    def __add__(self, other: Value | float) -> Value:
        return emit("add", self, other)

    def __radd__(self, other: float) -> Value:
        return emit("add", self, other)

    def __sub__(self, other: Value | float) -> Value:
        return emit("subtract", self, other)

    def __rsub__(self, other: float) -> Value:
        return emit("subtract", other, self)

    def __mul__(self, other: Value | float) -> Value:
        return emit("multiply", self, other)

    def __rmul__(self, other: float) -> Value:
        return emit("multiply", self, other)

    def __truediv__(self, other: Value | float) -> Value:
        return emit("divide", self, other)

    def __rtruediv__(self, other: float) -> Value:
        return emit("divide", other, self)

    def __neg__(self) -> Value:
        return emit("negate", self)

    def __gt__(self, other: Value | float) -> Value:
        return emit("greater", self, other)

    def __ge__(self, other: Value | float) -> Value:
        return emit("greater_or_equal", self, other)

    def __lt__(self, other: Value | float) -> Value:
        return emit("less", self, other)

    def __le__(self, other: Value | float) -> Value:
        return emit("less_or_equal", self, other)


class Kind:
    """What steps of one op have in common whose attributes are equal and whose inputs have the same types.

    types   of their results
    """

    __slots__ = ("attributes", "op", "types")

    def __init__(self, op: Op, attributes: dict[str, Any], types: ArrayType | tuple[ArrayType, ...]) -> None:
        self.op = op
        self.attributes = attributes
        self.types = types


@dataclass(slots=True, eq=False)
class Step:
    """One op on named values. `layer` and `phase` say where it came from, for messages, profiles and pictures.

    kind   the same for steps of a trace that are alike, so that what is asked of all of them can be answered once. A
           step that a pass has made may have none
    """

    op: Op
    inputs: tuple[Value, ...]
    results: tuple[Value, ...]
    attributes: dict[str, Any]
    layer: str = ""
    phase: str = "forward"
    kind: Kind | None = field(default=None, init=False)

    def __repr__(self) -> str:
        results = ", ".join(map(repr, self.results))
        inputs = ", ".join(f"%{value.index}" for value in self.inputs)
        inner = self.attributes.get("steps")
        if inner is not None:  # fused: the ops in order tell more than their values
            return f"{results} = {' + '.join(step.op.name for step in inner)}({inputs})"
        attributes = "".join(f" {name}={value}" for name, value in self.attributes.items())
        return f"{results} = {self.op.name}({inputs}){attributes}"


@dataclass(eq=False)
class Trace:
    """Steps in the order they were described, and the constants they mention."""

    steps: list[Step] = field(default_factory=list)
    constants: dict[Value, Array] = field(default_factory=dict)
    layer: str = ""
    phase: str = "forward"
    _count: int = 0
    _numbers: dict[tuple[object, np.dtype[Any]], Value] = field(default_factory=dict)
    #: By op, types of inputs and attributes.
    _kinds: dict[Hashable, Kind] = field(default_factory=dict)

    def value(self, shape: Iterable[int], dtype: np.dtype[Any], kind: str = "temporary", label: str = "") -> Value:
        self._count += 1
        return Value(self, self._count - 1, tuple(shape), dtype, kind, label)

    def constant(self, array: Any, dtype: np.dtype[Any] | None = None) -> Value:
        """A value known now. Scalars become rank-0 arrays, which broadcast against anything."""
        data = np.array(array, dtype=dtype, order="C")
        data.flags.writeable = False
        value = self.value(data.shape, data.dtype, "constant")
        self.constants[value] = data
        return value

    def clear(self) -> None:
        """Forget everything. Values point to their trace; emptied, it does not point back and goes with the last."""
        self.steps, self.constants, self._numbers, self._kinds = [], {}, {}, {}

    def number(self, number: float, dtype: np.dtype[Any]) -> Value:
        """A scalar constant; the same value for the same number."""
        key = (number or str(number), dtype)  # 0.0 and -0.0 are equal, and yet not the same
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = self.constant(number, dtype)
        return found

    def add(self, op: Op, inputs: tuple[Value, ...], attributes: dict[str, Any]) -> tuple[Value, ...]:
        kind = self.kind(op, inputs, attributes)
        types = kind.types
        if isinstance(types, ArrayType):
            return (self.append(kind, inputs, *types),)
        results = tuple([self.value(type_.shape, type_.dtype) for type_ in types])
        step = Step(op, inputs, results, kind.attributes, self.layer, self.phase)
        step.kind = kind
        self.steps.append(step)
        return results

    def kind(self, op: Op, inputs: tuple[Value, ...], attributes: dict[str, Any]) -> Kind:
        """The kind of a step. The op's rule is asked once, and all such steps share their attributes."""
        key: Hashable
        if len(inputs) == 2:  # as nearly every step of a large graph has, or one
            a, b = inputs
            key = (op, a.shape, a.dtype, b.shape, b.dtype, *distinct_items(attributes))
        else:
            key = (op, *[(value.shape, value.dtype) for value in inputs], *distinct_items(attributes))
        try:
            known = self._kinds.get(key)
        except TypeError:  # attributes that cannot be compared
            return Kind(op, attributes, op.result(*inputs, **attributes))
        if known is None:
            known = self._kinds[key] = Kind(op, attributes, op.result(*inputs, **attributes))
        return known

    def append(self, kind: Kind, inputs: tuple[Value, ...], shape: Shape, dtype: np.dtype[Any]) -> Value:
        """A step with one result, as nearly every step of a large graph has."""
        result = Value(self, self._count, shape, dtype, "temporary", "")
        self._count += 1
        step = Step(kind.op, inputs, (result,), kind.attributes, self.layer, self.phase)
        step.kind = kind
        self.steps.append(step)
        return result

    def repeat(self, steps: Sequence[PatternStep], values: list[Any]) -> None:
        """Append steps on other values than those they were described with; their results go to the end of `values`."""
        layer, phase, append, number = self.layer, self.phase, self.steps.append, self._count
        for kind, inputs, shape, dtype in steps:
            result = Value(self, number, shape, dtype, "temporary", "")
            step = Step(kind.op, inputs(values), (result,), kind.attributes, layer, phase)
            step.kind = kind
            append(step)
            values.append(result)
            number += 1
        self._count = number


def distinct_items(attributes: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    """Attributes as parts of a key: equal for steps that do the same. 0.0 and -0.0 are equal, and yet not the same."""
    for value in attributes.values():
        if value.__class__ is float and value == 0.0:
            return [(name, str(each) if each.__class__ is float else each) for name, each in attributes.items()]
    return attributes.items()


#: A step with one result: its kind, what takes its inputs out of a list of values, and the result's type.
PatternStep = tuple[Kind, Callable[[Sequence[Any]], tuple[Value, ...]], Shape, "np.dtype[Any]"]


class Op:
    """One row of the op table. Subclass per op; all members are static: an op has no state.

    `result(*inputs, **attributes)`      shape and dtype of what comes out (a tuple for several results)
    `meaning(*arrays, **attributes)`     the same in NumPy: slow, obvious, and the definition
    `derivative(dy, y, *inputs, **attributes)`   a gradient per input (None where none flows), in ops;
                                         for ops with several results `dy` and `y` are tuples, absent dy are None
    `expansion(*inputs, **attributes)`   composite ops only: the same in smaller ops
    """

    name = ""
    family = ""
    #: A result element depends only on the input elements at the same index, so memory may be reused in place.
    elementwise = False
    #: The result is the input's memory seen through other extents and strides.
    is_view = False
    #: Equal inputs give equal results, so two equal steps may become one and constants may be folded.
    is_pure = True

    result: Callable[..., ArrayType | tuple[ArrayType, ...]]
    meaning: Callable[..., Any]
    derivative: Callable[..., Any] | None = None
    expansion: Callable[..., Any] | None = None

    def __repr__(self) -> str:
        return f"<op {self.name}>"


#: The closed table: name -> op. Filled by the modules of this package and by nothing else.
TABLE: dict[str, Op] = {}


def register(name: str, family: str) -> Callable[[type[Op]], type[Op]]:
    """Class decorator that puts an op into the table."""

    def add(cls: type[Op]) -> type[Op]:
        assert name not in TABLE, f"op {name!r} is defined twice"
        cls.name, cls.family = name, family
        TABLE[name] = cls()
        return cls

    return add


def no_derivative(layer: str, op: str) -> CompileError:
    """The error for an op that no gradient passes."""
    return CompileError(
        f"layer '{layer}': {op} has no derivative, and a gradient has to pass it",
        fix="leave the layer out of what a gradient is taken of twice, or stop the gradient before it",
    )


def emit(name: str, *inputs: Value | float, **attributes: Any) -> Value:
    """Append one single-result step to the trace of its inputs; numbers become constants of the fitting dtype."""
    values = _as_values(inputs)
    trace, op = values[0].trace, TABLE[name]
    kind = trace.kind(op, values, attributes)
    types = kind.types
    if isinstance(types, ArrayType):
        return trace.append(kind, values, *types)
    return trace.add(op, values, attributes)[0]


def emit_all(name: str, *inputs: Value | float, **attributes: Any) -> tuple[Value, ...]:
    """Like `emit`, for ops with several results."""
    values = _as_values(inputs)
    return values[0].trace.add(TABLE[name], values, attributes)


def _as_values(inputs: tuple[Value | float, ...]) -> tuple[Value, ...]:
    """The inputs with numbers as constants, in the dtype of the first value."""
    for value in inputs:
        if value.__class__ is not Value:
            break
    else:
        return inputs  # type: ignore[return-value]
    like = next(value for value in inputs if isinstance(value, Value))
    trace, dtype = like.trace, like.dtype
    return tuple([value if isinstance(value, Value) else trace.number(value, dtype) for value in inputs])


def inner_steps(step: Step) -> tuple[Step, ...]:
    """The steps a fused step consists of. It may share those of a pattern: then they are filled in with its values."""
    inner: tuple[Step, ...] = step.attributes["steps"]
    names = step.attributes["inputs"]
    if names is step.inputs:
        return inner
    trace, actual = step.inputs[0].trace, dict(zip(names, step.inputs, strict=True))
    filled = []
    for one in inner:
        inputs = tuple([actual[value] for value in one.inputs])
        results = tuple([trace.value(value.shape, value.dtype) for value in one.results])
        actual.update(zip(one.results, results, strict=True))
        filled.append(Step(one.op, inputs, results, one.attributes, step.layer, step.phase))
    return tuple(filled)


def with_inputs(step: Step, inputs: tuple[Value, ...]) -> Step:
    """The same step of other values, which the steps it consists of read, too. Its results stay what they are."""
    attributes = step.attributes
    if attributes.get("inputs") is step.inputs:
        renamed = dict(zip(step.inputs, inputs, strict=True))
        attributes = {
            **attributes,
            "steps": tuple(
                with_inputs(inner, tuple([renamed.get(value, value) for value in inner.inputs]))
                for inner in attributes["steps"]
            ),
            "inputs": inputs,
        }
    return Step(step.op, inputs, step.results, attributes, step.layer, step.phase)


def overwritten_by(step: Step) -> tuple[Value, ...]:
    """Parameters and states a step overwrites."""
    if step.op.is_pure:
        return ()
    inner = step.attributes.get("steps")
    if inner is None:
        return step.inputs[:1]
    places = step.attributes.get("targets")
    if places is not None:  # a pattern's, in which other values stand for its own
        return tuple([step.inputs[place] for place in places])
    return tuple([one.inputs[0] for one in inner if not one.op.is_pure])


def run_meaning(step: Step, arrays: Sequence[Array]) -> tuple[Array, ...]:
    """A step's results in NumPy, in exactly the dtypes the step promises."""
    if not step.op.is_view:  # a view shows its source's memory, whatever lies there
        written = overwritten_by(step)  # in place, in its own type
        arrays = [
            array if value in written else computed(array) for value, array in zip(step.inputs, arrays, strict=True)
        ]
    results = step.op.meaning(*arrays, **step.attributes)
    if not isinstance(results, tuple):
        results = (results,)
    return tuple(
        np.asarray(array).astype(value.dtype, copy=False) for array, value in zip(results, step.results, strict=True)
    )
