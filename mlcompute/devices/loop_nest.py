"""Iteration spaces and operands of kernels, independent of any target language.

A kernel reads and writes strided memory in nested loops. What every code writer must know before it writes the first
line is found here, from steps and shapes alone:

    Operand, Operands   where a value lies: the memory that owns it, its offset and its strides; views are resolved
    LoopNest            fused elementwise ops: loop extents, operands with their strides and access, ops, stores
    ReductionAxes       the loops of a reduction, innermost last, and which of them are reduced

All strides and offsets count elements. Loops are collapsed: extents of 1 vanish, and neighbouring axes that
continue each other for every operand become one. How an operand moves along the innermost loop (`Access`) decides
between vector loads, broadcasts and gathers.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mlcompute.ops.op import Shape, Step, Value

Strides = tuple[int, ...]
#: What an operand is apart from its memory: offset, strides, shape and type.
Form = tuple[int, Strides, Shape, "np.dtype[Any]"]

#: Fewer rows than this are not shared among threads as rows: some threads would have none.
MIN_SHARED_ROWS = 8
#: Elements of a cache line.
_LINE = 16
#: Of the time that the thread with the most rows takes, what all threads together must be busy.
_BUSY = 0.7


def enough_rows(rows: int, threads: int) -> bool:
    """Are there so many rows that threads which share them as rows have about as much to do?"""
    return rows >= MIN_SHARED_ROWS and _is_even(rows, threads)


def _is_even(units: int, threads: int) -> bool:
    return units >= _BUSY * threads * -(-units // threads)


def leading_rows(shape: Shape, threads: int) -> tuple[int, int]:
    """(rows that threads can own, how many leading axes they are): samples, or else samples and times; (0, 0) if none.

    Rows of fewer elements than a cache line are owned only where they are the first axis.
    """
    for axes in range(1, len(shape) + 1):
        rows = math.prod(shape[:axes])
        if enough_rows(rows, threads) and (axes == 1 or math.prod(shape[axes:]) >= _LINE):
            return rows, axes
    return 0, 0


# Operands -------------------------------------------------------------------------------------------------------------


class Operand(NamedTuple):
    """A value as a kernel sees it: `base` owns the memory; offset and strides count elements."""

    base: Value
    offset: int
    shape: Shape
    strides: Strides
    dtype: np.dtype[Any]

    @property
    def is_dense(self) -> bool:
        """Row-major without gaps?"""
        return self.strides == dense_strides(self.shape) or self.size <= 1

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def byte_offset(self) -> int:
        return self.offset * self.dtype.itemsize

    def holding(self, shape: Shape, dtype: np.dtype[Any], strides: Strides | None = None) -> Operand:
        """The same bytes from the first on as an array, dense unless strides are given."""
        offset = self.byte_offset // dtype.itemsize
        return Operand(self.base, offset, shape, dense_strides(shape) if strides is None else strides, dtype)

    def permuted(self, axes: Sequence[int]) -> Operand:
        """The same memory with its axes in another order."""
        return self._replace(shape=tuple([self.shape[a] for a in axes]), strides=tuple([self.strides[a] for a in axes]))


class Operands:
    """Operands of all values of a program; views are resolved to the memory they show."""

    def __init__(
        self,
        steps: Sequence[Step],
        views: Mapping[Value, Value],
        workspaces: dict[Step, Value] | None = None,
        threads: int = 1,
    ) -> None:
        #: What each view shows: the value that owns the memory, and all else. Every other value owns its memory.
        self.views: dict[Value, tuple[Value, Form]] = {}
        self._workspaces = workspaces or {}
        #: Threads that will share each kernel.
        self.threads = threads
        #: By what a view step, its source and its result look like: the layers of a deep network are alike.
        self._forms: dict[Hashable, Form] = {}
        for step in steps:
            if step.op.is_view and step.results[0] in views:
                self.add_view(step)

    def add_view(self, step: Step) -> None:
        """A step whose result needs no memory, after those that make what it shows. It outlives the operands."""
        source, result = step.inputs[0], step.results[0]
        known = self.views.get(source)
        look = source.shape if known is None else id(known[1])
        # Steps that are alike mostly share their attributes.
        key = (step.op, look, result.shape, id(step.attributes), id(result.dtype))
        form = self._forms.get(key)
        if form is None:
            offset, strides = (0, dense_strides(source.shape)) if known is None else known[1][:2]
            form = self._forms[key] = (*_viewed(step, offset, strides), result.shape, result.dtype)
        self.views[result] = (source if known is None else known[0], form)

    def __getitem__(self, value: Value) -> Operand:
        view = self.views.get(value)
        if view is not None:
            base, (offset, strides, shape, dtype) = view
            return Operand(base, offset, shape, strides, dtype)
        return Operand(value, 0, value.shape, dense_strides(value.shape), value.dtype)

    def base(self, value: Value) -> Value:
        """The value that owns the memory a value lies in."""
        view = self.views.get(value)
        return value if view is None else view[0]

    def workspace(self, step: Step, offset: int, nbytes: int) -> Operand:
        """Part of the workspace planned for a step, as bytes."""
        planned = self._workspaces[step]
        end = offset + nbytes
        assert end <= planned.nbytes, f"{step}: bytes {offset} to {end} of {planned.nbytes} planned"
        return Operand(planned, offset, (nbytes,), (1,), np.dtype(np.uint8))


@functools.lru_cache(4096)
def dense_strides(shape: Shape) -> Strides:
    """Row-major strides in elements; extents of 1 get whatever they would have, too."""
    strides = []
    stride = 1
    for extent in reversed(shape):
        strides.append(stride)
        stride *= extent
    return tuple(reversed(strides))


def broadcast_strides(operand: Operand, shape: Shape) -> Strides:
    """Strides with which an operand is read along a larger shape, by NumPy's rules: 0 where it is repeated."""
    return _broadcast(operand.shape, operand.strides, shape)


def _broadcast(own_shape: Shape, own_strides: Strides, shape: Shape) -> Strides:
    extra = len(shape) - len(own_shape)
    own = (
        0 if extent == 1 and wanted != 1 else stride
        for extent, wanted, stride in zip(own_shape, shape[extra:], own_strides, strict=True)
    )
    return (0,) * extra + tuple(own)


def view_of(source: Operand, step: Step) -> Operand:
    """What a view step (reshape, transpose, slice, broadcast) shows of its source."""
    result = step.results[0]
    offset, strides = _viewed(step, source.offset, source.strides)
    return Operand(source.base, offset, result.shape, strides, result.dtype)


def _viewed(step: Step, offset: int, strides: Strides) -> tuple[int, Strides]:
    """Offset and strides of a view, from those of its source."""
    (source,), (result,), a, name = step.inputs, step.results, step.attributes, step.op.name
    if name == "reshape":
        strides = dense_strides(result.shape)
    elif name == "transpose":
        strides = tuple([strides[axis] for axis in a["axes"]])
    elif name == "slice":
        offset += sum(start * stride for start, stride in zip(a["start"], strides, strict=True))
        strides = tuple(stride * k for stride, k in zip(strides, a["stride"], strict=True))
    else:  # broadcast
        extra = len(result.shape) - len(source.shape)
        repeated = zip(source.shape, result.shape[extra:], strides, strict=True)
        strides = (0,) * extra + tuple(0 if before != after else stride for before, after, stride in repeated)
    return offset, strides


# Axes -----------------------------------------------------------------------------------------------------------------


class Axis(NamedTuple):
    """One loop: its extent, the stride of every operand along it, and whether it is reduced."""

    extent: int
    strides: Strides
    reduced: bool = False


def iteration_count(axes: Sequence[Axis]) -> int:
    """How many iterations nested loops over these axes have."""
    return math.prod(axis.extent for axis in axes)


def collapsed_axes(shape: Shape, strides: Sequence[Strides]) -> list[Axis]:
    """Loops over a shape in its own order, as few as possible; at least one.

    strides   of every operand, one stride per axis of `shape`
    """
    axes = [Axis(extent, tuple(own[axis] for own in strides)) for axis, extent in enumerate(shape) if extent != 1]
    return _merged(axes) or [Axis(1, (1,) * len(strides))]


def single_axis(shape: Shape, strides: Strides) -> tuple[int, int] | None:
    """(extent, stride) of axes that one loop can each; None when they need several."""
    axes = collapsed_axes(shape, [strides])
    return (axes[0].extent, axes[0].strides[0]) if len(axes) == 1 else None


def _merged(axes: Sequence[Axis]) -> list[Axis]:
    """Neighbouring axes made one where the outer continues the inner for every operand."""
    merged: list[Axis] = []
    for axis in axes:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.reduced == axis.reduced
            and all(outer == inner * axis.extent for outer, inner in zip(last.strides, axis.strides, strict=True))
        ):
            merged[-1] = Axis(last.extent * axis.extent, axis.strides, axis.reduced)
        else:
            merged.append(axis)
    return merged


# Fused elementwise ops ------------------------------------------------------------------------------------------------


class Access(enum.Enum):
    """How an operand moves along the innermost loop."""

    CONSTANT = "one element in all iterations of all loops"
    FIXED = "one element along the innermost loop"
    CONTIGUOUS = "neighbouring elements"
    STRIDED = "elements a stride apart"


class NestOperand(NamedTuple):
    """An operand inside a loop nest: the value it holds, and its stride along every loop.

    streams   it is stored for other processes: see `Assign`
    """

    value: Value
    operand: Operand
    strides: Strides
    streams: bool = False

    @property
    def access(self) -> Access:
        if not any(self.strides):
            return Access.CONSTANT
        return {0: Access.FIXED, 1: Access.CONTIGUOUS}.get(self.strides[-1], Access.STRIDED)


@functools.lru_cache(4096)  # the layers of a deep network are alike
def _loops(shape: Shape, operands: tuple[tuple[Shape, Strides], ...]) -> tuple[Shape, tuple[Strides, ...]]:
    """Extents of the loops over a shape, and along them the strides of operands that are broadcast to it."""
    axes = collapsed_axes(shape, [_broadcast(*own, shape) for own in operands])
    strides = (tuple([axis.strides[number] for axis in axes]) for number in range(len(operands)))
    return tuple([axis.extent for axis in axes]), tuple(strides)


class LoopNest(NamedTuple):
    """Fused elementwise ops in one pass over memory: load every input, apply the ops in order, store the results.

    shape     of the iteration space before its axes were collapsed
    extents   of the loops, outermost first; at least one. An empty iteration space has an extent of 0
    loads     inputs; an op's operand is a loaded value or the result of an op before it
    ops       elementwise steps, each with one result
    stores    which value goes where; a loaded value may be stored as it is (a copy)
    """

    shape: Shape
    extents: tuple[int, ...]
    loads: tuple[NestOperand, ...]
    ops: tuple[Step, ...]
    stores: tuple[NestOperand, ...]

    @classmethod
    def of(
        cls,
        shape: Shape,
        loads: Sequence[tuple[Value, Operand]],
        ops: Sequence[Step],
        stores: Sequence[tuple[Value, Operand]],
    ) -> LoopNest:
        """The nest over `shape`, to which all operands are broadcast."""
        given = (*loads, *stores)
        extents, strides = _loops(tuple(shape), tuple([(operand.shape, operand.strides) for _, operand in given]))
        all_ = tuple([NestOperand(value, operand, own) for (value, operand), own in zip(given, strides, strict=True)])
        return cls(tuple(shape), extents, all_[: len(loads)], tuple(ops), all_[len(loads) :])

    @property
    def kernel_name(self) -> str:
        """What the printed program calls it."""
        if not self.ops:
            return "copy"
        return "elementwise" if len(self.ops) == 1 else f"fused elementwise ({len(self.ops)} ops)"

    @property
    def operands(self) -> tuple[NestOperand, ...]:
        """All operands, loads first."""
        return (*self.loads, *self.stores)

    @property
    def iterations(self) -> int:
        return math.prod(self.extents)

    @property
    def dense_operands(self) -> set[int]:
        """Which of `operands` have an element of their own for every iteration, in row-major order."""
        return {i for i, o in enumerate(self.operands) if o.operand.shape == self.shape and o.operand.is_dense}

    def shared_by(self, threads: int) -> LoopNest:
        """This nest; where its outermost loop has too few iterations for all threads, with another one outermost."""
        loop = max(range(len(self.extents) - 1), key=lambda loop: self.extents[loop], default=0)
        if _is_even(self.extents[0], threads) or not _is_even(self.extents[loop], threads):
            return self
        order = [loop, *(other for other in range(len(self.extents)) if other != loop)]

        def ordered(each: NestOperand) -> NestOperand:
            return each._replace(strides=tuple(each.strides[loop] for loop in order))

        return self._replace(
            extents=tuple(self.extents[loop] for loop in order),
            loads=tuple(map(ordered, self.loads)),
            stores=tuple(map(ordered, self.stores)),
        )

    def sharing(self, chunk: int, threads: int) -> Sharing:
        """How threads share the outermost loop: by rows where there are enough, else in chunks or iterations."""
        outermost = self.extents[0]
        rows, _ = leading_rows(self.shape, threads)
        if rows and outermost % rows == 0 and self._begins_with_rows():
            return Sharing(rows, outermost // rows, rows)
        if len(self.extents) == 1:
            return Sharing(-(-outermost // chunk), chunk, 0)
        return Sharing(outermost, 1, 0)

    def _begins_with_rows(self) -> bool:
        """Is the outermost loop the one over the leading axes of the shape?"""
        dense, all_ = self.dense_operands, self.operands
        return all(all_[number].strides[0] * self.extents[0] == self.iterations for number in dense)

    def structure(self) -> object:
        """Everything code for this nest depends on, hashable: extents, strides and addresses may be arguments of it."""
        numbers: dict[Value, int] = {}
        for each in self.loads:
            numbers.setdefault(each.value, len(numbers))
        applied = []
        for step in self.ops:
            sources = tuple(numbers[value] for value in step.inputs)
            types = tuple(value.dtype.char for value in (*step.inputs, *step.results))
            attributes = repr(sorted(step.attributes.items())) if step.attributes else ""
            applied.append((step.op.name, attributes, sources, types))
            for value in step.results:
                numbers[value] = len(numbers)
        loaded, stored = (tuple(numbers[each.value] for each in some) for some in (self.loads, self.stores))
        types = tuple(each.operand.dtype.char for each in self.operands)
        streams = tuple(each.streams for each in self.stores)
        access = tuple(each.access for each in self.operands)
        return len(self.extents), access, types, tuple(applied), loaded, stored, streams


class Sharing(NamedTuple):
    """How threads share a loop: `units` pieces of `per_unit` iterations, the last perhaps shorter.

    rows   when not 0: the units are the leading extent of the shape, so that a thread owns full rows
    """

    units: int
    per_unit: int
    rows: int


def elementwise_nest(
    step: Step, steps: Sequence[Step], operands: Operands, elsewhere: Mapping[Value, Operand] | None = None
) -> LoopNest:
    """The nest of some elementwise steps and assigns that together are `step`.

    elsewhere   values that lie in other memory than planned
    """
    made = {value for inner in steps for value in inner.results}
    ops = [inner for inner in steps if inner.op.name != "assign"]
    inputs = list(dict.fromkeys(value for inner in ops for value in inner.inputs if value not in made))
    stores = [(value, operands[value]) for value in step.results]
    streams = [False] * len(stores)
    for inner in steps:
        if inner.op.name == "assign":
            target, value = inner.inputs
            stores.append((value, operands[target]))
            streams.append(inner.attributes.get("streams", False))
            if value not in made and value not in inputs:
                inputs.append(value)
    known = elsewhere or {}
    loads = [(value, known.get(value) or operands[value]) for value in inputs]
    nest = LoopNest.of(_iteration_shape(steps), loads, ops, stores)
    if not any(streams):
        return nest
    return nest._replace(stores=tuple(one._replace(streams=is_) for one, is_ in zip(nest.stores, streams, strict=True)))


def _iteration_shape(steps: Sequence[Step]) -> Shape:
    for step in steps:
        if step.results:
            return step.results[0].shape
    return steps[0].inputs[1].shape


def copy_nest(step: Step, operands: Operands) -> LoopNest:
    """The nest of a view step that needs memory of its own: its source in row-major order."""
    value, source, result = step.inputs[0], operands[step.inputs[0]], operands[step.results[0]]
    if step.op.name == "reshape":
        shape = value.shape
        target = Operand(result.base, result.offset, shape, dense_strides(shape), result.dtype)
    else:
        shape, target = result.shape, result
        source = view_of(source, step)
    return LoopNest.of(shape, [(value, source)], [], [(value, target)])


# Reductions -----------------------------------------------------------------------------------------------------------


class ReductionAxes(NamedTuple):
    """The loops of a reduction, innermost last; at least one of them is reduced.

    Whatever the reduced axes were, two forms are left. Either the innermost loop is reduced: lines of elements become
    one element each (rows). Or it is kept: rows are combined into one row (columns).
    """

    axes: tuple[Axis, ...]

    @classmethod
    def of(
        cls, shape: Shape, reduced: Collection[int], strides: Sequence[Strides], innermost: bool = False
    ) -> ReductionAxes:
        """Loops in the order in which the first operand lies in memory, collapsed.

        strides     of every operand, one stride per axis of `shape`; 0 where a result is not indexed by an axis
        innermost   where a reduced loop that has only one iteration goes, if there is no other: else outermost
        """
        axes = [
            Axis(extent, tuple(own[axis] for own in strides), axis in reduced)
            for axis, extent in enumerate(shape)
            if extent != 1
        ]
        # A repeated axis (stride 0) goes outside: a line of one repeated element is no line.
        axes.sort(key=lambda axis: -(axis.strides[0] or math.inf))
        axes = _merged(axes)
        if not any(axis.reduced for axis in axes):
            once = Axis(1, (int(innermost),) * len(strides), True)
            axes = [*axes, once] if innermost else [once, *axes]
        return cls(tuple(axes))

    @property
    def are_rows(self) -> bool:
        """Is the innermost loop reduced?"""
        return self.axes[-1].reduced

    @property
    def iterations(self) -> int:
        return iteration_count(self.axes)


def shared_rows(shape: Shape, reduced: Collection[int], operands: Sequence[Operand], units: int, threads: int) -> int:
    """Rows (of leading axes) that threads can own in all of these operands; 0 when they cannot.

    units   pieces of work along the kept axes, outermost first: rows are owned only where they are full units
    """
    rows, axes = leading_rows(shape, threads)
    if not rows or any(axis < axes for axis in reduced) or units % rows:
        return 0
    return rows if all(operand.is_dense and operand.shape[:axes] == shape[:axes] for operand in operands) else 0
