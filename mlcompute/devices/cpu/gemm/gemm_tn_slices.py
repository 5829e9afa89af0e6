"""gemm_tn in slices of the samples: y = aᵀ b, where every thread reads only samples that it has computed itself.

    a (k, m) and b (k, n), rows contiguous     ->     y (m, n)

Threads that share the rows of y read all samples, and lines that two cores have read are dear to write again: where
the cores do not share a cache, ten times as dear as others. So each slice of the samples is multiplied by itself, and
the products are added, always in the same order. There are few slices, a fact of the machine. It is worth it where y is
small beside the samples: of a layer that is applied to all tokens of a text, say.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import Code, vector_lanes
from mlcompute.devices.cpu.codegen.loops import Line, vector_loop
from mlcompute.devices.cpu.gemm.gemm_blocked import gemm_blocked_entry
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.cpu.runtime.threads import machine_slices
from mlcompute.devices.loop_nest import Axis, Operand, Operands
from mlcompute.ops.op import FLOAT32, Step

#: Slices beyond which their sums would take too much memory, and adding them too long.
_MOST_SLICES = 4
#: Samples of a slice, rows and columns from which on it is worth it.
_LEAST_SAMPLES, _LEAST_ROWS, _LEAST_COLUMNS = 64, 16, 16
#: More samples than these are multiplied by sgemm (`matmul`), unless columns are a multiple of so many vectors.
_FEW_SAMPLES, _FULL_VECTORS = 512, 8


def suits_slices(step: Step) -> bool:
    """Do all slices together have fewer sums than a thread would read of a and b?"""
    a, b, (y,) = *step.inputs, step.results
    slices = machine_slices()
    if not 1 < slices <= _MOST_SLICES or any(value.dtype != FLOAT32 or len(value.shape) != 2 for value in (a, b, y)):
        return False
    (m, n), k = y.shape, a.shape[1]
    if k % slices or k < slices * _LEAST_SAMPLES or m < _LEAST_ROWS or n < _LEAST_COLUMNS:
        return False
    if k > _FEW_SAMPLES and n % (_FULL_VECTORS * vector_lanes()):
        return False
    return slices * m * n <= k * (n + m // slices)


def reads_slices(a: Operand, b: Operand, y: Operand) -> bool:
    """Are samples the rows of a, which is a view of its transpose, and of b?"""
    return a.strides[0] == 1 and b.strides[1] == 1 and y.is_dense


def slices_workspace(step: Step) -> int:
    """Bytes of all slices' sums."""
    return machine_slices() * step.results[0].nbytes


def slice_entries(step: Step, operands: Operands, a: Operand, b: Operand, y: Operand) -> Sequence[Entry]:
    """The product of every slice, and their sum."""
    shape = (machine_slices(), *y.shape)
    sums = operands.workspace(step, 0, slices_workspace(step)).holding(shape, FLOAT32)
    return [_products(step, operands, a, b, sums), _sum(step, sums, y)]


def _products(step: Step, operands: Operands, a: Operand, b: Operand, sums: Operand) -> Entry:
    """A batch of products, one for each slice."""
    (slices, m, n), samples = sums.shape, a.shape[1]
    part = samples // slices
    of_a = Operand(a.base, a.offset, (slices, m, part), (part * a.strides[1], *a.strides), a.dtype)
    of_b = Operand(b.base, b.offset, (slices, part, n), (part * b.strides[0], *b.strides), b.dtype)
    batch = [Axis(slices, (of_a.strides[0], of_b.strides[0], m * n))]
    entry = gemm_blocked_entry(step, operands, of_a, of_b, sums, batch)
    entry.kernel, entry.reads = "gemm_tn in slices", [a, b]
    if a.strides[1] == m and b.is_dense:  # as many threads as slices touch only samples of their own
        entry.rows, entry.by_row, entry.rows_for = samples, {0, 1}, slices
    return entry


def _sum(step: Step, sums: Operand, y: Operand) -> Entry:
    """Slice after slice, in order."""
    slices, m, n = sums.shape
    code = Code("sum_slices")
    args = KernelArguments(code)
    rows, columns, size = args.numbers([m, n, m * n])
    parts, total = args.pointer(sums), Line(code, args.pointer(y), "float")
    begin, end = (code.mul(edge, columns) for edge in code.share(rows))

    def add(index: str, mask: str | None) -> None:
        value = Line(code, parts, "float").load(index, mask)
        for number in range(1, slices):
            value = value + Line(code, code.at(parts, code.mul(size, number), "float"), "float").load(index, mask)
        total.store(index, value, mask)

    vector_loop(code, begin, end, add)
    return Entry(
        step,
        code,
        args.values,
        reads=[sums],
        writes=[y],
        rows=m,
        by_row={1},
        kernel="sum of slices",
        cost=0.1 * sums.size,
    )
