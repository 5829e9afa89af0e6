"""Lifetimes: arrays outlive their graph, graphs nobody needs are gone, and many cycles leave nothing behind."""

from __future__ import annotations

import gc
import os
import weakref

import numpy as np
import pytest

import mlcompute as mlc

#: How often the slow test creates, compiles, runs and drops a graph.
CYCLES = int(os.environ.get("MLC_LIFETIME_CYCLES", "10000"))


def trained(seed: int = 0) -> tuple[mlc.TrainingGraph, mlc.Tensor]:
    """A small graph after one step, and its prediction."""
    x, t = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 2))
    w = mlc.Tensor(shape=(2, 3), data=np.full((2, 3), 0.5, np.float32))
    sizes = mlc.ConvolutionDescriptor(input_feature_channel_count=3, output_feature_channel_count=2)
    graph = mlc.Graph()
    y = graph.node(mlc.FullyConnectedLayer(w, None, sizes), source=x)
    optimizer = mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=0.1))
    training = mlc.TrainingGraph([graph], mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN), optimizer)
    training.add_inputs({"x": x}, {"t": t})
    training.add_outputs({"y": y})
    training.compile(device=mlc.Device.cpu())
    training.execute({"x": np.ones((4, 3))}, {"t": np.zeros((4, 2))}).wait()
    return training, y


def test_arrays_outlive_the_graph() -> None:
    graph, y = trained()
    weights = graph.layers[0].weights  # type: ignore[attr-defined]
    values, live, loss = y.data, weights.data, graph.execute(
        {"x": np.ones((4, 3))}, {"t": np.zeros((4, 2))}
    ).result
    before = values.copy(), live.copy(), loss.data.copy()
    kept = loss.data
    del graph
    gc.collect()
    for _ in range(20):  # somebody else may take the memory that was given back
        trained()
    np.testing.assert_array_equal(values, before[0])
    np.testing.assert_array_equal(live, before[1])
    np.testing.assert_array_equal(kept, before[2])


def test_a_dropped_graph_is_gone_with_its_memory() -> None:
    graph, _ = trained()
    arena = weakref.ref(graph._compiled)
    gone = weakref.ref(graph)
    del graph
    gc.collect()
    assert gone() is None
    assert arena() is None


def cycles(count: int) -> list[int]:
    """Objects alive after every tenth part of so many graphs made, run and dropped."""
    alive = []
    for index in range(count):
        trained()
        if index % (count // 10) == 0:
            gc.collect()
            alive.append(len(gc.get_objects()))
    return alive


def test_many_graphs_leave_nothing_behind() -> None:
    trained()
    alive = cycles(100)
    assert alive[-1] <= alive[1] + 50, f"objects pile up: {alive}"


@pytest.mark.slow
def test_very_many_graphs_leave_nothing_behind() -> None:
    trained()
    alive = cycles(CYCLES)
    assert alive[-1] <= alive[1] + 50, f"objects pile up: {alive}"
