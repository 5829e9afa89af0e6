"""Every index op against PyTorch and finite differences: duplicates, small indices, empty ones, wrong ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mlcompute import ops
from mlcompute.errors import DataError, ShapeError
from mlcompute.ops.indexing import philox
from mlcompute.ops.op import TABLE, Array
from tests.harness import assert_close, check_gradients, forward, gradients
from tests.ops.oracle import Sample, ask, inputs, integers, normal, uncovered

Shape = tuple[int, ...]
INF = float("inf")

CONCATENATIONS: list[tuple[list[Shape], int]] = [
    ([(2,), (3,)], 0),
    ([(2, 3), (2, 1), (2, 4)], 1),
    ([(2, 3), (2, 1), (2, 4)], -1),
    ([(1, 3, 2), (4, 3, 2)], 0),
    ([(2, 3, 1), (2, 0, 1), (2, 2, 1)], 1),
    ([(0, 3), (0, 2)], 1),
]
PADS: list[tuple[Shape, Shape, Shape, float]] = [
    ((3,), (2,), (1,), 0.0),
    ((2, 3), (0, 1), (2, 0), 9.0),
    ((1, 1, 2, 2), (0, 0, 1, 1), (0, 0, 1, 1), -INF),
    ((2, 0), (1, 1), (0, 2), 1.5),
]
#: shape of x, shape of the indices, axis
TAKES: list[tuple[Shape, Shape, int]] = [
    ((5, 3), (4,), 0),
    ((5, 3), (2, 3), 0),
    ((3, 5), (7,), 1),
    ((3, 5), (7,), -1),
    ((2, 5, 3), (2, 2), 1),
    ((2, 3, 5), (), 2),
    ((1, 3), (4,), 0),
    ((5, 3), (0,), 0),
    ((5, 0), (4,), 0),
    ((4,), (9,), 0),
]
#: shape of x (or base), shape of the indices, axis; indices are smaller than x in some, longer along the axis in others
GATHERS: list[tuple[Shape, Shape, int]] = [
    ((5,), (3,), 0),
    ((5,), (9,), 0),
    ((3, 4), (3, 2), 1),
    ((3, 4), (2, 4), 0),
    ((3, 4), (7, 2), 0),
    ((3, 4), (2, 6), -1),
    ((2, 3, 4), (2, 5, 4), 1),
    ((2, 3, 4), (1, 5, 2), 1),
    ((2, 3, 1, 4), (2, 2, 1, 6), 3),
    ((3, 4), (3, 0), 1),
    ((3, 4), (0, 4), 1),
    ((1, 1), (1, 1), 0),
]


def _last_wins(updates: torch.Tensor, indices: torch.Tensor, base: torch.Tensor, axis: int) -> torch.Tensor:
    """torch.scatter one element at a time, in row-major order, so that the last write is certain."""
    y = base
    for place in np.ndindex(*indices.shape):
        target = list(place)
        target[axis] = int(indices[place])
        mask = torch.zeros(base.shape, dtype=torch.bool)
        mask[tuple(target)] = True
        y = torch.where(mask, updates[place], y)
    return y


def _corner(t: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    # What torch.scatter_add reads of larger updates; its own gradient cannot cope with them.
    return t[tuple(slice(extent) for extent in indices.shape)]


def _samples() -> list[Sample]:
    samples = [
        Sample(
            "concatenate", lambda *v, a=axis: ops.concatenate(v, a), lambda *t, a=axis: torch.cat(t, a),
            [normal(*shape, seed=index) for index, shape in enumerate(shapes)],
        )
        for shapes, axis in CONCATENATIONS
    ]  # fmt: skip
    for shape, before, after, value in PADS:
        widths = [width for pair in reversed(list(zip(before, after, strict=True))) for width in pair]
        samples.append(
            Sample(
                "pad",
                lambda v, b=before, a=after, n=value: ops.pad(v, b, a, n),
                lambda t, w=widths, n=value: torch.nn.functional.pad(t, w, value=n),
                [normal(*shape)],
                smooth=np.isfinite(value),
                note=str(value),
            )
        )
    for shape, indexed, axis in TAKES:
        extent, front = shape[axis], axis % len(shape)
        indices = np.asarray(integers(*indexed, below=extent))
        taken = (*shape[:front], *indexed, *shape[front + 1 :])
        samples += [
            Sample(
                "take", lambda v, i, a=axis: ops.take(v, i, a),
                lambda t, i, a=front, s=taken: t.index_select(a, i.reshape(-1)).reshape(s),
                [normal(*shape), indices], note=f"axis{axis}",
            ),
            Sample(
                "take_gradient", lambda v, i, a=axis, n=extent: ops.take_gradient(v, i, a, n),
                lambda t, i, a=front, s=shape: torch.zeros(s, dtype=t.dtype).index_add(
                    a, i.reshape(-1), t.reshape(*s[:a], i.numel(), *s[a + 1 :])
                ),
                [normal(*taken), indices], note=f"axis{axis}",
            ),
        ]  # fmt: skip
    for number, (shape, indexed, axis) in enumerate(GATHERS):
        indices = integers(*indexed, below=shape[axis]).astype([np.int32, np.int64][number % 2])
        # Every second pair of updates is larger than the indices.
        grown = tuple(extent + number % 2 for extent in indexed)
        updates, base = normal(*grown, seed=1), normal(*shape, seed=2)
        samples += [
            Sample(
                "gather", lambda v, i, a=axis: ops.gather(v, i, a), lambda t, i, a=axis: t.gather(a, i.long()),
                [normal(*shape), indices], note=f"axis{axis}",
            ),
            Sample(
                "scatter_add", lambda v, i, b, a=axis: ops.scatter_add(v, i, b, a),
                lambda t, i, b, a=axis: b.scatter_add(a, i.long(), _corner(t, i)), [updates, indices, base],
                note=f"axis{axis}",
            ),
            Sample(
                "scatter", lambda v, i, b, a=axis: ops.scatter(v, i, b, a),
                lambda t, i, b, a=axis: _last_wins(t, i, b, a), [updates, indices, base], note=f"axis{axis}",
            ),
        ]  # fmt: skip
    return samples


SAMPLES = _samples()


def test_every_index_op_has_a_sample() -> None:
    assert not uncovered("indexing", SAMPLES, elsewhere=("random_uniform", "renormalize", "count_indices"))


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_index_op(sample: Sample) -> None:
    ask(sample)


# Concatenate and pad ----------------------------------------------------------------------------------------------


def test_one_value_and_no_width_change_nothing() -> None:
    (x,) = inputs(((2, 3), "float32"))
    assert ops.concatenate([x], 1) is x
    assert ops.pad(x, (0, 0), (0, 0), 1.0) is x


def test_the_same_value_twice() -> None:
    check_gradients(lambda v: ops.concatenate([v, v * 2.0, v], 0), normal(2, 3))


def test_concatenate_and_pad_move_any_dtype() -> None:
    for dtype in (np.int32, np.bool_, np.float16):
        x = integers(2, 2, below=2).astype(dtype)
        (y,) = forward(lambda v: ops.pad(ops.concatenate([v, v], 0), (0, 1), (0, 0), 1), x)
        assert y.dtype == dtype
        np.testing.assert_array_equal(y, np.concatenate([np.ones((4, 1)), np.concatenate([x, x])], axis=1))


def test_concatenate_and_pad_refuse() -> None:
    a, b, c, n = inputs(((2, 3), "float32"), ((2, 4), "float32"), ((2, 3, 1), "float32"), ((2, 3), "int32"))
    with pytest.raises(ShapeError, match="axis 0 only"):
        ops.concatenate([a, b], 0)
    with pytest.raises(ShapeError, match="axis 1 only"):
        ops.concatenate([a, c], 1)
    with pytest.raises(DataError, match="do not mix"):
        ops.concatenate([a, n], 0)
    with pytest.raises(ShapeError, match="at least one"):
        ops.concatenate([], 0)
    with pytest.raises(ShapeError, match="axis 2 does not exist"):
        ops.concatenate([a, b], 2)
    for before, after in (((1,), (1,)), ((0, -1), (0, 2)), ((0, 1), (1,))):
        with pytest.raises(ShapeError, match="one width >= 0 per axis"):
            ops.pad(a, before, after, 0.0)


# Take, gather, scatter --------------------------------------------------------------------------------------------


def test_take_gradient_adds_in_order() -> None:
    """Rows of one index add up in the order of their positions, so the sum is the same every time."""
    dy = np.array([[1e8], [1.0], [-1e8], [3.0]], np.float32)
    indices = np.array([2, 2, 2, 0])
    y = TABLE["take_gradient"].meaning(dy, indices, axis=0, extent=3)
    np.testing.assert_array_equal(y, [[3.0], [0.0], [np.float32(1e8) + np.float32(1) - np.float32(1e8)]])


def test_scatter_keeps_the_last_write() -> None:
    updates = np.arange(1.0, 13.0).reshape(3, 4)
    indices = np.zeros((3, 4), np.int64)
    base = np.full((5, 4), -1.0)
    (y,) = forward(lambda u, i, b: ops.scatter(u, i, b, 0), updates, indices, base)
    np.testing.assert_array_equal(y[0], updates[-1])
    np.testing.assert_array_equal(y[1:], base[1:])
    du, di, db = gradients(lambda u, i, b: ops.scatter(u, i, b, 0), [updates, indices, base], [np.full((5, 4), 7.0)])
    np.testing.assert_array_equal(du, [[0] * 4, [0] * 4, [7] * 4])
    assert di is None
    np.testing.assert_array_equal(db, [[0] * 4] + [[7] * 4] * 4)


def test_scatter_of_nan_stays_where_it_is() -> None:
    """An overwritten NaN leaves no trace, neither forward nor in the gradient."""
    updates, indices, base = np.array([np.nan, 2.0]), np.array([1, 1]), np.array([np.nan, np.inf, 3.0])
    (y,) = forward(lambda u, i, b: ops.scatter(u, i, b, 0), updates, indices, base)
    np.testing.assert_array_equal(y, [np.nan, 2.0, 3.0])
    du, _, db = gradients(lambda u, i, b: ops.scatter(u, i, b, 0), [updates, indices, base], [np.array([1, np.nan, 3])])
    np.testing.assert_array_equal(du, [0.0, np.nan])
    np.testing.assert_array_equal(db, [1.0, 0.0, 3.0])


def test_many_duplicates() -> None:
    """Large enough that an unordered implementation would be found out."""
    updates, indices, base = normal(500, 40), integers(500, 40, below=7), normal(7, 40, seed=1)
    (y,) = forward(lambda u, i, b: ops.scatter(u, i, b, 0), updates, indices, base)
    expected = base.copy()
    for row in range(500):
        expected[indices[row], np.arange(40)] = updates[row]
    np.testing.assert_array_equal(y, expected)
    (y,) = forward(lambda u, i, b: ops.scatter_add(u, i, b, 0), updates, indices, base)
    oracle = torch.tensor(base).scatter_add(0, torch.tensor(indices), torch.tensor(updates))
    assert_close(y, oracle.numpy())


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
def test_gather_and_scatter_move_any_dtype(dtype: Any) -> None:
    x, indices = integers(3, 4, below=9).astype(dtype), integers(2, 4, below=3)
    t, i = torch.tensor(x), torch.tensor(indices)
    np.testing.assert_array_equal(forward(lambda v, j: ops.gather(v, j, 0), x, indices)[0], t.gather(0, i).numpy())
    (y,) = forward(lambda v, j: ops.scatter_add(v, j, v, 0), x, indices)
    np.testing.assert_array_equal(y, t.scatter_add(0, i, t).numpy())


@pytest.mark.parametrize("wrong", [-1, 3, 2**40, -(2**40)])
@pytest.mark.parametrize(
    ("op", "arrays", "attributes"),
    [
        ("take", [normal(2, 3)], {"axis": 1}),
        ("take_gradient", [normal(1, 2)], {"axis": 1, "extent": 3}),
        ("gather", [normal(1, 3)], {"axis": 1}),
        ("scatter", [normal(1, 2), normal(1, 3)], {"axis": 1}),
        ("scatter_add", [normal(1, 2), normal(1, 3)], {"axis": 1}),
        ("renormalize", [normal(3, 2)], {"maximum_norm": 1.0, "p": 2.0}),
        ("count_indices", [], {"extent": 3}),
    ],
)
def test_out_of_range(op: str, arrays: list[Array], attributes: dict[str, Any], wrong: int) -> None:
    indices = np.array([[1, wrong]]) if op in ("gather", "scatter", "scatter_add") else np.array([1, wrong])
    where = r"\(0, 1\)" if indices.ndim == 2 else r"\(1,\)"
    arguments = [indices] if op == "count_indices" else [arrays[0], indices, *arrays[1:]]
    with pytest.raises(IndexError, match=f"{op}: index {wrong} at position {where} is out of range, valid are 0 to 2"):
        TABLE[op].meaning(*arguments, **attributes)


def test_nothing_can_be_taken_from_an_empty_axis() -> None:
    with pytest.raises(IndexError, match="axis is empty"):
        TABLE["take"].meaning(np.zeros((0, 3)), np.array([0]), axis=0)


def test_large_unsigned_indices_do_not_wrap() -> None:
    with pytest.raises(IndexError, match="index 18446744073709551615"):
        TABLE["take"].meaning(np.zeros(3), np.array([2**64 - 1], np.uint64), axis=0)


def test_take_gather_and_scatter_refuse() -> None:
    x, floats, i, wide, deep = inputs(
        ((2, 3), "float32"), ((2, 3), "float32"), ((2, 3), "int64"), ((3, 3), "int64"), ((2, 3, 1), "int64")
    )  # fmt: skip
    with pytest.raises(DataError, match="take: indices must be integers"):
        ops.take(x, floats, 0)
    with pytest.raises(DataError, match="gather: indices must be integers"):
        ops.gather(x, floats, 0)
    with pytest.raises(ShapeError, match="axis 2 does not exist"):
        ops.take(x, i, 2)
    with pytest.raises(ShapeError, match=r"gather: indices \(3, 3\) do not fit \(2, 3\)"):
        ops.gather(x, wide, 1)
    with pytest.raises(ShapeError, match="rank must be equal"):
        ops.gather(x, deep, 1)
    with pytest.raises(ShapeError, match=r"must not be larger than the updates \(2, 3\)"):
        ops.scatter(x, wide, x, 0)
    with pytest.raises(DataError, match="scatter_add: updates of int64 do not go into float32"):
        ops.scatter_add(i, i, x, 0)
    with pytest.raises(ShapeError, match="are not at axis 0"):
        ops.take_gradient(x, wide, 0, 5)


# Embedding tables -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, 0.5, INF])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_renormalize(p: float, dtype: Any) -> None:
    table = (normal(6, 4) * np.array([[0.0], [0.1], [1.0], [5.0], [100.0], [3.0]])).astype(dtype)
    indices = np.array([[0, 1, 3], [3, 4, 2]])
    (y,) = forward(lambda t, i: ops.renormalize(t, i, 1.5, p), table, indices)
    expected = torch.tensor(table)
    torch.nn.functional.embedding(torch.tensor(indices), expected, max_norm=1.5, norm_type=p)
    assert_close(y, expected.numpy())
    np.testing.assert_array_equal(y[5], table[5], err_msg="a row nobody looks up stays")
    small = np.linalg.norm(table, ord=p, axis=1) <= 1.5
    assert 0 < small.sum() < 6
    np.testing.assert_array_equal(y[small], table[small], err_msg="a small row stays")
    norms = np.linalg.norm(y[[0, 1, 2, 3, 4]], ord=p, axis=1)
    assert (norms <= 1.5 * (1 + 1e-6)).all()
    dy = normal(6, 4, seed=1).astype(dtype)
    np.testing.assert_array_equal(gradients(lambda t, i: ops.renormalize(t, i, 1.5, p), [table, indices], [dy])[0], dy)


def test_renormalize_without_indices_or_columns() -> None:
    table, none = normal(3, 2), np.zeros((0,), np.int64)
    np.testing.assert_array_equal(forward(lambda t, i: ops.renormalize(t, i, 0.1, 2.0), table, none)[0], table)
    (y,) = forward(lambda t, i: ops.renormalize(t, i, 0.1, INF), np.zeros((3, 0)), np.array([1]))
    assert y.shape == (3, 0)
    x, i = inputs(((2, 3, 4), "float32"), ((2,), "int64"))
    with pytest.raises(ShapeError, match="rows, dimension"):
        ops.renormalize(x, i, 1.0, 2.0)


def test_count_indices() -> None:
    for dtype in (np.int32, np.int64):
        indices = np.array([[3, 0, 3], [3, 1, 0]], dtype)
        (y,) = forward(lambda i: ops.count_indices(i, 5), indices)
        np.testing.assert_array_equal(y, [2, 1, 0, 3, 0])
        assert y.dtype == np.int64
    np.testing.assert_array_equal(forward(lambda i: ops.count_indices(i, 2), np.zeros((0,), np.int64))[0], [0, 0])


# Random numbers ---------------------------------------------------------------------------------------------------

#: counter, key, words: philox4x32-10 in the known-answer file of Random123.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def _words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_known_answers(counter: str, key: str, words: str) -> None:
    np.testing.assert_array_equal(philox(_words(counter), _words(key)), _words(words))


def test_random_uniform_is_philox_by_element() -> None:
    key = np.array([0xA4093822, 0x299F31D0, 0x13198A2E, 0xFFFFFFFF], np.uint32)
    (y,) = forward(lambda k: ops.random_uniform(k, (2, 3, 3)), key)
    assert y.dtype == np.float32
    for i, number in enumerate(y.reshape(-1)):
        word = philox((i // 4, 0, int(key[2]), int(key[3])), (int(key[0]), int(key[1])))[i % 4]
        assert number == np.float32((int(word) >> 8) * 2.0**-24)


def test_random_uniform_does_not_depend_on_the_shape() -> None:
    key = np.array([1, 2, 3, 4], np.uint32)
    (line,) = forward(lambda k: ops.random_uniform(k, (1000,)), key)
    for shape in ((10, 10), (1,), (7, 3), (), (0,), (2, 0, 3)):
        (y,) = forward(lambda k, s=shape: ops.random_uniform(k, s), key)
        assert y.shape == shape
        np.testing.assert_array_equal(y.reshape(-1), line[: y.size])


def test_random_uniform_looks_uniform() -> None:
    draws = []
    for stream, count in ((0, 0), (0, 1), (1, 0)):
        key = np.array([5, 0, stream, count], np.uint32)
        (y,) = forward(lambda k: ops.random_uniform(k, (100_000,)), key)
        assert y.min() >= 0.0
        assert y.max() < 1.0
        # Ten standard errors: wrong by construction, never by chance.
        assert abs(y.mean() - 0.5) < 10 * np.sqrt(1 / 12 / y.size)
        assert abs(y.var() - 1 / 12) < 10 * np.sqrt(1 / 180 / y.size)
        assert np.ptp(np.histogram(y, 10, (0.0, 1.0))[0]) < 20 * np.sqrt(y.size / 10)
        draws.append(y)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert abs(np.corrcoef(draws[a], draws[b])[0, 1]) < 10 / np.sqrt(100_000)


def test_random_uniform_refuses_other_keys() -> None:
    short, signed = inputs(((3,), "uint32"), ((4,), "int32"))
    for key in (short, signed):
        with pytest.raises(DataError, match=r"uint32\[4\]"):
            ops.random_uniform(key, (2,))
