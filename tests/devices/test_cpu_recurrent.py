"""LSTM kernels against the op's meaning: sizes, directions, lengths, views, threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlcompute.devices.cpu.kernels import recurrent_sequences
from mlcompute.devices.cpu.kernels.recurrent import KERNELS, WORKSPACES
from mlcompute.devices.cpu.kernels.recurrent_sequences import Recurrence, slice_floats, weight_gradient_slices
from mlcompute.errors import ExecutionError
from mlcompute.ops import broadcast, emit_all, full, transpose
from mlcompute.ops.op import Array, Value
from tests.devices.kernels import Bench, meaning, run_on_engine
from tests.harness import assert_close

#: samples, times, inputs, hidden units
SIZES = [(1, 1, 1, 1), (3, 5, 7, 9), (2, 3, 16, 16), (17, 4, 33, 17), (9, 6, 5, 40), (4, 60, 20, 24), (32, 3, 64, 128)]
WAYS = [(False, False), (False, True), (True, False), (True, True)]


def inputs_of(n: int, steps: int, inputs: int, hidden: int, has_lengths: bool, seed: int = 0) -> list[Array]:
    """x, wx, wh, b, h0, c0 and lengths; what lies beyond a length is NaN, for nobody may read it."""
    rng = np.random.default_rng(seed)
    shapes = [(n, steps, inputs), (4 * hidden, inputs), (4 * hidden, hidden), (4 * hidden,), (n, hidden), (n, hidden)]
    arrays = [rng.standard_normal(shape).astype("f") for shape in shapes]
    arrays[1] /= np.sqrt(np.float32(inputs))
    arrays[2] /= np.sqrt(np.float32(hidden))
    if has_lengths:
        lengths = rng.integers(1, steps + 1, n).astype(np.int32)
        for sample, length in enumerate(lengths):
            arrays[0][sample, length:] = np.nan
        arrays.append(lengths)
    return arrays


def gradient_inputs(arrays: list[Array], attributes: dict[str, Any], seed: int = 1) -> list[Array]:
    """What the gradient of an lstm on these arrays is given."""
    y, h, c, gates, cells = meaning("lstm", *arrays, **attributes)
    rng = np.random.default_rng(seed)
    given = [rng.standard_normal(value.shape).astype("f") for value in (y, h, c)]
    x, wx, wh, _, h0, c0, *lengths = arrays
    return [*given, x, wx, wh, h0, c0, y, gates, cells, *lengths]


def bench(name: str, arrays: list[Array], attributes: dict[str, Any], views: Any = None) -> Bench:
    return Bench(KERNELS, name, arrays, attributes, views=views, workspaces=WORKSPACES)


def close(scale: float) -> Any:
    return lambda found, expected: assert_close(found, expected, scale)


@pytest.mark.parametrize(("reverse", "has_lengths"), WAYS)
@pytest.mark.parametrize("sizes", SIZES)
def test_forward_and_back(sizes: tuple[int, int, int, int], reverse: bool, has_lengths: bool) -> None:
    attributes = {"reverse": reverse, "has_lengths": has_lengths}
    arrays = inputs_of(*sizes, has_lengths)
    bench("lstm", arrays, attributes).check(close(4))
    # Sums over samples, times and gates.
    bench("lstm_gradient", gradient_inputs(arrays, attributes), attributes).check(close(8))


@pytest.mark.parametrize("cores", [1, 2, 3, 16])
@pytest.mark.parametrize(("reverse", "has_lengths"), WAYS)
def test_gradients_of_weights_are_summed_in_slices(
    cores: int, reverse: bool, has_lengths: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices follow from the cores and the layer: this one has few weights beside its samples and times."""
    monkeypatch.setattr(recurrent_sequences, "machine_slices", lambda: cores)
    attributes = {"reverse": reverse, "has_lengths": has_lengths}
    made = bench("lstm_gradient", gradient_inputs(inputs_of(9, 90, 5, 7, has_lengths), attributes), attributes)
    kernels = [entry.kernel for entry in made.entries or ()]
    slices = weight_gradient_slices(Recurrence.of(made.step))
    assert slices == {1: 1, 2: 2, 3: 2, 16: 4}[cores]
    assert ("lstm, sum of slices" in kernels) == (slices > 1)
    made.check(close(8))


def test_sums_of_slices_take_a_quarter_of_what_gradients_of_gates_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent_sequences, "machine_slices", lambda: 16)
    attributes = {"reverse": False, "has_lengths": False}
    for sizes, expected in [((32, 50, 64, 128), 2), ((32, 3, 64, 128), 1), ((1, 50, 4, 4), 1)]:
        made = bench("lstm_gradient", gradient_inputs(inputs_of(*sizes, False), attributes), attributes)
        r = Recurrence.of(made.step)
        slices = weight_gradient_slices(r)
        assert slices == expected
        assert (slices - 1) * slice_floats(r) <= r.samples * r.steps * r.gates / 4


@pytest.mark.parametrize(("reverse", "has_lengths"), WAYS)
def test_inputs_may_be_views(reverse: bool, has_lengths: bool) -> None:
    """Times before samples, turned weights, one number for all biases, states and gradients."""
    attributes = {"reverse": reverse, "has_lengths": has_lengths}
    n, steps, hidden = 5, 7, 20
    arrays = inputs_of(n, steps, 6, hidden, has_lengths)
    x, wx, wh, _, _, _, *lengths = arrays
    one, two = np.float32(0.25), np.float32(-0.5)
    h0, c0 = np.full((n, hidden), one), np.full((n, hidden), two)
    plain = [x, wx, wh, np.full(4 * hidden, one), h0, c0, *lengths]

    def of_lstm(x: Value, wx: Value, wh: Value, one: Value, two: Value, *lengths: Value) -> list[Value]:
        states = broadcast(one, (n, hidden)), broadcast(two, (n, hidden))
        return [transpose(x, (1, 0, 2)), transpose(wx), transpose(wh), broadcast(one, (4 * hidden,)), *states, *lengths]

    stored = [np.ascontiguousarray(x.swapaxes(0, 1)), np.ascontiguousarray(wx.T), np.ascontiguousarray(wh.T)]
    given = [*stored, np.full((), one), np.full((), two)]
    found = bench("lstm", [*given, *lengths], attributes, of_lstm).check(close(4))
    for a, b in zip(found, bench("lstm", plain, attributes).run(), strict=True):
        np.testing.assert_array_equal(a, b)

    def of_gradient(x: Value, wx: Value, wh: Value, one: Value, two: Value, dh: Value, *more: Value) -> list[Value]:
        x, wx, wh, _, h0, c0 = of_lstm(x, wx, wh, one, two)
        return [full(x, (n, steps, hidden), 1.5), transpose(dh), full(x, (n, hidden), 0.0), x, wx, wh, h0, c0, *more]

    _, dh, _, *_, y, gates, cells = gradient_inputs(plain[:6] + lengths, attributes)[:11]
    back = [*given, np.ascontiguousarray(dh.T), y, gates, cells, *lengths]
    bench("lstm_gradient", back, attributes, of_gradient).check(close(8))


def test_weight_gradients_of_long_sums() -> None:
    """Many samples and times, against the same sums in float64."""
    attributes = {"reverse": False, "has_lengths": False}
    arrays = gradient_inputs(inputs_of(64, 100, 3, 4, False), attributes)
    exact = meaning("lstm_gradient", *(array.astype(np.float64) for array in arrays), **attributes)
    for found, expected in zip(bench("lstm_gradient", arrays, attributes).run(2), exact, strict=True):
        assert_close(found, expected.astype("f"), 2)


@pytest.mark.parametrize("has_lengths", [False, True])
def test_on_the_engine_with_real_threads(has_lengths: bool) -> None:
    attributes = {"reverse": False, "has_lengths": has_lengths}
    arrays = inputs_of(16, 12, 40, 64, has_lengths)

    def step(*values: Value) -> list[Value]:
        y, h, c, gates, cells = emit_all("lstm", *values, **attributes)
        x, wx, wh, _, h0, c0, *lengths = values
        back = emit_all("lstm_gradient", y, h, c, x, wx, wh, h0, c0, y, gates, cells, *lengths, **attributes)
        return [y, h, c, *back]

    first, *others = [run_on_engine(step, arrays, threads) for threads in (1, 2, 5)]
    y, h, c, gates, cells = meaning("lstm", *arrays, **attributes)
    x, wx, wh, _, h0, c0, *lengths = arrays
    back = meaning("lstm_gradient", y, h, c, x, wx, wh, h0, c0, y, gates, cells, *lengths, **attributes)
    for found, expected in zip(first, [y, h, c, *back], strict=True):
        assert_close(found, expected, 8)
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("bad", [0, 8, -1])
def test_lengths_outside_the_sequence_are_refused(bad: int) -> None:
    attributes = {"reverse": False, "has_lengths": True}
    arrays = inputs_of(3, 7, 2, 4, True)
    arrays[-1] = np.array([1, bad, 7], np.int32)
    with pytest.raises(ExecutionError, match="do not fit 7 time steps"):
        run_on_engine(lambda *values: emit_all("lstm", *values, **attributes)[:1], arrays, 2)


def test_a_smaller_batch_runs_the_same_code() -> None:
    attributes = {"reverse": True, "has_lengths": True}
    texts = []
    for batch in (32, 1):
        arrays = inputs_of(batch, 4, 5, 6, True)
        entries = [
            *(bench("lstm", arrays, attributes).entries or []),
            *(bench("lstm_gradient", gradient_inputs(arrays, attributes), attributes).entries or []),
        ]
        texts.append([entry.code.text() for entry in entries])
    assert not set(texts[1]) - set(texts[0])  # of one sample there is no second slice to add
    assert len(texts[0]) == 7


def test_what_the_kernels_leave_to_numpy() -> None:
    attributes = {"reverse": False, "has_lengths": False}
    arrays = inputs_of(2, 3, 4, 5, False)
    doubles = [array.astype(np.float64) for array in arrays]
    assert bench("lstm", doubles, attributes).entries is None
    back = gradient_inputs(arrays, attributes)
    back[3] = np.ascontiguousarray(back[3].swapaxes(1, 2))

    def scattered(*values: Value) -> list[Value]:
        return [*values[:3], transpose(values[3], (0, 2, 1)), *values[4:]]

    assert bench("lstm_gradient", back, attributes, scattered).entries is None
