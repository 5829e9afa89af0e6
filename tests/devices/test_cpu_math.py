"""The inlined functions of the CPU engine against float64, in units of the last place, over all of float32."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass

import llvmlite.binding as llvm
import numpy as np
import pytest

from mlcompute.devices.cpu.codegen import math as cpu_math
from mlcompute.devices.cpu.codegen.code import Code, vector, vector_lanes
from mlcompute.devices.cpu.jit import cache, emit
from mlcompute.devices.cpu.jit.cache import kernel_cache
from mlcompute.ops.op import Array

KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
LANES = vector_lanes()


def kernel(function: Callable[..., str], lanes: int, operands: int = 1) -> Code:
    """y[i] = function(x[i], ...), in whole vectors."""
    code, type_ = Code("kernel"), vector("float", lanes)
    *sources, target = [code.argument(number, "ptr") for number in range(operands + 1)]
    begin, end = code.share(code.argument(operands + 1), lanes)
    with code.loop(begin, end, lanes) as index:
        loaded = [code.load(code.at(source, index, "float"), type_) for source in sources]
        code.store(code.at(target, index, "float"), type_, function(code, *loaded, lanes))
    return code


def run(code: Code, *arrays: Array) -> Array:
    result = np.empty_like(arrays[0])
    assert result.dtype == np.float32
    assert result.size % LANES == 0
    words = np.array([*(array.ctypes.data for array in (*arrays, result)), result.size], np.int64)
    KERNEL(kernel_cache.addresses([code])[0])(0, 1, words.ctypes.data)
    return result


def ulps(found: Array, true: Array) -> Array:
    """|found - true| in units of the last place of `true`; infinite where one is NaN, or a zero has the other sign."""
    with np.errstate(all="ignore"):
        y, r = found.astype(np.float64), true
        # Beyond the largest float, infinity stands where the next number would.
        y, near = (np.where(np.isinf(a) | (np.abs(a) > 2.0**128), np.copysign(2.0**128, a), a) for a in (y, r))
        exponent = np.clip(np.floor(np.log2(np.abs(near))), -126, 127)
        distance = np.abs(y - near) * 2.0 ** (23 - exponent)
    distance[np.isnan(y) & np.isnan(r)] = 0
    wrong_zero = (y == 0) & (r == 0) & (np.signbit(y) != np.signbit(r))
    return np.where(np.isnan(distance) | wrong_zero, np.inf, distance)


def sigmoid(x: Array) -> Array:
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, 1.0) / (1.0 + e)


def softplus(x: Array) -> Array:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def erf(x: Array) -> Array:
    return np.asarray(np.frompyfunc(math.erf, 1, 1)(x)).astype(np.float64)


@dataclass
class Row:
    """The float64 function, the largest error allowed in ulp, and where the float32 one changes its ways."""

    reference: Callable[..., Array]
    limit: float
    switches: tuple[float, ...] = ()


LN2 = math.log(2.0)
_EXP_SWITCHES = (LN2 / 2, -LN2 / 2, 88.72284, 89.0, -87.33655, -103.27893, -103.97208, -104.0)
_LOG_SWITCHES = (math.sqrt(0.5), math.sqrt(2.0), 1.0, 2.0**-126, 2.0**-149)
_TURNS = (1e5, 131072.0, *(k * math.pi / 4 for k in (1, 2, 3, 4, 5, 6, 8, 11, 100, 355, 1000, 63661, 166885)))

ROWS = {
    "exp": Row(np.exp, 1.1, _EXP_SWITCHES),
    "exp2": Row(np.exp2, 1.1, (0.5, -0.5, 1.5, 127.5, 128.0, -126.0, -149.0, -150.0, -151.0, 129.0)),
    "expm1": Row(np.expm1, 1.6, (*_EXP_SWITCHES, 2.0**-60, -(2.0**-60), -17.3, -20.0)),
    "sigmoid": Row(sigmoid, 2.6, (*_EXP_SWITCHES, 104.0)),
    "softplus": Row(softplus, 2.0, (*_EXP_SWITCHES, 0.88137, -0.88137)),
    "tanh": Row(np.tanh, 2.8, (LN2 / 4, -LN2 / 4, 9.01, 9.02, 10.0, -10.0)),
    "erf": Row(erf, 3.9, (0.5, 1.0, 3.83, 3.92, 3.93, -3.93)),
    "log": Row(np.log, 1.0, _LOG_SWITCHES),
    "log2": Row(np.log2, 2.0, _LOG_SWITCHES),
    "log1p": Row(np.log1p, 1.6, (math.sqrt(0.5) - 1, math.sqrt(2) - 1, -1.0, 2.0**24, 2.0**100, 2.0**126, 2.0**127)),
    "sinh": Row(np.sinh, 1.8, (1.0, -1.0, 88.72284, 89.41599, 91.0, -91.0)),
    "cosh": Row(np.cosh, 1.8, (1.0, 88.72284, 89.41599, -89.41599, 91.0)),
    "asinh": Row(np.arcsinh, 2.4, (2.0**40, -(2.0**40), 1.0, 1.8e19)),
    "acosh": Row(np.arccosh, 2.7, (1.0, 2.0, 2.0**40, 1.8e19, -1.0, -(2.0**40))),
    "atanh": Row(np.arctanh, 2.7, (1.0, -1.0, 0.5, 0.17157)),
    "sin": Row(np.sin, 1.6, _TURNS),
    "cos": Row(np.cos, 1.6, _TURNS),
    "tan": Row(np.tan, 3.5, _TURNS),
    "asin": Row(np.arcsin, 2.5, (0.5, -0.5, 1.0, -1.0)),
    "acos": Row(np.arccos, 1.4, (0.5, -0.5, 1.0, -1.0)),
    "atan": Row(np.arctan, 2.4, (0.41421356, 2.4142137, -0.41421356, -2.4142137, 1.0)),
    "sqrt": Row(np.sqrt, 0.5),
    "rsqrt": Row(lambda x: 1 / np.sqrt(x), 1.5),
}  # fmt: skip

SPECIAL = [
    0.0,
    1e-45,
    1e-40,
    2.0**-126,
    1e-20,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    10.0,
    100.0,
    1e4,
    1e10,
    1e20,
    2.0**127,
    math.inf,
]
SPECIAL = np.array([*SPECIAL, np.finfo(np.float32).max, math.nan], np.float32)
SPECIAL = np.concatenate([SPECIAL, -SPECIAL])


def around(point: float, count: int = 2000) -> Array:
    """The floats next to a number, on both sides."""
    bits = np.float32(point).view(np.int32) + np.arange(-count, count, dtype=np.int64)
    return np.clip(bits, -(2**31), 2**31 - 1).astype(np.int32).view(np.float32)


def samples(switches: tuple[float, ...]) -> Array:
    """Random bit patterns, every exponent, the special numbers, a dense stretch of [-10, 10], and the switches."""
    rng = np.random.default_rng(7)
    fractions = np.array([0, 1, 2, 0x3504F3, 0x3504F4, 0x400000, 0x7FFFFE, 0x7FFFFF, *rng.integers(0, 1 << 23, 24)])
    exponents = np.arange(512)[:, None] << 23
    parts = [
        rng.integers(0, 1 << 32, 100_000, np.uint32).view(np.float32),
        (exponents | fractions).astype(np.uint32).view(np.float32).ravel(),
        SPECIAL,
        np.linspace(-10, 10, 40_001, dtype=np.float32),
        np.linspace(-120, 120, 40_001, dtype=np.float32),
        rng.uniform(-1e5, 1e5, 40_000).astype(np.float32),
        np.arange(-300, 300, dtype=np.int32).astype(np.float32) * np.float32(1e-45),
        np.geomspace(1e-9, 1, 20_000, dtype=np.float32),
        -np.geomspace(1e-9, 1, 20_000, dtype=np.float32),
        *(around(point) for point in switches),
    ]
    x = np.concatenate(parts)
    return np.resize(x, -(-x.size // LANES) * LANES)


@pytest.mark.parametrize("name", ROWS)
def test_errors_in_ulp(name: str) -> None:
    row, function = ROWS[name], getattr(cpu_math, name)
    x = samples(row.switches)
    wide, single = (run(kernel(function, lanes), x) for lanes in (LANES, 1))
    np.testing.assert_array_equal(wide, single, err_msg="vectors and single lanes differ")
    with np.errstate(all="ignore"):
        true = row.reference(x.astype(np.float64))
    error = ulps(wide, true)
    worst = int(error.argmax())
    assert error[worst] <= row.limit, (
        f"max ulp {error[worst]:.3f}: {name}({x[worst]!r}) = {wide[worst]!r}, not {true[worst]!r}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exp", "log", "tanh", "sigmoid", "erf", "sqrt", "rsqrt"])
def test_errors_in_ulp_over_all_of_float32(name: str) -> None:
    """Every 61st bit pattern, from zero over subnormals and infinities to NaN, of both signs."""
    row, code = ROWS[name], kernel(getattr(cpu_math, name), LANES)
    for first in range(0, 1 << 32, 61 * 2**20):
        x = np.arange(first, min(first + 61 * 2**20, 1 << 32), 61, np.uint64).astype(np.uint32).view(np.float32)
        x = np.resize(x, -(-x.size // LANES) * LANES)
        with np.errstate(all="ignore"):
            error = ulps(run(code, x), row.reference(x.astype(np.float64)))
        worst = int(error.argmax())
        assert error[worst] <= row.limit, f"{name}({x[worst]!r}): {error[worst]:.3f} ulp"


@pytest.mark.parametrize(("name", "least"), [("tanh", -1.0), ("erf", -1.0), ("sigmoid", 0.0)])
def test_bounded_functions_reach_their_bounds_and_stay_within(name: str, least: float) -> None:
    x = np.linspace(-120, 120, 1 << 20, dtype=np.float32)
    y = run(kernel(getattr(cpu_math, name), LANES), x)
    assert (y.min(), y.max()) == (least, 1.0)


@pytest.mark.parametrize("name", ["tanh", "erf", "sin", "tan", "asin", "atan", "sinh", "asinh", "atanh"])
def test_odd_functions_are_odd_bit_by_bit(name: str) -> None:
    x = samples(())
    code = kernel(getattr(cpu_math, name), LANES)
    np.testing.assert_array_equal(run(code, -x), -run(code, x))


# Powers -------------------------------------------------------------------------------------------------------


def power_samples() -> tuple[Array, Array]:
    rng = np.random.default_rng(3)
    numbers = np.concatenate(
        [SPECIAL, np.float32([-3, -2, 4, 5, 7, -0.5, 0.25, 1 / 3, 16777216, 16777217, 33554433, -1.5])]
    )
    near_one = (1 + rng.normal(size=40_000) * 1e-3).astype(np.float32)
    pairs = [
        tuple(array.ravel() for array in np.meshgrid(numbers, numbers)),
        (rng.integers(0, 1 << 32, 100_000, np.uint32).view(np.float32), rng.normal(size=100_000) * 3),
        (rng.integers(0, 1 << 32, 50_000, np.uint32).view(np.float32),) * 2,
        (near_one, rng.normal(size=40_000) * 1e5),
        (rng.uniform(0, 4, 40_000), rng.uniform(-60, 60, 40_000)),
        (-rng.uniform(0, 4, 40_000), rng.integers(-40, 40, 40_000)),
    ]
    x, y = (np.concatenate([np.asarray(pair[side], np.float32) for pair in pairs]) for side in (0, 1))
    size = -(-x.size // LANES) * LANES
    return np.resize(x, size), np.resize(y, size)


def test_powers() -> None:
    x, y = power_samples()
    wide, single = (run(kernel(cpu_math.pow, lanes, 2), x, y) for lanes in (LANES, 1))
    np.testing.assert_array_equal(wide, single)
    with np.errstate(all="ignore"):
        true = np.power(x.astype(np.float64), y.astype(np.float64))
    error = ulps(wide, true)
    worst = int(error.argmax())
    assert error[worst] <= 0.51, (
        f"max ulp {error[worst]:.3f}: {x[worst]!r} ** {y[worst]!r} = {wide[worst]!r}, not {true[worst]!r}"
    )


# Code ---------------------------------------------------------------------------------------------------------


def assembly(code: Code, cpu: str = "") -> str:
    """What the processor runs; `cpu` names another one than this machine's."""
    machine = emit.target_machine()
    if cpu:
        machine = llvm.Target.from_default_triple().create_target_machine(cpu=cpu, opt=3)
    module = llvm.parse_assembly(cache._module(code)[1])
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    return str(machine.emit_assembly(module))


HOT = ["exp", "exp2", "expm1", "log", "log1p", "tanh", "sigmoid", "softplus", "erf", "rsqrt"]


@pytest.mark.parametrize("name", HOT)
@pytest.mark.parametrize("lanes", [1, LANES])
def test_hot_functions_call_nothing(name: str, lanes: int) -> None:
    assert "call" not in assembly(kernel(getattr(cpu_math, name), lanes))


@pytest.mark.parametrize("name", HOT)
@pytest.mark.parametrize(("cpu", "lanes", "register"), [("x86-64-v3", 8, "%ymm"), ("x86-64-v4", 16, "%zmm")])
def test_hot_functions_are_vectors_throughout(
    name: str, cpu: str, lanes: int, register: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop of the kernel has no call, no jump but its own and no arithmetic on single numbers."""
    if "sse2" not in llvm.get_host_cpu_features():
        pytest.skip("asks about x86 code")
    monkeypatch.setattr(cpu_math, "vector_lanes", lambda: lanes)
    text = assembly(kernel(getattr(cpu_math, name), lanes), cpu)
    labels, lines = {}, text.splitlines()
    for number, line in enumerate(lines):
        if line.startswith(".L") and ":" in line:
            labels[line.split(":")[0]] = number
    jumps = [(number, words[1]) for number, line in enumerate(lines) if len(words := line.split()) == 2]
    bodies = [lines[labels[target] : number] for number, target in jumps if labels.get(target, number) < number]
    assert len(bodies) == 1, text
    operations = [line.split()[0] for line in bodies[0] if line.startswith("\t")]
    operations = [name for name in operations if name != "vbroadcastss"]  # of constants
    assert not [name for name in operations if name.startswith(("call", "j")) or name.endswith("ss")], operations
    assert any(register in line for line in bodies[0])


@pytest.mark.parametrize("name", ["exp", "exp2", "sigmoid", "softplus", "sinh", "cosh"])
def test_machines_with_and_without_a_scaling_instruction_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = samples(ROWS[name].switches)
    function = getattr(cpu_math, name)
    own = run(kernel(function, LANES), x)
    monkeypatch.setattr(cpu_math, "vector_lanes", lambda: 8)
    for lanes in (1, LANES):
        np.testing.assert_array_equal(run(kernel(function, lanes), x), own)
