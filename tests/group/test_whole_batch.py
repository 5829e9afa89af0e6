"""What depends on the whole batch, though slices of it run apart: batch norm across the group, means over labels."""

import numpy as np
import pytest

import mlcompute as mlc
from tests.group.threads import BATCH, T, X, building, network, optimizer, parameters, run_group, same, train

RNG = np.random.default_rng(11)
LABELS = RNG.integers(-1, 3, (4, BATCH))  # -1: no label; how many there are differs from slice to slice
LABELS[1, :9] = -1  # and slices may have none at all
LABELS[3] = -1  # or the whole batch


def assert_near(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4)
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(one, other, atol=5e-4)


def test_batch_norm_across_the_group_is_that_of_a_graph_without_a_group():
    """Outputs, gradients (by way of what momentum learns) and running statistics, with a short last batch."""
    alone = train(None, "sgd", normalizes=True, across=True)
    assert same(alone, train(None, "sgd", normalizes=True))  # by itself it changes nothing
    for slices, size in ((8, 3), (24, 2)):
        assert_near(
            run_group(size, lambda group: train(group, "sgd", normalizes=True, across=True), slices=slices)[0], alone
        )
    sliced = run_group(1, lambda group: train(group, "sgd", normalizes=True))[0]
    assert abs(np.array(sliced[0]) - alone[0]).max() > 1e-3  # without it, each slice is normalized by itself


def test_statistics_for_inference_are_those_of_the_whole_batch():
    def work(group):
        training = network("sgd", normalizes=True, across=True)
        training.compile(device=mlc.Device.cpu(), group=group)
        for step in range(3):
            training.execute({"x": X[step]}, {"t": T[step]})
        training.wait()
        layer = next(node.layer for node in training.nodes if node.layer.statistics)
        return [tensor.data.copy() for tensor in layer.statistics.values()]

    alone = work(None)
    for found in run_group(3, work):
        for one, other in zip(found, alone, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)


def test_gradients_against_finite_differences():
    """In float64 by hand: the loss of the whole batch, of a network whose batch norm sees all of it."""

    def work(group):
        training = network("sgd", normalizes=True, across=True)
        training.compile(device=mlc.Device.cpu(), group=group)
        declared = training._definition.declared
        declared.inputs["x"].bind_and_write_data(X[0], to=mlc.Device.cpu())
        declared.labels["t"].bind_and_write_data(T[0], to=mlc.Device.cpu())
        training.execute_forward()
        training.execute_gradient()
        layers = [node.layer for node in training.nodes if node.layer.parameters]
        slots = [(layer, slot) for layer in layers for slot in layer.parameters.values()]
        return [
            (s.tensor.data.astype(np.float64), training.gradient_data(s.tensor, layer).copy()) for layer, s in slots
        ]

    (found, *_) = run_group(2, work, slices=3)

    def loss(values):
        (w1, b1, beta, gamma, w2, b2) = values
        h = np.tanh(X[0] @ w1.T + b1)
        h = (h - h.mean(0)) / np.sqrt(h.var(0) + 1e-5) * gamma + beta
        y = h @ w2.T + b2
        y -= y.max(1, keepdims=True)
        return -(T[0] * (y - np.log(np.exp(y).sum(1, keepdims=True)))).sum(1).mean()

    values = [value for value, _ in found]
    order = [value.shape for value in values]
    assert order == [(64, 10), (64,), (64,), (64,), (3, 64), (3,)]
    for place, (value, gradient) in enumerate(found):
        for index in [0, value.size // 2, value.size - 1]:
            shifted = []
            for sign in (1, -1):
                changed = [one.copy() for one in values]
                changed[place].reshape(-1)[index] += sign * 1e-5
                shifted.append(loss(changed))
            expected = (shifted[0] - shifted[1]) / 2e-5
            np.testing.assert_allclose(gradient.reshape(-1)[index], expected, atol=2e-5)


def weighed(group, ignore, weights):
    """Steps with labels of which some do not count, or not the same."""
    with building:
        mlc.Platform.set_rng_seed_to(3)
        graph = mlc.Graph()
        x = graph.input((BATCH, 10), "x")
        graph.dense(graph.dense(x, 16, activation="tanh"), 3)
        labels = mlc.Tensor(shape=(BATCH,), data_type=mlc.DataType.INT64)
        labels.label = "t"
        mean = mlc.ReductionType.MEAN
        loss = mlc.LossLayer.softmax_cross_entropy(mean, ignore_index=ignore, class_weights=weights)
        training = mlc.TrainingGraph([graph], loss, optimizer("sgd"))
        training.add_inputs({"x": x}, {"t": labels})
    training.compile(device=mlc.Device.cpu(), group=group)
    losses = []
    for step, rows in enumerate((BATCH, BATCH, 17, BATCH)):
        classes = LABELS[step] if ignore is not None else abs(LABELS[step])
        run = training.execute({"x": X[step][:rows]}, {"t": classes[:rows]}, batch_size=rows)
        losses.append(float(run.result.data[0]))
    return losses, parameters(training)


@pytest.mark.parametrize(("ignore", "weights"), [(-1, None), (None, (1.0, 0.2, 3.0)), (-1, (0.5, 2.0, 1.0))])
def test_a_mean_over_labels_that_count(ignore, weights):
    alone = weighed(None, ignore, weights)
    (one,) = run_group(1, lambda group: weighed(group, ignore, weights))
    assert_near(one, alone)
    for size in (3,):
        assert all(same(other, one) for other in run_group(size, lambda group: weighed(group, ignore, weights)))


def test_across_group_is_for_batch_norm():
    graph = mlc.Graph()
    x = graph.input((4, 3), "x")
    with pytest.raises(mlc.GraphError, match="across_group is True, the kind is 'layer'"):
        graph.normalize(x, "layer", across_group=True)
    with pytest.raises(TypeError, match="across_group must be True or False, not int"):
        graph.normalize(x, across_group=1)
