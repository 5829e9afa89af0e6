"""Callbacks, one by one."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from tests.trainer.nets import assert_same, points, trainer


class Scripted(mlc.callbacks.Callback):
    """Puts numbers of one's own into the logs."""

    def __init__(self, **columns: list[float]) -> None:
        self.columns = columns

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        for name, values in self.columns.items():
            logs[name] = values[epoch]


@pytest.fixture(scope="module")
def model() -> mlc.Trainer:
    return trainer()


def fit(model: mlc.Trainer, *callbacks: mlc.callbacks.Callback, epochs: int = 6, **options: Any) -> mlc.History:
    return model.fit(*points(), epochs=epochs, callbacks=callbacks, verbose=0, **options)


def test_early_stopping(model: mlc.Trainer) -> None:
    stopping = mlc.callbacks.EarlyStopping("score", mode="min", patience=2)
    history = fit(model, Scripted(score=[3, 2, 2.5, 2.2, 1, 0]), stopping)
    assert len(history.epochs) == 4
    assert (stopping.best, stopping.best_epoch, stopping.stopped_epoch) == (2, 1, 3)
    assert history.stopped == "EarlyStopping"
    rising = mlc.callbacks.EarlyStopping("score", patience=2, mode="max", min_delta=0.5)
    assert len(fit(model, Scripted(score=[1, 1.2, 2, 2.1, 2.2, 9]), rising).epochs) == 5
    late = mlc.callbacks.EarlyStopping("score", mode="min", patience=1, start_from_epoch=3)
    assert len(fit(model, Scripted(score=[1, 2, 3, 4, 5, 6]), late).epochs) == 5
    hopeless = mlc.callbacks.EarlyStopping("score", mode="min", patience=2, baseline=0.5)
    assert len(fit(model, Scripted(score=[9, 8, 7, 6, 5, 4]), hopeless).epochs) == 2


def test_early_stopping_puts_the_best_weights_back(model: mlc.Trainer) -> None:
    class Keep(mlc.callbacks.Callback):
        def __init__(self) -> None:
            self.weights: list[list[np.ndarray]] = []

        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            self.weights.append(self.trainer.copy_weights())

    keep = Keep()
    fit(
        model,
        Scripted(score=[3, 2, 2.5, 2.2, 9, 9]),
        keep,
        mlc.callbacks.EarlyStopping("score", mode="min", patience=2, restore_best_weights=True),
    )
    assert_same(model.copy_weights(), keep.weights[1])


def test_what_is_not_in_the_logs_is_named(model: mlc.Trainer) -> None:
    with pytest.raises(mlc.DataError, match=r"(?s)EarlyStopping: there is no 'val_loss' in the logs.*validation"):
        fit(model, mlc.callbacks.EarlyStopping())
    fresh = trainer()
    with pytest.raises(mlc.DataError, match="ReduceLROnPlateau: there is no 'val_loss' in the logs"):
        fit(fresh, mlc.callbacks.ReduceLROnPlateau())
    assert fresh.step == 0  # refused before the first epoch, and not after it
    with pytest.raises(mlc.DataError, match="ModelCheckpoint: there is no 'val_loss' in the logs"):
        fit(model, mlc.callbacks.ModelCheckpoint("best", save_best_only=True))
    with pytest.raises(mlc.DataError, match="validation: the data has no labels"):
        model.fit(*points(20), validation=points(20)[0], verbose=0)
    x, y = points(20)
    for callback, says in (
        (mlc.callbacks.EarlyStopping("val_acc"), "no 'val_acc' in the logs(?s:.)*did you mean 'val_accuracy'"),
        (mlc.callbacks.ReduceLROnPlateau("mae"), "no 'mae' in the logs(?s:.)*monitor one of these"),
        (mlc.callbacks.ModelCheckpoint("{epoch}-{val_mae:.2f}.st"), "'val_mae'(?s:.)*epoch, loss, accuracy, val_loss"),
        (mlc.callbacks.ModelCheckpoint("{epoch:02d.st"), "cannot be filled in: unmatched"),
        (mlc.callbacks.ModelCheckpoint("{loss}.st", save_freq=2), r"cannot be filled in: 'loss'\n  expected  epoch$"),
    ):
        with pytest.raises(mlc.DataError, match=says):
            fresh.fit(x, y, validation=(x, y), callbacks=[callback], verbose=0)
    assert fresh.step == 0
    assert not fresh.history.epochs
    both = mlc.callbacks.EarlyStopping("val_f1_0"), mlc.callbacks.ReduceLROnPlateau("learning_rate", mode="min")
    scored = trainer(metrics=[mlc.metrics.F1(average=None)])  # names that only the data tells, and rates
    assert scored.fit(x, y, validation=(x, y), callbacks=[*both], epochs=2, verbose=0).epochs
    with pytest.raises(mlc.DataError, match="mode is 'least'"):
        mlc.callbacks.EarlyStopping(mode="least")


def test_a_history_says_what_it_has(model: mlc.Trainer) -> None:
    with pytest.raises(KeyError, match="there is no 'val_loss'; it has loss, accuracy, learning_rate"):
        fit(model)["val_loss"]
    with pytest.raises(KeyError, match="no epoch has ended"):
        model.fit(*points(20), epochs=0)["loss"]


def test_where_nothing_can_be_saved_is_said_before_training(tmp_path: Path) -> None:
    model = trainer()
    for path, says in ((tmp_path / "no" / "x.st", "there is no folder .*no"), (tmp_path, "is a folder")):
        with pytest.raises(mlc.DataError, match=f"checkpoint: .*{says}"):
            model.fit(*points(20), checkpoint=path, verbose=0)
        for callback in (mlc.callbacks.ModelCheckpoint(path), mlc.callbacks.CSVLogger(path)):
            with pytest.raises(mlc.DataError, match=f"{type(callback).__name__}: .*{says}"):
                model.fit(*points(20), callbacks=[callback], verbose=0)
    assert model.step == 0
    assert not any(tmp_path.iterdir())


def test_reduce_on_plateau(model: mlc.Trainer) -> None:
    model.learning_rate = 0.01
    plateau = mlc.callbacks.ReduceLROnPlateau("score", 0.5, 2, mode="min", cooldown=1, min_lr=0.003)
    history = fit(model, Scripted(score=[5, 5, 5, 5, 5, 5, 5, 5, 5]), plateau, epochs=9)
    assert history["learning_rate"] == pytest.approx([0.01] * 3 + [0.005] * 2 + [0.003] * 4)
    model.learning_rate = 0.01
    with pytest.raises(mlc.DataError, match="factor is 1"):
        mlc.callbacks.ReduceLROnPlateau(factor=1.0)


def test_schedulers(model: mlc.Trainer) -> None:
    model.learning_rate = 0.01
    history = fit(model, mlc.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2 if epoch else rate), epochs=3)
    assert history["learning_rate"] == [0.01, 0.005, 0.0025]
    seen = []

    class See(mlc.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any) -> None:
            seen.append(self.trainer.learning_rate)

    model.learning_rate = 0.01
    fit(model, mlc.callbacks.LearningRateScheduler(mlc.schedules.Cosine(steps=10)), See(), epochs=2)
    assert seen == pytest.approx([0.005 * (1 + np.cos(np.pi * step / 10)) for step in range(10)])
    model.learning_rate = 0.01
    keras = mlc.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
    assert fit(model, keras, epochs=2)["learning_rate"] == [0.1, 0.05]
    with pytest.raises(TypeError, match="LearningRateScheduler: the rate must be a number, not None"):
        fit(model, mlc.callbacks.LearningRateScheduler(lambda epoch: None))  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match="needs a Schedule or a function, not float"):
        mlc.callbacks.LearningRateScheduler(0.1)  # type: ignore[arg-type]


def test_model_checkpoint_keeps_the_best_and_the_last(model: mlc.Trainer, tmp_path: Path) -> None:
    kept: list[list[np.ndarray]] = []

    class Keep(mlc.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            kept.append(self.trainer.copy_weights())

    best, last = tmp_path / "best.safetensors", tmp_path / "last.safetensors"
    fit(
        model,
        Scripted(score=[3, 1, 2, 1.5, 4, 2]),
        Keep(),
        mlc.callbacks.ModelCheckpoint(best, "score", save_best_only=True, mode="min"),
        mlc.callbacks.ModelCheckpoint(last),
        mlc.callbacks.ModelCheckpoint(tmp_path / "{epoch:02d}-{score:.1f}"),
    )
    mlc.restore(model.training, best)
    assert_same(model.copy_weights(), kept[1])
    mlc.restore(model.training, last)
    assert_same(model.copy_weights(), kept[5])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "01-3.0", "02-1.0", "03-2.0", "04-1.5", "05-4.0", "06-2.0", "best.safetensors", "last.safetensors",
    ]  # fmt: skip
    progress: Any = mlc.Checkpoint(last).progress
    assert (progress["trainer"]["epoch"], progress["trainer"]["step"]) == (6, 30)
    with pytest.raises(mlc.DataError, match="cannot be filled in"):
        fit(model, mlc.callbacks.ModelCheckpoint(tmp_path / "{lost}"))
    with pytest.raises(mlc.DataError, match="save_freq is 0"):
        mlc.callbacks.ModelCheckpoint(tmp_path / "a", save_freq=0)


def test_a_saved_run_rebuilds_its_graph(tmp_path: Path) -> None:
    model = trainer(norm=True)
    x, y = points()
    model.fit(x, y, epochs=3, verbose=0)
    expected = model.evaluate(x, y)
    model.save(tmp_path / "run")
    again = mlc.Trainer(mlc.load(tmp_path / "run"), metrics=["accuracy"])  # type: ignore[arg-type]
    assert again.evaluate(x, y) == expected


def test_moving_average(model: mlc.Trainer) -> None:
    steps: list[list[np.ndarray]] = []

    class Keep(mlc.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            steps.append(self.trainer.copy_parameters())

    start = model.copy_parameters()
    average = mlc.callbacks.ExponentialMovingAverage(0.8)
    history = fit(model, Keep(), average, epochs=2, validation=points())
    expected = [array.astype(np.float64) for array in start]
    for weights in steps:
        expected = [0.8 * mean + 0.2 * array for mean, array in zip(expected, weights, strict=True)]
    for found, wanted in zip(model.copy_parameters(), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    assert model.evaluate(*points())["loss"] == history["val_loss"][-1], "validated with the averages"
    with pytest.raises(mlc.DataError, match="decay is 1"):
        mlc.callbacks.ExponentialMovingAverage(1.0)


def test_moving_average_on_the_side(model: mlc.Trainer) -> None:
    average = mlc.callbacks.ExponentialMovingAverage(0.8, validates=False, applies=False)
    history = fit(model, average, epochs=1, validation=points())
    assert model.evaluate(*points())["loss"] == history["val_loss"][-1]
    assert any(not np.array_equal(a, b) for a, b in zip(average.averages, model.copy_parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:.*learning_rate is 0")
def test_gradient_norms_against_finite_differences() -> None:
    x, y = points(16)
    model = trainer(16, optimizer="sgd", learning_rate=0.0)
    history = model.fit(x, y, shuffle=False, callbacks=[mlc.callbacks.GradientWatch(every=1)], verbose=0)
    start = [array.astype(np.float64) for array in model.copy_parameters()]

    def loss(weights: list[np.ndarray]) -> float:
        w1, b1, w2, b2 = weights
        logits = np.tanh(x @ w1.T + b1) @ w2.T + b2
        return float(np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(16), y]))

    squares = []
    for index, array in enumerate(start):
        slopes = []
        for place in np.ndindex(array.shape):
            moved = [[a.copy() for a in start] for _ in range(2)]
            moved[0][index][place] += 1e-5
            moved[1][index][place] -= 1e-5
            slopes.append((loss(moved[0]) - loss(moved[1])) / 2e-5)
        squares.append(np.square(slopes).sum())
    norms = {name: curve.values for name, curve in history.gradient_norms.items()}
    assert list(norms) == ["hidden", "head", "total"]
    assert norms["hidden"] == pytest.approx([np.sqrt(squares[0] + squares[1])], rel=1e-4)
    assert norms["head"] == pytest.approx([np.sqrt(squares[2] + squares[3])], rel=1e-4)
    assert norms["total"] == pytest.approx([np.sqrt(sum(squares))], rel=1e-4)


def test_watching_does_not_change_the_numbers() -> None:
    x, y = points()
    watched, plain = trainer(dropout=0.2), trainer(dropout=0.2)
    mlc.Platform.set_rng_seed_to(4)
    history = watched.fit(x, y, epochs=2, callbacks=[mlc.callbacks.GradientWatch(every=2)], verbose=0)
    mlc.Platform.set_rng_seed_to(4)
    plain.fit(x, y, epochs=2, verbose=0)
    for found, wanted in zip(watched.copy_weights(), plain.copy_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)
    assert history.gradient_norms["total"].steps == [1, 3, 5, 7, 9]


def test_csv(model: mlc.Trainer, tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    history = fit(model, mlc.callbacks.CSVLogger(path), epochs=2)
    fit(model, mlc.callbacks.CSVLogger(path, append=True), epochs=1)
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1", "0"]
    assert [float(row["loss"]) for row in rows[:2]] == history["loss"]
    fit(model, mlc.callbacks.CSVLogger(path, separator=";"), epochs=1)
    assert path.read_text().startswith("epoch;loss;accuracy;learning_rate\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's device that has no space left")
def test_a_log_that_cannot_be_written_says_which(model: mlc.Trainer) -> None:
    with pytest.raises(mlc.FileError, match="CSVLogger: /dev/full could not be written"):
        fit(model, mlc.callbacks.CSVLogger("/dev/full"))


def test_a_resumed_run_goes_on_where_its_log_was(tmp_path: Path) -> None:
    path, kept = tmp_path / "log.csv", tmp_path / "run-{epoch}"
    whole = trainer()
    fit(whole, mlc.callbacks.CSVLogger(path), mlc.callbacks.ModelCheckpoint(kept), epochs=4)
    wanted = path.read_text()
    again = trainer()
    callbacks = [mlc.callbacks.CSVLogger(path), mlc.callbacks.ModelCheckpoint(kept)]
    again.fit(*points(), epochs=4, resume=tmp_path / "run-2", callbacks=callbacks, verbose=0)
    assert path.read_text() == wanted  # epochs 3 and 4 are there once

    class Stops(mlc.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: mlc.callbacks.Logs) -> None:
            if batch == 2:
                self.trainer.save(tmp_path / "early")

    fresh = trainer()
    fit(fresh, mlc.callbacks.CSVLogger(path), Stops(), epochs=1)
    path.write_text("of another run\n")
    last = trainer()
    last.fit(*points(), epochs=4, resume=tmp_path / "early", callbacks=[mlc.callbacks.CSVLogger(path)], verbose=0)
    assert path.read_text() == wanted  # nothing had been written when it was saved


def test_folders_are_looked_for_before_training(model: mlc.Trainer, tmp_path: Path) -> None:
    before = model.copy_parameters()
    for callback in (
        mlc.callbacks.CSVLogger(tmp_path / "a" / "b.csv"),
        mlc.callbacks.ModelCheckpoint(tmp_path / "a" / "b"),
    ):
        with pytest.raises(mlc.DataError, match="there is no folder"):
            fit(model, callback)
    with pytest.raises(TypeError, match="patience must be a whole number"):
        mlc.callbacks.EarlyStopping(patience="3")  # type: ignore[arg-type]
    for found, wanted in zip(model.copy_parameters(), before, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_tensorboard(model: mlc.Trainer, tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboardX.record_writer", reason="tensorboardX is not installed")
    del loader
    history = fit(
        model, mlc.callbacks.TensorBoard(tmp_path, histogram_freq=2, update_freq=2), epochs=3, validation=points()
    )
    scalars, histograms = events(tmp_path)
    assert scalars["train/loss"] == pytest.approx(history["loss"])
    assert scalars["validation/accuracy"] == pytest.approx(history["val_accuracy"])
    assert len(scalars["batch/learning_rate"]) == 8
    names = ["head.biases", "head.weights", "hidden.biases", "hidden.weights"]
    assert sorted(histograms) == sorted(f"{kind}/{name}" for kind in ("gradients", "parameters") for name in names)
    assert all(count == 2 for count in histograms.values())
    assert scalars["batch/loss"] == pytest.approx(history.loss.values[1::2])


def test_tensorboard_beside_other_watchers(model: mlc.Trainer, tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    board = mlc.callbacks.TensorBoard(tmp_path, histogram_freq=1, update_freq=1)
    history = fit(model, board, mlc.callbacks.GradientWatch(1), epochs=2)
    scalars, histograms = events(tmp_path)
    assert scalars["batch/loss"] == pytest.approx(history.loss.values)  # of every step, the last one too
    assert set(histograms.values()) == {2}  # of the first step of each epoch only


def test_event_files_of_the_same_second_are_kept(model: mlc.Trainer, tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    for _ in range(2):
        fit(model, mlc.callbacks.TensorBoard(tmp_path), epochs=1)
    assert len(list(tmp_path.glob("events*"))) == 2


def test_event_files_that_cannot_be_written_say_so(
    model: mlc.Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much is to be written: nobody waits for a thread that has ended."""
    writer = pytest.importorskip("tensorboardX.record_writer", reason="tensorboardX is not installed")
    (tmp_path / "file").touch()
    before = model.copy_parameters()
    with pytest.raises(mlc.FileError, match=rf"TensorBoard: {re.escape(str(tmp_path))}/file/logs/events\S+ could not"):
        fit(model, mlc.callbacks.TensorBoard(tmp_path / "file" / "logs"))
    for found, wanted in zip(model.copy_parameters(), before, strict=True):
        np.testing.assert_array_equal(found, wanted)
    if Path("/dev/full").exists():  # Linux's device that has no space left
        monkeypatch.setattr(writer, "open_file", lambda path: Path("/dev/full").open("wb"))  # noqa: SIM115
        board = mlc.callbacks.TensorBoard(tmp_path, histogram_freq=1, update_freq=1)
        with pytest.raises(mlc.FileError, match=r"(?s)could not be written: No space left.*free space, or choose"):
            fit(model, board, epochs=20)


def events(folder: Path) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Scalars, and how many histograms there are of each name, in an event file."""
    from tensorboardX.proto.event_pb2 import Event

    scalars: dict[str, list[float]] = {}
    histograms: dict[str, int] = {}
    (file,) = folder.glob("events*")
    raw = file.read_bytes()
    while raw:
        length = int.from_bytes(raw[:8], "little")
        event = Event.FromString(raw[12 : 12 + length])
        raw = raw[16 + length :]
        for value in event.summary.value:
            if value.HasField("histo"):
                histograms[value.tag] = histograms.get(value.tag, 0) + 1
            elif value.HasField("simple_value"):
                scalars.setdefault(value.tag, []).append(value.simple_value)
    return scalars, histograms


def test_tensorboard_that_is_not_installed(model: mlc.Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(mlc.DataError, match="pip install tensorboardX"):
        fit(model, mlc.callbacks.TensorBoard("logs"))


def test_hooks_come_in_order_and_state_does_not_leak(model: mlc.Trainer) -> None:
    called: list[str] = []

    class Tell(mlc.callbacks.Callback):
        def __getattribute__(self, name: str) -> Any:
            if name.startswith("on_"):
                called.append(name)
            return super().__getattribute__(name)

        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            assert set(logs) == {"loss", "size"}

    stopping = mlc.callbacks.EarlyStopping("loss", patience=1, min_delta=100.0)
    first = model.fit(*points(20), epochs=5, callbacks=[Tell(), stopping], validation=points(), verbose=0)
    assert called == [
        "on_train_begin", "on_epoch_begin", "on_train_batch_end", "on_train_batch_end", "on_test_begin", "on_test_end",
        "on_epoch_end", "on_epoch_begin", "on_train_batch_end", "on_train_batch_end", "on_test_begin", "on_test_end",
        "on_epoch_end", "on_train_end",
    ]  # fmt: skip
    again = model.fit(*points(20), epochs=5, callbacks=[stopping], verbose=0)
    assert len(first.epochs) == len(again.epochs) == 2


def test_curves_are_bounded() -> None:
    from mlcompute.trainer import Curve

    curve = Curve(limit=8)
    for step in range(1, 101):
        curve.add(step, step / 10)
    assert len(curve) < 8
    assert curve.steps == [1, 17, 33, 49, 65, 81, 97]
    assert curve.values == [step / 10 for step in curve.steps]
    assert Curve.from_state(curve.state()) == curve
    assert Curve() != curve


def test_arguments_of_another_type_are_refused_by_name(model: mlc.Trainer, tmp_path: Path) -> None:
    class Words(mlc.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            logs["state"] = "good"

    some: Any = mlc.callbacks
    with pytest.raises(TypeError, match="EarlyStopping: monitor must be the name of a number in the logs, not 3"):
        some.EarlyStopping(3)
    with pytest.raises(mlc.DataError, match="EarlyStopping: min_delta is nan"):
        some.EarlyStopping(min_delta=float("nan"))
    with pytest.raises(TypeError, match="ModelCheckpoint: filepath must be the name of a file, not 3"):
        some.ModelCheckpoint(3)
    with pytest.raises(mlc.DataError, match="is a folder\n  fix  name a file in it: "):
        fit(model, some.ModelCheckpoint(tmp_path))
    with pytest.raises(TypeError, match="'save_weights_only': leave it out"):
        some.ModelCheckpoint(tmp_path / "best", save_weights_only=True)
    with pytest.raises(TypeError, match="'verbose': leave it out"):
        some.EarlyStopping(verbose=1)
    with pytest.raises(TypeError, match=r"Trainer\.fit: the logs: 'state' must be a number, not 'good'"):
        fit(model, Words())
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"callbacks": None}, "callbacks must be a list, not NoneType"),
        ({"checkpoint": 5}, "checkpoint must be the name of a file, not 5"),
        ({"resume": 5}, "resume must be the name of a file, not 5"),
        ({"validation_split": "some"}, "validation_split must be a number, not 'some'"),
    ]
    for given, message in wrong:
        with pytest.raises(TypeError, match=f"Trainer.fit: {message}"):
            model.fit(*points(), **given)


def test_gradients_are_given_to_whoever_has_a_hook_for_them() -> None:
    class Watches(mlc.callbacks.Callback):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def on_gradients(self, step: int, gradients: Any) -> None:
            assert self.trainer.parameter_names[next(iter(gradients))] == "hidden.weights"
            self.seen.append(step)

    class Seldom(Watches):
        def wants_gradients(self, step: int) -> bool:
            return step % 2 == 1

    x, y = points(64)
    often, seldom = Watches(), Seldom()
    trainer().fit(x, y, callbacks=[often], verbose=0)
    trainer().fit(x, y, callbacks=[seldom], verbose=0)
    assert (often.seen, seldom.seen) == ([0, 1, 2, 3], [1, 3])
