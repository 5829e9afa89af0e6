"""Attention kernels against the op's meaning: sizes, masks, dropout, views, threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlcompute.compiler.attention_by_token import BY_TOKEN, BY_TOKEN_GRADIENT
from mlcompute.devices.cpu.kernels.attention import KERNELS, WORKSPACES
from mlcompute.ops import emit, emit_all, transpose
from mlcompute.ops.op import TABLE, Array, Value
from tests.devices.kernels import Bench, meaning, run_on_engine
from tests.harness import assert_close

#: samples, heads, queries, keys, width, width of the values
SIZES = [
    (1, 1, 1, 1, 1, 1),
    (2, 3, 5, 7, 4, 6),
    (3, 2, 16, 17, 16, 33),
    (8, 2, 64, 64, 32, 32),
    (1, 2, 100, 70, 24, 24),
    (1, 1, 130, 600, 64, 8),
]
MASKS = ["none", "pairs", "keys", "all", "plane", "queries", "heads", "one row", "a number"]


def arrays_of(sizes: tuple[int, ...], mask: str = "none", keep: bool = False, seed: int = 0) -> list[Array]:
    """dy, q, k, v and what was asked for; a third of a mask forbids, sometimes all the keys of a query."""
    n, heads, queries, keys, width, value_width = sizes
    rng = np.random.default_rng(seed)
    shapes = [(queries, value_width), (queries, width), (keys, width), (keys, value_width)]
    arrays = [rng.standard_normal((n, heads, *shape)).astype("f") for shape in shapes]
    extents = {
        "pairs": (1, 1, queries, keys),
        "keys": (n, 1, 1, keys),
        "all": (n, heads, queries, keys),
        "plane": (queries, keys),
        "queries": (n, heads, queries, 1),
        "heads": (1, heads, queries, keys),
        "one row": (1, 1, 1, keys),
        "a number": (1, heads, 1, 1),
    }
    if mask != "none":
        added = rng.standard_normal(extents[mask]).astype("f")
        added[rng.random(added.shape) < 0.3] = -np.inf
        arrays.append(added)
    if keep:
        arrays.append(((rng.random(extents["all"]) > 0.2) * np.float32(1.25)).astype("f"))
    return arrays


def attributes_of(sizes: tuple[int, ...], mask: str = "none", keep: bool = False) -> dict[str, Any]:
    return {"scale": sizes[4] ** -0.5, "has_mask": mask != "none", "has_keep": keep}


def close(found: Array, expected: Array) -> None:
    # Sums over the keys, and over the queries going back.
    assert_close(found, expected, 8)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", SIZES)
def test_forward_and_back(sizes: tuple[int, ...], mask: str, keep: bool) -> None:
    arrays, attributes = arrays_of(sizes, mask, keep), attributes_of(sizes, mask, keep)
    Bench(KERNELS, "attention", arrays[1:], attributes, workspaces=WORKSPACES).check(close)
    Bench(KERNELS, "attention_gradient", arrays, attributes, workspaces=WORKSPACES).check(close)
    if mask != "none":
        Bench(KERNELS, "attention_mask_gradient", arrays, attributes, workspaces=WORKSPACES).check(close)


@pytest.mark.parametrize("mask", ["none", "plane", "all"])
@pytest.mark.parametrize("sizes", SIZES)
def test_by_token(sizes: tuple[int, ...], mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits in another order, and the logarithms of the softmax's denominators."""
    for op in (BY_TOKEN, BY_TOKEN_GRADIENT):
        monkeypatch.setitem(TABLE, op.name, op)
    arrays, attributes = arrays_of(sizes, mask), attributes_of(sizes, mask)
    forward = Bench(KERNELS, "attention_by_token", arrays[1:], attributes, workspaces=WORKSPACES)
    y, logs = forward.check(close)
    given = [arrays[0], y, logs, *arrays[1:]]
    backward = Bench(KERNELS, "attention_by_token_gradient", given, attributes, workspaces=WORKSPACES)
    by_head = [
        *Bench(KERNELS, "attention", arrays[1:], attributes, workspaces=WORKSPACES).run(),
        *Bench(KERNELS, "attention_gradient", arrays, attributes, workspaces=WORKSPACES).run(),
    ]
    for found, expected in zip([y, *backward.check(close)], by_head, strict=True):
        np.testing.assert_array_equal(found, expected.transpose(0, 2, 1, 3))


@pytest.mark.parametrize("axes", [(0, 2, 1, 3), (0, 1, 3, 2), (1, 0, 2, 3)])
@pytest.mark.parametrize("sizes", SIZES[1:5])
def test_inputs_may_be_views(sizes: tuple[int, ...], axes: tuple[int, ...]) -> None:
    """Heads inside the rows, as projections leave them; turned matrices; heads before samples."""
    arrays, attributes = arrays_of(sizes, "all"), attributes_of(sizes, "all")
    stored = [np.ascontiguousarray(array.transpose(np.argsort(axes))) for array in arrays]

    def shown(*values: Value) -> list[Value]:
        return [transpose(value, axes) for value in values]

    found, plain = [], []
    for name, first in (("attention", 1), ("attention_gradient", 0), ("attention_mask_gradient", 0)):
        viewed = Bench(KERNELS, name, stored[first:], attributes, views=shown, workspaces=WORKSPACES)
        found += viewed.check(close)
        plain += Bench(KERNELS, name, arrays[first:], attributes, workspaces=WORKSPACES).run()
    for a, b in zip(found, plain, strict=True):
        np.testing.assert_array_equal(a, b)


def test_rows_without_keys_are_nan_and_nothing_else() -> None:
    sizes = (1, 1, 3, 20, 4, 4)
    arrays, attributes = [*arrays_of(sizes), np.zeros((3, 20), "f")], {**attributes_of(sizes), "has_mask": True}
    arrays[-1][1] = -np.inf
    (y,) = Bench(KERNELS, "attention", arrays[1:], attributes, workspaces=WORKSPACES).check(close)
    assert np.isnan(y[0, 0, 1]).all()
    assert np.isfinite(y[0, 0, [0, 2]]).all()


def test_large_scores_do_not_overflow() -> None:
    sizes = (1, 2, 5, 9, 8, 8)
    arrays = arrays_of(sizes)
    arrays[1] *= np.float32(1e3)
    for value in Bench(KERNELS, "attention_gradient", arrays, attributes_of(sizes), workspaces=WORKSPACES).check(close):
        assert np.isfinite(value).all()


@pytest.mark.parametrize("samples", [2, 3, 16])
def test_on_the_engine_with_real_threads(samples: int) -> None:
    """Projections seen as heads, forward and back in one program, whether threads share samples or heads."""
    sizes = (samples, 4, 48, 48, 16, 16)
    arrays, attributes = arrays_of(sizes, "heads"), attributes_of(sizes, "heads")
    arrays[-1] = np.maximum(arrays[-1], np.float32(-9))  # no query without keys: NaNs cannot be compared bitwise
    stored = [*(np.ascontiguousarray(array.swapaxes(1, 2)) for array in arrays[:4]), arrays[4]]

    def step(*values: Value) -> list[Value]:
        dy, q, k, v = (transpose(value + 0.0, (0, 2, 1, 3)) for value in values[:4])
        given = (q, k, v, values[4] + 0.0)
        return [
            emit("attention", *given, **attributes),
            *emit_all("attention_gradient", dy, *given, **attributes),
            emit("attention_mask_gradient", dy, *given, **attributes),
        ]

    first, *others = [run_on_engine(step, stored, threads) for threads in (1, 2, 5)]
    meanings = [
        meaning("attention", *arrays[1:], **attributes),
        *meaning("attention_gradient", *arrays, **attributes),
        meaning("attention_mask_gradient", *arrays, **attributes),
    ]
    for found, expected in zip(first, meanings, strict=True):
        close(found, expected)
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert a.tobytes() == b.tobytes()


def test_a_smaller_batch_runs_the_same_code() -> None:
    texts = []
    for batch in (32, 3, 1):
        sizes = (batch, 2, 9, 9, 8, 8)
        arrays, attributes = arrays_of(sizes, "keys", True), attributes_of(sizes, "keys", True)
        made = (
            Bench(KERNELS, "attention", arrays[1:], attributes, workspaces=WORKSPACES),
            Bench(KERNELS, "attention_gradient", arrays, attributes, workspaces=WORKSPACES),
            Bench(KERNELS, "attention_mask_gradient", arrays, attributes, workspaces=WORKSPACES),
        )
        texts.append([entry.code.text() for one in made for entry in one.entries or []])
    assert texts[0] == texts[1] == texts[2]


def test_what_the_kernels_leave_to_numpy() -> None:
    sizes = (2, 3, 5, 7, 4, 6)
    doubles = [array.astype(np.float64) for array in arrays_of(sizes)]
    assert Bench(KERNELS, "attention", doubles[1:], attributes_of(sizes), workspaces=WORKSPACES).entries is None
    # Samples innermost: neither rows nor columns lie together.
    stored = [np.ascontiguousarray(array.transpose(1, 2, 3, 0)) for array in arrays_of(sizes)]

    def shown(*values: Value) -> list[Value]:
        return [transpose(value, (3, 0, 1, 2)) for value in values]

    bench = Bench(KERNELS, "attention", stored[1:], attributes_of(sizes), views=shown, workspaces=WORKSPACES)
    assert bench.entries is None


@pytest.mark.parametrize("forbids_all", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_keys_that_nobody_may_look_at_are_left_out(keep: bool, forbids_all: bool) -> None:
    """Later keys of a causal mask; a query that may look at nothing gives NaN all the same."""
    sizes = (2, 2, 150, 450, 24, 40)
    arrays, attributes = arrays_of(sizes, "pairs", keep), attributes_of(sizes, "pairs", keep)
    mask = arrays[4] = np.where(np.arange(450) > np.arange(150)[:, None], -np.inf, 0.5)[None, None].astype("f")
    mask[0, 0, 70, 3] = -np.inf
    if forbids_all:
        mask[0, 0, 20] = -np.inf
    Bench(KERNELS, "attention", arrays[1:], attributes, workspaces=WORKSPACES).check(close)
    Bench(KERNELS, "attention_gradient", arrays, attributes, workspaces=WORKSPACES).check(close)
