"""matmul: cuBLASLt for float32 and the 16-bit types; our own kernels for small matmuls and for other types."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mlcompute.devices.cuda import cublaslt
from mlcompute.devices.cuda.codegen.indexing import BLOCK, blocks_for
from mlcompute.devices.cuda.codegen.types import is_element, loaded, memory_type, register_type, stored
from mlcompute.devices.cuda.cublaslt import library as lt
from mlcompute.devices.cuda.kernels.launch import Argument, Launch, LibraryCall, Row, Work
from mlcompute.devices.cuda.kernels.small_matmul import is_small, small_matmul
from mlcompute.devices.cuda.kernels.strided_copy import transposed
from mlcompute.devices.cuda.kernels.transposed_copy import TILE, is_transposed, transposed_copy
from mlcompute.devices.cuda.libraries import Gpu, current_gpu
from mlcompute.devices.loop_nest import Axis, Operand, Operands, broadcast_strides, collapsed_axes, dense_strides
from mlcompute.devices.precision import matmul_precision
from mlcompute.ops.bfloat16 import is_bfloat16
from mlcompute.ops.op import Step

#: cuBLASLt wants its workspace aligned to this, and more of it than this brings nothing.
ALIGNMENT = 256
_MOST_WORKSPACE = 32 << 20
#: Sums of at least so many terms may be split; matmuls of fewer multiplications and additions than this are small.
_LONG_SUM, _SMALL_PRODUCT = 512, 1 << 26
#: Batches that need several calls of cuBLASLt are given to our own kernel when there would be more than this many.
_MOST_CALLS = 8
#: What the printed program calls matmuls with a bias.
_WITH_BIAS = "cuBLASLt with bias"
_TYPES = (np.dtype(np.float32), np.dtype(np.float16))

#: Of TF32 matmuls on one GPU of the generation, operations per second as measured; bytes per second of a copy, and
#: seconds a launch takes.
_SLOW_RATE, _FAST_RATE, _COPY_RATE, _LAUNCH_TIME = 190e12, 300e12, 2.5e12, 3e-6

#: Our own kernel: a block of 16 x 16 threads computes 64 x 64 results, 16 terms of the sums at a time.
_TILE, _DEPTH, _THREADS, _PER_THREAD = 64, 16, 16, 4


def matmul_launches(step: Step, operands: Operands) -> Sequence[Work]:
    """y = a b over leading axes that broadcast."""
    a, b, y = operands[step.inputs[0]], operands[step.inputs[1]], operands[step.results[0]]
    if y.size == 0:
        return []
    if is_small(a, b, y):
        return [small_matmul(step, a, b, y)]
    if current_gpu() is None and _is_for_library(a, b, y):
        return [LibraryCall(step, "cuBLASLt", [a, b, y], [2], no_gpu)]
    copies, a, b, workspace = factors(step, a, b, y, operands)
    return [*copies, *gemm_launches(step, a, b, y, workspace)]


def factors(
    step: Step, a: Operand, b: Operand, y: Operand, operands: Operands
) -> tuple[list[Launch], Operand, Operand, Operand | None]:
    """Copies that are made first, the factors as they then lie, and the workspace that is left.

    Of aᵀ b with both factors row by row, the smaller is copied in the other order, where that pays.
    """
    needed, copied = workspace_bytes(step), copied_bytes(step)
    workspace = operands.workspace(step, 0, needed - copied) if needed else None
    if not copied or not (is_transposed(a, y) and b.strides[1] == 1):
        return [], a, b, workspace
    smaller = a if a.size <= b.size else transposed(b)
    memory = operands.workspace(step, needed - copied, copied)
    copy = Operand(memory.base, memory.offset // 4, smaller.shape, dense_strides(smaller.shape), smaller.dtype)
    launch = transposed_copy(step, smaller, copy)
    return [launch], *((copy, b) if a.size <= b.size else (a, transposed(copy))), workspace


def copied_bytes(step: Step) -> int:
    """Bytes of the smaller factor of a large float32 matmul, which may be copied; 0 where that cannot be of use.

    TF32 units of Hopper GPUs want the terms of sums side by side in memory. Of weight gradients, aᵀ b, neither factor
    is like that: cuBLASLt then takes 1.5 times as long, or more, as when one of them is.
    """
    gpu, (a, b), y = current_gpu(), step.inputs[:2], step.results[0]
    if gpu is None or gpu.capability[0] != 9 or not matmul_precision.allows_tf32:
        return 0
    if any(value.dtype != np.float32 or len(value.shape) != 2 for value in (a, b, y)) or min(*y.shape, 1 << 20) < TILE:
        return 0
    if a.shape[1] < _LONG_SUM:
        return 0
    smaller: int = min(a.nbytes, b.nbytes)
    saved = 2.0 * y.size * a.shape[1] * (1 / _SLOW_RATE - 1 / _FAST_RATE)
    return smaller if saved > 2 * smaller / _COPY_RATE + _LAUNCH_TIME else 0


def gemm_launches(step: Step, a: Operand, b: Operand, y: Operand, workspace: Operand | None) -> Sequence[Work]:
    """y = a b for any operands, as a step of its own or as a part of one; without a GPU by our own kernel."""
    gpu = current_gpu()
    if is_small(a, b, y):
        return [small_matmul(step, a, b, y)]
    if gpu is None or not _is_for_library(a, b, y):
        return [tiled_launch(step, a, b, y)]
    calls = []
    for part in _single_batches(a, b, y):
        problem = cublaslt.problem_of(*part, matmul_precision.allows_tf32)
        call = None if problem is None else library_call(step, gpu, problem, part, workspace)
        if call is None:
            return [tiled_launch(step, a, b, y)]
        calls.append(call)
    return calls


def _is_for_library(a: Operand, b: Operand, y: Operand) -> bool:
    """Can cuBLASLt read the operands in place, in a few calls?"""
    parts = _single_batches(a, b, y)
    return len(parts) <= _MOST_CALLS and all(cublaslt.problem_of(*part, True) is not None for part in parts)


def epilogue_launches(step: Step, operands: Operands) -> Sequence[Work]:
    """a b + bias: in one call where cuBLASLt can, else in a second pass over the result."""
    a, b, bias = (operands[value] for value in step.inputs)
    y = operands[step.results[0]]
    if y.size == 0:
        return []
    if is_small(a, b, y):
        return [small_matmul(step, a, b, y, bias)]
    gpu = current_gpu()
    if gpu is None and _is_for_library(a, b, y):
        return [LibraryCall(step, _WITH_BIAS, [a, b, y, bias], [2], no_gpu)]
    copies, a, b, workspace = factors(step, a, b, y, operands)
    parts = _single_batches(a, b, y)
    if gpu is not None and len(parts) == 1 and bias.is_dense and bias.byte_offset % 16 == 0:
        problem = cublaslt.problem_of(*parts[0], matmul_precision.allows_tf32)
        if problem is not None:
            problem = replace(problem, epilogue=lt.EPILOGUE_BIAS)
            call = library_call(step, gpu, problem, parts[0], workspace, _WITH_BIAS, bias)
            if call is not None:
                return [*copies, call]
    return [*copies, *gemm_launches(step, a, b, y, workspace), _bias_launch(step, y, bias)]


def workspace_bytes(step: Step) -> int:
    """Bytes that cuBLASLt may use while it runs: parts of long sums. None where there is no GPU to ask.

    Long sums are split where there are few results; small matmuls with short ones need nothing.
    """
    y, depth = step.results[0], step.inputs[0].shape[-1]
    if current_gpu() is None or (y.dtype not in _TYPES and not is_bfloat16(y.dtype)):
        return 0
    if is_small(step.inputs[0], step.inputs[1], y):
        return 0
    if 2 * y.size * depth < _SMALL_PRODUCT:
        wanted = 8 * y.nbytes if depth >= _LONG_SUM else 0
    else:
        wanted = _MOST_WORKSPACE if depth >= _LONG_SUM else max(1 << 20, 4 * y.nbytes)
    copied = copied_bytes(step)
    return min(_MOST_WORKSPACE, wanted) + ALIGNMENT + copied if wanted else copied


def supports_matmul(step: Step) -> bool:
    """Is it of element types that kernels can read, and of a result that its sums are computed in or rounded to?"""
    types = {value.dtype for value in (*step.inputs, *step.results)}
    return all(map(is_element, types)) and (len(types) == 1 or {register_type(dtype) for dtype in types} == {"float"})


# cuBLASLt -------------------------------------------------------------------------------------------------------------


def _single_batches(a: Operand, b: Operand, y: Operand) -> list[tuple[Operand, Operand, Operand]]:
    """The same matmuls with at most one batch axis each."""
    axes = _batch_axes(a, b, y)
    outer, inner = axes[:-1], axes[-1:]
    parts = []
    for index in itertools.product(*(range(axis.extent) for axis in outer)):
        part = []
        for number, operand in enumerate((a, b, y)):
            offset = operand.offset + sum(i * axis.strides[number] for i, axis in zip(index, outer, strict=True))
            extents = tuple(axis.extent for axis in inner)
            strides = tuple(axis.strides[number] for axis in inner)
            shape = (*extents, *operand.shape[-2:])
            part.append(Operand(operand.base, offset, shape, (*strides, *operand.strides[-2:]), operand.dtype))
        parts.append((part[0], part[1], part[2]))
    return parts


def _batch_axes(a: Operand, b: Operand, y: Operand) -> list[Axis]:
    """Loops over the leading axes, as few as possible; none for a single matmul."""
    leading = y.shape[:-2]
    strides = []
    for operand in (a, b, y):
        whole = (*leading, *operand.shape[-2:])
        strides.append(broadcast_strides(operand, whole)[:-2])
    return collapsed_axes(leading, strides) if math.prod(leading) > 1 else []


def library_call(
    step: Step,
    gpu: Gpu,
    problem: cublaslt.Problem,
    part: Sequence[Operand],
    workspace: Operand | None,
    kernel: str = "cuBLASLt",
    bias: Operand | None = None,
    matrix: Operand | None = None,
) -> LibraryCall | None:
    """One matmul; None when there is no algorithm for it, or none that can apply the epilogue.

    bias     what the epilogue adds, or where it puts the sums of a factor
    matrix   what GELU is applied to, or what ReLU lets through: written by the epilogue, or read for the gradient
    """
    try:
        matmul = cublaslt.Matmul(problem, gpu, 0 if workspace is None else workspace.size - ALIGNMENT)
    except cublaslt.NoAlgorithmError:
        return None
    if problem.epilogue != lt.EPILOGUE_DEFAULT and not matmul.has_epilogue:
        return None
    memory, writes = [*part], [2]
    if not matmul.needs_workspace:
        workspace = None
    if workspace is not None:
        memory, writes = [*memory, workspace], [2, 3]
    for operand, reading in (
        (bias, problem.epilogue & lt.EPILOGUE_BIAS),
        (matrix, problem.epilogue in (lt.EPILOGUE_DRELU, lt.EPILOGUE_DGELU)),
    ):
        if operand is not None:
            memory.append(operand)
            writes = writes if reading else [*writes, len(memory) - 1]

    def enqueue(stream: int, addresses: Sequence[int]) -> None:
        a, b, y, *more = addresses
        scratch = 0 if workspace is None else aligned(more.pop(0))
        matmul.enqueue(stream, a, b, y, scratch, *(0 if each is None else more.pop(0) for each in (bias, matrix)))

    return LibraryCall(step, kernel, memory, writes, enqueue, [matmul])


def aligned(address: int) -> int:
    """The next address that is a multiple of 256 bytes."""
    return -(-address // ALIGNMENT) * ALIGNMENT


def no_gpu(stream: int, addresses: Sequence[int]) -> None:
    """What a library call enqueues that was made without a GPU: it can only be shown, or replaced by its meaning."""
    raise AssertionError("this call was made on a thread without a GPU")


def _bias_launch(step: Step, y: Operand, bias: Operand) -> Launch:
    """y = y + bias in place."""
    element, total = (
        memory_type(y.dtype),
        f"{loaded(y.dtype, 'y[at]')} + {loaded(y.dtype, 'bias[at % columns * stride]')}",
    )
    source = f"""
extern "C" __global__ void __launch_bounds__({BLOCK}) KERNEL(
    {element}* y, const {element}* bias, long long count, long long columns, long long stride) {{
    long long at = (long long)blockIdx.x * {BLOCK} + threadIdx.x;
    if (at < count) y[at] = {stored(y.dtype, total)};
}}
"""
    arguments: list[Argument] = [y, bias, *map(np.int64, (y.size, y.shape[-1], bias.strides[-1]))]
    return Launch(step, "bias", source, arguments, [0], blocks_for(y.size), (BLOCK, 1, 1))


# Our own kernel -------------------------------------------------------------------------------------------------------


def tiled_launch(step: Step, a: Operand, b: Operand, y: Operand) -> Launch:
    """y = a b by our own kernel: any type, any strides."""
    axes = _batch_axes(a, b, y)
    m, n, k = y.shape[-2], y.shape[-1], a.shape[-1]
    tiles = (-(-m // _TILE), -(-n // _TILE))
    blocks = tiles[0] * tiles[1] * math.prod(axis.extent for axis in axes)
    arguments: list[Argument] = [a, b, y, *map(np.int64, (m, n, k))]
    for operand in (a, b, y):
        arguments += [np.int64(stride) for stride in operand.strides[-2:]]
    for axis in axes:
        arguments += [np.int64(axis.extent), *map(np.int64, axis.strides)]
    return Launch(
        step, f"tiled matmul ({y.dtype})", _tiled_source(a.dtype, y.dtype, len(axes)), arguments, [2], (blocks, 1, 1),
        (_THREADS, _THREADS, 1),
    )  # fmt: skip


def _tiled_source(dtype: np.dtype[np.generic], made: np.dtype[np.generic], batch_axes: int) -> str:
    """The kernel. Sums are kept in registers, in order of k; tiles of a and b lie in shared memory."""
    memory, register = memory_type(dtype), register_type(dtype)
    is_bool = dtype == np.bool_
    zero = "false" if is_bool else f"({register})0"
    term = "sum[i][j] || (p[i] && q[j])" if is_bool else f"({register})(sum[i][j] + p[i] * q[j])"
    axes = range(batch_axes)
    parameters = "".join(f", long long e{x}, long long a{x}, long long b{x}, long long y{x}" for x in axes)
    offsets = "\n".join(
        f"    {{ long long i = batch % e{x}; batch /= e{x}; a += i * a{x}; b += i * b{x}; y += i * y{x}; }}"
        for x in reversed(axes)
    )
    return f"""
extern "C" __global__ void __launch_bounds__({_THREADS * _THREADS}) KERNEL(
    const {memory}* a, const {memory}* b, {memory_type(made)}* y, long long m, long long n, long long k,
    long long a_row, long long a_column, long long b_row, long long b_column, long long y_row, long long y_column
    {parameters}) {{
    __shared__ {register} left[{_DEPTH}][{_TILE} + 1];
    __shared__ {register} right[{_DEPTH}][{_TILE} + 1];
    long long columns = (n + {_TILE - 1}) / {_TILE}, rows = (m + {_TILE - 1}) / {_TILE};
    long long batch = blockIdx.x;
    long long column = batch % columns * {_TILE};
    batch /= columns;
    long long row = batch % rows * {_TILE};
    batch /= rows;
{offsets}
    int tx = threadIdx.x, ty = threadIdx.y, thread = ty * {_THREADS} + tx;
    {register} sum[{_PER_THREAD}][{_PER_THREAD}];
    for (int i = 0; i < {_PER_THREAD}; ++i)
        for (int j = 0; j < {_PER_THREAD}; ++j) sum[i][j] = {zero};
    for (long long first = 0; first < k; first += {_DEPTH}) {{
        for (int at = thread; at < {_TILE * _DEPTH}; at += {_THREADS * _THREADS}) {{
            // Neighbouring threads read along the axis that lies contiguously.
            int d = a_column == 1 ? at % {_DEPTH} : at / {_TILE}, r = a_column == 1 ? at / {_DEPTH} : at % {_TILE};
            left[d][r] = row + r < m && first + d < k
                ? {loaded(dtype, "a[(row + r) * a_row + (first + d) * a_column]")} : {zero};
            int e = b_row == 1 ? at % {_DEPTH} : at / {_TILE}, c = b_row == 1 ? at / {_DEPTH} : at % {_TILE};
            right[e][c] = column + c < n && first + e < k
                ? {loaded(dtype, "b[(first + e) * b_row + (column + c) * b_column]")} : {zero};
        }}
        __syncthreads();
        for (int d = 0; d < {_DEPTH}; ++d) {{
            {register} p[{_PER_THREAD}], q[{_PER_THREAD}];
            for (int i = 0; i < {_PER_THREAD}; ++i) {{
                p[i] = left[d][ty + i * {_THREADS}];
                q[i] = right[d][tx + i * {_THREADS}];
            }}
            for (int i = 0; i < {_PER_THREAD}; ++i)
                for (int j = 0; j < {_PER_THREAD}; ++j) sum[i][j] = {term};
        }}
        __syncthreads();
    }}
    for (int i = 0; i < {_PER_THREAD}; ++i)
        for (int j = 0; j < {_PER_THREAD}; ++j) {{
            long long r = row + ty + i * {_THREADS}, c = column + tx + j * {_THREADS};
            if (r < m && c < n) y[r * y_row + c * y_column] = {stored(made, "sum[i][j]")};
        }}
}}
"""


KERNELS: dict[str, Row] = {
    "matmul": Row(matmul_launches, supports_matmul, workspace_bytes),
    "matmul_epilogue": Row(epilogue_launches, supports_matmul, workspace_bytes),
}
