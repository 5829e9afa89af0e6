"""Data must fit the graph: nothing is cut in silence, and what does not fit is refused with advice that works."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.devices.reference import Reference
from mlcompute.tensor_data import rearrangement
from tests.nets import INFERENCE, SYNC, Array, adam, cpu, dense, normal

ENGINES = pytest.mark.parametrize("device", [cpu, lambda: mlc.Device(engine=Reference())], ids=["cpu", "reference"])
Make = Callable[[], mlc.Device]
LABELS = np.arange(1000) % 10


class Classifier:
    """x (32, 4) -> dense 10, softmax cross entropy, one weight per sample."""

    def __init__(self, device: mlc.Device) -> None:
        self.device = device
        self.x, self.t, self.w = (mlc.Tensor(shape=shape) for shape in ((32, 4), (32, 10), (32,)))
        graph = mlc.Graph()
        self.y = graph.node(dense(4, 10), source=self.x)
        loss = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN)
        self.training = mlc.TrainingGraph([graph], loss, adam())
        self.training.add_inputs({"x": self.x}, {"t": self.t}, {"w": self.w})
        self.training.compile(device=device)
        self.inference = mlc.InferenceGraph([graph])
        self.inference.add_inputs({"x": self.x})
        self.inference.add_outputs({"y": self.y})
        self.inference.compile(device=device)

    def execute(self, x: Any, t: Any, w: Any, **more: Any) -> Any:
        return self.training.execute({"x": x}, {"t": t}, {"w": w}, **more)

    def bind(self, x: Any, t: Any, w: Any, **more: Any) -> Any:
        tensors = {"x": self.x, "t": self.t, "w": self.w}
        return self.training.bind_and_write_data({"x": x, "t": t, "w": w}, for_inputs=tensors, to=self.device, **more)


def arrays(rows: int) -> tuple[Array, Array, Array]:
    return normal(rows, 4), np.eye(10, dtype=np.float32)[LABELS[:rows]], np.ones(rows, np.float32)


@ENGINES
@pytest.mark.parametrize("which", [0, 1, 2], ids=["input", "label", "weight"])
@pytest.mark.parametrize("rows", [1000, 33])
def test_more_rows_than_the_graph_takes_are_refused(device: Make, which: int, rows: int) -> None:
    net = Classifier(device())
    data: list[Any] = list(arrays(32))
    data[which] = arrays(rows)[which]
    calls: list[Callable[[], Any]] = [
        lambda: net.execute(*data),
        lambda: net.execute(*data, options=SYNC),
        lambda: net.execute(*data, options=INFERENCE),
        lambda: net.bind(*data),
    ]
    if which == 0:
        calls.append(lambda: net.inference.execute({"x": data[0]}))
    for call in calls:
        with pytest.raises(mlc.DataError, match=f"{rows} rows were given, this graph was built for a batch of 32") as e:
            call()
        assert e.value.fix == f"slice the array: array[:32]; or pass batch_size={rows}; or use Trainer"
    data[which] = data[which][:32]  # the advice
    net.execute(*data).wait()


@ENGINES
def test_fewer_rows_say_batch_size(device: Make) -> None:
    net, small = Classifier(device()), arrays(20)
    bound: list[Callable[..., Any]] = [
        net.execute,
        net.bind,
        lambda x, *_, **more: net.inference.execute({"x": x}, **more),
    ]
    for call in bound:
        with pytest.raises(mlc.DataError, match="20 rows were given, this graph was built for a batch of 32") as short:
            call(*small)
        assert short.value.fix == "pass batch_size=20"
        assert call(*small, batch_size=20)
    with pytest.raises(mlc.DataError, match=r"attached data has shape \(20, 4\)") as attached:
        net.training.execute_forward()
    assert attached.value.fix == "pass batch_size=20"
    assert net.training.execute_forward(batch_size=20).wait()
    with pytest.raises(mlc.DataError, match="20 rows were given, batch_size is 16") as long:
        net.execute(*small, batch_size=16)
    assert long.value.fix == "slice the array: array[:16]; or pass batch_size=20"


@ENGINES
def test_a_buffer_of_the_full_batch_may_be_used_in_part(device: Make) -> None:
    """`batch_size` says it: the leading samples of an array with the tensor's own shape."""
    nets = Classifier(device()), Classifier(device())
    losses = [
        net.execute(*(array[:last] for array in arrays(32)), batch_size=5).result.data
        for net, last in zip(nets, (32, 5), strict=True)
    ]
    np.testing.assert_array_equal(*losses)


@ENGINES
def test_only_memory_without_a_shape_may_be_longer(device: Make) -> None:
    net, again = Classifier(device()), Classifier(device())
    longer = [mlc.TensorData(array) for array in arrays(1000)]
    np.testing.assert_array_equal(net.execute(*longer).result.data, again.execute(*arrays(32)).result.data)


@ENGINES
def test_attached_data_counts_samples_as_runs_do(device: Make) -> None:
    """Two rows a sample in one tensor, and one that all samples share: batch_size means samples for both."""
    x, pairs, shared = (mlc.Tensor(shape=shape) for shape in ((4, 3), (8, 3), (3, 2)))
    graph = mlc.TrainingGraph()
    y = graph.node(mlc.MatMulLayer(mlc.MatMulDescriptor()), sources=[x, shared])
    joined = graph.reshape((4, 6), source=pairs)
    graph.concatenate([y, joined], dimension=1)
    tensors = {"x": x, "pairs": pairs, "shared": shared}
    graph.add_inputs(tensors)
    where = device()
    graph.compile(device=where)
    a, b, c = normal(4, 3), normal(8, 3, seed=1), normal(3, 2, seed=2)
    right = np.concatenate([a @ c, b.reshape(4, 6)], axis=1)
    graph.bind_and_write_data({"x": a, "pairs": b, "shared": c}, for_inputs=tensors, to=where)
    np.testing.assert_allclose(graph.execute_forward().result.data, right, rtol=1e-5, atol=1e-6)
    with pytest.raises(mlc.DataError, match=r"'pairs': 10 rows .* batch of 4 with 2 rows a sample"):
        graph.execute({"x": a, "pairs": normal(10, 3), "shared": c})
    with pytest.raises(mlc.DataError, match=r"'shared': the shape of the data does not fit"):
        graph.bind_and_write_data({"shared": normal(2, 2)}, for_inputs=tensors, to=where, batch_size=2)
    with pytest.raises(mlc.DataError, match=r"'pairs': 6 rows .* batch of 4") as short:
        graph.bind_and_write_data({"pairs": b[:6]}, for_inputs=tensors, to=where)
    assert short.value.fix == "pass batch_size=3"
    assert graph.bind_and_write_data({"x": a[:3], "pairs": b[:6]}, for_inputs=tensors, to=where, batch_size=3)


@ENGINES
@pytest.mark.parametrize("labels", [LABELS, LABELS[:32], LABELS[:32, None], LABELS.tolist()])
def test_class_numbers_where_rows_are_wanted(device: Make, labels: Any) -> None:
    net = Classifier(device())
    x, t, w = arrays(32)
    for call in (net.execute, net.bind):
        with pytest.raises(
            mlc.DataError, match=r"'t': whole numbers of shape .* for a tensor of shape \(32, 10\)"
        ) as e:
            call(x, labels, w)
        advice = e.value.fix.removeprefix("make them one-hot: ").split(";")[0]
        made = eval(advice, {"np": np, "labels": np.asarray(labels)})
        np.testing.assert_array_equal(made.reshape(32, 10), t)


@ENGINES
def test_constants_and_weights_must_fit(device: Make) -> None:
    net = Classifier(device())
    with pytest.raises(mlc.DataError, match="'x': the shape of the data does not fit"):
        net.inference.compile(device=device(), input_tensors={"x": net.x}, input_tensors_data={"x": arrays(40)[0]})
    for data in (np.zeros((5, 3)), np.zeros(15), [0.0] * 13, bytes(80)):
        with pytest.raises(mlc.DataError) as refused:
            mlc.Tensor(shape=(4, 3), data=data)
        assert "batch" not in str(refused.value)
    for data in (np.ones((4, 3)), np.ones(12), np.ones((4, 1, 3, 1)), np.ones(12, np.float32).tobytes()):
        assert mlc.Tensor(shape=(4, 3), data=data).data.shape == (4, 3)


def test_trainer_takes_any_number_of_samples() -> None:
    graph = mlc.Graph()
    graph.dense(graph.input((32, 4), "x"), 10)
    trainer = mlc.Trainer(graph, loss="softmax_cross_entropy")
    trainer.fit(normal(70, 4), LABELS[:70], verbose=0)
    assert trainer.predict(normal(70, 4)).shape == (70, 10)
    with pytest.raises(mlc.ShapeError, match="batch 0 has 33 samples, the graph was built for 32"):
        trainer.fit([(normal(33, 4), LABELS[:33])], verbose=0)


# Axes in another order --------------------------------------------------------------------------------------------


@ENGINES
@pytest.mark.parametrize("height", [6, 5])
def test_images_with_channels_last_are_to_be_transposed(device: Make, height: int) -> None:
    """The advice, when followed, gives the right pixels; to reshape would scramble them."""
    x = mlc.Tensor(shape=(2, 3, height, 6))
    graph = mlc.InferenceGraph()
    graph.node(mlc.ActivationLayer.relu(), source=x)
    graph.add_inputs({"x": x})
    graph.compile(device=device())
    right = np.abs(normal(2, 3, height, 6))
    array = np.moveaxis(right, 1, -1)
    for given in (array, np.concatenate([array, array])):
        with pytest.raises(mlc.DataError, match="does not fit the tensor") as refused:
            graph.execute({"x": given})
        assert refused.value.fix == "transpose its axes: array.transpose(0, 3, 1, 2)"
    followed = eval(refused.value.fix.split(": ")[1], {"array": array})
    np.testing.assert_array_equal(graph.execute({"x": followed}).result.data, right)
    trained = mlc.Graph()
    trained.dense(trained.flatten(trained.input((2, 3, height, 6), "x")), 2)
    trainer = mlc.Trainer(trained, loss="mse")
    with pytest.raises(mlc.DataError, match="samples of shape") as refused:
        trainer.fit(array, np.zeros((2, 2)), verbose=0)
    assert refused.value.fix == "transpose its axes: array.transpose(0, 3, 1, 2)"


@pytest.mark.parametrize(
    ("given", "wanted", "says"),
    [
        ((8, 28, 28, 3), (8, 3, 28, 28), "transpose its axes: array.transpose(0, 3, 1, 2)"),
        ((8, 24, 32, 3), (8, 3, 32, 24), "transpose its axes: array.transpose(0, 3, 2, 1)"),
        ((5, 8, 4), (8, 5, 4), "transpose its axes: array.transpose(1, 0, 2)"),
        ((3, 6, 6, 3), (3, 3, 6, 6), "transpose its axes: array.transpose(0, 3, 1, 2)"),
        ((8, 784), (8, 1, 28, 28), "reshape it: array.reshape(8, 1, 28, 28)"),
        ((8, 28, 28), (8, 784), "reshape it: array.reshape(8, 784)"),
        ((8, 6, 4), (8, 3, 8), ""),
        ((8, 6), (8, 7), ""),
    ],
)
def test_how_to_rearrange(given: tuple[int, ...], wanted: tuple[int, ...], says: str) -> None:
    assert rearrangement(given, wanted) == says


def test_weights_of_pixels_where_samples_are_weighed() -> None:
    graph = mlc.Graph()
    graph.convolution(graph.input((4, 1, 6, 6), "x"), 1, kernel=3)
    trainer = mlc.Trainer(graph, loss="mse")
    x = normal(8, 1, 6, 6)
    with pytest.raises(mlc.DataError, match=r"sample_weight.*samples of shape \(6, 6\)") as refused:
        trainer.fit(x, trainer.predict(x), sample_weight=np.ones((8, 6, 6)), verbose=0)
    assert refused.value.facts["expected"] == "shape (8,)"
    assert "an array of shape (8,)" in refused.value.fix
    assert "loss_label_weights" in refused.value.fix
    trainer.fit(x, trainer.predict(x), sample_weight=np.ones(8), verbose=0)


# Names of classes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "rate"),
    [
        (mlc.AdamOptimizer, "0.001"),
        (mlc.AdamWOptimizer, "0.001"),
        (mlc.RMSPropOptimizer, "0.001"),
        (mlc.SGDOptimizer, "0.01"),
        (mlc.AdadeltaOptimizer, "1.0"),
        (mlc.LionOptimizer, "0.0001"),
    ],
)
def test_an_optimizer_says_where_the_rate_belongs(kind: Any, rate: str) -> None:
    name = kind.__name__
    assert kind(learning_rate=0.25).learning_rate == 0.25
    with pytest.raises(TypeError, match=rf"^{name}: .* not float; write {name}\(learning_rate=0.25\) or {name}\(Opt"):
        kind(0.25)
    with pytest.raises(TypeError, match=rf"^{name}: learning_rate is missing; write {name}\(learning_rate={rate}\)$"):
        kind()
    with pytest.warns(UserWarning, match=rf"{name}: learning_rate is 1000, .* {float(rate):g} is usual, is it meant"):
        kind(learning_rate=1000)
    with pytest.raises(TypeError, match=f"^{name}: .*'lr'; use learning_rate=$"):
        kind(lr=0.25)
    with pytest.raises(TypeError, match=f"^{name}: .*'speed'; its own settings are {kind.settings[0]}.*learning_rate"):
        kind(mlc.OptimizerDescriptor(learning_rate=0.25), speed=1)


def test_messages_of_constructors_name_a_public_class() -> None:
    """Python begins the message about a wrong argument with the class the constructor stands in."""
    for name, kind in ((name, getattr(mlc, name)) for name in mlc.__all__):
        if inspect.isclass(kind) and kind.__module__.startswith("mlcompute"):
            owner = getattr(kind.__init__, "__qualname__", "").split(".")[0]
            assert not owner.startswith("_") or issubclass(kind, mlc.Optimizer), f"{name} says {owner}"
            if issubclass(kind, mlc.Layer) and not inspect.isabstract(kind):
                assert owner == kind.__name__, f"{name} says {owner}"
