"""Elementwise kernels, copies and random numbers of the CUDA engine, in emulation."""

from __future__ import annotations

import numpy as np
import pytest

from mlcompute import ops
from mlcompute.devices.cuda.codegen.indexing import divisor
from mlcompute.ops.op import TABLE, Array, Value
from tests.devices.cuda_emulator.bench import check, engine, op, run
from tests.devices.cuda_emulator.compiling import COMPILER
from tests.devices.cuda_emulator.driver import EmulatedDriver

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the emulator needs g++")

TYPES = [np.dtype(name) for name in ("float32", "float16", "float64", "int64", "int32", "int8", "uint8", "bool")]
MAPS = [name for name, each in TABLE.items() if each.family == "elementwise"]
_COUNTS = {"select": 3, "logical_not": 1, "gelu_gradient": 2}
_TWO = {
    *("add", "subtract", "multiply", "divide", "pow", "minimum", "maximum", "logical_and", "logical_or"),
    *("logical_xor", "equal", "not_equal", "less", "less_or_equal", "greater", "greater_or_equal"),
}
#: In float16, where NumPy rounds at every step of a formula.
_COARSE = ("tan", "sinh", "cosh", "pow", "gelu", "gelu_gradient")
#: Numbers outside of a function's domain give NaN on both sides; integers made of those are anything.
_ON_INTEGERS = {"add", "subtract", "multiply", "negate", "minimum", "maximum", "sign", "abs", "relu", "copy", "select"}


def numbers(dtype: np.dtype, shape: tuple[int, ...], seed: int) -> Array:
    rng = np.random.default_rng(seed)
    if dtype == np.bool_:
        return rng.random(shape) < 0.5
    if dtype.kind in "iu":
        return rng.integers(0 if dtype.kind == "u" else -9, 10, shape).astype(dtype)
    found = (rng.standard_normal(shape) * 2).astype(dtype)
    found.reshape(-1)[:5] = [0.0, -0.0, np.inf, -np.inf, np.nan]
    return found


@pytest.mark.parametrize("name", MAPS)
def test_maps(name: str) -> None:
    count = _COUNTS.get(name, 2 if name in _TWO else 1)
    for dtype in TYPES:
        arrays = [numbers(dtype, (37,), seed) for seed in range(count)]
        if name == "select":
            arrays[0] = numbers(np.dtype(np.bool_), (37,), 5)
        if name == "convert":
            for to in TYPES:  # what does not fit into an integer becomes anything
                fits = dtype.kind != "f" or to.kind not in "iu"
                check(op("convert", to=to), arrays[0] if fits else np.abs(np.nan_to_num(arrays[0], posinf=4, neginf=5)))
            continue
        is_plain = dtype.kind == "f" or name in (*_ON_INTEGERS, *(n for n in _TWO if n not in ("divide", "pow")))
        if not is_plain or (dtype == np.bool_ and name in ("negate", "subtract", "sign", "abs", "relu")):
            continue
        check(op(name), *arrays, scale=10 if dtype == np.float16 and name in _COARSE else 1)


def test_shapes_and_packs() -> None:
    rng = np.random.default_rng(1)

    def array(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    check(lambda x, y: x + y, array(3, 4, 8), array(8))
    check(lambda x, y: x + y, array(3, 4, 8), array(3, 1, 1))
    check(lambda x, y: x + y, array(3, 5, 7), array(5, 1))
    check(lambda x, y: x * y, array(1, 1), array(1))
    check(lambda x: ops.exp(ops.transpose(x)), array(9, 5))
    check(lambda x: ops.exp(ops.slice_(x, (1, 2), (7, 9), (2, 3))), array(9, 10))
    check(lambda x: ops.slice_(x, (1,), (34,)) + 1.0, array(35))
    check(lambda x: ops.reshape(ops.transpose(x, (2, 0, 1)), (6, 20)), array(4, 6, 5))
    check(lambda x: ops.broadcast(x, (4, 3, 5)) * 2.0, array(3, 1))
    check(lambda x: x + 1.0, array(0, 3))
    check(lambda x: x + 1.0, array(1000, 33))


def test_fused() -> None:
    rng = np.random.default_rng(2)
    x, y = (rng.standard_normal((6, 12)).astype(np.float32) for _ in range(2))

    def several(a: Value, b: Value) -> list[Value]:
        c = ops.relu(a * 2.0 + b)
        return [c, ops.tanh(c) * ops.transpose(ops.transpose(b))]

    check(several, x, y, fuses=True)
    _, _, executable = run(several, (x, y), fuses=True)
    assert list(executable.kernels.values()) == ["fused elementwise (5 ops)"]


def test_quotients() -> None:
    for number in (1, 2, 3, 5, 7, 60, 64, 641, 6700417, 2**31 - 2**16 - 1):
        d, multiplier, shift = (int(word) for word in divisor(number).item())
        for n in (0, 1, number - 1, number, number + 1, 123456789, 2**31 - 1):
            assert ((n * multiplier >> 32) + n) >> shift == n // d


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_copies(dtype: np.dtype) -> None:
    a, b = numbers(dtype, (2, 3, 4), 1), numbers(dtype, (2, 5, 4), 2)
    check(lambda x, y: ops.concatenate([x, y], 1), a, b)
    check(lambda x, y: ops.concatenate([ops.transpose(x), ops.transpose(y)], 2), a, b)
    check(op("pad", before=(1, 0, 2), after=(0, 3, 1), value=1.0), a)
    check(op("pad", before=(0, 0, 0), after=(0, 0, 0), value=0.0), a)
    check(lambda x: ops.pad(ops.transpose(x), (0, 1, 2), (1, 1, 0), 0.0), a)
    for shape in ((33, 70), (64, 32), (5, 40, 33)):
        check(lambda x: ops.reshape(ops.transpose(x), (x.size,)), numbers(dtype, shape, 3))
    check(op("slice_gradient", shape=(4, 9, 4), start=(1, 1, 0), end=(3, 9, 4), stride=(1, 3, 1)), a)


def test_random_numbers_are_those_of_the_definition() -> None:
    key = np.array([1, 2, 3, 4], np.uint32)
    for shape in ((1,), (5, 3), (4, 64), (1001,)):
        found, expected, _ = run(op("random_uniform", shape=shape), [key])
        assert found[0].tobytes() == expected[0].tobytes()


def test_graphs_are_captured_once_and_again_for_other_memory() -> None:
    x = np.arange(8, dtype=np.float32)
    driver = engine().driver
    if not isinstance(driver, EmulatedDriver):
        pytest.skip("only the emulated driver counts")
    before = driver.captures
    _, _, executable = run(lambda v: v + 1.0, [x], times=4)
    assert driver.captures == before + 1
    value = next(step.inputs[0] for step in executable.program.steps)
    executable.bind(value, engine().upload(x * 2))
    completion = executable.run(("forward",))
    assert completion is not None
    completion.wait()
    assert completion.is_done()
    assert driver.captures == before + 2
    (kept,) = executable.program.kept
    np.testing.assert_array_equal(executable.read(kept), 2 * x + 1)
