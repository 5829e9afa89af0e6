"""What normalization kernels over rows and over columns share: loops, ownership of rows, and values in registers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import BFLOAT16, Code, vector, vector_lanes
from mlcompute.devices.cpu.codegen.loops import Line, splat
from mlcompute.devices.cpu.codegen.simd import SimdValue, from_bfloat16, to_bfloat16
from mlcompute.devices.cpu.kernels.elementwise_ops import DType, emit_elementwise, register_type
from mlcompute.devices.loop_nest import Axis, ReductionAxes, Strides, dense_strides, leading_rows, shared_rows
from mlcompute.devices.normalization_group import NormalizationGroup, Place
from mlcompute.ops.bfloat16 import is_bfloat16
from mlcompute.ops.elementwise import FUNCTIONS
from mlcompute.ops.op import Step, Value

_NS_PER_ELEMENT = 0.4
#: Of an elementwise op, and of a value that is read or written beside those of the core.
_NS_PER_OP, _NS_PER_OPERAND = 0.013, 0.02

# Loops --------------------------------------------------------------------------------------------------------------


def normalized_axes(group: NormalizationGroup, places: Sequence[Place] = (), *others: Strides) -> list[Axis]:
    """The loops of a group, in the order in which the normalised value lies in memory.

    Operand 0 is that value, wherever it is computed; then come `places`, then operands of which only strides are given.
    """
    first = group.inputs.get(group.along[0])
    own = dense_strides(group.shape) if first is None else first.strides
    strides = [own, *(place.strides for place in places), *others]
    return list(ReductionAxes.of(group.shape, group.axes, strides, innermost=True).axes)


def owned_rows(group: NormalizationGroup, units: int, threads: int) -> tuple[int, list[Place]]:
    """Rows that threads can own (0: none), and the operands of which they then touch only their own.

    The loops follow the normalised value, so it must be dense. A scale of as many elements as there are rows, but along
    another axis, is read by every thread.
    """
    first = group.inputs.get(group.along[0])
    if first is not None and not first.operand.is_dense:
        return 0, []
    rank, (_, axes) = len(group.shape), leading_rows(group.shape, threads)
    operands = [(place, place.operand) for place in group.places if len(place.operand.shape) == rank]
    like = [place for place, own in operands if own.is_dense and own.shape[:axes] == group.shape[:axes]]
    rows = shared_rows(group.shape, group.axes, [place.operand for place in like], units, threads)
    return rows, like if rows else []


# Registers ----------------------------------------------------------------------------------------------------------

#: A value's elements at an index, of the lanes of a mask.
Source = Callable[[str, "str | None"], SimdValue]
#: The core's result from the elements that it normalises, as floats.
Formula = Callable[..., SimdValue]


def source(line: Line, dtype: DType, *, is_one: bool = False) -> Source:
    """Elements along a line; `is_one`: all are the first one, which is read once, before the loop."""
    line = _bits(line)
    if is_one:
        one = splat(_truth(line.load("0", lanes=1), dtype))
        return lambda index, mask: one
    return lambda index, mask: _truth(line.load(index, mask), dtype)


def scalar(line: Line, dtype: DType) -> SimdValue:
    """The first element of a line."""
    return _truth(_bits(line).load("0", lanes=1), dtype)


def store(line: Line, index: str, register: SimdValue, mask: str | None) -> None:
    """Write elements to a line."""
    if register.element == "i1":
        register = register.let(f"zext {register.type} {register.name} to {vector('i8', register.lanes)}", "i8")
    _bits(line).store(index, register, mask)


def _bits(line: Line) -> Line:
    """Elementwise ops take bfloat16 as its bits."""
    return line._replace(element="i16") if line.element == BFLOAT16 else line


def _truth(loaded: SimdValue, dtype: DType) -> SimdValue:
    """Booleans are bytes in memory and bits in registers."""
    return loaded.differs(0) if register_type(dtype) == "i1" else loaded


class GroupValues:
    """Computes values of a group."""

    def __init__(self, code: Code, group: NormalizationGroup) -> None:
        self.code, self.group = code, group

    def at(
        self,
        targets: Iterable[Value],
        sources: Mapping[Value, Source],
        index: str,
        mask: str | None,
        given: Mapping[Value, SimdValue],
        core: Formula | None = None,
        lanes: int | None = None,
    ) -> list[SimdValue]:
        """Registers of values at an index; what is given, or has a source, is not computed."""
        registers = dict(given)

        def register(value: Value) -> SimdValue:
            known = registers.get(value)
            if known is None:
                load = sources.get(value)
                known = load(index, mask) if load is not None else self._computed(value, register, core, lanes)
                registers[value] = known
            return known

        return [register(value) for value in targets]

    def along(self, registers: Sequence[SimdValue]) -> list[SimdValue]:
        """What the core takes, as floats."""
        pairs = zip(registers, self.group.along, strict=False)
        return [from_bfloat16(each) if is_bfloat16(value.dtype) else each for each, value in pairs]

    def _computed(
        self, value: Value, register: Callable[[Value], SimdValue], core: Formula | None, lanes: int | None
    ) -> SimdValue:
        step = self.group.makers[value]
        if step is self.group.core:
            assert core is not None
            result = core(*self.along([register(each) for each in self.group.along]))
            return to_bfloat16(result) if is_bfloat16(value.dtype) else result
        types, lanes = [each.dtype for each in step.inputs], lanes or vector_lanes()
        names = [register(each).name for each in step.inputs]
        name = emit_elementwise(self.code, step.op.name, step.attributes, names, types, value.dtype, lanes)
        return SimdValue(self.code, name, register_type(value.dtype), lanes)

    @property
    def computed_known(self) -> list[Value]:
        """Known values that steps of the group compute, in order."""
        return [step.results[0] for step in self.group.steps if self.group.is_known(step.results[0])]


def early_values(group: NormalizationGroup) -> dict[Value, Place]:
    """What is stored before the statistics are known, and read from then on.

    Where functions such as exp are on the way to what is normalised, nothing is computed twice: all that does not
    depend on statistics is stored first, and what is normalised lies where a result will be.
    """
    early, value = group.early, group.along[0]
    if not any(step.op.name in FUNCTIONS for step in group.needed([value], early)):
        return early
    early = {each: place for each, place in group.stored.items() if group.core not in group.needed([each])}
    later = (each for each in group.stored if each not in early and each.dtype == value.dtype)
    result = next(later, None)
    if value not in early and result is not None:
        early[value] = group.stored[result]
    return early


def late_values(group: NormalizationGroup) -> dict[Value, Place]:
    """What is stored once the statistics are known."""
    early = early_values(group)
    return {value: place for value, place in group.stored.items() if value not in early}


# Entries ------------------------------------------------------------------------------------------------------------


def epsilon_of(args: KernelArguments, core: Step) -> SimdValue:
    """The op's small number, handed over as the bits of a float."""
    bits = args.number(int(np.float32(core.attributes["epsilon"]).view(np.int32)))
    narrow = SimdValue(args.code, args.code.let(f"trunc i64 {bits} to i32"), "i32", 1)
    return narrow.from_bits()


def structure(group: NormalizationGroup) -> str:
    """What code for a group depends on, apart from where its values lie."""
    numbers: dict[Value, int] = {}
    for value in (*group.inputs, *group.known):
        numbers.setdefault(value, len(numbers))
    steps = []
    for step in group.steps:
        types = [value.dtype.char for value in (*step.inputs, *step.results)]
        full = [value.shape == group.shape for value in step.results]
        attributes = "" if step is group.core else repr(sorted(step.attributes.items()))
        steps.append((step.op.name, attributes, [numbers[value] for value in step.inputs], types, full))
        for value in step.results:
            numbers[value] = len(numbers)
    stored, found = ([numbers[value] for value in places] for places in (group.stored, group.found))
    return f"{steps} {stored} {found} {[place.name for place in group.places]} {group.neighbours}"


def kernel_name(group: NormalizationGroup, of: str) -> str:
    """What the printed program calls the kernel that writes the results."""
    name = "normalize" if len(group.along) == 1 else "normalize gradient of"
    if group.neighbours > 1:
        of = f"groups of {of}"
    others = len(group.steps) - 1
    return f"{name} {of}" + (f", {others} op{'s' if others > 1 else ''}" if others else "")


def cost_of(group: NormalizationGroup) -> float:
    """Estimated nanoseconds on one thread."""
    others, operands = len(group.steps) - 1, len(group.inputs) + len(group.stored) - len(group.along) - 1
    each = _NS_PER_ELEMENT + _NS_PER_OP * others + _NS_PER_OPERAND * max(operands, 0)
    return each * group.core.inputs[0].size
