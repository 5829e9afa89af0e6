"""Groups on other engines, and graphs whose passes the caller joins: linked graphs and gradients of one's own."""

import os
import subprocess
import sys

import numpy as np
import pytest

import mlcompute as mlc
from tests.group.threads import BATCH, T, X, building, optimizer, run_group

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CODE = """
from tests.devices import cuda_emulator
cuda_emulator.register()
from tests.group.threads import run_group, same, train
for how in ({"normalizes": True}, {"normalizes": True, "across": True}):
    (one,) = run_group(1, lambda group: train(group, **how), slices=3)
    assert all(same(other, one) for other in run_group(2, lambda group: train(group, **how), slices=3))
"""


@pytest.mark.parametrize("engine", ["remote", "reference", pytest.param("cuda-emulated", marks=pytest.mark.slow)])
def test_an_engine_gives_the_same_bits_with_any_number_of_processes(engine):
    environment = {**os.environ, "PYTHONPATH": ROOT, "MLCOMPUTE_ENGINE": engine, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr


def halves():
    """Two linked graphs, the first half of a network and the second."""
    with building:
        mlc.Platform.set_rng_seed_to(8)
        first, second = mlc.Graph(), mlc.Graph()
        x = first.input((BATCH, 10), "x")
        h = first.dense(x, 12, activation="tanh")
        y = second.dense(h, 3)
        assert y is not None
        labels = mlc.Tensor(shape=(BATCH, 3))
        one = mlc.TrainingGraph([first], None, optimizer("sgd"))
        one.add_inputs({"x": x})
        loss = mlc.LossLayer(mlc.LossDescriptor(mlc.LossType.MEAN_SQUARED_ERROR, mlc.ReductionType.MEAN))
        two = mlc.TrainingGraph([second], loss, optimizer("sgd"))
        two.add_inputs({"h": h}, {"t": labels})
    return one, two, x, labels


def linked(group):
    one, two, x, labels = halves()
    one.link([two])
    for graph in (one, two):
        graph.compile(device=mlc.Device.cpu(), options=mlc.GraphCompilationOptions.LINK_GRAPHS, group=group)
    for step in range(2):
        x.bind_and_write_data(X[step], to=mlc.Device.cpu())
        labels.bind_and_write_data(T[step], to=mlc.Device.cpu())
        one.execute_forward()
        two.execute_forward()
        two.execute_gradient()
        one.execute_gradient()
        two.execute_optimizer_update()
        one.execute_optimizer_update()
    for graph in (one, two):
        graph.wait()
    layers = [node.layer for graph in (one, two) for node in graph.nodes]
    return [slot.tensor.data.copy() for layer in layers for slot in layer.parameters.values()]


def test_linked_graphs():
    alone = linked(None)
    (one,) = run_group(1, linked)
    for a, b in zip(one, alone, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    for other in run_group(3, linked):
        assert all(np.array_equal(a, b) for a, b in zip(other, one, strict=True))


def own_gradient(group):
    with building:
        mlc.Platform.set_rng_seed_to(8)
        graph = mlc.Graph()
        x = graph.input((BATCH, 10), "x")
        y = graph.dense(x, 3)
        training = mlc.TrainingGraph([graph], None, optimizer("sgd"))
        training.add_inputs({"x": x})
        fed = training.allocate_user_gradient(y)
    training.compile(device=mlc.Device.cpu(), group=group)
    for step in range(2):
        x.bind_and_write_data(X[step], to=mlc.Device.cpu())
        training.execute_forward()
        fed.bind_and_write_data((y.data - T[step]) / BATCH, to=mlc.Device.cpu())
        training.execute_gradient()
        training.execute_optimizer_update()
    training.wait()
    return [slot.tensor.data.copy() for slot in training.nodes[0].layer.parameters.values()]


def test_gradients_of_ones_own():
    alone = own_gradient(None)
    (one,) = run_group(1, own_gradient)
    for a, b in zip(one, alone, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    for other in run_group(3, own_gradient):
        assert all(np.array_equal(a, b) for a, b in zip(other, one, strict=True))
