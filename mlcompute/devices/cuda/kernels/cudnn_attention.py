"""attention_by_token and its gradient by cuDNN: large ones of bfloat16, causal or without a mask.

It has no gradient in float32. Where it gives the same bits in every run and is faster was measured on compute
capability 9.0; small ones are bound by launches, of which ours are fewer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mlcompute.compiler.attention_by_token import BY_TOKEN, BY_TOKEN_GRADIENT
from mlcompute.devices.cuda import cudnn
from mlcompute.devices.cuda.cudnn import AttentionProblem
from mlcompute.devices.cuda.cudnn.library import DATA_BFLOAT16
from mlcompute.devices.cuda.cudnn.plan import MOST_WORKSPACE
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


def library_call(step: Step, operands: Operands) -> LibraryCall | None:
    """The call, where cuDNN is to be used and has an engine for how tensors lie in memory."""
    gpu, bytes_left = current_gpu(), _engine_bytes(step)
    if gpu is None or not bytes_left:
        return None
    first = 3 if step.op.name == BY_TOKEN_GRADIENT.name else 0
    tensors = [operands[value] for value in step.inputs[first : first + 3]]
    if first:
        dy, y, logs = (operands[value] for value in step.inputs[:3])
        tensors += [_by_head(y), dy, *(_by_head(operands[value]) for value in step.results)]
        written, rows = [5, 6, 7, 9], [logs, operands.workspace(step, 0, _row_bytes(step))]
    else:
        y, logs = (operands[value] for value in step.results)
        tensors.append(_by_head(y))
        written, rows = [3, 4], [logs]
    if not logs.is_dense or not all(_fits(tensor) for tensor in tensors):
        return None
    layouts = tuple((tuple(tensor.shape), tuple(tensor.strides)) for tensor in tensors)
    a = step.attributes
    problem = AttentionProblem(layouts, DATA_BFLOAT16, a["scale"], a["is_causal"])
    plan = cudnn.find_attention_plan(problem, gpu, bytes_left)
    if plan is None:
        return None
    scratch = operands.workspace(step, _row_bytes(step), bytes_left + ALIGNMENT)

    def enqueue(stream: int, addresses: Sequence[int]) -> None:
        *given, scratch = addresses
        plan.enqueue(stream, given, aligned(scratch))

    memory = [*tensors, *rows, scratch]
    kernel = "cuDNN attention gradient" if first else "cuDNN attention"
    return LibraryCall(step, kernel, memory, [*written, len(memory) - 1], enqueue, [plan])


def library_workspace(step: Step) -> int:
    """Bytes for one number per query, and for the engine; 0 where cuDNN is not used."""
    found = _engine_bytes(step)
    return _row_bytes(step) + found + ALIGNMENT if found else 0


def _engine_bytes(step: Step) -> int:
    """The workspace that an engine may have: of the gradient, that of all scores; 0 where cuDNN is not to be used."""
    gpu = current_gpu()
    if gpu is None or gpu.capability != (9, 0) or step.op.name not in (BY_TOKEN.name, BY_TOKEN_GRADIENT.name):
        return 0
    is_gradient = step.op.name == BY_TOKEN_GRADIENT.name
    q, k, v = step.inputs[3:6] if is_gradient else step.inputs[:3]
    n, heads, queries, width = q.shape
    keys, widths = k.shape[2], (width, v.shape[3])
    is_known = step.attributes["is_causal"] or not step.attributes["has_mask"]
    if not is_bfloat16(q.dtype) or not matmul_precision.allows_tf32 or not is_known or step.attributes["has_keep"]:
        return 0
    if 2.0 * n * heads * queries * keys * sum(widths) < _LEAST_FLOPS or any(w % 8 or w > _WIDEST for w in widths):
        return 0
    scores: int = 2 * n * heads * math.prod(-(-extent // _TILE) * _TILE for extent in (queries, keys))
    found = _LITTLE + (scores if is_gradient else 0)
    return found if found <= MOST_WORKSPACE else 0


def _row_bytes(step: Step) -> int:
    """Of the gradient: a number per query and head."""
    if step.op.name != BY_TOKEN_GRADIENT.name:
        return 0
    return -(-4 * step.inputs[2].size // ALIGNMENT) * ALIGNMENT


def _by_head(operand: Operand) -> Operand:
    """(n, l, heads, d) -> (n, heads, l, d)"""
    (n, length, heads, width), (by_n, by_length, by_head, by_one) = operand.shape, operand.strides
    shape, strides = (n, heads, length, width), (by_n, by_head, by_length, by_one)
    return Operand(operand.base, operand.offset, shape, strides, operand.dtype)


def _fits(operand: Operand) -> bool:
    """Are rows of neighbours, and do all begin at multiples of 16 bytes?"""
    return operand.strides[3] == 1 and all(count % 8 == 0 for count in (operand.offset, *operand.strides[:3]))
