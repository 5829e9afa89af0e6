"""Device(precision="bf16"): networks learn what they learn in float32, with half the memory for activations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partialmethod

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.devices.device import Engine
from mlcompute.devices.reference import Reference
from mlcompute.devices.remote import Remote
from mlcompute.ops.op import Array
from tests.cases.case import Case
from tests.devices import cuda_cases
from tests.nets import MEAN, sgd, values_of
from tests.test_layers import CASES

CLASSES = 4
#: Half a unit in the last of bfloat16's 8 bits.
ROUNDING = 2.0**-8


def convolutional(graph: mlc.Graph) -> mlc.Tensor:
    x = graph.input((32, 3, 8, 8), "x")
    x = graph.pool(graph.convolution(x, 8, activation="relu"))
    x = graph.normalize(graph.convolution(x, 8), "batch")
    return graph.dense(graph.flatten(x), CLASSES)


def attending(graph: mlc.Graph) -> mlc.Tensor:
    x = graph.input((32, 6, 16), "x")
    x = graph.attention(graph.normalize(x, "layer"), heads=2)
    x = graph.dense(graph.flatten(x), 32, activation="gelu")
    return graph.dense(x, CLASSES)


def recurrent(graph: mlc.Graph) -> mlc.Tensor:
    x = graph.lstm(graph.input((32, 6, 16), "x"), 12, returns_sequences=False)
    return graph.dense(graph.dense(x, 32, activation="tanh"), CLASSES)


def maximal(graph: mlc.Graph) -> mlc.Tensor:
    """The gradient of a maximum looks for the elements that equal it, among numbers that are computed again."""
    x = graph.convolution(graph.input((32, 3, 8, 8), "x"), 8)
    x = graph.activation(graph.normalize(x, "batch"), "silu")
    return graph.dense(x.max((2, 3)), CLASSES)


NETWORKS = [convolutional, attending, recurrent, maximal]
Network = Callable[[mlc.Graph], mlc.Tensor]


class Trained:
    """A network after some steps on random data, all at once or pass by pass."""

    def __init__(self, network: Network, device: mlc.Device, *, split: bool = False, steps: int = 4) -> None:
        mlc.Platform.set_rng_seed_to(3)
        graph = mlc.Graph()
        scores = network(graph)
        x, t = next(graph.source_tensors(layer)[0] for layer in graph.layers), mlc.Tensor(shape=scores.descriptor.shape)
        rng = np.random.default_rng(0)
        data = rng.standard_normal(x.descriptor.shape).astype(np.float32)
        labels = np.eye(CLASSES, dtype=np.float32)[rng.integers(0, CLASSES, len(data))]
        loss = mlc.LossLayer.softmax_cross_entropy(MEAN)
        training = mlc.TrainingGraph([graph], loss, sgd())
        training.add_inputs({"x": x}, {"t": t})
        training.add_outputs({"scores": scores})
        training.compile(device=device)
        for _ in range(steps):
            if split:
                training.bind_and_write_data({"x": data, "t": labels}, for_inputs={"x": x, "t": t}, to=device)
                training.execute_forward()
                training.execute_gradient()
                training.execute_optimizer_update().wait()
            else:
                training.execute({"x": data}, {"t": labels}).wait()
        self.loss = float(np.asarray(training.result_tensors(loss)[0].data).reshape(-1)[0])
        self.scores = np.asarray(scores.data)
        self.weights: list[Array] = values_of(training)
        self.memory = training.device_memory_size


def assert_weights_agree(found: Trained, expected: Trained) -> None:
    """Weights after a few steps whose values are rounded to bfloat16 elsewhere, or not at all.

    Each of four steps rounds activations and their gradients, by up to 2^-8 of their size: 8 such roundings of all
    weights of a tensor together (over a dozen seeds the largest was 5). A single weight can be off by more: of two
    numbers that are equal in bfloat16 a maximum picks the first, and another order of the sums before decides which
    that is.
    """
    for one, other in zip(found.weights, expected.weights, strict=True):
        assert one.dtype == np.float32
        size = max(0.1 * np.sqrt(other.size), float(np.linalg.norm(other)))
        assert np.linalg.norm(one - other) <= 8 * ROUNDING * size
        np.testing.assert_allclose(one, other, atol=24 * ROUNDING * max(0.1, float(np.abs(other).max())))


@pytest.fixture(params=[Reference, Remote])
def engine(request: pytest.FixtureRequest) -> Engine:
    found: Engine = request.param()
    return found


@pytest.mark.parametrize("network", NETWORKS)
def test_steps_are_those_of_float32_but_for_rounding(network: Network, engine: Engine) -> None:
    exact = Trained(network, mlc.Device(engine=engine))
    rounded = Trained(network, mlc.Device(engine=engine, precision="bf16"))
    assert rounded.scores.dtype == np.float32
    assert rounded.loss != exact.loss, "nothing was rounded"
    assert rounded.loss == pytest.approx(exact.loss, rel=8 * ROUNDING)
    # A few roundings in a row, relative to the size of the numbers that are added up.
    np.testing.assert_allclose(rounded.scores, exact.scores, atol=8 * ROUNDING * np.abs(exact.scores).max())
    assert_weights_agree(rounded, exact)


@pytest.mark.parametrize("network", NETWORKS)
def test_passes_run_one_by_one_round_as_the_whole_step_does(network: Network, engine: Engine) -> None:
    device = mlc.Device(engine=engine, precision="bf16")
    whole, split = Trained(network, device), Trained(network, device, split=True)
    for one, other in zip(split.weights, whole.weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES[::23])
def test_layers_give_float32_and_round_alike_in_every_style(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = cuda_cases.split(case, Remote())
    monkeypatch.setattr(mlc.Device, "__init__", partialmethod(mlc.Device.__init__, precision="bf16"))
    rounded = cuda_cases.split(case, Remote())
    for name, array in exact.items():
        found = rounded[name]
        assert (array is None) == (found is None), name
        if array is not None and found is not None:
            assert (found.dtype, found.shape) == (array.dtype, array.shape), name
    if case.training is not False:
        cuda_cases.check_fused(case, Remote())


def test_activations_take_half_the_memory() -> None:
    def deep(graph: mlc.Graph) -> mlc.Tensor:
        x = graph.input((32, 3, 16, 16), "x")
        for _ in range(4):
            x = graph.convolution(x, 16, activation="relu")
        return graph.dense(graph.flatten(x), CLASSES)

    exact, rounded = (Trained(deep, mlc.Device(engine=Remote(), precision=p), steps=1) for p in ("float32", "bf16"))
    assert rounded.memory < 0.65 * exact.memory


def test_digits_are_read_as_well_as_in_float32() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    pixels, classes = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(pixels))
    images, classes = (pixels.reshape(-1, 1, 8, 8) / 16)[order], classes[order]
    mlc.Platform.set_rng_seed_to(0)
    graph = mlc.Graph()
    h = graph.input((64, 1, 8, 8), "image")
    for channels in (16, 32):
        h = graph.pool(graph.convolution(h, channels, activation="relu"))
    graph.dense(graph.dense(graph.flatten(h), 64, activation="relu"), 10)
    device = mlc.Device(engine=Remote(), precision="bf16")
    trainer = mlc.Trainer(graph, loss="softmax_cross_entropy", metrics=["accuracy"], device=device)
    one_cycle = mlc.callbacks.LearningRateScheduler(mlc.schedules.OneCycle(0.01))
    trainer.fit(images[360:], classes[360:], epochs=12, callbacks=[one_cycle], verbose=0)
    assert trainer.evaluate(images[:360], classes[:360])["accuracy"] >= 0.97
    assert trainer.predict(images[:1]).dtype == np.float32


def test_an_engine_without_such_kernels_refuses() -> None:
    class Plain(Reference):
        name = "plain"
        precisions = ("float32",)

    with pytest.raises(mlc.DeviceError, match="'plain' has no kernels for precision='bf16'"):
        mlc.Device(engine=Plain(), precision="bf16")
    with pytest.raises(mlc.DeviceError, match="'fp8' is not a precision"):
        mlc.Device(engine=Reference(), precision="fp8")
    with pytest.raises(mlc.DeviceError, match="'half' is not a precision"):
        mlc.Device.gpu(precision="half")


def test_a_device_says_its_precision() -> None:
    assert mlc.Device.cpu().precision == "float32"
    device = mlc.Device(engine=Reference(), precision="bf16")
    assert device.precision == "bf16"
    assert repr(device) == "Device(ANY, engine 'reference', precision 'bf16')"


@pytest.mark.parametrize("batch", [1, 7])
def test_smaller_batches_run_on_the_same_memory(batch: int) -> None:
    device = mlc.Device(engine=Remote(), precision="bf16")
    for network in NETWORKS:
        mlc.Platform.set_rng_seed_to(3)
        graph = mlc.Graph()
        scores = network(graph)
        x = graph.source_tensors(graph.layers[0])[0]
        inference = mlc.InferenceGraph([graph])
        inference.add_inputs({"x": x})
        inference.compile(device=device)
        data = np.random.default_rng(1).standard_normal(x.descriptor.shape).astype(np.float32)
        inference.execute({"x": data}).wait()
        whole = np.array(scores.data)
        inference.execute({"x": data[:batch]}, batch_size=batch).wait()
        limit = 8 * ROUNDING * float(np.abs(whole).max())
        np.testing.assert_allclose(np.asarray(scores.data)[:batch], whole[:batch], atol=limit)


def test_find_nan_looks_at_bfloat16() -> None:
    graph = mlc.Graph()
    x = graph.input((4, 8), "x")
    h = graph.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.LOG), source=graph.dense(x, 8))
    graph.dense(h, 2)
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.compile(device=mlc.Device(engine=Reference(), precision="bf16"))
    found = mlc.debug.find_nan(inference, {"x": np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)})
    assert "'log' gives NaN" in str(found)
