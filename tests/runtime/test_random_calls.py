"""Random sequences of calls of graphs that share weights give the same bits wherever the memory lies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.devices import reference
from mlcompute.devices.device import Engine
from mlcompute.devices.remote import Remote
from tests.nets import INFERENCE, MEAN, SYNC, Array, adam

BATCH, LENGTH = 4, 40


class Reference(reference.Reference):
    """The same programs in the host's memory."""

    traits = Remote.traits


class Nets:
    """Two training graphs with optimizers of their own, and an inference graph, over one network."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        mlc.Platform.set_rng_seed_to(1)
        self.device, self.folder = mlc.Device(engine=engine), folder
        self.graph = mlc.Graph()
        self.x, self.t = self.graph.input((BATCH, 2, 4, 4), "x"), mlc.Tensor(shape=(BATCH, 5))
        y = self.graph.normalize(self.graph.convolution(self.x, 3, kernel=3, activation="relu"))
        self.graph.dense(self.graph.flatten(y), 5)
        self.trainings = [
            mlc.TrainingGraph([self.graph], mlc.LossLayer.mean_squared_error(MEAN), adam()),
            mlc.TrainingGraph([self.graph], mlc.LossLayer.huber_loss(MEAN), adam(0.02)),
        ]
        for training in self.trainings:
            training.add_inputs({"x": self.x}, {"t": self.t})
            training.compile(device=self.device)
        self.inference = mlc.InferenceGraph([self.graph])
        self.inference.add_inputs({"x": self.x})
        self.inference.compile(device=self.device)
        self.parameters = [slot.tensor for layer in self.graph.layers for slot in layer.parameters.values()]
        self.statistics = [tensor for layer in self.graph.layers for tensor in layer.statistics.values()]

    def values(self) -> list[Array]:
        """Everything that training changes."""
        states = [np.frombuffer(state.bytes, np.float32).copy() for p in self.parameters for state in p.optimizer_data]
        return [*(tensor.data for tensor in (*self.parameters, *self.statistics)), *states]


class Case:
    """What one call is given: numbers that are the same for both devices."""

    def __init__(self, random: np.random.Generator) -> None:
        self.which, self.rows = int(random.integers(2)), int(random.integers(1, BATCH + 1))
        self.options = SYNC if random.random() < 0.5 else mlc.ExecutionOptions.NONE
        self.place, self.rate = int(random.integers(100)), float(random.random() / 50)
        self.x = random.normal(size=(BATCH, 2, 4, 4)).astype(np.float32)
        self.t = random.normal(size=(BATCH, 5)).astype(np.float32)
        self._numbers = random.random(1000).astype(np.float32)

    def like(self, tensor: mlc.Tensor, begin: int = 0) -> Array:
        count = tensor.descriptor.element_count
        return self._numbers[begin : begin + count].reshape(tensor.shape).copy()


def step(nets: Nets, training: mlc.TrainingGraph, case: Case) -> Any:
    return training.execute({"x": case.x}, {"t": case.t}, batch_size=case.rows, options=case.options)


def passes(nets: Nets, training: mlc.TrainingGraph, case: Case) -> Any:
    tensors = {"x": nets.x, "t": nets.t}
    training.bind_and_write_data({"x": case.x, "t": case.t}, for_inputs=tensors, to=nets.device, batch_size=case.rows)
    run = training.execute_forward(batch_size=case.rows, options=case.options)
    if case.place % 4:
        training.execute_gradient(batch_size=case.rows)
        training.execute_optimizer_update(options=case.options)
    return run


def forward(nets: Nets, training: mlc.TrainingGraph, case: Case) -> Any:
    options = case.options | INFERENCE
    return training.execute({"x": case.x}, {"t": case.t}, batch_size=case.rows, options=options)


def infer(nets: Nets, training: mlc.TrainingGraph, case: Case) -> Any:
    return nets.inference.execute({"x": case.x}, batch_size=case.rows, options=case.options)


def write(nets: Nets, training: mlc.TrainingGraph, case: Case) -> None:
    tensors = [*nets.parameters, *nets.statistics]
    tensor = tensors[case.place % len(tensors)]
    tensor.data = case.like(tensor)


def bind(nets: Nets, training: mlc.TrainingGraph, case: Case) -> None:
    parameter = nets.parameters[case.place % len(nets.parameters)]
    parameter.bind_and_write_data(mlc.TensorData(case.like(parameter)), to=nets.device)


def bind_state(nets: Nets, training: mlc.TrainingGraph, case: Case) -> None:
    parameter = nets.parameters[case.place % len(nets.parameters)]
    training.bind_optimizer_data([case.like(parameter), case.like(parameter, 300)], tensor=parameter)


def apply(nets: Nets, training: mlc.TrainingGraph, case: Case) -> None:
    training.apply_gradients({parameter: case.like(parameter) for parameter in nets.parameters})


def save(nets: Nets, training: mlc.TrainingGraph, case: Case) -> None:
    mlc.save(nets.folder / f"{case.which}.safetensors", training)


def restore(nets: Nets, training: mlc.TrainingGraph, case: Case) -> None:
    path = nets.folder / f"{case.which}.safetensors"
    if path.exists():
        mlc.restore(training, path)


def recompile(nets: Nets, training: mlc.TrainingGraph, case: Case) -> None:
    training.compile(device=nets.device)


def set_rate(nets: Nets, training: mlc.TrainingGraph, case: Case) -> None:
    training.optimizer.learning_rate = case.rate


def read(nets: Nets, training: mlc.TrainingGraph, case: Case) -> None:
    nets.values()


CALLS: list[Callable[[Nets, mlc.TrainingGraph, Case], Any]] = [
    *(step, step, passes, forward, infer, write, bind, bind_state, apply, save, restore, recompile, set_rate, read)
]


@pytest.mark.parametrize("seed", range(6))
def test_random_calls(seed: int, tmp_path: Path) -> None:
    random = np.random.default_rng(seed)
    cases = [(CALLS[int(random.integers(len(CALLS)))], Case(random)) for _ in range(LENGTH)]
    results: list[list[Array]] = []
    for engine in (Reference(), Remote()):
        folder = tmp_path / engine.name
        folder.mkdir()
        nets, found = Nets(engine, folder), list[Array]()
        for call, case in cases:
            run = call(nets, nets.trainings[case.which], case)
            if run is not None:
                found.append(run.result.data)
        results.append([*found, *nets.values()])
    for number, (expected, array) in enumerate(zip(*results, strict=True)):
        np.testing.assert_array_equal(array, expected, err_msg=f"result {number} of {[c.__name__ for c, _ in cases]}")
