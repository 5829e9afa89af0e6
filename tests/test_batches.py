"""Batches smaller than the tensors: the leading samples, the same numbers as a graph built for that size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import mlcompute as mlc
from tests.cases.lstm import make as make_lstm
from tests.cases.lstm import torch_lstm
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
    batch_norm,
    cpu,
    dense,
    normal,
    parameters_of,
    sgd,
    tensor,
    values_of,
)


class Images:
    """Convolution, batch norm, pooling, reshape, dense, softmax cross entropy, for any batch size."""

    def __init__(self, batch: int, dropout: float = 0.0) -> None:
        mlc.Platform.set_rng_seed_to(2)
        self.x, self.t = mlc.Tensor(shape=(batch, 2, 4, 4)), mlc.Tensor(shape=(batch, 3))
        graph = mlc.Graph()
        d = mlc.ConvolutionDescriptor(
            kernel_sizes=(3, 3),
            input_feature_channel_count=2,
            output_feature_channel_count=4,
            padding_policy=mlc.PaddingPolicy.SAME,
        )
        layer = mlc.ConvolutionLayer(tensor(normal(4, 2, 3, 3, seed=5) * np.float32(0.3)), None, d)
        y = graph.node(batch_norm(4), source=graph.node(layer, source=self.x))
        y = graph.node(mlc.DropoutLayer(dropout, 0), source=graph.node(mlc.ActivationLayer.relu(), source=y))
        pooling = mlc.PoolingDescriptor.max_pooling((2, 2), (2, 2), mlc.PaddingPolicy.VALID)
        y = graph.reshape((batch, -1), source=graph.node(mlc.PoolingLayer(pooling), source=y))
        self.y = graph.node(dense(16, 3, seed=9), source=y)
        self.training = mlc.TrainingGraph([graph], mlc.LossLayer.softmax_cross_entropy(MEAN), adam(0.05))
        self.training.add_inputs({"x": self.x}, {"t": self.t})
        self.training.add_outputs({"y": self.y})
        self.training.compile(device=cpu())

    def step(self, x: Array, t: Array, **more: Any) -> Array:
        return self.training.execute({"x": x}, {"t": t}, **more).result.data


def images(count: int, seed: int) -> tuple[Array, Array]:
    return normal(count, 2, 4, 4, seed=seed), np.eye(3, dtype=np.float32)[np.arange(count) * 7 % 3]


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_a_smaller_batch_is_a_graph_of_that_size(batch: int) -> None:
    large, small = Images(6, dropout=0.3), Images(batch, dropout=0.3)
    for step in range(3):
        x, t = images(batch, step)
        for net in (large, small):
            mlc.Platform.set_rng_seed_to(step + 1)
            net.loss = net.step(x, t, batch_size=batch)
        assert_close(large.loss, small.loss)
    for a, b in zip(values_of(large.training), values_of(small.training), strict=True):
        assert_close(a, b, scale=10.0)


def test_the_callers_surplus_samples_are_ignored() -> None:
    """Data for the full batch may be given: only the leading samples count, also in the loss's mean."""
    net, plain = Images(6), Images(6)
    x, t = images(6, 0)
    garbage, labels = x.copy(), t.copy()
    garbage[4:], labels[4:] = np.nan, np.nan
    np.testing.assert_array_equal(net.step(garbage, labels, batch_size=4), plain.step(x[:4], t[:4], batch_size=4))
    for a, b in zip(values_of(net.training), values_of(plain.training), strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_epoch_with_a_short_last_batch() -> None:
    """Weights after training on 14 samples in batches of 6 are PyTorch's."""
    net = Regression(sgd(0.1, momentum_scale=0.9), batch=6)
    twin = net.torch()
    optimizer = torch.optim.SGD(twin.parameters, lr=0.1, momentum=0.9)
    x, t = normal(14, 3), normal(14, 2, seed=1)
    for _ in range(3):
        for start in range(0, 14, 6):
            rows = slice(start, min(start + 6, 14))
            net.step(x[rows], t[rows], batch_size=rows.stop - rows.start)
            optimizer.zero_grad()
            twin.loss(x[rows], t[rows]).backward()
            optimizer.step()
    for parameter, expected in zip(net.parameters, twin.parameters, strict=True):
        assert_close(parameter.data, expected.detach().numpy(), scale=10.0)
    assert sorted(net.training.programs) == ["fused 2", "fused 6", "split 6"]


@pytest.mark.parametrize("reduction", [NONE, SUM, MEAN])
def test_losses_of_smaller_batches(reduction: mlc.ReductionType) -> None:
    net = Regression(None, reduction=reduction)
    x, t = normal(3, 3), normal(3, 2)
    squares = (net.torch().forward(torch.tensor(x, dtype=torch.float64)).detach().numpy() - t) ** 2
    expected = {NONE: squares, SUM: squares.sum().reshape(1), MEAN: squares.mean().reshape(1)}[reduction]
    for options in (mlc.ExecutionOptions.NONE, INFERENCE):
        assert_close(net.step(x, t, batch_size=3, options=options).result.data, expected)


def test_sizes_may_change_from_run_to_run() -> None:
    net = Regression(None)
    x, t = normal(4, 3), normal(4, 2)
    for batch in (0, 2, 4, 1, 0, 3, 2):
        rows = batch or 4
        result = net.step(x, t, batch_size=batch).result.data
        assert_close(result, np.float32([net.torch().loss(x[:rows], t[:rows]).item()]))
        assert net.y.data.shape == (rows, 2)
    assert sorted(net.training.programs) == ["fused 1", "fused 2", "fused 3", "fused 4", "split 4"]


def test_sizes_that_do_not_fit_are_refused() -> None:
    net = Regression(sgd())
    x, t = normal(4, 3), normal(4, 2)
    net.bind(x, t)
    calls = (
        lambda: net.step(x, t, batch_size=-1),
        lambda: net.step(x, t, batch_size=-1, options=INFERENCE),
        lambda: net.training.execute_forward(batch_size=-1),
    )
    for call in calls:
        with pytest.raises(mlc.ShapeError, match="batch_size is -1"):
            call()
    with pytest.raises(mlc.DataError, match="4 rows were given, batch_size is 5"):
        net.step(x, t, batch_size=5)
    for wrong in (2.0, True, "2", None):
        with pytest.raises(TypeError, match="batch_size must be a whole number"):
            net.step(x, t, batch_size=wrong)
    assert net.step(x, t, batch_size=np.int64(2)).wait()


def test_too_few_samples_are_refused() -> None:
    net = Regression(sgd())
    with pytest.raises(mlc.DataError, match=r"TrainingGraph.execute: 'x': 2 rows were given, batch_size is 3") as short:
        net.step(normal(2, 3), normal(3, 2), batch_size=3)
    assert short.value.fix == "pass batch_size=2"


def test_inputs_that_all_samples_share() -> None:
    """An input with one row is not a batch, wherever it stands in the dictionary."""
    scale, x = mlc.Tensor(shape=(1, 3)), mlc.Tensor(shape=(4, 3))
    graph = mlc.InferenceGraph()
    graph.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.MULTIPLY), sources=[x, scale])
    graph.add_inputs({"scale": scale, "x": x})
    graph.compile(device=cpu())
    data, factors = normal(4, 3), normal(1, 3, seed=1)
    for batch in (4, 0, 2):
        result = graph.execute({"x": data, "scale": factors}, batch_size=batch).result.data
        assert_close(result, (data * factors)[: batch or 4])


def test_inputs_with_different_batches_run_only_whole() -> None:
    a, b = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(3, 5))
    graph = mlc.InferenceGraph()
    graph.node(mlc.MatMulLayer(mlc.MatMulDescriptor()), sources=[a, b])
    graph.add_inputs({"a": a, "b": b})
    graph.compile(device=cpu())
    x, y = normal(4, 3), normal(3, 5)
    assert_close(graph.execute({"a": x, "b": y}, batch_size=0).result.data, x @ y)
    with pytest.raises(mlc.ShapeError, match="does not share the batch axis"):
        graph.execute({"a": x, "b": y}, batch_size=2)


def test_samples_that_move_to_another_axis() -> None:
    """Layers that have the length first, and attention between samples: trained with a smaller last batch."""
    graph = mlc.Graph()
    first = graph.gru(graph.input((8, 5, 4), "x"), 3, name="gru").transpose(1, 0, 2)  # (length, n, 3)
    graph.minimize((first.tanh() @ first.transpose(0, 2, 1)).softmax(-1).max(-1), name="loss")
    trainer = mlc.Trainer(graph, optimizer="sgd", learning_rate=0.5, outputs={"y": first.mean(0)})
    gru, data = torch.nn.GRU(4, 3, batch_first=True), normal(13, 5, 4)
    gru.load_state_dict({k.removeprefix("gru."): torch.tensor(v) for k, v in mlc.to_state_dict(graph).items()})
    losses = []
    for rows in torch.from_numpy(data).split(8):
        moved = gru(rows)[0].transpose(0, 1)
        loss = (moved.tanh() @ moved.transpose(1, 2)).softmax(-1).amax(-1).mean()
        gru.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in gru.parameters():
                parameter -= 0.5 * parameter.grad
        losses.append(loss.item() * len(rows))
    history = trainer.fit(data, shuffle=False, verbose=0)
    assert history["loss"][0] == pytest.approx(sum(losses) / 13, rel=1e-5)
    assert_close(trainer.predict(data), gru(torch.from_numpy(data))[0].mean(1).detach().numpy())


def test_which_input_counts_the_samples() -> None:
    """The first one declared, but the one the labels agree with where there are labels."""
    w, x, t = mlc.Tensor(shape=(3, 2)), mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 2))
    graph = mlc.TrainingGraph([], mlc.LossLayer.mean_squared_error(MEAN))
    graph.node(mlc.MatMulLayer(mlc.MatMulDescriptor()), sources=[x, w])
    graph.add_inputs({"w": w, "x": x}, {"t": t})
    graph.compile(device=cpu())
    data, weights, labels = normal(4, 3), normal(3, 2, seed=1), normal(4, 2, seed=2)
    expected = np.float32([np.mean((data @ weights - labels) ** 2)])
    assert_close(graph.execute({"x": data, "w": weights}, {"t": labels}, batch_size=4).result.data, expected)
    with pytest.raises(mlc.ShapeError, match="does not share the batch axis"):
        graph.execute({"x": data, "w": weights}, {"t": labels}, batch_size=5)


def test_inputs_with_several_rows_per_sample() -> None:
    a, b = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(8, 3))
    graph = mlc.InferenceGraph()
    paired = graph.reshape((4, 6), source=b)
    graph.concatenate([a, paired], dimension=1)
    graph.add_inputs({"a": a, "b": b})
    graph.compile(device=cpu())
    x, y = normal(4, 3), normal(8, 3, seed=1)
    expected = np.concatenate([x, y.reshape(4, 6)], 1)
    assert_close(graph.execute({"a": x, "b": y}).result.data, expected)
    assert_close(graph.execute({"a": x, "b": y}, batch_size=3).result.data, expected[:3])


def test_constants_with_a_row_per_sample() -> None:
    x, c = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 3))
    graph = mlc.InferenceGraph()
    graph.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.ADD), sources=[x, c])
    graph.add_inputs({"x": x})
    constant = normal(4, 3, seed=1)
    graph.compile(device=cpu(), input_tensors={"c": c}, input_tensors_data={"c": constant})
    data = normal(4, 3)
    for batch in (0, 3):
        assert_close(graph.execute({"x": data}, batch_size=batch).result.data, (data + constant)[: batch or 4])


def test_label_weights_of_smaller_batches() -> None:
    own = np.abs(normal(4, 2, seed=3))
    x, t, w = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 2)), tensor(own)
    training = mlc.TrainingGraph([], mlc.LossLayer.mean_squared_error(MEAN, weights=w), sgd())
    layer = dense(3, 2)
    training.node(layer, source=x)
    training.add_inputs({"x": x}, {"t": t}, {"w": w})
    training.compile(device=cpu())
    data, labels, other = normal(4, 3), normal(4, 2, seed=1), np.abs(normal(4, 2, seed=2))

    def expected(weights: Array) -> Array:
        error = data @ layer.weights.data.T + layer.biases.data - labels
        return np.float32([np.mean((weights * error**2)[:3])])

    wanted = expected(other)
    given = {"w": other[:3]}
    assert_close(training.execute({"x": data}, {"t": labels}, given, batch_size=3).result.data, wanted)
    wanted = expected(own)
    assert_close(training.execute({"x": data}, {"t": labels}, batch_size=3).result.data, wanted)


# Sequences of different lengths ------------------------------------------------------------------------------------


class Sequences:
    """x (4, 5, 3), lengths (4,) -> LSTM -> last output -> mean squared error."""

    def __init__(self, declared: str | None) -> None:
        self.x = mlc.Tensor(shape=(4, 5, 3))
        self.lengths = mlc.Tensor(shape=(4,), data_type=mlc.DataType.INT32)
        self.t = mlc.Tensor(shape=(4, 1, 2))
        self.layer = make_lstm(3, 2, returns_sequences=False)()
        self.training = mlc.TrainingGraph([], mlc.LossLayer.mean_squared_error(MEAN), sgd())
        self.y = self.training.node(self.layer, sources=[self.x, self.lengths])
        inputs = {"x": self.x} if declared is None else {"x": self.x, declared: self.lengths}
        self.training.add_inputs(inputs, {"t": self.t})
        self.device = cpu()
        self.training.compile(device=self.device)

    def oracle(self, x: Array, lengths: Array) -> Array:
        slots = {
            name: torch.tensor(slot.tensor.data.astype(np.float64)) for name, slot in self.layer.parameters.items()
        }
        oracle = torch_lstm(3, 2, returns_sequences=False)
        answer = oracle(slots, torch.tensor(x, dtype=torch.float64), torch.tensor(lengths))
        first = answer[0] if isinstance(answer, (tuple, list)) else answer
        return first.detach().numpy()


@pytest.mark.parametrize("declared", [None, "sortedSequenceLength", "lengths"])
def test_sorted_sequence_lengths(declared: str | None) -> None:
    """Fed under the documented name, whether or not the tensor was declared, and under which name."""
    net = Sequences(declared)
    x, t = normal(4, 5, 3), normal(4, 1, 2)
    for lengths in (np.int32([5, 4, 2, 1]), np.int32([5, 5, 5, 5]), np.int32([3, 2, 2, 1])):
        feeds = {"x": x, "sortedSequenceLength": lengths}
        net.training.execute(feeds, options=INFERENCE).wait()
        assert_close(net.y.data, net.oracle(x, lengths))
    lengths = np.int32([5, 4, 2, 1])
    expected = np.float32([np.mean((net.oracle(x, lengths) - t) ** 2)])
    assert_close(net.training.execute({"x": x, "sortedSequenceLength": lengths}, {"t": t}).result.data, expected)
    feeds = {"x": x, "sortedSequenceLength": lengths[:3]}
    net.training.execute(feeds, options=INFERENCE, batch_size=3).wait()
    assert_close(net.y.data, net.oracle(x, lengths)[:3])


def test_sequence_lengths_run_pass_by_pass() -> None:
    fused, split = Sequences(None), Sequences(None)
    x, t, lengths = normal(4, 5, 3), normal(4, 1, 2), np.int32([5, 3, 2, 2])
    fused.training.execute({"x": x, "sortedSequenceLength": lengths}, {"t": t})
    tensors = {"x": split.x, "n": split.lengths, "t": split.t}
    split.training.bind_and_write_data({"x": x, "n": lengths, "t": t}, for_inputs=tensors, to=split.device)
    split.training.execute_forward()
    split.training.execute_gradient()
    split.training.execute_optimizer_update()
    for a, b in zip(values_of(fused.training), values_of(split.training), strict=True):
        np.testing.assert_array_equal(a, b)


def test_sequence_lengths_out_of_range_change_nothing() -> None:
    net = Sequences(None)
    before = values_of(net.training)
    with pytest.raises(mlc.ExecutionError, match="LSTM"):
        net.training.execute(
            {"x": normal(4, 5, 3), "sortedSequenceLength": np.int32([6, 1, 1, 1])}, {"t": normal(4, 1, 2)}, options=SYNC
        )
    for a, b in zip(values_of(net.training), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_declared_lengths_that_no_layer_reads() -> None:
    """A tensor that is declared to hold sequences of some lengths says nothing to the layer: a warning does."""
    declared = {"sequence_lengths": [5, 4, 2, 1], "sorted_sequences": True, "feature_channel_count": 3}
    x = mlc.Tensor(**declared, batch_size=4)
    lengths = mlc.Tensor(shape=(4,), data=[5, 4, 2, 1], data_type=mlc.DataType.INT32)
    graph = mlc.Graph()
    with pytest.warns(UserWarning, match=r"LSTM 'LSTM': .* all 5 steps of every sequence"):
        graph.node(make_lstm(3, 2)(), source=x)
    graph.node(make_lstm(3, 2)(), source=mlc.Tensor(sequence_length=5, feature_channel_count=3, batch_size=4))
    inference = mlc.InferenceGraph()
    y = inference.node(make_lstm(3, 2)(), sources=[x, lengths])
    inference.add_inputs({"x": x})
    inference.compile(device=cpu())
    inference.execute({"x": normal(4, 5, 3)})
    assert [np.any(sample, axis=-1).sum() for sample in y.data] == [5, 4, 2, 1]


def test_sequence_lengths_where_nothing_is_recurrent() -> None:
    net = Regression(sgd())
    with pytest.raises(mlc.DataError, match="'sortedSequenceLength' is not a declared name"):
        net.training.execute({"x": normal(4, 3), "sortedSequenceLength": np.int32([1])}, {"t": normal(4, 2)})
    assert len(parameters_of(net.training)) == 4


# Larger batches -----------------------------------------------------------------------------------------------------


def _built_for_four() -> tuple[mlc.TrainingGraph, mlc.Graph]:
    mlc.Platform.set_rng_seed_to(3)
    graph = mlc.Graph()
    x = graph.input((4, 2, 6, 6), "x")
    y = graph.normalize(graph.convolution(x, 3, kernel=3, activation="relu"))
    y = graph.dense(graph.flatten(graph.pool(y)), 5)
    training = mlc.TrainingGraph(
        [graph],
        mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN),
        mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=0.01)),
    )
    training.add_inputs({"x": x}, {"t": mlc.Tensor(shape=(4, 5))})
    training.compile(device=mlc.Device.cpu())
    return training, graph


def test_a_larger_batch_is_compiled_on_first_use() -> None:
    rng = np.random.default_rng(0)
    xs, ts = rng.standard_normal((12, 2, 6, 6)).astype("f"), rng.standard_normal((12, 5)).astype("f")
    training, graph = _built_for_four()
    before = training.device_memory_size
    for size in (4, 12, 7, 4, 12):
        run = training.execute({"x": xs[:size]}, {"t": ts[:size]}, batch_size=size).wait()
        assert np.isfinite(run.result.data).all()
    assert training.device_memory_size > before
    assert graph.layers[0].weights.data.shape == (3, 2, 3, 3)


def test_a_larger_batch_gives_what_a_graph_of_its_size_gives() -> None:
    rng = np.random.default_rng(1)
    xs, ts = rng.standard_normal((12, 2, 6, 6)).astype("f"), rng.standard_normal((12, 5)).astype("f")
    training, graph = _built_for_four()
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs({"x": training_input(training)})
    inference.compile(device=mlc.Device.cpu())
    whole = inference.execute({"x": xs}, batch_size=12).result.data
    parts = [inference.execute({"x": xs[i : i + 4]}).result.data for i in (0, 4, 8)]
    np.testing.assert_allclose(whole, np.concatenate(parts), rtol=1e-5, atol=1e-6)
    out = np.zeros((12, 5), "f")
    inference.add_outputs({"y": graph.result_tensors(graph.layers[-1])[0]})
    inference.execute({"x": xs}, outputs_data={"y": out}, batch_size=12).wait()
    np.testing.assert_array_equal(out, whole)
    device = mlc.Device.cpu()
    training.bind_and_write_data(
        {"x": xs, "t": ts}, for_inputs={"x": training_input(training), "t": training_label(training)}, to=device,
        batch_size=12,
    )  # fmt: skip
    training.execute_forward(batch_size=12)
    training.execute_gradient(batch_size=12)
    assert training.execute_optimizer_update().wait()


def training_input(training: mlc.TrainingGraph) -> mlc.Tensor:
    return training._definition.declared.inputs["x"]


def training_label(training: mlc.TrainingGraph) -> mlc.Tensor:
    return training._definition.declared.labels["t"]


def test_more_rows_than_the_graph_takes_say_batch_size() -> None:
    training, _ = _built_for_four()
    with pytest.raises(mlc.DataError, match="pass batch_size=12"):
        training.execute({"x": np.zeros((12, 2, 6, 6), "f")}, {"t": np.zeros((12, 5), "f")})


def test_a_constant_of_the_batch_cannot_grow() -> None:
    graph = mlc.InferenceGraph()
    x, c = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 3))
    graph.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.ADD), sources=[x, c])
    graph.add_inputs({"x": x, "c": c})
    constant = {"c": np.ones((4, 3), "f")}
    graph.compile(device=mlc.Device.cpu(), input_tensors={"c": c}, input_tensors_data=constant)
    with pytest.raises(mlc.ShapeError, match="'c' was compiled as a constant of 4 samples"):
        graph.execute({"x": np.ones((8, 3), "f")}, batch_size=8)


@pytest.mark.parametrize("batch", [3, 12])
@pytest.mark.parametrize("is_query", [True, False])
def test_attention_over_as_many_keys_as_the_graph_was_built_for_refuses_other_batches(
    is_query: bool, batch: int
) -> None:
    """Kernels read, and wrote the gradient, beyond the end of what had fewer samples."""
    graph = mlc.Graph()
    x, own = graph.input((8, 5, 16), "x"), graph.parameter((8, 6, 16), name="own")
    sources = (own, x) if is_query else (x, own)
    graph.minimize(graph.attention(*sources, heads=2))
    training = mlc.TrainingGraph([graph], optimizer=mlc.SGDOptimizer(learning_rate=0.1))
    training.compile(device=mlc.Device.cpu())
    assert training.execute({"x": np.ones((8, 5, 16), "f")}).wait()
    with pytest.raises(mlc.ShapeError, match="in this run the query has"):
        training.execute({"x": np.ones((batch, 5, 16), "f")}, batch_size=batch)
