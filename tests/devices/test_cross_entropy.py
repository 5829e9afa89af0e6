"""The fused cross entropy on the CPU, native, and on CUDA, emulated: what the op means, for any axis and layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute import ops
from mlcompute.devices.cpu.kernels.table import KERNELS, WORKSPACES
from mlcompute.ops.bfloat16 import bfloat16
from mlcompute.ops.op import TABLE, Array, Value
from mlcompute.ops.views import broadcast, slice_, transpose
from tests.devices.cuda_emulator.bench import check, needs_engine, op, run
from tests.devices.kernels import Bench
from tests.harness import assert_close

FORWARD, GRADIENT = "softmax_cross_entropy", "softmax_cross_entropy_gradient"
#: Rows of few and of many classes, columns of few and of many samples, extents of 1.
SHAPES = [
    ((5, 7), 1), ((64, 10), 1), ((300, 3), 1), ((64, 3), 0), ((2, 21, 8, 9), 1), ((3, 1000), 1), ((2, 5, 30), 2),
    ((2, 1, 4), 1), ((9, 1), 1), ((1, 9), 1), ((2, 3, 300), 1), ((1, 1), 0),
]  # fmt: skip
OPTIONS = [(1.0, 0.0, None, np.int32), (0.9, 0.01, -100, np.int64), (1.0, 0.0, 1, np.uint8), (0.5, 0.1, None, np.int8)]


def given(shape: tuple[int, ...], axis: int, kind: Any, ignored: int | None) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng([axis, *shape])
    labels = rng.integers(0, min(shape[axis], 100), (*shape[:axis], 1, *shape[axis + 1 :])).astype(kind)
    if ignored is not None:
        labels.flat[0] = ignored
    return (3 * rng.standard_normal(shape)).astype(np.float32), labels, rng.random(labels.shape, np.float32)


def gradient_inputs(x: Array, labels: Array, dy: Array, axis: int) -> list[Array]:
    valid = np.clip(labels, 0, x.shape[axis] - 1)
    _, largest, logarithm = TABLE[FORWARD].meaning(x, valid, axis, 1.0, 0.0, None)
    return [x, largest, logarithm.astype(np.float32), labels, dy, np.float32(1.1) * dy]


@pytest.mark.parametrize(("keep", "spread", "ignored", "kind"), OPTIONS)
def test_cpu_kernels(keep: float, spread: float, ignored: int | None, kind: Any) -> None:
    for shape, axis in SHAPES if keep == 1.0 else SHAPES[:5:2]:
        x, labels, dy = given(shape, axis, kind, ignored)
        attributes = {"axis": axis, "keep": keep, "spread": spread}
        bench = Bench(KERNELS, FORWARD, [x, labels], {**attributes, "ignored": ignored}, workspaces=WORKSPACES)
        bench.check(lambda found, expected: assert_close(found, expected, 2))
        arrays = gradient_inputs(x, labels, dy, axis)
        Bench(KERNELS, GRADIENT, arrays, attributes, workspaces=WORKSPACES).check(assert_close)


def test_cpu_kernels_of_bfloat16() -> None:
    """Logits and their gradients; what the label's class gets is rounded once."""
    for shape, axis in SHAPES:
        x, labels, dy = given(shape, axis, np.int64, None)
        x.flat[0] = 8.0  # a sample that is nearly certain: its gradient is the difference of nearly equal numbers
        labels.flat[0] = 0
        narrow = x.astype(bfloat16())
        attributes = {"axis": axis, "keep": 0.9, "spread": 0.01}
        forward = Bench(KERNELS, FORWARD, [narrow, labels], {**attributes, "ignored": None}, workspaces=WORKSPACES)
        forward.check(lambda found, expected: assert_close(found, expected, 2))
        arrays = gradient_inputs(narrow.astype(np.float32), labels, dy, axis)
        bench = Bench(KERNELS, GRADIENT, [narrow, *arrays[1:]], attributes, workspaces=WORKSPACES)
        (found,) = bench.check(assert_close)
        assert found.dtype == bfloat16()
        (expected,) = (array.astype(np.float32) for array in bench.expected())
        np.testing.assert_allclose(found.astype(np.float32), expected, rtol=2.0**-7, atol=1e-6)


def test_cpu_kernels_of_views() -> None:
    x, labels, dy = given((12, 40), 1, np.int64, None)

    def views(x: Value, labels: Value, *rest: Value) -> list[Value]:
        part = slice_(transpose(x), (0, 2), (40, 10))
        labels, *rest_ = (slice_(transpose(value), (0, 2), (1, 10)) for value in (labels, *rest))
        return [part, labels, *rest_]

    attributes = {"axis": 0, "keep": 1.0, "spread": 0.0, "ignored": None}
    Bench(KERNELS, FORWARD, [x, labels], attributes, views=views).check(assert_close)
    arrays = gradient_inputs(x, labels, dy, 1)
    del attributes["ignored"]

    def ordered(x: Value, m: Value, e: Value, labels: Value, a: Value, b: Value) -> list[Value]:
        x, labels, m, e, a, b = views(x, labels, m, e, a, b)
        return [x, m, e, labels, a, b]

    Bench(KERNELS, GRADIENT, arrays, attributes, views=ordered).check(assert_close)

    def repeated(x: Value, m: Value, e: Value, labels: Value, a: Value, b: Value) -> list[Value]:
        return [x, m, e, labels, broadcast(a, (12, 1)), broadcast(b, (12, 1))]

    for shape in ((12, 40), (12, 5), (12, 5, 30)):
        x, labels, _ = given(shape, 1, np.int64, None)
        arrays = gradient_inputs(x, labels, np.ones_like(labels, np.float32), 1)
        arrays[4:] = [np.full((1,) * x.ndim, 0.5, np.float32)] * 2
        wanted = labels.shape
        Bench(
            KERNELS, GRADIENT, arrays, {"axis": 1, "keep": 1.0, "spread": 0.0},
            views=lambda *v, s=wanted: [*v[:4], *(broadcast(one, s) for one in v[4:])],
        ).check(assert_close)  # fmt: skip


@needs_engine
@pytest.mark.parametrize(("keep", "spread", "ignored", "kind"), OPTIONS)
def test_cuda_kernels(keep: float, spread: float, ignored: int | None, kind: Any) -> None:
    shapes = SHAPES if ignored is not None else [*SHAPES[:2], SHAPES[4], SHAPES[5]]
    for shape, axis in shapes:
        x, labels, dy = given(shape, axis, kind, ignored)
        attributes = {"axis": axis, "keep": keep, "spread": spread}
        check(op(FORWARD, **attributes, ignored=ignored), x, labels, scale=2)
        check(op(GRADIENT, **attributes), *gradient_inputs(x, labels, dy, axis))


@needs_engine
@pytest.mark.parametrize("dtype", [bfloat16(), np.float64])
def test_cuda_kernels_of_other_types(dtype: Any) -> None:
    for shape, axis in (((4, 64), 1), ((2, 3, 8), 1), ((3, 9), 1)):
        x, labels, dy = given(shape, axis, np.int64, None)
        narrow = x.astype(dtype)
        attributes = {"axis": axis, "keep": 1.0, "spread": 0.0}
        check(op(FORWARD, **attributes, ignored=None), narrow, labels)
        arrays = gradient_inputs(narrow.astype(np.float32), labels, dy, axis)
        real = np.float64 if dtype is np.float64 else np.float32
        arrays = [narrow, *(array.astype(real) if array.dtype.kind == "f" else array for array in arrays[1:])]
        check(op(GRADIENT, **attributes), *arrays)


@needs_engine
def test_cuda_rows_longer_than_registers_hold() -> None:
    x, labels, _ = given((2, 20_000), 1, np.int32, None)
    check(op(FORWARD, axis=1, keep=0.9, spread=0.1 / 20_000, ignored=None), x, labels, scale=4)


@needs_engine
def test_cuda_says_which_label_is_no_class() -> None:
    x, labels, _ = given((4, 5), 1, np.int64, None)
    labels[2] = 7
    with pytest.raises(mlc.ExecutionError, match=r"label 7.*valid are 0 to 4"):
        run(lambda x, i: ops.softmax_cross_entropy(x, i, 1), [x, labels])
