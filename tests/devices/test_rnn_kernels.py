"""rnn kernels (GRU and simple recurrent layers) of the CPU and CUDA engines, against the op's NumPy meaning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.devices.cpu.kernels.recurrent import KERNELS, WORKSPACES
from mlcompute.devices.cuda.kernels import recurrent
from mlcompute.errors import ExecutionError
from mlcompute.ops import emit_all, transpose
from mlcompute.ops.op import Array, Value
from mlcompute.ops.rnn import CELLS
from tests.devices.cuda_ops import emulated, gpu, multiplied, run_on
from tests.devices.interpreted_libraries import InterpretedCuda, interpreted
from tests.devices.kernels import Bench, meaning, run_on_engine
from tests.harness import assert_close

__all__ = ["interpreted"]  # a fixture

Attributes = dict[str, Any]
SOME = pytest.mark.parametrize(
    ("cell", "reverse", "has_lengths"),
    [("gru", False, False), ("gru", True, True), ("tanh", True, True), ("relu", False, False)],
)
WAYS = [(False, False), (False, True), (True, False), (True, True)]


def inputs_of(cell: str, n: int, steps: int, inputs: int, hidden: int, has_lengths: bool) -> list[Array]:
    """x, wx, wh, b, h0 and lengths; what lies beyond a length is NaN, for nobody may read it."""
    rng, c = np.random.default_rng([n, steps, inputs, hidden]), CELLS[cell]
    widths = (c.input_gates * hidden, c.hidden_gates * hidden, c.gates * hidden)
    shapes = [(n, steps, inputs), (widths[0], inputs), (widths[1], hidden), (widths[2],), (n, hidden)]
    arrays: list[Array] = [rng.standard_normal(shape).astype("f") for shape in shapes]
    arrays[1] /= np.sqrt(np.float32(inputs))
    arrays[2] *= np.float32(0.5) / np.sqrt(np.float32(hidden))
    if has_lengths:
        lengths = rng.integers(1, steps + 1, n).astype(np.int32)
        for sample, length in enumerate(lengths):
            arrays[0][sample, length:] = np.nan
        arrays.append(lengths)
    return arrays


def gradient_inputs(arrays: list[Array], attributes: Attributes) -> list[Array]:
    y, h, gates = meaning("rnn", *arrays, **attributes)
    rng = np.random.default_rng(1)
    given = [rng.standard_normal(value.shape).astype("f") for value in (y, h)]
    x, wx, wh, _, h0, *lengths = arrays
    return [*given, x, wx, wh, h0, y, gates, *lengths]


def attributes_of(cell: str, reverse: bool, has_lengths: bool) -> Attributes:
    return {"cell": cell, "reverse": reverse, "has_lengths": has_lengths}


def bench(name: str, arrays: list[Array], attributes: Attributes, views: Any = None) -> Bench:
    return Bench(KERNELS, name, arrays, attributes, views=views, workspaces=WORKSPACES)


def close(scale: float) -> Any:
    return lambda found, expected: assert_close(found, expected, scale)


@pytest.mark.parametrize("sizes", [(3, 5, 7, 9), (17, 4, 33, 17)])
@SOME
def test_forward_and_back_on_the_cpu(cell: str, sizes: Any, reverse: bool, has_lengths: bool) -> None:
    attributes = attributes_of(cell, reverse, has_lengths)
    arrays = inputs_of(cell, *sizes, has_lengths)
    bench("rnn", arrays, attributes).check(close(4))
    # Sums over samples, times and gates.
    bench("rnn_gradient", gradient_inputs(arrays, attributes), attributes).check(close(8))


def test_inputs_may_be_views_on_the_cpu() -> None:
    """Times before samples, turned weights."""
    attributes = attributes_of("gru", True, False)
    arrays = inputs_of("gru", 5, 7, 6, 20, False)
    stored = [
        np.ascontiguousarray(array) for array in (arrays[0].swapaxes(0, 1), arrays[1].T, arrays[2].T, *arrays[3:])
    ]

    def shown(x: Value, wx: Value, wh: Value, *more: Value) -> list[Value]:
        return [transpose(x, (1, 0, 2)), transpose(wx), transpose(wh), *more]

    found = bench("rnn", stored, attributes, shown).check(close(4))
    for a, b in zip(found, bench("rnn", arrays, attributes).run(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("cell", ["gru", "tanh"])
def test_threads_give_the_same_bits_on_the_cpu(cell: str) -> None:
    attributes = attributes_of(cell, False, True)
    arrays = inputs_of(cell, 16, 12, 40, 64, True)

    def step(*values: Value) -> list[Value]:
        y, h, gates = emit_all("rnn", *values, **attributes)
        x, wx, wh, _, h0, *lengths = values
        return [y, h, *emit_all("rnn_gradient", y, h, x, wx, wh, h0, y, gates, *lengths, **attributes)]

    first, *others = [run_on_engine(step, arrays, threads) for threads in (1, 2, 5)]
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert a.tobytes() == b.tobytes()


def test_lengths_outside_the_sequence_are_refused() -> None:
    attributes = attributes_of("gru", False, True)
    arrays = inputs_of("gru", 3, 7, 2, 4, True)
    arrays[-1] = np.array([1, 8, 7], np.int32)
    with pytest.raises(ExecutionError, match="do not fit 7 time steps"):
        run_on_engine(lambda *values: emit_all("rnn", *values, **attributes)[:1], arrays, 2)
    with pytest.raises(mlc.ExecutionError, match="every length from 1 to 7"):
        run_on(emulated(), lambda *values: emit_all("rnn", *values, **attributes), arrays)


def check(engine: Any, size: Any, attributes: Attributes, scale: float = 4.0) -> str:
    arrays = inputs_of(attributes["cell"], *size, attributes["has_lengths"])
    found, kernels = run_on(engine, lambda *values: emit_all("rnn", *values, **attributes), arrays, times=2)
    for a, b in zip(found, meaning("rnn", *arrays, **attributes), strict=True):
        assert_close(a, b, scale=scale)
    arrays = gradient_inputs(arrays, attributes)
    found, more = run_on(engine, lambda *values: emit_all("rnn_gradient", *values, **attributes), arrays, times=2)
    names = ("dx", "dwx", "dwh", "db", "dh0")
    for name, a, b in zip(names, found, meaning("rnn_gradient", *arrays, **attributes), strict=True):
        assert_close(a, b, scale=scale, what=name)
    return f"{kernels}, {more}"


@pytest.mark.parametrize("size", [(3, 4, 5, 6), (7, 2, 3, 33)])
@SOME
def test_all_times_in_one_kernel(cell: str, size: Any, reverse: bool, has_lengths: bool) -> None:
    assert f"{cell} recurrence" in check(emulated(), size, attributes_of(cell, reverse, has_lengths))


@SOME
def test_time_by_time(cell: str, reverse: bool, has_lengths: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "MOST_HIDDEN", 0)
    assert f"{cell} cell" in check(emulated(), (3, 4, 5, 6), attributes_of(cell, reverse, has_lengths))


@pytest.mark.parametrize("most", [256, 0], ids=["one kernel", "time by time"])
def test_products_by_the_library(most: int, interpreted: InterpretedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "MOST_HIDDEN", most)
    assert "cuBLASLt" in check(interpreted, (7, 3, 5, 6), attributes_of("gru", True, True))


@pytest.mark.parametrize("size", [(32, 50, 64, 128), (300, 7, 20, 96), (40, 9, 100, 256), (9, 5, 50, 300)])
@pytest.mark.parametrize("cell", CELLS)
def test_on_a_gpu(cell: str, size: Any) -> None:
    engine = gpu()
    with multiplied("highest"):
        for reverse, has_lengths in WAYS:
            check(engine, size, attributes_of(cell, reverse, has_lengths), scale=16.0)
