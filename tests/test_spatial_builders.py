"""graph.convolution, pool and global_pool of sequences, images and volumes: one word for all three."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mlcompute as mlc

SHAPES = {1: (4, 3, 12), 2: (4, 3, 8, 10), 3: (4, 3, 4, 6, 8)}


@pytest.mark.parametrize("axes", SHAPES)
def test_one_word_for_all(axes: int) -> None:
    graph = mlc.Graph()
    x = graph.input(SHAPES[axes], "x")
    image = SHAPES[axes][2:]
    y = graph.convolution(x, 5, kernel=3, stride=2, activation="relu")
    assert y.descriptor.shape == (4, 5, *(-(-extent // 2) for extent in image))
    assert graph.layer("convolution1").weights.descriptor.shape == (5, 3, *(3,) * axes)
    assert graph.convolution(x, 6, kernel=2, padding="valid", groups=3).descriptor.shape[1] == 6
    up = graph.convolution(x, 6, kernel=2, stride=2, transposed=True)
    assert up.descriptor.shape == (4, 6, *(2 * extent for extent in image))
    padded = graph.convolution(x, 6, kernel=3, padding=(1,) * axes, dilation=2)
    assert padded.descriptor.shape == (4, 6, *(extent - 2 for extent in image))
    assert graph.depthwise_convolution(x, 2).descriptor.shape == (4, 6, *image)
    for kind in ("max", "average", "l2"):
        assert graph.pool(x, 2, kind=kind).descriptor.shape == (4, 3, *(extent // 2 for extent in image))
        assert graph.global_pool(x, kind=kind).descriptor.shape == (4, 3, *(1,) * axes)


@pytest.mark.parametrize("axes", [1, 3])
def test_a_training_step_is_pytorchs(axes: int) -> None:
    mlc.Platform.set_rng_seed_to(0)
    graph = mlc.Graph()
    x = graph.input(SHAPES[axes], "x")
    y = graph.pool(graph.convolution(x, 5, kernel=3, activation="relu", name="conv"))
    graph.dense(graph.flatten(graph.global_pool(y)), 2, name="head")
    conv, head = graph.layer("conv"), graph.layer("head")
    weights = {
        name: torch.tensor(p.tensor.data.copy(), requires_grad=True)
        for layer in (conv, head)
        for name, p in ((f"{layer.label}.{k}", v) for k, v in layer.parameters.items())
    }
    trainer = mlc.Trainer(graph, loss="mse", optimizer=mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=0.1)))
    rng = np.random.default_rng(0)
    data, labels = rng.standard_normal(SHAPES[axes], np.float32), rng.standard_normal((4, 2), np.float32)
    trainer.fit(data, labels, epochs=1, shuffle=False, verbose=0)
    convolve, pool = (torch.conv1d, torch.max_pool1d) if axes == 1 else (torch.conv3d, torch.max_pool3d)
    h = pool(
        torch.relu(convolve(torch.tensor(data), weights["conv.weights"], weights["conv.biases"], padding="same")), 2
    )
    h = h.flatten(2).mean(2) @ weights["head.weights"].T + weights["head.biases"]
    torch.nn.functional.mse_loss(h, torch.tensor(labels)).backward()
    for layer in (conv, head):
        for name, p in layer.parameters.items():
            w = weights[f"{layer.label}.{name}"]
            expected = (w - 0.1 * w.grad).detach().numpy().reshape(p.tensor.descriptor.shape)
            np.testing.assert_allclose(p.tensor.data, expected, rtol=1e-4, atol=1e-6)


def test_features_on_the_last_axis_are_not_taken_for_a_length() -> None:
    graph = mlc.Graph()
    words = graph.embedding(graph.input((4, 9), "words", data_type=mlc.DataType.INT32), 10, 6)
    for build in (lambda: graph.convolution(words, 3), lambda: graph.pool(words), lambda: graph.global_pool(words)):
        with pytest.raises(mlc.ShapeError, match=r"features on the last axis(.|\n)*transpose\(\[0, 2, 1\]"):
            build()
    for kind, options in (("batch", {}), ("instance", {}), ("group", {"groups": 3})):
        with pytest.raises(mlc.ShapeError, match=r"features on the last axis(.|\n)*kind='layer'(.|\n)*transpose\(\["):
            graph.normalize(words, kind, **options)  # type: ignore[arg-type]
    assert len(graph.layers) == 1, "what is refused leaves nothing"
    assert graph.normalize(words, "layer").descriptor.shape == graph.normalize(words, "rms").descriptor.shape
    first = graph.transpose([0, 2, 1], source=words)
    assert graph.normalize(first, "batch").descriptor.shape == (4, 6, 9)
    assert graph.convolution(first, 3).descriptor.shape == (4, 3, 9)


def test_images_with_channels_last_are_remarked() -> None:
    graph = mlc.Graph()
    with pytest.warns(UserWarning, match=r"28 channels of 28 x 3(.|\n)*transpose\(0, 3, 1, 2\)"):
        graph.convolution(graph.input((4, 28, 28, 3), "image"), 8, kernel=3)
    for k, shape in enumerate([(4, 3, 28, 28), (4, 28, 14, 3), (4, 3, 3, 3)]):
        graph.convolution(graph.input(shape, f"other{k}"), 8, kernel=3)


def test_refusals_name_the_axes() -> None:
    graph = mlc.Graph()
    with pytest.raises(mlc.ShapeError, match=r"\(n, channels, depth, height, width\)"):
        graph.convolution(graph.input((4, 9), "x"), 3)
    with pytest.raises(mlc.ShapeError, match="padding has 2 entries"):
        graph.pool(graph.input((4, 9, 5), "y"), padding=(1, 1))


def test_dense_on_many_axes_where_features_are_last() -> None:
    graph = mlc.Graph()
    words = graph.input((2, 3, 4, 5), "words", data_type=mlc.DataType.INT32)
    assert graph.dense(graph.embedding(words, 10, 6), 7).descriptor.shape == (2, 3, 4, 5, 7)
    with pytest.raises(mlc.ShapeError, match="the source is an image"):
        graph.dense(graph.input((2, 3, 4, 5, 6), "volume"), 7)
