"""Reading gradients, stopping them, freezing parameters, and feeding gradients from outside."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mlcompute as mlc
from tests.harness import assert_close
from tests.nets import (
    ALL_GRADIENTS,
    INFERENCE,
    MEAN,
    SUM,
    SYNC,
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

DEBUG = mlc.GraphCompilationOptions.DEBUG_LAYERS


def torch_gradients(net: Regression, x: Array, t: Array) -> tuple[list[Array], dict[str, Array]]:
    """Gradients of the parameters, and of x, hidden, active and y."""
    twin = net.torch()
    w1, b1, w2, b2 = twin.parameters
    source = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    hidden = source @ w1.T + b1
    active = torch.tanh(hidden)
    y = active @ w2.T + b2
    named = {"x": source, "hidden": hidden, "active": active, "y": y}
    loss = ((y - torch.tensor(t)) ** 2).mean()
    found = torch.autograd.grad(loss, [*twin.parameters, *named.values()])
    arrays = [gradient.numpy() for gradient in found]
    return arrays[:4], dict(zip(named, arrays[4:], strict=True))


def run_split(net: Regression, x: Array, t: Array, **more: int) -> None:
    net.bind(x, t, **more)
    net.training.execute_forward(**more)
    net.training.execute_gradient(**more)


# Reading -----------------------------------------------------------------------------------------------------------


def test_gradients_of_parameters() -> None:
    net = Regression(sgd())
    x, t = normal(4, 3), normal(4, 2)
    parameters, _ = torch_gradients(net, x, t)
    run_split(net, x, t)
    for layer, tensors in ((net.first, parameters[:2]), (net.second, parameters[2:])):
        for parameter, expected in zip((layer.weights, layer.biases), tensors, strict=True):
            gradient = net.training.gradient_data(parameter, layer)
            assert gradient.shape == parameter.descriptor.shape
            assert gradient.dtype == np.float32
            assert not gradient.flags.writeable
            assert_close(gradient, expected)


def test_there_is_nothing_to_read_where_there_is_nothing() -> None:
    net = Regression(sgd())
    x, t = normal(4, 3), normal(4, 2)
    read = net.training.gradient_data
    assert read(net.first.weights, net.first) is None
    run_split(net, x, t)
    assert read(net.first.weights, net.first) is not None
    assert read(net.second.weights, net.first) is None, "not a parameter of that layer"
    assert read(net.x, net.first) is None
    with pytest.raises(TypeError, match=r"gradient_data: for_parameter must be a Tensor, not FullyConnectedLayer"):
        read(net.first, net.first.weights)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"gradient_data: layer must be a Layer, not str"):
        read(net.first.weights, "first")  # type: ignore[arg-type]
    assert read(net.first.weights, dense(3, 5)) is None, "a foreign layer"
    net.training.execute_optimizer_update()
    assert read(net.first.weights, net.first) is not None, "an update leaves the gradients"
    net.training.execute_forward()
    assert read(net.first.weights, net.first) is None, "a new forward pass does not"
    run_split(net, x, t)
    net.step(x, t)
    assert read(net.first.weights, net.first) is None, "nor does a fused step"
    assert net.training.gradient_tensor(net.hidden).data is None
    run_split(net, x, t)
    net.step(x, t, options=INFERENCE)
    assert read(net.first.weights, net.first) is None


def test_gradient_tensors() -> None:
    net = Regression(sgd(), options=ALL_GRADIENTS)
    x, t = normal(4, 3), normal(4, 2)
    parameters, expected = torch_gradients(net, x, t)
    assert net.training.gradient_tensor(net.x).data is None
    run_split(net, x, t)
    for name in ("x", "hidden", "active", "y"):
        source = getattr(net, name)
        gradient = net.training.gradient_tensor(source)
        assert gradient is net.training.gradient_tensor(source)
        assert gradient is not source
        assert gradient.descriptor == source.descriptor
        assert_close(gradient.data, expected[name], what=name)
    assert_close(net.training.gradient_tensor(net.first.weights).data, parameters[0])
    assert net.training.gradient_tensor(mlc.Tensor(shape=(4, 3))) is None
    assert net.training.gradient_tensor(net.t) is None


def test_first_inputs_have_gradients_only_on_request() -> None:
    net = Regression(sgd())
    run_split(net, normal(4, 3), normal(4, 2))
    assert net.training.gradient_tensor(net.x) is None
    assert net.training.gradient_tensor(net.hidden) is not None
    (gradient,) = net.training.source_gradient_tensors(net.first)
    assert gradient.data is None


def test_gradient_tensors_of_an_uncompiled_graph() -> None:
    training = mlc.TrainingGraph()
    x = mlc.Tensor(shape=(2, 3))
    training.node(mlc.ActivationLayer.relu(), source=x)
    assert training.gradient_tensor(x) is None


def test_gradients_around_a_layer() -> None:
    net = Regression(sgd(), options=ALL_GRADIENTS)
    x, t = normal(4, 3), normal(4, 2)
    _, expected = torch_gradients(net, x, t)
    run_split(net, x, t)
    chain = [(net.first, "x", "hidden"), (net.activation, "hidden", "active"), (net.second, "active", "y")]
    for layer, source, result in chain:
        (received,) = net.training.result_gradient_tensors(layer)
        (produced,) = net.training.source_gradient_tensors(layer)
        assert_close(received.data, expected[result])
        assert_close(produced.data, expected[source])
    foreign = dense(1, 1)
    assert net.training.source_gradient_tensors(foreign) == []
    assert net.training.result_gradient_tensors(foreign) == []
    # The loss given to the constructor answers too.
    assert_close(net.training.source_gradient_tensors(net.loss)[0].data, expected["y"])
    assert_close(net.training.result_gradient_tensors(net.loss)[0].data, np.ones(1))


def test_gradients_of_a_smaller_batch() -> None:
    net = Regression(sgd(), options=ALL_GRADIENTS)
    x, t = normal(3, 3), normal(3, 2)
    parameters, expected = torch_gradients(net, x, t)
    run_split(net, x, t, batch_size=3)
    assert_close(net.training.gradient_tensor(net.x).data, expected["x"])
    assert_close(net.training.gradient_data(net.first.weights, net.first), parameters[0])


def test_gradients_as_outputs() -> None:
    """A gradient declared as an output is there after a fused step and can be written to the caller's memory."""
    net = Regression(sgd(), options=ALL_GRADIENTS)
    x, t = normal(4, 3), normal(4, 2)
    _, expected = torch_gradients(net, x, t)
    net.training.add_outputs({"dx": net.training.gradient_tensor(net.x)})
    run_split(net, x, t)
    out, y = np.empty((4, 3), np.float32), np.empty((4, 2), np.float32)
    net.training.execute_gradient(outputs_data={"dx": out, "y": y}).wait()
    assert_close(out, expected["x"])
    np.testing.assert_array_equal(y, net.y.data)
    with pytest.raises(mlc.DataError, match="'dx' is a gradient, which this call does not compute"):
        net.training.execute_forward(outputs_data={"dx": out})
    out.fill(0)
    net.step(x, t, outputs_data={"dx": out}).wait()
    assert_close(out, expected["x"])
    np.testing.assert_array_equal(net.training.gradient_tensor(net.x).data, out)


def test_layers_being_debugged_stay_readable_after_a_fused_step() -> None:
    plain, net = Regression(sgd()), Regression(sgd())
    x, t = normal(4, 3), normal(4, 2)
    net.activation.is_debugging_enabled = True
    net.training.compile(options=DEBUG, device=cpu())
    _, expected = torch_gradients(net, x, t)
    twin = net.torch()
    net.step(x, t).wait()
    plain.step(x, t).wait()
    assert_close(net.active.data, torch.tanh(torch.tensor(x, dtype=torch.float64) @ twin.parameters[0].T
                                             + twin.parameters[1]).detach().numpy())  # fmt: skip
    assert_close(net.training.source_gradient_tensors(net.activation)[0].data, expected["hidden"])
    assert_close(net.training.result_gradient_tensors(net.activation)[0].data, expected["active"])
    with pytest.warns(UserWarning, match="was not kept by the last run"):
        assert plain.active.data is None
    assert_same(values_of(net.training), values_of(plain.training))
    # Without the compile option the flag does nothing.
    net.training.compile(device=cpu())
    net.step(x, t).wait()
    with pytest.warns(UserWarning, match="was not kept by the last run"):
        assert net.active.data is None


def test_disabled_fusion_gives_the_same_numbers() -> None:
    options = mlc.GraphCompilationOptions.DISABLE_LAYER_FUSION
    plain, net = Regression(adam()), Regression(adam(), options=options)
    for step in range(3):
        x, t = normal(4, 3, seed=step), normal(4, 2, seed=step)
        assert plain.step(x, t).result.data == net.step(x, t).result.data
    assert all(step.op.family != "fused" for step in net.training.programs["fused 4"].steps)
    assert_same(values_of(net.training), values_of(plain.training))


# Stopping and freezing ---------------------------------------------------------------------------------------------


def test_stopped_gradients_do_not_pass() -> None:
    net = Regression(sgd(), options=ALL_GRADIENTS)
    net.training.stop_gradient([net.active])
    x, t = normal(4, 3), normal(4, 2)
    parameters, expected = torch_gradients(net, x, t)
    before = values_of(net.training)
    run_split(net, x, t)
    read = net.training.gradient_data
    assert read(net.first.weights, net.first) is None
    assert_close(read(net.second.weights, net.second), parameters[2])
    for stopped in (net.x, net.hidden, net.active):
        assert net.training.gradient_tensor(stopped) is None
    assert_close(net.training.gradient_tensor(net.y).data, expected["y"])
    net.training.execute_optimizer_update()
    after = values_of(net.training)
    assert_same(after[:2], before[:2])
    assert not np.array_equal(after[2], before[2])


def test_stopping_one_path_leaves_the_others() -> None:
    """h feeds two branches; only one of them passes through the stopped tensor."""
    x, t = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 5))
    training = mlc.TrainingGraph([], mlc.LossLayer.mean_squared_error(SUM), sgd())
    layer = dense(3, 5)
    h = training.node(layer, source=x)
    # An identity: a tensor of its own, though it has the same value.
    copied = training.node(mlc.ActivationLayer(mlc.ActivationDescriptor(mlc.ActivationType.NONE)), source=h)
    squared = training.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.MULTIPLY), sources=[h, copied])
    training.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.ADD), sources=[squared, copied])
    training.stop_gradient([copied])
    training.add_inputs({"x": x}, {"t": t})
    device = cpu()
    training.compile(device=device)
    data, labels = normal(4, 3), normal(4, 5)
    training.bind_and_write_data({"x": data, "t": labels}, for_inputs={"x": x, "t": t}, to=device)
    training.execute_forward()
    training.execute_gradient()
    w, b = (torch.tensor(p.data.astype(np.float64), requires_grad=True) for p in parameters_of(training))
    z = torch.tensor(data, dtype=torch.float64) @ w.T + b
    ((z * z.detach() + z.detach() - torch.tensor(labels)) ** 2).sum().backward()
    assert_close(training.gradient_data(layer.weights, layer), w.grad.numpy(), scale=5.0)


def test_a_stopped_tensor_with_several_consumers() -> None:
    x, t = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 2))
    training = mlc.TrainingGraph([], mlc.LossLayer.mean_squared_error(SUM), sgd())
    trunk, left, right = dense(3, 5, seed=1), dense(5, 2, seed=2), dense(5, 2, seed=3)
    h = training.node(trunk, source=x)
    a, b = training.node(left, source=h), training.node(right, source=h)
    training.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.ADD), sources=[a, b])
    training.stop_gradient([h])
    training.add_inputs({"x": x}, {"t": t})
    training.compile(device=cpu())
    before = values_of(training)
    training.execute({"x": normal(4, 3)}, {"t": normal(4, 2)}).wait()
    after = values_of(training)
    assert_same(after[:2], before[:2])
    assert all(not np.array_equal(new, old) for new, old in zip(after[2:], before[2:], strict=True))
    dot = training.summarized_dot_description
    assert dot.count("style=dashed") == 2


def test_stopped_inputs_and_parameters() -> None:
    net = Regression(sgd(), options=ALL_GRADIENTS)
    net.training.stop_gradient([net.x, net.first.weights])
    before = values_of(net.training)
    run_split(net, normal(4, 3), normal(4, 2))
    assert net.training.gradient_tensor(net.x) is None
    net.training.execute_optimizer_update()
    after = values_of(net.training)
    assert_same(after[:1], before[:1])
    assert not np.array_equal(after[1], before[1])
    with pytest.raises(TypeError, match="needs Tensors"):
        net.training.stop_gradient(["x"])  # type: ignore[list-item]


def test_a_frozen_layer_lets_gradients_through() -> None:
    x, t = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 2))
    training = mlc.TrainingGraph([], mlc.LossLayer.mean_squared_error(MEAN), sgd())
    first, frozen = dense(3, 5, seed=1), dense(5, 2, seed=2)
    y = training.node(frozen, sources=[training.node(first, source=x)], disable_update=True)
    training.add_inputs({"x": x}, {"t": t})
    device = cpu()
    training.compile(device=device)
    data, labels = normal(4, 3), normal(4, 2)
    p = [torch.tensor(each.data.astype(np.float64), requires_grad=True) for each in parameters_of(training)]
    z = (torch.tensor(data, dtype=torch.float64) @ p[0].T + p[1]) @ p[2].T + p[3]
    ((z - torch.tensor(labels)) ** 2).mean().backward()
    training.bind_and_write_data({"x": data, "t": labels}, for_inputs={"x": x, "t": t}, to=device)
    training.execute_forward()
    training.execute_gradient()
    assert training.gradient_data(frozen.weights, frozen) is None
    assert_close(training.gradient_data(first.weights, first), p[0].grad.numpy())
    training.execute_optimizer_update()
    assert_close(first.weights.data, (p[0] - 0.1 * p[0].grad).detach().numpy())
    np.testing.assert_array_equal(frozen.weights.data, p[2].detach().numpy().astype(np.float32))
    assert frozen.weights.optimizer_data == []
    assert y.data.shape == (4, 2)


def test_a_parameter_can_be_frozen_and_thawed_between_steps() -> None:
    net = Regression(sgd(0.1, momentum_scale=0.9))
    x, t = normal(4, 3), normal(4, 2)
    net.first.weights_parameter.is_updatable = False
    before = values_of(net.training)
    net.step(x, t).wait()
    assert np.array_equal(net.first.weights.data, before[0])
    assert not np.array_equal(net.first.biases.data, before[1])
    momentum = np.frombuffer(net.first.biases.optimizer_data[0].bytes, np.float32).copy()
    net.first.weights_parameter.is_updatable = True
    # State and numbers go on where they were.
    twin = net.torch()
    loss = twin.loss(x, t)
    loss.backward()
    expected = [p.detach().numpy() - 0.1 * p.grad.numpy() for p in twin.parameters]
    net.step(x, t).wait()
    assert_close(net.first.weights.data, expected[0])
    assert_close(net.first.biases.data, expected[1] - 0.9 * momentum, scale=2.0)


# Inputs as parameters ----------------------------------------------------------------------------------------------


def test_trained_input_tensors() -> None:
    x, t = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 3))
    start = normal(1, 3, seed=5)
    offset = tensor(start)
    training = mlc.TrainingGraph([], mlc.LossLayer.mean_squared_error(MEAN), sgd(0.5))
    training.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.ADD), sources=[x, offset])
    training.add_inputs({"x": x, "offset": offset}, {"t": t})
    parameter = mlc.TensorParameter(offset)
    training.set_training_tensor_parameters([parameter])
    training.compile(device=cpu())
    data, labels = normal(4, 3), normal(4, 3, seed=1)

    def step_from(value: Array) -> Array:
        return value - 0.5 * 2 / 12 * (data + value - labels).sum(0, keepdims=True)

    expected = start
    for _ in range(3):
        training.execute({"x": data}, {"t": labels}).wait()
        expected = step_from(expected)
        assert_close(offset.data, expected)
    # Data fed under its name replaces the values, once.
    fed = normal(1, 3, seed=6)
    training.execute({"x": data, "offset": fed}, {"t": labels}).wait()
    assert_close(offset.data, step_from(fed))
    training.execute({"x": data}, {"t": labels}).wait()
    assert_close(offset.data, step_from(step_from(fed)))
    parameter.is_updatable = False
    before = offset.data.copy()
    training.execute({"x": data}, {"t": labels}).wait()
    np.testing.assert_array_equal(offset.data, before)


def test_attached_data_replaces_a_trained_input_too() -> None:
    x, t = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 3))
    offset = tensor(normal(1, 3, seed=5))
    training = mlc.TrainingGraph([], mlc.LossLayer.mean_squared_error(SUM), sgd(0.1))
    training.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.ADD), sources=[x, offset])
    training.add_inputs({"x": x, "offset": offset}, {"t": t})
    training.set_training_tensor_parameters([mlc.TensorParameter(offset)])
    device = cpu()
    training.compile(device=device)
    data, labels, new = normal(4, 3), normal(4, 3, seed=1), normal(1, 3, seed=6)
    before = new.copy()
    tensors = {"x": x, "t": t, "offset": offset}
    training.bind_and_write_data({"x": data, "t": labels, "offset": new}, for_inputs=tensors, to=device)
    training.execute_forward()
    training.execute_gradient()
    gradient = 2 * (data + before - labels).sum(0, keepdims=True)
    assert_close(training.gradient_tensor(offset).data, gradient, scale=2.0)
    training.execute_optimizer_update()
    assert_close(offset.data, before - 0.1 * gradient, scale=2.0)


def test_a_failed_run_leaves_trained_inputs_alone() -> None:
    indices, t = mlc.Tensor(shape=(2,), data_type=mlc.DataType.INT32), mlc.Tensor(shape=(2, 3))
    offset = tensor(normal(1, 3, seed=5))
    training = mlc.TrainingGraph([], mlc.LossLayer.mean_squared_error(MEAN), sgd())
    table = mlc.EmbeddingLayer(mlc.EmbeddingDescriptor(4, 3), tensor(normal(4, 3)))
    found = training.node(table, source=indices)
    training.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.ADD), sources=[found, offset])
    training.add_inputs({"i": indices, "offset": offset}, {"t": t})
    training.set_training_tensor_parameters([mlc.TensorParameter(offset)])
    training.compile(device=cpu())
    before = offset.data.copy()
    with pytest.raises(mlc.ExecutionError):
        training.execute(
            {"i": np.int32([0, 9]), "offset": np.ones((1, 3))}, {"t": np.zeros((2, 3))}, options=SYNC
        )
    np.testing.assert_array_equal(offset.data, before)


def test_what_cannot_be_a_training_parameter() -> None:
    training = mlc.TrainingGraph()
    with pytest.raises(mlc.DataError, match="has no data"):
        training.set_training_tensor_parameters([mlc.TensorParameter(mlc.Tensor(shape=(2,)))])
    with pytest.raises(TypeError, match="needs TensorParameters"):
        training.set_training_tensor_parameters([mlc.Tensor(shape=(2,))])  # type: ignore[list-item]


# Gradients from outside --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after_compile", [False, True])
def test_user_gradients_alone(after_compile: bool) -> None:
    """No loss: the caller's own code has computed dL/dy."""
    x = mlc.Tensor(shape=(4, 3))
    training = mlc.TrainingGraph([], None, sgd())
    layer = dense(3, 2)
    y = training.node(layer, source=x)
    training.add_inputs({"x": x})
    device = cpu()
    if after_compile:
        training.compile(device=device)
    gradient = training.allocate_user_gradient(y)
    assert gradient is training.allocate_user_gradient(y)
    assert gradient.descriptor == y.descriptor
    if not after_compile:
        training.compile(device=device)
    data, dy = normal(4, 3), normal(4, 2, seed=1)
    before = layer.weights.data.copy()
    training.bind_and_write_data({"x": data}, for_inputs={"x": x}, to=device)
    training.execute_forward()
    with pytest.raises(mlc.DataError, match=f"'user gradient of {y.label}' was not given"):
        training.execute_gradient()
    training.bind_and_write_data({"dy": dy}, for_inputs={"dy": gradient}, to=device)
    training.execute_gradient()
    assert_close(training.gradient_data(layer.weights, layer), dy.T @ data)
    assert_close(training.gradient_data(layer.biases, layer), dy.sum(0))
    training.execute_optimizer_update()
    assert_close(layer.weights.data, before - 0.1 * dy.T @ data)


def test_a_user_gradient_inside_needs_none_at_the_end() -> None:
    x = mlc.Tensor(shape=(4, 3))
    training = mlc.TrainingGraph([], None, sgd())
    layer = dense(3, 2)
    y = training.node(layer, source=x)
    training.node(mlc.ReductionLayer(mlc.ReductionType.ARG_MAX, 1), source=y)
    training.add_inputs({"x": x})
    gradient = training.allocate_user_gradient(y)
    device = cpu()
    training.compile(device=device)
    data, dy = normal(4, 3), normal(4, 2, seed=1)
    training.bind_and_write_data({"x": data, "dy": dy}, for_inputs={"x": x, "dy": gradient}, to=device)
    before = layer.weights.data.copy()
    training.execute_forward()
    training.execute_gradient()
    assert_close(training.gradient_data(layer.weights, layer), dy.T @ data)
    training.execute_optimizer_update()
    training.execute({"x": data}).wait()
    assert_close(layer.weights.data, before - 0.2 * dy.T @ data)


def test_user_gradients_add_to_those_of_layers() -> None:
    net = Regression(sgd(), options=ALL_GRADIENTS)
    gradient = net.training.allocate_user_gradient(net.active)
    x, t, extra = normal(4, 3), normal(4, 2), normal(4, 5, seed=3)
    twin = net.torch()
    w1, b1, w2, b2 = twin.parameters
    active = torch.tanh(torch.tensor(x, dtype=torch.float64) @ w1.T + b1)
    objective = ((active @ w2.T + b2 - torch.tensor(t)) ** 2).mean() + (active * torch.tensor(extra)).sum()
    expected = torch.autograd.grad(objective, [w1, w2, active])
    net.training.bind_and_write_data({"g": extra}, for_inputs={"g": gradient}, to=net.device)
    run_split(net, x, t)
    assert_close(net.training.gradient_data(net.first.weights, net.first), expected[0].numpy())
    assert_close(net.training.gradient_data(net.second.weights, net.second), expected[1].numpy())
    assert_close(net.training.gradient_tensor(net.active).data, expected[2].numpy())
    before = net.first.weights.data.copy()
    net.step(x, t).wait()
    assert_close(net.first.weights.data, before - 0.1 * expected[0].numpy(), what="the fused step takes it too")


def test_the_gradient_of_the_last_result_can_be_fed() -> None:
    """Without a loss and without allocate_user_gradient: the documented 'initial gradient tensor'."""
    x = mlc.Tensor(shape=(4, 3))
    training = mlc.TrainingGraph()
    layer = dense(3, 2)
    training.node(layer, source=x)
    training.add_inputs({"x": x})
    device = cpu()
    training.compile(device=device)
    (initial,) = training.result_gradient_tensors(layer)
    data, dy = normal(4, 3), normal(4, 2, seed=1)
    tensors = {"x": x, "dy": initial}
    training.bind_and_write_data({"x": data, "dy": dy}, for_inputs=tensors, to=device)
    training.execute_forward()
    training.execute_gradient()
    assert_close(training.gradient_data(layer.weights, layer), dy.T @ data)
    np.testing.assert_array_equal(initial.data, dy)


def test_user_gradients_of_foreign_tensors_are_refused() -> None:
    net = Regression(sgd())
    for foreign in (net.x, mlc.Tensor(shape=(4, 5)), net.first.weights):
        with pytest.raises(mlc.GraphError, match="is no result of this graph"):
            net.training.allocate_user_gradient(foreign)


def test_what_the_caller_writes_between_the_passes_changes_no_gradient() -> None:
    graph = mlc.TrainingGraph()
    x = graph.input((2, 3), "x")
    y = graph.activation(x, "silu")
    graph.add_inputs({"x": x})
    fed, device = graph.allocate_user_gradient(y), mlc.Device.cpu()
    graph.compile(options=ALL_GRADIENTS, device=device)
    data, dy = normal(2, 3), normal(2, 3)
    sigmoid = 1 / (1 + np.exp(-data))
    expected = dy * sigmoid * (1 + data * (1 - sigmoid))
    graph.bind_and_write_data({"x": data, "dy": dy}, for_inputs={"x": x, "dy": fed}, to=device)
    for options in (mlc.ExecutionOptions.SYNCHRONOUS, mlc.ExecutionOptions.NONE):
        before = data.copy()
        graph.execute_forward(options=options)
        data[:] = 7
        graph.execute_gradient(options=options).wait()
        assert_close(graph.gradient_tensor(x).data, expected)
        data[:] = before
