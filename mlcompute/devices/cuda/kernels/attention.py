"""attention and its gradient without the matrix of scores, in float32 and of bfloat16; other types and very wide heads
are expanded. Some are left to cuDNN (`cudnn_attention`).

The gradient of a mask is expanded, too: it is as large as the scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import numpy as np

from mlcompute.compiler.attention_by_token import BY_TOKEN, BY_TOKEN_GRADIENT, JOINED_GRADIENT
from mlcompute.devices.cuda.codegen.types import FLOAT, DType
from mlcompute.devices.cuda.kernels.attention_source import (
    forward_source,
    key_gradient_source,
    map_source,
    query_gradient_source,
)
from mlcompute.devices.cuda.kernels.attention_tiles import ROWS, THREADS, Form
from mlcompute.devices.cuda.kernels.cudnn_attention import library_calls, library_workspace
from mlcompute.devices.cuda.kernels.launch import Argument, Launch, Row, Work
from mlcompute.devices.loop_nest import Operand, Operands, broadcast_strides
from mlcompute.devices.precision import matmul_precision
from mlcompute.ops.bfloat16 import is_bfloat16
from mlcompute.ops.op import Step, Value

#: The widest heads that tiles in shared memory have room for.
_WIDEST = 128
_STRIDES = np.dtype([(name, np.int64) for name in ("sample", "head", "row", "column")])
_SIZES = np.dtype(
    [*((name, np.int32) for name in ("heads", "queries", "keys", "width", "value_width")), ("scale", np.float32)]
)


def attention_launches(step: Step, operands: Operands) -> Sequence[Work]:
    """cuDNN; or a block per 64 queries of a head, after a kernel that looks at a mask of several tiles."""
    inputs = [operands[value] for value in step.inputs]
    results = [operands[value] for value in step.results]
    if calls := library_calls(step, operands, results):
        return calls
    form = _form(step, inputs)
    launches, more = _map_launch(step, operands, inputs[3] if form.has_map else None, form, 0)
    grid = (_units(inputs[0]) * -(-inputs[0].shape[2] // ROWS), 1, 1)
    arguments = [*inputs, *results, *_strides(inputs, inputs), *more, _sizes(step, inputs)]
    source, writes = forward_source(form), range(len(inputs), len(inputs) + len(results))
    launch = Launch(step, "attention", source, arguments, writes, grid, (THREADS, 1, 1), form.forward_bytes)
    return [*launches, launch]


def gradient_launches(step: Step, operands: Operands) -> Sequence[Work]:
    """cuDNN; or one kernel for dq and what the softmax needs, one for dk and dv; one before them as for attention."""
    dy, kept, inputs = _gradient_inputs([operands[value] for value in step.inputs], step)
    dq, dk, dv = _gradient_results(step, operands)
    if calls := library_calls(step, operands, [dq, dk, dv]):
        return calls
    form = _form(step, inputs, [dy])
    q, k = inputs[:2]
    rows = _units(q) * q.shape[2]
    deltas, logs = (_part(step, operands, number * rows, rows, FLOAT) for number in range(2))
    launches, more = _map_launch(step, operands, inputs[3] if form.has_map else None, form, 2 * rows)
    numbers = [*_strides([dy, *inputs], inputs), *more, _sizes(step, inputs)]
    read, block = [dy, *kept, *inputs], (THREADS, 1, 1)
    between = [deltas] if form.by_token else [logs, deltas]
    count = len(read)
    by_query = Launch(
        step, "attention gradient", query_gradient_source(form), [*read, dq, *between, *numbers],
        range(count, count + 1 + len(between)), (_units(q) * -(-q.shape[2] // ROWS), 1, 1), block, form.gradient_bytes,
    )  # fmt: skip
    by_key = Launch(
        step, "attention gradient", key_gradient_source(form), [*read, dk, dv, *between, *numbers],
        [count, count + 1], (_units(q) * -(-k.shape[2] // ROWS), 1, 1), block, form.gradient_bytes,
    )  # fmt: skip
    return [*launches, by_query, by_key]


_T = TypeVar("_T")


def _gradient_inputs(inputs: Sequence[_T], step: Step) -> tuple[_T, Sequence[_T], Sequence[_T]]:
    """dy; what was kept: y and the softmax's denominators, if anything; the inputs of attention."""
    kept = 2 if "by_token" in step.op.name else 0
    return inputs[0], inputs[1 : 1 + kept], inputs[1 + kept :]


def _gradient_results(step: Step, operands: Operands) -> list[Operand]:
    """dq, dk and dv, which may be thirds of one result."""
    results = [operands[value] for value in step.results]
    if step.op.name != JOINED_GRADIENT.name:
        return results
    n, length, heads, width = results[0].shape
    shape = (n, length, heads // 3, width)
    stride = shape[2] * results[0].strides[2]
    return [results[0]._replace(offset=results[0].offset + k * stride, shape=shape) for k in range(3)]


def attention_workspace(step: Step) -> int:
    """Bytes for what the mask has in its tiles, or for cuDNN."""
    q, k, v = step.inputs[:3]
    library = library_workspace(step)
    if not _has_map(step, q, k):
        return library
    return max(library, int(4 * math.prod(_map_extents(step.inputs[3].shape, q, k, _inner(q, v)))))


def gradient_workspace(step: Step) -> int:
    """Bytes for two numbers per query, and for what the mask has in its tiles; or for cuDNN."""
    _, _, (q, k, v, *more) = _gradient_inputs(step.inputs, step)
    n, heads, queries, _ = q.shape
    tiles = math.prod(_map_extents(more[0].shape, q, k, _inner(q, v))) if _has_map(step, q, k) else 0
    return max(library_workspace(step), int(4 * (2 * n * heads * queries + tiles)))


def supports_attention(step: Step) -> bool:
    """Is everything float32 (or bfloat16, but for the mask), not empty, and are heads at most 128 wide?"""
    is_gradient = step.op.name.endswith("gradient")
    dy, _, inputs = _gradient_inputs(step.inputs, step) if is_gradient else (step.inputs[0], (), step.inputs)
    q, k, v, *options = inputs
    if len({value.dtype for value in (dy, q, k, v)}) != 1 or {value.dtype for value in options} - {FLOAT}:
        return False
    if not (q.dtype == FLOAT or is_bfloat16(q.dtype)) or not all(value.size for value in step.inputs):
        return False
    extents = (q.shape[2], k.shape[2])
    return max(q.shape[3], v.shape[3]) <= _WIDEST and max(extents) < 2**30


def _units(q: Operand) -> int:
    """Heads of all samples."""
    return q.shape[0] * q.shape[1]


def _part(step: Step, operands: Operands, start: int, count: int, dtype: DType) -> Operand:
    """Of the workspace, `count` words of 4 bytes from `start` on."""
    planned = operands.workspace(step, start * 4, count * 4)
    return Operand(planned.base, planned.offset // 4, (count,), (1,), dtype)


def _form(step: Step, inputs: Sequence[Operand], more: Sequence[Operand] = ()) -> Form:
    q, k, v = inputs[:3]
    exact, narrow = not matmul_precision.allows_tf32, is_bfloat16(q.dtype)
    least = 16 if narrow and not exact else 8
    width, value_width = (-(-operand.shape[3] // least) * least for operand in (q, v))
    widths = (8, 4) if narrow and not exact else (4,)
    packed = next((count for count in widths if all(_is_packed(each, count) for each in (*inputs[:3], *more))), 1)
    a = step.attributes
    return Form(
        width, value_width, _inner(q, v), a["has_mask"], _has_map(step, q, k), a["has_keep"],
        exact=exact, packed=packed, narrow=narrow, by_token="by_token" in step.op.name,
        joined=step.op.name == JOINED_GRADIENT.name,
    )  # fmt: skip


def _inner(q: Operand | Value, v: Operand | Value) -> int:
    """Rows of the tiles that blocks go through: what shared memory has room for, several blocks' if possible."""
    widest = max(q.shape[3], v.shape[3])
    if is_bfloat16(q.dtype) and matmul_precision.allows_tf32:
        return 32 if widest <= 96 else 16
    return 32 if widest <= 64 else 16 if widest <= 96 else 8


# What the mask has in its tiles ---------------------------------------------------------------------------------------


def _has_map(step: Step, q: Operand | Value, k: Operand | Value) -> bool:
    """Are there tiles that could be skipped?"""
    return bool(step.attributes["has_mask"]) and max(q.shape[2], k.shape[2]) > ROWS


def _map_extents(mask: Sequence[int], q: Operand | Value, k: Operand | Value, inner: int) -> tuple[int, int, int, int]:
    """Of a map (samples, heads, rows, columns) of a mask of this shape; samples or heads that share it have one."""
    n, heads, queries, _ = q.shape
    samples, own_heads, *_ = (1,) * (4 - len(mask)) + tuple(mask)
    units = (n, heads) if samples > 1 else (1, heads if own_heads > 1 else 1)
    return (*units, -(-queries // inner), -(-k.shape[2] // inner))


def _map_launch(
    step: Step, operands: Operands, mask: Operand | None, form: Form, start: int
) -> tuple[list[Launch], list[Argument]]:
    """The kernel that makes the map, at `start` of the workspace, and arguments that say where it is; or neither."""
    if mask is None:
        return [], []
    is_gradient = step.op.name.endswith("gradient")
    q, k = (_gradient_inputs(step.inputs, step)[2] if is_gradient else step.inputs)[:2]
    samples, heads, rows, columns = extents = _map_extents(mask.shape, q, k, form.inner)
    count = math.prod(extents)
    found = _part(step, operands, start, count, np.dtype(np.int32))
    by = broadcast_strides(mask, (*q.shape[:3], k.shape[2]))
    sizes = (heads, q.shape[2], k.shape[2], rows, columns)
    arguments: list[Argument] = [mask, found, np.int64(count), *map(np.int32, sizes), *map(np.int64, by)]
    kernel = "attention gradient" if is_gradient else "attention"
    grid = (-(-count // (THREADS // 32)), 1, 1)
    launch = Launch(step, kernel, map_source(form.inner), arguments, [1], grid, (THREADS, 1, 1))
    one = rows * columns
    strides = (heads * one if samples > 1 else 0, one if heads > 1 else 0, columns, 1)
    return [launch], [found, _packed(strides, _STRIDES)]


# Arguments ------------------------------------------------------------------------------------------------------------


def _is_packed(operand: Operand, count: int) -> bool:
    """May its rows be read so many elements at a time?"""
    by_row = zip(operand.shape[:3], operand.strides[:3], strict=True)
    return (
        operand.strides[3] == 1
        and operand.shape[3] % count == 0
        and operand.offset % count == 0
        and all(extent == 1 or stride % count == 0 for extent, stride in by_row)
    )


def _strides(inputs: Sequence[Operand], of_attention: Sequence[Operand]) -> list[Argument]:
    """Of every input; those of a mask and of what is kept over all scores."""
    q, k = of_attention[:2]
    scores = (*q.shape[:3], k.shape[2])
    first_option = len(inputs) - len(of_attention[3:])
    found: list[Argument] = []
    for number, operand in enumerate(inputs):
        strides = broadcast_strides(operand, scores) if number >= first_option else operand.strides
        found.append(_packed(strides, _STRIDES))
    return found


def _sizes(step: Step, of_attention: Sequence[Operand]) -> np.generic:
    q, k, v = of_attention[:3]
    _, heads, queries, width = q.shape
    return _packed((heads, queries, k.shape[2], width, v.shape[3], step.attributes["scale"]), _SIZES)


def _packed(numbers: tuple[float, ...], dtype: DType) -> np.generic:
    """Numbers as a structure."""
    found: Any = np.array(tuple(numbers), dtype)[()]
    return cast(np.generic, found)


KERNELS: dict[str, Row] = {
    "attention": Row(attention_launches, supports_attention, attention_workspace),
    "attention_gradient": Row(gradient_launches, supports_attention, gradient_workspace),
    BY_TOKEN.name: Row(attention_launches, supports_attention, attention_workspace),
    BY_TOKEN_GRADIENT.name: Row(gradient_launches, supports_attention, gradient_workspace),
    JOINED_GRADIENT.name: Row(gradient_launches, supports_attention, gradient_workspace),
}
