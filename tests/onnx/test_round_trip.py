"""What is saved and loaded again trains the same tensors, from the same numbers, to the same numbers."""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import pytest

import mlcompute as mlc
import tests.cases
from mlcompute.devices import engine_of
from mlcompute.devices.device import Engine
from mlcompute.devices.reference import Reference
from mlcompute.ops.op import Array
from tests.cases.case import Case

STEPS = 10
SGD = mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=0.01))
TYPES = {kind.numpy: kind for kind in mlc.DataType if kind not in (mlc.DataType.INVALID, mlc.DataType.COUNT)}


def trained(graph: mlc.Graph) -> dict[str, mlc.Tensor]:
    """The tensors an optimizer changes, by label."""
    slots = [slot for node in graph.nodes if node.updates for slot in node.layer.parameters.values()]
    tensors = dict.fromkeys(slot.tensor for slot in slots if slot.is_updatable)
    return {tensor.label: tensor for tensor in tensors}


def statistics(graph: mlc.Graph) -> dict[str, mlc.Tensor]:
    return {t.label: t for node in graph.nodes for t in node.layer.statistics.values()}


def numbers(tensors: dict[str, mlc.Tensor]) -> dict[str, Array]:
    return {name: np.array(tensor.data) for name, tensor in tensors.items()}


def labelled(graph: mlc.Graph) -> None:
    """A name for every tensor that is kept, so that it can be found again."""
    for number, node in enumerate(graph.nodes):
        kept = {name: slot.tensor for name, slot in node.layer.parameters.items()} | node.layer.statistics
        for name, tensor in kept.items():
            tensor.label = f"{node.layer.label}{number}.{name}"


def model_of(graph: mlc.Graph, inputs: dict[str, mlc.Tensor], output: mlc.Tensor) -> onnx.ModelProto:
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs(inputs)
    inference.add_outputs({"y": output})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "onnx.save: ")
        return mlc.onnx.to_model(inference)


class Trained:
    """A graph and how it learns."""

    def __init__(self, graph: mlc.Graph, inputs: dict[str, mlc.Tensor], output: mlc.Tensor, engine: Engine) -> None:
        self.graph, self.inputs, self.output = graph, inputs, output
        optimizer = mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=0.01), momentum_scale=0.9)
        loss = mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN)
        self.training = mlc.TrainingGraph([graph], loss, optimizer)
        self.training.add_inputs(inputs, {"label": mlc.Tensor(shape=output.descriptor.shape)})
        self.training.add_outputs({"y": output})
        self.training.compile(device=mlc.Device(mlc.DeviceType.CPU, engine=engine))

    def losses(self, feeds: dict[str, Array]) -> list[float]:
        label = np.random.default_rng(5).standard_normal(self.output.descriptor.shape).astype(np.float32)
        feeds = {name: feeds[name] for name in self.inputs}
        return [self.training.execute(feeds, {"label": label}).result.data.item() for _ in range(STEPS)]


def check(
    who: str,
    graph: mlc.Graph,
    inputs: dict[str, mlc.Tensor],
    output: mlc.Tensor,
    feeds: dict[str, Array],
    engine: Engine,
    random: bool = False,
) -> None:
    """Load what was saved: the same tensors are trained, and ten steps of each give the same losses and numbers.

    random   the layer draws numbers in training: then only what is trained is compared
    """
    labelled(graph)
    model = model_of(graph, inputs, output)
    shapes = {name: tensor.descriptor.shape for name, tensor in inputs.items()}
    declared = {info.name for info in model.graph.input}
    again = mlc.onnx.load(model.SerializeToString(), shapes={k: v for k, v in shapes.items() if k in declared})
    before, after = trained(graph), trained(again)
    # An optimizer leaves what no output depends on as it is, so it is not part of the model.
    assert after.keys() <= before.keys(), f"{who}: trains {after.keys() - before.keys()} besides"
    stored = {tensor.name for tensor in model.graph.initializer}
    assert before.keys() & stored == after.keys(), f"{who}: {before.keys() & stored} before, {set(after)} after"
    for name, tensor in after.items():
        assert tensor.descriptor == before[name].descriptor, f"{who}: {name}"
        np.testing.assert_array_equal(np.asarray(tensor.data), np.asarray(before[name].data), err_msg=f"{who}: {name}")
    if "y" not in again.outputs or random or not after:
        return
    first = Trained(graph, inputs, output, engine).losses(feeds)
    second = Trained(again, again.inputs, again.outputs["y"], engine).losses(feeds)
    np.testing.assert_allclose(second, first, rtol=2e-4, atol=1e-6, err_msg=f"{who}: other losses")
    mine, other = numbers(before), numbers(after)
    for name, array in other.items():
        scale = max(1.0, float(np.abs(mine[name]).max()))
        np.testing.assert_allclose(array, mine[name], rtol=1e-3, atol=1e-4 * scale, err_msg=f"{who}: {name} trained")
    kept = numbers(statistics(graph))
    for name, array in numbers(statistics(again)).items():
        right = kept[name].reshape(array.shape)  # one number per channel, in the shape the operator has
        np.testing.assert_allclose(array, right, rtol=1e-3, atol=1e-4, err_msg=f"{who}: {name} kept")


# Every layer --------------------------------------------------------------------------------------------------------


def families() -> list[str]:
    # Random numbers are refused: no operator repeats them. A free parameter needs somebody who reads it (`scaled`).
    names = [module.name for module in pkgutil.iter_modules(tests.cases.__path__)]
    return [name for name in names if name not in ("random", "parameter")]


@pytest.mark.parametrize("family", families())
def test_layers_come_back_as_what_they_train(family: str) -> None:
    check_family(family, every=4)


@pytest.mark.slow
@pytest.mark.parametrize("family", families())
def test_every_layer_comes_back_as_what_it_trains(family: str) -> None:
    check_family(family, every=1)


def check_family(family: str, every: int) -> None:
    """All cases of a family; `every` so many of them are trained as well."""
    cases = [c for c in getattr(importlib.import_module(f"tests.cases.{family}"), "CASES", []) if isinstance(c, Case)]
    for number, case in enumerate(cases):
        if case.labels or family in ("ctc_loss", "objective") or "cache" in case.name:
            continue  # a loss is part of a training graph; ONNX has no CTC loss and no memory
        graph, layer, arrays = mlc.Graph(), case.make(), case.arrays()
        sources = [mlc.Tensor(shape=array.shape, data_type=TYPES[array.dtype]) for array in arrays]
        output = graph.node(layer, sources=sources)
        inputs = {f"x{index}": tensor for index, tensor in enumerate(sources)}
        is_float = output.descriptor.data_type == mlc.DataType.FLOAT32
        halves = any(t.descriptor.data_type == mlc.DataType.FLOAT16 for t in trained(graph).values())
        # What a warning says: running statistics of instances, dropout inside a layer, limited rows of a table.
        instance = isinstance(layer, mlc.InstanceNormalizationLayer) and layer.mean is not None
        about = getattr(layer, "descriptor", None)
        said = instance or getattr(about, "dropout", 0.0) > 0 or getattr(about, "maximum_norm", None) is not None
        said = said or bool(getattr(about, "scales_gradient_by_frequency", False))
        skips = not is_float or halves or said or number % every != 0 or not np.isfinite(arrays[0]).all()
        feeds = {f"x{index}": array for index, array in enumerate(arrays)}
        check(f"{family}: {case.name}", graph, inputs, output, feeds, Reference(), skips)


# Whole networks -----------------------------------------------------------------------------------------------------

Built = tuple[mlc.Graph, dict[str, mlc.Tensor], mlc.Tensor]


def _normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def convolutional() -> Built:
    graph = mlc.Graph()
    x = graph.input((4, 3, 8, 8), "x")
    y = graph.normalize(graph.convolution(x, 6, kernel=3))
    y = graph.activation(y, "relu")
    y = graph.normalize(graph.depthwise_convolution(y, kernel=3), "group", groups=2)
    y = graph.add(y, graph.convolution(x, 6, kernel=1))
    return graph, {"x": x}, graph.dense(graph.flatten(graph.pool(y)), 5)


def four_axes() -> Built:
    """Batch normalization with tensors of four axes, as programs of the original write them."""
    graph = mlc.Graph()
    x = graph.input((4, 3, 5, 5), "x")
    mean, variance, beta, gamma = (mlc.Tensor(shape=(1, 3, 1, 1), fill_with_data=v) for v in (0.1, 1.5, 0.2, 0.9))
    layer = mlc.BatchNormalizationLayer(3, mean, variance, beta, gamma, 1e-3, 0.8)
    return graph, {"x": x}, graph.node(layer, source=x)


def one_channel() -> Built:
    graph = mlc.Graph()
    x = graph.input((7, 1, 3, 4), "x")
    return graph, {"x": x}, graph.normalize(x)


def no_scale() -> Built:
    graph = mlc.Graph()
    x = graph.input((4, 3, 5, 5), "x")
    y = graph.normalize(graph.convolution(x, 4, kernel=1), scale=False, shift=False)
    return graph, {"x": x}, y


def scaled() -> Built:
    """A free parameter, read twice."""
    graph = mlc.Graph()
    x = graph.input((6, 5), "x")
    scale = graph.parameter((5,), 0.7, name="scale")
    return graph, {"x": x}, graph.dense(x * scale + scale, 3)


def rows() -> Built:
    """Batch normalization of rows and of sequences."""
    graph = mlc.Graph()
    x = graph.input((6, 5), "x")
    y = graph.reshape((6, 4, 2), source=graph.normalize(graph.dense(x, 8)))
    return graph, {"x": x}, graph.dense(graph.flatten(graph.normalize(y)), 3)


def recurrent() -> Built:
    graph = mlc.Graph()
    x = graph.input((3, 6, 5), "x")
    y = graph.lstm(x, 4, layers=2, bidirectional=True)
    return graph, {"x": x}, graph.dense(graph.lstm(y, 3, returns_sequences=False), 2)


def transformer() -> Built:
    graph = mlc.Graph()
    x = graph.input((2, 5, 8), "x")
    mask = mlc.Tensor(shape=(1, 5, 5), data=np.triu(np.full((1, 5, 5), -1e9, np.float32), 1))
    y = graph.add(x, graph.attention(graph.normalize(x, "layer"), heads=2, mask=mask))
    z = graph.dense(graph.activation(graph.dense(graph.normalize(y, "layer"), 16), "gelu"), 8)
    return graph, {"x": x}, graph.add(y, z)


def upsampled() -> Built:
    graph = mlc.Graph()
    x = graph.input((2, 3, 4, 4), "x")
    y = graph.upsample(graph.convolution(x, 4, kernel=3), 2, kind="linear")
    y = graph.normalize(graph.convolution(y, 2, kernel=3), "instance")
    return graph, {"x": x}, y


def frozen() -> Built:
    """A layer that is not updated, under one that is."""
    graph = mlc.Graph()
    x = graph.input((4, 6), "x")
    return graph, {"x": x}, graph.dense(graph.activation(graph.dense(x, 7, updates=False), "tanh"), 3)


def constants() -> Built:
    """Tensors with data that are sources: nothing trains them."""
    graph = mlc.Graph()
    x = graph.input((4, 6), "x")
    table = mlc.Tensor(shape=(1, 6), data=_normal(1, 6))
    y = graph.multiply(graph.add(graph.dense(x, 6), table), mlc.Tensor(shape=(1, 1), data=np.float32([[0.5]])))
    return graph, {"x": x}, y


NETWORKS: dict[str, Callable[[], Built]] = {
    "convolutional": convolutional, "four axes": four_axes, "no scale": no_scale, "rows": rows,
    "scaled": scaled, "one channel": one_channel,
    "recurrent": recurrent, "transformer": transformer, "upsampled": upsampled, "frozen": frozen,
    "constants": constants,
}  # fmt: skip
ENGINES: dict[str, Callable[[], Engine]] = {"cpu": lambda: engine_of(mlc.Device.cpu()), "reference": Reference}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_come_back_as_what_they_train(name: str, engine: str) -> None:
    graph, inputs, output = NETWORKS[name]()
    feeds = {given: _normal(*tensor.descriptor.shape, seed=3) for given, tensor in inputs.items()}
    check(name, graph, inputs, output, feeds, ENGINES[engine]())


def nodes_of(model: onnx.ModelProto, kind: str) -> Sequence[Any]:
    return [node for node in model.graph.node if node.op_type == kind]


def test_layers_with_an_operator_are_written_as_it() -> None:
    graph, inputs, output = convolutional()
    output = graph.dropout(graph.normalize(output, "layer"), 0.25)
    model = model_of(graph, inputs, output)
    (norm,), (drop,) = nodes_of(model, "BatchNormalization"), nodes_of(model, "Dropout")
    assert {a.name: round(a.f, 4) for a in norm.attribute} == {"epsilon": 0.0, "momentum": 0.99}
    assert len(nodes_of(model, "LayerNormalization")) == 1
    again = mlc.onnx.load(model, shapes={"x": (4, 3, 8, 8)})
    assert drop.op_type in [layer.operator for layer in again.layers if hasattr(layer, "operator")]
    assert any(isinstance(layer, mlc.BatchNormalizationLayer) for layer in again.layers)


def test_a_tensor_that_a_training_graph_updates_is_a_weight() -> None:
    graph = mlc.Graph()
    x = graph.input((4, 6), "x")
    learned = mlc.Tensor(shape=(1, 6), data=_normal(1, 6))
    learned.label = "position"
    y = graph.add(x, learned)
    training = mlc.TrainingGraph([graph], mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN), SGD)
    training.set_training_tensor_parameters([mlc.TensorParameter(learned)])
    training.add_inputs({"x": x}, {"label": mlc.Tensor(shape=(4, 6))})
    training.compile(device=mlc.Device.cpu())
    model = model_of(graph, {"x": x}, y)
    assert [tensor.name for tensor in model.graph.initializer] == ["position"]
    assert set(mlc.onnx.load(model, batch=4).weights) == {"position"}


def test_what_cannot_be_written_is_said() -> None:
    graph = mlc.Graph()
    x = graph.input((2, 3, 4, 4), "x")
    y = graph.normalize(x, "instance", running=True)
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.add_outputs({"y": y})
    with pytest.warns(UserWarning, match=r"'instance_norm1' keeps running statistics.*trained further"):
        model = mlc.onnx.to_model(inference)
    assert "running statistics" in {entry.key: entry.value for entry in model.metadata_props}["notes"]
