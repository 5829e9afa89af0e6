"""Four stacked LSTM layers forecast a wave, and go on from their own states.

Training reads whole windows. Forecasting reads one value at a time: the same weights in a second layer that starts
from the states the first one ended with, and hands its own on to the next step.
"""

from __future__ import annotations

import numpy as np
from blocks import dense, filled, weights

import mlcompute as mlc

LAYERS, HIDDEN, BATCH, TIMES, AHEAD = 4, 12, 16, 20, 10
STATES = (LAYERS, 1, BATCH, HIDDEN)  # one direction


def wave(start: np.ndarray, count: int) -> np.ndarray:
    """Two sines that never quite repeat, (n, count, 1)."""
    t = start[:, None] + np.arange(count)
    return (0.6 * np.sin(0.35 * t) + 0.3 * np.sin(0.81 * t))[..., None].astype(np.float32)


class Forecaster:
    def __init__(self) -> None:
        mlc.Platform.set_rng_seed_to(4)
        widths = [1, *[HIDDEN] * (LAYERS - 1)]
        # Weights of the input, of the state, and biases; four gates per layer: input, forget, cell, output.
        self.gates = (
            [weights(HIDDEN, width) for width in widths for _ in range(4)],
            [weights(HIDDEN, HIDDEN) for _ in widths for _ in range(4)],
            # A forget gate that starts open lets gradients reach far back.
            [filled(1.0 if gate == 1 else 0.0, HIDDEN) for _ in widths for gate in range(4)],
        )
        self.head = dense(HIDDEN, 1, "head")
        self.training_graph()
        self.stepping_graph()

    def lstm(self) -> mlc.LSTMLayer:
        """A layer over the same weights: sharing tensors is how weights are shared."""
        mode = mlc.LSTMResultMode.OUTPUT_AND_STATES
        return mlc.LSTMLayer(mlc.LSTMDescriptor(1, HIDDEN, LAYERS, result_mode=mode), *self.gates)

    def training_graph(self) -> None:
        x, coming = mlc.Tensor(shape=(BATCH, TIMES, 1)), mlc.Tensor(shape=(BATCH, TIMES, 1))
        graph, layer = mlc.Graph(), self.lstm()
        graph.node(self.head, source=graph.node(layer, source=x))
        _, self.h, self.c = graph.result_tensors(layer)
        l2 = {"regularization_type": mlc.RegularizationType.L2, "regularization_scale": 1e-6}
        self.training = mlc.TrainingGraph(
            [graph],
            mlc.LossLayer.huber_loss(mlc.ReductionType.MEAN, delta=0.5),
            mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=0.01, **l2)),
        )
        self.training.add_inputs({"x": x}, {"next": coming})
        self.training.compile(device=mlc.Device.cpu())
        self.reading = mlc.InferenceGraph([graph])
        self.reading.add_inputs({"x": x})
        self.reading.add_outputs({"h": self.h, "c": self.c})
        self.reading.compile(device=mlc.Device.cpu())

    def stepping_graph(self) -> None:
        x, h, c = mlc.Tensor(shape=(BATCH, 1, 1)), mlc.Tensor(shape=STATES), mlc.Tensor(shape=STATES)
        graph, layer = mlc.Graph(), self.lstm()
        y = graph.node(layer, sources=[x, h, c])
        _, self.next_h, self.next_c = graph.result_tensors(layer)
        graph.node(mlc.FullyConnectedLayer(self.head.weights, self.head.biases, self.head.descriptor), source=y)
        self.stepping = mlc.InferenceGraph([graph])
        self.stepping.add_inputs({"x": x, "h": h, "c": c})
        self.stepping.add_outputs({"h": self.next_h, "c": self.next_c})
        self.stepping.compile(device=mlc.Device.cpu())

    def train(self, steps: int) -> list[float]:
        rng = np.random.default_rng(0)
        losses = []
        for step in range(steps):
            values = wave(rng.uniform(0, 500, BATCH), TIMES + 1)
            run = self.training.execute({"x": values[:, :-1]}, {"next": values[:, 1:]})
            losses.append(run.result.data.item())
            if step % max(1, steps // 6) == 0:
                print(f"step {step:3}   loss {losses[-1]:.5f}")
        return losses

    def read(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Forecasts at every time of a window, and the hidden and cell states it ends with."""
        return self.reading.execute({"x": values}).result.data, self.h.data, self.c.data

    def step(self, value: np.ndarray, h: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The same for a single value, starting from states."""
        return self.stepping.execute({"x": value, "h": h, "c": c}).result.data, self.next_h.data, self.next_c.data


def line(values: np.ndarray) -> str:
    return "".join("▁▂▃▄▅▆▇█"[int(np.clip((v + 1) * 4, 0, 7))] for v in values.ravel())


def main(steps: int = 300) -> None:
    forecaster = Forecaster()
    losses = forecaster.train(steps)

    values = wave(np.arange(1000, 1000 + BATCH), 2 * TIMES)
    seen, coming = values[:, :TIMES], values[:, TIMES : TIMES + AHEAD]
    forecasts, h, c = forecaster.read(seen)
    state = np.zeros(STATES, np.float32), np.zeros(STATES, np.float32)
    for time in range(TIMES):
        forecast, *state = forecaster.step(seen[:, time : time + 1], *state)
        np.testing.assert_allclose(forecast[:, 0], forecasts[:, time], atol=1e-5)
    print("one value at a time, states handed on: the same forecasts as the whole window at once")

    ahead = [forecasts[:, -1:]]
    while len(ahead) < AHEAD:
        forecast, h, c = forecaster.step(ahead[-1], h, c)  # every forecast is the next value
        ahead.append(forecast)
    print(f"seen      {line(seen[0])}")
    print(f"came      {' ' * TIMES}{line(coming[0])}")
    print(f"forecast  {' ' * TIMES}{line(np.concatenate(ahead, axis=1)[0])}")
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    assert np.mean(losses[-5:]) < 0.6 * losses[0]


if __name__ == "__main__":
    main()
