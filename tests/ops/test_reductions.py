"""Every reduction against PyTorch and finite differences, and `sum_to` in all directions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mlcompute import ops
from mlcompute.errors import ShapeError
from mlcompute.ops.op import TABLE, Array, emit_all
from tests.harness import assert_close, check_expansion, check_gradients, forward, gradients
from tests.ops.oracle import Sample, against_torch, ask, inputs, normal, uncovered

NAN, INF = float("nan"), float("inf")

SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((1,), (0,)),
    ((5,), (0,)),
    ((5,), (-1,)),
    ((3, 4), (0,)),
    ((3, 4), (1,)),
    ((3, 4), (0, 1)),
    ((3, 4), ()),
    ((2, 3, 4), (0, 2)),
    ((2, 3, 4), (-1, 0)),
    ((1, 3, 1, 2), (1, 3)),
    ((2, 3, 4, 5), (0, 2, 3)),
]


def _normalized(x: torch.Tensor, axes: tuple[int, ...], epsilon: float) -> tuple[torch.Tensor, ...]:
    m = x.mean(axes, keepdim=True)
    v = x.var(axes, keepdim=True, correction=0)
    return (x - m) / torch.sqrt(v + epsilon), m, v


def _samples() -> list[Sample]:
    samples = []
    for shape, axes in SHAPES:
        x = normal(*shape)
        if axes:
            samples += [
                Sample("sum", lambda v, a=axes: ops.sum_(v, a), lambda t, a=axes: t.sum(a, keepdim=True), [x]),
                Sample(
                    "sum", lambda v, a=axes: ops.mean(v, a), lambda t, a=axes: t.mean(a, keepdim=True), [x], note="mean"
                ),
                Sample("max", lambda v, a=axes: ops.max_(v, a), lambda t, a=axes: t.amax(a, keepdim=True), [x]),
                Sample("min", lambda v, a=axes: ops.min_(v, a), lambda t, a=axes: t.amin(a, keepdim=True), [x]),
                Sample("any", lambda v, a=axes: ops.any_(v > 0.5, a), lambda t, a=axes: _any(t > 0.5, a), [x]),
                Sample("all", lambda v, a=axes: ops.all_(v > -1.0, a), lambda t, a=axes: _all(t > -1.0, a), [x]),
            ]
            if x.size > 1:  # of a single element y is constant 0 and rounding is all that is left
                samples.append(
                    Sample(
                        "normalize",
                        lambda v, a=axes: ops.normalize(v, a, 1e-5),
                        lambda t, a=axes: _normalized(t, a, 1e-5),
                        [x],
                    )
                )
        for axis in axes[:1]:
            samples += [
                Sample("argmax", lambda v, a=axis: ops.argmax(v, a), lambda t, a=axis: t.argmax(a, keepdim=True), [x]),
                Sample("argmin", lambda v, a=axis: ops.argmin(v, a), lambda t, a=axis: t.argmin(a, keepdim=True), [x]),
                Sample("softmax", lambda v, a=axis: ops.softmax(v, a), lambda t, a=axis: t.softmax(a), [x]),
                Sample("log_softmax", lambda v, a=axis: ops.log_softmax(v, a), lambda t, a=axis: t.log_softmax(a), [x]),
            ]
    return samples


def _any(t: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    return torch.any(t, axes, keepdim=True)


def _all(t: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    return torch.all(t, axes, keepdim=True)


SAMPLES = _samples()


def test_every_reduction_has_a_sample() -> None:
    assert not uncovered("reductions", SAMPLES, elsewhere=("normalize_gradient",))


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_reduction(sample: Sample) -> None:
    ask(sample)


@pytest.mark.parametrize(("shape", "axes"), SHAPES)
def test_expansions(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    axes = tuple(axis % len(shape) for axis in axes)
    check_expansion("normalize", [normal(*shape)], axes=axes, epsilon=1e-5)
    statistics = tuple(1 if axis in axes else extent for axis, extent in enumerate(shape))
    dy, y, v, scale = normal(*shape), normal(*shape, seed=1), 0.1 + normal(*statistics) ** 2, normal(*statistics)
    for more in ([], [scale]):
        check_expansion("normalize_gradient", [dy, y, v, *more], axes=axes, epsilon=1e-5)
    for axis in axes:
        check_expansion("softmax", [normal(*shape)], axis=axis)
        check_expansion("log_softmax", [normal(*shape)], axis=axis)


@pytest.mark.parametrize(("shape", "axes"), [((6, 4), (0,)), ((2, 3, 4), (1, 2)), ((2, 3, 4, 5), (0, 2, 3))])
def test_normalize_gradient(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    """All three gradients of y = scale n + shift after a normalisation n, as PyTorch takes them."""
    x, dy = normal(*shape), normal(*shape, seed=1)
    statistics = tuple(1 if axis in axes else extent for axis, extent in enumerate(shape))
    scale, shift = normal(*statistics), normal(*statistics, seed=1)
    leaves = [torch.from_numpy(array).requires_grad_() for array in (x, shift, scale)]
    normalized, _, v = _normalized(leaves[0], axes, 1e-5)
    (normalized * leaves[2] + leaves[1]).backward(torch.from_numpy(dy))
    known = [normalized.detach().numpy(), v.detach().numpy()]
    found = TABLE["normalize_gradient"].meaning(dy, *known, scale, axes=axes, epsilon=1e-5)
    for mine, leaf in zip(found, leaves, strict=True):
        np.testing.assert_allclose(mine, leaf.grad.numpy(), rtol=1e-9, atol=1e-9)


def test_normalize_gradient_refuses_other_shapes() -> None:
    dy, y, v = inputs(((2, 3), "f4"), ((2, 3), "f4"), ((2, 1), "f4"))
    with pytest.raises(ShapeError, match=r"normalize_gradient: y, v and scale are .* dy needs"):
        emit_all("normalize_gradient", dy, y, v, axes=(0,), epsilon=1e-5)


def test_no_axes_change_nothing() -> None:
    x = normal(2, 3)
    for fn in (ops.sum_, ops.mean, ops.max_, ops.min_):
        np.testing.assert_array_equal(forward(lambda v, f=fn: f(v, ()), x)[0], x)
        np.testing.assert_array_equal(gradients(lambda v, f=fn: f(v, ()), [x], [x])[0], x)


@pytest.mark.parametrize("fn", [ops.max_, ops.min_])
def test_ties_share_the_gradient(fn: Any) -> None:
    x = np.array([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [-0.0, 0.0, 5.0]])
    oracle = torch.amax if fn is ops.max_ else torch.amin
    against_torch(lambda v: fn(v, (1,)), lambda t: oracle(t, 1, keepdim=True), x)
    against_torch(lambda v: fn(v, (0, 1)), lambda t: oracle(t, (0, 1), keepdim=True), x)


def test_index_of_ties_is_the_first() -> None:
    x = np.array([[1.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0]], np.float32)
    np.testing.assert_array_equal(forward(lambda v: ops.argmax(v, 1), x)[0], [[1], [0]])
    np.testing.assert_array_equal(forward(lambda v: ops.argmin(v, 1), x)[0], [[0], [0]])
    assert forward(lambda v: ops.argmin(v, 1), x)[0].dtype == np.int64


#: Rows with NaN, infinities of either sign, of both, and overflow of a sum.
AWKWARD = np.array(
    [
        [1.0, NAN, 2.0],
        [INF, 1.0, 2.0],
        [-INF, 1.0, 2.0],
        [INF, -INF, 0.0],
        [-INF, -INF, -INF],
        [NAN, INF, -INF],
        [3e38, 3e38, -3e38],
        [1e-45, 0.0, -0.0],
        [89.0, -104.0, 88.0],
        [1e4, -1e4, 0.0],
    ],
    np.float32,
)


@pytest.mark.parametrize(
    ("fn", "oracle"),
    [
        (lambda v: ops.max_(v, (1,)), lambda t: t.amax(1, keepdim=True)),
        (lambda v: ops.min_(v, (1,)), lambda t: t.amin(1, keepdim=True)),
        (lambda v: ops.softmax(v, 1), lambda t: t.softmax(1)),
        (lambda v: ops.log_softmax(v, 1), lambda t: t.log_softmax(1)),
        (lambda v: ops.argmax(v, 1), lambda t: t.argmax(1, keepdim=True)),
        (lambda v: ops.argmin(v, 1), lambda t: t.argmin(1, keepdim=True)),
        (lambda v: ops.any_(v, (1,)), lambda t: t.bool().any(1, keepdim=True)),
        (lambda v: ops.all_(v, (1,)), lambda t: t.bool().all(1, keepdim=True)),
    ],
)
def test_awkward_numbers(fn: Any, oracle: Any) -> None:
    with np.errstate(all="ignore"):
        for row in AWKWARD:  # one by one, so that a large number does not widen the tolerance of the others
            against_torch(fn, oracle, row[None])


def test_sums_of_awkward_numbers() -> None:
    with np.errstate(all="ignore"):
        for row in AWKWARD:
            (y,) = forward(lambda v: ops.sum_(v, (1,)), row[None])
            assert_close(y, torch.tensor(row[None]).sum(1, keepdim=True).numpy())


def test_normalize_gradients_of_each_result() -> None:
    x = normal(4, 3, 5)
    for chosen in range(3):
        for axes in ((0,), (1, 2), (0, 2), (0, 1, 2)):
            check_gradients(lambda v, c=chosen, a=axes: ops.normalize(v, a, 1e-3)[c], x)
    check_gradients(lambda v: ops.normalize(v, (0, 2), 1e-3)[0] * ops.normalize(v, (1,), 1e-3)[2], x)


def test_normalize_of_constants_is_zero() -> None:
    x = np.full((2, 3), 7.0, np.float32)
    y, m, v = forward(lambda value: ops.normalize(value, (1,), 1e-5), x)
    np.testing.assert_array_equal(y, 0 * x)
    np.testing.assert_array_equal(m, [[7.0], [7.0]])
    np.testing.assert_array_equal(v, [[0.0], [0.0]])
    against_torch(lambda value: ops.normalize(value, (1,), 1e-5), lambda t: _normalized(t, (1,), 1e-5), x)


def test_integer_reductions() -> None:
    x = np.array([[1, -2, 3], [0, 5, 5]], np.int32)
    np.testing.assert_array_equal(forward(lambda v: ops.sum_(v, (1,)), x)[0], [[2], [10]])
    np.testing.assert_array_equal(forward(lambda v: ops.max_(v, (0,)), x)[0], [[1, 5, 5]])
    np.testing.assert_array_equal(forward(lambda v: ops.argmax(v, 1), x)[0], [[2], [1]])
    np.testing.assert_array_equal(forward(lambda v: ops.all_(v, (1,)), x)[0], [[True], [False]])


SUM_TO: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((2, 3), (2, 3)),
    ((2, 3), (3,)),
    ((2, 3), (1, 3)),
    ((2, 3), (2, 1)),
    ((2, 3), (1, 1)),
    ((2, 3), (1,)),
    ((2, 3), ()),
    ((), ()),
    ((1,), ()),
    ((1, 1, 1), (1,)),
    ((4, 2, 3), (2, 1)),
    ((4, 1, 3), (4, 1, 1)),
    ((0, 3), (1, 3)),
    ((0, 3), ()),
]


@pytest.mark.parametrize(("wide", "narrow"), SUM_TO)
def test_sum_to_is_the_adjoint_of_broadcast(wide: tuple[int, ...], narrow: tuple[int, ...]) -> None:
    against_torch(lambda v: ops.sum_to(v, narrow), lambda t: t.sum_to_size(narrow), normal(*wide))
    check_gradients(lambda v: ops.sum_to(v, narrow), normal(*wide))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [((), (3,)), ((), (2, 3)), ((1,), (3,)), ((3,), (1, 3)), ((3,), (2, 3)), ((2, 1), (2, 3)), ((1, 1), (4, 2, 3))],
)
def test_sum_to_repeats_what_is_narrower(given: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    x = normal(*given)
    np.testing.assert_array_equal(forward(lambda v: ops.sum_to(v, wanted), x)[0], np.broadcast_to(x, wanted))
    check_gradients(lambda v: ops.sum_to(v, wanted), x)


def test_sum_to_both_ways_at_once() -> None:
    x = normal(4, 2, 1)
    expected = np.broadcast_to(x.sum(0), (2, 3))
    assert_close(forward(lambda v: ops.sum_to(v, (2, 3)), x)[0], expected)


def test_zero_elements() -> None:
    x: Array = np.zeros((0, 3))
    np.testing.assert_array_equal(forward(lambda v: ops.sum_(v, (0,)), x)[0], np.zeros((1, 3)))
    assert not forward(lambda v: ops.any_(v, (0,)), x)[0].any()
    assert forward(lambda v: ops.all_(v, (0,)), x)[0].all()
    for fn in (ops.sum_, ops.mean, ops.max_, ops.min_):
        assert gradients(lambda v, f=fn: f(v, (1,)), [x], [np.zeros((0, 1))])[0].shape == (0, 3)  # type: ignore[union-attr]
    for scan in (ops.softmax, ops.log_softmax):
        assert gradients(lambda v, f=scan: f(v, 1), [x], [x])[0].shape == (0, 3)  # type: ignore[union-attr]
    check_gradients(lambda v: ops.normalize(v, (1,), 1e-5), x)
    (value,) = inputs(((0, 3), "float32"))
    for refused in (ops.max_, ops.min_, ops.mean, lambda v, a: ops.normalize(v, a, 1e-5)):
        with pytest.raises(ShapeError, match="zero elements"):
            refused(value, (0,))
    for scan in (ops.argmax, ops.argmin, ops.softmax, ops.log_softmax):
        with pytest.raises(ShapeError, match="zero elements"):
            scan(value, 0)


def test_axes_are_checked() -> None:
    (x,) = inputs(((2, 3), "float32"))
    for fn in (ops.sum_, ops.mean, ops.max_, ops.any_, lambda v, a: ops.normalize(v, a, 1e-5)):
        with pytest.raises(ShapeError, match="axis 2 does not exist"):
            fn(x, (2,))
        with pytest.raises(ShapeError, match="named twice"):
            fn(x, (1, -1))
    for scan in (ops.argmax, ops.softmax, ops.log_softmax):
        with pytest.raises(ShapeError, match="axis -3 does not exist"):
            scan(x, -3)
