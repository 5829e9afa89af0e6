"""Matrix products and convolutions of any number of spatial axes."""

# ruff: noqa: D103  (a row is the ONNX operator it names: the standard is its docstring)

from __future__ import annotations

import math
from functools import reduce
from operator import add

import numpy as np

from mlcompute import ops
from mlcompute.errors import ShapeError
from mlcompute.onnx.budget import affordable
from mlcompute.onnx.operators.shapes import limited, padded
from mlcompute.onnx.operators.windows import Ints, pads_of, spatial
from mlcompute.onnx.rows import Call, operator, through_double
from mlcompute.ops.op import Shape, Value

# Products -------------------------------------------------------------------------------------------------------------


def product(a: Value, b: Value) -> Value:
    """NumPy's matmul, with vectors."""
    if not a.rank or not b.rank:
        raise ShapeError(f"MatMul: {a.shape} times {b.shape} has no meaning")
    left = ops.reshape(a, (1, *a.shape)) if a.rank == 1 else a
    right = ops.reshape(b, (*b.shape, 1)) if b.rank == 1 else b
    y = ops.matmul(left, right)
    shape = list(y.shape)
    if b.rank == 1:
        del shape[-1]
    if a.rank == 1:
        del shape[-1 if b.rank == 1 else -2]
    return ops.reshape(y, shape)


@operator("MatMul", weights=(0, 1))
def matmul(call: Call) -> Value:
    return product(call[0], call[1])


@operator("Gemm", weights=(1, 2))
def gemm(call: Call) -> Value:
    a, b = call[0], call[1]
    if call.attribute("transA", 0):
        a = ops.transpose(a)
    if call.attribute("transB", 0):
        b = ops.transpose(b)
    y, c = ops.matmul(a, b), call.optional(2)
    alpha, beta = float(call.attribute("alpha", 1.0)), float(call.attribute("beta", 1.0))
    is_fractional = not (y.is_floating or (alpha.is_integer() and beta.is_integer()))

    def scaled(y: Value) -> Value:
        if alpha != 1.0:
            y = y * alpha
        if c is None:
            return y
        shape, added = y.shape, ops.convert(c, y.dtype) if is_fractional else c
        y = y + (added if beta == 1.0 else added * beta)
        if y.shape != shape:
            raise ShapeError(f"Gemm: C of shape {c.shape} does not broadcast to {shape}")
        return y

    return through_double(y, scaled) if is_fractional else scaled(y)


#: Operands an Einsum is looked at for weights: more than anybody multiplies at once.
_MOST_OPERANDS = 16


@operator("Einsum", weights=range(_MOST_OPERANDS))
def einsum(call: Call) -> Value:
    values = call.all_values()
    inputs, output = _equation(call.attribute("equation", ""), [value.rank for value in values])
    values_ = [_diagonal(value, names) for value, names in zip(values, inputs, strict=True)]
    joined = reduce(lambda a, b: _contract(a, b, output, values_), values_[1:], values_[0])
    value, names = joined
    gone = tuple(axis for axis, name in enumerate(names) if name not in output)
    if gone:
        value = ops.sum_(value, gone)
        value = ops.reshape(value, [n for axis, n in enumerate(value.shape) if axis not in gone])
        names = [name for name in names if name in output]
    order = tuple(names.index(name) for name in output)
    return ops.transpose(value, order) if order != tuple(range(len(order))) else value


def _equation(equation: str, ranks: list[int]) -> tuple[list[list[str]], list[str]]:
    """Names of the axes of each operand and of the result; the axes of an ellipsis are called 0, 1, .. from behind."""
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        raise ShapeError(f"Einsum: '{equation}' speaks of {len(terms)} operands, there are {len(ranks)}")
    longest = 0
    inputs: list[list[str]] = []
    for term, rank in zip(terms, ranks, strict=True):
        before, dots, after = term.partition("...")
        hidden = rank - len(before) - len(after)
        if hidden < 0 or (hidden and not dots) or (not (before + after).isalpha() and before + after):
            raise ShapeError(f"Einsum: '{term}' does not fit an operand of rank {rank}", equation=equation)
        longest = max(longest, hidden)
        inputs.append([*before, *(str(k) for k in reversed(range(hidden))), *after])
    ellipsis = [str(k) for k in reversed(range(longest))]
    if arrow:
        before, dots, after = right.partition("...")
        output = [*before, *(ellipsis if dots else []), *after]
    else:
        letters = "".join(terms).replace(".", "")
        output = [*ellipsis, *sorted(name for name in set(letters) if letters.count(name) == 1)]
    known = {name for names in inputs for name in names}
    if len(set(output)) < len(output) or not set(output) <= known:
        raise ShapeError(f"Einsum: the result of '{equation}' has no meaning")
    return inputs, output


def _diagonal(x: Value, names: list[str]) -> tuple[Value, list[str]]:
    """Axes of the same name become one: the diagonal."""
    names = list(names)
    for name in sorted(set(names)):
        while names.count(name) > 1:
            first = names.index(name)
            second = names.index(name, first + 1)
            n = x.shape[first]
            if x.shape[second] != n:
                raise ShapeError(f"Einsum: axis '{name}' has extents {n} and {x.shape[second]}")
            order = [k for k in range(x.rank) if k not in (first, second)]
            rest = [x.shape[k] for k in order]
            affordable(x.trace, n)
            flat = ops.reshape(ops.transpose(x, (first, second, *order)), (n * n, *rest))
            picked = ops.take(flat, x.trace.constant(np.arange(n) * (n + 1), np.dtype(np.int64)), 0)
            x, names = picked, [name, *(names[k] for k in order)]
    return x, names


def _contract(
    a: tuple[Value, list[str]], b: tuple[Value, list[str]], output: list[str], all_terms: list[tuple[Value, list[str]]]
) -> tuple[Value, list[str]]:
    """Two operands become one by a matrix product: shared axes that are kept are batches, the others are summed."""
    (x, left), (y, right) = a, b
    later = {name for value, names in all_terms if value is not x and value is not y for name in names}
    shared = [name for name in left if name in right]
    summed = [name for name in shared if name not in output and name not in later]
    batch = [name for name in shared if name not in summed]
    rows = [name for name in left if name not in shared]
    columns = [name for name in right if name not in shared]
    size = {**dict(zip(right, y.shape, strict=True))}
    for name, extent in zip(left, x.shape, strict=True):
        size[name] = extent if size.get(name, 1) == 1 else size[name]

    def arranged(value: Value, names: list[str], groups: tuple[list[str], ...]) -> Value:
        order = [names.index(name) for group in groups for name in group]
        value = ops.transpose(value, order) if order != list(range(len(order))) else value
        value = ops.broadcast(
            value,
            [
                size[name] if name in shared else value.shape[k]
                for k, name in enumerate(name for group in groups for name in group)
            ],
        )
        return ops.reshape(value, [math.prod(size[name] for name in group) for group in groups])

    p = arranged(x, left, (batch, rows, summed))
    q = arranged(y, right, (batch, summed, columns))
    names = [*batch, *rows, *columns]
    return ops.reshape(ops.matmul(p, q), [size[name] for name in names]), names


@operator("Det")
def det(call: Call) -> Value:
    """The determinant by elimination with the largest remaining element of each column as pivot."""
    x = call[0]
    n = x.shape[-1]
    if x.rank < 2 or x.shape[-2] != n or n > 32:
        raise ShapeError(f"Det: {x.shape} are not square matrices of up to 32 rows")
    batch = math.prod(x.shape[:-2])
    m = ops.reshape(x, (batch, n, n))
    answer = ops.full(x, (batch, 1, 1), 1.0)
    for size in range(n, 0, -1):
        column = ops.slice_axis(m, 2, 0, 1)
        pivot_row = ops.argmax(ops.abs_(column), 1)
        numbers = call.constant(np.arange(size).reshape(1, size, 1), np.int64)
        # The pivot row and the first one change places, which turns the sign.
        swapped = ops.select(ops.equal(numbers, 0), pivot_row, ops.select(ops.equal(numbers, pivot_row), 0, numbers))
        m = ops.gather(m, ops.broadcast(swapped, (batch, size, size)), 1)
        sign = ops.select(ops.equal(pivot_row, 0), ops.full(x, (), 1.0), ops.full(x, (), -1.0))
        pivot = ops.slice_(m, (0, 0, 0), (batch, 1, 1))
        answer = answer * pivot * sign
        if size == 1:
            break
        safe = ops.select(ops.equal(pivot, 0.0), 1.0, pivot)
        factor = ops.slice_(m, (0, 1, 0), (batch, size, 1)) / safe
        rest = ops.slice_(m, (0, 1, 1), (batch, size, size))
        m = rest - factor * ops.slice_(m, (0, 0, 1), (batch, 1, size))
    return ops.reshape(answer, x.shape[:-2])


# Convolution --------------------------------------------------------------------------------------------------------


def convolved(x: Value, w: Value, strides: Ints, dilations: Ints, begin: Ints, end: Ints, groups: int) -> Value:
    """Convolution of any number of spatial axes, by the one of two: more axes are summed over kernel positions.

    x (N, C, *image)   w (O, C / groups, *kernel)   ->   y (N, O, *windows)
    """
    rank = x.rank - 2
    if rank < 1 or w.rank != x.rank:
        raise ShapeError(f"Conv: an image {x.shape} and a kernel {w.shape}")
    if rank == 1:
        y = convolved(
            ops.reshape(x, (*x.shape[:2], 1, x.shape[2])), ops.reshape(w, (*w.shape[:2], 1, w.shape[2])),
            (1, *strides), (1, *dilations), (0, *begin), (0, *end), groups,
        )  # fmt: skip
        return ops.reshape(y, (*y.shape[:2], y.shape[3]))
    if rank == 2:
        return ops.convolution(
            x, w, (strides[0], strides[1]), (dilations[0], dilations[1]), (begin[0], end[0], begin[1], end[1]), groups
        )
    x = padded(x, 2, begin[0], end[0])
    depth = w.shape[2]
    if depth > 256:
        raise ShapeError(f"Conv: a kernel of {depth} positions along its first axis", expected="at most 256")
    count = (x.shape[2] - dilations[0] * (depth - 1) - 1) // strides[0] + 1
    if count < 1:
        raise ShapeError(f"Conv: a kernel {w.shape} does not fit into {x.shape}")

    def by_plane(k: int) -> Value:
        starts, ends, steps = [0] * x.rank, list(x.shape), [1] * x.rank
        starts[2], steps[2] = k * dilations[0], strides[0]
        ends[2] = starts[2] + (count - 1) * strides[0] + 1
        part = ops.slice_(x, starts, ends, steps)
        n, c, d, *image = part.shape
        moved = ops.transpose(part, (0, 2, 1, *range(3, x.rank)))
        kernel = ops.reshape(ops.slice_axis(w, 2, k, k + 1), (*w.shape[:2], *w.shape[3:]))
        flat = convolved(
            ops.reshape(moved, (n * d, c, *image)), kernel, strides[1:], dilations[1:], begin[1:], end[1:], groups
        )
        return ops.reshape(flat, (n, d, *flat.shape[1:]))

    total = reduce(add, map(by_plane, range(depth)))
    return ops.transpose(total, (0, 2, 1, *range(3, total.rank)))


def with_bias(y: Value, bias: Value | None) -> Value:
    return y if bias is None else y + ops.reshape(bias, (bias.size, *(1,) * (y.rank - 2)))


@operator("Conv", weights=(1, 2))
def conv(call: Call) -> Value:
    x, w = call[0], call[1]
    rank = x.rank - 2
    kernel = tuple(w.shape[2:])
    strides, dilations = spatial(call, "strides", rank), spatial(call, "dilations", rank)
    begin, end = pads_of(call, x.shape[2:], kernel, strides, dilations)
    limited(np.zeros((), x.dtype), tuple(n + b + e for n, b, e in zip(x.shape[2:], begin, end, strict=True)))
    y = convolved(x, w, strides, dilations, begin, end, call.attribute("group", 1))
    return with_bias(y, call.optional(2))


def transposed_convolved(
    x: Value, w: Value, shape: Shape, strides: Ints, dilations: Ints, begin: Ints, end: Ints, groups: int
) -> Value:
    """The adjoint of `convolved`: every element of x spreads the kernel over the result.

    x (N, O, *windows)   w (O, C / groups, *kernel)   ->   y of `shape` (N, C, *image)
    """
    rank = x.rank - 2
    if rank == 1:
        y = transposed_convolved(
            ops.reshape(x, (*x.shape[:2], 1, x.shape[2])), ops.reshape(w, (*w.shape[:2], 1, w.shape[2])),
            (*shape[:2], 1, shape[2]), (1, *strides), (1, *dilations), (0, *begin), (0, *end), groups,
        )  # fmt: skip
        return ops.reshape(y, shape)
    if rank == 2:
        return ops.convolution_input_gradient(
            x, w, shape, (strides[0], strides[1]), (dilations[0], dilations[1]),
            (begin[0], end[0], begin[1], end[1]), groups,
        )  # fmt: skip
    n, o, d, *windows = x.shape
    rows = ops.reshape(ops.transpose(x, (0, 2, 1, *range(3, x.rank))), (n * d, o, *windows))
    thick = shape[2] + begin[0] + end[0]

    def by_plane(k: int) -> Value:
        kernel = ops.reshape(ops.slice_axis(w, 2, k, k + 1), (*w.shape[:2], *w.shape[3:]))
        inner = (n * d, shape[1], *shape[3:])
        part = transposed_convolved(rows, kernel, inner, strides[1:], dilations[1:], begin[1:], end[1:], groups)
        part = ops.transpose(ops.reshape(part, (n, d, *inner[1:])), (0, 2, 1, *range(3, x.rank)))
        place = k * dilations[0]
        return _spread(part, 2, strides[0], place, thick)

    total = reduce(add, map(by_plane, range(w.shape[2])))
    return ops.slice_axis(total, 2, begin[0], begin[0] + shape[2])


def _spread(x: Value, axis: int, stride: int, start: int, extent: int) -> Value:
    """x with its elements along an axis put `stride` apart, from `start` on, among zeros."""
    n = x.shape[axis]
    wide = ops.reshape(x, (*x.shape[: axis + 1], 1, *x.shape[axis + 1 :]))
    wide = padded(wide, axis + 1, 0, stride - 1)
    flat = ops.reshape(wide, (*x.shape[:axis], n * stride, *x.shape[axis + 1 :]))
    flat = ops.slice_axis(flat, axis, 0, (n - 1) * stride + 1)
    return padded(flat, axis, start, extent - start - flat.shape[axis])


@operator("ConvTranspose", weights=(1, 2))
def conv_transpose(call: Call) -> Value:
    x, w = call[0], call[1]
    rank, groups = x.rank - 2, call.attribute("group", 1)
    kernel = tuple(w.shape[2:])
    if len(kernel) != rank or groups < 1 or w.shape[0] != x.shape[1]:
        raise ShapeError(f"ConvTranspose: an image {x.shape} and a kernel {w.shape} with {groups} group(s)")
    strides, dilations = spatial(call, "strides", rank), spatial(call, "dilations", rank)
    extra = tuple(call.attribute("output_padding") or (0,) * rank)
    full = [
        (n - 1) * s + d * (k - 1) + 1 + e
        for n, s, d, k, e in zip(x.shape[2:], strides, dilations, kernel, extra, strict=True)
    ]
    wanted = call.attribute("output_shape")
    mode = call.attribute("auto_pad", "NOTSET")
    if wanted is not None or mode in ("SAME_UPPER", "SAME_LOWER"):
        target = [int(n) for n in (wanted or [n * s for n, s in zip(x.shape[2:], strides, strict=True)])][-rank:]
        totals = [max(n - t, 0) for n, t in zip(full, target, strict=True)]
        small = tuple(total // 2 for total in totals)
        large = tuple(total - total // 2 for total in totals)
        begin, end = (small, large) if mode == "SAME_UPPER" else (large, small)
        full = [t + b + e for t, b, e in zip(target, begin, end, strict=True)]
    else:
        begin, end = pads_of(call, x.shape[2:], kernel, strides, dilations)
    image = tuple(n - b - e for n, b, e in zip(full, begin, end, strict=True))
    if min(image) < 1:
        raise ShapeError(f"ConvTranspose: the padding leaves nothing, extents {image}")
    shape = (x.shape[0], w.shape[1] * groups, *image)
    limited(np.zeros((), x.dtype), shape)
    # The adjoint of a convolution whose windows end exactly at the last element: what lies behind gets nothing.
    last = tuple(
        (n - 1) * s + d * (k - 1) + 1 for n, s, d, k in zip(x.shape[2:], strides, dilations, kernel, strict=True)
    )
    y = transposed_convolved(x, w, (x.shape[0], shape[1], *last), strides, dilations, (0,) * rank, (0,) * rank, groups)
    for axis in range(rank):
        y = padded(y, axis + 2, -begin[axis], image[axis] + begin[axis] - last[axis])
    return with_bias(y, call.optional(2))


@operator("Col2Im", needs=(1, 2))
def col2im(call: Call) -> Value:
    """Windows added up to an image: the adjoint of cutting it into windows."""
    x = call[0]
    image, block = tuple(call.integers(1)), tuple(call.integers(2))
    rank = len(image)
    dilations, strides = spatial(call, "dilations", rank), spatial(call, "strides", rank)
    begin, end = pads_of(call, image, block, strides, dilations)
    n, c = x.shape[0], x.shape[1] // math.prod(block)
    counts = tuple(
        (i + b + e - d * (k - 1) - 1) // s + 1
        for i, b, e, d, k, s in zip(image, begin, end, dilations, block, strides, strict=True)
    )
    from mlcompute.onnx.operators.windows import window_places

    if min(counts) < 1 or x.shape != (n, c * math.prod(block), math.prod(counts)):
        raise ShapeError(f"Col2Im: {x.shape} does not hold the windows of {image}")
    places = window_places(call, image, block, strides, dilations, begin, counts)
    size = math.prod(image)
    # What fell into the padding is collected in one more place, which is cut off.
    flat = call.constant(np.where(places < 0, size, places).T.reshape(-1), np.int64)
    columns = ops.reshape(x, (n, c, flat.size))
    total = ops.take_gradient(columns, flat, 2, size + 1)
    return ops.reshape(ops.slice_axis(total, 2, 0, size), (n, c, *image))
