"""Ordinary programs that once trained, kept or reported something other than what they say."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mlcompute as mlc
from tests.trainer.nets import assert_same, everything, points
from tests.trainer.nets import trainer as trainer_on

X, Y = points()
HOT = np.eye(3, dtype=np.float32)[Y]


def trainer(device: mlc.Device, **options: Any) -> mlc.Trainer:
    return trainer_on(device=device, **options)


# What was validated is what is kept ----------------------------------------------------------------------------------


class Keep(mlc.callbacks.Callback):
    """The averages and the trained weights after every epoch."""

    def __init__(self, average: mlc.callbacks.ExponentialMovingAverage) -> None:
        self.average = average
        self.averages: list[list[np.ndarray]] = []
        self.trained: list[list[np.ndarray]] = []

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        self.averages.append([array.copy() for array in self.average.averages])
        self.trained.append(self.trainer.copy_parameters())


class Scores(mlc.callbacks.Callback):
    """Best in the second of four epochs."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        logs[self.name] = [3.0, 1.0, 2.0, 4.0][epoch]


@pytest.mark.parametrize("average_comes_first", [True, False])
@pytest.mark.parametrize("monitor", ["val_loss", "loss"])
def test_early_stopping_restores_the_weights_it_judged(
    monitor: str, average_comes_first: bool, device: mlc.Device
) -> None:
    model, average = trainer(device), mlc.callbacks.ExponentialMovingAverage(0.9)
    keep = Keep(average)
    stopping = mlc.callbacks.EarlyStopping(monitor, patience=4, restore_best_weights=True)
    others = [average, stopping] if average_comes_first else [stopping, average]
    callbacks = [Scores(monitor), keep, *others]
    model.fit(X, Y, epochs=4, validation=(X, Y), callbacks=callbacks, verbose=0)
    assert stopping.best_epoch == 1
    assert_same(model.copy_parameters(), (keep.averages if monitor == "val_loss" else keep.trained)[1])


@pytest.mark.parametrize("monitor", ["val_loss", "loss"])
def test_the_best_checkpoint_holds_the_weights_that_were_judged(
    monitor: str, device: mlc.Device, tmp_path: Path
) -> None:
    model, average, best = trainer(device), mlc.callbacks.ExponentialMovingAverage(0.9), tmp_path / "best"
    keep = Keep(average)
    checkpoint = mlc.callbacks.ModelCheckpoint(best, monitor, save_best_only=True)
    model.fit(X, Y, epochs=4, validation=(X, Y), callbacks=[Scores(monitor), average, keep, checkpoint], verbose=0)
    loaded = mlc.Trainer(mlc.load(best, device=device))
    assert_same(loaded.copy_parameters(), (keep.averages if monitor == "val_loss" else keep.trained)[1])
    arrays = mlc.Checkpoint(best).arrays
    names = [f"trained weights/{model.parameter_names[tensor]}" for tensor in model.parameters]
    if monitor == "val_loss":
        assert_same([arrays[name] for name in names], keep.trained[1])
    assert "trained weights/hidden.weights" in names
    assert all((name in arrays) == (monitor == "val_loss") for name in names)


def test_the_reported_score_is_that_of_the_saved_weights(device: mlc.Device, tmp_path: Path) -> None:
    model, best = trainer(device), tmp_path / "best"
    callbacks = [
        mlc.callbacks.ExponentialMovingAverage(0.9),
        mlc.callbacks.ModelCheckpoint(best, save_best_only=True),
    ]
    history = model.fit(X, Y, epochs=3, validation=(X, Y), callbacks=callbacks, verbose=0)
    loaded = mlc.Trainer(mlc.load(best, device=device), metrics=["accuracy"])
    assert loaded.evaluate(X, Y)["loss"] == min(history["val_loss"])


@pytest.mark.parametrize("ends", ["at the end", "in a checkpoint"])
def test_resuming_goes_on_with_the_weights_being_trained(ends: str, device: mlc.Device, tmp_path: Path) -> None:
    def callbacks() -> list[mlc.callbacks.Callback]:
        return [
            mlc.callbacks.ExponentialMovingAverage(0.9),
            mlc.callbacks.EarlyStopping(patience=9, restore_best_weights=True),
            mlc.callbacks.ModelCheckpoint(tmp_path / "in a checkpoint"),
        ]

    options: dict[str, Any] = {"validation": (X, Y), "verbose": 0}
    whole = trainer(device)
    history = whole.fit(X, Y, epochs=4, callbacks=callbacks(), **options)
    model = trainer(device)
    model.fit(X, Y, epochs=2, callbacks=callbacks(), **options)
    model.save(tmp_path / "at the end")
    resumed = model.fit(X, Y, epochs=4, callbacks=callbacks(), resume=tmp_path / ends, **options)
    assert resumed == history
    assert_same(everything(model), everything(whole))


def test_weights_set_after_a_run_are_what_is_saved(device: mlc.Device, tmp_path: Path) -> None:
    model = trainer(device)
    model.fit(X, Y, callbacks=[mlc.callbacks.ExponentialMovingAverage(0.9)], verbose=0)
    model.set_parameters([np.full_like(array, 0.25) for array in model.copy_parameters()])
    model.save(tmp_path / "run")
    assert not any(name.startswith("trained weights") for name in mlc.Checkpoint(tmp_path / "run").arrays)


# The learning rate ---------------------------------------------------------------------------------------------------


def decays(kind: str) -> list[mlc.callbacks.Callback]:
    return {
        "schedule": [mlc.callbacks.LearningRateScheduler(mlc.schedules.Step(1, 0.5))],
        "function": [mlc.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2 if epoch else rate)],
        "plateau": [mlc.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e9)],
    }[kind]


@pytest.mark.parametrize("kind", ["schedule", "function", "plateau"])
def test_a_second_fit_begins_with_the_same_rate(kind: str, device: mlc.Device, tmp_path: Path) -> None:
    model = trainer(device)
    first = model.fit(X, Y, epochs=3, callbacks=decays(kind), verbose=0)["learning_rate"]
    assert model.learning_rate == 0.01 > first[-1]
    model.save(tmp_path / "run")
    assert model.fit(X, Y, epochs=3, callbacks=decays(kind), verbose=0)["learning_rate"] == first
    model.learning_rate = 0.5
    assert model.fit(X, Y, epochs=2, callbacks=decays(kind), verbose=0)["learning_rate"][0] == pytest.approx(0.5)
    # A run that goes on goes on with the rate it had, and ends where an unbroken one does.
    resumed = model.fit(X, Y, epochs=4, callbacks=decays(kind), resume=tmp_path / "run", verbose=0)
    model.learning_rate = 0.01
    assert resumed["learning_rate"] == model.fit(X, Y, epochs=4, callbacks=decays(kind), verbose=0)["learning_rate"]


def test_a_run_that_fails_gives_the_rate_back(device: mlc.Device) -> None:
    class Fails(mlc.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            self.trainer.learning_rate = 7.0
            raise RuntimeError

    model = trainer(device)
    with pytest.raises(RuntimeError):
        model.fit(X, Y, callbacks=[Fails()], verbose=0)
    assert model.learning_rate == 0.01


# Gradients to look at ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_that_cannot_be_changed_say_so(accumulate: int, device: mlc.Device) -> None:
    class Clips(mlc.callbacks.Callback):
        def wants_gradients(self, step: int) -> bool:
            return True

        def on_gradients(self, step: int, gradients: Mapping[mlc.Tensor, np.ndarray]) -> None:
            for gradient in gradients.values():
                gradient *= 0

    with pytest.raises(ValueError, match="read-only"):
        trainer(device).fit(X, Y, accumulate=accumulate, callbacks=[Clips()], verbose=0)
    watch = mlc.callbacks.GradientWatch(every=1)
    assert trainer(device).fit(X, Y, accumulate=accumulate, callbacks=[watch], verbose=0).gradient_norms["total"]


# Autoencoders --------------------------------------------------------------------------------------------------------


def autoencoder(device: mlc.Device, **options: Any) -> mlc.Trainer:
    mlc.Platform.set_rng_seed_to(0)
    graph = mlc.Graph()
    x = graph.input((16, 4), "x")
    graph.loss(graph.dense(graph.dense(x, 2, activation="tanh", name="code"), 4, name="decode"), x, "mse")
    return mlc.Trainer(graph, learning_rate=0.05, device=device, **options)


def test_an_autoencoder_compares_with_its_input(device: mlc.Device) -> None:
    model = autoencoder(device, metrics=["mse"])
    history = model.fit(X, epochs=3, validation=X, verbose=0)
    assert history["mse"][-1] == pytest.approx(history["loss"][-1], rel=1e-5)
    error = float(np.mean((model.predict(X) - X) ** 2))
    assert model.evaluate(X)["loss"] == pytest.approx(error, rel=1e-5)
    again = autoencoder(device)
    again.fit(X, X, epochs=3, verbose=0)
    assert_same(again.copy_parameters(), model.copy_parameters())
    streamed = autoencoder(device)
    streamed.fit([(X[i : i + 16], X[i : i + 16]) for i in range(0, 70, 16)], verbose=0)


def test_a_target_for_an_input_is_refused(device: mlc.Device) -> None:
    model = autoencoder(device)
    message = r"(?s)the loss compares with the input 'x' itself.*leave y out.*tensor of its own"
    with pytest.raises(mlc.DataError, match=message):
        model.fit(X + 1, X, verbose=0)
    with pytest.raises(mlc.DataError, match=message):
        model.evaluate([(X[:16] + 1, X[:16])])


def test_one_tensor_is_not_fed_twice(device: mlc.Device) -> None:
    graph = mlc.Graph()
    x = graph.input((16, 4), "x")
    graph.dense(x, 4)
    loss = mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN)
    training = mlc.TrainingGraph([graph], loss, mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=0.1)))
    training.add_inputs({"x": x}, {"y": x})
    training.compile(device=device)
    for _ in range(3):
        training.execute({"x": X[:16]}, {"y": X[:16]}).wait()
    with pytest.raises(mlc.DataError, match=r"(?s)'y' in loss_labels_data is a tensor.*tensor of its own"):
        training.execute({"x": X[:16] + 1}, {"y": X[:16]})
    history = mlc.Trainer(training).fit(X, epochs=2, verbose=0)
    assert history["loss"][1] < history["loss"][0]


def test_metrics_want_labels_that_are_fed(device: mlc.Device) -> None:
    graph = mlc.Graph()
    x = graph.input((16, 4), "x")
    graph.loss(graph.dense(x, 4, name="student"), graph.dense(x, 4, name="teacher"), "mse")
    with pytest.raises(mlc.GraphError, match="metrics need labels that are fed"):
        mlc.Trainer(graph, metrics=["mse"], device=device)


# Data ----------------------------------------------------------------------------------------------------------------


class Numbers(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Samples nobody knows the number of."""

    def __iter__(self) -> Any:
        return iter([(torch.tensor(x), torch.tensor(y)) for x, y in zip(X, Y, strict=True)])


def test_a_loader_without_a_length(device: mlc.Device) -> None:
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=16)
    with pytest.raises(TypeError):
        len(loader)
    model, other = trainer(device), trainer(device)
    history = model.fit(loader, epochs=2, validation=loader, verbose=0)
    assert history == other.fit(X, Y, epochs=2, shuffle=False, validation=(X, Y), verbose=0)
    assert model.predict(loader).shape == (70, 3)


# Accuracy ------------------------------------------------------------------------------------------------------------


def tagger(device: mlc.Device, loss: str, activation: str | None = None, outputs: int = 5, **options: Any) -> Any:
    mlc.Platform.set_rng_seed_to(0)
    graph = mlc.Graph()
    y = graph.dense(graph.input((16, 4), "x"), outputs)
    if activation == "softmax":
        graph.softmax(y)
    elif activation is not None:
        graph.activation(y, activation)
    return mlc.Trainer(graph, loss=loss, device=device, **options)


@pytest.mark.parametrize(
    ("loss", "activation", "border"), [("sigmoid_cross_entropy", None, 0), ("log", "sigmoid", 0.5)]
)
def test_several_labels_per_sample(loss: str, activation: str | None, border: float, device: mlc.Device) -> None:
    tags = np.random.default_rng(0).random((70, 5)) > 0.4
    model = tagger(device, loss, activation, metrics=["accuracy"])
    model.fit(X, tags.astype(np.float32), epochs=2, verbose=0)
    found = model.evaluate(X, tags.astype(np.float32))["accuracy"]
    assert found == pytest.approx(((model.predict(X) > border) == tags).mean())


def test_accuracy_of_what_nobody_can_know_is_refused(device: mlc.Device) -> None:
    for activation in (None, "sigmoid"):
        with pytest.raises(mlc.DataError, match=r"(?s)metric 'accuracy' of .*\(16, 5\).*'categorical_accuracy'.*'mae'"):
            tagger(device, "mse", activation, metrics=["accuracy"])
    classes = np.arange(70) % 5
    for options in ({"activation": "softmax", "metrics": ["accuracy"]}, {"metrics": ["categorical_accuracy"]}):
        model = tagger(device, "mse", **options)
        expected = (model.predict(X).argmax(1) == classes).mean()
        assert model.evaluate(X, np.eye(5)[classes])[options["metrics"][0]] == pytest.approx(expected)
    model = tagger(device, "mse", "sigmoid", metrics=["binary_accuracy"])
    expected = ((model.predict(X) > 0.5) == np.eye(5)[classes]).mean()
    assert model.evaluate(X, np.eye(5)[classes])["binary_accuracy"] == pytest.approx(expected)


def test_accuracy_of_numbers_is_refused(device: mlc.Device) -> None:
    model = tagger(device, "mse", outputs=1, metrics=["accuracy"])
    with pytest.raises(mlc.DataError, match=r"(?s)metric 'accuracy': labels go from \d+ to \d+.*'mae'"):
        model.fit(X, np.arange(1, 71.0), verbose=0)


@pytest.mark.parametrize("metric", ["categorical_accuracy", "top_2_accuracy"])
def test_one_class_among_several_labels_is_refused(metric: str, device: mlc.Device) -> None:
    model = tagger(device, "sigmoid_cross_entropy", metrics=[metric])
    with pytest.raises(mlc.DataError, match=r"(?s)a sample has 5 classes.*'binary_accuracy'"):
        model.evaluate(X, np.ones((70, 5), np.float32))


# NaN -----------------------------------------------------------------------------------------------------------------


def test_nan_in_the_data_is_said_once(device: mlc.Device) -> None:
    x = X.copy()
    x[40, 2] = np.nan
    with pytest.warns(
        UserWarning, match=r"(?s)loss of step \d is nan: input 'x' holds NaN in 1 of .*Terminate"
    ) as said:
        trainer(device).fit(x, Y, epochs=3, verbose=0)
    assert len(said) == 1
    assert said[0].filename == __file__


def test_the_first_bad_layer_is_named(device: mlc.Device) -> None:
    mlc.Platform.set_rng_seed_to(0)
    graph = mlc.Graph()
    h = graph.dense(graph.input((16, 4), "x"), 3, name="hidden")
    logarithm = mlc.ArithmeticLayer(mlc.ArithmeticOperation.LOG)
    logarithm.label = "logarithm"
    graph.dense(graph.node(logarithm, source=h), 3)
    model = mlc.Trainer(graph, loss="softmax_cross_entropy", device=device)
    with pytest.warns(UserWarning, match="loss of step 1 is nan: layer 'logarithm', forward pass: 'log' gives NaN"):
        model.fit(X, Y, verbose=0)


@pytest.mark.filterwarnings("ignore:.*is it meant:UserWarning")
def test_weights_that_overflow(device: mlc.Device) -> None:
    model = trainer(device, loss="mse", metrics=[], optimizer="sgd", learning_rate=90.0)
    with pytest.warns(UserWarning, match=r"(?s)is inf: layer .* infinity in .* lower learning rate"):
        model.fit(X, HOT, epochs=20, verbose=0)
    rescaled = mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=90.0, gradient_rescale=3e38))
    one_step = trainer(device, loss="mse", metrics=[], optimizer=rescaled, learning_rate=None)
    with pytest.warns(UserWarning, match=r"after the last step \d of 4 weights hold NaN or infinity"):
        one_step.fit(X[:16], HOT[:16], verbose=0)


def test_nan_in_validation_data(device: mlc.Device) -> None:
    x = X.copy()
    x[3] = np.nan
    with pytest.warns(UserWarning, match="validation loss of epoch 1 is nan: the weights are finite, so look at the"):
        trainer(device).fit(X, Y, epochs=2, validation=(x, Y), verbose=0)


def test_a_sigmoid_before_a_loss_that_has_its_own_is_warned_about(device: mlc.Device) -> None:
    with pytest.warns(UserWarning, match="the sigmoid is taken twice. Remove the sigmoid layer, or use a log loss"):
        tagger(device, "sigmoid_cross_entropy", "sigmoid")


@pytest.mark.parametrize(("loss", "function"), [("categorical_cross_entropy", "softmax"), ("log", "sigmoid")])
def test_probabilities_that_are_any_numbers_are_warned_about(loss: str, function: str, device: mlc.Device) -> None:
    with pytest.warns(UserWarning, match=f"numbers of any size. Add a {function} layer, or use a {function} cross"):
        tagger(device, loss, None)


def test_a_cosine_of_vectors_of_any_length_is_warned_about(device: mlc.Device) -> None:
    """The loss is 1 - sum(y t), as in ML Compute, and can be made as small as one likes by longer vectors."""
    graph = mlc.Graph()
    y = graph.dense(graph.input((16, 4), "x"), 3)
    with pytest.warns(UserWarning, match=r"vectors of any length.*1 - graph\.cosine_similarity\(y, labels\)"):
        mlc.Trainer(graph, loss="cosine_distance", device=device).evaluate(X, np.eye(3)[Y])
    graph = mlc.Graph()
    y = graph.dense(graph.input((16, 4), "x"), 3)
    unit = y / (y * y).sum(1, keepdims=True).sqrt()
    trained = mlc.Trainer(graph, loss="cosine_distance", device=device)
    found = trained.evaluate(X, np.eye(3)[Y])["loss"]
    assert unit.shape == (16, 3)
    assert found == pytest.approx(1 - trained.predict(X)[np.arange(len(Y)), Y].mean(), rel=1e-5)
    assert 0 <= found <= 2


def test_training_nothing_is_warned_about(device: mlc.Device) -> None:
    graph = mlc.Graph()
    graph.dense(graph.input((16, 4), "x"), 3)
    graph.freeze("*")
    frozen = mlc.Trainer(graph, loss="softmax_cross_entropy", device=device)
    with pytest.warns(UserWarning, match="no parameter is updated, so nothing is learned"):
        frozen.fit(X, Y, verbose=0)


def test_a_graph_that_grows_behind_the_trainer_is_refused(device: mlc.Device) -> None:
    graph = mlc.Graph()
    scores = graph.dense(graph.input((16, 4), "x"), 3)
    first = mlc.Trainer(graph, loss="softmax_cross_entropy", device=device)
    first.fit(X, Y, verbose=0)
    graph.dense(scores, 3)
    for use in (lambda: first.fit(X, Y, verbose=0), lambda: first.evaluate(X, Y)):
        with pytest.raises(mlc.GraphError, match="layers were added to the graph since the trainer was made"):
            use()
    mlc.Trainer(graph, loss="softmax_cross_entropy", device=device).fit(X, Y, verbose=0)


def test_a_choice_of_one_class_is_warned_about(device: mlc.Device) -> None:
    """One output, yes or no, and a loss over classes: the softmax of one number is 1."""
    graph = mlc.Graph()
    graph.dense(graph.input((16, 4), "x"), 1)
    with pytest.warns(
        UserWarning, match=r"has one: the loss is always 0, and nothing is learned.*sigmoid cross entropy"
    ):
        mlc.Trainer(graph, loss="softmax_cross_entropy", device=device)


@pytest.mark.parametrize("loss", ["sigmoid_cross_entropy", "log", "categorical_cross_entropy"])
def test_labels_a_cross_entropy_cannot_reach(loss: str, device: mlc.Device) -> None:
    model = tagger(device, loss, {"log": "sigmoid", "categorical_cross_entropy": "softmax"}.get(loss))
    signs = np.where(np.random.default_rng(0).random((70, 5)) > 0.5, 1.0, -1.0).astype(np.float32)
    with pytest.raises(mlc.DataError, match=r"(?s)'labels' goes from -1 to 1.*0 for no and 1 for yes.*'mse'"):
        model.fit(X, signs, verbose=0)
    model.fit(X, (signs > 0).astype(np.float32), verbose=0)


# What hurried people write -------------------------------------------------------------------------------------------


def batches() -> Any:
    for first in range(0, 64, 16):
        yield X[first : first + 16], Y[first : first + 16]


def test_every_fit_shuffles_anew(device: mlc.Device, tmp_path: Path) -> None:
    """`for epoch in range(3): trainer.fit(x, y)` goes through the samples in three orders."""

    class Orders(mlc.callbacks.Callback):
        def __init__(self) -> None:
            self.seen: list[np.ndarray] = []

        def on_train_batch_begin(self, batch: int, logs: Any) -> None:
            if batch == 0:
                self.seen.append(self.trainer.batches[0].inputs["x"].copy())

    model, orders = trainer(device), Orders()
    for _ in range(3):
        model.fit(X, Y, callbacks=[orders], verbose=0)
    model.save(tmp_path / "run")
    model.fit(X, Y, shuffle_seed=2, callbacks=[orders], verbose=0)  # that of the third
    first, second, third, again = orders.seen
    assert not np.array_equal(first, second)
    assert not np.array_equal(second, third)
    assert np.array_equal(third, again)
    resumed, whole = Orders(), Orders()
    trainer(device).fit(X, Y, epochs=2, callbacks=[resumed], resume=tmp_path / "run", verbose=0)
    trainer(device).fit(X, Y, epochs=2, shuffle_seed=2, callbacks=[whole], verbose=0)
    assert np.array_equal(resumed.seen[0], whole.seen[1]), "a run that goes on has the orders it would have had"


def test_a_generator_function_gives_every_epoch(device: mlc.Device) -> None:
    model, other = trainer(device), trainer(device)
    assert model.fit(batches, epochs=2, verbose=0) == other.fit(lambda epoch: batches(), epochs=2, verbose=0)


class Pairs(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A dataset that gives samples by number."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, number: int) -> Any:
        return X[number], Y[number]


HASTY: dict[str, tuple[Any, str]] = {
    "weights of zero": (lambda m: m.fit(X, Y, sample_weight=np.zeros(70)), "all weights of 'sample_weight' are 0"),
    "masked elements": (lambda m: m.fit(np.ma.array(X, mask=X > 0), Y), r"(?s)132 elements are masked.*filled"),
    "samples by number and labels": (lambda m: m.fit(Pairs(), Y), r"Pairs gives samples by number, and y beside it"),
    "a share for validation": (lambda m: m.fit(X, Y, validation=0.2), r"(?s)validation is 0.2.*validation_split"),
}


@pytest.mark.parametrize("name", HASTY)
def test_what_cannot_be_meant_is_refused(name: str, device: mlc.Device) -> None:
    call, message = HASTY[name]
    with pytest.raises(mlc.DataError, match=message):
        call(trainer(device))


def test_one_batch_of_a_stream_may_weigh_nothing(device: mlc.Device) -> None:
    model = trainer(device)
    model.fit(X, Y, sample_weight=np.ones(70), verbose=0)
    model.fit([(X[:16], Y[:16], np.zeros(16)), (X[:16], Y[:16], np.ones(16))], verbose=0)


def test_numbers_that_do_not_fit_are_not_wrapped(device: mlc.Device) -> None:
    graph = mlc.Graph()
    ids = graph.input((16, 5), "ids", data_type=mlc.DataType.INT32)
    graph.dense(graph.flatten(graph.embedding(ids, 10, 4)), 3)
    model = mlc.Trainer(graph, loss="softmax_cross_entropy", device=device)
    words = np.random.default_rng(0).integers(0, 10, (70, 5))
    model.fit(words, Y, verbose=0)
    with pytest.raises(mlc.DataError, match="'ids': numbers from 4294967296 to 4294967305 do not fit into a int32"):
        model.fit(words + 2**32, Y, verbose=0)


def test_callbacks_do_not_write_into_the_data(device: mlc.Device) -> None:
    class Zero(mlc.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any) -> None:
            self.trainer.batches[0].inputs["x"][:] = 0

    x = X.copy()
    with pytest.raises(ValueError, match="read-only"):
        trainer(device).fit(x, Y, shuffle=False, callbacks=[Zero()], verbose=0)
    np.testing.assert_array_equal(x, X)
    assert x.flags.writeable


def test_hooks_that_are_never_called_are_named(device: mlc.Device) -> None:
    class Old(mlc.callbacks.Callback):
        def on_batch_end(self, batch: int, logs: Any) -> None: ...

    with pytest.raises(TypeError, match=r"Old\.on_batch_end is never called; the hook is on_train_batch_end"):
        trainer(device).fit(X, Y, callbacks=[Old()], verbose=0)
    with pytest.raises(TypeError, match=r"must be an object, not the class: EarlyStopping\(\)"):
        trainer(device).fit(X, Y, callbacks=[mlc.callbacks.EarlyStopping], verbose=0)  # type: ignore[list-item]


def test_keras_calls_the_trainer_of_a_callback_its_model(device: mlc.Device) -> None:
    class Keras(mlc.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            self.model.stop_training = True  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match=r"'Keras' object has no attribute 'model': use self\.trainer"):
        trainer(device).fit(X, Y, callbacks=[Keras()], verbose=0)
    with pytest.raises(AttributeError, match="'trainer': it is set when training begins"):
        Keras().trainer  # noqa: B018
    assert copy.copy(Keras()) is not None


def test_one_metric_in_two_trainers(device: mlc.Device) -> None:
    shared = [mlc.metrics.Accuracy()]
    tagger(device, "sigmoid_cross_entropy", metrics=shared)
    found = trainer(device, metrics=shared).evaluate(X, Y)
    assert found == trainer(device).evaluate(X, Y)


@pytest.mark.parametrize("name", ["val_lift", "kappa", "score"])
def test_what_is_to_rise_must_be_said(name: str) -> None:
    with pytest.raises(mlc.DataError, match=rf"is '{name}' to rise or to fall"):
        mlc.callbacks.EarlyStopping(name)
    assert mlc.callbacks.EarlyStopping(name, mode="max").is_better(1.0)


def test_hinge_wants_labels_of_0_and_1(device: mlc.Device) -> None:
    model = tagger(device, "hinge", outputs=1, metrics=["accuracy"])
    model.fit(X, Y > 0, verbose=0)
    with pytest.raises(mlc.DataError, match="'labels' goes from -1 to 1"):
        model.fit(X, np.where(Y > 0, 1, -1), verbose=0)
