"""One graph, several lengths and image sizes: each as a graph built for it, with weights and optimizer state shared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc

RNG = np.random.default_rng(0)
Shape = tuple[int, ...]
Build = Callable[[mlc.Graph, mlc.Tensor], mlc.Tensor]


def sequence(g: mlc.Graph, x: mlc.Tensor) -> mlc.Tensor:
    y = g.normalize(g.attention(g.dense(x, 8, activation="gelu"), heads=2), "layer")
    return g.dense(g.lstm(y, 6), 3)


def pooled(g: mlc.Graph, x: mlc.Tensor) -> mlc.Tensor:
    y = g.node(mlc.ReductionLayer(mlc.ReductionType.MEAN, dimension=1), source=g.dense(x, 6))
    return g.dense(g.reshape(shape=(4, -1), source=y), 3)


def images(g: mlc.Graph, x: mlc.Tensor) -> mlc.Tensor:
    y = g.normalize(g.convolution(x, 4, kernel=3, activation="relu"), "batch")
    return g.convolution(g.upsample(g.pool(y), 2), 2, kernel=3)


def open_reshape(g: mlc.Graph, x: mlc.Tensor) -> mlc.Tensor:
    return g.dense(g.reshape(shape=(4, -1, 4), source=x), 3)


NETS: dict[str, tuple[Build, list[int], list[Shape]]] = {
    "sequences": (sequence, [1], [(4, 6, 5), (4, 11, 5), (2, 3, 5), (4, 1, 5)]),
    "pooled": (pooled, [1], [(4, 6, 5), (4, 9, 5), (3, 2, 5)]),
    "images": (images, [2, 3], [(4, 3, 8, 8), (4, 3, 12, 10), (2, 3, 4, 6)]),
    "reshaped": (open_reshape, [1], [(4, 6, 8), (4, 9, 8), (2, 3, 8)]),
}


def built(build: Build, shape: Shape, varies: list[int], out: Shape | None = None) -> mlc.TrainingGraph:
    mlc.Platform.set_rng_seed_to(3)
    graph = mlc.Graph()
    x = graph.input(shape, "x", varies=varies)
    y = build(graph, x)
    t = graph.input(y.descriptor.shape, "t")
    graph.loss(y, t, "mse")
    training = mlc.TrainingGraph([graph], None, mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=1e-2)))
    training.add_inputs({"x": x}, {"t": t})
    training.add_outputs({"y": y})
    training.compile(device=mlc.Device.cpu())
    return training


def weights(graph: mlc.Graph) -> list[np.ndarray]:
    return [np.array(slot.tensor) for layer in graph.layers for slot in layer.parameters.values()]


def predicted(graph: mlc.TrainingGraph) -> np.ndarray:
    tensor = next(node.sources[0] for node in graph.nodes if isinstance(node.layer, mlc.LossLayer))
    assert tensor.data is not None
    return tensor.data


@pytest.mark.parametrize("name", NETS)
def test_as_a_graph_of_that_size(name: str) -> None:
    """Steps on one size after the other, each beside a graph that was built for it and has the same weights."""
    build, varies, shapes = NETS[name]
    training = built(build, shapes[0], varies)
    for shape in [*shapes, *shapes]:
        full = (shapes[0][0], *shape[1:])
        alone = built(build, full, [])
        out = predicted_shape(alone)
        for mine, theirs in zip(alone.layers, training.layers, strict=True):
            for slot in mine.parameters:
                mine.parameters[slot].tensor.data = np.array(theirs.parameters[slot].tensor)
            for key in mine.statistics:
                mine.statistics[key].data = np.array(theirs.statistics[key])
        x = RNG.standard_normal(shape).astype(np.float32)
        t = RNG.standard_normal((shape[0], *out[1:])).astype(np.float32)
        result = training.execute({"x": x}, {"t": t}, batch_size=shape[0]).result
        expected = alone.execute({"x": x}, {"t": t}, batch_size=shape[0]).result
        np.testing.assert_array_equal(predicted(training), predicted(alone))
        assert result.data.item() == expected.data.item()
    assert len(training.programs) >= len(shapes)


def predicted_shape(graph: mlc.TrainingGraph) -> Shape:
    return next(n.sources[0].descriptor.shape for n in graph.nodes if isinstance(n.layer, mlc.LossLayer))


def test_the_optimizer_state_is_shared() -> None:
    """Adam's moments go on from size to size: data repeated along time has the gradients it has once."""

    def mean(g: mlc.Graph, x: mlc.Tensor) -> mlc.Tensor:
        return g.dense(x, 2)

    one, several = built(mean, (4, 6, 5), []), built(mean, (4, 6, 5), [1])
    for step in range(6):
        x, t = RNG.standard_normal((4, 6, 5)).astype(np.float32), RNG.standard_normal((4, 6, 2)).astype(np.float32)
        one.execute({"x": x}, {"t": t})
        many = step % 3 + 1
        several.execute({"x": np.tile(x, (1, many, 1))}, {"t": np.tile(t, (1, many, 1))})
    for a, b in zip(weights(one), weights(several), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_passes_one_by_one_and_outputs() -> None:
    training = built(open_reshape, (4, 6, 8), [1])
    mine = np.zeros((4, 18, 3), np.float32)
    training.execute(
        {"x": np.ones((4, 9, 8), np.float32)}, {"t": np.zeros((4, 18, 3), np.float32)}, outputs_data={"y": mine}
    ).wait()
    assert mine.any()
    with pytest.raises(mlc.DataError, match="output 'y'"):
        training.execute(
            {"x": np.ones((4, 9, 8), np.float32)}, {"t": np.zeros((4, 18, 3), np.float32)},
            outputs_data={"y": np.zeros((4, 12, 3), np.float32)},
        )  # fmt: skip


def test_least_recently_used_sizes_go() -> None:
    training = built(open_reshape, (4, 6, 8), [1])
    training.size_limit = 2

    def run(length: int) -> float:
        x, t = np.ones((4, length, 8), np.float32), np.zeros((4, 2 * length, 3), np.float32)
        return float(training.execute({"x": x}, {"t": t}).result.data.item())

    for length in (2, 3, 2, 4):
        run(length)
    assert list(training.programs) == [
        "fused 4", "split 4", "fused 4, x (4, 2, 8), t (4, 4, 3)", "fused 4, x (4, 4, 8), t (4, 8, 3)"
    ]  # fmt: skip
    assert run(3) < 10
    assert "fused 4, x (4, 2, 8), t (4, 4, 3)" not in training.programs
    before = training.device_memory_size
    run(50)
    assert training.device_memory_size > before
    training.size_limit = 1
    assert len(training.programs) == 3
    with pytest.raises(mlc.DataError, match="size_limit is 0"):
        training.size_limit = 0


def test_refusals_leave_everything_as_it_was() -> None:
    def fixed(g: mlc.Graph, x: mlc.Tensor) -> mlc.Tensor:
        return g.dense(g.reshape(shape=(4, 12, 4), source=x), 3)

    training = built(fixed, (4, 6, 8), [1])
    t = np.zeros((4, 12, 3), np.float32)
    with pytest.raises(mlc.ShapeError, match=r"(?s)shape \[4, 12, 4\] has 192 elements.*x \(4, 9, 8\).*-1"):
        training.execute({"x": np.ones((4, 9, 8), np.float32)}, {"t": t})
    with pytest.raises(mlc.ShapeError, match="labels"):
        built(open_reshape, (4, 6, 8), [1]).execute({"x": np.ones((4, 9, 8), np.float32)}, {"t": t})
    with pytest.raises(mlc.DataError, match="'x'"):  # an axis that does not vary
        training.execute({"x": np.ones((4, 6, 9), np.float32)}, {"t": t})
    assert np.isfinite(training.execute({"x": np.ones((4, 6, 8), np.float32)}, {"t": t}).result.data.item())
    assert list(training.programs) == ["fused 4", "split 4"]


def test_how_it_is_said() -> None:
    graph = mlc.Graph()
    assert graph.input((4, 6, 8), varies=[-2]).varies == (1,)
    with pytest.raises(mlc.ShapeError, match=r"(?s)leaves extents open.*varies=\[1\]"):
        graph.input((32, None, 64))  # type: ignore[list-item]
    with pytest.raises(mlc.ShapeError, match=r"number of samples, \(32, 784\): a graph runs with any other, too"):
        graph.input((None, 784))  # type: ignore[list-item]
    with pytest.raises(mlc.ShapeError, match=r"varies=\[1\]; the batch may be of any size"):
        graph.input((None, None, 8))  # type: ignore[list-item]
    with pytest.raises(mlc.ShapeError, match="the batch, which may be of any size"):
        graph.input((4, 6), varies=[0])
    with pytest.raises(mlc.ShapeError, match="not one of 2 axes"):
        graph.input((4, 6), varies=[2])


def test_one_sample_of_another_size_in_a_list() -> None:
    graph = mlc.Graph()
    x = graph.input((4, 1, 8, 8), "x", varies=[2, 3])
    graph.global_pool(graph.convolution(x, 2, kernel=3))
    images = [np.random.default_rng(k).normal(size=(1, 8, size)).astype(np.float32) for k, size in enumerate((12, 8))]
    both = graph.predict(images)
    for image, expected in zip(images, both, strict=True):
        np.testing.assert_allclose(graph.predict([image])[0], expected, rtol=1e-5, atol=1e-6)


def test_it_is_kept_in_files_and_copies(tmp_path: Path) -> None:
    training = built(open_reshape, (4, 6, 8), [1])
    mlc.save(tmp_path / "net", training)
    loaded: Any = mlc.load(tmp_path / "net")
    for graph in (loaded, copy.deepcopy(training)):
        if graph.device is None:
            graph.compile(device=mlc.Device.cpu())
        t = np.zeros((4, 18, 3), np.float32)
        assert graph.execute({"x": np.ones((4, 9, 8), np.float32)}, {"t": t}).result.data is not None
