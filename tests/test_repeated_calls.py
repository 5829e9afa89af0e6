"""The same `execute` again and again: what is remembered of the last call must never answer another one."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from tests.nets import MEAN, SYNC, Array, adam, assert_same, cpu, normal, tensor

ASYNC = mlc.ExecutionOptions.NONE
INFER = mlc.ExecutionOptions.FORWARD_FOR_INFERENCE | SYNC
W = normal(2, 3)


class Two:
    """y = (a - b) Wᵀ with a loss: two inputs of one shape, so that mistaking one for the other changes the numbers."""

    def __init__(self, loss: bool = True) -> None:
        self.a, self.b, self.t = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 2))
        self.w = tensor(W.copy())
        error = mlc.LossLayer.mean_squared_error(MEAN) if loss else None
        self.graph = mlc.TrainingGraph([], error, adam())
        difference = self.graph.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.SUBTRACT), sources=[self.a, self.b])
        sizes = mlc.ConvolutionDescriptor(input_feature_channel_count=3, output_feature_channel_count=2)
        self.y = self.graph.node(mlc.FullyConnectedLayer(self.w, None, sizes), source=difference)
        self.graph.add_inputs({"a": self.a, "b": self.b}, {"t": self.t} if loss else None)
        self.graph.add_outputs({"y": self.y})
        self.graph.compile(device=cpu())


def a_b_t(seed: int) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(seed)
    a, b, t = (rng.standard_normal(shape).astype(np.float32) for shape in ((4, 3), (4, 3), (4, 2)))
    return a, b, t


def loss_of(run: mlc.Execution) -> float:
    assert run.result is not None
    assert run.result.data is not None
    return float(run.result.data[0])


def expected(a: Array, b: Array, t: Array) -> float:
    return float(np.mean(((a - b) @ W.T - t) ** 2))


@pytest.fixture
def warm() -> Two:
    """The same call has been made twice."""
    net = Two()
    for seed in (1, 2):
        a, b, t = a_b_t(seed)
        net.graph.execute({"a": a, "b": b}, {"t": t}, options=INFER)
    return net


@pytest.mark.parametrize("options", [INFER, mlc.ExecutionOptions.FORWARD_FOR_INFERENCE])
def test_other_arrays_in_another_order(warm: Two, options: mlc.ExecutionOptions) -> None:
    for seed in (3, 4, 5):
        a, b, t = a_b_t(seed)
        run = warm.graph.execute({"b": b, "a": a}, {"t": t}, options=options)
        assert loss_of(run) == pytest.approx(expected(a, b, t), rel=1e-5)


@pytest.mark.parametrize("form", [lambda a: a.astype(np.float64), np.ndarray.tolist, np.asfortranarray, lambda a: a[:]])
def test_data_that_must_be_converted(warm: Two, form: Any) -> None:
    a, b, t = a_b_t(6)
    run = warm.graph.execute({"a": form(a), "b": form(b)}, {"t": form(t)}, options=INFER)
    assert loss_of(run) == pytest.approx(expected(a, b, t), rel=1e-5)


@pytest.mark.parametrize("given", [{}, {"a": 0}, {"a": 0, "b": 0, "c": 0}, {"a": 0, "c": 0}])
def test_other_names_are_looked_at(warm: Two, given: dict[str, int]) -> None:
    a, _, t = a_b_t(7)
    with pytest.raises(mlc.DataError, match=r"'[bc]' (was not given|is not a declared name)|'a' was not given"):
        warm.graph.execute(dict.fromkeys(given, a), {"t": t}, options=INFER)


def test_another_shape_is_refused_by_name(warm: Two) -> None:
    a, b, t = a_b_t(8)
    with pytest.raises(mlc.DataError, match=r"TrainingGraph\.execute: 'b'"):
        warm.graph.execute({"a": a, "b": b[:, :2].copy()}, {"t": t}, options=INFER)


def test_labels_come_and_go(warm: Two) -> None:
    a, b, t = a_b_t(9)
    for _ in range(2):
        predictions = warm.graph.execute({"a": a, "b": b}, options=INFER).result
        assert predictions is not None
        assert predictions.descriptor.shape == (4, 2)
        assert loss_of(warm.graph.execute({"a": a, "b": b}, {"t": t}, options=INFER)) == pytest.approx(
            expected(a, b, t), rel=1e-5
        )


def test_another_batch_size_and_back(warm: Two) -> None:
    a, b, t = a_b_t(10)
    for rows in (4, 2, 2, 4, 3, 4):
        run = warm.graph.execute({"a": a[:rows], "b": b[:rows]}, {"t": t[:rows]}, batch_size=rows % 4, options=INFER)
        assert loss_of(run) == pytest.approx(expected(a[:rows], b[:rows], t[:rows]), rel=1e-5)


def test_training_between_inference_and_back(warm: Two) -> None:
    a, b, t = a_b_t(11)
    before = warm.w.data.copy()  # type: ignore[union-attr]
    warm.graph.execute({"a": a, "b": b}, {"t": t}, options=INFER)
    assert_same([warm.w.data], [before])
    warm.graph.execute({"a": a, "b": b}, {"t": t}, options=SYNC)
    changed = warm.w.data.copy()  # type: ignore[union-attr]
    assert not np.array_equal(changed, before)
    warm.graph.execute({"a": a, "b": b}, {"t": t}, options=INFER)
    assert_same([warm.w.data], [changed])


def test_queued_runs_keep_what_they_were_given(warm: Two) -> None:
    a, b, t = a_b_t(12)
    runs, wanted = [], []
    for _ in range(4):
        runs.append(warm.graph.execute({"a": a, "b": b}, {"t": t}, options=INFER ^ SYNC))
        wanted.append(expected(a, b, t))
        a += 1  # the caller's own memory
    assert loss_of(runs[-1]) == pytest.approx(wanted[-1], rel=1e-5)


def test_new_memory_of_a_parameter_and_new_declarations(warm: Two) -> None:
    a, b, t = a_b_t(13)
    warm.w.bind_and_write_data(2 * W, to=cpu())
    run = warm.graph.execute({"a": a, "b": b}, {"t": t}, options=INFER)
    assert loss_of(run) == pytest.approx(float(np.mean(((a - b) @ (2 * W).T - t) ** 2)), rel=1e-5)
    warm.graph.add_inputs({"a": warm.b, "b": warm.a})  # the names change places
    run = warm.graph.execute({"a": a, "b": b}, {"t": t}, options=INFER)
    assert loss_of(run) == pytest.approx(float(np.mean(((b - a) @ (2 * W).T - t) ** 2)), rel=1e-5)


def test_without_a_loss_a_gradient_bound_later_counts() -> None:
    net = Two(loss=False)
    gradient = net.graph.allocate_user_gradient(net.y)
    net.graph.compile(device=cpu())
    a, b, _ = a_b_t(14)
    for _ in range(2):
        with pytest.raises(mlc.ExecutionError, match="nothing to minimise"):
            net.graph.execute({"a": a, "b": b}, options=SYNC)
    for _ in range(2):
        before = net.w.data.copy()  # type: ignore[union-attr]
        net.graph.bind_and_write_data({"g": np.ones((4, 2), np.float32)}, for_inputs={"g": gradient}, to=cpu())
        net.graph.execute({"a": a, "b": b}, options=SYNC)
        assert not np.array_equal(net.w.data, before)


def test_outputs_and_handlers_belong_to_one_call(warm: Two) -> None:
    a, b, t = a_b_t(15)
    out, seen = np.zeros((4, 2), np.float32), []
    for _ in range(2):
        warm.graph.execute({"a": a, "b": b}, {"t": t}, {}, {"y": out}, options=INFER)
        np.testing.assert_allclose(out, (a - b) @ W.T, rtol=1e-5, atol=1e-6)
        out[:] = 0
        warm.graph.execute(
            {"a": a, "b": b}, {"t": t}, options=INFER, completion_handler=lambda *told: seen.append(told)
        )
        warm.graph.execute({"a": a, "b": b}, {"t": t}, options=INFER)
        assert not out.any()
    assert len(seen) == 2


def test_threads_that_ask_for_different_things(warm: Two) -> None:
    a, b, t = a_b_t(16)
    wrong: list[int] = []

    def ask(rows: int) -> None:
        inputs = {"a": a[:rows].copy(), "b": b[:rows].copy()}
        out = np.empty((4, 2), np.float32)
        for _ in range(300):
            out[:] = 0
            warm.graph.execute(inputs, {"t": t[:rows]}, {}, {"y": out}, batch_size=rows, options=INFER)
            if not np.allclose(out[:rows], (inputs["a"] - inputs["b"]) @ W.T, atol=1e-5) or out[rows:].any():
                wrong.append(rows)

    threads = [threading.Thread(target=ask, args=(rows,)) for rows in (1, 2, 3, 4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []
