"""Trainer on several processes: the same samples in the same order, the same history, files from rank 0."""

import os

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.trainer.together import describe
from tests.group.threads import building, run_group

RNG = np.random.default_rng(5)
X = RNG.standard_normal((90, 6)).astype(np.float32)
Y = X[:, :3].argmax(1)


def trainer(group, optimizer="adam", batch=16, **settings):
    with building:
        mlc.Platform.set_rng_seed_to(2)
        graph = mlc.Graph()
        y = graph.dense(graph.input((batch, 6), "x"), 24, activation="relu")
        graph.dense(graph.dropout(y, 0.2, seed=4), 3)
    how = {"metrics": ["accuracy"], "learning_rate": 0.02, **settings}
    return mlc.Trainer(graph, loss="softmax_cross_entropy", optimizer=optimizer, group=group, **how)


def learned(one):
    return [array.copy() for array in one.copy_weights()]


def equal(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


class Noted(mlc.callbacks.Callback):
    def __init__(self, stop_at=None):
        self.epochs, self.stop_at = [], stop_at

    def on_epoch_end(self, epoch, logs):
        self.epochs.append(dict(logs))
        if epoch == self.stop_at:
            self.trainer.stop()


def test_history_metrics_and_weights_do_not_depend_on_the_number_of_processes():
    def work(group):
        one = trainer(group)
        noted = Noted()
        history = one.fit(X, Y, epochs=2, validation=(X[:50], Y[:50]), callbacks=[noted], verbose=0)
        return history.epochs, learned(one), len(noted.epochs), one.evaluate(X, Y)

    (first,) = run_group(1, work)
    for size in (2, 3):
        for rank, found in enumerate(run_group(size, work)):
            assert found[0] == first[0]
            assert equal(found[1], first[1])
            assert found[2] == (2 if rank == 0 else 0)  # callbacks are rank 0's
            assert found[3] == first[3]


def test_what_a_callback_of_rank_0_decides_counts_everywhere():
    def work(group):
        history = trainer(group).fit(X, Y, epochs=5, callbacks=[Noted(stop_at=1)], verbose=0)
        return len(history.epochs)

    assert run_group(3, work) == [2, 2, 2]


def test_accumulated_batches_are_exchanged_once():
    def work(group):
        one = trainer(group, batch=8)
        one.fit(X, Y, epochs=1, accumulate=3, verbose=0)
        return learned(one)

    (first,) = run_group(1, work)
    for found in run_group(3, work):
        assert equal(found, first)


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "rmsprop"])
def test_a_checkpoint_goes_on_at_another_size_bit_for_bit(tmp_path, optimizer):
    """Four processes save, two go on and save, three finish: the bits of one process that never stopped."""

    def begin(group):
        one = trainer(group, optimizer)
        one.fit(X, Y, epochs=1, verbose=0)
        one.save(tmp_path / "a.safetensors")

    def go_on(group):
        one = trainer(group, optimizer)
        one.fit(X, Y, epochs=2, resume=tmp_path / "a.safetensors", verbose=0)
        one.save(tmp_path / "b.safetensors")

    def finish(group):
        one = trainer(group, optimizer)
        one.fit(X, Y, epochs=3, resume=tmp_path / "b.safetensors", verbose=0)
        return learned(one)

    def through(group):
        one = trainer(group, optimizer)
        one.fit(X, Y, epochs=3, verbose=0)
        return learned(one)

    run_group(4, begin)
    run_group(2, go_on)
    (expected,) = run_group(1, through)
    for found in run_group(3, finish):
        assert equal(found, expected)
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b.safetensors"]


def test_a_signal_on_one_process_stops_all_after_the_same_step(tmp_path):
    def work(group):
        one = trainer(group)

        class Sent(mlc.callbacks.Callback):
            runs_on_every_process = True

            def on_train_batch_begin(self, batch, logs):
                if batch == 2 and group.rank == 1:
                    one._fitting.signals.noticed = 15

        with pytest.raises(mlc.callbacks.Terminated if hasattr(mlc.callbacks, "Terminated") else SystemExit):
            one.fit(X, Y, epochs=3, callbacks=[Sent()], checkpoint=tmp_path / "stopped.safetensors", verbose=0)
        return one.step

    assert run_group(2, work) == [3, 3]
    with mlc.Checkpoint(tmp_path / "stopped.safetensors") as saved:
        assert saved.progress["trainer"]["step"] == 3


def test_batches_of_an_iterable_that_differ_are_a_warning():
    """Random changes of its own on every process may be meant."""

    def work(group):
        x = X[:16] + (group.rank == 1)
        return trainer(group).fit(iter([(x, Y[:16])]), epochs=1, verbose=0)

    with pytest.warns(UserWarning, match="the first batch of rank 1 is another than that of rank 0: 'x' is float32"):
        run_group(2, work)


def test_large_data_is_compared_by_some_of_its_samples():
    """From the first to the last, about a megabyte of them."""
    data = np.zeros((3000, 1000), np.float32)
    first = describe(data)
    data[1] = 1
    assert describe(data) == first  # not looked at
    for rows in (slice(0, 1), slice(1500, 1512), slice(2999, 3000)):
        changed = data.copy()
        changed[rows] = 1
        assert describe(changed) != first


def test_a_group_is_a_group():
    with pytest.raises(TypeError, match="group must be a Group, not str"):
        trainer("world")
