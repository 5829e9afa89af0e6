"""Training in one call: the fused step against PyTorch, what it answers, and what may stand in a training graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import mlcompute as mlc
from tests.harness import assert_close
from tests.nets import (
    INFERENCE,
    MEAN,
    NONE,
    SUM,
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


def torch_rmsprop(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=0.01, alpha=0.9, eps=1e-8, momentum=0.5, centered=True)


OPTIMIZERS: list[tuple[Any, Any]] = [
    (lambda: sgd(0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    (lambda: sgd(0.1, momentum_scale=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    (
        lambda: sgd(0.1, momentum_scale=0.9, uses_nesterov_momentum=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    ),
    (lambda: adam(0.01, epsilon=0.0), lambda p: torch.optim.Adam(p, lr=0.01, eps=0.0)),
    (
        lambda: mlc.RMSPropOptimizer(
            mlc.OptimizerDescriptor(learning_rate=0.01), momentum_scale=0.5, alpha=0.9, is_centered=True
        ),
        torch_rmsprop,
    ),
]


@pytest.mark.parametrize(("make", "oracle"), OPTIMIZERS, ids=["sgd", "momentum", "nesterov", "adam", "rmsprop"])
def test_ten_fused_steps_are_pytorchs(make: Any, oracle: Any) -> None:
    net = Regression(make())
    twin = net.torch()
    optimizer = oracle(twin.parameters)
    for step in range(10):
        x, t = normal(4, 3, seed=step), normal(4, 2, seed=100 + step)
        loss = net.step(x, t).result.data
        optimizer.zero_grad()
        expected = twin.loss(x, t)
        expected.backward()
        optimizer.step()
        assert_close(loss, np.asarray(expected.item()).reshape(1), scale=10.0, what=f"loss of step {step}")
    for parameter, expected in zip(net.parameters, twin.parameters, strict=True):
        # Ten steps of an optimizer that divides by small roots amplify rounding.
        assert_close(parameter.data, expected.detach().numpy(), scale=50.0)


def test_a_step_answers_the_loss_and_runs_in_any_spelling() -> None:
    net = Regression(sgd())
    x, t = normal(4, 3), normal(4, 2)
    expected = net.torch().loss(x, t).item()
    run = net.step(x, t)
    assert run
    assert isinstance(run, mlc.Execution)
    assert run.wait() is run
    assert run.result.descriptor.shape == (1,)
    assert run.result.of is net.training.result_tensors(net.loss)[0]
    assert_close(run.result.data, np.float32([expected]))
    assert repr(run) == "Execution(done)"


def test_the_loss_falls() -> None:
    net = Regression(adam(0.05))
    x, t = normal(4, 3), normal(4, 2)
    losses = [float(net.step(x, t).result.data[0]) for _ in range(60)]
    assert losses[-1] < 0.01 * losses[0]


@pytest.mark.filterwarnings("ignore:.*their sum is minimised")
@pytest.mark.parametrize("reduction", [NONE, SUM, MEAN])
def test_every_reduction_of_the_loss(reduction: mlc.ReductionType) -> None:
    net = Regression(sgd(0.01), reduction=reduction)
    twin = net.torch()
    x, t = normal(4, 3), normal(4, 2)
    squares = (twin.forward(torch.tensor(x, dtype=torch.float64)) - torch.tensor(t)) ** 2
    expected = {NONE: squares, SUM: squares.sum().reshape(1), MEAN: squares.mean().reshape(1)}[reduction]
    expected.sum().backward()
    before = [parameter.data.copy() for parameter in net.parameters]
    assert_close(net.step(x, t).result.data, expected.detach().numpy())
    for parameter, old, other in zip(net.parameters, before, twin.parameters, strict=True):
        assert_close(parameter.data, old - 0.01 * other.grad.numpy())


def test_without_optimizer_nothing_is_updated() -> None:
    net = Regression(None)
    before = values_of(net.training)
    net.step(normal(4, 3), normal(4, 2)).wait()
    assert_same(values_of(net.training), before)
    assert net.training.optimizer is None
    with pytest.raises(mlc.ExecutionError, match="no optimizer"):
        net.training.execute_optimizer_update()


def test_without_loss_and_optimizer_the_forward_pass_runs() -> None:
    net = mlc.TrainingGraph()
    x = mlc.Tensor(shape=(2, 3))
    y = net.node(mlc.ActivationLayer.relu(), source=x)
    net.add_inputs({"x": x})
    net.add_outputs({"y": y})
    net.compile(device=cpu())
    out = np.empty((2, 3), np.float32)
    data = normal(2, 3)
    assert net.execute({"x": data}, outputs_data={"y": out}).result.of is y
    np.testing.assert_array_equal(out, np.maximum(data, 0))


def test_an_optimizer_without_anything_to_minimise_is_refused() -> None:
    net = mlc.TrainingGraph([], None, sgd())
    x = mlc.Tensor(shape=(2, 3))
    net.node(dense(3, 1), source=x)
    net.add_inputs({"x": x})
    net.compile(device=cpu())
    with pytest.raises(mlc.ExecutionError, match="nothing to minimise"):
        net.execute({"x": normal(2, 3)})


def test_compile_before_add_inputs() -> None:
    x, t = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 2))
    graph = mlc.Graph()
    layer = dense(3, 2)
    graph.node(layer, source=x)
    training = mlc.TrainingGraph([graph], mlc.LossLayer.mean_squared_error(MEAN), sgd())
    assert training.compile(device=cpu())
    with pytest.raises(mlc.ExecutionError, match="no labels"):
        training.execute_forward()
    assert training.add_inputs({"x": x}, {"t": t})
    data, labels = normal(4, 3), normal(4, 2)
    w, b = (parameter.data.astype(np.float64) for parameter in parameters_of(training))
    loss = training.execute({"x": data}, {"t": labels}).result.data
    assert_close(loss, np.float32([np.mean((data @ w.T + b - labels) ** 2)]))


def test_layers_added_directly_and_wrapped_ones_together() -> None:
    net = Regression(sgd())
    training = mlc.TrainingGraph([net.graph])
    y = training.node(mlc.ActivationLayer.relu(), source=net.y)
    training.add_inputs({"x": net.x})
    training.compile(device=cpu())
    assert training.layers == [net.first, net.activation, net.second, training.layers[-1]]
    data = normal(4, 3)
    result = training.execute({"x": data}).result
    assert result.of is y
    expected = net.torch().forward(torch.tensor(data, dtype=torch.float64)).clamp(min=0)
    assert_close(result.data, expected.detach().numpy())


def test_layers_added_to_a_graph_after_compiling_take_part() -> None:
    net = Regression(None)
    inference = mlc.InferenceGraph([net.graph])
    inference.compile(device=cpu())
    late = net.graph.node(mlc.ActivationLayer.relu(), source=net.y)
    inference.add_inputs({"x": net.x})
    assert inference.execute({"x": normal(4, 3)}).result.of is late


def test_a_loss_that_layers_for_predictions_have_moved_warns() -> None:
    net = Regression(sgd())
    data, labels = normal(4, 3), normal(4, 2)
    before = net.step(data, labels, options=INFERENCE).result.data
    inference = mlc.InferenceGraph([net.graph])
    inference.node(mlc.ActivationLayer.sigmoid(), source=net.y)
    assert net.step(data, labels, options=INFERENCE).result.data == before
    net.graph.node(mlc.ActivationLayer.sigmoid(), source=net.y)
    with pytest.warns(UserWarning, match=r"'Loss' is computed from .* 'Activation', and no longer from"):
        after = net.step(data, labels, options=INFERENCE).result.data
    assert after != before
    net.graph.node(mlc.ActivationLayer.tanh(), source=net.graph.result_tensors(net.graph.layers[-1])[0])
    net.training.compile(device=cpu())  # whoever compiles again means it
    net.step(data, labels)


def test_one_tensor_in_many_weight_slots() -> None:
    weights = tensor(normal(3, 3) * np.float32(0.5))
    x, t = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 3))
    training = mlc.TrainingGraph([], mlc.LossLayer.mean_squared_error(SUM), sgd(0.05, momentum_scale=0.9))
    y = x
    for _ in range(3):
        y = training.node(shared_dense(weights, 3, 3), source=y)
    training.add_inputs({"x": x}, {"t": t})
    training.compile(device=cpu())
    w = torch.tensor(weights.data.astype(np.float64), requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.05, momentum=0.9)
    for step in range(3):
        data, labels = normal(4, 3, seed=step), normal(4, 3, seed=50 + step)
        training.execute({"x": data}, {"t": labels}).wait()
        z = torch.tensor(data, dtype=torch.float64)
        for _ in range(3):
            z = z @ w.T
        optimizer.zero_grad()
        ((z - torch.tensor(labels)) ** 2).sum().backward()
        optimizer.step()
    assert_close(weights.data, w.detach().numpy(), scale=10.0)
    assert len(weights.optimizer_data) == 1


def test_several_losses_as_nodes_add_up() -> None:
    """Two heads with a loss each, the second weighted; both losses can be read."""
    x, t1, t2 = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 2)), mlc.Tensor(shape=(4, 1))
    training = mlc.TrainingGraph([], None, sgd(0.1))
    trunk, head1, head2 = dense(3, 5, seed=1), dense(5, 2, seed=2), dense(5, 1, seed=3)
    h = training.node(trunk, source=x)
    y1, y2 = training.node(head1, source=h), training.node(head2, source=h)
    first = training.node(mlc.LossLayer.mean_squared_error(MEAN), sources=[y1], loss_labels=[t1])
    second = training.node(mlc.LossLayer.mean_absolute_error(SUM, weight=0.5), sources=[y2], loss_labels=[t2])
    training.add_inputs({"x": x}, {"t1": t1, "t2": t2})
    training.compile(device=cpu())
    data, a, b = normal(4, 3), normal(4, 2, seed=1), normal(4, 1, seed=2)
    p = [torch.tensor(each.data.astype(np.float64), requires_grad=True) for each in parameters_of(training)]
    z = torch.tensor(data, dtype=torch.float64) @ p[0].T + p[1]
    loss1 = ((z @ p[2].T + p[3] - torch.tensor(a)) ** 2).mean()
    loss2 = 0.5 * (z @ p[4].T + p[5] - torch.tensor(b)).abs().sum()
    (loss1 + loss2).backward()
    run = training.execute({"x": data}, {"t1": a, "t2": b})
    assert_close(run.result.data, np.float32([(loss1 + loss2).item()]), what="what was minimised")
    assert training.losses == {"loss": first, "loss_1": second}
    assert_close(first.data, np.float32([loss1.item()]))
    assert_close(second.data, np.float32([loss2.item()]))
    for parameter, expected in zip(parameters_of(training), p, strict=True):
        assert_close(parameter.data, (expected - 0.1 * expected.grad).detach().numpy())


def weighted_regression(weights: mlc.Tensor | None) -> tuple[mlc.TrainingGraph, mlc.Tensor, mlc.Tensor]:
    x, t = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 2))
    loss = mlc.LossLayer.mean_squared_error(MEAN, weights=weights)
    training = mlc.TrainingGraph([], loss, sgd(0.1))
    training.node(dense(3, 2), source=x)
    return training, x, t


def expected_weighted(training: mlc.TrainingGraph, data: Array, labels: Array, weights: Array) -> tuple[float, Array]:
    w, b = (torch.tensor(p.data.astype(np.float64), requires_grad=True) for p in parameters_of(training))
    terms = (torch.tensor(data, dtype=torch.float64) @ w.T + b - torch.tensor(labels)) ** 2
    loss = (terms * torch.tensor(weights)).mean()
    loss.backward()
    return loss.item(), (w - 0.1 * w.grad).detach().numpy()


def test_label_weights_of_a_declared_tensor() -> None:
    training, x, t = weighted_regression(None)
    training.add_inputs({"x": x}, {"t": t}, {"w": mlc.Tensor(shape=(4, 2))})
    training.compile(device=cpu())
    data, labels, weights = normal(4, 3), normal(4, 2, seed=1), np.abs(normal(4, 2, seed=2))
    loss, after = expected_weighted(training, data, labels, weights)
    assert_close(training.execute({"x": data}, {"t": labels}, {"w": weights}).result.data, np.float32([loss]))
    assert_close(parameters_of(training)[0].data, after)
    with pytest.raises(mlc.DataError, match="'w' was not given"):
        training.execute({"x": data}, {"t": labels})


@pytest.mark.parametrize("fed", [False, True])
def test_label_weights_of_the_layers_own_tensor(fed: bool) -> None:
    own, other = np.abs(normal(4, 2, seed=3)), np.abs(normal(4, 2, seed=4))
    tensor_of_weights = tensor(own)
    training, x, t = weighted_regression(tensor_of_weights)
    training.add_inputs({"x": x}, {"t": t}, {"w": tensor_of_weights} if fed else None)
    training.compile(device=cpu())
    data, labels = normal(4, 3), normal(4, 2, seed=1)
    for weights in (other, own) if fed else (own,):
        loss, after = expected_weighted(training, data, labels, weights)
        given = {"w": weights} if fed else None
        assert_close(training.execute({"x": data}, {"t": labels}, given).result.data, np.float32([loss]))
        assert_close(parameters_of(training)[0].data, after)


def test_declared_weights_left_out_are_the_layers_own() -> None:
    own = np.abs(normal(4, 2, seed=3))
    tensor_of_weights = tensor(own)
    training, x, t = weighted_regression(tensor_of_weights)
    training.add_inputs({"x": x}, {"t": t}, {"w": tensor_of_weights})
    training.compile(device=cpu())
    data, labels = normal(4, 3), normal(4, 2, seed=1)
    loss, _ = expected_weighted(training, data, labels, own)
    assert_close(training.execute({"x": data}, {"t": labels}).result.data, np.float32([loss]))


def test_label_weights_without_a_loss_to_weigh_are_refused() -> None:
    training, x, t = weighted_regression(mlc.Tensor(shape=(4, 2), fill_with_data=1.0))
    training.add_inputs({"x": x}, {"t": t}, {"w": mlc.Tensor(shape=(4, 2))})
    with pytest.raises(mlc.GraphError, match="1 label weights were declared for 0 losses"):
        training.compile(device=cpu())


def test_names_must_be_declared() -> None:
    net = Regression(sgd())
    with pytest.raises(mlc.DataError, match="'z' is not a declared name in inputs_data"):
        net.training.execute({"z": normal(4, 3)}, {"t": normal(4, 2)})
    with pytest.raises(mlc.DataError, match="'z' is not a declared name in loss_labels_data"):
        net.training.execute({"x": normal(4, 3)}, {"z": normal(4, 2)})
    with pytest.raises(mlc.DataError, match="'t' was not given"):
        net.training.execute({"x": normal(4, 3)})
    with pytest.raises(mlc.DataError, match="elements were given"):
        net.training.execute({"x": np.zeros(5, np.float32)}, {"t": normal(4, 2)})
    with pytest.raises(TypeError, match="needs names and Tensors"):
        net.training.add_inputs({"x": normal(4, 3)})  # type: ignore[dict-item]
    with pytest.raises(mlc.GraphError, match="computed by no layer"):
        net.training.add_outputs({"z": mlc.Tensor(shape=(1,))})
        net.step(normal(4, 3), normal(4, 2))


def test_running_before_compiling_is_refused() -> None:
    training = mlc.TrainingGraph()
    with pytest.raises(mlc.CompileError, match="no layers"):
        training.compile(device=cpu())
    training.node(mlc.ActivationLayer.relu(), source=mlc.Tensor(shape=(1,)))
    with pytest.raises(mlc.ExecutionError, match="not compiled"):
        training.execute({})
    with pytest.raises(TypeError, match="must be a Device"):
        training.compile(device="cpu")  # type: ignore[arg-type]
    assert training.device is None
    assert training.device_memory_size == 0


def test_constant_inputs_are_given_once() -> None:
    """Folded at compile time, never fed again; other data for them is refused."""
    x, c = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(1, 3))
    training = mlc.TrainingGraph()
    scaled = training.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.EXP), source=c)
    y = training.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.MULTIPLY), sources=[x, scaled])
    training.add_inputs({"x": x, "c": c})
    constant, data = normal(1, 3, seed=1), normal(4, 3)
    training.compile(device=cpu(), input_tensors={"c": c}, input_tensors_data={"c": constant})
    assert not any(step.op.name == "exp" for step in training.programs["fused 4"].steps)
    constant_before = constant.copy()
    constant += 1  # compile has taken a copy
    assert_close(training.execute({"x": data}).result.data, data * np.exp(constant_before))
    assert training.execute({"x": data, "c": constant_before}).result.of is y
    with pytest.raises(mlc.DataError, match="compiled as a constant"):
        training.execute({"x": data, "c": constant})
    # Compiled again without constants, it is an ordinary input.
    training.compile(device=cpu())
    assert_close(training.execute({"x": data, "c": constant}).result.data, data * np.exp(constant))


def test_constants_given_in_part_are_ordinary_inputs() -> None:
    x, c = mlc.Tensor(shape=(2, 3)), mlc.Tensor(shape=(2, 3))
    training = mlc.TrainingGraph()
    training.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.ADD), sources=[x, c])
    training.add_inputs({"x": x, "c": c})
    data = normal(2, 3)
    training.compile(device=cpu(), input_tensors={"c": c}, input_tensors_data={"other": data})
    assert_close(training.execute({"x": data, "c": data}).result.data, 2 * data)


def test_softmax_before_softmax_cross_entropy_warns() -> None:
    x, t = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 3))
    softmax = mlc.SoftmaxLayer(mlc.SoftmaxOperation.SOFTMAX)
    softmax.label = "probabilities"
    loss = mlc.LossLayer.softmax_cross_entropy(MEAN)
    loss.label = "objective"
    training = mlc.TrainingGraph([], loss)
    training.node(softmax, source=x)
    training.add_inputs({"x": x}, {"t": t})
    with pytest.warns(UserWarning, match="Softmax 'probabilities' feeds Loss 'objective'"):
        training.compile(device=cpu())


def test_failed_compile_leaves_what_was_compiled() -> None:
    net = Regression(sgd())
    device, size = net.training.device, net.training.device_memory_size
    net.step(normal(4, 3), normal(4, 2)).wait()
    loss = net.training.result_tensors(net.loss)[0].data
    with pytest.raises(mlc.DataError):
        net.training.compile(
            device=cpu(), input_tensors={"x": net.x}, input_tensors_data={"x": np.zeros(1, np.float32)}
        )
    other = mlc.Tensor(shape=(4, 2))
    empty = mlc.BatchNormalizationLayer(2, mlc.Tensor(shape=(2,)), mlc.Tensor(shape=(2,)))
    net.training.node(empty, source=other)
    with pytest.raises(mlc.CompileError, match="mean has no data"):
        net.training.compile(device=cpu())
    assert net.training.device is device
    assert size > 0
    np.testing.assert_array_equal(net.training.result_tensors(net.loss)[0].data, loss)


def bad_index_after_batch_norm() -> tuple[mlc.TrainingGraph, dict[str, Array], dict[str, Array], mlc.Optimizer]:
    """A batch norm, then a lookup: an index out of range is found after the statistics were computed."""
    x, t = mlc.Tensor(shape=(4, 2)), mlc.Tensor(shape=(4, 2))
    indices = mlc.Tensor(shape=(4,), data_type=mlc.DataType.INT32)
    optimizer = adam(0.1)
    training = mlc.TrainingGraph([], mlc.LossLayer.mean_squared_error(MEAN), optimizer)
    normed = training.node(mlc.DropoutLayer(0.5, 0), source=training.node(batch_norm(2), source=x))
    table = mlc.EmbeddingLayer(mlc.EmbeddingDescriptor(3, 2), tensor(normal(3, 2)))
    found = training.node(table, source=indices)
    training.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.ADD), sources=[normed, found])
    training.add_inputs({"x": x, "i": indices}, {"t": t})
    training.compile(device=cpu())
    return training, {"x": normal(4, 2), "i": np.int32([0, 1, 2, 0])}, {"t": normal(4, 2, seed=1)}, optimizer


@pytest.mark.parametrize("options", [SYNC, mlc.ExecutionOptions.NONE])
def test_a_failed_run_changes_nothing(options: mlc.ExecutionOptions) -> None:
    """Weights, statistics, time step, state and random masks: the next step is as if it had never been."""
    results = []
    for fails in (False, True):
        mlc.Platform.set_rng_seed_to(3)
        training, inputs, labels, optimizer = bad_index_after_batch_norm()
        training.execute(inputs, labels).wait()
        if fails:
            before, step = values_of(training), optimizer.time_step
            with pytest.raises(mlc.ExecutionError, match="index 7 at position"):
                training.execute({**inputs, "i": np.int32([0, 7, 1, 1])}, labels, options=options).wait()
            assert_same(values_of(training), before)
            assert optimizer.time_step == step == 2
        loss = training.execute(inputs, labels).result.data
        assert optimizer.time_step == 3
        results.append([loss, *values_of(training)])
    assert_same(results[0], results[1])


def test_a_refused_call_changes_nothing() -> None:
    results = []
    for refused in (False, True):
        mlc.Platform.set_rng_seed_to(3)
        training, inputs, labels, optimizer = bad_index_after_batch_norm()
        if refused:
            training.add_outputs({"y": training.result_tensors(training.layers[-1])[0]})
            for wrong in (
                {"outputs_data": {"y": np.empty(3, np.float32)}},
                {"outputs_data": {"nothing": np.empty(3, np.float32)}},
                {"batch_size": 5},
                {"batch_size": -1},
            ):
                with pytest.raises(ValueError, match="execute"):
                    training.execute(inputs, labels, **wrong)
            assert optimizer.time_step == 1
        training.execute(inputs, labels).wait()
        assert optimizer.time_step == 2
        results.append(values_of(training))
    assert_same(results[0], results[1])


def test_evaluation_in_between_does_not_disturb_training() -> None:
    results = []
    for evaluates in (False, True):
        mlc.Platform.set_rng_seed_to(3)
        training, inputs, labels, _ = bad_index_after_batch_norm()
        for _ in range(3):
            training.execute(inputs, labels).wait()
            if evaluates:
                training.execute(inputs, labels, options=INFERENCE).wait()
                training.execute(inputs, options=INFERENCE, batch_size=2).wait()
        results.append(values_of(training))
    assert_same(results[0], results[1])
