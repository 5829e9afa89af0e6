"""matmul_bias_gradient: a weight gradient by cuBLASLt, which sums the gradient's columns in the same call.

The column sums are the bias gradient: dw (out, in) = dyᵀ x and db (out) = sum of the rows of dy, which then is read
once instead of twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mlcompute.devices.cuda import cublaslt
from mlcompute.devices.cuda.cublaslt.library import EPILOGUE_BGRADA, EPILOGUE_BGRADB
from mlcompute.devices.cuda.kernels import reductions
from mlcompute.devices.cuda.kernels.launch import Launch, LibraryCall, Row
from mlcompute.devices.cuda.kernels.matmul import (
    ALIGNMENT,
    copied_bytes,
    copied_factor,
    factors,
    library_call,
    no_gpu,
    product_launches,
    supports_matmul,
    workspace_bytes,
)
from mlcompute.devices.cuda.kernels.small_matmul import is_small
from mlcompute.devices.cuda.libraries import current_gpu
from mlcompute.devices.loop_nest import Operand, Operands, dense_strides
from mlcompute.devices.precision import matmul_precision
from mlcompute.ops.op import FLOAT32, Step, Value

_KERNEL = "cuBLASLt with bias gradient"


def bias_gradient_launches(step: Step, operands: Operands) -> Sequence[Launch | LibraryCall]:
    """y = a b, and the sums of the columns of aᵀ or of b."""
    a, b = operands[step.inputs[0]], operands[step.inputs[1]]
    y, sums = (operands[value] for value in step.results)
    gpu = current_gpu()
    if gpu is None:
        return [LibraryCall(step, _KERNEL, [a, b, y, sums], [2, 3], no_gpu)]
    copies, a, b, workspace = factors(step, a, b, y, operands)
    problem = _problem(step, a, b, y)
    call = None
    if problem is not None and sums.byte_offset % 16 == 0:
        call = library_call(step, gpu, problem, (a, b, y), workspace, _KERNEL, sums)
    if call is not None:
        return [*copies, call]
    # The operands do not lie as `supports_bias_gradient` thought.
    column_sums = reductions.KERNELS["sum"].make(step.attributes["steps"][1], operands)
    return [*copies, *product_launches(step, a, b, y, workspace), *column_sums]


def supports_bias_gradient(step: Step) -> bool:
    """Has cuBLASLt an algorithm for dense factors, of which the first is transposed?"""
    (a, b), (y, sums) = step.inputs[:2], step.results
    if not supports_matmul(step) or (y.dtype, sums.dtype) != (FLOAT32, FLOAT32) or is_small(a, b, y) or not y.size:
        return False
    gpu = current_gpu()
    if gpu is None:
        return True
    lying = [_lying(a, transposed=True), _lying(b), _lying(y)]
    copied = copied_factor(step, *lying)
    if copied is not None:
        lying[copied] = _lying((a, b)[copied], transposed=copied == 1)
    problem = _problem(step, *lying)
    if problem is None:
        return False
    try:
        cublaslt.Product(problem, gpu, max(0, workspace_bytes(step) - copied_bytes(step) - ALIGNMENT))
    except cublaslt.NoAlgorithmError:
        return False
    return True


def _lying(value: Value, *, transposed: bool = False) -> Operand:
    """A matrix row by row, or column by column."""
    strides = dense_strides(value.shape[::-1])[::-1] if transposed else dense_strides(value.shape)
    return Operand(value, 0, value.shape, strides, value.dtype)


def _problem(step: Step, a: Operand, b: Operand, y: Operand) -> cublaslt.Problem | None:
    # What is a to us is the second factor to cuBLASLt.
    epilogue = EPILOGUE_BGRADB if step.attributes["factor"] == 0 else EPILOGUE_BGRADA
    problem = cublaslt.problem_of(a, b, y, matmul_precision.allows_tf32)
    return None if problem is None else replace(problem, epilogue=epilogue)


KERNELS: dict[str, Row] = {
    "matmul_bias_gradient": Row(bias_gradient_launches, supports_bias_gradient, workspace_bytes)
}
