"""LSTM on the CUDA engine: against its NumPy meaning, emulated and on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute import ops
from mlcompute.devices.cuda.kernels import recurrent
from mlcompute.devices.cuda.kernels.lstm_source import Form
from mlcompute.devices.device import Engine
from mlcompute.ops.op import Array, Trace, Value
from tests.devices.cuda_ops import emulated, gpu, multiplied, run_on
from tests.devices.interpreted_libraries import InterpretedCuda, interpreted
from tests.harness import assert_close, forward

__all__ = ["interpreted"]  # a fixture

#: (samples, times, inputs, hidden)
SIZES = [(3, 4, 5, 6), (1, 1, 1, 1), (2, 3, 4, 7), (7, 2, 3, 9), (5, 3, 2, 33)]


def arrays_of(n: int, t: int, inputs: int, hidden: int, lengths: bool) -> list[Array]:
    rng = np.random.default_rng([n, t, inputs, hidden])
    shapes = [(n, t, inputs), (4 * hidden, inputs), (4 * hidden, hidden), (4 * hidden,), (n, hidden), (n, hidden)]
    arrays: list[Array] = [rng.uniform(-0.5, 0.5, shape).astype(np.float32) for shape in shapes]
    if lengths:
        arrays.append(rng.integers(1, t + 1, n).astype(np.int32))
        for sample, length in enumerate(arrays[-1]):
            arrays[0][sample, length:] = np.nan  # must not be read
    return arrays


def described(reverse: bool, has_lengths: bool) -> Any:
    def lstm(*values: Value) -> Any:
        return ops.emit_all("lstm", *values, reverse=reverse, has_lengths=has_lengths)

    return lstm


def gradient_arrays(arrays: list[Array], reverse: bool, has_lengths: bool) -> list[Array]:
    """The inputs of lstm_gradient for those of lstm."""
    x, wx, wh, _, h0, c0, *lengths = arrays
    y, last_h, last_c, gates, cells = forward(described(reverse, has_lengths), *arrays)
    rng = np.random.default_rng(5)
    dys = [rng.standard_normal(array.shape).astype(np.float32) for array in (y, last_h, last_c)]
    return [*dys, x, wx, wh, h0, c0, y, gates, cells, *lengths]


def described_gradient(reverse: bool, has_lengths: bool) -> Any:
    def gradient(*values: Value) -> Any:
        return ops.emit_all("lstm_gradient", *values, reverse=reverse, has_lengths=has_lengths)

    return gradient


def check(engine: Engine, size: tuple[int, int, int, int], reverse: bool, lengths: bool, scale: float = 4.0) -> str:
    arrays = arrays_of(*size, lengths)
    fn = described(reverse, lengths)
    found, kernels = run_on(engine, fn, arrays, times=2)
    for name, a, b in zip(("y", "h", "c", "gates", "cells"), found, forward(fn, *arrays), strict=True):
        assert_close(a, b, scale=scale, what=name)
    arrays = gradient_arrays(arrays, reverse, lengths)
    fn = described_gradient(reverse, lengths)
    found, more = run_on(engine, fn, arrays, times=2)
    for name, a, b in zip(("dx", "dwx", "dwh", "db", "dh0", "dc0"), found, forward(fn, *arrays), strict=True):
        assert_close(a, b, scale=scale, what=name)
    return f"{kernels}, {more}"


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_all_times_in_one_kernel(size: tuple[int, int, int, int], reverse: bool, lengths: bool) -> None:
    assert "lstm recurrence" in check(emulated(), size, reverse, lengths)


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("size", SIZES[:3])
def test_time_by_time(
    size: tuple[int, int, int, int], reverse: bool, lengths: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent, "MOST_HIDDEN", 0)
    assert "lstm gates" in check(emulated(), size, reverse, lengths)


@pytest.mark.parametrize("most", [256, 0], ids=["one kernel", "time by time"])
def test_products_by_the_library(most: int, interpreted: InterpretedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "MOST_HIDDEN", most)
    assert "cuBLASLt" in check(interpreted, (7, 3, 5, 6), True, True)


@pytest.mark.parametrize("shared_bytes", [0, 16 * 160 * 3])
def test_weights_in_registers_in_shared_memory_and_elsewhere(
    shared_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Form, "in_registers", 2)
    monkeypatch.setattr(recurrent, "_OTHER_SHARED", (227 << 10) - shared_bytes)
    check(emulated(), (3, 2, 3, 37), False, True)


@pytest.mark.parametrize("most", [256, 0], ids=["one kernel", "time by time"])
def test_views_are_read_in_place(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """x with its axes swapped, and states that are one number repeated."""
    monkeypatch.setattr(recurrent, "MOST_HIDDEN", most)
    n, t, inputs, hidden = 3, 4, 5, 6
    arrays = arrays_of(n, t, inputs, hidden, False)
    arrays[0] = np.ascontiguousarray(arrays[0].transpose(1, 0, 2))
    arrays[4], arrays[5] = np.full((1, 1), 0.25, np.float32), np.zeros((1, 1), np.float32)

    def fn(x: Value, wx: Value, wh: Value, b: Value, h0: Value, c0: Value) -> Any:
        shown = ops.transpose(x, (1, 0, 2)), wx, wh, b, ops.broadcast(h0, (n, hidden)), ops.broadcast(c0, (n, hidden))
        made = ops.emit_all("lstm", *shown, reverse=False, has_lengths=False)
        dy = ops.broadcast(h0, (n, t, hidden))
        states = shown[4], shown[5]
        given = (dy, *states, shown[0], wx, wh, *states, made[0], made[3], made[4])
        return [*made, *ops.emit_all("lstm_gradient", *given, reverse=False, has_lengths=False)]

    found, _ = run_on(emulated(), fn, arrays, times=1)
    for a, b in zip(found, forward(fn, *arrays), strict=True):
        assert_close(a, b, scale=4.0)


@pytest.mark.parametrize("most", [256, 0], ids=["one kernel", "time by time"])
def test_a_length_out_of_range_is_an_error(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "MOST_HIDDEN", most)
    arrays = arrays_of(3, 4, 5, 6, True)
    arrays[-1][1] = 5
    with pytest.raises(mlc.ExecutionError, match="every length from 1 to 4"):
        run_on(emulated(), described(False, True), arrays)


def test_other_types_are_left_to_the_expansion() -> None:
    trace = Trace()
    shapes = [(3, 4, 5), (24, 5), (24, 6), (24,), (3, 6), (3, 6)]
    values = [trace.value(shape, np.dtype(np.float16), "input") for shape in shapes]
    described(False, False)(*values)
    assert not emulated().supports(trace.steps[-1])


@pytest.mark.parametrize("size", [*SIZES, (32, 50, 64, 128), (300, 7, 20, 96), (40, 9, 100, 256), (9, 5, 50, 300)])
def test_lstm_on_a_gpu(size: tuple[int, int, int, int]) -> None:
    engine = gpu()
    with multiplied("highest"):
        for reverse in (False, True):
            for lengths in (False, True):
                check(engine, size, reverse, lengths, scale=16.0)
