"""Matrix products, convolutions and pooling against PyTorch and finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from mlcompute import ops
from mlcompute.errors import DataError, ShapeError
from mlcompute.ops.op import Array
from tests.harness import assert_close, check_gradients, forward, gradients
from tests.ops.oracle import Sample, against_torch, ask, inputs, integers, normal, uncovered, used

Shape = tuple[int, ...]
NAN, INF = float("nan"), float("inf")

MATMULS: list[tuple[Shape, Shape]] = [
    ((1, 1), (1, 1)),
    ((2, 3), (3, 4)),
    ((1, 3), (3, 1)),
    ((5, 2, 3), (5, 3, 4)),
    ((5, 2, 3), (3, 4)),
    ((2, 3), (5, 3, 4)),
    ((1, 2, 3), (5, 3, 4)),
    ((5, 2, 3), (1, 3, 4)),
    ((4, 1, 2, 3), (5, 3, 2)),
    ((2, 3), (1, 3, 4)),
    ((1, 2, 3), (3, 4)),
    ((6, 5, 2, 3), (3, 4)),
    ((0, 3), (3, 2)),
    ((2, 0), (0, 3)),
    ((4, 2, 0), (0, 3)),
    ((4, 2, 3), (3, 0)),
    ((0, 2, 3), (3, 4)),
    ((0, 2, 3), (1, 3, 4)),
]


class Window(NamedTuple):
    """An image, a kernel and how one moves over the other."""

    image: Shape
    kernel: Shape
    strides: tuple[int, int] = (1, 1)
    dilations: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    groups: int = 1

    @property
    def attributes(self) -> dict[str, Any]:
        return {"strides": self.strides, "dilations": self.dilations, "padding": self.padding}


CONVOLUTIONS = [
    Window((1, 1, 1, 1), (1, 1, 1, 1)),
    Window((2, 3, 5, 6), (4, 3, 3, 3)),
    Window((2, 3, 5, 6), (4, 3, 5, 6)),
    Window((2, 3, 5, 6), (4, 3, 1, 1), strides=(2, 3)),
    Window((1, 2, 7, 8), (3, 2, 3, 2), strides=(2, 3), padding=(1, 1, 1, 1)),
    Window((2, 2, 7, 8), (3, 2, 2, 3), padding=(0, 1, 2, 0)),
    Window((2, 2, 7, 8), (3, 2, 3, 2), dilations=(2, 3), padding=(1, 2, 0, 3)),
    Window((2, 2, 9, 8), (2, 2, 2, 3), strides=(3, 2), dilations=(4, 2), padding=(1, 0, 3, 1)),
    Window((2, 4, 5, 5), (6, 2, 3, 3), strides=(2, 2), padding=(1, 1, 1, 1), groups=2),
    Window((3, 4, 5, 6), (4, 1, 3, 2), padding=(1, 1, 0, 1), groups=4),
    Window((1, 3, 5, 6), (6, 1, 3, 3), strides=(2, 1), groups=3),
    Window((2, 1, 2, 2), (1, 1, 3, 3), padding=(4, 4, 3, 5)),
    Window((1, 1, 8, 8), (1, 1, 2, 2), strides=(5, 5)),
    Window((0, 2, 4, 4), (3, 2, 3, 3)),
    Window((2, 2, 0, 4), (3, 2, 2, 2), padding=(1, 1, 0, 0)),
    Window((2, 2, 4, 4), (0, 2, 3, 3)),
    Window((2, 0, 4, 4), (3, 0, 3, 3)),
]


def _convolve(x: torch.Tensor, w: torch.Tensor, c: Window) -> torch.Tensor:
    top, bottom, left, right = c.padding
    padded = F.pad(x, (left, right, top, bottom))
    if not (x.numel() and w.numel()):  # torch refuses some empty ones
        rows = (padded.shape[2] - c.dilations[0] * (w.shape[2] - 1) - 1) // c.strides[0] + 1
        columns = (padded.shape[3] - c.dilations[1] * (w.shape[3] - 1) - 1) // c.strides[1] + 1
        return (x.sum() * w.sum()) * torch.zeros(x.shape[0], w.shape[0], rows, columns, dtype=x.dtype)
    return F.conv2d(padded, w, stride=c.strides, dilation=c.dilations, groups=c.groups)


def _adjoint(fn: Callable[..., torch.Tensor], index: int) -> Callable[..., torch.Tensor]:
    """(dy, *arguments) -> the gradient of fn(*arguments) with respect to one of them, itself differentiable."""

    def gradient(dy: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
        leaves = [a if a.requires_grad else a.clone().requires_grad_() for a in arguments]
        (dx,) = torch.autograd.grad(fn(*leaves), leaves[index], dy, create_graph=True)
        return dx

    return gradient


def _convolution_samples(c: Window) -> list[Sample]:
    x, w = normal(*c.image), normal(*c.kernel, seed=1)
    result = _convolve(torch.tensor(x), torch.tensor(w), c)
    dy = normal(*result.shape, seed=2)
    attributes = {**c.attributes, "groups": c.groups}
    like_x, like_w = torch.zeros(c.image, dtype=torch.float64), torch.zeros(c.kernel, dtype=torch.float64)
    return [
        Sample(
            "convolution", lambda x, w: ops.convolution(x, w, **attributes), lambda x, w: _convolve(x, w, c), [x, w]
        ),
        Sample(
            "convolution_input_gradient",
            lambda dy, w: ops.convolution_input_gradient(dy, w, c.image, **attributes),
            lambda dy, w: _adjoint(lambda x, w: _convolve(x, w, c), 0)(dy, like_x, w),
            [dy, w],
        ),
        Sample(
            "convolution_weight_gradient",
            lambda x, dy: ops.convolution_weight_gradient(x, dy, c.kernel, **attributes),
            lambda x, dy: _adjoint(lambda x, w: _convolve(x, w, c), 1)(dy, x, like_w),
            [x, dy],
        ),
    ]


POOLS = [
    Window((1, 1, 1, 1), (1, 1)),
    Window((2, 3, 5, 6), (2, 2), strides=(2, 2)),
    Window((2, 3, 5, 6), (3, 2), strides=(1, 2)),
    Window((2, 3, 5, 6), (5, 6)),
    Window((2, 3, 5, 6), (1, 1), strides=(3, 4)),
    Window((2, 1, 6, 7), (3, 3), padding=(1, 1, 1, 1)),
    Window((2, 1, 6, 7), (2, 2), padding=(0, 1, 0, 1)),
    Window((1, 2, 6, 7), (3, 2), strides=(2, 3), dilations=(2, 3), padding=(1, 0, 2, 1)),
    Window((1, 2, 3, 3), (2, 2), strides=(1, 1), padding=(3, 2, 4, 3)),
    Window((0, 2, 4, 4), (2, 2)),
    Window((2, 0, 4, 4), (2, 2)),
]


def _windows(x: torch.Tensor, c: Window, fill: float) -> torch.Tensor:
    """Every window along a last axis: (N, C, OH, OW, kh * kw)."""
    top, bottom, left, right = c.padding
    padded = F.pad(x, (left, right, top, bottom), value=fill)
    (kh, kw), (sy, sx), (dy, dx) = c.kernel, c.strides, c.dilations
    oh, ow = (padded.shape[2] - dy * (kh - 1) - 1) // sy + 1, (padded.shape[3] - dx * (kw - 1) - 1) // sx + 1
    parts = [
        padded[:, :, u * dy : u * dy + (oh - 1) * sy + 1 : sy, v * dx : v * dx + (ow - 1) * sx + 1 : sx]
        for u in range(kh)
        for v in range(kw)
    ]
    return torch.stack(parts, dim=-1)


def _max_pool(x: torch.Tensor, c: Window) -> torch.Tensor:
    return _windows(x, c, -INF).max(dim=-1).values


def _sum_pool(x: torch.Tensor, c: Window) -> torch.Tensor:
    return _windows(x, c, 0.0).sum(dim=-1)


def _pool_samples(c: Window) -> list[Sample]:
    x = normal(*c.image)
    dy = normal(*_sum_pool(torch.tensor(x), c).shape, seed=1)
    attributes = {**c.attributes, "kernel": c.kernel}
    blank = torch.zeros(c.image, dtype=torch.float64)
    # A window wholly in padding gives -inf, which has no differences.
    smooth = bool(np.isfinite(_max_pool(torch.tensor(x), c).numpy()).all())
    return [
        Sample("max_pool", lambda x: ops.max_pool(x, **attributes), lambda x: _max_pool(x, c), [x], smooth=smooth),
        Sample(
            "max_pool_gradient",
            lambda dy, x: ops.max_pool_gradient(dy, x, **attributes),
            lambda dy, x: _adjoint(lambda x: _max_pool(x, c), 0)(dy, x),
            [dy, x],
        ),
        Sample("sum_pool", lambda x: ops.sum_pool(x, **attributes), lambda x: _sum_pool(x, c), [x]),
        Sample(
            "sum_pool_gradient",
            lambda dy: ops.sum_pool_gradient(dy, c.image, **attributes),
            lambda dy: _adjoint(lambda x: _sum_pool(x, c), 0)(dy, blank),
            [dy],
        ),
    ]


SAMPLES = [Sample("matmul", ops.matmul, torch.matmul, [normal(*a), normal(*b, seed=1)]) for a, b in MATMULS]
for _window in CONVOLUTIONS:
    SAMPLES += _convolution_samples(_window)
for _window in POOLS:
    SAMPLES += _pool_samples(_window)


def test_every_contraction_has_a_sample() -> None:
    assert not uncovered("matmul_and_convolution", SAMPLES)
    # Places are compared with max_pool_gradient below.
    assert not uncovered("pooling", SAMPLES, {"max_pool_with_indices", "max_pool_indices_gradient"})


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_contraction(sample: Sample) -> None:
    ask(sample)


def _random_window(rng: np.random.Generator) -> Window:
    """Any image, kernel and movement that fit each other."""
    groups = int(rng.choice([1, 1, 2, 3]))
    kernel, strides, dilations = ((int(a), int(b)) for a, b in rng.integers(1, 4, (3, 2)))
    top, bottom, left, right = (int(n) for n in rng.integers(0, 4, 4))
    padding = (top, bottom, left, right)
    reach = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    extents = [
        max(1, reach[axis] - padding[2 * axis] - padding[2 * axis + 1]) + int(rng.integers(0, 5)) for axis in (0, 1)
    ]
    inner, outer = (int(n) for n in rng.integers(1, 4, 2))
    return Window(
        (int(rng.integers(1, 4)), inner * groups, *extents), (outer * groups, inner, *kernel),
        strides, dilations, padding, groups,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_random_convolutions_and_pools(seed: int) -> None:
    c = _random_window(np.random.default_rng(seed))
    for sample in _convolution_samples(c):
        against_torch(sample.fn, sample.oracle, *sample.arrays)
    for sample in _pool_samples(c._replace(kernel=c.kernel[2:])):
        against_torch(sample.fn, sample.oracle, *sample.arrays)


# Matrix products ----------------------------------------------------------------------------------------------------


def test_one_matrix_for_a_batch_needs_no_batch_of_gradients() -> None:
    """The gradient of shared weights is one product over all rows: nothing of the size batch x weights appears."""
    trace_names = used(lambda x, w: ops.matmul(x, w), [normal(8, 5, 3), normal(3, 2)])
    assert trace_names == {"matmul"}
    against_torch(ops.matmul, torch.matmul, normal(8, 5, 3), normal(3, 2))
    x, w = inputs(((8, 5, 3), "float32"), ((3, 2), "float32"))
    y = ops.matmul(x, w)
    ops.TABLE["matmul"].derivative(y, y, x, w)  # type: ignore[misc]
    largest = max(value.size for step in x.trace.steps for value in step.results)
    assert largest <= x.size


def test_matmul_spreads_nan_and_infinity() -> None:
    a = np.array([[1.0, NAN], [0.0, 1.0], [INF, 0.0]])
    b = np.array([[2.0, 0.0], [1.0, 1.0]])
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(forward(ops.matmul, a, b)[0], [[NAN, NAN], [1.0, 1.0], [INF, NAN]])


def test_matmul_refuses() -> None:
    a, b, v, n = inputs(((2, 3), "float32"), ((4, 2), "float32"), ((3,), "float32"), ((3, 2), "int32"))
    c, d = inputs(((2, 4, 3), "float32"), ((3, 3, 4), "float32"))
    for left, right in ((a, b), (a, v), (v, a)):
        with pytest.raises(ShapeError, match=r"matmul: .* has no meaning"):
            ops.matmul(left, right)
    with pytest.raises(DataError, match="do not mix"):
        ops.matmul(a, n)
    with pytest.raises(ValueError, match=r"shape mismatch|broadcast"):
        ops.matmul(c, d)


# Convolution --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("c", [c for c in CONVOLUTIONS if 0 not in (*c.image, *c.kernel)], ids=str)
def test_transposed_convolution(c: Window) -> None:
    """The input gradient is torch's transposed convolution with the border cut off."""
    rows, columns = _convolve(torch.zeros(c.image), torch.zeros(c.kernel), c).shape[2:]
    y, w = normal(c.image[0], c.kernel[0], rows, columns), normal(*c.kernel, seed=1)
    (x,) = forward(lambda y, w: ops.convolution_input_gradient(y, w, c.image, **c.attributes, groups=c.groups), y, w)
    full = F.conv_transpose2d(
        torch.tensor(y), torch.tensor(w), stride=c.strides, dilation=c.dilations, groups=c.groups
    ).numpy()
    top, _, left, _ = c.padding
    # Input pixels behind the last window meet no kernel; torch's result ends before them.
    expected = np.zeros((*full.shape[:2], top + c.image[2] + 99, left + c.image[3] + 99))
    expected[:, :, : full.shape[2], : full.shape[3]] = full
    np.testing.assert_allclose(x, expected[:, :, top : top + c.image[2], left : left + c.image[3]], atol=1e-12)


def test_the_three_convolutions_are_adjoint() -> None:
    """<dy, conv(x, w)> = <x, input_gradient(dy, w)> = <w, weight_gradient(x, dy)>."""
    for c in CONVOLUTIONS:
        x, w = normal(*c.image), normal(*c.kernel, seed=1)
        attributes = {**c.attributes, "groups": c.groups}
        (y,) = forward(lambda x, w, a=attributes: ops.convolution(x, w, **a), x, w)
        dy = normal(*y.shape, seed=2)
        dx, dw = gradients(lambda x, w, a=attributes: ops.convolution(x, w, **a), [x, w], [dy])
        assert dx is not None
        assert dw is not None
        np.testing.assert_allclose(np.vdot(x, dx), np.vdot(dy, y), rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(np.vdot(w, dw), np.vdot(dy, y), rtol=1e-10, atol=1e-10)


def test_convolution_refuses() -> None:
    x, w, flat, w5 = inputs(
        ((2, 4, 5, 5), "float32"), ((6, 4, 3, 3), "float32"), ((4, 5, 5), "float32"), ((6, 4, 7, 3), "float32")
    )  # fmt: skip
    plain: dict[str, Any] = {"strides": (1, 1), "dilations": (1, 1), "padding": (0, 0, 0, 0), "groups": 1}
    with pytest.raises(ShapeError, match="must have rank 4"):
        ops.convolution(flat, w, **plain)
    for groups in (0, 2, 3):
        with pytest.raises(ShapeError, match="do not fit with"):
            ops.convolution(x, w, **{**plain, "groups": groups})
    with pytest.raises(ShapeError, match="a window of 7 does not fit into a padded extent of 5"):
        ops.convolution(x, w5, **plain)
    with pytest.raises(ShapeError, match="a window of 7 does not fit"):
        ops.convolution(x, w, **{**plain, "dilations": (1, 3)})
    for wrong in ({"strides": (0, 1)}, {"dilations": (1, 0)}, {"padding": (0, 0, -1, 0)}):
        with pytest.raises(ShapeError, match="must be at least 1, padding at least 0"):
            ops.convolution(x, w, **{**plain, **wrong})
    y = ops.convolution(x, w, **plain)
    with pytest.raises(ShapeError, match=r"dy is \(2, 6, 3, 3\)"):
        ops.convolution_input_gradient(y, w, (2, 4, 6, 5), **plain)
    with pytest.raises(ShapeError, match=r"dy is \(2, 6, 3, 3\)"):
        ops.convolution_weight_gradient(x, y, (6, 4, 2, 3), **plain)


# Pooling ------------------------------------------------------------------------------------------------------------


def _pool(x: Array, kernel: tuple[int, int], padding: tuple[int, int, int, int] = (0, 0, 0, 0)) -> Any:
    return lambda v: ops.max_pool(v, kernel, (1, 1), (1, 1), padding)


def test_first_maximum_takes_the_gradient() -> None:
    x = np.array([[[[3.0, 1.0, 3.0], [3.0, 3.0, 0.0]]]])
    (dx,) = gradients(_pool(x, (2, 3)), [x], [np.ones((1, 1, 1, 1))])
    np.testing.assert_array_equal(dx, [[[[1, 0, 0], [0, 0, 0]]]])
    x = integers(2, 3, 6, 7, below=3).astype(np.float64)  # ties everywhere
    for c in (Window(x.shape, (3, 3), padding=(1, 1, 1, 1)), Window(x.shape, (2, 3), (2, 2), (2, 1), (1, 0, 0, 2))):
        attributes = {**c.attributes, "kernel": c.kernel}
        (dx,) = gradients(
            lambda v, a=attributes: ops.max_pool(v, **a), [x], [normal(*_max_pool(torch.tensor(x), c).shape)]
        )
        t = torch.tensor(x, requires_grad=True)
        top, bottom, left, right = c.padding
        padded = F.pad(t, (left, right, top, bottom), value=-INF)
        y = F.max_pool2d(padded, c.kernel, c.strides, dilation=c.dilations)
        (expected,) = torch.autograd.grad(y, t, torch.tensor(normal(*y.shape)))
        assert_close(dx, expected.numpy())


def test_max_pool_of_nan_and_infinity() -> None:
    x = normal(2, 2, 6, 6)
    x[0, 0, 2, 3], x[0, 1, 0, 0], x[1, 0, 5, 5], x[1, 1, 1] = NAN, INF, -INF, -INF
    against_torch(
        lambda v: ops.max_pool(v, (2, 2), (2, 2), (1, 1), (1, 1, 1, 1)), lambda t: F.max_pool2d(t, 2, 2, padding=1), x
    )


def test_padding_takes_no_gradient_from_minus_infinity() -> None:
    x = np.full((1, 1, 2, 2), -INF)
    fn = lambda v: ops.max_pool(v, (2, 2), (1, 1), (1, 1), (1, 0, 1, 0))  # noqa: E731
    against_torch(fn, lambda t: F.max_pool2d(t, 2, 1, padding=1)[:, :, :2, :2], x)
    (dx,) = gradients(fn, [x], [np.ones((1, 1, 2, 2))])
    np.testing.assert_array_equal(dx, [[[[4, 0], [0, 0]]]])
    # The same choice when the gradient is differentiated once more.
    d = lambda dy, v: ops.max_pool_gradient(dy, v, (2, 2), (1, 1), (1, 1), (1, 0, 1, 0))  # noqa: E731
    seed = np.arange(1.0, 5.0).reshape(1, 1, 2, 2)
    dd, _ = gradients(d, [np.ones((1, 1, 2, 2)), x], [seed])
    np.testing.assert_array_equal(dd, np.ones((1, 1, 2, 2)))


def test_a_window_in_the_padding() -> None:
    x = normal(1, 1, 2, 2)
    fn = lambda v: ops.max_pool(v, (2, 2), (1, 1), (1, 1), (3, 0, 0, 0))  # noqa: E731
    (y,) = forward(fn, x)
    np.testing.assert_array_equal(y[0, 0, :2], [[-INF], [-INF]])
    (dx,) = gradients(fn, [x], [np.ones(y.shape)])
    assert dx is not None
    assert dx.sum() == 2
    check_gradients(
        lambda dy, v: ops.max_pool_gradient(dy, v, (2, 2), (1, 1), (1, 1), (3, 0, 0, 0)), normal(*y.shape), x
    )


@pytest.mark.parametrize("channels_last", [False, True])
def test_places_stand_for_the_image(channels_last: bool) -> None:
    ties = integers(2, 3, 6, 7, below=3).astype(np.float64)
    odd = normal(2, 3, 6, 7)
    odd[0, 0, :3], odd[1, 1, 2, 2:5], odd[0, 2] = NAN, INF, -INF
    for x in (normal(2, 3, 6, 7), ties, odd):
        for c in (
            Window(x.shape, (2, 2), (2, 2)),
            Window(x.shape, (3, 3), padding=(1, 1, 1, 1)),
            Window(x.shape, (2, 3), (2, 2), (2, 1), (1, 0, 0, 2)),
            Window(x.shape, (2, 2), padding=(3, 0, 0, 0)),  # windows in the padding have no place
        ):
            attributes: dict[str, Any] = {**c.attributes, "kernel": c.kernel}
            y = ops.TABLE["max_pool"].meaning(x, **attributes)
            dy = normal(*y.shape, seed=1)
            expected = ops.TABLE["max_pool_gradient"].meaning(dy, x, **attributes)
            if channels_last:
                attributes["channels_last"] = True
                x_, y, dy, expected = (a.transpose(0, 2, 3, 1) for a in (x, y, dy, expected))
            found, places = ops.TABLE["max_pool_with_indices"].meaning(x_ if channels_last else x, **attributes)
            np.testing.assert_array_equal(found, y)
            assert places.dtype == np.uint8
            dx = ops.TABLE["max_pool_indices_gradient"].meaning(dy, places, shape=x.shape, **attributes)
            np.testing.assert_array_equal(dx, expected)


def test_pools_refuse() -> None:
    x, flat, dy = inputs(((2, 4, 5, 5), "float32"), ((4, 5, 5), "float32"), ((2, 4, 5, 5), "float32"))
    plain: dict[str, Any] = {"kernel": (2, 2), "strides": (1, 1), "dilations": (1, 1), "padding": (0, 0, 0, 0)}
    for pool in (ops.max_pool, ops.sum_pool):
        with pytest.raises(ShapeError, match="must have rank 4"):
            pool(flat, **plain)
        with pytest.raises(ShapeError, match="a window of 6 does not fit"):
            pool(x, **{**plain, "kernel": (6, 1)})
        for wrong in ({"strides": (0, 1)}, {"dilations": (1, 0)}, {"padding": (0, 0, -1, 0)}, {"kernel": (0, 2)}):
            with pytest.raises(ShapeError, match="must be at least 1, padding at least 0"):
                pool(x, **{**plain, **wrong})
    with pytest.raises(ShapeError, match="dy is"):
        ops.TABLE["max_pool_indices_gradient"].result(dy, dy, shape=x.shape, **plain)
    with pytest.raises(ShapeError, match="more elements than 255"):
        ops.TABLE["max_pool_with_indices"].result(x, **{**plain, "kernel": (16, 16)})
    with pytest.raises(ShapeError, match="dy is"):
        ops.max_pool_gradient(dy, x, **plain)
    with pytest.raises(ShapeError, match="dy is"):
        ops.sum_pool_gradient(dy, x.shape, **plain)
