"""Device.cpu(precision="bf16"): kernels read and store bfloat16, compute in float32, and agree with NumPy."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import partialmethod
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.devices.cpu.device import Cpu
from mlcompute.devices.reference import Reference
from mlcompute.ops.bfloat16 import bfloat16
from mlcompute.ops.op import FLOAT32, Array, Trace, Value, emit_all
from tests.cases.case import Case
from tests.devices import cuda_cases
from tests.devices.kernels import run_on_engine
from tests.harness import assert_close, interpret
from tests.test_bfloat16 import NETWORKS, ROUNDING, Network, Trained
from tests.test_layers import CASES


@functools.cache
def engine(threads: int = 2) -> Cpu:
    return Cpu(threads)


def narrow(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(bfloat16())


def check(fn: Any, *arrays: Array, scale: float = 1.0) -> list[Array]:
    """The engine agrees with NumPy, bit for bit with any number of threads."""

    def described(*values: Value) -> Sequence[Value]:
        answer = fn(*values)
        return [answer] if isinstance(answer, Value) else list(answer)

    trace = Trace()
    inputs = [trace.value(array.shape, array.dtype, "input") for array in arrays]
    results = described(*inputs)
    memory = interpret(trace, dict(zip(inputs, arrays, strict=True)))
    found = run_on_engine(described, arrays, 1, times=1)
    for number, (array, value) in enumerate(zip(found, results, strict=True)):
        assert array.dtype == memory[value].dtype
        assert_close(array, memory[value], scale, f"result {number}")
    for threads in (2, 4):
        for one, other in zip(found, run_on_engine(described, arrays, threads, times=1), strict=True):
            assert one.tobytes() == other.tobytes(), f"{threads} threads"
    return found


def op(name: str, **attributes: Any) -> Any:
    return lambda *values: emit_all(name, *values, **attributes)


def test_conversions_are_those_of_numpy() -> None:
    edges = np.float32([0.0, -0.0, 1.0, 1.00390625, 1.01171875, np.inf, -np.inf, np.nan, 3.4e38, 1e-40, -1e-45])
    (found,) = check(op("convert", to=bfloat16()), np.tile(edges, 3))
    expected = np.tile(edges, 3).astype(bfloat16())
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))
    np.testing.assert_array_equal(np.signbit(found.astype(np.float32)), np.signbit(expected.astype(np.float32)))
    bits = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32).view(np.float32)
    (found,) = check(op("convert", to=bfloat16()), bits)
    finite = np.isfinite(bits)
    assert (found[finite].view(np.uint16) == bits[finite].astype(bfloat16()).view(np.uint16)).all()
    for to in (FLOAT32, np.dtype(np.int32), np.dtype(np.bool_), np.dtype(np.float64)):
        check(op("convert", to=to), narrow(5, 7))
    check(op("convert", to=bfloat16()), np.arange(-4, 9, dtype=np.int32))


@pytest.mark.parametrize("network", NETWORKS)
def test_networks_train_as_on_the_reference(network: Network) -> None:
    expected = Trained(network, mlc.Device(engine=Reference(), precision="bf16"))
    found = [Trained(network, mlc.Device(engine=engine(threads), precision="bf16")) for threads in (1, 2, 4)]
    assert found[0].loss == pytest.approx(expected.loss, rel=8 * ROUNDING)
    for one, other in zip(found[0].weights, expected.weights, strict=True):
        np.testing.assert_allclose(one, other, atol=8 * ROUNDING * max(0.1, float(np.abs(other).max())))
    for more in found[1:]:
        for one, other in zip(more.weights, found[0].weights, strict=True):
            assert one.tobytes() == other.tobytes(), "threads change the numbers"


def check_case(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the reference gives with the same precision, up to a few roundings; a full step gives what passes give."""
    monkeypatch.setattr(mlc.Device, "__init__", partialmethod(mlc.Device.__init__, precision="bf16"))
    expected, found = cuda_cases.split(case, Reference()), cuda_cases.split(case, engine())
    for name, array in expected.items():
        other = found[name]
        assert (array is None) == (other is None), name
        if array is not None and other is not None:
            assert (other.dtype, other.shape) == (array.dtype, array.shape), name
            if array.dtype.kind != "f":
                continue
            size = max(1.0, float(np.abs(array[np.isfinite(array)]).max(initial=0.0)))
            limit = 4 * ROUNDING * size * case.scale
            np.testing.assert_allclose(other, array, atol=limit, rtol=4 * ROUNDING, err_msg=name)
    if case.training is not False:
        cuda_cases.check_fused(case, engine(), times=1)


@pytest.mark.parametrize("case", CASES[::61])
def test_layers(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(case, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_all_layers(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(case, monkeypatch)
