"""How cuBLASLt has to read the operands of a matmul, in plain numbers.

cuBLASLt thinks in columns: a matrix lies in memory column by column, `leading` elements apart. Our y (m, n) lies row by
row, so in its eyes it is yᵀ (n, m), and yᵀ = bᵀ aᵀ: b is its first factor, a its second, and what lies row by row is
not transposed for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mlcompute.devices.cuda.cublaslt import library as lt
from mlcompute.devices.loop_nest import Operand, broadcast_strides
from mlcompute.ops.bfloat16 import is_bfloat16

#: Bytes that the addresses of all values are multiples of, before an operand's own offset.
BASE_ALIGNMENT = 64
_TYPES = {np.dtype(np.float32): lt.REAL_32F, np.dtype(np.float16): lt.REAL_16F}


def _data_type(dtype: np.dtype[Any]) -> int | None:
    return lt.REAL_16BF if is_bfloat16(dtype) else _TYPES.get(dtype)


@dataclass(frozen=True)
class Matrix:
    """A matrix as cuBLASLt sees it: column by column, before it is transposed; strides count elements.

    alignment   bytes that the address is at least a multiple of
    """

    rows: int
    columns: int
    leading: int
    transposed: bool
    batch_stride: int
    alignment: int


@dataclass(frozen=True)
class Problem:
    """y = a b, as many times as `batch` says: first = b, second = a, result = y.

    result_type   that of y; `data_type` is that of the factors
    """

    data_type: int
    result_type: int
    compute_type: int
    first: Matrix
    second: Matrix
    result: Matrix
    depth: int
    batch: int
    epilogue: int = lt.EPILOGUE_DEFAULT


def problem_of(a: Operand, b: Operand, y: Operand, allows_tf32: bool) -> Problem | None:
    """The matmul of operands with at most one batch axis; None when cuBLASLt cannot read them in place."""
    data_type, result_type = _data_type(a.dtype), _data_type(y.dtype)
    if data_type is None or result_type is None or a.dtype != b.dtype:
        return None
    # Sums of bfloat16 products are float32, and may be stored so.
    if result_type != data_type and (data_type, result_type) != (lt.REAL_16BF, lt.REAL_32F):
        return None
    if 0 in (*y.shape, a.shape[-1]):
        return None
    assert len(y.shape) <= 3, y
    first, second, result = _matrix(b), _matrix(a), _matrix(y)
    if first is None or second is None or result is None or result.transposed:
        return None
    m, n, depth = y.shape[-2], y.shape[-1], a.shape[-1]
    batch = math.prod(y.shape[:-2])
    if batch > 1:
        steps = [broadcast_strides(operand, (*y.shape[:-2], *operand.shape[-2:]))[0] for operand in (b, a, y)]
        if (
            steps[0] == 0
            and not second.transposed
            and steps[1] == m * second.leading
            and steps[2] == m * result.leading
        ):
            # One matrix b for all: one matmul over all rows of all a.
            second, result = replace(second, columns=m * batch), replace(result, columns=m * batch)
            batch = 1
        else:
            first, second, result = (
                replace(matrix, batch_stride=step) for matrix, step in zip((first, second, result), steps, strict=True)
            )
    compute = lt.COMPUTE_32F_FAST_TF32 if allows_tf32 and data_type == lt.REAL_32F else lt.COMPUTE_32F
    assert (result.rows, result.columns * batch) == (n, m * math.prod(y.shape[:-2]))
    return Problem(data_type, result_type, compute, first, second, result, depth, batch)


def _matrix(operand: Operand) -> Matrix | None:
    """The last two axes, row by row or (transposed) column by column; None when neither is contiguous."""
    rows, columns = operand.shape[-2:]
    row_stride, column_stride = operand.strides[-2:]
    alignment = _alignment(operand)
    by_row = column_stride == 1 or columns == 1
    by_column = row_stride == 1 or rows == 1
    # Both hold for a single row or column; then the way that needs no room between the lines is taken.
    if by_row and (rows == 1 or row_stride >= columns):
        return Matrix(columns, rows, columns if rows == 1 else row_stride, False, 0, alignment)
    if by_column and (columns == 1 or column_stride >= rows):
        return Matrix(rows, columns, rows if columns == 1 else column_stride, True, 0, alignment)
    return None


def _alignment(operand: Operand) -> int:
    """Bytes that the addresses of the operand's matrix and of all its lines are multiples of."""
    return math.gcd(BASE_ALIGNMENT, operand.byte_offset)
