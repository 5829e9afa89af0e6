"""Embedding tables: count_indices and renormalize. Rows are looked up in `indexing.py`, summed in `segments.py`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlcompute.devices.cuda.codegen.checked_indices import VALID, checked, is_index
from mlcompute.devices.cuda.codegen.indexing import BLOCK, blocks_for
from mlcompute.devices.cuda.codegen.kernel_source import KernelSource
from mlcompute.devices.cuda.codegen.types import is_element, is_floating, loaded, register_type, stored
from mlcompute.devices.cuda.kernels.launch import Launch, Row
from mlcompute.devices.loop_nest import Operand, Operands, collapsed_axes
from mlcompute.ops.op import Step


def _filled(step: Step, y: Operand, kind: str, count: int) -> Launch:
    """Zeros."""
    source = KernelSource([], count)
    source.pointer("y", y, written=True, element=kind)
    total = source.index("total", count)
    body = f"    const Index k = (Index)blockIdx.x * {BLOCK} + threadIdx.x;\n    if (k < {total}) y[k] = 0;"
    return source.launch(step, "fill", "", body, grid=blocks_for(count), block=BLOCK)


def _each_index(step: Step, indices: Operand, y: Operand, kind: str, extent: int, name: str, do: str) -> Launch:
    """`do` for every valid index; y[index] is `*place`."""
    source = KernelSource([indices], max(indices.size, extent))
    source.pointer("indices", indices)
    source.pointer("y", y, written=True, element=kind)
    check = checked(source, step, extent)
    total = source.index("total", indices.size)
    body = f"""    const Index k = (Index)blockIdx.x * {BLOCK} + threadIdx.x;
    if (k >= {total}) return;
    {source.unraveled("k", collapsed_axes(indices.shape, [indices.strides]), ["index_at"], "k")}
    const long long index = (long long)indices[index_at];
    if (!valid(index, {check})) return;
    {kind}* place = y + index;
    {do}"""
    return source.launch(step, name, VALID, body, grid=blocks_for(indices.size), block=BLOCK)


def count_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """count_indices: integers are added, so their order does not matter."""
    indices, y = operands[step.inputs[0]], operands[step.results[0]]
    launches = []
    kind = "unsigned long long"
    if y.size:
        launches.append(_filled(step, y, kind, y.size))
    if indices.size:
        do = f"atomicAdd(place, ({kind})1);"
        launches.append(_each_index(step, indices, y, kind, y.size, "count indices", do))
    return launches


# Renormalize --------------------------------------------------------------------------------------------------------


def renormalize_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """Mark the rows that are looked up, then copy the table, a warp per row."""
    table, indices, y = operands[step.inputs[0]], operands[step.inputs[1]], operands[step.results[0]]
    rows = table.shape[0]
    launches = []
    marks = operands.workspace(step, 0, _workspace(step))
    if rows:
        launches.append(_filled(step, marks, "int", rows))
    if indices.size:
        launches.append(_each_index(step, indices, marks, "int", rows, "mark rows", "*place = 1;"))
    if y.size:
        launches.append(_scaled(step, table, marks, y))
    return launches


def _norm(p: float, real: str) -> tuple[str, str, str]:
    """How |x| gets into a norm, how two parts of it become one, and what is then done: expressions of a, b and x."""
    if p == np.inf:
        return "x", "maximum(a, b)", "a"
    if p == -np.inf:
        return "x", "minimum(a, b)", "a"
    if p == 0:
        return f"({real})(x != 0)", "a + b", "a"
    if p == 1:
        return "x", "a + b", "a"
    if p == 2:
        return "x * x", "a + b", "sqrt(a)"
    return "pow(x, p)", "a + b", "pow(a, 1 / p)"


def _scaled(step: Step, table: Operand, marks: Operand, y: Operand) -> Launch:
    rows, dimension = table.shape
    real = register_type(table.dtype)
    number = np.float64 if real == "double" else np.float32
    p = float(step.attributes["p"])
    seen, both, last = _norm(p, real)
    source = KernelSource([table, y], 32 * rows)
    source.pointer("table", table)
    source.pointer("marks", marks, element="int")
    source.pointer("y", y, written=True)
    source.value("limit", real, number(step.attributes["maximum_norm"]))
    source.value("p", real, number(p))
    for name, value in (("rows", rows), ("dimension", dimension)):
        source.index(name, value)
    for name, operand in (("table", table), ("y", y)):
        source.index(f"{name}_row", operand.strides[0])
        source.index(f"{name}_column", operand.strides[1])
    element = loaded(table.dtype, "from[c * table_column]")
    start = "INFINITY_F" if p == -np.inf else "0"
    body = f"""    const Index row = (Index)blockIdx.x * {BLOCK // 32} + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (row >= rows) return;
    const auto* from = table + row * table_row;
    auto* to = y + row * y_row;
    {real} factor = 1;
    if (marks[row] != 0) {{
        {real} a = {start};
        for (Index c = lane; c < dimension; c += 32) {{
            const {real} value = {element}, x = value < 0 ? -value : value, b = {seen};
            a = {both};
        }}
        #pragma unroll
        for (int by = 16; by > 0; by /= 2) {{
            const {real} b = __shfl_xor_sync(0xffffffffu, a, by);
            a = {both};
        }}
        const {real} norm = {last};
        // The small number is PyTorch's; it also keeps the row safely below the limit.
        if (norm > limit) factor = limit / (norm + ({real})1e-7);
    }}
    for (Index c = lane; c < dimension; c += 32) to[c * y_column] = {stored(y.dtype, f"({element} * factor)")};"""
    return source.launch(step, "renormalize rows", "", body, grid=blocks_for(rows, BLOCK // 32), block=BLOCK)


def _workspace(step: Step) -> int:
    """A mark per row."""
    return 4 * max(step.inputs[0].shape[0], 1)


def _supports_table(step: Step) -> bool:
    table, indices = step.inputs
    return is_floating(table.dtype) and is_element(table.dtype) and is_index(indices.dtype)


KERNELS: dict[str, Row] = {
    "count_indices": Row(count_launches, supports=lambda step: is_index(step.inputs[0].dtype)),
    "renormalize": Row(renormalize_launches, supports=_supports_table, workspace=_workspace),
}
