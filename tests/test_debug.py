"""find_nan: the first bad number is found where it appears, whatever it is and whichever node it hits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute import ops
from mlcompute.devices.reference import Reference
from mlcompute.layers.layer import FLOATS, Forward, Layer
from mlcompute.ops.op import Value

#: A faulty node that drops one of its sources leaves the layers before that untrained.
pytestmark = pytest.mark.filterwarnings("ignore:.*will not be trained:UserWarning")

NAN, INF = float("nan"), float("inf")
WIDTH = 4


class Faulty(Layer):
    """y = x plus something that gives NaN in one pass: log of a negative number, or the slope of a root at 0."""

    default_label = "Faulty"
    source_types = FLOATS
    source_count = (1, 2)

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.phase = phase

    def results(self, sources: Sequence[mlc.TensorDescriptor]) -> list[mlc.TensorDescriptor]:
        return [sources[0]]

    def forward(self, run: Forward, *sources: Value) -> Value:
        x = sources[0]
        return x + (ops.log(x * 0.0 - 1.0) if self.phase == "forward" else ops.sqrt(x * 0.0))


class Net:
    """Twenty nodes: five blocks of fully connected, layer norm, tanh and a sum with the block's source.

    fault  (number of a node, phase): something faulty stands in its place
    """

    def __init__(self, optimizer: mlc.Optimizer | None = None, fault: tuple[int, str] | None = None) -> None:
        self.fault = fault
        rng = np.random.default_rng(5)
        self.x, self.t = mlc.Tensor(shape=(3, WIDTH)), mlc.Tensor(shape=(3, WIDTH))
        self.graph = mlc.Graph()
        self.nodes: list[mlc.Layer] = []
        self.weights: list[mlc.Tensor] = []
        h = self.x
        descriptor = mlc.ConvolutionDescriptor(input_feature_channel_count=WIDTH, output_feature_channel_count=WIDTH)
        for _ in range(5):
            w = mlc.Tensor(shape=(WIDTH, WIDTH), data=rng.standard_normal((WIDTH, WIDTH)).astype(np.float32))
            b = mlc.Tensor(shape=(WIDTH,), fill_with_data=0.1)
            self.weights.append(w)
            beta = mlc.Tensor(shape=(WIDTH,), fill_with_data=0.0)
            gamma = mlc.Tensor(shape=(WIDTH,), fill_with_data=1.0)
            norm = mlc.LayerNormalizationLayer(normalized_shape=(WIDTH,), beta=beta, gamma=gamma, variance_epsilon=1e-3)
            y = self._add(mlc.FullyConnectedLayer(w, b, descriptor), h)
            y = self._add(norm, y)
            y = self._add(mlc.ActivationLayer.tanh(), y)
            h = self._add(mlc.ArithmeticLayer(mlc.ArithmeticOperation.ADD), h, y)
        assert len(self.nodes) == 20
        loss = mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN)
        self.optimizer = optimizer or mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=0.1))
        self.training = mlc.TrainingGraph([self.graph], loss, self.optimizer)
        self.training.add_inputs({"x": self.x}, {"t": self.t})
        device = mlc.Device(mlc.DeviceType.CPU, engine=Reference())
        self.training.compile(options=mlc.GraphCompilationOptions.COMPUTE_ALL_GRADIENTS, device=device)
        self.inputs = {"x": rng.standard_normal((3, WIDTH)).astype(np.float32)}
        self.labels = {"t": rng.standard_normal((3, WIDTH)).astype(np.float32)}

    def _add(self, layer: mlc.Layer, *sources: mlc.Tensor) -> mlc.Tensor:
        if self.fault is not None and self.fault[0] == len(self.nodes):
            layer = Faulty(self.fault[1])
        layer.label = f"n{len(self.nodes)}"
        self.nodes.append(layer)
        return self.graph.node(layer, sources=sources)

    def find(self) -> mlc.debug.Finding | None:
        return mlc.debug.find_nan(self.training, self.inputs, self.labels)

    def state(self) -> list[np.ndarray]:
        tensors = [slot.tensor for layer in self.nodes for slot in layer.parameters.values()]
        return [tensor.data.copy() for tensor in tensors]


def test_nothing_is_found_in_a_healthy_net_and_nothing_changes() -> None:
    net = Net(mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=0.1)))
    before = net.state()
    assert net.find() is None
    for array, was in zip(net.state(), before, strict=True):
        np.testing.assert_array_equal(array, was)
    assert net.optimizer.time_step == 1
    first = net.training.execute(net.inputs, net.labels).result.data
    twin = Net(mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=0.1)))
    np.testing.assert_array_equal(first, twin.training.execute(twin.inputs, twin.labels).result.data)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_bad_data_is_named(bad: float) -> None:
    net = Net()
    net.inputs["x"][1, 2] = bad
    found = net.find()
    assert (found.origin, found.name, found.layer, found.phase) == ("input", "x", "n0", "forward")
    assert (found.number, found.count, found.size) == ("NaN" if np.isnan(bad) else "infinity", 1, 12)
    assert str(found) == (
        f"input 'x' holds {found.number} in 1 of 12 elements; layer 'n0' reads it in the forward pass"
    )


def test_bad_labels_are_named() -> None:
    net = Net()
    net.labels["t"][0, 0] = NAN
    found = net.find()
    assert (found.origin, found.name, found.layer) == ("input", "t", "loss")


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("slot", ["weights", "biases", "gamma", "beta"])
@pytest.mark.parametrize("block", range(5))
def test_a_bad_parameter_is_named_wherever_it_is(block: int, slot: str, bad: float) -> None:
    net = Net()
    node = 4 * block + (slot in ("gamma", "beta"))
    tensor = net.nodes[node].parameters[slot].tensor
    good, broken = tensor.data, np.array(tensor)
    broken.reshape(-1)[1] = bad
    tensor.data = broken
    found = net.find()
    assert (found.origin, found.name, found.layer, found.phase) == ("parameter", slot, f"n{node}", "forward")
    tensor.data = good
    assert net.find() is None


@pytest.mark.parametrize("phase", ["forward", "gradient"])
@pytest.mark.parametrize("node", range(20))
def test_a_number_computed_wrong_is_found_at_every_node(node: int, phase: str) -> None:
    net = Net(fault=(node, phase))
    found = net.find()
    assert found is not None
    assert (found.layer, found.phase, found.origin) == (f"n{node}", phase, "step")
    assert found.name == ("log" if phase == "forward" else "divide")
    gives = f"{found.name!r} gives {found.number} in 12 of 12 elements from finite numbers"
    assert str(found) == f"layer 'n{node}', {phase} pass: {gives}"


@pytest.mark.parametrize("node", range(20))
def test_without_looking_the_loss_tells_within_one_step(node: int) -> None:
    net = Net(fault=(node, "forward"))
    assert not np.isfinite(net.training.execute(net.inputs, net.labels).result.data).all()


@pytest.mark.parametrize("node", [4, 8, 16])
def test_a_bad_gradient_reaches_the_loss_of_the_next_step(node: int) -> None:
    net = Net(fault=(node, "gradient"))
    assert np.isfinite(net.training.execute(net.inputs, net.labels).result.data).all()
    assert not np.isfinite(net.training.execute(net.inputs, net.labels).result.data).all()


def test_gradients_that_overflow() -> None:
    """3e38 is a number, ten times it is not: the loss is finite, its gradient is not."""
    x, t = mlc.Tensor(shape=(1, 2)), mlc.Tensor(shape=(1, 2))
    graph = mlc.Graph()
    layer = mlc.ArithmeticLayer(mlc.ArithmeticOperation.MULTIPLY)
    layer.label = "scale"
    scale = mlc.Tensor(shape=(1, 2), fill_with_data=1e-30)
    w = mlc.Tensor(shape=(1, 2), fill_with_data=1.0)
    add = mlc.ArithmeticLayer(mlc.ArithmeticOperation.ADD)
    y = graph.node(layer, sources=[graph.node(add, sources=[x, w]), scale])
    loss = mlc.LossLayer.mean_absolute_error(mlc.ReductionType.SUM, weight=3e38)
    training = mlc.TrainingGraph([graph], loss, mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=0.1)))
    training.set_training_tensor_parameters([mlc.TensorParameter(w), mlc.TensorParameter(scale)])
    training.add_inputs({"x": x}, {"t": t})
    training.compile(device=mlc.Device(mlc.DeviceType.CPU, engine=Reference()))
    data = {"x": np.float32([[99.0, 9.0]])}
    found = mlc.debug.find_nan(training, data, {"t": np.zeros((1, 2), np.float32)})
    assert found is not None
    assert (found.layer, found.phase, found.name, found.number) == ("scale", "gradient", "multiply", "infinity")
    assert y.descriptor.shape == (1, 2)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_bad_learning_rate_is_named(bad: float) -> None:
    net = Net()
    object.__setattr__(net.optimizer, "_learning_rate", bad)
    found = net.find()
    assert found is not None
    assert (found.origin, found.name, found.phase) == ("setting", "learning_rate", "update")


def test_bad_optimizer_state_is_named() -> None:
    net = Net(mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=0.1)))
    net.training.execute(net.inputs, net.labels).wait()
    tensor = net.weights[2]
    states = [np.frombuffer(state.bytes, np.float32).copy() for state in tensor.optimizer_data]
    states[1][3] = NAN
    tensor.bind_optimizer_data(states)
    found = net.find()
    assert found is not None
    assert (found.origin, found.layer, found.phase, found.count) == ("state", "n8", "update", 1)


def test_a_bad_statistic_is_named() -> None:
    mean, variance = (mlc.Tensor(shape=(1, 2, 1, 1), fill_with_data=number) for number in (NAN, 1.0))
    x = mlc.Tensor(shape=(1, 2, 3, 3))
    graph = mlc.InferenceGraph()
    graph.node(mlc.BatchNormalizationLayer(2, mean, variance), source=x)
    graph.add_inputs({"x": x})
    graph.compile(device=mlc.Device.cpu())
    found = mlc.debug.find_nan(graph, {"x": np.ones((1, 2, 3, 3), np.float32)})
    assert (found.origin, found.name) == ("parameter", "mean")


def test_after_a_run_its_data_is_used_again() -> None:
    net = Net(fault=(7, "forward"))
    net.training.execute(net.inputs, net.labels).wait()
    found = mlc.debug.find_nan(net.training)
    assert found.origin == "parameter", "the update has written NaN into the parameters"
    net = Net(fault=(7, "forward"))
    graph = mlc.InferenceGraph([net.graph])
    graph.add_inputs({"x": net.x})
    graph.compile(device=mlc.Device.cpu())
    with pytest.raises(mlc.DataError, match="find_nan: 'x' was not given"):
        mlc.debug.find_nan(graph)
    graph.execute(net.inputs).wait()
    found = mlc.debug.find_nan(graph)
    assert (found.layer, found.phase, found.origin) == ("n7", "forward", "step")


def test_passes_run_one_by_one_use_attached_data() -> None:
    net = Net(fault=(9, "gradient"))
    device = net.training.device
    net.training.bind_and_write_data(net.inputs, for_inputs={"x": net.x}, to=device)
    net.training.bind_and_write_data(net.labels, for_inputs={"t": net.t}, to=device)
    assert mlc.debug.find_nan(net.training).layer == "n9"


def test_a_smaller_batch_is_checked_alone() -> None:
    net = Net()
    net.inputs["x"][2, 0] = NAN
    assert mlc.debug.find_nan(net.training, net.inputs, net.labels, batch_size=2) is None
    assert mlc.debug.find_nan(net.training, net.inputs, net.labels, batch_size=3) is not None


def test_infinities_that_come_to_nothing_do_not_count() -> None:
    """A mask of minus infinity is no mistake as long as something is left to attend to."""
    scores, mask = mlc.Tensor(shape=(1, 3)), mlc.Tensor(shape=(1, 3))
    graph = mlc.InferenceGraph()
    limited = graph.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.MIN), sources=[scores, mask])
    graph.node(mlc.SoftmaxLayer(mlc.SoftmaxOperation.SOFTMAX, 1), source=limited)
    graph.add_inputs({"scores": scores, "mask": mask})
    graph.compile(device=mlc.Device.cpu())
    data = {"scores": np.float32([[1, 2, 3]]), "mask": np.float32([[INF, INF, INF]])}
    assert mlc.debug.find_nan(graph, data) is None


def test_only_compiled_graphs_can_be_searched() -> None:
    with pytest.raises(TypeError, match="needs a TrainingGraph or InferenceGraph, not Graph"):
        mlc.debug.find_nan(mlc.Graph())
    with pytest.raises(mlc.ExecutionError, match="not compiled"):
        mlc.debug.find_nan(mlc.InferenceGraph())
