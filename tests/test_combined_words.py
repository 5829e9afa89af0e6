"""Several of the short ways to write things, used together, as an ordinary program does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc

RNG = np.random.default_rng(0)
Array = np.ndarray


def computed(build: Callable[[mlc.Tensor], mlc.Tensor], data: Array, shape: tuple[int, ...], varies: Any = ()) -> Array:
    """What an expression of one input is, for data of another size than the graph was built with."""
    graph = mlc.Graph()
    x = graph.input(shape, "x", varies=varies)
    build(x)
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.compile(device=mlc.Device.cpu())
    return np.array(inference.execute({"x": data}, batch_size=len(data)).result.data)


SLICES: dict[str, Callable[[Any], Any]] = {
    "all but the last": lambda x: x[:, :-1],
    "the last": lambda x: x[:, -1],
    "all but the first": lambda x: x[:, 1:],
    "every second": lambda x: x[:, ::2],
    "the last two": lambda x: x[:, -2:],
    "of features only": lambda x: x[..., :2],
    "of samples only": lambda x: x[1:],
    "the last sample": lambda x: x[-1],
    "all but the last sample": lambda x: x[:-1],
    "differences": lambda x: x[:, 1:] - x[:, :-1],
    "a new axis": lambda x: x[:, :, None],
    "a new last axis": lambda x: x[..., None],
    "of one sample": lambda x: x[0, 1:],
}


@pytest.mark.parametrize("name", SLICES)
@pytest.mark.parametrize("shape", [(4, 5, 3), (4, 11, 3), (2, 9, 3), (3, 8, 3)])
def test_slices_where_lengths_and_batches_vary(name: str, shape: tuple[int, ...]) -> None:
    """What counts from the end of an axis counts from the end it has in this run, and a whole axis is whole."""
    data = RNG.standard_normal(shape).astype(np.float32)
    np.testing.assert_array_equal(computed(SLICES[name], data, (4, 8, 3), [1]), SLICES[name](data))


@pytest.mark.parametrize("length", [5, 11])
def test_stack_and_variance_where_lengths_vary(length: int) -> None:
    data = RNG.standard_normal((4, length, 3)).astype(np.float32)
    stacked = computed(lambda x: mlc.stack([x, 2 * x], 2), data, (4, 8, 3), [1])
    np.testing.assert_array_equal(stacked, np.stack([data, 2 * data], 2))
    variance = computed(lambda x: x.var(1, correction=1), data, (4, 8, 3), [1])
    np.testing.assert_allclose(variance, data.var(1, ddof=1), rtol=1e-5)


def test_axes_that_come_and_go_where_any_of_them_varies() -> None:
    """Twice the height may not become twice the channels: extents are those of the run, never worked out."""
    data = RNG.standard_normal((2, 3, 8, 6)).astype(np.float32)
    forms: list[tuple[Callable[[mlc.Tensor], mlc.Tensor], tuple[int, ...]]] = [
        (lambda x: x[..., None], (2, 3, 8, 6, 1)),
        (lambda x: x[None], (1, 2, 3, 8, 6)),
        (lambda x: x[:, 0], (2, 8, 6)),
        (lambda x: x.flatten(2), (2, 3, 48)),
        (lambda x: x.flatten(), (2, 144)),
        (lambda x: mlc.stack([x, x], 1), (2, 2, 3, 8, 6)),
    ]
    for build, shape in forms:
        assert computed(build, data, (2, 3, 4, 3), [2, 3]).shape == shape
    sequence = computed(lambda x: x.flatten(2), data, (2, 3, 4, 6), [2])
    np.testing.assert_array_equal(sequence, data.reshape(2, 3, 48))
    heads = computed(lambda x: x.flatten(2), data.transpose(0, 2, 1, 3), (2, 4, 3, 6), [1])
    np.testing.assert_array_equal(heads, data.transpose(0, 2, 1, 3).reshape(2, 8, 18))


@pytest.mark.parametrize("kind", ["average", "max"])
def test_global_pooling_of_images_of_any_size(kind: Any) -> None:
    data = RNG.standard_normal((2, 3, 9, 7)).astype(np.float32)
    pooled = computed(lambda x: x.graph.global_pool(x, kind=kind), data, (2, 3, 5, 5), [2, 3])
    expected = data.mean((2, 3), keepdims=True) if kind == "average" else data.max((2, 3), keepdims=True)
    np.testing.assert_allclose(pooled, expected, rtol=1e-5, atol=1e-6)
    graph = mlc.Graph()
    with pytest.raises(mlc.ShapeError, match="vary in size"):
        graph.global_pool(graph.input((2, 3, 5, 5), "x", varies=[2, 3]), kind="l2")


def test_global_pooling_in_a_graph_applied_to_larger_images() -> None:
    inner = mlc.Graph()
    inner.dense(inner.global_pool(inner.input((2, 3, 5, 5), "image")), 4, name="head")
    data = RNG.standard_normal((2, 3, 8, 7)).astype(np.float32)
    head = inner.layer("head")
    expected = data.mean((2, 3)) @ np.array(head.weights.data).T + np.array(head.biases.data).reshape(-1)
    np.testing.assert_allclose(computed(inner, data, data.shape).reshape(2, 4), expected, rtol=1e-4, atol=1e-5)


def test_a_graph_of_expressions_applied_to_another_batch(tmp_path: Path) -> None:
    inner = mlc.Graph()
    z = inner.input((4, 6), "z")
    mlc.concatenate([z[None, :, 1:] - z[None, :, :-1], z[None, :, -1:]], -1)
    graph = mlc.Graph()
    x = graph.input((10, 6), "x")
    y = inner(x)
    data = RNG.standard_normal((10, 6)).astype(np.float32)
    expected = np.concatenate([data[None, :, 1:] - data[None, :, :-1], data[None, :, -1:]], -1)
    mlc.save(tmp_path / "graph.safetensors", graph)
    loaded = mlc.load(tmp_path / "graph.safetensors")
    for one, source in ((graph, x), (loaded, loaded.input_tensors[0])):
        inference = mlc.InferenceGraph([one])
        inference.add_inputs({"x": source})
        inference.compile(device=mlc.Device.cpu())
        np.testing.assert_array_equal(inference.execute({"x": data}).result.data, expected)
    assert y.shape == (1, 10, 6)


def test_what_fails_leaves_the_graph_as_it_was() -> None:
    """Expressions that are several layers are all of them or none."""
    graph = mlc.Graph()
    x, y = graph.input((4, 6), "x"), graph.input((4, 5), "y")
    with pytest.raises(mlc.ShapeError, match="source 1 has shape"):
        mlc.stack([x, y], 1)
    with pytest.raises(mlc.ShapeError, match="a correction of 1 along axes"):
        x.var(0, correction=1)
    with pytest.raises(mlc.ShapeError, match="dimension is 5"):
        x.var(5)
    assert graph.layers == []
    assert mlc.stack([x, x], 1).label == "concatenate1"


def test_copies_of_a_trainer_with_a_function_as_loss_know_its_labels() -> None:
    graph = mlc.Graph()
    h = graph.dense(graph.input((8, 4), "x"), 6, activation="relu")
    graph.dense(h, 3, name="kind")
    graph.dense(h, 1, name="size")
    loss = {"kind": "softmax_cross_entropy", "size": lambda y, t: abs(y - t).mean()}
    metrics = {"kind": ["accuracy"], "size": ["mae"]}
    trainer = mlc.Trainer(graph, loss=loss, metrics=metrics, device=mlc.Device.cpu())
    x = RNG.standard_normal((20, 4)).astype(np.float32)
    labels = {"kind": RNG.integers(0, 3, 20), "size": RNG.standard_normal((20, 1))}
    trainer.fit(x, labels, verbose=0)
    scores = trainer.evaluate(x, labels)
    for copied in (copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))):
        assert copied.evaluate(x, labels) == scores
        assert "size_mae" in copied.fit(x, labels, verbose=0).history
