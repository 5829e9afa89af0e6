"""NaN and infinity: training stops within the step, and the first layer that went bad is named (R9)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.trainer import NaNError
from tests.trainer.nets import assert_same, everything, points, trainer

COUNT = 18
HUGE = np.float32(3e38)


class Chain:
    """dense, then 18 products with inputs of their own, then dense: 20 nodes, and a way into each of the products."""

    def __init__(self, optimizer: str = "sgd") -> None:
        mlc.Platform.set_rng_seed_to(0)
        graph = mlc.Graph()
        h = graph.input((4, 3), "x")
        h = graph.dense(h, 3, biases=False, name="first")
        for number in range(COUNT):
            h = graph.multiply(h, graph.input((4, 3), f"s{number}"), name=f"node{number}")
        graph.dense(h, 2, name="last")
        assert len(graph.layers) == 20
        self.first = graph.layer("first")
        self.trainer = mlc.Trainer(graph, loss="mse", optimizer=optimizer, learning_rate=1e-3)
        self.start = self.trainer.copy_weights()

    def fit(self, guard: mlc.callbacks.TerminateOnNaN, step: int = 6, **spoiled: np.ndarray) -> Any:
        """Train on ordinary numbers; the batch of one step has the spoiled ones."""
        self.trainer.set_weights(self.start)
        data = {"x": np.full((40, 3), 1.5), **{f"s{number}": np.ones((40, 3)) for number in range(COUNT)}}
        for name, value in spoiled.items():
            data[name][4 * step : 4 * step + 4] = value
        return self.trainer.fit(data, np.ones((40, 2)), shuffle=False, callbacks=[guard], verbose=0)


@pytest.fixture(scope="module")
def chain() -> Chain:
    return Chain()


@pytest.mark.parametrize("number", range(COUNT))
def test_every_node_is_found(number: int, chain: Chain) -> None:
    guard = mlc.callbacks.TerminateOnNaN(every=1 + number % 5)
    cases: list[tuple[dict[str, Any], str, str, str]] = [
        ({f"s{number}": np.nan}, "forward", "input", f"s{number}"),
        ({f"s{number}": HUGE, "x": 1e3}, "forward", "step", "multiply"),
    ]
    if number < COUNT - 1:
        # Nothing flows forward, and the gradient overflows on its way back through this node.
        cases.append(({f"s{number}": HUGE, f"s{number + 1}": HUGE, "x": 0.0}, "gradient", "step", "multiply"))
    for spoiled, phase, origin, name in cases:
        with pytest.raises(NaNError) as caught:
            chain.fit(guard, **spoiled)
        finding = caught.value.finding
        assert finding is not None
        assert (finding.layer, finding.phase, finding.origin, finding.name) == (f"node{number}", phase, origin, name)
        assert caught.value.step == 7
        # A bad gradient shows in the loss of the next step, or before it begins.
        assert chain.trainer.step <= (7 if phase == "forward" else 8)
        assert f"node{number}" in str(caught.value)
        assert guard.error is caught.value


def test_the_weights_are_those_before_the_bad_step(chain: Chain) -> None:
    with pytest.raises(NaNError):
        chain.fit(mlc.callbacks.TerminateOnNaN(), s3=np.full(3, np.nan))
    found = everything(chain.trainer)
    chain.fit(mlc.callbacks.TerminateOnNaN(raises=False), step=9)
    chain.trainer.set_weights(chain.start)

    class SixSteps(mlc.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if batch == 5:
                self.trainer.stop()

    data = {"x": np.full((40, 3), 1.5), **{f"s{number}": np.ones((40, 3)) for number in range(COUNT)}}
    history = chain.trainer.fit(data, np.ones((40, 2)), shuffle=False, callbacks=[SixSteps()], verbose=0)
    assert history.stopped == "stop"
    assert_same(everything(chain.trainer), found)


def test_parameters_that_were_bad_before(chain: Chain) -> None:
    start = chain.start
    chain.start = [np.where(array == array.reshape(-1)[0], np.nan, array).astype(array.dtype) for array in start]
    try:
        with pytest.raises(NaNError, match=r"step 1: parameter 'weights' holds NaN in 1 of 9 elements; layer 'first'"):
            chain.fit(mlc.callbacks.TerminateOnNaN())
    finally:
        chain.start = start


@pytest.mark.filterwarnings("ignore:.*is it meant:UserWarning")
def test_an_update_that_overflows_is_found_although_the_loss_is_finite() -> None:
    x, y = points(32)
    with pytest.warns(UserWarning, match="is it meant"):
        model = trainer(16, optimizer="sgd", learning_rate=3e38)
    guard = mlc.callbacks.TerminateOnNaN()
    with pytest.raises(NaNError) as caught:
        model.fit(x * 1e3, y, epochs=3, callbacks=[guard], verbose=0)
    finding = caught.value.finding
    assert finding is not None
    assert finding.phase in ("update", "gradient", "forward")
    assert all(np.isfinite(array).all() for array in model.copy_weights())


@pytest.mark.filterwarnings("ignore:.*is it meant:UserWarning")
def test_the_last_update_of_an_epoch_is_looked_at() -> None:
    x, y = points(16)
    loss = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.SUM)
    with pytest.warns(UserWarning, match="is it meant"):
        model = trainer(16, loss=loss, optimizer="sgd", learning_rate=3e38)
    with pytest.raises(NaNError) as caught:
        model.fit(x, y, callbacks=[mlc.callbacks.TerminateOnNaN()], verbose=0)
    assert caught.value.step == 1
    assert caught.value.finding is not None
    assert caught.value.finding.phase == "update"


def test_ending_without_an_error(chain: Chain) -> None:
    guard = mlc.callbacks.TerminateOnNaN(raises=False)
    history = chain.fit(guard, s4=np.full(3, np.nan))
    assert history.stopped == "TerminateOnNaN"
    assert guard.error is not None
    assert guard.error.finding is not None
    assert guard.error.finding.layer == "node4"


def test_weights_changed_from_outside_between_steps(chain: Chain) -> None:
    class Spoil(mlc.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any) -> None:
            if batch == 5:
                weights = self.trainer.copy_weights()
                weights[-1][:] = np.nan
                self.trainer.set_weights(weights)

    chain.trainer.set_weights(chain.start)
    data = {"x": np.full((40, 3), 1.5), **{f"s{number}": np.ones((40, 3)) for number in range(COUNT)}}
    for every, message in ((1, r"parameter 'biases' holds NaN"), (16, "something outside the graph")):
        chain.trainer.set_weights(chain.start)
        guard = mlc.callbacks.TerminateOnNaN(every)
        with pytest.raises(NaNError, match=message):
            chain.trainer.fit(data, np.ones((40, 2)), callbacks=[Spoil(), guard], verbose=0)


def test_accumulated_batches(chain: Chain) -> None:
    chain.trainer.set_weights(chain.start)
    data = {"x": np.full((40, 3), 1.5), **{f"s{number}": np.ones((40, 3)) for number in range(COUNT)}}
    data["s7"][22] = np.nan  # in the second batch of the third step
    guard = mlc.callbacks.TerminateOnNaN()
    with pytest.raises(NaNError, match="step 3: input 's7'"):
        chain.trainer.fit(data, np.ones((40, 2)), accumulate=2, shuffle=False, callbacks=[guard], verbose=0)
