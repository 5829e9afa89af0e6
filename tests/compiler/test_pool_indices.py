"""The pool_indices pass: max pooling keeps indices instead of its source, with the same numbers and less memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute import ops
from mlcompute.compiler.differentiate import differentiate
from mlcompute.compiler.plan_memory import planned
from mlcompute.compiler.pool_indices import pool_indices
from mlcompute.compiler.verify import verify_steps
from mlcompute.devices.cpu.device import Cpu
from mlcompute.devices.device import Engine
from mlcompute.devices.reference import Reference
from mlcompute.ops.op import Array, Trace, Value, run_meaning
from tests.compiler.programs import apply, feed, simplify

HALF: dict[str, Any] = {"kernel": (2, 2), "strides": (2, 2), "dilations": (1, 1), "padding": (0, 0, 0, 0)}
OVERLAPPING: dict[str, Any] = {"kernel": (3, 3), "strides": (2, 2), "dilations": (1, 1), "padding": (1, 1, 1, 1)}
SAME: dict[str, Any] = {"kernel": (3, 3), "strides": (1, 1), "dilations": (1, 1), "padding": (1, 1, 1, 1)}


class Network:
    """A convolution, a function, a pooling, and a product with what was pooled."""

    def __init__(self, function: Any, window: dict[str, Any], more: Any = None) -> None:
        self.trace = trace = Trace()
        x, w = feed(trace, (4, 2, 8, 8)), feed(trace, (3, 2, 3, 3))
        hidden = function(ops.convolution(x, w, (1, 1), (1, 1), (1, 1, 1, 1), 1))
        pooled = ops.max_pool(hidden, **window)
        y = pooled * pooled
        self.hidden, dy = hidden, feed(trace, y.shape)
        seeds = {y: dy}
        self.inputs = [x, w, dy]
        if more is not None:
            other = more(hidden)
            seeds[other] = feed(trace, other.shape)
            self.inputs.append(seeds[other])
        trace.phase = "gradient"
        found = differentiate(trace, seeds, [x, w], set())
        substitution = apply(simplify, trace, [found[x], found[w]])
        self.results = [substitution.final(found[x]), substitution.final(found[w])]

    def run(self) -> list[Array]:
        rng = np.random.default_rng(0)
        memory = {value: np.round(rng.standard_normal(value.shape), 1).astype(value.dtype) for value in self.inputs}
        memory.update(self.trace.constants)
        for step in self.trace.steps:
            memory.update(zip(step.results, run_meaning(step, [memory[v] for v in step.inputs]), strict=True))
        return [memory[value] for value in self.results]

    def check(self, keep: list[Value] | None = None) -> Counter[str]:
        """The same bits; gives how often each op is there."""
        before = self.run()
        apply(pool_indices, self.trace, [*self.results, *(keep or [])])
        verify_steps(self.trace.steps, split=True)
        for old, new in zip(before, self.run(), strict=True):
            assert old.tobytes() == new.tobytes()
        return Counter(step.op.name for step in self.trace.steps)


@pytest.mark.parametrize("function", [ops.relu, ops.copy])
@pytest.mark.parametrize("window", [HALF, OVERLAPPING])
def test_places_instead_of_the_source(function: Any, window: dict[str, Any]) -> None:
    network = Network(function, window)
    size = planned(network.trace.steps, network.results).nbytes
    found = network.check()
    assert found["max_pool_with_indices"] == found["max_pool_indices_gradient"] == 1
    assert not found["max_pool"]
    assert not found["max_pool_gradient"]
    assert planned(network.trace.steps, network.results).nbytes < 0.8 * size


@pytest.mark.parametrize(
    "network",
    [
        Network(ops.tanh, HALF),  # whose gradient needs its result
        Network(ops.relu, HALF, more=lambda hidden: hidden * hidden),
        Network(ops.relu, HALF, more=ops.exp),  # whose gradient adds to the pooling's
    ],
    ids=["tanh", "squared", "exp"],
)
def test_a_source_that_stays_anyway(network: Network) -> None:
    assert network.check()["max_pool_gradient"] == 1


def test_what_somebody_reads_later_stays() -> None:
    network = Network(ops.relu, HALF)
    assert network.check([network.hidden])["max_pool_gradient"] == 1


def test_no_memory_would_be_won() -> None:
    """As many windows as elements, and a result that the gradient pass does not need."""
    trace = Trace()
    x, dy = feed(trace, (4, 2, 8, 8)), feed(trace, (4, 2, 8, 8))
    y = ops.max_pool(ops.relu(x * 2.0), **SAME)
    trace.phase = "gradient"
    gradient = differentiate(trace, {y: dy}, [x], set())[x]
    steps = list(trace.steps)
    apply(pool_indices, trace, [gradient])
    assert trace.steps == steps


@pytest.mark.parametrize("engine", [Cpu(2), Reference()], ids=["cpu", "reference"])
def test_fused_and_split_runs_agree(engine: Engine) -> None:
    device = mlc.Device(mlc.DeviceType.CPU, engine=engine)
    weights = []
    for fused in (True, False):
        mlc.Platform.set_rng_seed_to(3)
        graph = mlc.Graph()
        x = graph.input((6, 2, 13, 11), "x")
        y = graph.pool(graph.convolution(x, 5, kernel=3, activation="relu"), kernel=3, stride=2, padding=1)
        y = graph.pool(graph.convolution(y, 4, kernel=3), kernel=2)
        y = graph.dense(graph.flatten(y), 3)
        loss = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN)
        adam = mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=0.01))
        training = mlc.TrainingGraph([graph], loss, adam)
        labels = mlc.Tensor(shape=(6, 3))
        training.add_inputs({"x": x}, {"t": labels})
        training.compile(device=device)
        data = np.round(np.random.default_rng(1).standard_normal((6, 2, 13, 11)), 1).astype(np.float32)
        t = np.eye(3, dtype=np.float32)[[0, 1, 2, 0, 1, 2]]
        for _ in range(4):
            if fused:
                training.execute({"x": data}, {"t": t})
            else:
                training.bind_and_write_data({"x": data, "t": t}, for_inputs={"x": x, "t": labels}, to=device)
                training.execute_forward()
                training.execute_gradient()
                training.execute_optimizer_update()
        if fused:
            names = Counter(step.op.name for step in training.programs["fused 6"].steps)
            assert names["max_pool_with_indices"] == 2
        parameters = [slot.tensor.data.copy() for layer in training.layers for slot in layer.parameters.values()]
        weights.append(parameters)
    for a, b in zip(*weights, strict=True):
        assert a.tobytes() == b.tobytes()
