"""CTC kernels of the CPU and CUDA engines, against the op's NumPy meaning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.devices.cpu.kernels.ctc import KERNELS, WORKSPACES
from mlcompute.ops import emit_all, transpose
from mlcompute.ops.op import TABLE, Array, Value
from tests.devices.cuda_ops import emulated, gpu, run_on
from tests.devices.kernels import Bench, run_on_engine
from tests.harness import assert_close

#: samples, times, classes, labels
SIZES = [(1, 1, 2, 1), (5, 9, 6, 4), (3, 60, 30, 20), (4, 12, 3, 0)]


def inputs_of(n: int, steps: int, classes: int, longest: int, blank: int) -> list[Array]:
    rng = np.random.default_rng([n, steps, classes])
    x = rng.standard_normal((n, steps, classes))
    x = (x - np.log(np.exp(x).sum(axis=2, keepdims=True))).astype("f")
    targets = rng.integers(0, classes - 1, (n, longest)).astype(np.int32)
    targets += targets >= blank
    target_lengths = rng.integers(0, longest + 1, n).astype(np.int32)
    targets[np.arange(longest) >= target_lengths[:, None]] = -7  # must not be read
    return [x, targets, rng.integers(1, steps + 1, n).astype(np.int32), target_lengths]


def described(attributes: dict[str, Any]) -> Any:
    return lambda *values: emit_all("ctc_loss", *values, **attributes)


def close(found: Array, expected: Array) -> None:
    # Sums of many logarithms before an exponential.
    assert_close(found, expected, 32)


@pytest.mark.parametrize("blank", [0, 1])
@pytest.mark.parametrize("sizes", SIZES)
def test_on_the_cpu(sizes: Any, blank: int) -> None:
    arrays = inputs_of(*sizes, blank)
    for zero_infinity in (False, True):
        attributes = {"blank": blank, "zero_infinity": zero_infinity}
        Bench(KERNELS, "ctc_loss", arrays, attributes, workspaces=WORKSPACES).check(close)


def test_views_and_threads_on_the_cpu() -> None:
    attributes = {"blank": 0, "zero_infinity": True}
    arrays = inputs_of(7, 20, 5, 6, 0)
    stored = [np.ascontiguousarray(arrays[0].transpose(1, 2, 0)), *arrays[1:]]

    def step(x: Value, *more: Value) -> list[Value]:
        return list(emit_all("ctc_loss", transpose(x, (2, 0, 1)), *more, **attributes))

    first, *others = [run_on_engine(step, stored, threads) for threads in (1, 2, 5)]
    for found, expected in zip(first, TABLE["ctc_loss"].meaning(*arrays, **attributes), strict=True):
        close(found, expected)
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert a.tobytes() == b.tobytes()


def check(engine: Any, sizes: Any, attributes: dict[str, Any]) -> None:
    arrays = inputs_of(*sizes, attributes["blank"])
    found, kernels = run_on(engine, described(attributes), arrays, times=2)
    assert "ctc loss" in str(kernels)
    check_long(found, arrays, attributes)


def check_long(found: Sequence[Array], arrays: list[Array], attributes: dict[str, Any]) -> None:
    """Against float64.

    Every time rounds a sum of logarithms as large as the loss, to either side: after t times they are about
    eps · loss · √t away, and so is the exponential of alpha + beta - total, relative to its value of at most 1.
    """
    log_probabilities, *integers = arrays
    exact = TABLE["ctc_loss"].meaning(log_probabilities.astype(np.float64), *integers, **attributes)
    largest = np.abs(exact[0][np.isfinite(exact[0])]).max(initial=1.0)
    tolerance = np.finfo(np.float32).eps * largest * np.sqrt(log_probabilities.shape[1])
    for a, b in zip(found, exact, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=max(2e-5, tolerance))


def test_long_sequences_on_the_cpu() -> None:
    attributes = {"blank": 0, "zero_infinity": True}
    arrays = inputs_of(3, 900, 20, 300, 0)
    check_long(run_on_engine(described(attributes), arrays, 2), arrays, attributes)


@pytest.mark.parametrize("sizes", SIZES[:3])
def test_emulated(sizes: Any) -> None:
    check(emulated(), sizes, {"blank": 0, "zero_infinity": True})
    check(emulated(), sizes, {"blank": 1, "zero_infinity": False})


@pytest.mark.parametrize("sizes", [*SIZES, (32, 200, 80, 40), (3, 900, 20, 300)])
def test_on_a_gpu(sizes: Any) -> None:
    check(gpu(), sizes, {"blank": 0, "zero_infinity": True})


@pytest.mark.parametrize(("index", "number"), [(1, 6), (2, 10), (3, 5)])
def test_what_is_out_of_range_is_refused(index: int, number: int) -> None:
    attributes = {"blank": 0, "zero_infinity": False}
    arrays = inputs_of(5, 9, 6, 4, 0)
    arrays[1][:], arrays[2][:], arrays[3][:] = 1, 9, 4
    arrays[index][2] = number
    with pytest.raises(mlc.ExecutionError, match="CTC loss"):
        run_on_engine(described(attributes), arrays, 2)
    with pytest.raises(mlc.ExecutionError, match="CTC loss"):
        run_on(emulated(), described(attributes), arrays)
