"""Any number of processes arrives at the same bits, and at the numbers one process without a group has."""

import sys

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.group import shared_memory
from tests.group.threads import BATCH, T, X, network, parameters, run_group, same, train, two_losses

CASES = {
    "adam": {"kind": "adam"},
    "momentum": {"kind": "sgd"},
    "global norm": {"kind": "global norm"},
    "norm of each tensor": {"kind": "norm"},
    "batch norm and dropout": {"normalizes": True, "drops": True},
    "batch norm of the whole batch": {"normalizes": True, "across": True, "drops": True},
    "sum of losses": {"sums": True},
}


@pytest.mark.parametrize("name", CASES)
def test_any_number_of_processes_gives_the_same_bits(name):
    how = CASES[name]
    (one,) = run_group(1, lambda group: train(group, **how))
    for size in (2, 3, 4):
        assert all(same(other, one) for other in run_group(size, lambda group: train(group, **how))), size


def test_more_processes_than_slices_give_the_same_bits():
    (one,) = run_group(1, train, slices=2)
    assert all(same(other, one) for other in run_group(5, train, slices=2))


def test_fewer_samples_than_slices():
    (one,) = run_group(1, lambda group: train(group, last=3))
    assert all(same(other, one) for other in run_group(3, lambda group: train(group, last=3)))


def test_sums_of_many_slices_take_the_memory_of_a_branch_of_the_tree():
    def work(group):
        training = network()
        training.compile(device=mlc.Device.cpu(), group=group)
        training.execute({"x": X[0]}, {"t": T[0]})
        return len(training._session.in_group._spare)

    assert run_group(1, work, slices=8) == [2]  # besides where the sum of all is left


@pytest.mark.parametrize("kind", ["adam", "sgd", "global norm", "norm"])
def test_numbers_are_those_of_a_graph_without_a_group(kind):
    alone = train(None, kind)
    (grouped,) = run_group(1, lambda group: train(group, kind))
    np.testing.assert_allclose(grouped[0], alone[0], rtol=1e-5)
    for one, other in zip(grouped[1], alone[1], strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_one_slice_is_bitwise_a_graph_without_a_group():
    (grouped,) = run_group(1, train, slices=1)
    assert same(grouped, train(None))


def test_batch_norm_averages_the_statistics_of_slices():
    """Running statistics move once per step, towards the mean over slices of each slice's statistics."""

    def work(group):
        training = network(normalizes=True)
        training.compile(device=mlc.Device.cpu(), group=group)
        layer = next(node.layer for node in training.nodes if node.layer.statistics)
        before = [t.data.copy() for t in layer.statistics.values()]
        source = next(node.sources[0] for node in training.nodes if node.layer is layer)
        training.add_outputs({"source": source})
        training.execute({"x": X[0]}, {"t": T[0]})
        return before, source.data, [t.data.copy() for t in layer.statistics.values()]

    for before, source, after in run_group(3, work, slices=4):
        means = source.reshape(4, BATCH // 4, -1).mean(axis=1).mean(axis=0)
        moved = (after[0] - before[0]).ravel() / (means - before[0].ravel())
        np.testing.assert_allclose(moved, moved[0], rtol=1e-3)


def test_state_exists_once_and_reads_back_whole():
    def work(group):
        training = network()
        training.compile(device=mlc.Device.cpu(), group=group)
        training.execute({"x": X[0]}, {"t": T[0]})
        own = training._session.state_bytes()
        return own, parameters(training)

    (one,) = run_group(1, work)
    three = run_group(3, work)
    assert sum(own for own, _ in three) == one[0]
    assert max(own for own, _ in three) < one[0] * 0.6
    assert all(np.array_equal(a, b) for _, arrays in three for a, b in zip(arrays, one[1], strict=True))


def test_results_and_outputs_are_those_of_the_whole_batch():
    def work(group):
        training = network()
        training.compile(device=mlc.Device.cpu(), group=group)
        out = np.zeros((17, 3), np.float32)
        inputs = {"x": X[0][:17]}, {"t": T[0][:17]}
        training.execute(*inputs, outputs_data={"y": out}, batch_size=17)
        return out

    def alone():
        training = network()
        training.compile(device=mlc.Device.cpu())
        out = np.zeros((17, 3), np.float32)
        training.execute({"x": X[0][:17]}, {"t": T[0][:17]}, outputs_data={"y": out}, batch_size=17).wait()
        return out

    for out in run_group(3, work):
        np.testing.assert_allclose(out, alone(), atol=1e-6)


@pytest.mark.parametrize("across", [False, True])
def test_passes_run_one_by_one_give_the_bits_of_whole_steps(across):
    def work(group):
        training = network(normalizes=True, across=across, drops=True)
        training.compile(device=mlc.Device.cpu(), group=group)
        x, t = (training._definition.declared.inputs["x"], training._definition.declared.labels["t"])
        for step in range(3):
            for tensor, data in ((x, X[step]), (t, T[step])):
                tensor.bind_and_write_data(data, to=mlc.Device.cpu())
            training.execute_forward()
            training.execute_gradient()
            layer = training.nodes[0].layer
            weights = next(iter(layer.parameters.values())).tensor
            assert training.gradient_data(weights, layer).shape == weights.descriptor.shape
            training.execute_optimizer_update()
        return parameters(training)

    def whole(group):
        training = network(normalizes=True, across=across, drops=True)
        training.compile(device=mlc.Device.cpu(), group=group)
        for step in range(3):
            training.execute({"x": X[step]}, {"t": T[step]})
        return parameters(training)

    (steps,) = run_group(1, whole)
    for size in (1, 3):
        for passes in run_group(size, work):
            assert all(np.array_equal(a, b) for a, b in zip(passes, steps, strict=True))


def test_gradients_read_are_those_of_the_whole_batch():
    def gradients(group):
        training = network()
        training.compile(device=mlc.Device.cpu(), group=group)
        declared = training._definition.declared
        declared.inputs["x"].bind_and_write_data(X[0], to=mlc.Device.cpu())
        declared.labels["t"].bind_and_write_data(T[0], to=mlc.Device.cpu())
        training.execute_forward().wait()
        training.execute_gradient().wait()
        layer = training.nodes[0].layer
        return [training.gradient_data(slot.tensor, layer).copy() for slot in layer.parameters.values()]

    expected = gradients(None)
    for found in run_group(2, gradients):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)


def test_a_group_that_shrinks_or_grows_between_compilations_keeps_its_state():
    """State that was divided among three is read whole by a graph that is compiled without a group."""

    def work(group):
        training = network()
        training.compile(device=mlc.Device.cpu(), group=group)
        training.execute({"x": X[0]}, {"t": T[0]})
        training.compile(device=mlc.Device.cpu())
        training.execute({"x": X[1]}, {"t": T[1]}).wait()
        return parameters(training)

    one, *others = run_group(3, work)
    for other in others:
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_parameters_that_others_write_between_steps_count():
    """By hand, and by another graph over the same weights."""

    def work(group):
        training = network("sgd")
        training.compile(device=mlc.Device.cpu(), group=group)
        training.execute({"x": X[0]}, {"t": T[0]})
        weights = next(iter(training.nodes[0].layer.parameters.values())).tensor
        weights.data = weights.data * 0.5
        training.execute({"x": X[1]}, {"t": T[1]})
        declared = training._definition.declared
        other = mlc.TrainingGraph([training], None, mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=0.1)))
        other.add_inputs({"x": declared.inputs["x"]}, {"t": declared.labels["t"]})
        other.compile(device=mlc.Device.cpu())
        other.execute({"x": X[2]}, {"t": T[2]}).wait()
        before = weights.data.copy()
        training.execute({"x": X[3]}, {"t": T[3]})
        return before, weights.data.copy()

    (one,) = run_group(1, work, slices=2)
    for before, after in run_group(2, work, slices=2):
        assert np.array_equal(before, one[0])
        assert np.array_equal(after, one[1])
        assert 0 < abs(after - before).max() < 0.2


def test_several_losses_of_different_kinds():
    """A mean and a sum are minimised together: each is that of the whole batch, and so is their sum."""

    def work(group):
        training = two_losses()
        training.compile(device=mlc.Device.cpu(), group=group)
        runs = [training.execute({"x": X[step]}, {"t": T[step], "u": T[step]}) for step in range(2)]
        losses = [float(tensor.data.sum()) for tensor in training.losses.values()]
        return [float(run.result.data[0]) for run in runs], losses, parameters(training)

    alone = work(None)
    (one,) = run_group(1, work)
    np.testing.assert_allclose(one[0], alone[0], rtol=1e-5)
    np.testing.assert_allclose(one[1], alone[1], rtol=1e-5)
    for other in run_group(3, work):
        assert other[:2] == one[:2]
        assert all(np.array_equal(a, b) for a, b in zip(other[2], one[2], strict=True))


@pytest.mark.parametrize(("slices", "size", "told"), [(3, 3, "0"), (8, 3, "0"), (8, 4, "2"), (7, 6, "3"), (8, 6, "2")])
def test_messages_and_shared_memory_give_the_same_bits(monkeypatch, slices, size, told):
    """All on one machine, each on its own, and several machines of two or three."""
    (one,) = run_group(1, train, slices=slices)
    shared = run_group(size, train, slices=slices)
    monkeypatch.setenv("MLCOMPUTE_SHARED_MEMORY", told)
    sent = run_group(size, train, slices=slices)
    assert all(same(one, other) for other in (*shared, *sent))


@pytest.mark.parametrize(("kind", "size", "told"), [("adam", 3, "0"), ("global norm", 3, "0"), ("adam", 4, "2")])
def test_gradients_sent_while_others_are_computed_give_the_same_bits(monkeypatch, kind, size, told):
    """Chunks of some bytes instead of megabytes; the last layer's gradients go first. The last batch is shorter."""
    expected = run_group(size, lambda group: train(group, kind, last=2), slices=size)
    monkeypatch.setenv("MLCOMPUTE_SHARED_MEMORY", told)
    monkeypatch.setattr(sys.modules["mlcompute.compiler.cut_for_exchange"], "CHUNK_BYTES", 256)
    sent = []

    def work(group):
        training = network(kind)
        training.compile(device=mlc.Device.cpu(), group=group)
        buckets = training._session.in_group.shared
        start = buckets.start

        def noted(index, *rest):
            sent.append((group.rank, index))
            start(index, *rest)

        monkeypatch.setattr(buckets, "start", noted)
        losses = []
        for step, rows in enumerate((BATCH, BATCH, BATCH, 2)):
            run = training.execute({"x": X[step][:rows]}, {"t": T[step][:rows]}, batch_size=rows)
            losses.append(float(run.result.data[0]))
        return losses, parameters(training)

    found = run_group(size, work, slices=size)
    assert all(same(one, other) for one, other in zip(found, expected, strict=True))
    assert sent.count((0, 0)) >= 3
    assert {index for _, index in sent} == {0, 1}  # all but the last


def test_memory_is_shared_by_all_processes_or_by_none(monkeypatch):
    parts = run_group(3, lambda group: group.exchange.share(10 * (1 + group.rank)))
    parts[1][2][:] = 7
    assert {rank: part.nbytes for rank, part in parts[0].items()} == {0: 10, 1: 20, 2: 30}
    assert parts[0][2].tolist() == [7] * 30
    made = shared_memory._made
    monkeypatch.setattr(shared_memory, "_made", lambda nbytes: None if nbytes == 20 else made(nbytes))
    assert run_group(3, lambda group: group.exchange.share(10 * (1 + group.rank))) == [{}] * 3


@pytest.mark.parametrize(
    ("shared", "are"),
    [
        ([[0, 1], [0, 1], [2, 3], [2, 3]], True),
        ([[0, 1, 2]] * 3, True),
        ([[0], [1]], False),
        ([[0, 1], [0, 1], [2]], False),
        ([[0, 2], [1, 3], [0, 2], [1, 3]], False),
        ([[0, 1], [1], [2, 3], [2, 3]], False),
    ],
)
def test_machines_have_as_many_processes_each_with_neighbouring_ranks(shared, are):
    assert shared_memory._are_machines(shared) == are


def test_what_the_host_does_between_steps():
    """Parameters lie in one of two places, turn by turn: whoever writes, binds or reads them sees the newest values."""

    def work(group):
        training = network("adam", normalizes=True)
        training.compile(device=mlc.Device.cpu(), group=group)
        first, last = (node.layer for node in training.nodes if "weights" in node.layer.parameters)
        written, bound = first.weights, last.weights
        mine = bound.data.copy()
        seen = []

        def step(number):
            training.execute({"x": X[number]}, {"t": T[number]})

        step(0)
        bound.bind_and_write_data(mine, to=mlc.Device.cpu())  # memory of the caller, which every step updates
        step(1)
        assert np.array_equal(mine, bound.data)
        before = written.data
        written.data = before * 0.5
        assert np.array_equal(written.data, before * 0.5)
        step(2)
        declared = training._definition.declared
        declared.inputs["x"].bind_and_write_data(X[3], to=mlc.Device.cpu())
        declared.labels["t"].bind_and_write_data(T[3], to=mlc.Device.cpu())
        training.execute_forward()
        training.execute_gradient()
        training.execute_optimizer_update()
        for number in (3, 1):
            step(number)
            assert np.array_equal(mine, bound.data)
            predicted = training.execute({"x": X[2]}, options=mlc.ExecutionOptions.FORWARD_FOR_INFERENCE)
            seen.append(predicted.result.data.copy())
        return seen, parameters(training)

    (one,) = run_group(1, work)
    for size in (2, 3):
        for other in run_group(size, work):
            assert all(np.array_equal(a, b) for a, b in zip(one[0], other[0], strict=True))
            assert all(np.array_equal(a, b) for a, b in zip(one[1], other[1], strict=True))
