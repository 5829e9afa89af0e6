"""Elements by index: take, embedding and gather; scatter, and scatter_add where indices are few.

A thread has one result, or a few neighbouring ones that share an index. Results of scatter look for the indices that
name them, in their order, so that no two threads write to one place; where that would be too much to look through, the
last index of every place is found with an atomic maximum, which no order changes. Lines of many indices are in
`scatter_lines.py`, long sums in `segments.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute.devices.cuda.codegen.checked_indices import VALID, checked, is_index
from mlcompute.devices.cuda.codegen.indexing import BLOCK, blocks_for
from mlcompute.devices.cuda.codegen.kernel_source import KernelSource, grouped, vector_width
from mlcompute.devices.cuda.codegen.types import is_element, loaded, memory_type, register_type, stored, sum_type
from mlcompute.devices.cuda.kernels.launch import Launch, Row
from mlcompute.devices.cuda.kernels.scatter_lines import are_lines, has_one_per_line, line_launch, one_per_line_launch
from mlcompute.devices.cuda.kernels.segments import Segments, are_few, segment_bytes
from mlcompute.devices.loop_nest import Axis, Operand, Operands, collapsed_axes, dense_strides, iteration_count
from mlcompute.ops.op import Step

# Take and gather ----------------------------------------------------------------------------------------------------


def take_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """y[a, i, b] = x[a, indices[i], b]"""
    x, indices, y = operands[step.inputs[0]], operands[step.inputs[1]], operands[step.results[0]]
    axis, rank = step.attributes.get("axis", 0), len(indices.shape)
    end = axis + rank
    # Along the indices x does not move with the loops: they say where to read.
    read = (*x.strides[:axis], *(0,) * rank, *x.strides[axis + 1 :])
    by = (*(0,) * axis, *indices.strides, *(0,) * (len(y.shape) - end))
    return _gathered(step, x, indices, y, axis, read, by)


def gather_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """y[.., i, ..] = x[.., indices[.., i, ..], ..]"""
    x, indices, y = operands[step.inputs[0]], operands[step.inputs[1]], operands[step.results[0]]
    axis = step.attributes["axis"]
    read = tuple(0 if d == axis else stride for d, stride in enumerate(x.strides))
    return _gathered(step, x, indices, y, axis, read, indices.strides)


def _gathered(
    step: Step, x: Operand, indices: Operand, y: Operand, axis: int, read: tuple[int, ...], by: tuple[int, ...]
) -> Sequence[Launch]:
    """One element of x per result: at its strides `read`, moved along `axis` as the index at strides `by` says."""
    if not y.size:
        return _checks(step, indices, x.shape[axis])
    axes = collapsed_axes(y.shape, [read, by, y.strides])
    width = 1
    if axes[-1].strides[1] == 0:
        width = vector_width([x, indices, y], axes, [0, 2])
        width = width if x.strides[axis] % width == 0 else 1
    axes = grouped(axes, width)
    source = KernelSource([x, indices, y], y.size)
    source.pointer("x", x)
    source.pointer("indices", indices)
    source.pointer("y", y, written=True)
    check = checked(source, step, x.shape[axis])
    total, along = source.index("total", iteration_count(axes)), source.index("along", x.strides[axis])
    body = f"""    const Index k = (Index)blockIdx.x * {BLOCK} + threadIdx.x;
    if (k >= {total}) return;
    {source.unraveled("k", axes, ["x_start", "index_at", "y_start"], "k")}
    const long long index = (long long)indices[index_at];
    using Group = Pack<{memory_type(x.dtype)}, {width}>;
    Group group = {{}};
    if (valid(index, {check}))
        group = *reinterpret_cast<const Group*>(x + x_start + (Index)index * {along});
    *reinterpret_cast<Group*>(y + y_start) = group;"""
    grid = blocks_for(iteration_count(axes))
    return [source.launch(step, "gather", VALID, body, grid=grid, block=BLOCK)]


def _checks(step: Step, indices: Operand, extent: int) -> Sequence[Launch]:
    """Nothing but a look at the indices, where there is no result they could fill."""
    if not indices.size:
        return []
    source = KernelSource([indices], indices.size)
    source.pointer("indices", indices)
    check = checked(source, step, extent)
    axes = collapsed_axes(indices.shape, [indices.strides])
    total = source.index("total", indices.size)
    body = f"""    const Index k = (Index)blockIdx.x * {BLOCK} + threadIdx.x;
    if (k >= {total}) return;
    {source.unraveled("k", axes, ["index_at"], "k")}
    valid((long long)indices[index_at], {check});"""
    return [source.launch(step, "check indices", VALID, body, grid=blocks_for(indices.size), block=BLOCK)]


# Take gradient ------------------------------------------------------------------------------------------------------


def take_gradient_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """y[a, r, b] = sum of dy[a, i, b] where indices[i] = r"""
    dy, indices, y = operands[step.inputs[0]], operands[step.inputs[1]], operands[step.results[0]]
    axis, rank = step.attributes["axis"], len(indices.shape)
    if not y.size:
        return _checks(step, indices, y.shape[axis])
    items = collapsed_axes(indices.shape, [indices.strides, dy.strides[axis : axis + rank]])
    segments = Segments(
        step, dy, indices, items, y, None,
        outer=collapsed_axes(y.shape[:axis], [dy.strides[:axis], y.strides[:axis]]),
        inner=collapsed_axes(y.shape[axis + 1 :], [dy.strides[axis + rank :], y.strides[axis + 1 :]]),
        keys=y.shape[axis], key_stride=y.strides[axis],
    )  # fmt: skip
    return segments.launches(operands)


def _take_gradient_workspace(step: Step) -> int:
    return segment_bytes(step.results[0].size, step.inputs[1].size, step.attributes["extent"])


# Scatter ------------------------------------------------------------------------------------------------------------


def scatter_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """y = base, then y[.., indices[.., i, ..], ..] = or += updates[.., i, ..]"""
    updates, indices, base = (operands[value] for value in step.inputs)
    y, axis, adds = operands[step.results[0]], step.attributes["axis"], step.op.name == "scatter_add"
    if not y.size:
        return _checks(step, indices, y.shape[axis] if y.shape else 0)
    if has_one_per_line(indices, base, y, axis):
        return [one_per_line_launch(step, updates, indices, base, y)]
    if are_lines(step):
        return [line_launch(step, updates, indices, base, y, axis)]
    if _are_looked_up(step):
        return [_looked_up(step, updates, indices, base, y, axis)]
    if adds:
        return _added(step, operands, updates, indices, base, y, axis)
    return _last_ones(step, operands, updates, indices, base, y, axis)


def _are_looked_up(step: Step) -> bool:
    """Does every result look through its indices? Looks are cheaper than for `Segments`: only those along the axis."""
    return are_few(step.results[0].size // 4, step.inputs[1].shape[step.attributes["axis"]])


def _looked_up(step: Step, updates: Operand, indices: Operand, base: Operand, y: Operand, axis: int) -> Launch:
    """Every result looks through the indices along the axis that could name it."""
    adds = step.op.name == "scatter_add"
    source = KernelSource([updates, indices, base, y], y.size)
    for name, operand in (("updates", updates), ("indices", indices), ("base", base)):
        source.pointer(name, operand)
    source.pointer("y", y, written=True)
    check = checked(source, step, y.shape[axis])
    count = source.index("count", indices.shape[axis])

    def offset(name: str, operand: Operand, skipped: int | None) -> str:
        places = [d for d in range(len(y.shape)) if d != skipped]
        return " + ".join(f"c{d} * {source.index(f'{name}_{d}', operand.strides[d])}" for d in places) or "0"

    inside = " && ".join(
        f"c{d} < {source.index(f'reach{d}', indices.shape[d])}" for d in range(len(y.shape)) if d != axis
    )
    kind, register = memory_type(y.dtype), sum_type(y.dtype) if adds else register_type(y.dtype)
    start = f"({register}){loaded(y.dtype, 'base[base_at]')}"
    found = f"({register}){loaded(y.dtype, 'updates[update_start + j * update_along]')}"
    if adds:
        loop, store = "Index j = 0; j < n; ++j", f"result += {found};"
    else:
        # From the last on. The first result along the axis looks at all indices, to check them.
        loop = f"Index j = n - 1; j >= 0 && (!done || c{axis} == 0); --j"
        store = f"if (!done) result = {found};"
    source.index("index_along", indices.strides[axis])
    source.index("update_along", updates.strides[axis])
    made = f"({kind})result" if y.dtype.kind in "iu" else "result"
    body = f"""{source.coordinates({f"c{d}": extent for d, extent in enumerate(y.shape)})}
    const Index base_at = {offset("base", base, None)};
    const Index index_start = {offset("indices", indices, axis)}, update_start = {offset("updates", updates, axis)};
    {register} result = {start};
    bool done = false;
    const Index n = {inside or "true"} ? {count} : 0;
    #pragma unroll 4
    for ({loop}) {{
        const long long index = (long long)indices[index_start + j * index_along];
        if (c{axis} == 0) valid(index, {check});
        if (index == c{axis}) {{
            {store}
            done = true;
        }}
    }}
    (void)done;
    y[{offset("y", y, None)}] = {stored(y.dtype, made)};"""
    return source.launch(step, step.op.name, VALID, body, grid=blocks_for(y.size), block=BLOCK)


def _places(step: Step, source: KernelSource, indices: Operand, y: Operand, axis: int) -> str:
    """Statements that find `place`, the row-major position in y that index number k means, or -1."""
    dense = dense_strides(y.shape)
    unindexed = tuple(0 if d == axis else stride for d, stride in enumerate(dense))
    axes = collapsed_axes(indices.shape, [indices.strides, unindexed])
    check = checked(source, step, y.shape[axis])
    return f"""{source.unraveled("k", axes, ["index_at", "start"], "k")}
    const long long index = (long long)indices[index_at];
    const Index place = valid(index, {check}) ? start + (Index)index * {source.index("along", dense[axis])} : -1;"""


def _last_ones(
    step: Step, operands: Operands, updates: Operand, indices: Operand, base: Operand, y: Operand, axis: int
) -> Sequence[Launch]:
    """Which index is the last for every place, then the results."""
    last = operands.workspace(step, 0, 4 * y.size)
    count = y.size
    fill = KernelSource([], count)
    fill.pointer("last", last, written=True, element="int")
    fill.index("total", count)
    at = f"    const Index k = (Index)blockIdx.x * {BLOCK} + threadIdx.x;\n    if (k >= total) return;\n"
    first = fill.launch(step, "fill", "", f"{at}    last[k] = -1;", grid=blocks_for(count), block=BLOCK)
    mark = KernelSource([indices, y], indices.size)
    mark.pointer("indices", indices)
    mark.pointer("last", last, written=True, element="int")
    mark.index("total", indices.size)
    body = f"""{at}    {_places(step, mark, indices, y, axis)}
    if (place >= 0) atomicMax(last + place, (int)k);"""
    second = mark.launch(step, "last index of every place", VALID, body, grid=blocks_for(indices.size), block=BLOCK)
    source = KernelSource([updates, base, y], count)
    source.pointer("last", last, element="int")
    for name, operand in (("updates", updates), ("base", base)):
        source.pointer(name, operand)
    source.pointer("y", y, written=True)
    source.index("total", count)
    axes = collapsed_axes(y.shape, [base.strides, y.strides])
    from_ = collapsed_axes(indices.shape, [updates.strides])
    body = f"""{at}    {source.unraveled("k", axes, ["base_at", "y_at"], "k")}
    const Index chosen = last[k];
    if (chosen < 0) {{
        y[y_at] = base[base_at];
    }} else {{
        {source.unraveled("chosen", from_, ["update_at"], "u")}
        y[y_at] = updates[update_at];
    }}"""
    return [first, second, source.launch(step, "scatter", "", body, grid=blocks_for(count), block=BLOCK)]


def _added(
    step: Step, operands: Operands, updates: Operand, indices: Operand, base: Operand, y: Operand, axis: int
) -> Sequence[Launch]:
    """Every place of y is a key of its own."""
    flat = y._replace(shape=(y.size,), strides=(1,))
    assert y.is_dense, "results are dense"
    dense = dense_strides(y.shape)
    unindexed = tuple(0 if d == axis else stride for d, stride in enumerate(dense))
    items = collapsed_axes(indices.shape, [indices.strides, updates.strides, unindexed])
    one = [Axis(1, (1, 1))]
    # Indices along the axis name places with the same other coordinates.
    numbers = dense_strides(indices.shape)
    first = tuple(0 if d == axis else stride for d, stride in enumerate(numbers))
    segments = Segments(
        step, updates, indices, items, flat, base, outer=one, inner=one, keys=y.size, key_stride=1,
        extent=y.shape[axis], along=dense[axis], base_axes=collapsed_axes(y.shape, [base.strides]),
        line=(indices.shape[axis], numbers[axis]), line_axes=collapsed_axes(y.shape, [first]),
    )  # fmt: skip
    return segments.launches(operands)


def _scatter_workspace(step: Step) -> int:
    y, indices = step.results[0], step.inputs[1]
    if not y.size or are_lines(step) or _are_looked_up(step):
        return 0
    if step.op.name == "scatter":
        return 4 * y.size
    return segment_bytes(y.size, indices.size, y.size)


def _moves(step: Step) -> bool:
    return is_element(step.inputs[0].dtype) and is_index(step.inputs[1].dtype)


def _adds(step: Step) -> bool:
    return _moves(step) and step.inputs[0].dtype.kind != "b"


KERNELS: dict[str, Row] = {
    "take": Row(take_launches, supports=_moves),
    "embedding": Row(take_launches, supports=_moves),
    "gather": Row(gather_launches, supports=_moves),
    "take_gradient": Row(take_gradient_launches, supports=_adds, workspace=_take_gradient_workspace),
    "scatter": Row(scatter_launches, supports=_moves, workspace=_scatter_workspace),
    "scatter_add": Row(scatter_launches, supports=_adds, workspace=_scatter_workspace),
}
