"""Code that is written later: kernels with one key have one text, over shapes, strides, types and settings."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from mlcompute import ops
from mlcompute.devices.cpu.codegen.code import Code
from mlcompute.devices.cpu.kernels.table import KERNELS, WORKSPACES
from mlcompute.ops.bfloat16 import bfloat16
from mlcompute.ops.op import TABLE, Array, Value
from mlcompute.ops.views import slice_
from tests.devices.kernels import Bench
from tests.devices.test_cpu_pooling import WINDOWS, last

Described = tuple[str, Sequence[Array], dict[str, Any], Callable[..., Sequence[Value]] | None]
FLOATS = [np.dtype(np.float32), bfloat16()]


def zeros(*shape: int, dtype: Any = np.float32) -> Array:
    return np.zeros(shape, dtype)


def pooling() -> Iterator[Described]:
    for (shape, kernel, strides, dilations, padding), dtype in itertools.product(WINDOWS, FLOATS):
        attributes = {"kernel": kernel, "strides": strides, "dilations": dilations, "padding": padding}
        y = TABLE["max_pool"].meaning(zeros(*shape), **attributes)
        for samples in (shape[0], 40):
            x, dy = (last(np.zeros((samples, *like[1:]), dtype)) for like in (shape, y.shape))
            for name in ("max_pool", "sum_pool", "max_pool_with_indices"):
                yield name, [x], {**attributes, "channels_last": True}, None
            yield "max_pool_gradient", [dy, x], {**attributes, "channels_last": True}, None
            whole = {**attributes, "channels_last": True, "shape": (samples, *shape[1:])}
            yield "sum_pool_gradient", [dy], whole, None
            yield "max_pool_indices_gradient", [dy, zeros(*dy.shape, dtype=np.uint8)], whole, None


def every_second(*values: Value, at: int = 0) -> list[Value]:
    """The same; of one of them only every second element along the last axis."""
    x = values[at]
    part = slice_(x, (0,) * x.rank, x.shape, (*(1,) * (x.rank - 1), 2))
    return [*values[:at], part, *values[at + 1 :]]


def cross_entropy() -> Iterator[Described]:
    shapes = [((9, 10), 1), ((3, 70), 1), ((64, 10), 1), ((2, 5, 33), 1), ((4, 3, 2, 8), 1), ((4, 3, 40), 2)]
    settings = itertools.product([(1.0, 0.0), (0.9, 0.01)], [None, 2])
    labels = [np.dtype(kind) for kind in (np.int32, np.uint32, np.int64)]
    for (shape, axis), ((keep, spread), ignored), dtype in itertools.product(shapes, settings, labels):
        kept = [1 if at == axis else extent for at, extent in enumerate(shape)]
        x, label, row = zeros(*shape), zeros(*kept, dtype=dtype), zeros(*kept)
        attributes = {"axis": axis, "keep": keep, "spread": spread}
        yield "softmax_cross_entropy", [x, label], {**attributes, "ignored": ignored}, None
        yield "softmax_cross_entropy_gradient", [x, row, row, label, row, row], attributes, None
        wide = zeros(*shape[:-1], 2 * shape[-1])
        yield "softmax_cross_entropy", [wide, label], {**attributes, "ignored": ignored}, every_second
        for at in (0, 1, 4):
            given = [wide if at == 0 else x, *(zeros(*kept[:-1], 2 * kept[-1]) if at == n else row for n in (1, 2))]
            given += [label, zeros(*kept[:-1], 2 * kept[-1]) if at == 4 else row, row]
            yield "softmax_cross_entropy_gradient", given, attributes, functools.partial(every_second, at=at)


def products() -> Iterator[Described]:
    sizes = [(1, 1, 1), (64, 784, 256), (64, 10, 256), (130, 33, 512), (300, 64, 5), (20, 700, 40), (3, 64, 64)]
    for (m, n, k), dtype in itertools.product(sizes, FLOATS):
        plain = zeros(m, k, dtype=dtype), zeros(k, n)
        yield "matmul", plain, {}, None
        yield "matmul", [plain[0].T.copy(), plain[1]], {}, lambda a, b: (ops.transpose(a), b)
        yield "matmul", [plain[0], plain[1].T.copy()], {}, lambda a, b: (a, ops.transpose(b))
        yield "matmul", [zeros(3, m, k, dtype=dtype), zeros(3, k, n)], {}, None
        yield "matmul", [zeros(2, 3, m, k), zeros(2, 1, n, k)], {}, lambda a, b: (a, ops.transpose(b, (0, 1, 3, 2)))


def normalization() -> Iterator[Described]:
    shapes = [((8, 5), (1,)), ((8, 300), (1,)), ((2, 7, 40), (2,)), ((2, 7, 40), (1, 2)), ((3, 4, 5, 6), (1, 3))]
    for (shape, axes), dtype, epsilon in itertools.product(shapes, FLOATS, (1e-5, 1e-3)):
        yield "normalize", [zeros(*shape, dtype=dtype)], {"axes": axes, "epsilon": epsilon}, None
    groups = [((2, 20, 24), (1,), 2), ((3, 20, 24), (1,), 2), ((2, 24, 20), (2,), 1), ((2, 9, 9, 600), (1, 2), 3)]
    for (shape, axes, axis), size, dtype in itertools.product(groups, (1, 2, 4, 12), FLOATS):
        settings = {"axes": axes, "axis": axis, "size": size, "epsilon": 1e-5}
        yield "normalize_groups", [zeros(*shape, dtype=dtype)], settings, None


@pytest.mark.parametrize("described", [pooling, cross_entropy, products, normalization])
def test_kernels_with_one_key_have_one_text(described: Callable[[], Iterator[Described]]) -> None:
    texts: dict[str, str] = {}
    count = 0
    for name, arrays, attributes, views in described():
        entries = Bench(KERNELS, name, arrays, attributes, views=views, workspaces=WORKSPACES).entries or []
        for entry in entries:
            for code in (entry.code, *(one for one in entry.arguments if isinstance(one, Code))):
                key = code.cache_key()
                text = code.text()
                assert texts.setdefault(key, text) == text, f"{name} {[one.shape for one in arrays]} {attributes}"
                count += 1
    assert 1 < len(texts) < count  # some share their code, not all
