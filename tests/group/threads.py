"""Groups of threads: each builds its own graph, and all run the same program, as processes would."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

import mlcompute as mlc

RNG = np.random.default_rng(7)
BATCH, STEPS = 24, 4
X = RNG.standard_normal((STEPS, BATCH, 10)).astype(np.float32)
T = np.eye(3, dtype=np.float32)[RNG.integers(0, 3, (STEPS, BATCH))]


def run_group(size: int, work: Callable[[mlc.Group], Any], *, timeout: float = 20.0, slices: int = 8) -> list[Any]:
    """What `work` gives on every rank; the first error of any rank is raised, after telling the others."""
    groups = mlc.Group.local(size, timeout=timeout, slices=slices)
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(groups[rank])
        except BaseException as error:
            errors[rank] = error
            groups[rank].abort(f"rank {rank} failed: {error}")

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    for error in errors:
        if error is not None and not (isinstance(error, mlc.ProcessError) and error.is_told):
            raise error
    for error in errors:
        if error is not None:
            raise error
    return results


def optimizer(kind: str) -> mlc.Optimizer:
    """One of those the tests train with."""
    clipped = {"applies_gradient_clipping": True, "maximum_clipping_norm": 0.1}
    types = mlc.GradientClippingType
    settings: dict[str, Any] = {
        "global norm": {**clipped, "gradient_clipping_type": types.BY_GLOBAL_NORM},
        "norm": {**clipped, "gradient_clipping_type": types.BY_NORM},
    }.get(kind, {})
    descriptor = mlc.OptimizerDescriptor(learning_rate=0.05, **settings)
    if kind == "sgd":
        return mlc.SGDOptimizer(descriptor, momentum_scale=0.9)
    if kind == "rmsprop":
        return mlc.RMSPropOptimizer(descriptor)
    if kind == "adamw":
        return mlc.AdamWOptimizer(descriptor)
    return mlc.AdamOptimizer(descriptor)


#: The random stream belongs to the process: one thread at a time sets it and draws the weights of a network.
building = threading.Lock()


def network(
    kind: str = "adam", *, normalizes: bool = False, across: bool = False, drops: bool = False, sums: bool = False
) -> mlc.TrainingGraph:
    """A small classifier with the same weights each time."""
    with building:
        mlc.Platform.set_rng_seed_to(3)
        graph = mlc.Graph()
        x = graph.input((BATCH, 10), "x")
        y = graph.dense(x, 64, activation="tanh")
        if normalizes:
            y = graph.normalize(y, across_group=across)
        if drops:
            y = graph.dropout(y, 0.25)
        y = graph.dense(y, 3)
        labels = mlc.Tensor(shape=(BATCH, 3))
        labels.label = "t"
        reduction = mlc.ReductionType.SUM if sums else mlc.ReductionType.MEAN
        loss = mlc.LossLayer(mlc.LossDescriptor(mlc.LossType.SOFTMAX_CROSS_ENTROPY, reduction))
        training = mlc.TrainingGraph([graph], loss, optimizer(kind))
        training.add_inputs({"x": x}, {"t": labels})
        training.add_outputs({"y": y})
    return training


def parameters(training: mlc.TrainingGraph) -> list[np.ndarray]:
    """All parameters, statistics and optimizer state."""
    layers = [node.layer for node in training.nodes]
    tensors = [slot.tensor for layer in layers for slot in layer.parameters.values()]
    tensors += [tensor for layer in layers for tensor in layer.statistics.values()]
    arrays = [tensor.data.copy() for tensor in tensors]
    return arrays + [np.asarray(state.bytes).view(np.float32).copy() for t in tensors for state in t.optimizer_data]


def train(
    group: mlc.Group | None, kind: str = "adam", last: int = 17, **how: bool
) -> tuple[list[float], list[np.ndarray]]:
    """Losses and everything that was learned, after a few steps of which the last has fewer samples."""
    training = network(kind, **how)
    training.compile(device=mlc.Device.cpu(), group=group)
    losses = []
    for step in range(STEPS):
        rows = last if step == STEPS - 1 else BATCH
        run = training.execute({"x": X[step][:rows]}, {"t": T[step][:rows]}, batch_size=rows)
        losses.append(float(run.result.data[0]))
    return losses, parameters(training)


def same(one: Any, other: Any) -> bool:
    """Bitwise equal losses and arrays?"""
    return one[0] == other[0] and all(np.array_equal(a, b) for a, b in zip(one[1], other[1], strict=True))


def two_losses() -> mlc.TrainingGraph:
    """A network with a mean and a sum to minimise."""
    with building:
        mlc.Platform.set_rng_seed_to(3)
        graph = mlc.Graph()
        x = graph.input((BATCH, 10), "x")
        y = graph.dense(x, 3)
        labels = {name: mlc.Tensor(shape=(BATCH, 3)) for name in "tu"}
        for name, reduction in (("t", mlc.ReductionType.MEAN), ("u", mlc.ReductionType.SUM)):
            loss = mlc.LossLayer(mlc.LossDescriptor(mlc.LossType.MEAN_SQUARED_ERROR, reduction, weight=0.1))
            graph.node(loss, sources=[y], loss_labels=[labels[name]])
        training = mlc.TrainingGraph([graph], None, optimizer("sgd"))
        training.add_inputs({"x": x}, labels)
    return training
