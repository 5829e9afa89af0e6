"""Every view against PyTorch and finite differences; what has no meaning is refused while describing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mlcompute import ops
from mlcompute.errors import ShapeError
from mlcompute.ops.op import emit
from tests.harness import forward, gradients
from tests.ops.oracle import Sample, ask, inputs, integers, normal, uncovered

Shape = tuple[int, ...]

RESHAPES: list[tuple[Shape, Shape]] = [
    ((6,), (2, 3)),
    ((2, 3), (6,)),
    ((2, 3, 4), (4, 6)),
    ((1,), ()),
    ((), (1, 1)),
    ((3, 1), (1, 3)),
    ((0, 3), (3, 0)),
    ((2, 0), (0,)),
]
TRANSPOSES: list[tuple[Shape, Shape | None]] = [
    ((3,), (0,)),
    ((2, 3), (1, 0)),
    ((2, 3), None),
    ((2, 3, 4), (2, 0, 1)),
    ((2, 3, 4), (1, 2, 0)),
    ((2, 3, 4), (-1, 0, -2)),
    ((2, 3, 4), None),
    ((2, 1, 3, 2), (3, 0, 1, 2)),
    ((), ()),
    ((0, 3), (1, 0)),
]
SLICES: list[tuple[Shape, Shape, Shape, Shape | None]] = [
    ((5,), (1,), (4,), None),
    ((5,), (0,), (5,), (2,)),
    ((5,), (1,), (5,), (2,)),
    ((5,), (1,), (5,), (7,)),
    ((5,), (2,), (2,), None),
    ((4, 5), (1, 0), (3, 5), (1, 3)),
    ((4, 5, 6), (0, 4, 1), (4, 5, 6), (3, 1, 2)),
    ((), (), (), None),
    ((0, 3), (0, 1), (0, 3), None),
]
BROADCASTS: list[tuple[Shape, Shape]] = [
    ((), (3,)),
    ((), (2, 3)),
    ((1,), (3,)),
    ((3,), (2, 3)),
    ((2, 1), (2, 3)),
    ((1, 3), (2, 3)),
    ((1, 1), (4, 2, 3)),
    ((2, 1, 3), (5, 2, 4, 3)),
    ((1, 3), (0, 3)),
    ((1,), (1, 1)),
]


def _strided(start: Shape, end: Shape, stride: Shape | None) -> tuple[slice, ...]:
    return tuple(slice(*triple) for triple in zip(start, end, stride or (1,) * len(start), strict=True))


def _write(t: torch.Tensor, shape: Shape, where: tuple[slice, ...]) -> torch.Tensor:
    base = torch.zeros(shape, dtype=t.dtype)
    base[where] = t
    return base


def _samples() -> list[Sample]:
    samples = [
        Sample("reshape", lambda v, s=to: ops.reshape(v, s), lambda t, s=to: t.reshape(s), [normal(*shape)])
        for shape, to in RESHAPES
    ]
    for shape, axes in TRANSPOSES:
        oracle = (lambda t: t.mT) if axes is None else (lambda t, a=axes: t.permute(a))  # type: ignore[misc]
        samples.append(Sample("transpose", lambda v, a=axes: ops.transpose(v, a), oracle, [normal(*shape)]))
    for shape, start, end, stride in SLICES:
        where = _strided(start, end, stride)
        cut = normal(*np.zeros(shape)[where].shape)
        attributes = {"shape": shape, "start": start, "end": end, "stride": stride or (1,) * len(shape)}
        samples += [
            Sample(
                "slice", lambda v, s=start, e=end, k=stride: ops.slice_(v, s, e, k), lambda t, w=where: t[w],
                [normal(*shape)], note=str(where),
            ),
            Sample(
                "slice_gradient", lambda v, a=attributes: emit("slice_gradient", v, **a),
                lambda t, s=shape, w=where: _write(t, s, w), [cut], note=str(where),
            ),
        ]  # fmt: skip
    samples += [
        Sample("broadcast", lambda v, s=to: ops.broadcast(v, s), lambda t, s=to: t.expand(s), [normal(*shape)])
        for shape, to in BROADCASTS
    ]
    return samples


SAMPLES = _samples()


def test_every_view_has_a_sample() -> None:
    assert not uncovered("views", SAMPLES)


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_view(sample: Sample) -> None:
    ask(sample)


def test_slice_of_one_axis() -> None:
    x = normal(3, 4, 5)
    np.testing.assert_array_equal(forward(lambda v: ops.slice_axis(v, 1, 1, 3), x)[0], x[:, 1:3])
    np.testing.assert_array_equal(forward(lambda v: ops.slice_axis(v, -1, 4, 5), x)[0], x[..., 4:])


def test_views_move_any_dtype() -> None:
    for dtype in (np.int8, np.int32, np.int64, np.bool_, np.float16):
        x = integers(2, 3, below=2).astype(dtype)
        (y,) = forward(lambda v: ops.transpose(ops.broadcast(ops.reshape(v, (2, 3, 1)), (2, 3, 4))), x)
        np.testing.assert_array_equal(y, np.broadcast_to(x[:, None, :], (2, 4, 3)))
        assert y.dtype == dtype


def test_nothing_to_do_gives_the_same_value() -> None:
    (x,) = inputs(((2, 3), "float32"))
    assert ops.reshape(x, (2, 3)) is x
    assert ops.broadcast(x, [2, 3]) is x


def test_overlapping_slices_add_up() -> None:
    x = np.arange(4.0)
    overlap = lambda v: ops.slice_(v, (0,), (3,)) + ops.slice_(v, (1,), (4,))  # noqa: E731
    np.testing.assert_array_equal(gradients(overlap, [x], [np.ones(3)])[0], [1, 2, 2, 1])


def test_full() -> None:
    (y,) = forward(lambda v: ops.full(v, (2, 3), 1.5), normal(1))
    np.testing.assert_array_equal(y, np.full((2, 3), 1.5))
    (y,) = forward(lambda v: ops.full(v, (), 7, np.dtype(np.int64)), normal(1))
    assert y.dtype == np.int64


def test_refusals() -> None:
    (x,) = inputs(((2, 3), "float32"))
    (row,) = inputs(((3,), "float32"))
    for shape in ((7,), (-1, 3), (-2, -3), ()):
        with pytest.raises(ShapeError, match="different numbers of elements"):
            ops.reshape(x, shape)
    for axes in ((0,), (0, 0), (0, 1, 2), (1, 2)):
        with pytest.raises(ShapeError, match="transpose: "):
            ops.transpose(x, axes)
    with pytest.raises(ShapeError, match="axis -2 does not exist"):
        ops.transpose(row)
    for start, end, stride in (
        ((0,), (2,), (1,)),
        ((0, 0), (2, 4), (1, 1)),
        ((-1, 0), (2, 3), (1, 1)),
        ((0, 2), (2, 1), (1, 1)),
        ((0, 0), (2, 3), (1, 0)),
    ):
        with pytest.raises(ShapeError, match="cannot be sliced"):
            ops.slice_(x, start, end, stride)
    for wide in ((3,), (2, 4), (4, 3), (2, 3, 1)):
        with pytest.raises(ShapeError, match="cannot be repeated"):
            ops.broadcast(x, wide)
    with pytest.raises(ShapeError, match="is not that slice"):
        emit("slice_gradient", x, shape=(4, 4), start=(0, 0), end=(4, 4), stride=(1, 1))
