"""A layer the framework does not have, in the middle of a network: sorting, written in NumPy.

    x -> [first graph: fc1] -> h -> sort (NumPy) -> z -> [second graph: fc2, loss]
                               h ------------------------^   (passed on by the link)

Forward runs first to second, the gradient second to first; the link carries h over and its gradient back, the caller
does both for the layer between.
"""

from __future__ import annotations

import numpy as np
from blocks import dense, parameters_of

import mlcompute as mlc

BATCH, INPUTS, HIDDEN = 64, 6, 8
RATE = 0.05


class Network:
    def __init__(self, seed: int = 11) -> None:
        mlc.Platform.set_rng_seed_to(seed)
        self.device = mlc.Device.cpu()
        sgd = mlc.OptimizerDescriptor(learning_rate=RATE)

        self.x = mlc.Tensor(shape=(BATCH, INPUTS))
        self.first = mlc.TrainingGraph(optimizer=mlc.SGDOptimizer(sgd))
        self.h = self.first.node(dense(INPUTS, HIDDEN, "fc1"), source=self.x)
        self.first.add_inputs({"x": self.x})
        self.dh = self.first.allocate_user_gradient(self.h)

        self.z, self.target = mlc.Tensor(shape=(BATCH, HIDDEN)), mlc.Tensor(shape=(BATCH, 1))
        loss = mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN)
        self.second = mlc.TrainingGraph([], loss, mlc.SGDOptimizer(sgd))
        both = self.second.concatenate([self.z, self.h], dimension=1)
        self.second.node(dense(2 * HIDDEN, 1, "fc2"), source=both)
        self.second.add_inputs({"z": self.z}, {"target": self.target})

        self.first.link([self.second])
        options = mlc.GraphCompilationOptions.LINK_GRAPHS | mlc.GraphCompilationOptions.COMPUTE_ALL_GRADIENTS
        for graph in (self.first, self.second):
            graph.compile(options=options, device=self.device)

    def step(self, x: np.ndarray, target: np.ndarray) -> float:
        """Forward, back, update; the loss."""
        self.first.bind_and_write_data({"x": x}, for_inputs={"x": self.x}, to=self.device)
        self.first.execute_forward()

        h = self.h.data
        order = np.argsort(h, axis=1)
        self.second.bind_and_write_data(
            {"z": np.take_along_axis(h, order, axis=1), "target": target},
            for_inputs={"z": self.z, "target": self.target},
            to=self.device,
        )
        loss = self.second.execute_forward().result.data.item()
        self.second.execute_gradient()

        dh = np.empty_like(h)
        np.put_along_axis(dh, order, self.second.gradient_tensor(self.z).data, axis=1)  # back where it came from
        self.first.bind_and_write_data({"dh": dh}, for_inputs={"dh": self.dh}, to=self.device)
        self.first.execute_gradient()
        self.first.execute_optimizer_update()
        self.second.execute_optimizer_update()
        return loss

    @property
    def weights(self) -> dict[str, np.ndarray]:
        named = {**parameters_of(self.first), **parameters_of(self.second)}
        return {name: tensor.data.copy() for name, tensor in named.items()}


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """The median of the inputs: easy to say with a sort, hard without."""
    x = np.random.default_rng(step).normal(size=(BATCH, INPUTS)).astype(np.float32)
    return x, np.median(x, axis=1, keepdims=True)


def by_hand(w: dict[str, np.ndarray], x: np.ndarray, target: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
    """The same step, derived on paper, in float64."""
    h = x.astype(np.float64) @ w["fc1.weights"].T.astype(np.float64) + w["fc1.biases"]
    order = np.argsort(h, axis=1)
    both = np.concatenate([np.take_along_axis(h, order, axis=1), h], axis=1)
    error = both @ w["fc2.weights"].T.astype(np.float64) + w["fc2.biases"] - target
    dy = 2.0 * error / error.size
    dboth = dy @ w["fc2.weights"]
    dh = dboth[:, HIDDEN:].copy()
    sorted_part = np.empty_like(h)
    np.put_along_axis(sorted_part, order, dboth[:, :HIDDEN], axis=1)
    dh += sorted_part
    gradients = {
        "fc1.weights": dh.T @ x,
        "fc1.biases": dh.sum(axis=0),
        "fc2.weights": dy.T @ both,
        "fc2.biases": dy.sum(axis=0),
    }
    return float(np.mean(error**2)), {name: w[name] - RATE * gradients[name] for name in w}


def main(steps: int = 200) -> None:
    network = Network()
    expected_loss, expected = by_hand(network.weights, *batch(0))
    first = network.step(*batch(0))
    assert np.isclose(first, expected_loss, rtol=1e-5)
    for name, weights in network.weights.items():
        np.testing.assert_allclose(weights, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
    print(f"first step agrees with the derivation on paper, loss {first:.4f}")
    loss = first
    for step in range(1, steps):
        loss = network.step(*batch(step))
        if step % max(1, steps // 5) == 0:
            print(f"step {step:3}   loss {loss:.4f}")
    print(f"loss {first:.4f} -> {loss:.4f}")
    assert loss < 0.5 * first


if __name__ == "__main__":
    main()
