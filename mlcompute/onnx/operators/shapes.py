"""Operators that move, cut, join and repeat elements, and those that speak of shapes."""

# ruff: noqa: D103  (a row is the ONNX operator it names: the standard is its docstring)

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from mlcompute import ops
from mlcompute.errors import ShapeError
from mlcompute.onnx.budget import affordable
from mlcompute.onnx.rows import Call, front, operator
from mlcompute.onnx.types import numpy_type
from mlcompute.ops.elementwise import broadcast_shape
from mlcompute.ops.op import Array, Shape, Value

# What is known about a value ----------------------------------------------------------------------------------------


@operator("Shape", trains=False)
def shape(call: Call) -> Array:
    extents = np.array(call[0].shape, np.int64)
    return extents[slice(call.attribute("start", 0), call.attribute("end"))]


@operator("Size", trains=False)
def size(call: Call) -> Array:
    return np.array(call[0].size, np.int64)


# Constants ------------------------------------------------------------------------------------------------------------


@operator("ConstantOfShape", trains=False, needs=(0,))
def constant_of_shape(call: Call) -> Array:
    value = call.attribute("value", np.zeros(1, np.float32))
    return limited(np.asarray(value).reshape(-1)[0], tuple(call.integers(0)))


def limited(number: Array, shape: Shape) -> Array:
    """One number repeated, as a view: a shape from a file may ask for any amount of memory."""
    if min(shape, default=0) < 0 or math.prod(shape) * number.dtype.itemsize > 2**31:
        raise ShapeError(f"a constant of shape {shape} is too large")
    return np.broadcast_to(number, shape)


@operator("Range", trains=False, needs=(0, 1, 2))
def range_(call: Call) -> Array:
    start, limit, delta = (call.array(index).reshape(-1)[0] for index in range(3))
    if not delta or not np.isfinite(float(limit) - float(start)):
        raise ShapeError(f"Range: from {start} to {limit} by {delta} never ends")
    count = max(math.ceil((float(limit) - float(start)) / float(delta)), 0)
    call.affordable(count)
    return np.asarray(start + delta * np.arange(count)).astype(start.dtype)


@operator("EyeLike", trains=False)
def eye_like(call: Call) -> Array:
    x, dtype = call[0], call.attribute("dtype")
    rows, columns = x.shape
    call.affordable(rows, columns)
    return np.eye(rows, columns, call.attribute("k", 0), x.dtype if dtype is None else numpy_type(dtype))


# Views ----------------------------------------------------------------------------------------------------------------


@operator("Reshape", needs=(1,))
def reshape(call: Call) -> Value:
    x = call[0]
    wanted = call.integers(1, "shape")
    if not call.attribute("allowzero", 0):
        wanted = [x.shape[axis] if extent == 0 and axis < x.rank else extent for axis, extent in enumerate(wanted)]
    written_down = call.count < 2 or not call.follows(1)
    if call.batch is not None and written_down and -1 not in wanted and math.prod(wanted) != x.size:
        wanted = _for_other_batch(call.shape_then(0), x.shape, wanted)
    return ops.reshape(x, _completed(wanted, x))


def _for_other_batch(then: Shape, now: Shape, wanted: Sequence[int]) -> list[int]:
    """The shape a model was given for one batch, for another one.

    Ranges of axes that hold the same elements are paired. Where the first axis of a range has become shorter, so does
    the first one of its partner: (5, 8, 6) that became (5, 16, 3), with 6 instead of 8, becomes (5, 12, 3). An axis
    that is taken apart is refused: nobody knows which of its parts counts samples.
    """
    found = list(wanted)
    for (start, end), (first, last) in _groups(then, wanted):
        if now[start:end] == then[start:end]:
            continue
        begins_with_one = then[start] == 1 != now[start] and first < last and wanted[first] == 1
        if begins_with_one and now[start + 1 : end] == then[start + 1 : end]:
            found[first] = now[start]  # one sample, which both shapes begin with
            continue
        leading = next((axis for axis in range(start, end) if then[axis] > 1), start)
        targets = [axis for axis in range(first, last) if wanted[axis] > 1] or list(range(first, last))[:1]
        if len(targets) == 1:
            found[targets[0]] = math.prod(now[start:end])
        elif targets and now[leading + 1 : end] == then[leading + 1 : end] and not wanted[targets[0]] % then[leading]:
            found[targets[0]] = wanted[targets[0]] // then[leading] * now[leading]
        else:
            raise ShapeError(
                f"Reshape: its shape {tuple(wanted)} was written down for another number of samples",
                fix="export the model with a symbolic batch",
            )
    return found


def _groups(a: Sequence[int], b: Sequence[int]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The smallest ranges of axes of two shapes that hold the same number of elements, in order."""
    found, i, j = [], 0, 0
    while i < len(a) or j < len(b):
        start, first = i, j
        left, right = 1, 1
        while (i < len(a) or j < len(b)) and (left != right or left == 1):
            if (left <= right and i < len(a)) or j == len(b):
                left, i = left * a[i], i + 1
            else:
                right, j = right * b[j], j + 1
        found.append(((start, i), (first, j)))
    return found


def _completed(wanted: Sequence[int], x: Value) -> Shape:
    """A shape whose single -1 is replaced by what is left."""
    if list(wanted).count(-1) > 1 or min(wanted, default=0) < -1:
        raise ShapeError(f"Reshape: {tuple(wanted)} has no meaning")
    rest = math.prod(extent for extent in wanted if extent != -1)
    if -1 in wanted and (not rest or x.size % rest):
        raise ShapeError(f"Reshape: {x.shape} cannot become {tuple(wanted)}")
    return tuple(x.size // rest if extent == -1 else extent for extent in wanted)


@operator("Flatten")
def flatten(call: Call) -> Value:
    x, axis = call[0], call.attribute("axis", 1)
    axis = axis + x.rank if axis < 0 else axis
    if not 0 <= axis <= x.rank:
        raise ShapeError(f"Flatten: axis {axis} does not exist, the value has rank {x.rank}")
    return ops.reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


@operator("Squeeze", needs=(1,))
def squeeze(call: Call) -> Value:
    x = call[0]
    axes = call.integers(1, "axes", [axis for axis, extent in enumerate(x.shape) if extent == 1])
    gone = {front(axis, x.rank, "Squeeze") for axis in axes}
    if any(x.shape[axis] != 1 for axis in gone):
        raise ShapeError(f"Squeeze: axes {sorted(gone)} of {x.shape} are not all 1")
    return ops.reshape(x, [extent for axis, extent in enumerate(x.shape) if axis not in gone])


@operator("Unsqueeze", needs=(1,))
def unsqueeze(call: Call) -> Value:
    x, axes = call[0], call.integers(1, "axes")
    rank = x.rank + len(axes)
    new = {front(axis, rank, "Unsqueeze") for axis in axes}
    if len(new) < len(axes):
        raise ShapeError(f"Unsqueeze: an axis is named twice in {axes}")
    extents = iter(x.shape)
    return ops.reshape(x, [1 if axis in new else next(extents) for axis in range(rank)])


@operator("Transpose")
def transpose(call: Call) -> Value:
    x = call[0]
    axes = call.attribute("perm") or tuple(reversed(range(x.rank)))
    if len(axes) != x.rank:
        raise ShapeError(f"Transpose: perm {tuple(axes)} does not fit {x.shape}")
    return ops.transpose(x, axes) if x.rank else x


@operator("Expand", needs=(1,))
def expand(call: Call) -> Value:
    x = call[0]
    wanted = broadcast_shape(x.shape, tuple(call.shape_now(call.integers(1), 1)))
    limited(np.zeros((), x.dtype), wanted)
    return ops.broadcast(x, wanted)


@operator("Tile", needs=(1, 2))
def tile(call: Call) -> Value:
    x = call[0]
    repeats = call.integers(1)
    if call.version < 6:
        axis = int(call.array(2).reshape(-1)[0])
        repeats = [repeats[0] if k == axis else 1 for k in range(x.rank)]
    if len(repeats) != x.rank or min(repeats, default=1) < 0:
        raise ShapeError(f"Tile: repeats {repeats} do not fit {x.shape}")
    limited(np.zeros((), x.dtype), tuple(n * k for n, k in zip(x.shape, repeats, strict=True)))
    call.affordable(64, sum(repeats))
    for axis, count in enumerate(repeats):
        x = ops.concatenate([x] * count, axis) if count else ops.slice_axis(x, axis, 0, 0)
    return x


@operator("Concat")
def concat(call: Call) -> Value:
    values = call.all_values()
    return ops.concatenate(values, call.attribute("axis", 1))


@operator("Split", needs=(1,))
def split(call: Call) -> list[Value]:
    x = call[0]
    axis = front(call.attribute("axis", 0), x.rank, "Split")
    parts = call.attribute("num_outputs", call.output_count)
    if not 0 < parts <= max(call.output_count, 1):
        raise ShapeError(f"Split: num_outputs is {parts}, the node has {call.output_count}")
    each = -(-x.shape[axis] // parts)
    lengths = call.integers(1, "split", [min(each, max(x.shape[axis] - k * each, 0)) for k in range(parts)])
    if sum(lengths) != x.shape[axis] or min(lengths, default=0) < 0:
        raise ShapeError(f"Split: parts of {lengths} do not make up {x.shape[axis]}")
    ends = list(accumulate(lengths))
    return [ops.slice_axis(x, axis, end - length, end) for end, length in zip(ends, lengths, strict=True)]


# Slices ---------------------------------------------------------------------------------------------------------------


@operator("Slice", needs=(1, 2, 3, 4))
def slice_(call: Call) -> Value:
    x = call[0]
    starts, ends = call.integers(1, "starts"), call.integers(2, "ends")
    axes = call.integers(3, "axes", range(len(starts)))
    steps = call.integers(4, "", [1] * len(starts))
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise ShapeError("Slice: starts, ends, axes and steps have different lengths")
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step == 0:
            raise ShapeError("Slice: a step of 0")
        axis = front(axis, x.rank, "Slice")
        if step < 0:  # a start before the first element is the first, where NumPy takes nothing
            start = max(start, -x.shape[axis])
        x = sliced(x, axis, slice(start, end, step))
    return x


def sliced(x: Value, axis: int, part: slice) -> Value:
    """x[.., part, ..] for any start, end and step, as NumPy means them."""
    start, end, step = part.indices(x.shape[axis])
    places = range(start, end, step)
    if step < 0:
        affordable(x.trace, len(places))
        return ops.take(x, x.trace.constant(np.array(places, np.int64)), axis)
    starts, ends, strides = [0] * x.rank, list(x.shape), [1] * x.rank
    starts[axis], ends[axis], strides[axis] = start, max(start, end), step
    if x.shape == tuple(len(places) if k == axis else n for k, n in enumerate(x.shape)):
        return x
    return ops.slice_(x, starts, ends, strides)


def reversed_along(x: Value, axis: int) -> Value:
    return sliced(x, axis, slice(None, None, -1))


# Padding --------------------------------------------------------------------------------------------------------------


@operator("Pad", needs=(1, 2, 3), frozen=(2,))
def pad(call: Call) -> Value:
    x = call[0]
    pads = call.integers(1, "paddings" if "paddings" in call.attributes else "pads")
    axes = call.integers(3, "", range(x.rank))
    if len(pads) != 2 * len(axes):
        raise ShapeError(f"Pad: {len(pads)} widths for {len(axes)} axes")
    value = call.attribute("value", call.number(2, 0.0))
    mode = call.attribute("mode", "constant")
    for axis, before, after in zip(axes, pads, pads[len(axes) :], strict=False):
        x = padded(x, front(axis, x.rank, "Pad"), before, after, mode, value)
    return x


def padded(x: Value, axis: int, before: int, after: int, mode: str = "constant", value: float = 0.0) -> Value:
    """x with elements added (or, for negative widths, cut off) at both ends of an axis."""
    extent = x.shape[axis]
    limited(np.zeros((), x.dtype), (*x.shape[:axis], max(extent + before + after, 0), *x.shape[axis + 1 :]))
    if mode == "constant":
        x = sliced(x, axis, slice(max(-before, 0), extent - max(-after, 0)))
        widths = [(max(before, 0), max(after, 0)) if k == axis else (0, 0) for k in range(x.rank)]
        return ops.pad(x, [b for b, _ in widths], [a for _, a in widths], value)
    if mode not in ("reflect", "edge", "wrap"):
        raise ShapeError(f"Pad: there is no mode {mode!r}")
    if not before and not after:
        return x
    affordable(x.trace, abs(before) + extent + abs(after))
    places = np.arange(-before, extent + after)
    if mode == "edge":
        places = np.clip(places, 0, extent - 1)
    elif mode == "wrap":  # what is cut off is not repeated
        first, last = max(-before, 0), extent - max(-after, 0)
        if last <= first:
            raise ShapeError(f"Pad: nothing of {extent} elements is left to repeat")
        places = first + (places - first) % (last - first)
    else:
        period = max(2 * (extent - 1), 1)
        places = np.abs((places + extent - 1) % period - (extent - 1)) if extent > 1 else places * 0
    return ops.take(x, x.trace.constant(places.astype(np.int64)), axis)


@operator("CenterCropPad", needs=(1,))
def center_crop_pad(call: Call) -> Value:
    x = call[0]
    wanted = call.integers(1)
    axes = call.attribute("axes") or range(x.rank)
    for axis, target in zip(axes, wanted, strict=True):
        axis = front(axis, x.rank, "CenterCropPad")
        missing = target - x.shape[axis]
        if missing > 0:
            x = padded(x, axis, missing // 2, missing - missing // 2)
        elif missing < 0:
            start = -missing // 2
            x = ops.slice_axis(x, axis, start, start + target)
    return x


# Blocks ---------------------------------------------------------------------------------------------------------------


@operator("DepthToSpace")
def depth_to_space(call: Call) -> Value:
    x, b = call[0], call.attribute("blocksize")
    n, c, h, w = x.shape
    if b < 1 or c % (b * b):
        raise ShapeError(f"DepthToSpace: {c} channels in blocks of {b}")
    depth = c // (b * b)
    if call.attribute("mode", "DCR") == "DCR":
        x = ops.transpose(ops.reshape(x, (n, b, b, depth, h, w)), (0, 3, 4, 1, 5, 2))
    else:
        x = ops.transpose(ops.reshape(x, (n, depth, b, b, h, w)), (0, 1, 4, 2, 5, 3))
    return ops.reshape(x, (n, depth, h * b, w * b))


@operator("SpaceToDepth")
def space_to_depth(call: Call) -> Value:
    x, b = call[0], call.attribute("blocksize")
    n, c, h, w = x.shape
    if b < 1 or h % b or w % b:
        raise ShapeError(f"SpaceToDepth: {h} x {w} in blocks of {b}")
    x = ops.reshape(x, (n, c, h // b, b, w // b, b))
    axes = (0, 1, 3, 5, 2, 4) if call.attribute("mode", "DCR") == "CRD" else (0, 3, 5, 1, 2, 4)
    return ops.reshape(ops.transpose(x, axes), (n, c * b * b, h // b, w // b))


@operator("Trilu", needs=(1,))
def trilu(call: Call) -> Value:
    x = call[0]
    rows, columns = x.shape[-2:]
    upper = call.attribute("upper", 1)
    k = int(call.number(1, 0))
    call.affordable(rows, columns)
    distance = np.arange(columns) - np.arange(rows)[:, None]
    kept = distance >= k if upper else distance <= k
    return ops.select(call.constant(kept), x, ops.full(x, (), 0))


@operator("ReverseSequence", trains=True)
def reverse_sequence(call: Call) -> Value:
    x, lengths = call[0], call.array(1).reshape(-1).astype(np.int64)
    time, batch = call.attribute("time_axis", 0), call.attribute("batch_axis", 1)
    steps = x.shape[time]
    if {time, batch} != {0, 1} or lengths.shape[0] != x.shape[batch] or np.any((lengths < 0) | (lengths > steps)):
        raise ShapeError(f"ReverseSequence: lengths {lengths.tolist()} do not fit {x.shape}")
    call.affordable(*x.shape)
    places = np.arange(steps)[:, None] + np.zeros_like(lengths)
    places = np.where(places < lengths, lengths - 1 - places, places)
    if batch == 0:
        places = places.T
    indices = np.broadcast_to(places.reshape(places.shape + (1,) * (x.rank - 2)), x.shape)
    return ops.gather(x, call.constant(indices, np.int64), time)
