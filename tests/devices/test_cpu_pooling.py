"""Pooling on the CPU, in both layouts: borders, gaps, overlaps, ties and NaN as the ops mean them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlcompute import ops
from mlcompute.devices.cpu.kernels.pooling import KERNELS
from mlcompute.devices.cpu.runtime import schedule
from mlcompute.ops.op import TABLE, Array, Value
from mlcompute.ops.views import slice_
from tests.devices.kernels import Bench, run_on_engine
from tests.harness import assert_close

# image, kernel, strides, dilations, padding (top, bottom, left, right)
WINDOWS = [
    ((2, 3, 4, 4), (2, 2), (2, 2), (1, 1), (0, 0, 0, 0)),
    ((9, 6, 28, 28), (2, 2), (2, 2), (1, 1), (0, 0, 0, 0)),
    ((1, 5, 7, 9), (2, 2), (2, 2), (1, 1), (0, 0, 0, 0)),
    ((2, 17, 9, 11), (3, 3), (2, 2), (1, 1), (1, 1, 1, 1)),
    ((3, 4, 12, 40), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    ((8, 33, 8, 8), (8, 8), (1, 1), (1, 1), (0, 0, 0, 0)),
    ((2, 3, 6, 7), (5, 5), (1, 1), (1, 1), (2, 2, 2, 2)),
    ((2, 3, 13, 17), (2, 3), (3, 2), (2, 1), (1, 0, 0, 2)),
    ((2, 3, 13, 37), (2, 2), (1, 2), (3, 2), (1, 2, 3, 1)),
    ((1, 1, 1, 1), (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    ((2, 2, 3, 3), (2, 2), (2, 2), (1, 1), (2, 2, 2, 2)),  # some windows lie wholly in the padding
    ((2, 2, 20, 36), (2, 2), (3, 3), (1, 1), (0, 0, 0, 0)),  # some elements lie in no window
    ((2, 2, 20, 36), (1, 1), (3, 2), (1, 1), (0, 0, 0, 0)),
    ((2, 20, 5, 1), (2, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    ((2, 3, 5, 40), (2, 2), (4, 4), (1, 1), (0, 0, 0, 0)),
    ((2, 3, 4, 1), (1, 3), (1, 1), (1, 2), (0, 0, 2, 2)),  # some elements of each window lie beside the image
    ((2, 3, 2, 2), (3, 5), (1, 1), (3, 2), (3, 3, 4, 4)),
]


def last(x: Array) -> Array:
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1))


def images(shape: tuple[int, ...]) -> list[Array]:
    """Ordinary numbers, many ties, and what is not a number."""
    rng = np.random.default_rng(shape)
    x = rng.standard_normal(shape).astype(np.float32)
    odd = x.copy()
    odd[rng.random(shape) < 0.1] = np.nan
    odd[rng.random(shape) < 0.2] = -np.inf
    odd[rng.random(shape) < 0.05] = np.inf
    return [x, np.round(x), odd]


def check(name: str, arrays: list[Array], attributes: dict[str, Any]) -> None:
    Bench(KERNELS, name, arrays, attributes).check(assert_close)


@pytest.mark.parametrize(("shape", "kernel", "strides", "dilations", "padding"), WINDOWS)
@pytest.mark.parametrize("layout", ["first", "last"])
def test_pooling(shape: tuple[int, ...], kernel: Any, strides: Any, dilations: Any, padding: Any, layout: str) -> None:
    attributes = {"kernel": kernel, "strides": strides, "dilations": dilations, "padding": padding}
    for x in images(shape):
        y = TABLE["max_pool"].meaning(x, **attributes)
        dy = np.random.default_rng(0).standard_normal(y.shape).astype(np.float32)
        arranged = (x, dy) if layout == "first" else (last(x), last(dy))
        laid_out = attributes if layout == "first" else {**attributes, "channels_last": True}
        check("max_pool", [arranged[0]], laid_out)
        check("sum_pool", [arranged[0]], laid_out)
        check("max_pool_gradient", [arranged[1], arranged[0]], laid_out)
        check("sum_pool_gradient", [arranged[1]], {**laid_out, "shape": shape})
        if layout == "last":
            check("max_pool_with_indices", [arranged[0]], laid_out)
            indices = np.ascontiguousarray(TABLE["max_pool_with_indices"].meaning(arranged[0], **laid_out)[1])
            check("max_pool_indices_gradient", [arranged[1], indices], {**laid_out, "shape": shape})


def test_part_of_an_image() -> None:
    x = images((9, 5, 10, 24))[0]
    attributes = {"kernel": (2, 2), "strides": (2, 2), "dilations": (1, 1), "padding": (0, 0, 0, 0)}
    for start in ((1, 2, 1, 3), (0, 0, 0, 4)):
        for name in ("max_pool", "sum_pool"):
            bench = Bench(KERNELS, name, [x], attributes, views=lambda v, s=start: [slice_(v, s, v.shape)])
            bench.check(assert_close)


def test_a_smaller_batch_runs_the_same_code() -> None:
    windows = {"kernel": (3, 3), "strides": (2, 2), "dilations": (1, 1), "padding": (1, 1, 1, 1)}
    attributes: dict[str, Any] = {**windows, "channels_last": True}
    for name in ("max_pool", "max_pool_gradient"):
        texts = []
        for batch in (32, 16):
            x = np.zeros((batch, 9, 9, 5), np.float32)
            dy = np.zeros((batch, 5, 5, 5), np.float32)
            entries = Bench(KERNELS, name, [x] if name == "max_pool" else [dy, x], attributes).entries
            assert entries is not None
            texts.append([entry.code.text() for entry in entries])
        assert texts[0] == texts[1]


def test_on_a_team(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "WORTH_SHARING", 1e-9)
    windows = {"kernel": (3, 3), "strides": (2, 2), "dilations": (1, 1), "padding": (1, 1, 1, 1)}

    def describe(x: Value) -> list[Value]:
        y = ops.max_pool(x, **windows)
        z = ops.sum_pool(y, **windows)
        dy = ops.sum_pool_gradient(z, y.shape, **windows)
        return [z, ops.max_pool_gradient(dy, x, **windows)]

    for batch in (20, 3):
        x = images((batch, 7, 20, 22))[0]
        first = run_on_engine(describe, [x], 1)
        for threads in (2, 5):
            for a, b in zip(first, run_on_engine(describe, [x], threads), strict=True):
                assert a.tobytes() == b.tobytes()
