"""mlc.initializers: their distributions by torch.nn.init's formulas, true fans, seeds, functions, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import mlcompute as mlc
from mlcompute.ops.op import Array

I = mlc.initializers


def drawn(initializer: Any, *shape: int) -> Array:
    mlc.Platform.set_rng_seed_to(7)
    data = mlc.Tensor(shape=shape, random_initializer_type=initializer).data
    assert data is not None
    return data.astype(np.float64)


BY_TORCH: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "he normal": (I.HeNormal(), lambda w: torch.nn.init.kaiming_normal_(w, nonlinearity="relu")),
    "he normal, out, leaky": (
        I.HeNormal(0.2, "out"),
        lambda w: torch.nn.init.kaiming_normal_(w, a=0.2, mode="fan_out"),
    ),
    "he uniform": (I.HeUniform(), lambda w: torch.nn.init.kaiming_uniform_(w, nonlinearity="relu")),
    "glorot uniform": (I.GlorotUniform(1.5), lambda w: torch.nn.init.xavier_uniform_(w, gain=1.5)),
    "glorot normal": (I.GlorotNormal(), torch.nn.init.xavier_normal_),
    "normal": (I.Normal(0.5, 0.2), lambda w: torch.nn.init.normal_(w, 0.5, 0.2)),
    "uniform": (I.Uniform(-1, 3), lambda w: torch.nn.init.uniform_(w, -1, 3)),
    "truncated normal": (I.TruncatedNormal(0.1, 0.5), lambda w: torch.nn.init.trunc_normal_(w, 0.1, 0.5, -0.9, 1.1)),
    "constant": (I.Constant(0.25), lambda w: torch.nn.init.constant_(w, 0.25)),
}


@pytest.mark.parametrize("name", BY_TORCH)
@pytest.mark.parametrize("shape", [(200, 300), (60, 40, 5, 5), (50, 20, 3, 3, 3)])
def test_the_same_distribution_as_in_pytorch(name: str, shape: tuple[int, ...]) -> None:
    ours, theirs = BY_TORCH[name]
    torch.manual_seed(0)
    a, b = np.sort(drawn(ours, *shape).ravel()), np.sort(theirs(torch.empty(shape)).numpy().ravel().astype(np.float64))
    spread = b.std() or 1.0
    assert abs(a.mean() - b.mean()) < 8 * spread / math.sqrt(a.size)
    assert abs(a.std() - b.std()) < 8 * spread / math.sqrt(a.size)
    # The largest distance of both distribution functions.
    both = np.concatenate((a, b))
    distance = np.abs(np.searchsorted(a, both, "right") - np.searchsorted(b, both, "right")).max() / a.size
    assert distance < 2.0 * math.sqrt(2 / a.size)


@pytest.mark.parametrize("shape", [(20, 30), (30, 20), (16, 4, 3, 3), (8, 8)])
def test_orthogonal(shape: tuple[int, ...]) -> None:
    w = drawn(I.Orthogonal(2.0), *shape).reshape(shape[0], -1)
    gram = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
    np.testing.assert_allclose(gram, 4.0 * np.eye(len(gram)), atol=1e-5)


def test_builders_use_true_fans() -> None:
    graph = mlc.Graph()
    x = graph.input((2, 32, 8, 8), "x")
    graph.convolution(x, 64, kernel=3, groups=4, initializer=I.HeNormal(), name="grouped")
    w = graph.layer("grouped").weights.data
    assert w is not None
    assert abs(w.std() - math.sqrt(2 / (8 * 9))) < 0.005
    # ML Compute's own spelling of the shape does not tell the fans; the layer does.
    flat = mlc.Tensor(shape=(1, 64 * 32, 3, 3), random_initializer_type=I.HeNormal())
    sizes = mlc.ConvolutionDescriptor(3, 32, 64)
    mlc.ConvolutionLayer(flat, None, sizes)
    assert flat.data is not None
    assert abs(flat.data.std() - math.sqrt(2 / (32 * 9))) < 0.002
    square = mlc.Tensor(shape=(1, 6 * 4, 2, 2), random_initializer_type=I.Orthogonal())
    mlc.ConvolutionLayer(square, None, mlc.ConvolutionDescriptor(2, 4, 6))
    assert square.data is not None
    rows = square.data.reshape(6, 16)
    np.testing.assert_allclose(rows @ rows.T, np.eye(6), atol=1e-5)


WORDS = ["glorot_uniform", "glorot_normal", "he_uniform", "he_normal", "orthogonal", "truncated_normal", "zeros"]


@pytest.mark.parametrize("word", WORDS)
def test_every_builder_takes_every_initializer(word: str) -> None:
    graph = mlc.Graph()
    image = graph.input((2, 4, 6, 6), "image")
    words = graph.input((2, 5), "words", data_type=mlc.DataType.INT32)
    graph.convolution(image, 8, initializer=word)
    graph.depthwise_convolution(image, initializer=word)
    rows = graph.embedding(words, 10, 8, initializer=word)
    graph.lstm(rows, 4, initializer=word)
    graph.gru(rows, 4, initializer=word)
    graph.attention(rows, heads=2, initializer=word)
    graph.dense(rows, 3, initializer=word)
    for layer in graph.layers:
        for slot in layer.parameters.values():
            assert slot.tensor.has_valid_numerics


def test_a_function_of_your_own_is_seeded() -> None:
    seen = []

    def mine(shape: tuple[int, ...], fans: tuple[float, float], random: np.random.Generator) -> Any:
        seen.append(fans)
        return random.standard_normal(shape) / fans[0]

    def weights() -> Any:
        mlc.Platform.set_rng_seed_to(3)
        graph = mlc.Graph()
        graph.dense(graph.input((2, 4), "x"), 5, initializer=mine, name="a")
        return graph.layer("a").weights.data

    np.testing.assert_array_equal(weights(), weights())
    assert seen[-1] == (4, 5)
    mlc.Platform.set_rng_seed_to(4)
    other = mlc.Tensor(shape=(5, 4), random_initializer_type=mine).data
    assert not np.array_equal(other, weights())


def test_float16() -> None:
    t = mlc.Tensor(shape=(5, 4), random_initializer_type=I.HeNormal(), data_type=mlc.DataType.FLOAT16)
    assert t.data is not None
    assert t.data.dtype == np.float16


REFUSED = [
    (lambda: I.HeNormal(fan="both"), mlc.DataError, "fan is 'both'"),
    (lambda: I.Normal(0.0, 0.0), mlc.DataError, "standard_deviation is 0.0"),
    (lambda: I.Uniform(1, 0), mlc.DataError, "low is 1, high is 0"),
    (lambda: I.TruncatedNormal(limit=0.01), mlc.DataError, "nearly nothing is inside"),
    (lambda: I.Constant("1"), TypeError, "value must be a number"),
    (lambda: I.Orthogonal(math.nan), mlc.DataError, "gain is nan"),
    (lambda: drawn(lambda shape, fans, random: np.zeros(3), 2, 3), mlc.DataError, "float64 of shape (3,)"),
    (lambda: mlc.Tensor(shape=(2,), random_initializer_type=I.Normal(), data_type=mlc.DataType.INT32), mlc.DataError,
     "random values need a floating type"),
    (lambda: mlc.Graph().dense(mlc.Tensor(shape=(2, 3)), 4, initializer="kaiming"), mlc.GraphError,
     "initializer is 'kaiming'"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "says"), REFUSED)
def test_refusals(make: Callable[[], Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert says in str(caught.value)


def test_values_are_no_initializer() -> None:
    graph = mlc.Graph()
    x, values = graph.input((2, 3), "x"), np.ones((4, 3), np.float32)
    for build in (lambda: graph.dense(x, 4, initializer=values), lambda: graph.parameter((4, 3), values)):  # type: ignore[arg-type]
        with pytest.raises(mlc.DataError, match=r"(?s)a ndarray is not an initializer.*fix .*data=..., or weights="):
            build()
    with pytest.raises(TypeError, match=r"shape is an array; values are parameter\(data=...\)"):
        graph.parameter(values)
    for make in (graph.parameter, graph.input):
        with pytest.raises(TypeError, match="shape must be a list of whole numbers, not 3"):
            make(3)  # type: ignore[operator]
