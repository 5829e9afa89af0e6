"""Whose memory is trained and read: a tensor's values are its own unless sharing was asked for by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import mlcompute as mlc
from mlcompute.devices.reference import Reference
from tests.nets import SYNC, Array, Regression, adam, cpu, normal, sgd, shares_memory

ENGINES = pytest.mark.parametrize("device", [cpu, lambda: mlc.Device(engine=Reference())], ids=["cpu", "reference"])
Make = Callable[[], mlc.Device]
RUNS = pytest.mark.parametrize("options", [SYNC, mlc.ExecutionOptions.NONE], ids=["synchronous", "queued"])


class OnlyDLPack:
    """A tensor of a library that speaks DLPack and nothing else."""

    def __init__(self, values: Array) -> None:
        self._values = values

    def __dlpack__(self, **arguments: Any) -> Any:
        return self._values.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._values.__dlpack_device__()


def train(weights: mlc.Tensor, device: mlc.Device) -> None:
    """Three steps of x (4, 3) -> dense 2, mean squared error."""
    x, t = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 2))
    sizes = mlc.ConvolutionDescriptor(input_feature_channel_count=3, output_feature_channel_count=2)
    graph = mlc.Graph()
    graph.node(mlc.FullyConnectedLayer(weights, None, sizes), source=x)
    training = mlc.TrainingGraph([graph], mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN), sgd())
    training.add_inputs({"x": x}, {"t": t})
    training.compile(device=device)
    for step in range(3):
        training.execute({"x": normal(4, 3, seed=step)}, {"t": normal(4, 2, seed=step)}, options=SYNC)


#: How a caller's float32 array (2, 3) may be handed over.
WRAPPED: dict[str, Callable[[Array], Any]] = {
    "array": lambda array: array,
    "flat": lambda array: array.reshape(-1),
    "TensorData": mlc.TensorData,
    "memoryview": memoryview,
    "PyTorch": torch.from_numpy,
    "DLPack": OnlyDLPack,
}


@ENGINES
@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_data_is_copied(device: Make, wrap: Callable[[Array], Any]) -> None:
    array = normal(2, 3)
    before = array.copy()
    weights = mlc.Tensor(shape=(2, 3), data=wrap(array))
    train(weights, device())
    np.testing.assert_array_equal(array, before)
    assert not np.array_equal(weights.data, before)


@ENGINES
def test_a_module_of_pytorch_is_not_trained_along(device: Make) -> None:
    module = torch.nn.Linear(3, 2)
    before = module.weight.detach().clone()
    train(mlc.Tensor(shape=(2, 3), data=module.weight.detach()), device())
    assert torch.equal(module.weight, before)
    net = mlc.Graph()
    net.dense(net.input((4, 3), "x"), 2, name="layer")
    mlc.from_state_dict(net, {f"layer.{name}": value for name, value in module.state_dict().items()})
    trainer = mlc.Trainer(net, loss="mse", optimizer="sgd", learning_rate=0.1, device=device())
    trainer.fit(normal(8, 3), normal(8, 2), verbose=0)
    assert torch.equal(module.weight, before)


@ENGINES
@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_shared_data_is_the_callers_memory(device: Make, wrap: Callable[[Array], Any]) -> None:
    array = normal(2, 3)
    if wrap is OnlyDLPack:
        array = np.from_dlpack(torch.from_numpy(array))  # memory that two libraries can write
    before = array.copy()
    weights = mlc.Tensor(shape=(2, 3), shared_data=wrap(array))
    train(weights, device())
    if shares_memory(device()):
        assert not np.array_equal(array, before)
    np.testing.assert_array_equal(weights.data, array)  # elsewhere, reading brings the caller's memory up to date
    assert not np.array_equal(array, before)
    array[...] = 7
    assert (weights.data == 7).all()
    weights.data = before
    np.testing.assert_array_equal(array, before)


@pytest.mark.parametrize(
    "given",
    [np.zeros((2, 3)), np.zeros((3, 2), np.float32).T, np.zeros((2, 6), np.float32)[:, ::2], [[0.0] * 3] * 2, 0.0],
    ids=["another type", "transposed", "with gaps", "a list", "a number"],
)
def test_what_cannot_be_shared_is_refused(given: Any) -> None:
    shape = np.shape(given) or (1,)
    with pytest.raises(mlc.DataError, match=r"Tensor 'data\d+': shared_data: .* cannot be shared, only copied") as e:
        mlc.Tensor(shape=shape, shared_data=given)
    assert "data=, which copies" in e.value.fix
    assert mlc.Tensor(shape=shape, data=given).data.shape == shape


def test_shared_memory_must_fit() -> None:
    with pytest.raises(mlc.DataError, match="shape of the data does not fit"):
        mlc.Tensor(shape=(2, 3), shared_data=np.zeros((4, 3), np.float32))
    with pytest.raises(mlc.DataError, match="at most one of data, shared_data"):
        mlc.Tensor(shape=(2,), data=[0, 0], shared_data=np.zeros(2, np.float32))


@pytest.mark.parametrize("begins", [0, 8, 9])
def test_parameters_have_memory_of_their_own(begins: int) -> None:
    """Two weights made over one buffer would overwrite each other; parts of one that do not overlap are fine."""
    memory = np.ones(18, np.float32)
    first = mlc.Tensor(shape=(3, 3), shared_data=memory[:9])
    second = mlc.Tensor(shape=(3, 3), shared_data=memory[begins : begins + 9])
    sizes = mlc.ConvolutionDescriptor(input_feature_channel_count=3, output_feature_channel_count=3)
    graph, x, t = mlc.Graph(), mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 3))
    hidden = graph.node(mlc.FullyConnectedLayer(first, None, sizes), source=x)
    graph.node(mlc.FullyConnectedLayer(second, None, sizes), source=hidden)
    training = mlc.TrainingGraph([graph], mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN), sgd())
    training.add_inputs({"x": x}, {"t": t})
    if begins == 9:
        assert training.compile(device=cpu())
        return
    with pytest.raises(mlc.DataError, match=r"parameters 'data\d+' and 'data\d+' share memory"):
        training.compile(device=cpu())
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    assert inference.compile(device=cpu()), "reading overwrites nothing"


def test_parameters_bound_after_compile_have_memory_of_their_own() -> None:
    net, memory = Regression(sgd()), np.ones((2, 20), np.float32)
    first, second = (parameter for parameter in net.parameters if len(parameter.shape) > 1)
    data = normal(4, 3), normal(4, 2)
    first.bind_and_write_data(mlc.TensorData(memory[0]), to=net.device)
    second.bind_and_write_data(mlc.TensorData(memory[0]), to=net.device)
    for call in (net.step, lambda *data: (net.bind(*data), net.training.execute_forward())):
        with pytest.raises(mlc.DataError, match=r"parameters 'data\d+' and 'data\d+' share memory"):
            call(*data)
    second.bind_and_write_data(mlc.TensorData(memory[1]), to=net.device)
    net.step(*data).wait()
    first.bind_and_write_data(mlc.TensorData(memory[1]), to=net.device)  # they may exchange it
    second.bind_and_write_data(mlc.TensorData(memory[0]), to=net.device)
    net.step(*data).wait()


# Values as of now ---------------------------------------------------------------------------------------------------


@ENGINES
@RUNS
def test_kept_values_do_not_change(device: Make, options: mlc.ExecutionOptions) -> None:
    """An average of weights over the steps, by hand, while runs are queued: what was read stays what it was."""
    net, again = Regression(adam(), device=device()), Regression(adam(), device=device())
    kept: list[list[Array]] = []
    copies: list[list[Array]] = []
    for step in range(6):
        data = normal(4, 3, seed=step), normal(4, 2, seed=step)
        net.step(*data, options=options)
        kept.append([parameter.data for parameter in net.parameters])
        again.step(*data, options=SYNC)
        copies.append([np.array(parameter.data) for parameter in again.parameters])
    for read, right in zip(kept, copies, strict=True):
        for a, b in zip(read, right, strict=True):
            np.testing.assert_array_equal(a, b)


@ENGINES
def test_reading_gives_nothing_that_can_be_written_through(device: Make) -> None:
    net = Regression(adam(), device=device())
    net.step(normal(4, 3), normal(4, 2), options=SYNC)
    for tensor in (net.first.weights, net.y, net.training.result_tensors(net.loss)[0]):
        with pytest.raises(ValueError, match="read-only"):
            tensor.data[...] = 0
    state = net.first.weights.optimizer_data[0]
    assert not state.is_writable
    before = bytes(state.bytes)
    net.step(normal(4, 3), normal(4, 2), options=SYNC)
    assert bytes(state.bytes) == before
    assert bytes(net.first.weights.optimizer_data[0].bytes) != before


@ENGINES
@RUNS
def test_written_values_are_what_the_next_run_reads(device: Make, options: mlc.ExecutionOptions) -> None:
    net = Regression(sgd(), device=device())
    inference = mlc.InferenceGraph([net.graph])
    inference.add_inputs({"x": net.x})
    inference.compile(device=net.device)
    x, t = normal(4, 3), normal(4, 2)
    for step in range(3):
        net.step(x, t, options=options)  # writing waits for it
        first, second = normal(5, 3, seed=step), normal(2, 5, seed=step)
        net.first.weights.data, net.second.weights.data = first, second
        b1, b2 = net.first.biases.data, net.second.biases.data
        found = inference.execute({"x": x}, options=options).result.data
        np.testing.assert_allclose(found, np.tanh(x @ first.T + b1) @ second.T + b2, rtol=1e-5, atol=1e-6)


def test_writing_keeps_the_memory_and_checks_the_values() -> None:
    net = Regression(sgd())
    weights, bound = net.first.weights, normal(5, 3)
    weights.bind_and_write_data(bound, to=net.device)
    weights.data = np.zeros((5, 3), np.int64)
    assert not bound.any(), "the caller's memory is written, not replaced"
    weights.data = list(range(15))  # flat, in the order of memory
    np.testing.assert_array_equal(bound.reshape(-1), np.arange(15))
    for wrong in (np.zeros((3, 5)), np.zeros((6, 3)), np.zeros(14), np.zeros((5, 3), complex), None):
        with pytest.raises(mlc.DataError, match=rf"Tensor '{weights.label}'.data: "):
            weights.data = wrong
    np.testing.assert_array_equal(bound.reshape(-1), np.arange(15))
    for tensor in (net.x, net.y):
        with pytest.raises(mlc.DataError, match="cannot be set: the tensor keeps no data of its own"):
            tensor.data = np.zeros(tensor.descriptor.shape)


def test_random_values_that_were_replaced_are_not_rescaled() -> None:
    """Glorot values follow a layer's fans; values that were written are left alone."""
    weights = mlc.Tensor(shape=(1, 6, 1, 1), random_initializer_type=mlc.RandomInitializerType.GLOROT_UNIFORM)
    weights.data = np.ones((1, 6, 1, 1))
    sizes = mlc.ConvolutionDescriptor(input_feature_channel_count=3, output_feature_channel_count=2)
    mlc.FullyConnectedLayer(weights, None, sizes)
    assert (weights.data == 1).all()


def test_bound_optimizer_state_stays_live() -> None:
    net = Regression(adam())
    states = [np.zeros((5, 3), np.float32) for _ in range(2)]
    net.training.bind_optimizer_data(states, tensor=net.first.weights)
    net.step(normal(4, 3), normal(4, 2))
    net.training.synchronize_updates()
    assert states[0].any()
    live = net.first.weights.optimizer_data[0]
    assert live.is_writable
    assert np.shares_memory(np.frombuffer(live.bytes, np.float32), states[0])


def test_padding_rows_are_cleared_in_the_tensor_alone() -> None:
    table = normal(4, 2)
    layer = mlc.EmbeddingLayer(mlc.EmbeddingDescriptor(4, 2, padding_index=1), mlc.Tensor(shape=(4, 2), data=table))
    assert table[1].all()
    assert not layer.weights.data[1].any()
    assert copy.copy(layer.weights).data[0].tolist() == table[0].tolist()
