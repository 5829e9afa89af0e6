"""matmul_bias_gradient: cuBLASLt adds up a factor over the terms while it multiplies.

Sums of our own are as a rule faster: they share launches, and run beside products. So it is used only where it was
measured to take no longer than the product alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mlcompute.devices.cuda import cublaslt
from mlcompute.devices.cuda.codegen.types import FLOAT
from mlcompute.devices.cuda.cublaslt import library as lt
from mlcompute.devices.cuda.kernels.activation_epilogue import matrices
from mlcompute.devices.cuda.kernels.launch import LibraryCall, Row, Work
from mlcompute.devices.cuda.kernels.matmul import (
    ALIGNMENT,
    copied_bytes,
    factors,
    library_call,
    no_gpu,
    workspace_bytes,
)
from mlcompute.devices.cuda.kernels.small_matmul import is_small
from mlcompute.devices.cuda.libraries import current_gpu
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.devices.precision import matmul_precision
from mlcompute.ops.bfloat16 import is_bfloat16
from mlcompute.ops.op import Step

_KERNEL = "cuBLASLt with bias gradient"


def bias_gradient_launches(step: Step, operands: Operands) -> Sequence[Work]:
    """a b, and the sums of a factor, in one call."""
    a, b, y = matrices(step, operands)
    sums = operands[step.results[1]]
    gpu = current_gpu()
    if gpu is None:
        return [LibraryCall(step, _KERNEL, [a, b, y, sums], [2, 3], no_gpu)]
    copies, a, b, workspace = factors(step, a, b, y, operands)
    problem = _problem(step, a, b, y)
    call = None if problem is None else library_call(step, gpu, problem, (a, b, y), workspace, _KERNEL, sums)
    assert call is not None, f"{step}: supports_bias_gradient found an algorithm"
    return [*copies, call]


def supports_bias_gradient(step: Step) -> bool:
    """Are results float32, is the product large, and has cuBLASLt an algorithm?"""
    a, b = step.inputs[:2]
    if any(value.dtype != FLOAT for value in step.results) or a.dtype != b.dtype or not a.size or not b.size:
        return False
    if (a.dtype != FLOAT and not is_bfloat16(a.dtype)) or is_small(a, b, step.results[0]):
        return False
    gpu = current_gpu()
    if gpu is None:
        return True
    copied, transposed = copied_bytes(step), step.attributes["transposed"]
    if copied and transposed == (True, False):  # as `factors` leaves them
        transposed = (False, False) if a.size <= b.size else (True, True)
    problem = _problem(step, *matrices(step, None, transposed))
    room = max(0, workspace_bytes(step) - copied - ALIGNMENT)
    try:
        return problem is not None and cublaslt.Matmul(problem, gpu, room).has_epilogue
    except cublaslt.NoAlgorithmError:
        return False


def _problem(step: Step, a: Operand, b: Operand, y: Operand) -> cublaslt.Problem | None:
    """cuBLASLt's first factor is our b, its second our a."""
    epilogue = (lt.EPILOGUE_BGRADB, lt.EPILOGUE_BGRADA)[step.attributes["factor"]]
    problem = cublaslt.problem_of(a, b, y, matmul_precision.allows_tf32)
    return None if problem is None else replace(problem, epilogue=epilogue)


KERNELS: dict[str, Row] = {
    "matmul_bias_gradient": Row(bias_gradient_launches, supports_bias_gradient, workspace_bytes, lambda step: False)
}
