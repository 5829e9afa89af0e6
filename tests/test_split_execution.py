"""The three passes run one by one: the same numbers as the fused step, on data attached beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from tests.harness import assert_close
from tests.nets import (
    INFERENCE,
    MEAN,
    SKIP,
    SYNC,
    Array,
    Regression,
    adam,
    assert_same,
    batch_norm,
    cpu,
    dense,
    normal,
    parameters_of,
    sgd,
    shared_dense,
    tensor,
    values_of,
)

STEPS = 8

Builder = Callable[[mlc.Graph, mlc.Tensor], mlc.Tensor]


def rmsprop() -> mlc.RMSPropOptimizer:
    settings = mlc.OptimizerDescriptor(learning_rate=0.01)
    return mlc.RMSPropOptimizer(settings, momentum_scale=0.9, is_centered=True)


def clipped() -> mlc.SGDOptimizer:
    return mlc.SGDOptimizer(
        mlc.OptimizerDescriptor(
            learning_rate=0.1,
            applies_gradient_clipping=True,
            gradient_clipping_type=mlc.GradientClippingType.BY_GLOBAL_NORM,
            maximum_clipping_norm=0.5,
            regularization_type=mlc.RegularizationType.L2,
            regularization_scale=0.01,
        )
    )


class ConvolutionNet:
    """Convolution, batch norm, dropout, pooling, dense and softmax cross entropy: everything that has a state."""

    def __init__(self, optimizer: mlc.Optimizer) -> None:
        mlc.Platform.set_rng_seed_to(11)
        self.x, self.t = mlc.Tensor(shape=(6, 2, 5, 5)), mlc.Tensor(shape=(6, 3))
        graph = mlc.Graph()
        d = mlc.ConvolutionDescriptor(
            kernel_sizes=(3, 3),
            input_feature_channel_count=2,
            output_feature_channel_count=4,
            strides=(1, 1),
            padding_policy=mlc.PaddingPolicy.SAME,
        )
        layer = mlc.ConvolutionLayer(tensor(normal(4, 2, 3, 3, seed=5) * np.float32(0.3)), tensor(normal(4, seed=6)), d)
        y = graph.node(layer, source=self.x)
        y = graph.node(batch_norm(4), source=y)
        y = graph.node(mlc.ActivationLayer.relu(), source=y)
        y = graph.node(mlc.DropoutLayer(0.3, 0), source=y)
        y = graph.node(
            mlc.PoolingLayer(mlc.PoolingDescriptor.max_pooling((2, 2), (2, 2), mlc.PaddingPolicy.VALID)), source=y
        )
        y = graph.reshape((6, 16), source=y)
        y = graph.node(mlc.DropoutLayer(0.2, 77), source=y)
        graph.node(dense(16, 3, seed=9), source=y)
        self.training = mlc.TrainingGraph([graph], mlc.LossLayer.softmax_cross_entropy(MEAN), optimizer)
        self.training.add_inputs({"x": self.x}, {"t": self.t})
        self.device = cpu()
        self.training.compile(device=self.device)
        mlc.Platform.set_rng_seed_to(12)

    def data(self, step: int) -> tuple[Array, Array]:
        return normal(6, 2, 5, 5, seed=step), np.eye(3, dtype=np.float32)[np.arange(6) * (step + 1) % 3]

    def fused(self, step: int, **more: Any) -> float:
        x, t = self.data(step)
        return float(self.training.execute({"x": x}, {"t": t}, **more).result.data[0])

    def split(self, step: int, **more: Any) -> float:
        x, t = self.data(step)
        batch = more.get("batch_size", 0)
        self.training.bind_and_write_data(
            {"x": x, "t": t}, for_inputs={"x": self.x, "t": self.t}, to=self.device, batch_size=batch
        )
        self.training.execute_forward(**more)
        self.training.execute_gradient(**more)
        more.pop("batch_size", None)
        self.training.execute_optimizer_update(**more)
        return float(self.training.result_tensors(self.training._definition.learning.loss_layer)[0].data[0])

    def everything(self) -> list[Array]:
        parameters = parameters_of(self.training)
        states = [np.frombuffer(s.bytes, np.float32).copy() for p in parameters for s in p.optimizer_data]
        return [*values_of(self.training), *states]


@pytest.mark.parametrize("make", [sgd, adam, rmsprop, clipped], ids=["sgd", "adam", "rmsprop", "clipped"])
@pytest.mark.parametrize("options", [SYNC, mlc.ExecutionOptions.NONE], ids=["sync", "async"])
def test_split_is_fused_bit_by_bit(make: Callable[[], mlc.Optimizer], options: mlc.ExecutionOptions) -> None:
    fused, losses = ConvolutionNet(make()), []
    for step in range(STEPS):
        losses.append(fused.fused(step, batch_size=4 if step == 5 else 0))
    split = ConvolutionNet(make())
    for step in range(STEPS):
        loss = split.split(step, batch_size=4 if step == 5 else 0, options=options)
        assert loss == losses[step]
    assert_same(split.everything(), fused.everything())


def two_dense_layers(graph: mlc.Graph, x: mlc.Tensor) -> mlc.Tensor:
    """The gradient between them is readable after separate passes, as a view of what a matmul gives."""
    first, second = tensor(normal(16, 1, seed=1)), tensor(normal(32, 16, seed=2))
    return graph.node(shared_dense(second, 16, 32), source=graph.node(shared_dense(first, 1, 16), source=x))


def pooling_beside_a_convolution(graph: mlc.Graph, x: mlc.Tensor) -> mlc.Tensor:
    """Nobody reads what the convolution gives, except after separate passes. It likes channels last."""
    graph.convolution(x, 4, 3)
    y = graph.pool(x, 3, kind="average", stride=1)
    return graph.dense(graph.flatten(graph.pool(y, 3, kind="average", stride=1)), 5)


@pytest.mark.filterwarnings("ignore:.*will not be trained:UserWarning")
@pytest.mark.parametrize(
    ("build", "shape"), [(two_dense_layers, (9, 16, 1)), (pooling_beside_a_convolution, (4, 16, 9, 16))]
)
def test_what_only_separate_passes_keep_changes_no_bits(build: Builder, shape: tuple[int, ...]) -> None:
    def trained(*, in_passes: bool) -> list[Array]:
        mlc.Platform.set_rng_seed_to(3)
        graph = mlc.Graph()
        x = graph.input(shape, "x")
        y = build(graph, x)
        t = mlc.Tensor(shape=y.shape)
        graph.node(mlc.LossLayer.mean_squared_error(MEAN), source=y, loss_labels=[t])
        training = mlc.TrainingGraph([graph], None, sgd())
        training.add_inputs({"x": x}, {"t": t})
        training.compile(device=cpu())
        data = {"x": normal(*shape, seed=3), "t": normal(*y.shape, seed=4)}
        if in_passes:
            assert training.bind_and_write_data(data, for_inputs={"x": x, "t": t}, to=training.device)
            training.execute_forward()
            training.execute_gradient()
            training.execute_optimizer_update(options=SYNC)
        else:
            training.execute({"x": data["x"]}, {"t": data["t"]}, options=SYNC)
        return values_of(training)

    assert_same(trained(in_passes=True), trained(in_passes=False))


def test_split_and_fused_may_alternate() -> None:
    plain, mixed = ConvolutionNet(adam()), ConvolutionNet(adam())
    for net in (plain, mixed):
        mlc.Platform.set_rng_seed_to(4)
        for step in range(6):
            (net.split if net is mixed and step % 2 else net.fused)(step)
    assert_same(mixed.everything(), plain.everything())


def test_a_pass_needs_the_one_before_it() -> None:
    net = Regression(sgd())
    with pytest.raises(mlc.ExecutionError, match="no forward pass was run"):
        net.training.execute_gradient()
    with pytest.raises(mlc.DataError, match="'x' was not given"):
        net.training.execute_forward()
    net.bind(normal(4, 3), normal(4, 2))
    with pytest.raises(mlc.ExecutionError, match="no forward pass was run"):
        net.training.execute_gradient()
    net.training.execute_forward()
    with pytest.raises(mlc.ExecutionError, match="no gradient pass was run"):
        net.training.execute_optimizer_update()
    with pytest.raises(mlc.ExecutionError, match="the forward pass ran 4"):
        net.training.execute_gradient(batch_size=3)
    net.training.execute_gradient(batch_size=4)
    net.training.execute_optimizer_update()


@pytest.mark.parametrize("mode", ["execute", "inference"])
def test_another_run_in_between_ends_the_sequence(mode: str) -> None:
    """The runs of a graph share memory, so the values a gradient pass needs are gone."""
    net = Regression(sgd())
    x, t = normal(4, 3), normal(4, 2)
    net.bind(x, t)
    net.training.execute_forward()
    net.step(x, t, options=INFERENCE if mode == "inference" else mlc.ExecutionOptions.NONE)
    with pytest.raises(mlc.ExecutionError, match="no forward pass was run"):
        net.training.execute_gradient()
    net.training.execute_forward(options=INFERENCE)
    with pytest.raises(mlc.ExecutionError, match="no forward pass was run") as caught:
        net.training.execute_gradient()
    assert "call execute_forward before it, in training mode" in caught.value.fix


def test_a_refused_run_in_between_does_not() -> None:
    net, plain = Regression(sgd()), Regression(sgd())
    x, t = normal(4, 3), normal(4, 2)
    for each in (net, plain):
        each.bind(x, t)
        each.training.execute_forward()
    with pytest.raises(mlc.DataError):
        net.training.execute({"x": np.zeros(1)}, {"t": t}, options=INFERENCE, batch_size=3)
    with pytest.raises(mlc.DataError):
        net.training.execute({"x": x}, {"t": t}, outputs_data={"y": np.zeros(1, np.float32)}, batch_size=3)
    for each in (net, plain):
        each.training.execute_gradient()
        each.training.execute_optimizer_update()
    assert_same(values_of(net.training), values_of(plain.training))


def test_gradients_are_replaced_not_accumulated() -> None:
    net = Regression(sgd())
    net.bind(normal(4, 3), normal(4, 2))
    net.training.execute_forward()
    net.training.execute_gradient()
    first = net.training.gradient_data(net.first.weights, net.first)
    net.training.execute_gradient()
    np.testing.assert_array_equal(net.training.gradient_data(net.first.weights, net.first), first)


@pytest.mark.parametrize("data_type", [mlc.DataType.FLOAT32, mlc.DataType.FLOAT16])
def test_updates_may_be_repeated(data_type: mlc.DataType) -> None:
    """Each applies the same gradient to the newest parameters."""
    x, t = mlc.Tensor(shape=(2, 3)), mlc.Tensor(shape=(2, 1))
    w = mlc.Tensor(shape=(1, 3), data=np.ones((1, 3), data_type.numpy), data_type=data_type)
    d = mlc.ConvolutionDescriptor(input_feature_channel_count=3, output_feature_channel_count=1)
    layer = mlc.FullyConnectedLayer(w, None, d)
    settings = mlc.OptimizerDescriptor(
        learning_rate=0.25, regularization_type=mlc.RegularizationType.L2, regularization_scale=0.5
    )
    loss = mlc.LossLayer.mean_squared_error(mlc.ReductionType.SUM)
    training = mlc.TrainingGraph([], loss, mlc.SGDOptimizer(settings))
    training.node(layer, source=x)
    training.add_inputs({"x": x}, {"t": t})
    device = cpu()
    training.compile(device=device)
    data = {"x": np.float32([[1, 0, 0], [0, 2, 0]]), "t": np.zeros((2, 1), np.float32)}
    training.bind_and_write_data(data, for_inputs={"x": x, "t": t}, to=device)
    training.execute_forward()
    training.execute_gradient()
    g = training.gradient_data(w, layer).astype(np.float64)
    np.testing.assert_array_equal(g, [[2, 8, 0]])
    expected = np.ones((1, 3))
    for _ in range(3):
        training.execute_optimizer_update()
        expected = expected - 0.25 * (g + 0.5 * expected)
        assert_close(w.data, expected)


def test_adam_counts_repeated_updates() -> None:
    optimizer = adam(time_step=5)
    net = Regression(optimizer)
    net.bind(normal(4, 3), normal(4, 2))
    net.training.execute_forward()
    net.training.execute_gradient()
    for _ in range(3):
        net.training.execute_optimizer_update()
    net.training.synchronize_updates()
    assert optimizer.time_step == 8


def test_attached_memory_is_read_again_by_every_run() -> None:
    net = Regression(sgd())
    x, t = normal(4, 3), normal(4, 2)
    net.bind(x, t)
    first = net.training.execute_forward().result.data
    x *= 2
    second = net.training.execute_forward().result.data
    assert not np.array_equal(first, second)
    assert_close(second, np.float32([net.torch().loss(x, t).item()]))


@pytest.mark.parametrize("options", [SYNC, mlc.ExecutionOptions.NONE], ids=["sync", "async"])
def test_the_gradient_pass_uses_the_numbers_of_the_forward_pass(options: mlc.ExecutionOptions) -> None:
    """Memory overwritten after execute_forward has returned changes nothing."""
    plain, net = Regression(sgd()), Regression(sgd())
    x, t = normal(4, 3), normal(4, 2)
    for each in (plain, net):
        own = x.copy(), t.copy()
        each.bind(*own)
        each.training.execute_forward(options=options)
        if each is net:
            own[0].fill(np.nan)
            own[1].fill(np.nan)
        each.training.execute_gradient(options=options)
        each.training.execute_optimizer_update(options=options)
    assert_same(values_of(net.training), values_of(plain.training))


def test_newly_attached_data_is_for_the_next_forward_pass() -> None:
    plain, net = Regression(sgd()), Regression(sgd())
    x, t = normal(4, 3), normal(4, 2)
    for each in (plain, net):
        each.bind(x, t)
        each.training.execute_forward()
        if each is net:
            each.bind(normal(4, 3, seed=5)[:2], normal(4, 2, seed=6)[:2], batch_size=2)
        each.training.execute_gradient()
        each.training.execute_optimizer_update()
    assert_same(values_of(net.training), values_of(plain.training))


def test_binding_says_what_does_not_fit() -> None:
    net = Regression(sgd())
    tensors = {"x": net.x, "t": net.t}
    bind = net.training.bind_and_write_data
    assert bind({}, for_inputs={}, to=net.device)
    with pytest.raises(mlc.DataError, match="no tensor for 'z'"):
        bind({"z": normal(4, 3)}, for_inputs=tensors, to=net.device)
    with pytest.raises(mlc.DataError, match="elements were given"):
        bind({"x": np.zeros(11, np.float32)}, for_inputs=tensors, to=net.device)
    with pytest.raises(mlc.ShapeError, match="batch_size is -1"):
        bind({"x": normal(5, 3)}, for_inputs=tensors, to=net.device, batch_size=-1)
    with pytest.raises(mlc.DataError, match="4 rows were given, batch_size is 5"):
        bind({"x": normal(4, 3)}, for_inputs=tensors, to=net.device, batch_size=5)
    assert net.x.data is None, "a refused call must attach nothing"
    net.bind(normal(2, 3), normal(2, 2), batch_size=2)
    assert net.x.data.shape == (2, 3)
    with pytest.raises(mlc.DataError, match=r"the attached data has shape \(2, 3\), \(4, 3\) is needed"):
        net.training.execute_forward()
    net.training.execute_forward(batch_size=2)
    with pytest.raises(mlc.DataError, match=r"'x': 9 rows were given, this graph was built for a batch of 4"):
        net.bind(normal(9, 3), normal(9, 2))
    net.bind(mlc.TensorData(normal(9, 3)), mlc.TensorData(normal(9, 2)))
    assert net.x.data.shape == (4, 3)


def test_binding_what_the_graph_computes_is_refused() -> None:
    """No run would read it: the gradient pass would go on with gradients of its own."""
    net = Regression(sgd())
    net.bind(normal(4, 3), normal(4, 2))
    loss = net.training.execute_forward().result.of
    bind = net.training.bind_and_write_data
    for result in (net.y, loss):
        gradient = net.training.gradient_tensor(result)
        with pytest.raises(mlc.DataError, match=r"'dy' is a gradient that the graph computes itself") as caught:
            bind({"dy": np.ones(gradient.shape, np.float32)}, for_inputs={"dy": gradient}, to=net.device)
        assert "allocate_user_gradient" in caught.value.fix
    with pytest.raises(mlc.DataError, match=r"'y' is the result of FullyConnected"):
        bind({"y": normal(4, 2)}, for_inputs={"y": net.y}, to=net.device)
    # Where no loss begins the gradient pass, the gradient of the last result does.
    training = mlc.TrainingGraph([net.graph])
    training.add_inputs({"x": net.x})
    training.compile(device=net.device)
    training.bind_and_write_data({"x": normal(4, 3)}, for_inputs={"x": net.x}, to=net.device)
    training.execute_forward()
    dy = training.gradient_tensor(net.y)
    assert training.bind_and_write_data({"dy": normal(4, 2)}, for_inputs={"dy": dy}, to=net.device)
    training.execute_gradient()
    assert_close(training.gradient_data(net.second.biases, net.second).ravel(), normal(4, 2).sum(axis=0))


def test_a_plain_graph_binds_too_and_has_no_device() -> None:
    net = Regression(sgd())
    assert net.graph.bind_and_write_data({"x": normal(4, 3)}, for_inputs={"x": net.x}, to=net.device)
    assert net.graph.device is None
    assert net.x.device is net.device


def test_what_was_attached_to_an_input_last_counts() -> None:
    """A tensor's own bind_and_write_data is meant for weights, but inputs have it, too."""
    net = Regression(None)
    x, t = normal(4, 3), normal(4, 2)
    net.bind(x, t)
    before = net.training.execute_forward().result.data
    other = normal(4, 3, seed=7)
    net.x.bind_and_write_data(mlc.TensorData(other), to=net.device)
    expected = np.float32([net.torch().loss(other, t).item()])
    assert_close(net.training.execute_forward().result.data, expected)
    assert_close(net.training.execute({}, options=SKIP).result.data, expected)
    np.testing.assert_array_equal(net.x.data, other)
    assert net.step(x, t).result.data == before
    assert net.training.execute({}, options=SKIP).result.data == before
    net.bind(x, t)
    assert net.training.execute_forward().result.data == before


# Skipping the transfer of inputs -----------------------------------------------------------------------------------


def test_skip_uses_what_an_earlier_run_was_fed() -> None:
    net = Regression(None)
    x, t = normal(4, 3), normal(4, 2)
    first = net.step(x, t).result.data
    other = normal(4, 3, seed=9)
    again = net.training.execute({"x": other}, {"t": t}, options=SKIP).result.data
    np.testing.assert_array_equal(again, first)
    assert net.training.execute({}, options=SKIP).result.data == first


def test_skip_uses_the_later_of_fed_and_attached() -> None:
    net = Regression(None)
    x, t = normal(4, 3), normal(4, 2)
    attached = normal(4, 3, seed=1), normal(4, 2, seed=1)
    net.bind(*attached)
    bound = net.training.execute({}, options=SKIP).result.data
    assert_close(bound, np.float32([net.torch().loss(*attached).item()]))
    fed = net.step(x, t).result.data
    assert fed != bound
    assert net.training.execute({}, options=SKIP).result.data == fed
    net.bind(*attached)
    assert net.training.execute({}, options=SKIP).result.data == bound
    # Without the option only what was attached stands in for data that is not given.
    net.step(x, t)
    assert net.training.execute({}).result.data == bound


def test_skip_with_nothing_written_before_is_an_error() -> None:
    net = Regression(sgd())
    with pytest.raises(mlc.DataError, match="'x' was not given") as refused:
        net.step(normal(4, 3), normal(4, 2), options=SKIP)
    assert "leave that option out" in refused.value.fix
    # A refused call has written nothing either.
    with pytest.raises(mlc.DataError):
        net.step(normal(4, 3), normal(1, 2))
    with pytest.raises(mlc.DataError, match="was not given"):
        net.training.execute({}, options=SKIP)
    net.step(normal(2, 3), normal(2, 2), batch_size=2)
    with pytest.raises(mlc.DataError, match="is needed"):
        net.training.execute({}, options=SKIP)
    net.training.execute({}, options=SKIP, batch_size=1)


# Inference mode ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_labels", [False, True])
@pytest.mark.parametrize("form", ["execute", "execute_forward"])
def test_forward_for_inference(form: str, with_labels: bool) -> None:
    """Dropout off, running statistics used and left alone; the loss with labels, the prediction without."""
    net = ConvolutionNet(adam())
    net.fused(0)
    before = net.everything()
    x, t = net.data(1)
    labels = {"t": t} if with_labels else {}
    if form == "execute":
        run = net.training.execute({"x": x}, labels, options=INFERENCE)
    else:
        tensors = {"x": net.x, "t": net.t}
        net.training.bind_and_write_data({"x": x, **labels}, for_inputs=tensors, to=net.device)
        run = net.training.execute_forward(options=INFERENCE)
    result = run.result.data
    inference = mlc.InferenceGraph(net.training._definition.graphs)
    inference.add_inputs({"x": net.x})
    inference.compile(device=cpu())
    prediction = inference.execute({"x": x}).result.data
    if with_labels:
        shifted = prediction - prediction.max(1, keepdims=True)
        logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        assert_close(result, np.float32([-(t * logs).sum() / 6]))
    else:
        np.testing.assert_array_equal(result, prediction)
    assert_same(net.everything(), before)


def test_inference_without_labels_ignores_labels_attached_long_ago() -> None:
    net = Regression(None)
    x, t = normal(4, 3), normal(4, 2)
    net.bind(x, t)
    net.training.execute_forward()
    result = net.training.execute({"x": x}, options=INFERENCE).result
    assert result.of is net.y
    assert net.training.execute_forward(options=INFERENCE).result.of is net.training.result_tensors(net.loss)[0]


def test_outputs_that_need_labels_say_so() -> None:
    net = Regression(None)
    loss = net.training.result_tensors(net.loss)[0]
    net.training.add_outputs({"loss": loss})
    out = np.empty(1, np.float32)
    x, t = normal(4, 3), normal(4, 2)
    net.training.execute({"x": x}, {"t": t}, outputs_data={"loss": out}, options=INFERENCE).wait()
    assert_close(out, np.float32([net.torch().loss(x, t).item()]))
    with pytest.raises(mlc.DataError, match="needs labels that were not given"):
        net.training.execute({"x": x}, outputs_data={"loss": out}, options=INFERENCE)
