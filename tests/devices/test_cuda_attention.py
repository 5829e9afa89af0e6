"""Attention on the CUDA engine: against its NumPy meaning, emulated and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mlcompute import ops
from mlcompute.compiler.attention_by_token import BY_TOKEN, BY_TOKEN_GRADIENT, JOINED_GRADIENT
from mlcompute.devices.device import Engine
from mlcompute.ops.op import Array, Trace, Value
from tests.devices.cuda_ops import emulated, gpu, multiplied, run_on
from tests.harness import assert_close, forward

#: name -> q's shape, keys, the values' width, the mask's shape, dropout?
CASES: dict[str, tuple[tuple[int, int, int, int], int, int, tuple[int, ...] | None, bool]] = {
    "plain": ((2, 2, 5, 4), 6, 4, None, False),
    "one of everything": ((1, 1, 1, 1), 1, 1, None, False),
    "odd widths": ((1, 2, 5, 3), 7, 9, None, False),
    "more than a tile": ((1, 1, 70, 8), 90, 8, None, False),
    "shared mask": ((2, 2, 5, 4), 6, 4, (5, 6), False),
    "mask per head": ((2, 2, 5, 4), 6, 4, (2, 2, 5, 6), False),
    "mask of keys": ((2, 2, 5, 4), 6, 4, (2, 1, 1, 6), False),
    "mask of queries": ((2, 2, 5, 4), 6, 4, (1, 2, 5, 1), False),
    "dropout": ((2, 2, 5, 4), 6, 4, None, True),
    "mask and dropout, more than a tile": ((1, 2, 66, 8), 65, 16, (66, 65), True),
    "wide": ((1, 1, 5, 72), 40, 100, None, False),
    "causal": ((1, 2, 70, 16), 70, 16, (70, 70), False),
    "mask per sample, several tiles": ((2, 2, 5, 4), 70, 4, (2, 1, 5, 70), False),
    "mask per head, several tiles": ((2, 2, 70, 4), 5, 4, (1, 2, 70, 5), False),
}
LARGER: dict[str, tuple[tuple[int, int, int, int], int, int, tuple[int, ...] | None, bool]] = {
    "small transformer": ((16, 4, 64, 32), 64, 32, None, False),
    "causal language model": ((2, 12, 512, 64), 512, 64, (512, 512), False),
    "wide heads": ((2, 3, 130, 128), 200, 128, None, True),
    "dropout and mask": ((3, 5, 200, 40), 129, 24, (3, 1, 200, 129), True),
}


@pytest.fixture(autouse=True)
def highest() -> Iterator[None]:
    with multiplied("highest"):
        yield


def arrays_of(name: str) -> list[Array]:
    q, keys, width, mask, dropout = (CASES | LARGER)[name]
    rng = np.random.default_rng(len(name))
    shapes = [q, (*q[:2], keys, q[3]), (*q[:2], keys, width)]
    arrays: list[Array] = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    if mask is not None:
        added = rng.standard_normal(mask).astype(np.float32)
        if "causal" in name:
            added = np.where(np.triu(np.ones(mask, bool), 1), np.float32(-np.inf), np.float32(0))
        arrays.append(added)
    if dropout:
        arrays.append(np.float32(1.25) * (rng.random((*q[:3], keys)) < 0.8).astype(np.float32))
    return arrays


def described(name: str) -> tuple[Any, Any]:
    q, _, _, mask, dropout = (CASES | LARGER)[name]
    options = {"scale": q[3] ** -0.5, "has_mask": mask is not None, "has_keep": dropout}

    def attention(*values: Value) -> Any:
        return [ops.emit("attention", *values, **options)]

    def gradient(*values: Value) -> Any:
        return ops.emit_all("attention_gradient", *values, **options)

    return attention, gradient


def check(engine: Engine, name: str, scale: float = 4.0, times: int = 1) -> None:
    attention, gradient = described(name)
    arrays = arrays_of(name)
    found, kernels = run_on(engine, attention, arrays, times)
    assert kernels == "attention"
    (y,) = forward(attention, *arrays)
    assert_close(found[0], y, scale=scale, what="y")
    dy = np.random.default_rng(3).standard_normal(y.shape).astype(np.float32)
    found, kernels = run_on(engine, gradient, [dy, *arrays], times)
    assert kernels == "attention gradient"
    for what, a, b in zip(("dq", "dk", "dv"), found, forward(gradient, dy, *arrays), strict=True):
        assert_close(a, b, scale=scale, what=what)


def described_by_token(name: str) -> tuple[Any, Any]:
    q, _, _, mask, dropout = (CASES | LARGER)[name]
    options = {"scale": q[3] ** -0.5, "has_mask": mask is not None, "has_keep": dropout, "is_causal": "causal" in name}

    def attention(*values: Value) -> Any:
        return values[0].trace.add(BY_TOKEN, values, options)

    def gradient(*values: Value) -> Any:
        return values[0].trace.add(BY_TOKEN_GRADIENT, values, options)

    return attention, gradient


def check_by_token(engine: Engine, name: str, scale: float = 4.0, times: int = 1) -> None:
    """Results (n, l, heads, d), and the softmax's denominators kept for the gradient."""
    attention, gradient = described_by_token(name)
    arrays = arrays_of(name)
    kept, kernels = run_on(engine, attention, arrays, times)
    assert kernels == "attention"
    for what, a, b in zip(("y", "logs"), kept, forward(attention, *arrays), strict=True):
        assert_close(a, b, scale=scale, what=what)
    dy = np.random.default_rng(3).standard_normal(kept[0].transpose(0, 2, 1, 3).shape).astype(np.float32)
    found, kernels = run_on(engine, gradient, [dy, *kept, *arrays], times)
    assert kernels == "attention gradient"
    for what, a, b in zip(("dq", "dk", "dv"), found, forward(gradient, dy, *kept, *arrays), strict=True):
        assert_close(a, b, scale=scale, what=what)
    if len({array.shape for array in arrays[:3]}) == 1:  # they may be written side by side
        options = {"scale": arrays[0].shape[3] ** -0.5, "has_mask": len(arrays) > 3, "has_keep": False}
        (joined,), _ = run_on(engine, lambda *v: v[0].trace.add(JOINED_GRADIENT, v, options), [dy, *kept, *arrays])
        np.testing.assert_array_equal(joined, np.concatenate(found, axis=2))


@pytest.mark.parametrize("name", CASES)
def test_attention(name: str) -> None:
    check(emulated(), name)
    check_by_token(emulated(), name)


@pytest.mark.parametrize("name", ["plain", "mask and dropout, more than a tile"])
def test_rounded_factors(name: str) -> None:
    """The kernels for TF32; the emulator rounds nothing."""
    with multiplied("high"):
        check(emulated(), name)


def test_heads_are_read_in_place() -> None:
    """q, k and v as layers make them: (n, length, heads, width) with two axes swapped, parts of one array."""
    x = np.random.default_rng(0).standard_normal((2, 5, 3, 2, 8)).astype(np.float32)

    def fn(x: Value) -> Any:
        parts = [ops.reshape(ops.slice_axis(x, 2, k, k + 1), (2, 5, 2, 8)) for k in range(3)]
        q, k, v = (ops.transpose(part, (0, 2, 1, 3)) for part in parts)
        y = ops.attention(q, k, v, scale=0.5)
        return [y, *ops.emit_all("attention_gradient", y, q, k, v, scale=0.5, has_mask=False, has_keep=False)]

    found, _ = run_on(emulated(), fn, [x], times=1)
    for a, b in zip(found, forward(fn, x), strict=True):
        assert_close(a, b, scale=4.0)


def test_a_row_without_keys_is_nan() -> None:
    attention, gradient = described("shared mask")
    arrays = arrays_of("shared mask")
    arrays[3][2] = -np.inf
    arrays[3][3, :5] = -np.inf
    found, _ = run_on(emulated(), attention, arrays, times=1)
    expected = forward(attention, *arrays)[0]
    assert np.isnan(expected[:, :, 2]).all()
    assert_close(found[0], expected, scale=4.0)
    dy = np.ones(expected.shape, np.float32)
    found, _ = run_on(emulated(), gradient, [dy, *arrays], times=1)
    for a, b in zip(found, forward(gradient, dy, *arrays), strict=True):
        assert_close(a, b, scale=4.0)


def test_rows_without_keys_in_tiles_without_any() -> None:
    """Tiles that are forbidden are skipped, but not their NaNs."""
    attention, gradient = described("causal")
    arrays = arrays_of("causal")
    arrays[3][66:] = -np.inf
    arrays[3][3] = -np.inf
    expected = forward(attention, *arrays)[0]
    found, _ = run_on(emulated(), attention, arrays, times=1)
    assert np.isnan(expected[:, :, 66:]).all()
    assert_close(found[0], expected, scale=4.0)
    by_token, by_token_gradient = described_by_token("causal")
    kept, _ = run_on(emulated(), by_token, arrays, times=1)
    for dy in (np.ones(expected.shape, np.float32), np.zeros(expected.shape, np.float32)):
        found, _ = run_on(emulated(), gradient, [dy, *arrays], times=1)
        again, _ = run_on(emulated(), by_token_gradient, [dy, *kept, *arrays], times=1)
        for a, b, c in zip(found, forward(gradient, dy, *arrays), again, strict=True):
            assert_close(a, b, scale=4.0)
            assert_close(c, b.transpose(0, 2, 1, 3), scale=4.0)


@pytest.mark.parametrize("transposed", [False, True])
def test_long_gaps(transposed: bool) -> None:
    """More forbidden tiles in a row than a warp looks at together."""
    rng = np.random.default_rng(0)
    few, many = (1, 1, 66, 4), (1, 1, 1200, 4)
    q, k = (many, few) if transposed else (few, many)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in (q, k, k)]
    mask = rng.standard_normal((q[2], k[2])).astype(np.float32)
    if transposed:
        mask[40:1150, 1:] = -np.inf
    else:
        mask[:, 40:1150] = -np.inf
    attention, gradient = described("shared mask")
    found, _ = run_on(emulated(), attention, [*arrays, mask], times=1)
    assert_close(found[0], forward(attention, *arrays, mask)[0], scale=4.0)
    dy = rng.standard_normal(q).astype(np.float32)
    found, _ = run_on(emulated(), gradient, [dy, *arrays, mask], times=1)
    for a, b in zip(found, forward(gradient, dy, *arrays, mask), strict=True):
        assert_close(a, b, scale=16.0)


def test_what_is_left_to_the_expansion() -> None:
    for dtype, width in ((np.float16, 8), (np.float32, 136)):
        trace = Trace()
        values = [trace.value((2, 2, 5, width), np.dtype(dtype), "input") for _ in range(3)]
        ops.attention(*values, scale=1.0)
        assert not emulated().supports(trace.steps[-1])


@pytest.mark.parametrize("name", [*CASES, *LARGER])
def test_attention_on_a_gpu(name: str) -> None:
    check(gpu(), name, scale=16.0, times=3)
    check_by_token(gpu(), name, scale=16.0, times=3)


@pytest.mark.parametrize("name", LARGER)
def test_attention_with_tf32_on_a_gpu(name: str) -> None:
    engine = gpu()
    with multiplied("high"):
        check(engine, name, scale=400.0, times=3)
        check_by_token(engine, name, scale=400.0, times=3)
