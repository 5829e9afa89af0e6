"""matmul_gelu and matmul_gelu_gradient: cuBLASLt applies GELU, or its slope, before it stores a product of bfloat16.

Of float32 numbers it takes longer than a product and a loop of our own: 98 instead of 83 microseconds for GELU of
(4096, 768) by (768, 3072) on an H200, 168 instead of 103 for its gradient; of bfloat16 43 instead of 50, and 45 instead
of 56. Its GELU is the tanh form; what is no number stays so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mlcompute.devices.cuda import cublaslt
from mlcompute.devices.cuda.cublaslt.library import EPILOGUE_AUX, EPILOGUE_BIAS, EPILOGUE_DGELU, EPILOGUE_GELU
from mlcompute.devices.cuda.kernels.launch import Launch, LibraryCall, Row
from mlcompute.devices.cuda.kernels.matmul import ALIGNMENT, library_call, no_gpu, workspace_bytes
from mlcompute.devices.cuda.libraries import current_gpu
from mlcompute.devices.loop_nest import Operand, Operands, dense_strides
from mlcompute.devices.precision import matmul_precision
from mlcompute.ops.bfloat16 import is_bfloat16
from mlcompute.ops.op import Step, Value

#: The matrix that GELU is applied to has lines that begin at multiples of so many elements.
_LINE = 8


def gelu_launches(step: Step, operands: Operands) -> Sequence[Launch | LibraryCall]:
    """gelu(a b), gelu(a b + bias), or a b gelu'(z), in one call."""
    vector, matrix, kernel = _parts(step)
    a, b, y = _matrices(step, operands)
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
    assert call is not None, f"{step}: supports_gelu found an algorithm"
    return [call]


def supports_gelu(step: Step) -> bool:
    """Is everything bfloat16, and has cuBLASLt an algorithm?"""
    a, b = step.inputs[:2]
    if not all(is_bfloat16(value.dtype) for value in (*step.inputs, *step.results)):
        return False
    if not a.size or not b.size or b.shape[1] % _LINE:
        return False
    gpu = current_gpu()
    if gpu is None:
        return True
    problem = _problem(step, *_matrices(step, None))
    if problem is None:
        return False
    try:
        return cublaslt.Product(problem, gpu, max(0, workspace_bytes(step) - ALIGNMENT)).has_epilogue
    except cublaslt.NoAlgorithmError:
        return False


def _is_gradient(step: Step) -> bool:
    return step.op.name == "matmul_gelu_gradient"


def _parts(step: Step) -> tuple[Value | None, Value | None, str]:
    """The bias, the matrix that GELU is applied to (where it is read or written), and what the call is named."""
    if _is_gradient(step):
        return None, step.inputs[2], "cuBLASLt with GELU gradient"
    bias = step.inputs[2] if len(step.inputs) > 2 else None
    return bias, step.results[1] if len(step.results) > 1 else None, f"cuBLASLt with {'bias and ' if bias else ''}GELU"


def _matrices(step: Step, operands: Operands | None) -> tuple[Operand, Operand, Operand]:
    """a, b and the result, as matrices without gaps."""
    found = []
    a, b = step.inputs[:2]
    shapes = (a.shape, b.shape, (a.shape[0], b.shape[1]))
    turned = (*step.attributes["transposed"], False)
    for value, shape, is_turned in zip((a, b, step.results[0]), shapes, turned, strict=True):
        base, offset = (value, 0) if operands is None else operands[value][:2]
        strides = dense_strides(shape[::-1])[::-1] if is_turned else dense_strides(shape)
        found.append(Operand(base, offset, shape, strides, value.dtype))
    return found[0], found[1], found[2]


def _problem(step: Step, a: Operand, b: Operand, y: Operand) -> cublaslt.Problem | None:
    bias, matrix, _ = _parts(step)
    epilogue = EPILOGUE_DGELU
    if not _is_gradient(step):
        epilogue = EPILOGUE_GELU | (EPILOGUE_BIAS if bias else 0) | (EPILOGUE_AUX if matrix else 0)
    problem = cublaslt.problem_of(a, b, y, matmul_precision.allows_tf32)
    return None if problem is None else replace(problem, epilogue=epilogue)


_ROW = Row(gelu_launches, supports_gelu, workspace_bytes)
KERNELS: dict[str, Row] = {"matmul_gelu": _ROW, "matmul_gelu_gradient": _ROW}
