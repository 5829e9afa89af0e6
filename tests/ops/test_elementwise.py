"""Every map against PyTorch at ordinary and at awkward numbers, and against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from mlcompute import ops
from mlcompute.errors import DataError
from mlcompute.ops.op import TABLE, Array, Trace, emit
from tests.harness import TOLERANCE, check_expansion, check_gradients, forward, gradients
from tests.ops.oracle import against_torch, inputs, normal

NAN, INF = float("nan"), float("inf")
TINY = float(np.finfo(np.float32).tiny)
LARGE = float(np.finfo(np.float32).max)

#: Both zeros, subnormals, the ends of the range, infinities, NaN, the edges of exp, and every kink.
AWKWARD = [
    *(NAN, INF, -INF, 0.0, -0.0, 1e-45, -1e-45, 1e-40, TINY, -TINY, LARGE, -LARGE, 1e20, -1e20, 1e-20, -1e-20),
    *(0.5, -0.5, 1.0, -1.0, 1.5, -1.5, 2.0, -2.0, 2.5, -2.5, 3.0, -3.0, 20.0, -20.0, 88.0, 89.0, -88.0, -104.0, 127.5),
    *(np.pi / 2, 0.999, -0.999, 1.001, 1e4, -1e4),
]  # fmt: skip
#: What cancels in float32: the neighbours of 1.
NEAR_ONE = [float(np.nextafter(np.float32(1), np.float32(end))) for end in (0, 2)]


@dataclass
class Map:
    """The torch function of a map and where it is smooth: a box per operand for finite differences."""

    oracle: Callable[..., torch.Tensor]
    smooth: tuple[tuple[float, float], ...] = ((-3.0, 3.0),)
    #: Awkward inputs where torch answers otherwise, with the reason.
    differs: Callable[[Array], Array] | None = None
    reason: str = ""


def _boolean(function: Callable[..., torch.Tensor], count: int = 2) -> Map:
    return Map(function, ((-3.0, 3.0),) * count)


_BOTH = ((-3.0, 3.0), (-3.0, 3.0))

SAMPLES: dict[str, Map] = {
    "add": Map(torch.add, _BOTH),
    "subtract": Map(torch.subtract, _BOTH),
    "multiply": Map(torch.multiply, _BOTH),
    "divide": Map(torch.divide, ((-3.0, 3.0), (0.5, 3.0))),
    "negate": Map(torch.negative),
    "pow": Map(torch.pow, ((0.3, 3.0), (-3.0, 3.0))),
    "minimum": Map(torch.minimum, _BOTH),
    "maximum": Map(torch.maximum, _BOTH),
    "floor": Map(torch.floor),
    "ceil": Map(torch.ceil),
    "round": Map(torch.round),
    "sign": Map(torch.sign, differs=np.isnan, reason="torch answers 0 for NaN; here NaN stays visible"),
    "abs": Map(torch.abs, differs=np.isnan, reason="its slope is sign(NaN)"),
    "sqrt": Map(torch.sqrt, ((0.1, 3.0),)),
    "rsqrt": Map(torch.rsqrt, ((0.1, 3.0),)),
    "exp": Map(torch.exp),
    "exp2": Map(torch.exp2),
    "expm1": Map(torch.expm1),
    "log": Map(torch.log, ((0.1, 3.0),)),
    "log2": Map(torch.log2, ((0.1, 3.0),)),
    "log1p": Map(torch.log1p, ((-0.9, 3.0),)),
    "sigmoid": Map(torch.sigmoid),
    "softplus": Map(lambda x: torch.logaddexp(x, torch.zeros_like(x))),
    "erf": Map(torch.erf),
    "relu": Map(torch.relu),
    "sin": Map(torch.sin),
    "cos": Map(torch.cos),
    "tan": Map(torch.tan, ((-1.2, 1.2),)),
    "asin": Map(torch.asin, ((-0.9, 0.9),)),
    "acos": Map(torch.acos, ((-0.9, 0.9),)),
    "atan": Map(torch.atan),
    "sinh": Map(torch.sinh),
    "cosh": Map(torch.cosh),
    "tanh": Map(torch.tanh),
    "asinh": Map(torch.asinh),
    "acosh": Map(torch.acosh, ((1.2, 3.0),)),
    "atanh": Map(torch.atanh, ((-0.9, 0.9),)),
    "equal": _boolean(torch.eq),
    "not_equal": _boolean(torch.ne),
    "less": _boolean(torch.lt),
    "less_or_equal": _boolean(torch.le),
    "greater": _boolean(torch.gt),
    "greater_or_equal": _boolean(torch.ge),
    "logical_and": _boolean(torch.logical_and),
    "logical_or": _boolean(torch.logical_or),
    "logical_xor": _boolean(torch.logical_xor),
    "logical_not": _boolean(torch.logical_not, 1),
    "select": Map(lambda c, a, b: torch.where(c != 0, a, b), ((-3.0, 3.0), (-3.0, 3.0), (-3.0, 3.0))),
    "convert": Map(lambda x: x.to(torch.float32).to(x.dtype)),
    "copy": Map(torch.clone),
    "stop_gradient": Map(torch.detach),
}  # fmt: skip


def apply(name: str) -> Callable[..., ops.Value]:
    """The map as a function; `convert` goes to float32 and back."""
    if name == "convert":
        return lambda x: emit("convert", emit("convert", x, to=np.dtype(np.float32)), to=x.dtype)
    return lambda *values: emit(name, *values)


def test_every_map_has_a_sample() -> None:
    maps = {name for name, op in TABLE.items() if op.family == "elementwise"}
    assert maps == {*SAMPLES, "gelu", "gelu_gradient"}  # these two below: they expand into others


def awkward(name: str, dtype: Any) -> list[Array]:
    """All combinations of awkward numbers, one flat array per operand."""
    count = len(SAMPLES[name].smooth)
    if count == 3:  # a condition and two branches
        condition, a, b = np.meshgrid([NAN, 0.0, -0.0, 1.0, 1e-45], AWKWARD, AWKWARD)
        return [array.reshape(-1).astype(dtype) for array in (condition, a, b)]
    numbers = AWKWARD + (NEAR_ONE if dtype == np.float32 else [])
    return [array.reshape(-1).astype(dtype) for array in np.meshgrid(*[numbers] * count)]


def close(actual: Array, expected: Array) -> Array:
    """Elementwise: equal up to the dtype's rounding of that very number, NaN and infinities included."""
    info = np.finfo(actual.dtype)
    rtol, _ = TOLERANCE[actual.dtype]
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    near = np.abs(actual - expected) <= rtol * np.abs(expected) + 4 * float(info.tiny)
    return np.asarray(same | near)


def torch_gradients(name: str, arrays: list[Array], dy: float, dtype: Any) -> tuple[Array, list[Array]]:
    tensors = [torch.tensor(array.astype(dtype), requires_grad=True) for array in arrays]
    y = SAMPLES[name].oracle(*tensors)
    if not y.requires_grad:
        return y.numpy(), [np.zeros(array.shape, dtype) for array in arrays]
    found = torch.autograd.grad(y, tensors, torch.full_like(y, dy), materialize_grads=True)
    return y.detach().numpy(), [gradient.numpy() for gradient in found]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", SAMPLES)
def test_awkward_numbers(name: str, dtype: Any) -> None:
    """Forward agrees with torch's float64, rounded. A gradient agrees with that or with torch's own in the dtype."""
    arrays = awkward(name, dtype)
    usual = np.ones(arrays[0].shape, np.bool_)
    differs = SAMPLES[name].differs
    if differs is not None:
        usual = ~np.any([differs(array) for array in arrays], axis=0)
    with np.errstate(all="ignore"):
        (y,) = forward(apply(name), *arrays)
        expected, _ = torch_gradients(name, arrays, 1.0, np.float64)
        if y.dtype == np.bool_:
            np.testing.assert_array_equal(y, expected)
            return
        good = close(y, expected.astype(dtype)) | ~usual
        wrong = ~good
        assert good.all(), f"{[a[wrong][:5] for a in arrays]} -> {y[wrong][:5]}, torch {expected[wrong][:5]}"
        for dy in (0.75, -0.0):
            found = gradients(apply(name), arrays, [np.full(y.shape, dy)])
            _, exact = torch_gradients(name, arrays, dy, np.float64)
            _, rounded = torch_gradients(name, arrays, dy, dtype)
            for index, gradient in enumerate(found):
                actual = np.zeros(y.shape, dtype) if gradient is None else gradient
                good = close(actual, exact[index].astype(dtype)) | close(actual, rounded[index]) | ~usual
                wrong = ~good
                assert good.all(), (
                    f"input {index}, dy {dy}: {[a[wrong][:5] for a in arrays]} -> {actual[wrong][:5]}, "
                    f"torch {exact[index][wrong][:5]} or {rounded[index][wrong][:5]}"
                )


# stop_gradient denies its slope on purpose; the float32 that convert goes through is too coarse for differences.
@pytest.mark.parametrize("name", sorted(SAMPLES.keys() - {"stop_gradient", "convert"}))
def test_finite_differences(name: str) -> None:
    rng = np.random.default_rng(1)
    for shape in ((), (1,), (5,), (3, 4), (2, 1, 3), (0,), (2, 0)):
        check_gradients(apply(name), *(rng.uniform(low, high, shape) for low, high in SAMPLES[name].smooth))


SHAPES = [
    ((), ()),
    ((), (3,)),
    ((3,), ()),
    ((1,), (4,)),
    ((4,), (1,)),
    ((3, 1), (1, 4)),
    ((1, 4), (3, 1)),
    ((2, 3, 4), (3, 4)),
    ((3, 4), (2, 3, 4)),
    ((2, 3, 4), (3, 1)),
    ((4,), (2, 3, 1)),
    ((1, 1, 1), (2, 3, 4)),
    ((2, 1, 4), (1, 3, 1)),
    ((1, 1), (1,)),
    ((0, 3), (1, 3)),
    ((1, 3), (0, 1)),
]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "divide", "maximum", "minimum", "pow"])
def test_broadcasting(name: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    rng = np.random.default_rng(2)
    arrays = [rng.uniform(0.5, 2.0, shape) for shape in shapes]
    against_torch(apply(name), SAMPLES[name].oracle, *arrays)
    check_gradients(apply(name), *arrays)


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("condition", [(), (1,), (3, 1), (2, 3, 4), (1, 1, 4)], ids=str)
def test_select_broadcasts_three_ways(condition: tuple[int, ...], shapes: tuple[tuple[int, ...], ...]) -> None:
    try:
        np.broadcast_shapes(condition, *shapes)
    except ValueError:
        with pytest.raises(ValueError, match=r"shape mismatch|broadcast"):
            ops.select(*inputs((condition, "bool"), *((shape, "float32") for shape in shapes)))
        return
    chosen = normal(*condition) > 0
    arrays = [normal(*shape, seed=index) for index, shape in enumerate(shapes)]
    against_torch(ops.select, torch.where, np.asarray(chosen), *arrays)


def test_impossible_broadcasts_are_refused() -> None:
    a, b = inputs(((2, 3), "float32"), ((2, 4), "float32"))
    with pytest.raises(ValueError, match=r"shape mismatch|broadcast"):
        a + b


def test_equal_operands_share_the_gradient() -> None:
    a, b = np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0])
    for op, expected in (("maximum", [0.5, 0.0, 1.0]), ("minimum", [0.5, 1.0, 0.0])):
        da, db = gradients(apply(op), [a, b], [np.ones(3)])
        np.testing.assert_array_equal(da, expected)
        np.testing.assert_array_equal(db, 1 - np.array(expected))


def test_slopes_at_kinks() -> None:
    zero = [np.array([0.0, -0.0])]
    for op in ("relu", "abs"):
        np.testing.assert_array_equal(gradients(apply(op), zero, [np.ones(2)])[0], [0.0, 0.0])
    for op in ("floor", "ceil", "round", "sign", "stop_gradient"):
        assert gradients(apply(op), zero, [np.ones(2)])[0] is None


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 0)])
def test_gelu(shape: tuple[int, ...]) -> None:
    x, dy = normal(*shape) * 3, normal(*shape, seed=1)
    against_torch(ops.gelu, lambda x: torch.nn.functional.gelu(x, approximate="tanh"), x)
    check_gradients(ops.gelu, x)
    check_expansion("gelu", [x])
    check_expansion("gelu_gradient", [dy, x])


def test_gelu_of_awkward_numbers() -> None:
    """Far from zero it is x or 0, and what is no number stays so."""
    x = np.float32([NAN, INF, -30.0, -0.0, 0.0, 30.0])
    (y,) = forward(ops.gelu, x)
    np.testing.assert_array_equal(y, np.float32([NAN, INF, -0.0, -0.0, 0.0, 30.0]))
    (dx,) = gradients(ops.gelu, [x], [np.ones(6)])
    np.testing.assert_array_equal(dx, np.float32([NAN, NAN, 0.0, 0.5, 0.5, 1.0]))


def test_slopes_keep_their_digits_next_to_one() -> None:
    x = np.array([1 - 2**-20, 1 - 2**-23], np.float32)
    for op, slope in (("asin", 0.5), ("acos", -0.5), ("atanh", 1.0)):
        expected = np.sign(slope) * ((1 - x.astype(np.float64)) * (1 + x.astype(np.float64))) ** -abs(slope)
        (dx,) = gradients(apply(op), [x], [np.ones(2)])
        assert dx is not None
        assert_allclose(dx, expected, rtol=1e-6)


def test_numbers_take_the_dtype_of_their_partner() -> None:
    trace = Trace()
    for dtype in (np.float32, np.float64, np.int32, np.int64):
        x = trace.value((2,), np.dtype(dtype))
        assert (x + 1).dtype == (2 - x).dtype == (3 * x).dtype == x.dtype
        assert (x > 1).dtype == np.bool_
        condition = ops.equal(x, 0)
        assert ops.select(condition, x, 5).dtype == ops.select(condition, 5, x).dtype == x.dtype


def test_mixed_data_types_are_refused() -> None:
    x, n, d = inputs(((2,), "float32"), ((2,), "int64"), ((2,), "float64"))
    for a, b in ((x, n), (n, x), (x, d)):
        with pytest.raises(DataError, match="do not mix"):
            a * b
        with pytest.raises(DataError, match="do not mix"):
            ops.select(ops.equal(x, 0.0), a, b)


@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "negate", "abs", "minimum", "maximum", "sign"])
def test_integers(name: str) -> None:
    count = len(SAMPLES[name].smooth)
    for dtype in (np.int32, np.int64, np.int8):
        arrays = [np.array([-7, 0, 1, 9], dtype), np.array([3, -2, 1, 9], dtype)][:count]
        (y,) = forward(apply(name), *arrays)
        np.testing.assert_array_equal(y, SAMPLES[name].oracle(*(torch.tensor(array) for array in arrays)).numpy())
        assert y.dtype == dtype


def test_convert() -> None:
    x = np.array([-1.5, 0.0, 0.4, 2.6], np.float32)
    for to in (np.float16, np.float32, np.float64, np.int32, np.int64, np.uint8, np.bool_):
        source = np.abs(x) if to == np.uint8 else x
        (y,) = forward(lambda v, to=to: emit("convert", v, to=np.dtype(to)), source)
        np.testing.assert_array_equal(y, torch.tensor(source).to(torch.from_numpy(np.zeros(1, to)).dtype).numpy())
    (v,) = inputs(((2,), "float32"))
    assert ops.convert(v, np.dtype(np.float32)) is v
    (dx,) = gradients(lambda v: ops.convert(v, np.dtype(np.float16)), [x], [np.ones(4)])
    assert dx is not None
    assert dx.dtype == np.float32
    integers = lambda v: ops.convert(ops.convert(v, np.dtype(np.int32)), np.dtype(np.float32))  # noqa: E731
    assert gradients(integers, [x], [np.ones(4)]) == [None]


def test_a_value_used_twice_adds_up() -> None:
    against_torch(lambda x: x * x + x, lambda x: x * x + x, normal(3, 4))
    check_gradients(lambda x: ops.maximum(x, x * 2.0) / (x * x + 1.0), normal(3, 4))
