"""Sub-graphs joined with `link`: with the caller's own code in between, with shared tensors, with shared weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mlcompute as mlc
from mlcompute.devices import engine_of
from tests.harness import assert_close
from tests.nets import (
    ALL_GRADIENTS,
    INFERENCE,
    LINK,
    MEAN,
    SYNC,
    Array,
    adam,
    assert_same,
    cpu,
    dense,
    normal,
    parameters_of,
    sgd,
    shared_dense,
    tensor,
    values_of,
)

STEPS = 4
ASYNC = mlc.ExecutionOptions.NONE


class Part:
    """One sub-graph: a dense layer and a sigmoid, by itself a training graph."""

    def __init__(
        self,
        source: mlc.Tensor,
        outputs: int,
        seed: int,
        labels: mlc.Tensor | None = None,
        optimizer: mlc.Optimizer | None = None,
        weights: mlc.Tensor | None = None,
        feeds: bool = True,
    ) -> None:
        inputs = source.descriptor.shape[1]
        self.source = source
        self.layer = dense(inputs, outputs, seed) if weights is None else shared_dense(weights, inputs, outputs)
        loss = None if labels is None else mlc.LossLayer.mean_squared_error(MEAN)
        self.training = mlc.TrainingGraph([], loss, optimizer or sgd(0.5))
        hidden = self.training.node(self.layer, source=source)
        self.result = self.training.node(mlc.ActivationLayer.sigmoid(), source=hidden)
        self.training.add_inputs({"x": source} if feeds else {}, {} if labels is None else {"t": labels})
        self.labels = labels

    def compile(self, options: mlc.GraphCompilationOptions = LINK | ALL_GRADIENTS) -> None:
        self.training.compile(options=options, device=cpu())


def bind(training: mlc.TrainingGraph, tensor_: mlc.Tensor, array: Array) -> None:
    training.bind_and_write_data({"it": array}, for_inputs={"it": tensor_}, to=cpu())


class Torch:
    """The whole model as one PyTorch network; `between` is what the caller's code does."""

    def __init__(self, graphs: list[mlc.TrainingGraph], rate: float = 0.5) -> None:
        tensors = dict.fromkeys(each for graph in graphs for each in parameters_of(graph))
        self.tensors = list(tensors)
        self.values = {
            each: torch.tensor(each.data.astype(np.float64), requires_grad=True) for each in self.tensors
        }
        self.optimizer = torch.optim.SGD(list(self.values.values()), lr=rate)

    def step(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def part(self, part: Part, z: torch.Tensor) -> torch.Tensor:
        y = z @ self.values[part.layer.weights].T
        if part.layer.biases is not None:
            y = y + self.values[part.layer.biases]
        return torch.sigmoid(y)

    def assert_equal(self) -> None:
        for each in self.tensors:
            assert_close(each.data, self.values[each].detach().numpy(), scale=5.0, what=each.label)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("link_first", [True, False])
def test_the_callers_code_in_between(count: int, link_first: bool) -> None:
    """z -> sin(z) between neighbours, in NumPy: forward by the caller, and backward too."""
    t = mlc.Tensor(shape=(4, 2))
    sources = [mlc.Tensor(shape=(4, 3)) for _ in range(count)]
    parts = [
        Part(source, 2 if index == count - 1 else 3, seed=index + 1, labels=t if index == count - 1 else None)
        for index, source in enumerate(sources)
    ]
    first, *others = (part.training for part in parts)
    if link_first:
        assert first.link(others)
    slots = [part.training.allocate_user_gradient(part.result) for part in parts[:-1]]
    for part in parts:
        part.compile()
    if not link_first:
        assert first.link(others)
    assert [len(part.training.layers) for part in parts] == [2] * count
    twin = Torch([part.training for part in parts])
    for step in range(STEPS):
        x, labels = normal(4, 3, seed=step), np.abs(normal(4, 2, seed=step + 20))
        value, values = x, []
        for part in parts:
            bind(part.training, part.source, value)
            if part.labels is not None:
                bind(part.training, part.labels, labels)
            part.training.execute_forward()
            values.append(part.result.data)
            value = np.sin(values[-1])
        for index in range(count - 1, -1, -1):
            parts[index].training.execute_gradient()
            if index:
                gradient = parts[index].training.gradient_tensor(parts[index].source).data
                bind(parts[index - 1].training, slots[index - 1], gradient * np.cos(values[index - 1]))
        for part in parts:
            part.training.execute_optimizer_update()
        z = torch.tensor(x, dtype=torch.float64)
        for index, part in enumerate(parts):
            z = twin.part(part, z if index == 0 else torch.sin(z))
        twin.step(((z - torch.tensor(labels)) ** 2).mean())
    twin.assert_equal()


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("options", [SYNC, ASYNC], ids=["sync", "async"])
def test_directly_shared_tensors(count: int, options: mlc.ExecutionOptions) -> None:
    """The result of one graph is the source in the next: values and gradients pass by themselves, also queued."""
    x, t = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 2))
    parts: list[Part] = []
    for index in range(count):
        last = index == count - 1
        source = x if index == 0 else parts[-1].result
        parts.append(Part(source, 2 if last else 3, index + 1, t if last else None, feeds=index == 0))
    parts[0].training.link([part.training for part in parts[1:]])
    for part in parts:
        part.compile(LINK)
    twin = Torch([part.training for part in parts])
    for step in range(STEPS):
        data, labels = normal(4, 3, seed=step), np.abs(normal(4, 2, seed=step + 20))
        bind(parts[0].training, x, data)
        bind(parts[-1].training, t, labels)
        for part in parts:
            part.training.execute_forward(options=options)
        for part in reversed(parts):
            part.training.execute_gradient(options=options)
        for part in parts:
            part.training.execute_optimizer_update(options=options)
        z = torch.tensor(data, dtype=torch.float64)
        for part in parts:
            z = twin.part(part, z)
        twin.step(((z - torch.tensor(labels)) ** 2).mean())
    twin.assert_equal()


def test_a_smaller_batch_through_linked_graphs() -> None:
    x, t = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 2))
    first = Part(x, 3, 1)
    second = Part(first.result, 2, 2, t, feeds=False)
    first.training.link([second.training])
    first.compile(LINK)
    second.compile(LINK)
    twin = Torch([first.training, second.training])
    data, labels = normal(3, 3), np.abs(normal(3, 2))
    first.training.bind_and_write_data({"x": data}, for_inputs={"x": x}, to=cpu(), batch_size=3)
    second.training.bind_and_write_data({"t": labels}, for_inputs={"t": t}, to=cpu(), batch_size=3)
    for part in (first, second):
        part.training.execute_forward(batch_size=3)
    for part in (second, first):
        part.training.execute_gradient(batch_size=3)
        part.training.execute_optimizer_update()
    z = twin.part(second, twin.part(first, torch.tensor(data, dtype=torch.float64)))
    twin.step(((z - torch.tensor(labels)) ** 2).mean())
    twin.assert_equal()


def test_a_result_used_here_and_there() -> None:
    """h feeds the rest of the first graph, with a loss of its own, and the second graph."""
    x, t1, t2 = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 2))
    first = Part(x, 3, 1)
    head = dense(3, 3, 5)
    prediction = first.training.node(head, source=first.result)
    first.training.node(mlc.LossLayer.mean_squared_error(MEAN), sources=[prediction], loss_labels=[t1])
    first.training.add_inputs({}, {"t1": t1})
    second = Part(first.result, 2, 2, t2, feeds=False)
    first.training.link([second.training])
    first.compile(LINK)
    second.compile(LINK)
    twin = Torch([first.training, second.training])
    data, a, b = normal(4, 3), normal(4, 3, seed=1), normal(4, 2, seed=2)
    bind(first.training, x, data)
    bind(first.training, t1, a)
    bind(second.training, t2, b)
    first.training.execute_forward()
    second.training.execute_forward()
    second.training.execute_gradient()
    first.training.execute_gradient()
    first.training.execute_optimizer_update()
    second.training.execute_optimizer_update()
    h = twin.part(first, torch.tensor(data, dtype=torch.float64))
    w, bias = twin.values[head.weights], twin.values[head.biases]
    loss = ((h @ w.T + bias - torch.tensor(a)) ** 2).mean() + ((twin.part(second, h) - torch.tensor(b)) ** 2).mean()
    twin.step(loss)
    twin.assert_equal()


@pytest.mark.parametrize("count", [2, 3])
def test_shared_weights(count: int) -> None:
    """One weight tensor in every graph: it belongs to the first, collects all gradients, and is updated once."""
    weights = tensor(normal(3, 3) * np.float32(0.7))
    x, t = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 3))
    parts: list[Part] = []
    for index in range(count):
        source = x if index == 0 else parts[-1].result
        parts.append(Part(source, 3, 0, t if index == count - 1 else None, weights=weights, feeds=index == 0))
    parts[0].training.link([part.training for part in parts[1:]])
    for part in parts:
        part.compile(LINK)
    twin = Torch([part.training for part in parts])
    for step in range(STEPS):
        data, labels = normal(4, 3, seed=step), np.abs(normal(4, 3, seed=step + 20))
        bind(parts[0].training, x, data)
        bind(parts[-1].training, t, labels)
        for part in parts:
            part.training.execute_forward()
        for part in reversed(parts):
            part.training.execute_gradient()
        for part in parts:
            part.training.execute_optimizer_update()
        z = torch.tensor(data, dtype=torch.float64)
        for part in parts:
            z = twin.part(part, z)
        twin.step(((z - torch.tensor(labels)) ** 2).mean())
    twin.assert_equal()


@pytest.mark.parametrize("frozen", [0, 1])
def test_shared_weights_frozen_in_one_graph(frozen: int) -> None:
    """Only the graph that updates a tensor counts: its own gradient, no matter what the other one does with it."""
    weights = tensor(normal(3, 3) * np.float32(0.7))
    x, t = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 3))
    graphs, source = [], x
    for index in range(2):
        loss = mlc.LossLayer.mean_squared_error(MEAN) if index else None
        training = mlc.TrainingGraph([], loss, sgd(0.5))
        source = training.node(shared_dense(weights, 3, 3), sources=[source], disable_update=index == frozen)
        training.add_inputs({} if index else {"x": x}, {"t": t} if index else {})
        graphs.append(training)
    graphs[0].link(graphs[1:])
    for training in graphs:
        training.compile(options=LINK, device=cpu())
    data, labels = normal(4, 3), normal(4, 3, seed=1)
    before = torch.tensor(weights.data.astype(np.float64), requires_grad=True)
    used = [before.detach() if index == frozen else before for index in range(2)]
    z = torch.tensor(data, dtype=torch.float64) @ used[0].T @ used[1].T
    ((z - torch.tensor(labels)) ** 2).mean().backward()
    bind(graphs[0], x, data)
    bind(graphs[1], t, labels)
    for training in graphs:
        training.execute_forward()
    for training in reversed(graphs):
        training.execute_gradient()
    for training in graphs:
        training.execute_optimizer_update()
    assert_close(weights.data, (before - 0.5 * before.grad).detach().numpy())


def test_passes_in_the_wrong_order_say_so() -> None:
    x, t = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 2))
    first = Part(x, 3, 1)
    second = Part(first.result, 2, 2, t, feeds=False)
    first.training.link([second.training])
    first.compile(LINK)
    second.compile(LINK)
    bind(first.training, x, normal(4, 3))
    bind(second.training, t, normal(4, 2))
    before = values_of(first.training) + values_of(second.training)
    with pytest.raises(mlc.DataError, match="comes from a linked graph, which has not computed it"):
        second.training.execute_forward(options=SYNC)
    first.training.execute_forward()
    with pytest.raises(mlc.DataError, match="comes from a linked graph, which has not computed it"):
        first.training.execute_gradient().wait()
    second.training.execute_forward()
    second.training.execute_gradient()
    first.training.execute_gradient()
    assert_same(values_of(first.training) + values_of(second.training), before)
    first.training.execute_optimizer_update().wait()


def test_gradients_wait_for_every_graph_that_uses_a_result() -> None:
    """A sum over some of them would be silently wrong; one that stops the gradient contributes nothing."""
    x, t1, t2 = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 2)), mlc.Tensor(shape=(4, 2))
    first = Part(x, 3, 1)
    second = Part(first.result, 2, 2, t1, feeds=False)
    third = Part(first.result, 2, 3, t2, feeds=False)
    first.training.link([second.training, third.training])
    for stops in (False, True):
        if stops:
            second.training.stop_gradient([first.result])
        for part in (first, second, third):
            part.compile(LINK)
        twin = Torch([part.training for part in (first, second, third)])
        data, a, b = normal(4, 3), normal(4, 2, seed=1), normal(4, 2, seed=2)
        bind(first.training, x, data)
        bind(second.training, t1, a)
        bind(third.training, t2, b)
        for part in (first, second, third):
            part.training.execute_forward()
        third.training.execute_gradient()
        with pytest.raises(mlc.DataError, match="which has not computed it"):
            first.training.execute_gradient(options=SYNC)
        second.training.execute_gradient()
        first.training.execute_gradient()
        for part in (first, second, third):
            part.training.execute_optimizer_update()
        h = twin.part(first, torch.tensor(data, dtype=torch.float64))
        detached = h.detach() if stops else h
        loss = ((twin.part(second, detached) - torch.tensor(a)) ** 2).mean()
        twin.step(loss + ((twin.part(third, h) - torch.tensor(b)) ** 2).mean())
        twin.assert_equal()


def test_a_link_that_was_forgotten_is_named() -> None:
    x, t = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 2))
    first = Part(x, 5, seed=1)
    second = Part(first.result, 2, seed=2, labels=t, feeds=False)
    for part in (first, second):
        part.compile()
    bind(first.training, x, normal(4, 3))
    bind(second.training, t, normal(4, 2))
    first.training.execute_forward()
    with pytest.raises(mlc.DataError, match=r"(?s)was not given.*first\.link\(\[second\]\) and LINK_GRAPHS hand it on"):
        second.training.execute_forward()


def test_every_graph_must_be_compiled_for_linking() -> None:
    x = mlc.Tensor(shape=(4, 3))
    first, second = Part(x, 3, 1), Part(x, 3, 2)
    first.compile(LINK)
    second.compile(ALL_GRADIENTS)
    with pytest.raises(mlc.GraphError, match="without LINK_GRAPHS"):
        first.training.link([second.training])
    second.compile(LINK)
    assert first.training.link([second.training])
    with pytest.raises(mlc.GraphError, match="without LINK_GRAPHS"):
        second.compile(ALL_GRADIENTS)
    with pytest.raises(mlc.GraphError, match="cannot be linked"):
        first.training.link([mlc.InferenceGraph()])  # type: ignore[list-item]
    assert first.training.link([])
    assert first.training.link([first.training])


def test_linked_graphs_evaluate_together() -> None:
    x = mlc.Tensor(shape=(4, 3))
    first = Part(x, 3, 1)
    second = Part(first.result, 2, 2, mlc.Tensor(shape=(4, 2)), feeds=False)
    first.training.link([second.training])
    first.compile(LINK)
    second.compile(LINK)
    twin = Torch([first.training, second.training])
    data = normal(4, 3)
    first.training.execute({"x": data}, options=INFERENCE)
    result = second.training.execute({}, options=INFERENCE).result.data
    expected = twin.part(second, twin.part(first, torch.tensor(data, dtype=torch.float64)))
    assert_close(result, expected.detach().numpy())


def test_linked_inference_graphs() -> None:
    """Any result of the first graph may be a source in the second, not only its last one."""
    x = mlc.Tensor(shape=(4, 3))
    first, second = mlc.InferenceGraph(), mlc.InferenceGraph()
    layer = dense(3, 3)
    h = first.node(layer, source=x)
    y = first.node(mlc.ActivationLayer.relu(), source=h)
    z = second.node(mlc.ArithmeticLayer(mlc.ArithmeticOperation.ADD), sources=[h, y])
    first.add_inputs({"x": x})
    for graph in (first, second):
        graph.compile(options=LINK, device=cpu())
    with pytest.raises(mlc.GraphError, match="cannot be linked"):
        first.link([mlc.TrainingGraph()])  # type: ignore[list-item]
    assert first.link([second])
    data = normal(4, 3)
    hidden = data @ layer.weights.data.T + layer.biases.data
    for batch in (0, 2):
        first.execute({"x": data}, batch_size=batch)
        result = second.execute({}, batch_size=batch).result
        assert result.of is z
        assert_close(result.data, (hidden + np.maximum(hidden, 0))[: batch or 4])
    assert first.layers == [layer, first.layers[1]]


def test_an_update_of_adam_in_linked_graphs_counts_per_graph() -> None:
    x, t = mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 2))
    optimizers = adam(), adam()
    first = Part(x, 3, 1, optimizer=optimizers[0])
    second = Part(first.result, 2, 2, t, optimizer=optimizers[1], feeds=False)
    first.training.link([second.training])
    first.compile(LINK)
    second.compile(LINK)
    for _ in range(3):
        bind(first.training, x, normal(4, 3))
        bind(second.training, t, normal(4, 2))
        for part in (first, second):
            part.training.execute_forward()
        for part in (second, first):
            part.training.execute_gradient()
            part.training.execute_optimizer_update()
    first.training.synchronize_updates()
    second.training.synchronize_updates()
    assert [optimizer.time_step for optimizer in optimizers] == [4, 4]


def test_linked_graphs_are_compiled_for_one_device() -> None:
    from mlcompute.devices.reference import Reference
    from mlcompute.devices.remote import Remote

    other = Reference() if isinstance(engine_of(cpu()), Remote) else Remote()
    first, second = mlc.InferenceGraph(), mlc.InferenceGraph()
    x = mlc.Tensor(shape=(2, 3))
    y = first.node(mlc.ActivationLayer.relu(), source=x)
    second.node(mlc.ActivationLayer.tanh(), source=y)
    first.add_inputs({"x": x})
    first.link([second])
    linked = mlc.GraphCompilationOptions.LINK_GRAPHS
    first.compile(options=linked, device=mlc.Device.cpu())
    with pytest.raises(mlc.GraphError, match="linked with a graph that was compiled for another device"):
        second.compile(options=linked, device=mlc.Device(mlc.DeviceType.ANY, engine=other))
