"""Federated learning with Flower: hospitals, phones ... train one model, and no sample leaves the place it is in.

`Client` is what Flower asks for, a NumPyClient: weights come in as arrays, weights and the number of samples go out.
With Flower installed (`pip install flwr`), `app` is the ClientApp that its tools start. `python federated.py` needs no
Flower: it plays the server's part, federated averaging, in this process.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import mlcompute as mlc

try:
    from flwr.client import NumPyClient
    from flwr.clientapp import ClientApp
except ImportError:
    NumPyClient, ClientApp = object, None

CLIENTS = 4


def network() -> mlc.Trainer:
    graph = mlc.Graph()
    x = graph.dense(graph.flatten(graph.input((32, 1, 8, 8), "image")), 64, activation="relu")
    graph.dense(x, 10)
    # A server's average would not fit the momentum of Adam's last steps here: plain SGD keeps none.
    sgd = mlc.SGDOptimizer(learning_rate=0.1)
    return mlc.Trainer(graph, loss="softmax_cross_entropy", optimizer=sgd, metrics=["accuracy"])


def partition(number: int) -> mlc.data.Dataset:
    """The digits that one client has: mostly two or three of the ten, as real clients differ."""
    digits = mlc.data.digits()
    rng = np.random.default_rng(0)
    owner = np.where(rng.random(len(digits)) < 0.8, digits.y * CLIENTS // 10, rng.integers(CLIENTS, size=len(digits)))
    return digits.subset(np.flatnonzero(owner == number))


class Client(NumPyClient):
    """One place with data of its own."""

    def __init__(self, data: mlc.data.Dataset) -> None:
        self.data, self.trainer = data, network()

    def get_parameters(self, config: dict[str, Any]) -> list[np.ndarray]:
        return self.trainer.copy_weights()  # with running statistics, where a network has some

    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        self.trainer.set_weights(parameters)
        history = self.trainer.fit(self.data, epochs=int(config.get("epochs", 1)), verbose=0)
        return self.trainer.copy_weights(), len(self.data), {"loss": history.history["loss"][-1]}

    def evaluate(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[float, int, dict[str, Any]]:
        self.trainer.set_weights(parameters)
        found = self.trainer.evaluate(self.data)
        return found["loss"], len(self.data), {"accuracy": found["accuracy"]}


def client(context: Any) -> Any:
    """What Flower calls for each client; it says which one in `partition-id`."""
    return Client(partition(int(context.node_config["partition-id"]))).to_client()


app = ClientApp(client) if ClientApp is not None else None


def averaged(results: list[tuple[list[np.ndarray], int, dict[str, Any]]]) -> list[np.ndarray]:
    """Federated averaging: every client's weights count as often as it has samples."""
    total = sum(count for _, count, _ in results)
    parts = ([array * (count / total) for array in arrays] for arrays, count, _ in results)
    return [np.sum(arrays, axis=0, dtype=np.float32) for arrays in zip(*parts, strict=True)]


def main(rounds: int = 10) -> float:
    """The accuracy on digits that no client has seen."""
    mlc.Platform.set_rng_seed_to(0)
    server, clients = network(), [Client(partition(number)) for number in range(CLIENTS)]
    held_out = mlc.data.digits().validation
    weights = server.copy_weights()
    for done in range(rounds):
        results = [one.fit(weights, {"epochs": 1}) for one in clients]
        if done == 0:  # a client without the others knows its own digits only
            server.set_weights(results[0][0])
            alone = server.evaluate(held_out)["accuracy"]
        weights = averaged(results)
    server.set_weights(weights)
    together = server.evaluate(held_out)["accuracy"]
    print(f"{len(clients)} clients, {rounds} rounds: {together:.1%} of unseen digits; one client alone {alone:.1%}")
    assert together > alone + 0.2
    return together


if __name__ == "__main__":
    main()
