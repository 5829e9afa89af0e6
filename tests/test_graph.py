"""Graphs as descriptions: what node, split and the others build and refuse, and how a graph shows itself."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import mlcompute as mlc
from tests.harness import assert_close
from tests.nets import MEAN, SUM, Array, Regression, cpu, dense, normal, sgd

INT32 = mlc.DataType.INT32


def run(graph: mlc.Graph, inputs: dict[mlc.Tensor, Array], *results: mlc.Tensor) -> list[Array]:
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs({str(index): tensor for index, tensor in enumerate(inputs)})
    inference.add_outputs({str(index): tensor for index, tensor in enumerate(results)})
    inference.compile(device=cpu())
    inference.execute({str(index): array for index, array in enumerate(inputs.values())}).wait()
    return [result.data for result in results]


def test_a_fresh_graph() -> None:
    for graph in (mlc.Graph(), mlc.Graph.graph(), mlc.TrainingGraph.graph(), mlc.InferenceGraph.graph()):
        assert graph.layers == []
        assert graph.device is None
        assert graph.summarized_dot_description == "digraph MLCGraph {\n node [style=filled];\n}"
    assert type(mlc.TrainingGraph.graph()) is mlc.TrainingGraph


def test_nodes_are_symbolic() -> None:
    graph, x = mlc.Graph(), mlc.Tensor(shape=(2, 3))
    layer = mlc.ActivationLayer.relu()
    y = graph.node(layer, source=x)
    assert y.descriptor.shape == (2, 3)
    assert y.data is None
    assert graph.layers == [layer]
    assert graph.source_tensors(layer) == [x]
    assert graph.result_tensors(layer) == [y]
    assert graph.result_tensors(mlc.ActivationLayer.relu()) == []
    assert graph.source_tensors(mlc.ActivationLayer.relu()) == []


def test_what_cannot_become_a_node() -> None:
    graph, x = mlc.Graph(), mlc.Tensor(shape=(2, 3))
    layer = mlc.ActivationLayer.relu()
    with pytest.raises(mlc.ShapeError, match="takes 1 source"):
        graph.node(layer, sources=[x, x])
    with pytest.raises(mlc.GraphError, match="exactly one of source and sources"):
        graph.node(layer)
    with pytest.raises(mlc.GraphError, match="exactly one of source and sources"):
        graph.node(layer, source=x, sources=[x])
    with pytest.raises(TypeError, match="a source must be a Tensor"):
        graph.node(layer, source=normal(2, 3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="layer must be a Layer"):
        graph.node("relu", source=x)  # type: ignore[arg-type]
    assert graph.layers == []
    graph.node(layer, source=x)
    with pytest.raises(mlc.GraphError, match="already part of this graph"):
        graph.node(layer, source=x)
    with pytest.raises(mlc.GraphError, match="already part of another graph"):
        mlc.Graph().node(layer, source=x)
    with pytest.raises(TypeError, match="graph_objects must be Graphs"):
        mlc.TrainingGraph([layer])  # type: ignore[list-item]


LIST, DICTIONARY = "must be a list of", "must be a dictionary by name, not list"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda net: mlc.TrainingGraph(net.graph), f"graph_objects {LIST} Graphs, not Graph; write graph_objects="),
        (lambda net: mlc.InferenceGraph(None), f"graph_objects {LIST} Graphs, not NoneType"),
        (lambda net: net.training.link(net.training), f"graphs {LIST} TrainingGraphs"),
        (lambda net: net.training.stop_gradient(net.y), f"tensors {LIST} Tensors, not Tensor"),
        (lambda net: net.training.set_training_tensor_parameters(None), f"parameters {LIST} TensorParameters"),
        (lambda net: net.training.bind_optimizer_data(None, tensor=net.first.weights), f"data {LIST} TensorDatas"),
        (lambda net: net.graph.node(mlc.ActivationLayer.relu(), sources=net.y), f"sources {LIST} Tensors"),
        (lambda net: net.graph.node(mlc.LossLayer.log(MEAN), sources=[net.y], loss_labels=net.t), f"labels {LIST}"),
        (lambda net: net.graph.node(mlc.LossLayer.log(MEAN), sources=[net.y], loss_labels=["t"]), "a label must be"),
        (lambda net: net.graph.concatenate(net.y, dimension=1), f"sources {LIST} Tensors, not Tensor"),
        (lambda net: net.graph.select(net.y, condition=net.y), f"sources {LIST} Tensors, not Tensor"),
        (lambda net: net.graph.reshape(8, source=net.y), "shape must be a list of whole numbers, not 8"),
        (lambda net: net.graph.transpose(None, source=net.y), "dimensions must be a list of whole numbers"),
        (lambda net: net.training.add_inputs([net.x]), f"inputs {DICTIONARY}"),
        (lambda net: net.training.add_outputs([net.y]), f"outputs {DICTIONARY}"),
        (lambda net: net.training.compile(device=cpu(), input_tensors=[net.x]), f"input_tensors {DICTIONARY}"),
        (lambda net: net.training.execute([normal(4, 3)]), f"inputs_data {DICTIONARY}"),
        (lambda net: net.training.execute({}, outputs_data=[normal(4, 2)]), f"outputs_data {DICTIONARY}"),
        (lambda net: net.graph.bind_and_write_data({}, for_inputs=[net.x], to=cpu()), f"for_inputs {DICTIONARY}"),
        (lambda net: net.graph.bind_and_write_data({"x": [0]}, for_inputs={"x": None}, to=cpu()), "needs Tensors"),
        (lambda net: net.training.execute({}, completion_handler=[]), "completion_handler must be a function"),
        (lambda net: mlc.ConvolutionLayer.supports_data_type(INT32, on=mlc.DeviceType.CPU), "on must be a Device"),
    ],
)  # fmt: skip
def test_arguments_of_another_kind(call: Callable[[Any], object], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        call(Regression(sgd()))


@pytest.mark.parametrize("given", [None, [], [mlc.GraphCompilationOptions.DEBUG_LAYERS], "SYNCHRONOUS", True])
def test_options_are_flags(given: Any) -> None:
    net = Regression(sgd())
    with pytest.raises(TypeError, match=r"execute: options must be ExecutionOptions, not .* join some with \|"):
        net.training.execute({}, options=given)
    with pytest.raises(TypeError, match=r"TrainingGraph.compile: options must be GraphCompilationOptions"):
        net.training.compile(device=cpu(), options=given)


def test_options_of_another_set_are_refused() -> None:
    """DEBUG_LAYERS and SKIP_WRITING_INPUT_DATA_TO_DEVICE are both 1."""
    net = Regression(sgd())
    data = {"x": normal(4, 3)}, {"t": normal(4, 2)}
    with pytest.raises(TypeError, match=r"not <GraphCompilationOptions.DEBUG_LAYERS"):
        net.training.execute(*data, options=mlc.GraphCompilationOptions.DEBUG_LAYERS)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"not <ExecutionOptions.SYNCHRONOUS"):
        net.training.compile(device=cpu(), options=mlc.ExecutionOptions.SYNCHRONOUS)  # type: ignore[arg-type]
    for unknown in (1024, -1, mlc.ExecutionOptions(1024)):
        with pytest.raises(mlc.DataError, match="not a sum of ExecutionOptions"):
            net.training.execute(*data, options=unknown)  # type: ignore[arg-type]
    assert net.training.execute(*data, options=2).result.data.shape == (1,)  # type: ignore[arg-type]


def test_errors_name_the_sources() -> None:
    graph, x = mlc.Graph(), mlc.Tensor(shape=(2, 3))
    first, second = dense(3, 4), dense(5, 2)
    first.label, second.label = "fc1", "fc2"
    h = graph.node(first, source=x)
    with pytest.raises(mlc.ShapeError) as refused:
        graph.node(second, source=h)
    message = str(refused.value)
    assert "FullyConnected 'fc2': input_feature_channel_count is 5, the source has 4" in message
    assert "(2, 4) from 'fc1'" in message
    assert "fix" in message


def test_fan_out_adds_gradients_up() -> None:
    x, t = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 3))
    training = mlc.TrainingGraph([], mlc.LossLayer.mean_squared_error(SUM), sgd(0.01))
    layer = dense(3, 3)
    h = training.node(layer, source=x)
    a = training.node(mlc.ActivationLayer.tanh(), source=h)
    b = training.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.MULTIPLY), sources=[h, h])
    training.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.ADD), sources=[a, b])
    training.add_inputs({"x": x}, {"t": t})
    training.compile(device=cpu())
    data, labels = normal(4, 3), normal(4, 3, seed=1)
    w, bias = (torch.tensor(each.data.astype(np.float64), requires_grad=True) for each in (layer.weights, layer.biases))
    z = torch.tensor(data, dtype=torch.float64) @ w.T + bias
    ((torch.tanh(z) + z * z - torch.tensor(labels)) ** 2).sum().backward()
    training.execute({"x": data}, {"t": labels}).wait()
    assert_close(layer.weights.data, (w - 0.01 * w.grad).detach().numpy(), scale=5.0)


def test_split() -> None:
    graph, x = mlc.Graph(), mlc.Tensor(shape=(2, 7))
    thirds = graph.split(x, split_count=3, dimension=1)
    parts = graph.split(x, split_section_lengths=[1, 4, 2], dimension=1)
    assert [part.descriptor.shape for part in thirds] == [(2, 3), (2, 3), (2, 1)]
    data = normal(2, 7)
    results = run(graph, {x: data}, *thirds, *parts)
    np.testing.assert_array_equal(np.concatenate(results[:3], 1), data)
    for result, expected in zip(results[3:], np.split(data, [1, 5], 1), strict=True):
        np.testing.assert_array_equal(result, expected)
    narrow = mlc.Tensor(shape=(2, 2))
    assert [part.descriptor.shape for part in graph.split(narrow, split_count=3, dimension=1)] == [(2, 1)] * 2
    with pytest.raises(ValueError, match="Split"):
        graph.split(x, split_section_lengths=[1, 5], dimension=1)


def test_joining_and_reordering() -> None:
    graph, x, y = mlc.Graph(), mlc.Tensor(shape=(2, 3)), mlc.Tensor(shape=(2, 3))
    wide, tall = graph.concatenate([x, y], dimension=1), graph.concatenate([x, y], dimension=0)
    flat, turned = graph.reshape((3, 2), source=x), graph.transpose((1, 0), source=x)
    a, b = normal(2, 3), normal(2, 3, seed=1)
    results = run(graph, {x: a, y: b}, wide, tall, flat, turned)
    expected = (np.concatenate([a, b], 1), np.concatenate([a, b], 0), a.reshape(3, 2), a.T)
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result, wanted)
    for wrong in (
        lambda: graph.concatenate([x, y], dimension=2),
        lambda: graph.reshape((7,), source=x),
        lambda: graph.reshape((), source=x),
        lambda: graph.transpose((0, 0), source=x),
    ):
        with pytest.raises(ValueError, match=r"dimension|elements|shape|axes|permutation"):
            wrong()


def test_select_gather_scatter() -> None:
    graph = mlc.Graph()
    x, y = mlc.Tensor(shape=(2, 3)), mlc.Tensor(shape=(2, 3))
    condition = mlc.Tensor(shape=(2, 3), data_type=mlc.DataType.BOOLEAN)
    indices = mlc.Tensor(shape=(2, 3), data_type=INT32)
    chosen = graph.select([x, y], condition=condition)
    gathered = graph.gather(1, source=x, indices=indices)
    again = graph.gather(dimension=1, source=x, indices=indices)
    added = graph.scatter(1, source=x, indices=indices, copy_from=y, reduction_type=SUM)
    a, b = normal(2, 3), normal(2, 3, seed=1)
    mask, picks = a > b, np.int32([[2, 0, 0], [1, 1, 2]])
    results = run(graph, {x: a, y: b, condition: mask, indices: picks}, chosen, gathered, again, added)
    places = torch.tensor(picks, dtype=torch.int64)
    expected = (
        np.where(mask, a, b),
        np.take_along_axis(a, picks.astype(np.int64), 1),
        np.take_along_axis(a, picks.astype(np.int64), 1),
        torch.tensor(b).scatter_add(1, places, torch.tensor(a)).numpy(),
    )
    for result, wanted in zip(results, expected, strict=True):
        assert_close(result, wanted)
    with pytest.raises(mlc.GraphError, match="two sources are needed, 1 were given"):
        graph.select([x], condition=condition)
    with pytest.raises(mlc.GraphError, match="give with_dimension"):
        graph.gather(source=x, indices=indices)
    with pytest.raises(ValueError, match="reduc"):
        graph.scatter(1, source=x, indices=indices, copy_from=y, reduction_type=mlc.ReductionType.MAX)


def test_several_graph_objects_in_one() -> None:
    x = mlc.Tensor(shape=(2, 3))
    first, second = mlc.Graph(), mlc.Graph()
    h = first.node(mlc.ActivationLayer.relu(), source=x)
    y = second.node(mlc.ActivationLayer.tanh(), source=h)
    both = mlc.Graph()
    z = both.node(mlc.ActivationLayer.sigmoid(), source=y)
    inference = mlc.InferenceGraph([both, second, first, second])
    inference.add_inputs({"x": x})
    inference.compile(device=cpu())
    assert inference.layers == [*first.layers, *second.layers, *both.layers]
    data = normal(2, 3)
    result = inference.execute({"x": data}).result
    assert result.of is z
    assert_close(result.data, 1 / (1 + np.exp(-np.tanh(np.maximum(data, 0)))))


def test_dot_description() -> None:
    net = Regression(sgd())
    net.first.label, net.x.label = 'fc "1"', "image"
    net.training.stop_gradient([net.hidden])
    dot = net.training.summarized_dot_description
    lines = dot.splitlines()
    assert lines[0] == "digraph MLCGraph {"
    assert lines[1] == " node [style=filled];"
    assert lines[-1] == "}"
    nodes = [line for line in lines if "shape=box" in line]
    assert len(nodes) == 4, "three layers and the loss"
    assert 'label="fc \\"1\\"\\n4x5"' in dot
    assert 'label="image\\n4x3"' in dot
    edges = [line for line in lines if "->" in line]
    assert len(edges) == 5
    assert [line for line in edges if "dashed" in line] == [" layer0 -> layer1 [style=dashed];"]
    plain = net.graph.summarized_dot_description
    assert "dashed" not in plain
    assert plain.count("shape=box") == 3


def test_printing() -> None:
    net = Regression(sgd())
    net.first.label, net.second.label = "fc1", "fc2"
    text = str(net.graph)
    assert text.splitlines()[0] == "Graph of 3 layers"
    assert "fc2" in text
    assert "from 'activation'" in text
    rows = [line.split() for line in str(net.graph.summary()).splitlines()]
    assert rows[0] == ["layer", "kind", "result", "size", "parameters", "size"]
    assert rows[1] == ["fc1", "FullyConnected", "4x5", "80", "B", "20", "80", "B"]
    assert rows[-1] == ["total", "192", "B", "32", "128", "B"]


def test_shared_parameters_are_counted_once() -> None:
    graph, x = mlc.Graph(), mlc.Tensor(shape=(2, 3))
    layer = dense(3, 3)
    d = mlc.ConvolutionDescriptor(input_feature_channel_count=3, output_feature_channel_count=3)
    graph.node(mlc.FullyConnectedLayer(layer.weights, None, d), source=graph.node(layer, source=x))
    assert graph.summary().parameters == 12


def test_layers_can_be_used_again_when_their_graph_is_gone() -> None:
    layer, x = mlc.ActivationLayer.relu(), mlc.Tensor(shape=(2, 3))
    graph = mlc.Graph()
    graph.node(layer, source=x)
    del graph
    gc.collect()
    assert mlc.Graph().node(layer, source=x) is not None


def test_graphs_go_away_and_leave_their_tensors() -> None:
    net = Regression(sgd())
    weights, gone = net.first.weights, weakref.ref(net.training)
    net.step(normal(4, 3), normal(4, 2)).wait()
    del net
    gc.collect()
    assert gone() is None
    assert weights.data is not None


def test_a_layer_of_a_training_graph_alone_has_no_loss_among_its_layers() -> None:
    net = Regression(sgd())
    assert net.training.layers == [net.first, net.activation, net.second]
    assert net.training.source_tensors(net.loss) == [net.y]
    with pytest.raises(TypeError, match="loss_layer must be a LossLayer"):
        mlc.TrainingGraph([], mlc.ActivationLayer.relu())
    with pytest.raises(TypeError, match="optimizer must be an Optimizer"):
        mlc.TrainingGraph([], None, "adam")  # type: ignore[arg-type]


def test_a_loss_that_does_not_fit_says_so_at_compile() -> None:
    x, t = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 1))
    loss = mlc.LossLayer.softmax_cross_entropy(MEAN)
    training = mlc.TrainingGraph([], loss, sgd())
    training.node(dense(3, 5), source=x)
    training.add_inputs({"x": x}, {"t": t})
    with pytest.raises(mlc.ShapeError, match="class labels need an integer type: DataType"):
        training.compile(device=cpu())
    assert training.device is None
