"""Every map the CPU engine emits against its NumPy meaning, on awkward numbers, in vectors and in remainders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mlcompute import ops
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code, vector_lanes
from mlcompute.devices.cpu.jit.cache import kernel_cache
from mlcompute.devices.cpu.kernels.elementwise_ops import (
    emit_elementwise,
    load_element,
    store_element,
    supports_elementwise,
)
from mlcompute.devices.cpu.kernels.table import KERNELS
from mlcompute.ops.op import TABLE, Array, Value
from tests.devices.kernels import Bench
from tests.devices.test_cpu_math import KERNEL, ROWS, ulps

SIZES = (1, 7, 16, 33, 1000)
MAPS = sorted(name for name, op in TABLE.items() if op.family == "elementwise" and not op.expansion)
FLOAT32, FLOAT64, FLOAT16 = (np.dtype(t) for t in (np.float32, np.float64, np.float16))
BOOL, INT32, UINT8 = (np.dtype(t) for t in (np.bool_, np.int32, np.uint8))
DTYPES = list(MEMORY_TYPES)
OPERANDS = {"select": 3, "logical_not": 1} | dict.fromkeys(
    ("add", "subtract", "multiply", "divide", "pow", "minimum", "maximum", "equal", "not_equal", "less", "greater",
     "less_or_equal", "greater_or_equal", "logical_and", "logical_or", "logical_xor"), 2,
)  # fmt: skip
BOOLEAN = {name for name in MAPS if name.startswith("logical") or name in ("equal", "not_equal")}
BOOLEAN |= {name for name in MAPS if name.startswith(("less", "greater"))}
#: Ops whose NumPy meaning is one rounding at most: the engine gives the same bits.
TRANSCENDENTAL = (set(ROWS) | {"pow"}) - {"sqrt", "rsqrt"}
#: NumPy takes either zero when both are given, depending on the position in the array.
EITHER_ZERO = {"minimum", "maximum", "relu"}


def result_type(name: str, operands: Sequence[np.dtype[Any]]) -> np.dtype[Any]:
    return BOOL if name in BOOLEAN else operands[-1]


def emitted(name: str, arrays: Sequence[Array], result: np.dtype[Any]) -> Array:
    """The map over whole arrays: vectors first, then element by element."""
    code, lanes = Code("kernel"), vector_lanes()
    types = [array.dtype for array in arrays]
    pointers = [code.argument(number, "ptr") for number in range(len(arrays) + 1)]
    count = code.argument(len(arrays) + 1)
    whole = code.mul(code.div(count, lanes), lanes)

    def body(index: str, width: int) -> None:
        places = [
            code.at(pointer, index, MEMORY_TYPES[dtype])
            for pointer, dtype in zip(pointers, [*types, result], strict=True)
        ]
        loaded = [load_element(code, place, dtype, width) for place, dtype in zip(places, types, strict=False)]
        store_element(code, places[-1], result, emit_elementwise(code, name, {}, loaded, types, result, width), width)

    with code.loop(0, whole, lanes) as index:
        body(index, lanes)
    with code.loop(whole, count) as index:
        body(index, 1)
    found = np.full(arrays[0].size + 1, 99).astype(result)
    words = [array.ctypes.data for array in (*arrays, found)]
    arguments = np.array([*words, arrays[0].size], np.int64)  # alive until the call is over
    KERNEL(kernel_cache.addresses([code])[0])(0, 1, arguments.ctypes.data)
    assert found[-1] == np.array(99).astype(result), "written past the end"
    return found[:-1]


def awkward(dtype: np.dtype[Any], size: int, seed: int) -> Array:
    """Special numbers of a type among random ones, in random places."""
    rng = np.random.default_rng(seed)
    if dtype == BOOL:
        return rng.random(size) < 0.5
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        special = np.array([info.min, info.max, 0, 1, 2, info.max - 1, info.min + 1, info.max // 2], dtype)
        random = rng.integers(max(info.min, -99), min(info.max, 99), size).astype(dtype)
    else:
        info = np.finfo(dtype)
        positive = [
            0.0,
            float(info.smallest_subnormal),
            float(info.tiny),
            0.5,
            1.0,
            1.5,
            2.5,
            1e4,
            float(info.max),
            math.inf,
        ]
        special = np.array([*positive, *(-number for number in positive), math.nan]).astype(dtype)
        random = (rng.normal(size=size) * 3).astype(dtype)
    return np.where(rng.random(size) < 0.4, rng.choice(special, size), random).astype(dtype)


def assert_same(name: str, found: Array, expected: Array) -> None:
    """Equal bitwise, but for the payloads of NaN and, where NumPy itself does not decide, signs of zeros."""
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected, err_msg=name)
    if found.dtype.kind == "f" and name not in EITHER_ZERO:
        zero = expected == 0
        np.testing.assert_array_equal(np.signbit(found[zero]), np.signbit(expected[zero]), err_msg=f"{name}: zeros")


CASES = [
    (name, dtype)
    for name in MAPS
    for dtype in DTYPES
    if name != "convert"
    and supports_elementwise(name, [dtype] * OPERANDS.get(name, 1), result_type(name, [dtype]))
]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=lambda item: str(item))
def test_agrees_with_its_meaning(name: str, dtype: np.dtype[Any]) -> None:
    for size in SIZES:
        arrays = [awkward(dtype, size, 11 * size + operand) for operand in range(OPERANDS.get(name, 1))]
        result = result_type(name, [dtype])
        found = emitted(name, arrays, result)
        with np.errstate(all="ignore"):
            # Between root and division NumPy rounds to float16, which is less exact.
            if name not in TRANSCENDENTAL and (name, dtype) != ("rsqrt", FLOAT16):
                expected = np.asarray(TABLE[name].meaning(*arrays))
                if name == "divide" and dtype.kind in "iu":
                    # Quotients are cut; what does not fit (by zero, the least by -1) NumPy leaves to the processor.
                    fits = (expected >= np.iinfo(dtype).min) & (expected < float(np.iinfo(dtype).max) + 1)
                    found, expected = found[fits], expected[fits].astype(dtype)
                assert_same(name, found, expected)
                continue
            true = np.asarray(TABLE[name].meaning(*(array.astype(np.float64) for array in arrays)))
        if dtype == FLOAT16:
            # A float32 result rounded once more: the nearest float16, or the one beside it in a near tie.
            with np.errstate(all="ignore"):
                nearest = true.astype(np.float16)
            np.testing.assert_array_max_ulp(found[np.isfinite(nearest)], nearest[np.isfinite(nearest)], 1)
            np.testing.assert_array_equal(found[~np.isfinite(nearest)], nearest[~np.isfinite(nearest)])
            continue
        error = ulps(found, true)
        limit = ROWS[name].limit if name in ROWS else 0.51
        worst = int(error.argmax())
        assert error[worst] <= limit, (
            f"max ulp {error[worst]:.3f}: {name}{[a[worst] for a in arrays]} = {found[worst]!r}, not {true[worst]!r}"
        )


def in_range(x: Array, target: np.dtype[Any]) -> Array:
    """x with what a conversion to integers does not define replaced."""
    if x.dtype.kind != "f" or target.kind not in "iu":
        return x
    info = np.iinfo(target)
    with np.errstate(invalid="ignore"):
        inside = (x.astype(np.float64) > float(info.min) - 1) & (x.astype(np.float64) < float(info.max))
    return np.where(inside, x, x.dtype.type(7.75)).astype(x.dtype)


@pytest.mark.parametrize("target", DTYPES, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_conversions(source: np.dtype[Any], target: np.dtype[Any]) -> None:
    assert supports_elementwise("convert", [source], target)
    for size in SIZES:
        x = in_range(awkward(source, size, size), target)
        with np.errstate(all="ignore"):
            expected = x.astype(target)
        assert_same("convert", emitted("convert", [x], target), expected)


def test_float64_to_float16_rounds_once() -> None:
    """Near ties: through float32 these would round twice."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    ties = (halves[:-1] + halves[1:]) / 2
    x = np.concatenate([ties, ties * (1 + 2.0**-40), ties * (1 - 2.0**-40), -ties * (1 + 2.0**-30)])
    with np.errstate(all="ignore"):
        assert_same("convert", emitted("convert", [x], FLOAT16), x.astype(np.float16))


def test_conversion_to_integers_is_defined_everywhere() -> None:
    """Out of range NumPy leaves the result open; here it is the nearest end, and 0 for NaN."""
    x = np.array([math.nan, math.inf, -math.inf, 1e30, -1e30, 2.0**31], np.float32)
    low, high = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    np.testing.assert_array_equal(emitted("convert", [x], INT32), [0, high, low, high, low, high])


@pytest.mark.parametrize("condition", [BOOL, FLOAT32, INT32, UINT8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_select_takes_any_condition(condition: np.dtype[Any], dtype: np.dtype[Any]) -> None:
    arrays = [awkward(condition, 100, 1), awkward(dtype, 100, 2), awkward(dtype, 100, 3)]
    assert_same("select", emitted("select", arrays, dtype), TABLE["select"].meaning(*arrays))


def test_logic_mixes_types() -> None:
    arrays = [awkward(FLOAT32, 100, 1), awkward(INT32, 100, 2)]
    assert_same("logical_and", emitted("logical_and", arrays, BOOL), np.logical_and(*arrays))


def test_any_byte_but_zero_is_true() -> None:
    bytes_ = np.array([0, 1, 2, 255], np.uint8)
    np.testing.assert_array_equal(emitted("copy", [bytes_.view(np.bool_)], BOOL).view(np.uint8), [0, 1, 1, 1])


def test_every_map_runs_in_float32() -> None:
    missing = [
        name
        for name in MAPS
        if not supports_elementwise(name, [FLOAT32] * OPERANDS.get(name, 1), result_type(name, [FLOAT32]))
    ]
    assert not missing


def test_what_is_not_supported_is_said() -> None:
    assert not supports_elementwise("exp", [FLOAT64], FLOAT64)
    assert not supports_elementwise("pow", [INT32, INT32], INT32)
    assert not supports_elementwise("subtract", [BOOL, BOOL], BOOL)
    assert not supports_elementwise("add", [FLOAT32, FLOAT64], FLOAT64)
    assert not supports_elementwise("less", [INT32, FLOAT32], BOOL)
    assert not supports_elementwise("matmul", [FLOAT32, FLOAT32], FLOAT32)
    assert not supports_elementwise("copy", [np.dtype(np.complex64)], np.dtype(np.complex64))


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((3, 24, 1, 40), (0, 2, 3, 1)), ((5, 17, 23), (0, 2, 1)), ((37, 19), (1, 0)), ((2, 8, 9, 33), (3, 2, 0, 1))],
)
def test_copies_that_exchange_axes(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    """Squares of elements, and what is left over at their edges; other sizes of elements go one by one."""
    for dtype in ("f4", "i4", "f8", "u1"):
        x = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
        bench = Bench(KERNELS, "copy", [x], views=lambda value: [ops.transpose(value, axes)])
        bench.check(np.testing.assert_array_equal)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((4, 3, 9, 11), (0, 2, 3, 1)),
        ((2, 2, 8, 8), (0, 2, 3, 1)),
        ((1, 7, 37), (0, 2, 1)),
        ((3, 5, 6), (0, 2, 1)),
        ((3, 70), (1, 0)),
        ((2, 3, 4, 50), (0, 2, 3, 1)),
        ((4, 3, 50, 2), (0, 2, 3, 1)),
    ],
)
def test_copies_that_interleave_a_few_lines(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    """As the channels of an image become pixels one after the other."""
    for dtype in ("f4", "i4", "f8"):
        x = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
        bench = Bench(KERNELS, "copy", [x], views=lambda value: [ops.transpose(value, axes)])
        bench.check(np.testing.assert_array_equal)


#: Shapes in memory, and the order in which the axes are read: channels first to last, the last two, and all backwards.
TRANSPOSED = [
    ((3, 17, 9, 40), (0, 2, 3, 1)),
    ((1, 8, 8, 8), (0, 2, 3, 1)),
    ((2, 64, 7, 9), (0, 2, 3, 1)),
    ((2, 3, 5, 70), (0, 2, 3, 1)),
    ((5, 70, 131), (0, 2, 1)),
    ((20, 3, 33), (2, 1, 0)),
    ((129, 9), (1, 0)),
    ((8, 257), (1, 0)),
]


@pytest.mark.parametrize(("shape", "axes"), TRANSPOSED, ids=str)
@pytest.mark.parametrize("dtype", [FLOAT32, INT32, FLOAT64], ids=str)
def test_operands_whose_axes_are_exchanged(shape: tuple[int, ...], axes: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    rng = np.random.default_rng(0)
    read = tuple(shape[axis] for axis in axes)
    one, other, dense = (rng.integers(-99, 99, size).astype(dtype) for size in (shape, shape, read))
    row, column = rng.integers(-99, 99, read[-1:]).astype(dtype), rng.integers(-99, 99, (read[-2], 1)).astype(dtype)

    for operands in ((one, dense), (dense, one, dense), (one, other, dense), (one, row), (one, column)):
        first, *rest = operands
        arrays = [first, *rest] if len(operands) == 2 else [np.greater(first, 0), *rest]
        name = "multiply" if len(operands) == 2 else "select"

        def shown(*values: Value, given: Sequence[Array] = operands) -> list[Value]:
            exchanged = [array is one or array is other for array in given]
            return [ops.transpose(v, axes) if moved else v for v, moved in zip(values, exchanged, strict=True)]

        Bench(KERNELS, name, arrays, views=shown).check(np.testing.assert_array_equal)
