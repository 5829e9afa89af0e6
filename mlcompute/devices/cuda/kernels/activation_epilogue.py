"""A matmul with ReLU, GELU or the slope of one, by cuBLASLt; with ReLU by our own kernel for small products, too.

Of (4096, 768) by (768, 3072) on an H200, ReLU is faster by it than a product and a loop of our own; GELU and its slope
are in bfloat16, and slower of float32 numbers; the slope of ReLU is slower (`python -m benchmarks.gpu.layers`).
Its GELU is the tanh form. What is no number stays so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mlcompute.devices.cuda import cublaslt
from mlcompute.devices.cuda.cublaslt import library as lt
from mlcompute.devices.cuda.kernels.launch import LibraryCall, Row, Work
from mlcompute.devices.cuda.kernels.matmul import ALIGNMENT, copied_bytes, library_call, no_gpu, workspace_bytes
from mlcompute.devices.cuda.kernels.small_matmul import is_small, small_matmul
from mlcompute.devices.cuda.libraries import current_gpu
from mlcompute.devices.loop_nest import Operand, Operands, dense_strides
from mlcompute.devices.precision import matmul_precision
from mlcompute.ops.bfloat16 import is_bfloat16
from mlcompute.ops.op import Step, Value

#: The matrix that GELU is applied to has lines that begin at multiples of so many elements.
_LINE = 8
_FLOAT, _MASK = np.dtype(np.float32), np.dtype(np.uint8)


def activation_launches(step: Step, operands: Operands) -> Sequence[Work]:
    """An activation of a b or a b + bias, or a b times the slope of one, in one call."""
    vector, matrix, kernel = _parts(step)
    a, b, y = matrices(step, operands)
    if _is_ours(step):
        passes = None if matrix is None else _matrix(matrix, y.shape, False, operands)
        bias = None if vector is None else operands[vector]
        return [small_matmul(step, a, b, y, bias, relu=not _is_gradient(step), passes=passes)]
    more = [None if value is None else operands[value] for value in (vector, matrix)]
    gpu = current_gpu()
    if gpu is None:
        writes = [2] if matrix is None or _is_gradient(step) else [2, 3]
        memory = [a, b, y, *(operand for operand in reversed(more) if operand is not None)]
        return [LibraryCall(step, kernel, memory, writes, no_gpu)]
    needed = workspace_bytes(step)
    workspace = operands.workspace(step, 0, needed) if needed else None
    problem = _problem(step, a, b, y)
    call = None if problem is None else library_call(step, gpu, problem, (a, b, y), workspace, kernel, *more)
    assert call is not None, f"{step}: supports_activation found an algorithm"
    return [call]


def supports_activation(step: Step) -> bool:
    """Is everything float32 or everything bfloat16, and has cuBLASLt an algorithm?"""
    a, b = step.inputs[:2]
    _, matrix, _ = _parts(step)
    numbers = [value for value in (*step.inputs[:3], *step.results) if value.dtype != _MASK]
    if not all(value.dtype == _FLOAT for value in numbers) and not all(is_bfloat16(value.dtype) for value in numbers):
        return False
    if not a.size or not b.size:
        return False
    if _is_ours(step):
        return True
    if _is_relu(step):
        if matrix is not None and matrix.dtype != _MASK:
            return False
        if step.attributes["transposed"] == (True, False) and copied_bytes(step):
            return False  # as a product alone, one of its factors is copied, and sums are others
    elif b.shape[1] % _LINE:
        return False
    gpu = current_gpu()
    if gpu is None:
        return True
    problem = _problem(step, *matrices(step, None))
    if problem is None:
        return False
    try:
        return cublaslt.Matmul(problem, gpu, max(0, workspace_bytes(step) - ALIGNMENT)).has_epilogue
    except cublaslt.NoAlgorithmError:
        return False


def is_faster(step: Step) -> bool | None:
    """Where nothing was measured: ReLU, and in bfloat16 GELU and its slope."""
    if _is_ours(step) or (_is_relu(step) and len(step.results) > 1):
        return None  # a mask is written where the step that reads it is faster
    if _is_relu(step):
        return not _is_gradient(step)
    return is_bfloat16(step.inputs[0].dtype)


def _is_ours(step: Step) -> bool:
    """Is it ReLU, or its slope, of a product for our own kernel?"""
    a, b = step.inputs[:2]
    shape = (a.shape[0], b.shape[1])
    has_mask = any(value.dtype == _MASK for value in (*step.inputs, *step.results))
    return _is_relu(step) and not has_mask and is_small(a, b, _matrix(step.results[0], shape, False, None))


def _is_relu(step: Step) -> bool:
    return step.op.name in ("matmul_relu", "matmul_relu_gradient")


def _is_gradient(step: Step) -> bool:
    return step.op.name in ("matmul_relu_gradient", "matmul_gelu_gradient")


def _parts(step: Step) -> tuple[Value | None, Value | None, str]:
    """The bias; the matrix that an epilogue reads or writes, too, where it does; and what the call is named."""
    name = "ReLU" if _is_relu(step) else "GELU"
    if _is_gradient(step):
        return None, step.inputs[2], f"cuBLASLt with {name} gradient"
    bias = step.inputs[2] if len(step.inputs) > 2 else None
    matrix = step.results[1] if len(step.results) > 1 else None
    return bias, matrix, f"cuBLASLt with {'bias and ' if bias else ''}{name}"


def matrices(
    step: Step, operands: Operands | None, transposed: tuple[bool, bool] | None = None
) -> tuple[Operand, Operand, Operand]:
    """a, b and the result, as matrices without gaps.

    transposed   do the factors lie column by column? As a rule that is an attribute of the step
    """
    a, b = step.inputs[:2]
    first, second = transposed or step.attributes["transposed"]
    shape = (a.shape[0], b.shape[1])
    return (
        _matrix(a, a.shape, first, operands),
        _matrix(b, b.shape, second, operands),
        _matrix(step.results[0], shape, False, operands),
    )


def _matrix(value: Value, shape: tuple[int, ...], is_turned: bool, operands: Operands | None) -> Operand:
    base, offset = (value, 0) if operands is None else operands[value][:2]
    strides = dense_strides(shape[::-1])[::-1] if is_turned else dense_strides(shape)
    return Operand(base, offset, shape, strides, value.dtype)


def _problem(step: Step, a: Operand, b: Operand, y: Operand) -> cublaslt.Problem | None:
    bias, matrix, _ = _parts(step)
    if _is_gradient(step):
        epilogue = lt.EPILOGUE_DRELU if _is_relu(step) else lt.EPILOGUE_DGELU
    else:
        epilogue = lt.EPILOGUE_RELU if _is_relu(step) else lt.EPILOGUE_GELU
        epilogue |= (lt.EPILOGUE_BIAS if bias else 0) | (lt.EPILOGUE_AUX if matrix else 0)
    problem = cublaslt.problem_of(a, b, y, matmul_precision.allows_tf32)
    return None if problem is None else replace(problem, epilogue=epilogue)


_ROW = Row(activation_launches, supports_activation, workspace_bytes, is_faster)
KERNELS: dict[str, Row] = dict.fromkeys(
    ("matmul_relu", "matmul_gelu", "matmul_relu_gradient", "matmul_gelu_gradient"), _ROW
)
