"""fit, evaluate and predict: the same numbers as PyTorch's loop, for arrays, streams, several inputs and losses."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mlcompute as mlc
from mlcompute.trainer.data import order_of
from tests.trainer.nets import assert_same, classifier, everything, points, trainer


def twin(model: mlc.Trainer) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The same network with the same weights in PyTorch."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    for parameter, array in zip(module.parameters(), model.copy_parameters(), strict=True):
        parameter.data = torch.tensor(array)
    return module, torch.optim.Adam(module.parameters(), lr=0.01)


def test_the_losses_are_those_of_pytorch() -> None:
    x, y = points()
    model = trainer(metrics=["accuracy", "mae"])
    module, adam = twin(model)
    history = model.fit(x, y, epochs=3, validation=(x, y), shuffle_seed=7, verbose=0)
    losses, means, right = [], [], []
    for epoch in range(3):
        order, total, count = order_of(7, epoch, len(x)), 0.0, 0
        for first in range(0, len(x), 16):
            picked = order[first : first + 16]
            logits = module(torch.tensor(x[picked]))
            loss = torch.nn.functional.cross_entropy(logits, torch.tensor(y[picked]))
            adam.zero_grad()
            loss.backward()
            adam.step()
            losses.append(loss.item())
            total += loss.item() * len(picked)
            count += int((logits.argmax(1).numpy() == y[picked]).sum())
        means.append(total / len(x))
        right.append(count / len(x))
    np.testing.assert_allclose(history.loss.values, losses, rtol=2e-5)
    assert history.loss.steps == list(range(1, 16))
    np.testing.assert_allclose(history["loss"], means, rtol=2e-5)
    assert history["accuracy"] == right
    logits = module(torch.tensor(x)).detach()
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(y)).item()
    assert history["val_loss"][-1] == pytest.approx(expected, rel=2e-5)
    found = model.evaluate(x, y)
    assert found["loss"] == history["val_loss"][-1]
    assert found["accuracy"] == history["val_accuracy"][-1] == (logits.argmax(1).numpy() == y).mean()
    one_hot = np.eye(3)[y]
    assert found["mae"] == pytest.approx(np.abs(logits.numpy() - one_hot).mean(), rel=1e-4)
    np.testing.assert_allclose(model.predict(x), logits, rtol=1e-4, atol=1e-5)
    assert model.predict(x[:5], batch_size=2).shape == (5, 3)
    assert history.history["learning_rate"] == [0.01] * 3
    assert history.stopped == ""
    assert "3 epochs" in repr(history)


def test_accumulated_batches_are_one_large_batch() -> None:
    x, y = points(78)
    options = {"optimizer": "sgd", "learning_rate": 0.5, "metrics": ["accuracy"]}
    large = trainer(24, **options)
    expected = large.fit(x, y, epochs=3, verbose=0)
    small = trainer(6, **options)
    found = small.fit(x, y, epochs=3, accumulate=4, verbose=0)  # 78 = 3 * 24 + 6: the last group is one batch
    assert len(found.loss) == len(expected.loss) == 12
    np.testing.assert_allclose(found.loss.values, expected.loss.values, rtol=1e-5)
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)
    assert found["accuracy"] == expected["accuracy"]
    for one, other in zip(small.copy_parameters(), large.copy_parameters(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_accumulated_sums_and_clipping() -> None:
    x, y = points(64)
    settings = mlc.OptimizerDescriptor(
        learning_rate=0.1,
        applies_gradient_clipping=True,
        gradient_clipping_type=mlc.GradientClippingType.BY_GLOBAL_NORM,
        maximum_clipping_norm=0.5,
        regularization_type=mlc.RegularizationType.L2,
        regularization_scale=0.01,
    )
    trained = []
    for batch, accumulate in ((32, 1), (8, 4)):
        loss = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.SUM)
        model = trainer(batch, loss=loss, optimizer=mlc.AdamOptimizer(settings), learning_rate=None)
        history = model.fit(x, y, epochs=4, accumulate=accumulate, verbose=0)
        trained.append((history["loss"], model.copy_parameters(), model.training.optimizer))
    np.testing.assert_allclose(trained[0][0], trained[1][0], rtol=1e-5)
    for one, other in zip(trained[0][1], trained[1][1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)
    assert trained[0][2].time_step == trained[1][2].time_step == 9


def test_queued_steps_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlcompute.trainer import steps

    x, y = points(400)
    results = []
    for shortest in (1e9, 0.0):  # never queued, always queued
        monkeypatch.setattr(steps, "_SHORT", shortest)
        model = trainer(dropout=0.3)
        schedule = mlc.callbacks.LearningRateScheduler(mlc.schedules.Cosine())
        history = model.fit(x, y, epochs=3, callbacks=[schedule], verbose=0)
        results.append((history, everything(model)))
    assert results[0][0] == results[1][0]
    assert_same(results[0][1], results[1][1])


class OnlyDLPack:
    """Data of a library that knows DLPack and nothing else."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


def test_data_of_all_kinds_trains_alike() -> None:
    x, y = points(64)
    one_hot = np.eye(3, dtype=np.float32)[y]

    def batches(epoch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        order = order_of(0, epoch, len(x))
        for first in range(0, len(x), 16):
            picked = order[first : first + 16]
            yield x[picked], y[picked]

    kinds: dict[str, tuple[Any, Any]] = {
        "arrays": (x, y),
        "one-hot": (x, one_hot),
        "by name": ({"x": x}, {"labels": y}),
        "lists": ([x], [one_hot]),
        "torch": (torch.tensor(x), torch.tensor(y)),
        "dlpack": (OnlyDLPack(x), OnlyDLPack(y)),
        "wider types": (x.astype(np.float64), one_hot.astype(bool)),
        "not contiguous": (np.asfortranarray(x), y[::-1][::-1]),
        "function of the epoch": (batches, None),
    }
    model = trainer()
    start = model.copy_weights()
    expected: mlc.History | None = None
    for kind, (inputs, labels) in kinds.items():
        model.set_weights(start)
        model.training.compile_optimizer(mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=0.01)))
        history = model.fit(inputs, labels, epochs=2, shuffle_seed=0, verbose=0)
        expected = expected or history
        # One-hot labels are summed in another order than integer class labels are looked up.
        np.testing.assert_allclose(history.loss.values, expected.loss.values, rtol=1e-5, err_msg=kind)
        assert history["accuracy"] == expected["accuracy"], kind


def test_streams() -> None:
    x, y = points(40)
    model = trainer()
    pairs = [(x[first : first + 12], y[first : first + 12]) for first in range(0, 40, 12)]
    history = model.fit(pairs, epochs=2, validation=pairs, verbose=0)
    assert len(history.loss) == 8
    assert model.evaluate(iter(pairs)) == model.evaluate(x, y, batch_size=12)
    np.testing.assert_array_equal(model.predict(iter([x[:5], x[5:9]])), model.predict(x[:9], batch_size=5)[:9])
    with pytest.raises(mlc.DataError, match=r"(?s)an iterator can be gone through only once.*function of the epoch"):
        model.fit(iter(pairs), epochs=2, verbose=0)
    with pytest.raises(mlc.ShapeError, match="batch 0 has 20 samples, the graph was built for 16"):
        model.fit([(x[:20], y[:20])], verbose=0)
    with pytest.raises(mlc.DataError, match="batch 0 has 4 parts"):
        model.fit([(x[:2], y[:2], None, None)], verbose=0)
    with pytest.raises(mlc.DataError, match="epoch 1 has no batches"):
        model.fit(lambda epoch: [], verbose=0)

    def broken() -> Iterator[Any]:
        yield pairs[0]
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="the disk is gone"):
        model.fit(broken(), verbose=0)


def test_no_thread_stays_behind() -> None:
    x, y = points(400)
    model = trainer()
    model.fit(x, y, verbose=0)

    class Stop(mlc.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any) -> None:
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        model.fit(x, y, callbacks=[Stop()], verbose=0)
    deadline = time.perf_counter() + 60
    while any(thread.name == "mlcompute data" for thread in threading.enumerate()):
        assert time.perf_counter() < deadline
        time.sleep(0.01)


def test_several_inputs_and_losses() -> None:
    rng = np.random.default_rng(0)
    graph = mlc.Graph()
    a, b = graph.input((8, 3), "a"), graph.input((8, 2), "b")
    offset = graph.input((1, 4), "offset")
    h = graph.add(graph.dense(graph.concatenate([a, b], dimension=1), 4, activation="tanh"), offset)
    first, second = graph.input((8, 2), "sums"), graph.input((8, 1), "products")
    graph.loss(graph.dense(h, 2, name="two"), first, "mse", name="main")
    graph.loss(graph.dense(h, 1, name="one"), second, "mse", weight=0.5, name="auxiliary")
    model = mlc.Trainer(graph, metrics=["mse"], learning_rate=0.02)
    data = {"a": rng.standard_normal((50, 3)), "b": rng.standard_normal((50, 2)), "offset": np.ones((1, 4))}
    sums = np.stack([data["a"].sum(1), data["b"].sum(1)], axis=1)
    labels = {"sums": sums, "products": data["a"][:, :1] * data["b"][:, :1]}
    history = model.fit(data, labels, epochs=30, verbose=0)
    assert history["loss"][-1] < history["loss"][0] / 4
    found = model.evaluate(data, labels)
    predicted = model.predict(data)
    assert predicted.shape == (50, 2)
    assert found["mse"] == pytest.approx(np.square(predicted - sums).mean(), rel=1e-5)
    assert found["loss"] > found["mse"]
    with pytest.raises(mlc.DataError, match=r"there is no input named 'c'"):
        model.predict({"c": data["a"]})
    with pytest.raises(mlc.DataError, match=r"no data for input 'offset'"):
        model.predict({"a": data["a"], "b": data["b"]})
    with pytest.raises(mlc.DataError, match=r"the graph has 3 inputs"):
        model.predict(data["a"])


def test_a_training_graph_of_ones_own_with_label_weights() -> None:
    graph = classifier(16)
    x, y = points(48)
    source, target, weights = (
        graph.source_tensors(graph.layer("hidden"))[0],
        mlc.Tensor(shape=(16, 3)),
        mlc.Tensor(shape=(16,)),
    )
    sgd = mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=0.1))
    training = mlc.TrainingGraph([graph], mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN), sgd)
    training.add_inputs({"points": source}, {"third": target}, {"importance": weights})
    model = mlc.Trainer(training, metrics=["accuracy"])
    assert model.training is training
    assert model.optimizer is sgd
    importance = np.random.default_rng(0).uniform(0, 2, 48).astype(np.float32)
    before = [torch.tensor(array) for array in model.copy_parameters()]
    w1, b1, w2, b2 = before
    logits = torch.tanh(torch.tensor(x) @ w1.T + b1) @ w2.T + b2
    losses = torch.nn.functional.cross_entropy(logits, torch.tensor(y), reduction="none").numpy() * importance
    found = model.evaluate({"points": x}, {"third": y}, sample_weight=importance)
    assert found["loss"] == pytest.approx(losses.mean(), rel=1e-5)
    model.fit(x, y, sample_weight=importance, shuffle=False, verbose=0)
    assert model.history.loss.values[0] == pytest.approx(losses[:16].mean(), rel=1e-5)


def test_images_with_a_class_per_pixel() -> None:
    mlc.Platform.set_rng_seed_to(0)
    graph = mlc.Graph()
    graph.convolution(graph.input((4, 1, 6, 6), "image"), 3, 3)
    model = mlc.Trainer(graph, loss="softmax_cross_entropy", metrics=["accuracy", "top_3_accuracy"], learning_rate=0.05)
    images = np.random.default_rng(0).integers(0, 3, (20, 1, 6, 6))
    history = model.fit(images, images[:, 0], epochs=40, verbose=0)
    assert history["accuracy"][-1] > 0.95
    assert history["top_3_accuracy"][-1] == 1.0


def test_yes_or_no_on_logits() -> None:
    x, _ = points(64)
    y = (x[:, 0] > 0).astype(np.float32)
    mlc.Platform.set_rng_seed_to(0)
    graph = mlc.Graph()
    graph.dense(graph.input((16, 4), "x"), 1)
    model = mlc.Trainer(graph, loss="sigmoid_cross_entropy", metrics=["accuracy"], learning_rate=0.1)
    model.fit(x, y, epochs=20, verbose=0)
    logits = model.predict(x)[:, 0]
    assert model.evaluate(x, y)["accuracy"] == ((logits > 0) == (y > 0)).mean() > 0.9


REFUSALS: dict[str, tuple[Any, Any, dict[str, Any], type[Exception], str]] = {
    "another length": (np.zeros((9, 4)), np.zeros(8, int), {}, mlc.DataError, "'x' 9, 'labels' 8"),
    "other features": (np.zeros((9, 5)), np.zeros(9, int), {}, mlc.DataError, r"samples of shape \(5,\)"),
    "flat": (np.zeros((3, 2, 2)), np.zeros(3, int), {}, mlc.DataError, r"array.reshape\(3, 4\)"),
    "no samples": (np.zeros((0, 4)), np.zeros(0, int), {}, mlc.DataError, "there are no samples"),
    "classes": (np.zeros((9, 4)), np.full(9, 3), {}, mlc.DataError, "go from 3 to 3, the graph has 3 classes"),
    "text": (np.zeros((9, 4)), np.full(9, "a"), {}, mlc.DataError, "data of type <U1 cannot be used"),
    "no array": (np.zeros((9, 4)), object(), {}, mlc.DataError, "cannot be"),
    "a number": (3.0, np.zeros(9), {}, mlc.DataError, "a single number"),
    "no labels": (np.zeros((9, 4)), None, {}, mlc.DataError, "labels"),
    "no batch size": (*points(9), {"batch_size": 0}, mlc.DataError, "batch_size is 0"),
    "batch size": (*points(9), {"batch_size": 64}, mlc.ShapeError, r"(?s)built for 16.*accumulate=4"),
    "epochs": (*points(9), {"epochs": -1}, mlc.DataError, "epochs is -1"),
    "steps": (*points(9), {"steps_per_epoch": 0}, mlc.DataError, "steps_per_epoch is 0"),
    "seed": (*points(9), {"shuffle_seed": "a"}, TypeError, "shuffle_seed must be a whole number"),
    "callbacks": (*points(9), {"callbacks": [print]}, TypeError, "derived from mlc.callbacks.Callback, not builtin"),
    "verbose": (*points(9), {"verbose": 3}, mlc.DataError, "verbose is 3"),
    "validation": (*points(9), {"validation": (1, 2, 3, 4)}, mlc.DataError, "validation has 4 parts"),
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> mlc.Trainer:
    return trainer()


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_change_nothing(name: str, model: mlc.Trainer) -> None:
    x, y, options, error, message = REFUSALS[name]
    before = everything(model)
    with pytest.raises(error, match=message):
        model.fit(x, y, **{"verbose": 0, **options})
    assert_same(everything(model), before)


def test_no_epochs_train_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As in Keras: callbacks hear of the beginning and the end, and the history is empty."""
    model = trainer()
    before = model.copy_weights()
    callbacks = [
        mlc.callbacks.EarlyStopping(restore_best_weights=True),
        mlc.callbacks.ExponentialMovingAverage(0.9),
        mlc.callbacks.LearningRateScheduler(mlc.schedules.OneCycle(0.1)),
        mlc.callbacks.CSVLogger(tmp_path / "log.csv"),
    ]
    history = model.fit(*points(40), epochs=0, validation_split=0.2, callbacks=callbacks)
    assert (history.epochs, history.history, model.step) == ([], {}, 0)
    assert all(np.array_equal(one, two) for one, two in zip(before, model.copy_weights(), strict=True))
    assert capsys.readouterr().out == ""


def test_trainers_that_cannot_be_made() -> None:
    graph = classifier()
    for arguments, error, message in (
        ({}, mlc.DataError, r"(?s)loss is None.*softmax_cross_entropy"),
        ({"loss": "mean"}, mlc.DataError, "loss is 'mean'"),
        ({"loss": ["mse", "mse"]}, mlc.DataError, r"of several outputs: \{output: loss, \.\.\.\}"),
        ({"loss": {"scores": "mse"}, "loss_weights": [1.0]}, TypeError, "loss_weights must be a dictionary"),
        ({"loss": "mse", "optimizer": "adams"}, mlc.DataError, r"(?s)optimizer is 'adams'.*adamw"),
        ({"loss": "mse", "metrics": ["kappa"]}, mlc.DataError, "no metric named 'kappa'"),
        ({"loss": "mse", "metrics": "accuracy"}, TypeError, r"metrics must be a list, \['accuracy'\], not 'accuracy'"),
        (
            {"loss": "softmax_cross_entropy", "metrics": {"right": [lambda p, y: 1.0]}},
            mlc.DataError,
            r"(?s)'right' is not the name of the output.*Mean\(function, name\)",
        ),
        (
            {"loss": {"head": "mse", "hidden": "mse"}, "metrics": {"head": "mae"}},
            TypeError,
            r"metrics of 'head' must be a list, \['mae'\]",
        ),
        (
            {"loss": {"head": "mse", "hidden": "mse"}, "metrics": {"haed": ["mae"]}},
            mlc.DataError,
            r"(?s)no output 'haed'.*fix      did you mean 'head'\?",
        ),
        (
            {"loss": "mse", "learning_rate": mlc.schedules.Cosine()},
            TypeError,
            "learning_rate must be a number, not Cosine; a schedule is given to mlc.callbacks.LearningRateScheduler",
        ),
        ({"loss": "mse", "metrics": ["mse", "mse"]}, mlc.DataError, "share the name 'mse'"),
        ({"loss": "mse", "metrics": [3]}, TypeError, "a metric must be"),
        (
            {
                "loss": "mse",
                "optimizer": mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=1)),
                "learning_rate": 1,
            },
            mlc.DataError,
            "the optimizer has its learning rate",
        ),
    ):
        with pytest.raises(error, match=message):
            mlc.Trainer(graph, **arguments)  # type: ignore[arg-type]
    with pytest.raises(mlc.GraphError, match="the graph has no layers"):
        mlc.Trainer(mlc.Graph(), loss="mse")
    with pytest.raises(TypeError, match="needs a Graph or a TrainingGraph, not int"):
        mlc.Trainer(3)  # type: ignore[arg-type]
    with pytest.raises(mlc.GraphError, match="no inputs"):
        mlc.Trainer(mlc.TrainingGraph())
    training = mlc.TrainingGraph([graph])
    training.add_inputs({"x": graph.source_tensors(graph.layer("hidden"))[0]})
    with pytest.raises(mlc.GraphError, match="has no loss"):
        mlc.Trainer(training)
    with pytest.raises(mlc.GraphError, match="has its loss"):
        mlc.Trainer(training, loss="mse")
    lossy = mlc.Graph()
    x, t = lossy.input((2, 3), "x"), lossy.input((2, 3), "t")
    lossy.loss(x, t, "mse")
    with pytest.raises(mlc.GraphError, match="the graph has its own loss"):
        mlc.Trainer(lossy, loss="mse")


def test_a_step_costs_little_beside_executing_it() -> None:
    """Counted in calls of functions, which no other work on the machine changes: fit against execute alone."""
    batch, model = 4, trainer(4, metrics=())
    options = mlc.ExecutionOptions.SYNCHRONOUS

    def fit(steps: int) -> None:
        model.fit(np.zeros((steps * batch, 4), np.float32), np.zeros((steps * batch, 3), np.float32), verbose=0)

    def execute(steps: int) -> None:
        x, y = np.zeros((batch, 4), np.float32), np.zeros((batch, 3), np.float32)
        for _ in range(steps):
            model.training.execute({"x": x}, {"labels": y}, batch_size=batch, options=options)

    def calls(work: Callable[[int], None], steps: int) -> int:
        count = 0

        def note(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            work(steps)
        finally:
            sys.setprofile(None)
        return count

    fit(2)
    execute(2)
    # The least of several: whoever waits for a GPU asks more than once.
    many, few = ([min(calls(work, steps) for _ in range(3)) for work in (fit, execute)] for steps in (60, 20))
    extra = [(most - least) / 40 for most, least in zip(many, few, strict=True)]
    # About 70: 17 microseconds on an ordinary machine. About 90 where a device on another thread is waited for.
    assert extra[0] - extra[1] < 120, extra


def test_one_run_at_a_time() -> None:
    class Nested(mlc.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            self.trainer.fit(*points(), verbose=0)

    model = trainer()
    with pytest.raises(mlc.ExecutionError, match=r"(?s)is training already.*trainer\.training"):
        model.fit(*points(), callbacks=[Nested()], verbose=0)
    begun, ends, refused = threading.Event(), threading.Event(), []

    class Waits(mlc.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any) -> None:
            begun.set()
            assert ends.wait(60)

    running = threading.Thread(target=lambda: model.fit(*points(), callbacks=[Waits()], verbose=0))
    running.start()
    assert begun.wait(60)
    try:
        model.fit(*points(), verbose=0)
    except mlc.ExecutionError as error:
        refused.append(error)
    ends.set()
    running.join()
    assert len(refused) == 1
    assert len(model.history.epochs) == 1


def test_stopping_as_in_keras_is_written_down() -> None:
    class Stops(mlc.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            self.trainer.stop_training = True

    assert trainer().fit(*points(), epochs=5, callbacks=[Stops()], verbose=0).stopped == "stop_training"


def test_arrays_for_other_parameters_are_refused_before_any_is_written() -> None:
    model = trainer()
    before = model.copy_parameters()
    with pytest.raises(mlc.DataError, match=r"(?s)array of shape \(1, 3\) for 'head\.biases'.*\(3,\)"):
        model.set_parameters([np.zeros_like(array) for array in before[:-1]] + [np.zeros((1, 3))])
    assert_same(model.copy_parameters(), before)


def test_weights_of_another_type_change_none() -> None:
    model = trainer()
    before = model.copy_weights()
    with pytest.raises(mlc.DataError, match="data of type <U"):
        model.set_weights([*(array + 1 for array in before[:-1]), np.full(before[-1].shape, "a")])
    for one, other in zip(before, model.copy_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("odd", "shown"), [(np.nan, "nan"), (0.5, "0.5")])
def test_labels_that_are_no_whole_numbers_are_not_to_be_cut(odd: float, shown: str) -> None:
    x, y = points(40)
    labels = y.astype(np.float64)
    labels[3] = odd
    with pytest.raises(mlc.DataError, match=f"must be whole numbers, and one is {shown}"):
        trainer().fit(x, labels, verbose=0)


def test_columns_of_a_history() -> None:
    """`"val_loss" in history` and loops over names, as people write them about dictionaries."""
    model = trainer()
    history = model.fit(*points(32), verbose=0)
    assert "loss" in history
    assert "val_loss" not in history
    assert list(history) == list(history.history)
    assert {name: history[name] for name in history} == history.history
    assert "loss" not in mlc.History()
    assert list(mlc.History()) == []
