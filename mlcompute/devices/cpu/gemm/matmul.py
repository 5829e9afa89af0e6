"""matmul: by oneDNN's sgemm called from native code, or by our own gemm kernels where it is slow, or missing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

import numpy as np

from mlcompute.devices.cpu import onednn
from mlcompute.devices.cpu.codegen.arguments import Argument
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code, float_literal, vector_lanes
from mlcompute.devices.cpu.codegen.loops import AxisRegisters, address_at, unravel_index
from mlcompute.devices.cpu.gemm.gemm_bfloat16 import bfloat16_entries, bfloat16_workspace, suits
from mlcompute.devices.cpu.gemm.gemm_blocked import blocked_workspace, gemm_blocked_entry
from mlcompute.devices.cpu.gemm.gemm_by_rows import gemm_by_rows_entry
from mlcompute.devices.cpu.gemm.gemm_few_rows import few_rows_entry, has_few_rows, has_small_b
from mlcompute.devices.cpu.gemm.gemm_nt_in_place import in_place_entry, shared_in_place
from mlcompute.devices.cpu.gemm.gemm_split_k import split_k_entries, suits_split_k
from mlcompute.devices.cpu.gemm.gemm_tn import is_gemm_tn, sums_as_update
from mlcompute.devices.cpu.gemm.gemm_tn_slices import reads_slices, slice_entries, slices_workspace, suits_slices
from mlcompute.devices.cpu.kernels.widened import has_bfloat16
from mlcompute.devices.cpu.onednn.entries import report_status
from mlcompute.devices.cpu.onednn.first_sgemm import first_sgemm
from mlcompute.devices.cpu.runtime.entry import Entry, Maker
from mlcompute.devices.cpu.runtime.threads import machine_slices
from mlcompute.devices.loop_nest import Axis, Operand, Operands, collapsed_axes, iteration_count
from mlcompute.ops.bfloat16 import computed_type, is_bfloat16
from mlcompute.ops.op import FLOAT32, Step

#: Nanoseconds per multiplication and addition of one thread, for the estimate of a matmul's cost.
_NS_PER_FLOP = 1 / 80.0
#: Rows that a block of sgemm should have at least.
_FEWEST_ROWS = 8
#: Rows of a up to which packing all of b costs too much: sgemm packs less.
_FEW_ROWS = 128
#: Elements of a result up to which our own kernel is steadier than sgemm, if rows are whole panels. The rate of sgemm
#: falls to a half with rows of a power of two, depending on where they lie. Larger results it computes a tenth faster.
_LARGE = 1 << 21
#: Bytes of b that a thread reads from its own cache, after the first time.
_CACHED_B = 1 << 20
#: What reading a row of a or a column of b costs a block, in elements of y it could compute meanwhile.
_READING = 16
#: Cores from which on a block is cut in two, where it has so many multiplications.
_MANY_CORES, _LONG = 8, 1 << 24
#: Products of a program that are asked in advance whether sgemm multiplies.
_LOOKED_AT = 32


def matmul_entry(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """y = a b over leading axes."""
    a, b, y = (operands[value] for value in (*step.inputs, step.results[0]))
    if is_mixed(step) and suits(*step.inputs) and not sums_as_update(a, b, y):
        return bfloat16_entries(step, operands, functools.partial(_library_entry, step, operands))
    if is_mixed(step):
        if not (y.size and a.size and _orientation(a) and _orientation(b)):
            return None
        return [gemm_blocked_entry(step, operands, a, b, y, _batch(a, b, y))]
    if suits_slices(step) and reads_slices(a, b, y):
        return slice_entries(step, operands, a, b, y)
    if not is_gemm_tn(a, b, y) and suits_split_k(a, b, y):
        return split_k_entries(step, a, b, y)
    entry = gemm_entry(step, operands, a, b, y)
    return None if entry is None else [entry]


def is_mixed(step: Step) -> bool:
    """Is something bfloat16, and everything else float32?"""
    return has_bfloat16(step) and all(computed_type(value.dtype) == FLOAT32 for value in (*step.inputs, *step.results))


def reads_bfloat16(step: Step) -> bool:
    """Is it better to convert while packing? With few rows not: sgemm packs less, and there is little to convert."""
    a, b = step.inputs
    if suits(a, b):
        return True
    return is_bfloat16(b.dtype) or len(b.shape) > 2 or a.shape[-2] >= _FEW_ROWS or onednn.load() is None


def workspace(step: Step) -> int:
    """Bytes for packing, and for conversion where bfloat16 is multiplied."""
    if suits_slices(step):
        return slices_workspace(step)
    if not is_mixed(step) or not step.results[0].size:
        return 0
    if suits(*step.inputs):
        return bfloat16_workspace(step)
    (*_, m, n), dtype = step.results[0].shape, step.results[0].dtype
    return blocked_workspace(m, n, dtype)


def gemm_entry(step: Step, operands: Operands, a: Operand, b: Operand, y: Operand) -> Entry | None:
    """y = a b over leading axes, by the kernel that suits; where something is bfloat16, see `blocked_workspace`."""
    if is_mixed(step):
        return gemm_blocked_entry(step, operands, a, b, y, _batch(a, b, y))
    kernel = _kernel(a, b, y)
    if kernel is None:
        return None
    if kernel == "sgemm":
        first_sgemm.need(onednn.require())
        return _library_entry(step, operands, a, b, y)
    batch = _batch(a, b, y)
    sharing = shared_in_place(a, b, y, operands.threads) if kernel == "blocked" else None
    if sharing is not None:
        return in_place_entry(step, operands, a, b, y, sharing)
    if kernel == "blocked":
        return gemm_blocked_entry(step, operands, a, b, y, batch)
    if kernel == "by rows":
        return gemm_by_rows_entry(step, a, b, y, batch)
    return few_rows_entry(step, operands, a, b, y, batch, by_columns=kernel == "few rows by columns")


def begin_sgemm(steps: Sequence[Step]) -> None:
    """Let sgemm's machine code be made if it looks as if one of the first products will need it."""
    views: list[Step] = []
    products: list[Step] = []
    for step in steps:
        if step.op.is_view:
            views.append(step)
        elif step.op.name == "matmul":
            products.append(step)
            if len(products) == _LOOKED_AT:
                break
    operands = Operands(views, {step.results[0]: step.inputs[0] for step in views})
    for step in products:
        a, b, y = (operands[value] for value in (*step.inputs, step.results[0]))
        if not has_bfloat16(step) and _kernel(a, b, y) == "sgemm":
            first_sgemm.begin(onednn.require())
            return


_Kernel = Literal["blocked", "by rows", "few rows", "few rows by columns", "sgemm"]


def _kernel(a: Operand, b: Operand, y: Operand) -> _Kernel | None:
    """What suits: our own kernels, or sgemm; None where there is nothing that can read the operands."""
    if is_gemm_tn(a, b, y):
        return "blocked"
    if not y.is_dense or y.size == 0:
        return None
    m, n, k = y.shape[-2], y.shape[-1], a.shape[-1]
    if k == 0 or any(operand.dtype != FLOAT32 for operand in (a, b, y)):
        return "by rows"
    right, has_library = _orientation(b), onednn.load() is not None
    by_columns = right is not None and right[0] == ord("T")
    is_better = by_columns or (m >= _FEW_ROWS and m * n <= _LARGE and n % (8 * vector_lanes()) == 0)
    if right and has_small_b(a, b, by_columns):
        return "few rows by columns" if by_columns else "few rows"
    if _orientation(a) and right and is_better and min(m, k) >= 16 and n >= 8 and iteration_count(_batch(a, b, y)) == 1:
        return "blocked"
    if right and has_few_rows(a, by_columns) and (by_columns or not has_library):
        return "few rows by columns" if by_columns else "few rows"
    if has_library:
        return "sgemm"
    return "blocked" if right else None


def _library_entry(step: Step, operands: Operands, a: Operand, b: Operand, y: Operand) -> Entry | None:
    """By oneDNN's gemm of float32, or of bfloat16, in blocks that threads share."""
    library = onednn.require()
    m, n, k = y.shape[-2], y.shape[-1], a.shape[-1]
    left, right = _orientation(a), _orientation(b)
    if left is None or right is None:
        return None
    is_narrow = is_bfloat16(a.dtype)
    function = onednn.bfloat16_gemm() if is_narrow else library.sgemm
    batch = _batch(a, b, y)
    count = iteration_count(batch)
    tall, wide = _block(count, m, n, k)
    status = np.zeros(1, np.int64)
    arguments: list[Argument] = [
        function, count, m, n, k, a, left[0], left[1], b, right[0], right[1], y, n,
        a.strides[-2], b.strides[-1], tall, wide, status,
        *(number for each in batch for number in (each.extent, *each.strides)),
    ]  # fmt: skip
    # Blocks of rows are then exactly the rows other kernels give each thread.
    lines_up = operands.threads == 1 or tall * operands.threads == m
    rows = m if wide == n and len(y.shape) == 2 and lines_up else 0
    by_row = {2} if rows else set()
    if rows and a.is_dense:
        by_row.add(0)
    return Entry(
        step,
        _sgemm_code(len(batch), MEMORY_TYPES[a.dtype]),
        arguments,
        reads=[a, b],
        writes=[y],
        rows=rows,
        by_row=by_row,
        rows_for=operands.threads,
        own_reads={1} if right[0] == ord("T") and count == 1 and tall == m else set(),
        kernel="oneDNN bfloat16 gemm" if is_narrow else "oneDNN sgemm",
        cost=2.0 * count * m * n * k * _NS_PER_FLOP + 300.0,
        in_pieces=True,
        status=status,
        reason=lambda code: f"oneDNN could not multiply {a.shape} by {b.shape}: {onednn.meaning(code)}",
    )


def _block(count: int, m: int, n: int, k: int) -> tuple[int, int]:
    """Rows and columns of the blocks of y that threads share, of every matrix of a batch.

    How sgemm sums an element depends on the extents it is given, so blocks depend on shape and machine, not on the
    thread count. Every block reads its rows of a and its columns of b: where b is too large for a thread's cache,
    blocks are about as wide as tall.
    """
    # Of many cores some are slow: others then take over blocks of theirs.
    several = 2 if machine_slices() >= _MANY_CORES and count * m * n * k >= machine_slices() * _LONG else 1
    parts = -(-several * machine_slices() // count)
    if parts == 1:
        return m, n
    if m >= _FEWEST_ROWS * parts and 4 * k * n <= _CACHED_B:
        return -(-m // parts), n
    found = []
    for down in range(1, parts + 1):
        tall, wide = -(-m // down), _rounded(-(-n // -(-parts // down)), 16)
        blocks = -(-m // tall) * -(-n // wide)
        rounds = -(-blocks // parts)
        found.append((rounds * (tall * wide + _READING * (tall + wide)), tall, wide))
    return min(found)[1:]


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def reads_matmul(step: Step, operands: Operands) -> bool:
    """Do the rows or columns of both matrices lie side by side?"""
    a, b, y = operands[step.inputs[0]], operands[step.inputs[1]], operands[step.results[0]]
    if is_gemm_tn(a, b, y) or computed_type(a.dtype) != FLOAT32 or computed_type(b.dtype) != FLOAT32:
        return True
    return _orientation(a) is not None and _orientation(b) is not None


def _orientation(operand: Operand) -> tuple[int, int] | None:
    """(letter, leading extent) with which sgemm reads the last two axes; None when neither is contiguous."""
    rows, columns = operand.shape[-2:]
    row_stride, column_stride = operand.strides[-2:]
    if column_stride == 1 or columns == 1:
        if columns == 1 and column_stride != 1 and rows != 1 and row_stride == 1:
            return ord("T"), max(rows, 1)
        if row_stride >= columns or rows == 1:
            return ord("N"), max(row_stride if rows > 1 else columns, columns, 1)
    if (row_stride == 1 or rows == 1) and (column_stride >= rows or columns == 1):
        return ord("T"), max(column_stride if columns > 1 else rows, rows, 1)
    return None


def _batch(a: Operand, b: Operand, y: Operand) -> list[Axis]:
    """The axes along which matrices follow each other, with the strides of a, b and y."""
    leading = y.shape[:-2]
    if not leading:
        return [Axis(1, (0, 0, 0))]
    strides = []
    for operand in (a, b, y):
        own = operand.shape[:-2]
        extra = len(leading) - len(own)
        steps = tuple(0 if extent == 1 else stride for extent, stride in zip(own, operand.strides, strict=False))
        strides.append((0,) * extra + steps)
    return collapsed_axes(leading, strides)


@functools.cache
def _sgemm_code(batch_axes: int, factor: str) -> Code:
    code = Code("matmul")
    code.later(f"{batch_axes} {factor}", lambda: _write_sgemm(code, batch_axes, factor))
    return code


def _write_sgemm(code: Code, batch_axes: int, factor: str) -> None:
    function = code.argument(0, "ptr")
    count, m, n, k = (code.argument(index) for index in range(1, 5))
    a, letter_a, lda = code.argument(5, "ptr"), code.argument(6), code.argument(7)
    b, letter_b, ldb = code.argument(8, "ptr"), code.argument(9), code.argument(10)
    y, ldc = code.argument(11, "ptr"), code.argument(12)
    row_a, column_b, tall, wide = (code.argument(index) for index in range(13, 17))
    failed = code.argument(17, "ptr")
    batch = [
        AxisRegisters(code.argument(first), [code.argument(first + number) for number in (1, 2, 3)])
        for first in range(18, 18 + 4 * batch_axes, 4)
    ]
    down, across = (code.div(code.sub(code.add(extent, block), 1), block) for extent, block in ((m, tall), (n, wide)))
    letters = [code.let(f"trunc i64 {letter} to i8") for letter in (letter_a, letter_b)]
    begin, end = code.share(code.mul(count, code.mul(down, across)), in_pieces=True)
    with code.loop(begin, end) as number:
        line = code.div(number, across)
        row, column = code.mul(code.rem(line, down), tall), code.mul(code.rem(number, across), wide)
        rows, columns = code.minimum(code.sub(m, row), tall), code.minimum(code.sub(n, column), wide)
        matrix = unravel_index(code, code.div(line, down), batch)
        at_a, at_b, at_y = (
            address_at(code, p, i, batch, matrix, "float" if p == y else factor) for i, p in enumerate((a, b, y))
        )
        at_a = code.at(at_a, code.mul(row, row_a), factor)
        at_b = code.at(at_b, code.mul(column, column_b), factor)
        at_y = code.at(at_y, code.add(code.mul(row, ldc), column), "float")
        status = code.let(
            f"call i32 {function}(i8 signext {letters[0]}, i8 signext {letters[1]}, i64 {rows}, i64 {columns}, "
            f"i64 {k}, float {float_literal(1.0)}, ptr {at_a}, i64 {lda}, ptr {at_b}, i64 {ldb}, "
            f"float {float_literal(0.0)}, ptr {at_y}, i64 {ldc})"
        )
        report_status(code, status, failed)


KERNELS: dict[str, Maker] = {"matmul": matmul_entry}
READS = {"matmul": reads_matmul}
WORKSPACES = {"matmul": workspace}
BFLOAT16 = dict.fromkeys(KERNELS, reads_bfloat16)
