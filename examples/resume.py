"""Stop after ten steps, save everything, build the graph anew, go on: as if nothing had happened.

What a checkpoint needs: the weights, the optimizer's state of each, and the number of the next step.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from blocks import dense, parameters_of
from safetensors import safe_open
from safetensors.numpy import save_file

import mlcompute as mlc

BATCH, INPUTS, HIDDEN = 16, 8, 32


def build(seed: int, time_step: int = 1) -> mlc.TrainingGraph:
    mlc.Platform.set_rng_seed_to(seed)
    x, target = mlc.Tensor(shape=(BATCH, INPUTS)), mlc.Tensor(shape=(BATCH, 1))
    graph = mlc.Graph()
    hidden = graph.node(dense(INPUTS, HIDDEN, "fc1"), source=x)
    hidden = graph.node(mlc.ActivationLayer.tanh(), source=hidden)
    graph.node(dense(HIDDEN, 1, "fc2"), source=hidden)
    training = mlc.TrainingGraph(
        [graph],
        mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN),
        mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=0.01), time_step=time_step),
    )
    training.add_inputs({"x": x}, {"target": target})
    training.compile(device=mlc.Device.cpu())
    return training


def train(training: mlc.TrainingGraph, steps: range) -> float:
    loss = 0.0
    for step in steps:
        # A batch follows from the number of its step alone, so a resumed run sees the batches it would have seen.
        x = np.random.default_rng(step).normal(size=(BATCH, INPUTS)).astype(np.float32)
        target = np.sin(x.sum(axis=1, keepdims=True))
        loss = training.execute({"x": x}, {"target": target}).result.data.item()
    return loss


def save(training: mlc.TrainingGraph, path: Path) -> None:
    training.synchronize_updates()
    arrays = {}
    for name, tensor in parameters_of(training).items():
        arrays[name] = tensor.data
        for number, state in enumerate(tensor.optimizer_data):
            arrays[f"{name}/state{number}"] = np.frombuffer(state.bytes, np.float32).reshape(tensor.descriptor.shape)
    save_file(arrays, path, metadata={"time_step": str(training.optimizer.time_step)})


def load(path: Path) -> mlc.TrainingGraph:
    with safe_open(path, framework="numpy") as file:
        training = build(seed=99, time_step=int(file.metadata()["time_step"]))  # other weights, until they are bound
        for name, tensor in parameters_of(training).items():
            tensor.bind_and_write_data(file.get_tensor(name), to=mlc.Device.cpu())
            states = [file.get_tensor(f"{name}/state{number}") for number in range(len(tensor.optimizer_data))]
            training.bind_optimizer_data(states, tensor=tensor)
    return training


def main(steps: int = 10) -> None:
    straight = build(seed=1)
    train(straight, range(2 * steps))

    stopped = build(seed=1)
    halfway = train(stopped, range(steps))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.safetensors"
        save(stopped, path)
        print(f"stopped after {steps} steps, loss {halfway:.4f}; checkpoint of {path.stat().st_size:,} bytes")
        resumed = load(path)
    final = train(resumed, range(steps, 2 * steps))
    print(f"resumed to {2 * steps} steps, loss {final:.4f}; the next step is {resumed.optimizer.time_step}")

    assert resumed.optimizer == straight.optimizer
    for name, tensor in parameters_of(straight).items():
        other = parameters_of(resumed)[name]
        assert np.array_equal(tensor.data, other.data), name
        for state, same in zip(tensor.optimizer_data, other.optimizer_data, strict=True):
            assert state.bytes == same.bytes, name
    print("the same weights and the same optimizer state as without the stop, bit for bit")


if __name__ == "__main__":
    main()
