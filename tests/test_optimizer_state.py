"""Optimizer state: binding, reading, exact resumption, and what may change between steps without compiling anew."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from tests.harness import assert_close
from tests.nets import (
    MEAN,
    SUM,
    Array,
    Regression,
    adam,
    assert_same,
    cpu,
    dense,
    normal,
    parameters_of,
    sgd,
    tensor,
    values_of,
)


def settings(**more: Any) -> mlc.OptimizerDescriptor:
    return mlc.OptimizerDescriptor(learning_rate=0.05, **more)


OPTIMIZERS: dict[str, Callable[..., mlc.Optimizer]] = {
    "momentum": lambda **more: mlc.SGDOptimizer(settings(), momentum_scale=0.9),
    "nesterov": lambda **more: mlc.SGDOptimizer(settings(), momentum_scale=0.9, uses_nesterov_momentum=True),
    "adam": lambda **more: mlc.AdamOptimizer(settings(), **more),
    "amsgrad": lambda **more: mlc.AdamOptimizer(settings(), beta2=0.5, uses_amsgrad=True, **more),
    "adamw": lambda **more: mlc.AdamWOptimizer(
        settings(regularization_type=mlc.RegularizationType.L2, regularization_scale=0.1), **more
    ),
    "rmsprop": lambda **more: mlc.RMSPropOptimizer(settings(), momentum_scale=0.9, is_centered=True),
}


def data(step: int) -> tuple[Array, Array]:
    return normal(4, 3, seed=step), normal(4, 2, seed=100 + step)


def states_of(parameter: mlc.Tensor) -> list[Array]:
    assert parameter.synchronize_optimizer_data()
    shape = parameter.descriptor.shape
    return [np.frombuffer(state.bytes, np.float32).reshape(shape) for state in parameter.optimizer_data]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("stop", [1, 5])
@pytest.mark.parametrize("way", ["graph", "tensor", "before compile"])
def test_exact_resumption(kind: str, stop: int, way: str) -> None:
    """Saved weights, state and time step, loaded into a new graph, go on bitwise."""
    whole = Regression(OPTIMIZERS[kind]())
    for step in range(10):
        whole.step(*data(step))
    first = Regression(OPTIMIZERS[kind]())
    for step in range(stop):
        first.step(*data(step))
    first.training.synchronize_updates()
    weights = values_of(first.training)
    states = [[state.copy() for state in states_of(parameter)] for parameter in first.parameters]
    step_count = getattr(first.training.optimizer, "time_step", None)
    assert step_count in (None, stop + 1)

    more = {} if step_count is None else {"time_step": step_count}
    second = Regression(OPTIMIZERS[kind](**more))
    for parameter, values, buffers in zip(second.parameters, weights, states, strict=True):
        parameter.bind_and_write_data(values, to=second.device)
        if way == "graph":
            assert second.training.bind_optimizer_data([mlc.TensorData(b) for b in buffers], tensor=parameter)
        else:
            assert parameter.bind_optimizer_data(buffers)
    if way == "before compile":
        second.training.compile(device=cpu())
    for step in range(stop, 10):
        second.step(*data(step))
    assert_same(values_of(second.training), values_of(whole.training))
    for a, b in zip(whole.parameters, second.parameters, strict=True):
        assert_same(states_of(a), states_of(b))
    # The buffers stay the caller's: they were updated in place.
    assert_same(states[0], states_of(second.parameters[0]))
    assert getattr(second.training.optimizer, "time_step", None) == (None if step_count is None else 11)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_layout(kind: str) -> None:
    net = Regression(OPTIMIZERS[kind]())
    count = {"momentum": 1, "nesterov": 1, "adam": 2, "adamw": 2}.get(kind, 3)
    for parameter in net.parameters:
        assert [state.length for state in parameter.optimizer_data] == [
            parameter.descriptor.tensor_allocation_size_in_bytes
        ] * count
        assert len(parameter.optimizer_device_data) == count
        assert isinstance(copy.copy(parameter.optimizer_device_data[0]), mlc.TensorOptimizerDeviceData)
        assert not any(state.any() for state in states_of(parameter))
    assert net.x.optimizer_data == []
    with pytest.raises(TypeError, match="made by the library"):
        mlc.TensorOptimizerDeviceData()


def test_plain_sgd_has_no_state() -> None:
    net = Regression(sgd())
    net.step(*data(0)).wait()
    assert net.parameters[0].optimizer_data == []
    assert net.training.bind_optimizer_data([], tensor=net.parameters[0])


def test_state_by_hand() -> None:
    """Two steps of momentum from a bound buffer; L = sum(w): the gradient is the data."""
    x, t = mlc.Tensor(shape=(1, 3)), mlc.Tensor(shape=(1, 1))
    w = tensor(np.float32([[1, -2, 0.5]]))
    d = mlc.ConvolutionDescriptor(input_feature_channel_count=3, output_feature_channel_count=1)
    training = mlc.TrainingGraph([], mlc.LossLayer.mean_absolute_error(SUM), sgd(0.1, momentum_scale=0.9))
    training.node(mlc.FullyConnectedLayer(w, None, d), source=x)
    training.add_inputs({"x": x}, {"t": t})
    training.compile(device=cpu())
    momentum = np.float32([[0.5, 0, 0]])
    training.bind_optimizer_data([momentum], tensor=w)
    labels = {"t": np.float32([[-100]])}
    training.execute({"x": np.float32([[0.1, -0.2, 0.3]])}, labels)
    training.execute({"x": np.float32([[0.3, 0.1, -0.2]])}, labels)
    training.synchronize_updates()
    assert_close(momentum, np.float32([[0.039 + 0.405, -0.008, 0.007]]))
    assert_close(w.data, np.float32([[0.951 - 0.45 - 0.405, -1.972, 0.463]]))


def test_what_cannot_be_bound() -> None:
    net = Regression(adam())
    w = net.first.weights
    good = [np.zeros((5, 3), np.float32) for _ in range(2)]
    before = [state.bytes for state in w.optimizer_data]
    for bind in (
        lambda buffers: net.training.bind_optimizer_data(buffers, tensor=w),
        w.bind_optimizer_data,
    ):
        with pytest.raises(mlc.DataError, match="1 buffers were given, AdamOptimizer has 2 states"):
            bind(good[:1])
        with pytest.raises(mlc.DataError, match="elements were given"):
            bind([good[0], np.zeros(3, np.float32)])
        with pytest.raises(mlc.DataError, match="read-only"):
            bind([good[0], mlc.TensorData(immutable_bytes_no_copy=good[1])])
        with pytest.raises(mlc.DataError, match="without a copy"):
            bind([good[0], good[1].astype(np.float64)])
    assert [state.bytes for state in w.optimizer_data] == before, "a refused call must bind nothing"
    with pytest.raises(mlc.GraphError, match="is not updated by this graph"):
        net.training.bind_optimizer_data(good, tensor=net.x)
    with pytest.raises(mlc.ExecutionError, match="no optimizer"):
        Regression(None).training.bind_optimizer_data(good, tensor=w)
    net.step(*data(0)).wait()


def test_a_wrong_number_bound_before_compiling_is_refused_then() -> None:
    x, t = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 2))
    layer = dense(3, 2)
    layer.weights.bind_optimizer_data([np.zeros((2, 3), np.float32)])
    training = mlc.TrainingGraph([], mlc.LossLayer.mean_squared_error(MEAN), adam())
    training.node(layer, source=x)
    training.add_inputs({"x": x}, {"t": t})
    with pytest.raises(mlc.DataError, match="1 buffers were given, AdamOptimizer has 2 states"):
        training.compile(device=cpu())
    assert training.device is None


@pytest.mark.filterwarnings("ignore:.*learning_rate is 0")
def test_state_given_with_a_tensor_parameter() -> None:
    momentum = np.full((1, 3), 2, np.float32)
    offset = tensor(np.zeros((1, 3), np.float32))
    parameter = mlc.TensorParameter(offset, optimizer_data=[momentum])
    assert parameter.tensor is offset
    assert parameter.is_updatable
    assert len(offset.optimizer_data) == 1
    x, t = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 3))
    training = mlc.TrainingGraph([], mlc.LossLayer.mean_squared_error(SUM), sgd(0.0, momentum_scale=0.5))
    training.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.ADD), sources=[x, offset])
    training.add_inputs({"x": x}, {"t": t})
    training.set_training_tensor_parameters([parameter])
    training.compile(device=cpu())
    training.execute({"x": normal(4, 3)}, {"t": normal(4, 3)})
    training.synchronize_updates()
    np.testing.assert_array_equal(momentum, 1)
    np.testing.assert_array_equal(offset.data, -np.ones((1, 3)))


# The optimizer over time -------------------------------------------------------------------------------------------


def test_an_optimizer_attached_later() -> None:
    net, plain = Regression(None), Regression(adam())
    net.step(*data(9)).wait()  # gradients only: nothing changes
    optimizer = adam()
    assert net.training.compile_optimizer(optimizer)
    assert net.training.optimizer is optimizer
    for step in range(3):
        net.step(*data(step))
        plain.step(*data(step))
    assert_same(values_of(net.training), values_of(plain.training))
    bare = mlc.TrainingGraph()
    with pytest.raises(mlc.ExecutionError, match="not compiled"):
        bare.compile_optimizer(adam())
    with pytest.raises(TypeError, match="needs an Optimizer"):
        net.training.compile_optimizer("adam")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*learning_rate is 0")
def test_state_bound_before_an_optimizer_is_attached_is_used() -> None:
    net = Regression(None)
    momentum = normal(5, 3, seed=4)
    net.first.weights.bind_optimizer_data([momentum])
    net.training.compile_optimizer(sgd(0.0, momentum_scale=0.5))
    before, start = net.first.weights.data.copy(), momentum.copy()
    net.step(*data(0)).wait()
    assert_close(net.first.weights.data, before - 0.5 * start)


@pytest.mark.parametrize("bound", [False, True])
def test_replacing_an_optimizer_resets_its_state(bound: bool) -> None:
    net = Regression(sgd(0.1, momentum_scale=0.9))
    if bound:
        for parameter in net.parameters:
            parameter.bind_optimizer_data([np.ones(parameter.descriptor.shape, np.float32)])
    for step in range(3):
        net.step(*data(step))
    net.training.compile_optimizer(sgd(0.1, momentum_scale=0.9))
    assert not any(states_of(parameter)[0].any() for parameter in net.parameters)
    twin = net.torch()
    twin.loss(*data(3)).backward()
    net.step(*data(3)).wait()
    for parameter, expected in zip(net.parameters, twin.parameters, strict=True):
        assert_close(parameter.data, (expected - 0.1 * expected.grad).detach().numpy())
    net.training.compile_optimizer(adam(time_step=7))
    net.step(*data(4)).wait()
    assert net.training.optimizer.time_step == 8
    assert len(net.parameters[0].optimizer_data) == 2


def test_compiling_again_keeps_state_and_time_step() -> None:
    net, plain = Regression(adam()), Regression(adam())
    for step in range(6):
        if step == 3:
            net.training.compile(device=cpu(), options=mlc.GraphCompilationOptions.DISABLE_LAYER_FUSION)
        net.step(*data(step))
        plain.step(*data(step))
    assert_same(values_of(net.training), values_of(plain.training))
    assert net.training.optimizer.time_step == 7


@pytest.mark.filterwarnings("ignore:.*learning_rate is 0")
def test_settings_change_without_new_programs() -> None:
    def make() -> mlc.SGDOptimizer:
        return mlc.SGDOptimizer(
            mlc.OptimizerDescriptor(learning_rate=0.5, gradient_clip_max=0.01, gradient_clip_min=-0.01)
        )

    net = Regression(make())
    net.step(*data(0)).wait()
    before, programs = dict(net.training.programs), None
    for rate, clips in ((0.25, False), (0.5, True), (0.25, True), (0.25, False), (0.0, False), (0.5, True)):
        net.training.optimizer.learning_rate = rate
        net.training.optimizer.applies_gradient_clipping = clips
        twin = net.torch()
        twin.loss(*data(1)).backward()
        net.step(*data(1)).wait()
        for parameter, old in zip(net.parameters, twin.parameters, strict=True):
            gradient = old.grad.clamp(-0.01, 0.01) if clips else old.grad
            assert_close(parameter.data, (old - rate * gradient).detach().numpy())
        if clips and programs is None:  # steps that clip are there from now on
            programs = dict(net.training.programs)
            assert programs != before
        assert net.training.programs == (before if programs is None else programs)


def test_one_optimizer_for_two_graphs_keeps_their_states_apart() -> None:
    shared = adam()
    nets = Regression(shared), Regression(shared)
    alone = Regression(adam()), Regression(adam())
    for step in range(4):
        for net, plain in zip(nets, alone, strict=True):
            if net is nets[0] or step > 1:
                net.step(*data(step))
                plain.step(*data(step))
    for net, plain in zip(nets, alone, strict=True):
        assert_same(values_of(net.training), values_of(plain.training))


def test_synchronizing() -> None:
    net = Regression(adam())
    run = net.step(*data(0))
    net.training.synchronize_updates()
    assert run.is_done
    w = net.first.weights
    assert w.synchronize_data()
    assert w.synchronize_optimizer_data()
    out = np.empty((5, 3), np.float32)
    assert w.copy_data_from_device_memory(out, synchronize_with_device=True)
    np.testing.assert_array_equal(out, w.data)
    assert w.has_valid_numerics
    assert parameters_of(net.training)[0] is w
