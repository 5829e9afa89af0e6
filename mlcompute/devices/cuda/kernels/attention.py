"""attention and its gradient without the matrix of scores, in float32 and of bfloat16; other types and very wide heads
are expanded.

The gradient of a mask is expanded, too: it is as large as the scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from mlcompute.devices.cuda.codegen.types import FLOAT, DType
from mlcompute.devices.cuda.kernels.attention_source import (
    ROWS,
    THREADS,
    Form,
    forward_source,
    key_gradient_source,
    query_gradient_source,
)
from mlcompute.devices.cuda.kernels.launch import Argument, Launch, Row
from mlcompute.devices.loop_nest import Operand, Operands, broadcast_strides
from mlcompute.devices.precision import matmul_precision
from mlcompute.ops.bfloat16 import is_bfloat16
from mlcompute.ops.op import Step

#: The widest heads that tiles in shared memory have room for.
_WIDEST = 128
_STRIDES = np.dtype([(name, np.int64) for name in ("sample", "head", "row", "column")])
_SIZES = np.dtype(
    [*((name, np.int32) for name in ("heads", "queries", "keys", "width", "value_width")), ("scale", np.float32)]
)


def attention_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """One kernel; a block per 64 queries of a head."""
    inputs = [operands[value] for value in step.inputs]
    y = operands[step.results[0]]
    form = _form(step, inputs, forward=True)
    grid = (_units(inputs[0]) * -(-inputs[0].shape[2] // ROWS), 1, 1)
    arguments = [*inputs, y, *_numbers(step, inputs, inputs)]
    source = forward_source(form)
    return [Launch(step, "attention", source, arguments, [len(inputs)], grid, (THREADS, 1, 1), form.forward_bytes)]


def gradient_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """One kernel for dq and what the softmax needs, one for dk and dv."""
    inputs = [operands[value] for value in step.inputs]
    dq, dk, dv = (operands[value] for value in step.results)
    form = _form(step, inputs[1:], forward=False, more=inputs[:1])
    q, k = inputs[1], inputs[2]
    rows = _units(q) * q.shape[2]
    logs, deltas = (_part(step, operands, number, rows) for number in range(2))
    numbers = _numbers(step, inputs, inputs[1:])
    count, block = len(inputs), (THREADS, 1, 1)
    by_query = Launch(
        step, "attention gradient", query_gradient_source(form), [*inputs, dq, logs, deltas, *numbers],
        [count, count + 1, count + 2], (_units(q) * -(-q.shape[2] // ROWS), 1, 1), block, form.gradient_bytes,
    )  # fmt: skip
    by_key = Launch(
        step, "attention gradient", key_gradient_source(form), [*inputs, dk, dv, logs, deltas, *numbers],
        [count, count + 1], (_units(q) * -(-k.shape[2] // ROWS), 1, 1), block, form.gradient_bytes,
    )  # fmt: skip
    return [by_query, by_key]


def gradient_workspace(step: Step) -> int:
    """Bytes for two numbers per query."""
    n, heads, queries, _ = step.inputs[1].shape
    return 2 * n * heads * queries * 4


def supports_attention(step: Step) -> bool:
    """Is everything float32 (or bfloat16, but for the mask), not empty, and are heads at most 128 wide?"""
    count = 3 if step.op.name == "attention" else 4
    q, k, v = step.inputs[count - 3 : count]
    options = {value.dtype for value in step.inputs[count:]}
    if len({value.dtype for value in step.inputs[:count]}) != 1 or options - {FLOAT}:
        return False
    if not (q.dtype == FLOAT or is_bfloat16(q.dtype)) or not all(value.size for value in step.inputs):
        return False
    extents = (q.shape[2], k.shape[2])
    return max(q.shape[3], v.shape[3]) <= _WIDEST and max(extents) < 2**30


def _units(q: Operand) -> int:
    """Heads of all samples."""
    return q.shape[0] * q.shape[1]


def _part(step: Step, operands: Operands, number: int, count: int) -> Operand:
    planned = operands.workspace(step, number * count * 4, count * 4)
    return Operand(planned.base, planned.offset // 4, (count,), (1,), FLOAT)


def _form(step: Step, inputs: Sequence[Operand], *, forward: bool, more: Sequence[Operand] = ()) -> Form:
    q, _, v = inputs[:3]
    width, value_width = (-(-operand.shape[3] // 8) * 8 for operand in (q, v))
    inner = 64 if max(width, value_width) <= 64 else 32 if forward else 16
    a = step.attributes
    packed = all(map(_is_packed, (*inputs[:3], *more)))
    exact, narrow = not matmul_precision.allows_tf32, is_bfloat16(q.dtype)
    return Form(width, value_width, inner, a["has_mask"], a["has_keep"], exact, packed, narrow)


def _is_packed(operand: Operand) -> bool:
    """May its rows be read four elements at a time?"""
    by_row = zip(operand.shape[:3], operand.strides[:3], strict=True)
    return (
        operand.strides[3] == 1
        and operand.shape[3] % 4 == 0
        and operand.offset % 4 == 0
        and all(extent == 1 or stride % 4 == 0 for extent, stride in by_row)
    )


def _numbers(step: Step, inputs: Sequence[Operand], of_attention: Sequence[Operand]) -> list[Argument]:
    """Strides of every input, then the sizes."""
    q, k, v = of_attention[:3]
    n, heads, queries, width = q.shape
    scores = (n, heads, queries, k.shape[2])
    first_option = len(inputs) - len(of_attention[3:])
    found: list[Argument] = []
    for number, operand in enumerate(inputs):
        strides = broadcast_strides(operand, scores) if number >= first_option else operand.strides
        found.append(_packed(strides, _STRIDES))
    sizes = (heads, queries, k.shape[2], width, v.shape[3], step.attributes["scale"])
    return [*found, _packed(sizes, _SIZES)]


def _packed(numbers: tuple[float, ...], dtype: DType) -> np.generic:
    """Numbers as a structure."""
    found: Any = np.array(tuple(numbers), dtype)[()]
    return cast(np.generic, found)


KERNELS: dict[str, Row] = {
    "attention": Row(attention_launches, supports_attention),
    "attention_gradient": Row(gradient_launches, supports_attention, gradient_workspace),
}
