"""Several of the short ways to write things, used together, as an ordinary program does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
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
