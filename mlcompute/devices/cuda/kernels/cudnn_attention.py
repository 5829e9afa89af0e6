"""attention_by_token and its gradient by cuDNN: large ones of bfloat16, causal or without a mask.

It has no gradient in float32. That it is faster and gives the same bits in every run was measured on compute
capability 9.0 (`python -m benchmarks.gpu.layers`). Small ones are bound by launches, of which ours are fewer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mlcompute.devices.cuda import cudnn
from mlcompute.devices.cuda.cudnn import AttentionProblem
from mlcompute.devices.cuda.cudnn.library import DATA_BFLOAT16
from mlcompute.devices.cuda.kernels.launch import LibraryCall
from mlcompute.devices.cuda.kernels.matmul import ALIGNMENT, aligned
from mlcompute.devices.cuda.libraries import current_gpu
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.devices.precision import matmul_precision
from mlcompute.ops.bfloat16 import is_bfloat16
from mlcompute.ops.op import Step

#: Multiplications and additions of the forward pass that cuDNN is worth while for, and the widest heads.
_LEAST_FLOPS, _WIDEST = 1e9, 128
#: What engines want besides the gradient of the scores; and of how many rows and columns of these tiles are.
_LITTLE, _TILE = 4096, 128
#: The largest workspace of a call; a batch whose gradient needs more is cut into parts.
MOST_WORKSPACE = (512 << 20) + _LITTLE


def library_calls(step: Step, operands: Operands, results: Sequence[Operand]) -> list[LibraryCall]:
    """One call, or several if one for all samples would need too much memory; none where cuDNN is not used.

    results   y and the logarithms; of the gradient dq, dk and dv
    """
    gpu, samples = current_gpu(), _samples_per_call(step)
    if gpu is None or not samples:
        return []
    is_gradient = _is_gradient(step)
    first = 3 if is_gradient else 0
    tensors = [operands[value] for value in step.inputs[first : first + 3]]
    if is_gradient:
        dy, y, logs = (operands[value] for value in step.inputs[:3])
        tensors += [_by_head(y), dy, *map(_by_head, results)]
    else:
        y, logs = results
        tensors.append(_by_head(y))
    if not logs.is_dense or not all(_fits(tensor) for tensor in tensors):
        return []
    one = [_some(tensor, 0, samples) for tensor in tensors]
    layouts = tuple((tuple(tensor.shape), tuple(tensor.strides)) for tensor in one)
    a, nbytes = step.attributes, _engine_bytes(step, samples)
    plan = cudnn.find_attention_plan(
        AttentionProblem(layouts, DATA_BFLOAT16, a["scale"], a.get("is_causal", False)), gpu, nbytes
    )
    if plan is None:
        return []
    row_bytes = _row_bytes(step, samples)
    sums = [operands.workspace(step, 0, row_bytes)] if is_gradient else []
    scratch = operands.workspace(step, row_bytes, nbytes + ALIGNMENT)
    kernel = "cuDNN attention gradient" if is_gradient else "cuDNN attention"

    def enqueue(stream: int, addresses: Sequence[int]) -> None:
        *given, scratch = addresses
        plan.enqueue(stream, given, aligned(scratch))

    calls = []
    for begin in range(0, tensors[0].shape[0], samples):
        memory = [*(_some(each, begin, samples) for each in (*tensors, logs)), *sums, scratch]
        written = [5, 6, 7, 9, 10] if is_gradient else [3, 4, 5]
        calls.append(LibraryCall(step, kernel, memory, written, enqueue, [plan]))
    return calls


def library_workspace(step: Step) -> int:
    """Bytes for one number per query, and for the engine; 0 where cuDNN is not used."""
    samples = _samples_per_call(step)
    return _row_bytes(step, samples) + _engine_bytes(step, samples) + ALIGNMENT if samples else 0


def _samples_per_call(step: Step) -> int:
    """Samples that one call may have: all, or as large a part of them as the workspace has room for; 0: no cuDNN."""
    gpu = current_gpu()
    if gpu is None or gpu.capability != (9, 0) or "by_token" not in step.op.name:
        return 0
    q, k, v = step.inputs[3:6] if _is_gradient(step) else step.inputs[:3]
    (n, heads, queries, width), keys = q.shape, k.shape[2]
    widths = (width, v.shape[3])
    is_known = step.attributes.get("is_causal") or not step.attributes["has_mask"]
    if not is_bfloat16(q.dtype) or not matmul_precision.allows_tf32 or not is_known or step.attributes["has_keep"]:
        return 0
    if 2.0 * n * heads * queries * keys * sum(widths) < _LEAST_FLOPS or any(w % 8 or w > _WIDEST for w in widths):
        return 0
    counts = (n // parts for parts in range(1, n + 1) if n % parts == 0)
    # Logarithms of every part begin at a multiple of 16 bytes.
    counts = (count for count in counts if count == n or count * heads * queries % 4 == 0)
    return next((count for count in counts if _engine_bytes(step, count) <= MOST_WORKSPACE), 0)


def _is_gradient(step: Step) -> bool:
    return step.op.name.endswith("gradient")


def _engine_bytes(step: Step, samples: int) -> int:
    """The workspace that an engine may have: of the gradient, one number of 2 bytes per score."""
    if not _is_gradient(step):
        return _LITTLE
    q, k = step.inputs[3:5]
    tiles = math.prod(-(-each.shape[2] // _TILE) * _TILE for each in (q, k))
    return int(_LITTLE + 2 * samples * q.shape[1] * tiles)


def _row_bytes(step: Step, samples: int) -> int:
    """Of the gradient: a number per query and head."""
    if not _is_gradient(step):
        return 0
    return -(-4 * samples * math.prod(step.inputs[2].shape[1:]) // ALIGNMENT) * ALIGNMENT


def _by_head(operand: Operand) -> Operand:
    """(n, l, heads, d) -> (n, heads, l, d)"""
    (n, length, heads, width), (by_n, by_length, by_head, by_one) = operand.shape, operand.strides
    return operand._replace(shape=(n, heads, length, width), strides=(by_n, by_head, by_length, by_one))


def _some(operand: Operand, begin: int, samples: int) -> Operand:
    """So many samples from one on."""
    return operand._replace(offset=operand.offset + begin * operand.strides[0], shape=(samples, *operand.shape[1:]))


def _fits(operand: Operand) -> bool:
    """Are rows of neighbours, and do all begin at multiples of 16 bytes?"""
    return operand.strides[3] == 1 and all(count % 8 == 0 for count in (operand.offset, *operand.strides[:3]))
