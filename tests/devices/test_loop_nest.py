"""Iteration spaces, operands and reductions as every code writer sees them: checked by walking them in Python."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from mlcompute.devices import loop_nest
from mlcompute.devices.loop_nest import (
    Access,
    Axis,
    LoopNest,
    Operand,
    Operands,
    ReductionAxes,
    Sharing,
    broadcast_strides,
    collapsed_axes,
    copy_nest,
    dense_strides,
    elementwise_nest,
    shared_rows,
    single_axis,
)
from mlcompute.ops.op import TABLE, Array, Step, Trace, Value, emit

F32 = np.dtype(np.float32)


def operand(shape: Sequence[int], strides: Sequence[int] | None = None, offset: int = 0) -> Operand:
    shape = tuple(shape)
    value = Trace().value(shape, F32, "input")
    return Operand(value, offset, shape, dense_strides(shape) if strides is None else tuple(strides), F32)


def seen(memory: Array, walked: Operand) -> Array:
    """What an operand shows of its memory, as NumPy sees it."""
    strides = tuple(4 * stride for stride in walked.strides)
    return np.lib.stride_tricks.as_strided(memory.reshape(-1)[walked.offset :], walked.shape, strides)


def offsets(extents: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The element at which an operand is in every iteration of nested loops, outermost first."""
    indices = itertools.product(*map(range, extents))
    return [sum(i * stride for i, stride in zip(index, strides, strict=True)) for index in indices]


# Operands -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((), ()), ((5,), (1,)), ((2, 3, 4), (12, 4, 1)), ((2, 1, 4), (4, 4, 1)), ((3, 0, 2), (0, 2, 1))],
)
def test_dense_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    assert dense_strides(shape) == strides
    assert operand(shape).is_dense


def test_what_is_dense() -> None:
    assert not operand((3, 4), (1, 3)).is_dense
    assert not operand((3, 4), (8, 1)).is_dense
    assert not operand((3, 4), (0, 1)).is_dense
    assert operand((1, 1), (7, 9)).is_dense, "one element has no gaps"
    assert operand((), ()).is_dense


def views(memory: Array) -> dict[str, tuple[list[Step], Array]]:
    """View steps over one input, and what NumPy makes of them."""
    found = {}
    for name, op, attributes, expected in (
        ("transpose", "transpose", {"axes": (2, 0, 1)}, memory.transpose(2, 0, 1)),
        ("slice", "slice", {"start": (1, 0, 2), "end": (4, 5, 6), "stride": (2, 1, 3)}, memory[1:4:2, :, 2:6:3]),
        ("broadcast", "broadcast", {"shape": (2, *memory.shape)}, np.broadcast_to(memory, (2, *memory.shape))),
        ("reshape", "reshape", {"shape": (10, 12)}, memory.reshape(10, 12)),
    ):
        trace = Trace()
        emit(op, trace.value(memory.shape, F32, "input"), **attributes)
        found[name] = (trace.steps, expected)
    return found


@pytest.mark.parametrize("name", ["transpose", "slice", "broadcast", "reshape"])
def test_views_are_resolved_to_the_memory_they_show(name: str) -> None:
    memory = np.arange(120, dtype=np.float32).reshape(4, 5, 6)
    (view,), expected = views(memory)[name]
    result, source = view.results[0], view.inputs[0]
    shown = Operands([view], {result: source})[result]
    assert (shown.base, shown.shape) == (source, expected.shape)
    np.testing.assert_array_equal(seen(memory, shown), expected)


def test_views_of_views() -> None:
    memory = np.arange(24, dtype=np.float32).reshape(4, 6)
    trace = Trace()
    x = trace.value((4, 6), F32, "input")
    turned = emit("transpose", x, axes=(1, 0))
    part = emit("slice", turned, start=(1, 1), end=(6, 4), stride=(2, 1))
    operands = Operands(trace.steps, {turned: x, part: turned})
    np.testing.assert_array_equal(seen(memory, operands[part]), memory.T[1:6:2, 1:4])
    assert operands[part].base is x


def test_workspaces_are_bytes_of_what_was_planned() -> None:
    trace = Trace()
    x = trace.value((4,), F32, "input")
    emit("negate", x)
    room = trace.value((256,), np.dtype(np.uint8))
    operands = Operands(trace.steps, {}, {trace.steps[0]: room}, threads=3)
    part = operands.workspace(trace.steps[0], 64, 128)
    assert (part.base, part.byte_offset, part.size, operands.threads) == (room, 64, 128, 3)
    with pytest.raises(AssertionError, match="bytes 192 to 320 of 256 planned"):
        operands.workspace(trace.steps[0], 192, 128)


@pytest.mark.parametrize(
    ("own", "shape"),
    [((), (2, 3)), ((3,), (2, 3)), ((2, 1), (2, 3)), ((1, 1), (2, 3)), ((1, 3), (1, 3)), ((2, 3), (2, 3))],
)
def test_broadcasting_is_numpys(own: tuple[int, ...], shape: tuple[int, ...]) -> None:
    memory = np.arange(math.prod(own), dtype=np.float32).reshape(own)
    strides = broadcast_strides(operand(own), shape)
    np.testing.assert_array_equal(
        [memory.reshape(-1)[offset] for offset in offsets(shape, strides)], np.broadcast_to(memory, shape).reshape(-1)
    )


# Collapsing -----------------------------------------------------------------------------------------------------------

SHAPES = [(), (1,), (7,), (2, 3), (1, 5, 1), (2, 3, 4), (3, 1, 4, 2), (2, 0, 3), (1, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense_operands_collapse_to_one_loop(shape: tuple[int, ...]) -> None:
    dense = dense_strides(shape)
    axes = collapsed_axes(shape, [dense, dense])
    assert [axis.extent for axis in axes] == [math.prod(shape)] or 0 in shape
    assert axes[-1].strides == (1, 1)
    assert single_axis(shape, dense) is not None or 0 in shape


@pytest.mark.parametrize("seed", range(40))
def test_collapsed_loops_visit_the_same_elements_in_the_same_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(int(extent) for extent in rng.integers(1, 4, rng.integers(0, 5)))
    walks = []
    for _ in range(3):
        order = rng.permutation(len(shape))
        dense = dense_strides(tuple(shape[axis] for axis in order))
        strides = {int(axis): stride for axis, stride in zip(order, dense, strict=True)}
        walks.append(tuple(0 if rng.random() < 0.2 else strides[axis] for axis in range(len(shape))))
    axes = collapsed_axes(shape, walks)
    for number, walk in enumerate(walks):
        collapsed = offsets([axis.extent for axis in axes], [axis.strides[number] for axis in axes])
        assert collapsed == offsets(shape, walk)


def test_what_does_not_continue_stays_apart() -> None:
    assert [axis.extent for axis in collapsed_axes((4, 6), [(1, 4)])] == [4, 6], "a transpose"
    assert [axis.extent for axis in collapsed_axes((4, 6), [(6, 1), (0, 1)])] == [4, 6], "one operand is broadcast"
    assert [axis.extent for axis in collapsed_axes((4, 6), [(12, 1)])] == [4, 6], "rows with gaps"
    assert collapsed_axes((4, 6), [(12, 2)]) == [Axis(24, (2,))], "every second element"
    assert collapsed_axes((), [(), ()]) == [Axis(1, (1, 1))]
    assert single_axis((4, 6), (1, 4)) is None
    assert single_axis((4, 6), (18, 3)) == (24, 3)


# Loop nests of elementwise ops ----------------------------------------------------------------------------------------


def copy(source: Operand, shape: tuple[int, ...]) -> LoopNest:
    value = source.base
    return LoopNest.of(shape, [(value, source)], [], [(value, operand(shape))])


@pytest.mark.parametrize(
    ("source", "access"),
    [
        (operand((4, 6)), Access.CONTIGUOUS),
        (operand(()), Access.CONSTANT),
        (operand((1, 1)), Access.CONSTANT),
        (operand((4, 1)), Access.FIXED),
        (operand((6,)), Access.CONTIGUOUS),
        (operand((4, 6), (1, 4)), Access.STRIDED),
        (operand((4, 6), (12, 2)), Access.STRIDED),
        (operand((4, 6), (12, 1), offset=3), Access.CONTIGUOUS),
    ],
    ids=["dense", "scalar", "ones", "column", "row", "transposed", "every second", "part of wider rows"],
)
def test_access_along_the_innermost_loop(source: Operand, access: Access) -> None:
    nest = copy(source, (4, 6))
    assert nest.loads[0].access is access
    assert nest.stores[0].access is Access.CONTIGUOUS
    assert nest.iterations == 24
    expected = np.broadcast_to(seen(np.arange(100, dtype=np.float32), source), (4, 6)).reshape(-1)
    found = [source.offset + offset for offset in offsets(nest.extents, nest.loads[0].strides)]
    np.testing.assert_array_equal(found, expected)


def test_empty_and_rank_zero_spaces() -> None:
    assert copy(operand((3, 0)), (3, 0)).iterations == 0
    scalar = copy(operand(()), ())
    assert (scalar.extents, scalar.iterations) == ((1,), 1)


def test_which_operands_are_rows_of_their_own() -> None:
    shape = (16, 6)
    value = operand(shape).base
    loads = [(value, operand(shape)), (value, operand((6,))), (value, operand(shape, (1, 16)))]
    nest = LoopNest.of(shape, loads, [], [(value, operand(shape))])
    assert nest.dense_operands == {0, 3}


@pytest.mark.parametrize(
    ("shape", "sharing"),
    [
        ((16, 6), Sharing(16, 6, 16)),
        ((1, 16, 6), Sharing(1, 1024, 0)),
        ((4, 6), Sharing(1, 1024, 0)),
        ((4, 1000), Sharing(4, 1024, 0)),
        ((5000,), Sharing(5000, 1, 5000)),
        ((), Sharing(1, 1024, 0)),
    ],
    ids=str,
)
def test_sharing_of_dense_operands(shape: tuple[int, ...], sharing: Sharing) -> None:
    nest = copy(operand(shape), shape)
    assert nest.sharing(1024, 2) == sharing
    assert sharing.units * sharing.per_unit >= nest.extents[0]


def test_sharing_of_a_transpose() -> None:
    assert copy(operand((16, 6), (1, 16)), (16, 6)).sharing(1024, 2) == Sharing(16, 1, 16)
    assert copy(operand((4, 6), (1, 4)), (4, 6)).sharing(1024, 2) == Sharing(4, 1, 0)


def test_another_loop_where_threads_are_more_than_iterations() -> None:
    nest = copy(operand((8, 64, 4, 32), (8192, 32, 2048, 1)), (8, 64, 4, 32))
    assert nest.extents == (8, 64, 4, 32)
    assert nest.shared_by(8) is nest
    shared = nest.shared_by(16)
    assert shared.extents == (64, 8, 4, 32)
    assert [each.strides for each in shared.operands] == [(32, 8192, 2048, 1), (128, 8192, 32, 1)]
    assert shared.sharing(1024, 16) == Sharing(64, 1, 0)
    few = copy(operand((3, 5), (1, 3)), (3, 5))
    assert few.shared_by(16) is few, "the innermost loop stays where it is"


def fused(trace: Trace) -> tuple[Value, Value, Value]:
    """y = relu(a + b), with an assign of y to a."""
    a, b = trace.value((8, 4), F32, "input"), trace.value((4,), F32, "input")
    y = emit("relu", emit("add", a, b))
    trace.steps.append(Step(TABLE["assign"], (a, y), (), {}))
    return a, b, y


def test_fused_steps_as_one_nest() -> None:
    trace = Trace()
    a, b, y = fused(trace)
    whole = Step(TABLE["copy"], (a, b), (y,), {})  # stands for the fused op: its results are stored
    nest = elementwise_nest(whole, trace.steps, Operands([], {}))
    assert [each.value for each in nest.loads] == [a, b]
    assert [op.op.name for op in nest.ops] == ["add", "relu"]
    assert [(each.value, each.operand.base) for each in nest.stores] == [(y, y), (y, a)]
    assert nest.extents == (8, 4), "b repeats, so rows stay apart"


def test_values_may_lie_elsewhere() -> None:
    trace = Trace()
    a, _, y = fused(trace)
    tile = operand((8, 4), offset=5)
    nest = elementwise_nest(Step(TABLE["copy"], (a,), (y,), {}), trace.steps, Operands([], {}), {a: tile})
    assert nest.loads[0].operand is tile
    assert nest.stores[1].operand.base is a, "what is stored goes where it was planned"


def test_an_assigned_input_is_loaded() -> None:
    trace = Trace()
    target, x = (trace.value((3,), F32, "input") for _ in range(2))
    assign = Step(TABLE["assign"], (target, x), (), {})
    nest = elementwise_nest(assign, [assign], Operands([], {}))
    assert [each.value for each in nest.loads] == [x]
    assert [(each.value, each.operand.base) for each in nest.stores] == [(x, target)]


def test_equal_structure_means_equal_code() -> None:
    def structure(shape: tuple[int, ...], name: str = "relu", b: Operand | None = None) -> object:
        trace = Trace()
        x = trace.value(shape, F32, "input")
        y = emit(name, x)
        return LoopNest.of(shape, [(x, b or Operands([], {})[x])], trace.steps, [(y, Operands([], {})[y])]).structure()

    assert structure((4, 6)) == structure((2, 3, 5)), "extents are arguments"
    assert hash(structure((4, 6))) == hash(structure((7,)))
    assert structure((4, 6)) != structure((4, 6), "negate")
    assert structure((4, 6)) != structure((4, 6), b=operand((4, 6), (1, 4))), "other access, other loads"


@pytest.mark.parametrize("name", ["transpose", "slice", "broadcast", "reshape"])
def test_copies_of_views(name: str) -> None:
    memory = np.arange(120, dtype=np.float32).reshape(4, 5, 6)
    (view,), expected = views(memory)[name]
    nest = copy_nest(view, Operands([], {}))
    (load,), (store,) = nest.loads, nest.stores
    made = np.zeros(expected.size, np.float32)
    reads, writes = (offsets(nest.extents, each.strides) for each in (load, store))
    for read, write in zip(reads, writes, strict=True):
        made[store.operand.offset + write] = memory.reshape(-1)[load.operand.offset + read]
    np.testing.assert_array_equal(made, expected.reshape(-1))


# Reductions -----------------------------------------------------------------------------------------------------------


def reduce(memory: Array, x: Operand, reduced: tuple[int, ...], innermost: bool = False) -> Array:
    """sum over axes, as a writer would walk the loops."""
    shape = tuple(1 if axis in reduced else extent for axis, extent in enumerate(x.shape))
    kept = tuple(0 if axis in reduced else stride for axis, stride in enumerate(dense_strides(shape)))
    loops = ReductionAxes.of(x.shape, reduced, [x.strides, kept], innermost)
    assert loops.iterations == x.size
    made = np.zeros(math.prod(shape), np.float32)
    extents = [axis.extent for axis in loops.axes]
    reads, writes = (offsets(extents, [axis.strides[number] for axis in loops.axes]) for number in range(2))
    for read, write in zip(reads, writes, strict=True):
        made[write] += memory.reshape(-1)[x.offset + read]
    return made.reshape(shape)


@pytest.mark.parametrize("innermost", [False, True])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("reduced", [axes for n in range(4) for axes in itertools.combinations(range(3), n)], ids=str)
def test_reductions_over_any_axes_of_any_transpose(
    reduced: tuple[int, ...], order: tuple[int, ...], innermost: bool
) -> None:
    memory = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    source = memory.transpose(order)
    x = operand(source.shape, [stride // 4 for stride in source.strides])
    np.testing.assert_array_equal(reduce(memory, x, reduced, innermost), source.sum(reduced, keepdims=True))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (3, 1, 2), (1, 5)], ids=str)
def test_there_is_always_a_reduced_loop(shape: tuple[int, ...]) -> None:
    dense = dense_strides(shape)
    outermost, innermost = (ReductionAxes.of(shape, (), [dense, dense], inner) for inner in (False, True))
    assert (outermost.axes[0], innermost.axes[-1]) == (Axis(1, (0, 0), True), Axis(1, (1, 1), True))
    assert innermost.are_rows
    assert outermost.are_rows is (math.prod(shape) == 1)


def test_rows_and_columns() -> None:
    rows = ReductionAxes.of((8, 5, 6), (1, 2), [(30, 6, 1), (1, 0, 0)])
    assert rows.axes == (Axis(8, (30, 1)), Axis(30, (1, 0), True))
    assert rows.are_rows
    columns = ReductionAxes.of((8, 5, 6), (0, 1), [(30, 6, 1), (0, 0, 1)])
    assert columns.axes == (Axis(40, (6, 0), True), Axis(6, (1, 1)))
    assert not columns.are_rows


def test_loops_are_in_the_order_of_memory() -> None:
    transposed = ReductionAxes.of((6, 8), (0,), [(1, 6), (0, 1)])
    assert transposed.are_rows, "the reduced axis is contiguous"
    repeated = ReductionAxes.of((8, 6), (1,), [(1, 0), (1, 0)])
    assert repeated.axes == (Axis(6, (0, 0), True), Axis(8, (1, 1))), "a repeated axis goes outside"


def test_rows_that_threads_own() -> None:
    x, y = operand((16, 6)), operand((16, 1))
    assert shared_rows(x.shape, (1,), (x, y), 16, 2) == 16
    assert shared_rows(x.shape, (1,), (x, y), 16, 11) == 16
    assert shared_rows(x.shape, (1,), (x, y), 16, 12) == 0, "four of twelve threads would have two rows"
    assert shared_rows(x.shape, (0,), (x, y), 16, 2) == 0, "rows are summed"
    assert shared_rows((4, 6), (1,), (operand((4, 6)),), 4, 2) == 0, "too few"
    assert shared_rows(x.shape, (1,), (operand((16, 6), (1, 16)), y), 16, 2) == 0, "not dense"
    assert shared_rows(x.shape, (1,), (x, y), 6, 2) == 0, "units are not full rows"
    assert shared_rows((), (), (operand(()),), 1, 2) == 0


def test_no_word_of_a_target_language() -> None:
    source = Path(loop_nest.__file__).read_text().lower()
    assert not any(word in source for word in ("llvm", "i64", "simd", "cuda", "devices.cpu"))
