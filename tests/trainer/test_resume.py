"""A run that is stopped and resumed arrives at the same bits as one that never stopped (R12, R13)."""

from __future__ import annotations

import dataclasses
import functools
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.trainer import Interrupted, Terminated
from tests.trainer.nets import assert_same, everything, points, trainer

#: 70 samples in batches of 16: four full ones and a short one.
STEPS_PER_EPOCH, EPOCHS = 5, 4


class SignalAt(mlc.callbacks.Callback):
    """Sends this process a signal in the middle of a step."""

    def __init__(self, step: int, number: signal.Signals = signal.SIGINT) -> None:
        self.step, self.number = step, number

    def on_train_batch_begin(self, batch: int, logs: Any) -> None:
        if self.trainer.step + 1 == self.step:
            signal.raise_signal(self.number)


def callbacks(*more: mlc.callbacks.Callback) -> list[mlc.callbacks.Callback]:
    return [
        mlc.callbacks.LearningRateScheduler(mlc.schedules.OneCycle(0.05)),
        mlc.callbacks.ExponentialMovingAverage(0.9),
        mlc.callbacks.EarlyStopping(patience=2, restore_best_weights=True),
        mlc.callbacks.GradientWatch(every=3),
        *more,
    ]


def fit(model: mlc.Trainer, *more: mlc.callbacks.Callback, **options: Any) -> mlc.History:
    x, y = points()
    settings: dict[str, Any] = {"epochs": EPOCHS, "shuffle_seed": 5, "validation": points(40, 1), "verbose": 0}
    return model.fit(x, y, callbacks=callbacks(*more), **{**settings, **options})


@functools.cache
def beginning(number: int = 0) -> tuple[mlc.Trainer, Path]:
    """A compiled trainer and a checkpoint of its first moment. Several exist, so that one can resume for another."""
    model = trainer(dropout=0.3, norm=True, metrics=["accuracy", "mse"])
    path = Path(tempfile.mkdtemp()) / "beginning"
    mlc.save(path, model.training)
    return model, path


def made(number: int = 0) -> mlc.Trainer:
    """A trainer as it was made: compiling one anew for every test would take most of the time."""
    model, path = beginning(number)
    mlc.restore(model.training, path, exact=True)
    return model


@pytest.fixture(scope="module")
def unstopped() -> tuple[list[np.ndarray], mlc.History, Any]:
    model = made()
    history = fit(model)
    return everything(model), history, mlc.Platform.rng_state()


@pytest.mark.parametrize("step", range(1, STEPS_PER_EPOCH * EPOCHS + 1))
def test_stopped_at_every_step(step: int, unstopped: Any, tmp_path: Path, capsys: Any) -> None:
    state, history, rng = unstopped
    path = tmp_path / "run.safetensors"
    with pytest.raises(Interrupted) as caught:
        fit(made(), SignalAt(step), checkpoint=path)
    assert caught.value.path == str(path)
    assert f"resume='{path}'" in capsys.readouterr().err
    model, _ = beginning(1)  # in whatever state the last test left it
    mlc.Platform.set_rng_seed_to(999)
    resumed = fit(model, resume=path)
    assert_same(everything(model), state)
    assert resumed == history
    assert mlc.Platform.rng_state() == rng


def test_stopped_twice_and_by_both_signals(unstopped: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    with pytest.raises(Terminated) as caught:
        fit(made(), SignalAt(4, signal.SIGTERM), checkpoint=path)
    assert caught.value.code == 128 + signal.SIGTERM
    with pytest.raises(Interrupted):
        fit(made(1), SignalAt(11), resume=path, checkpoint=path)
    model = made()
    assert fit(model, resume=path) == unstopped[1]
    assert_same(everything(model), unstopped[0])


class StopAtValidation(mlc.callbacks.Callback):
    """Stops training when the first validation begins."""

    def on_test_begin(self, logs: Any) -> None:
        self.trainer.interrupt()


def test_stopped_in_validation(unstopped: Any, tmp_path: Path) -> None:
    """A validation of no batches has no loss: nothing is said about it."""
    path = tmp_path / "run.safetensors"
    with warnings.catch_warnings(), pytest.raises(Interrupted):
        warnings.simplefilter("error")
        fit(made(), StopAtValidation(), checkpoint=path)
    model = made()
    assert fit(model, resume=path) == unstopped[1]
    assert_same(everything(model), unstopped[0])


def test_the_handlers_are_put_back(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(Interrupted):
        fit(made(), SignalAt(2), checkpoint=tmp_path / "run.safetensors")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_what_was_ignored_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as nohup, and shells in the background
    try:
        history = fit(made(), SignalAt(2), checkpoint=tmp_path / "run")
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert history.stopped in ("", "EarlyStopping")
    assert not (tmp_path / "run").exists()


def test_what_was_raised_travels_between_processes(tmp_path: Path) -> None:
    with pytest.raises(Interrupted) as caught:
        fit(made(), SignalAt(2), checkpoint=tmp_path / "run")
    assert caught.value.__suppress_context__  # how it was noticed is nobody's business
    for error in (caught.value, Terminated("stopped", "run")):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), copy.path) == (type(error), str(error), error.path)


def test_accumulated_and_unmeasured_runs_resume_too(tmp_path: Path) -> None:
    def run(model: mlc.Trainer, *more: mlc.callbacks.Callback, **options: Any) -> mlc.History:
        x, y = points()
        plateau = mlc.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1.0)
        settings: dict[str, Any] = {"epochs": 3, "accumulate": 2, "shuffle_seed": 0, "verbose": 0, **options}
        return model.fit(x, y, callbacks=[plateau, *more], **settings)

    models = [trainer(dropout=0.2, metrics=()) for _ in range(2)]
    beginning = tmp_path / "beginning"
    mlc.save(beginning, models[0].training)
    history = run(models[0])
    state = everything(models[0])
    assert len(set(history["learning_rate"])) > 1
    for step in range(1, 10):
        path = tmp_path / "run.safetensors"
        mlc.restore(models[0].training, beginning, exact=True)
        with pytest.raises(Interrupted):
            run(models[0], SignalAt(step), checkpoint=path)
        assert run(models[1], resume=path) == history
        assert_same(everything(models[1]), state)


def test_checkpoints_of_epochs_and_steps_resume(unstopped: Any, tmp_path: Path) -> None:
    by_epoch = mlc.callbacks.ModelCheckpoint(tmp_path / "e{epoch}-{val_loss:.2f}.safetensors")
    fit(made(), by_epoch, mlc.callbacks.ModelCheckpoint(tmp_path / "step.safetensors", save_freq=7))
    files = sorted(tmp_path.glob("e*.safetensors"))
    assert len(files) == len(unstopped[1].epochs)
    for path in (*files, tmp_path / "step.safetensors"):
        model = made()
        more = [mlc.callbacks.ModelCheckpoint(tmp_path / f"again{number}") for number in range(2)]
        assert fit(model, *more, resume=path) == unstopped[1]
        assert_same(everything(model), unstopped[0])


def test_streams_resume_where_they_were(tmp_path: Path) -> None:
    x, y = points()

    def batches(epoch: int) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(x[first : first + 10] + epoch, y[first : first + 10]) for first in range(0, 70, 10)]

    whole = made()
    history = whole.fit(batches, epochs=2, verbose=0)
    state = everything(whole)
    for step in (3, 7, 8):
        with pytest.raises(Interrupted):
            made().fit(batches, epochs=2, callbacks=[SignalAt(step)], checkpoint=tmp_path / "run", verbose=0)
        model = made(1)
        assert model.fit(batches, epochs=2, resume=tmp_path / "run", verbose=0) == history
        assert_same(everything(model), state)


def test_a_source_that_never_comes_does_not_keep_a_signal_waiting(tmp_path: Path) -> None:
    x, y = points(16)
    hang = threading.Event()

    def batches(epoch: int) -> Any:
        yield x, y
        threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
        hang.wait(120)

    start = time.perf_counter()
    with pytest.raises(Interrupted):
        made().fit(batches, checkpoint=tmp_path / "run", verbose=0)
    hang.set()
    assert time.perf_counter() - start < 100
    progress: Any = mlc.Checkpoint(tmp_path / "run").progress
    assert progress["trainer"]["step"] == 1


def test_a_finished_run_goes_on_when_more_epochs_are_asked_for(tmp_path: Path) -> None:
    x, y = points()
    whole = trainer(dropout=0.3)
    history = whole.fit(x, y, epochs=5, verbose=0)
    first = trainer(dropout=0.3)
    first.fit(x, y, epochs=3, verbose=0)
    first.save(tmp_path / "run")
    second = trainer(dropout=0.3)
    assert second.fit(x, y, epochs=5, resume=tmp_path / "run", verbose=0) == history
    assert_same(everything(second), everything(whole))


def test_early_stopping_is_remembered(tmp_path: Path) -> None:
    def stopping() -> list[mlc.callbacks.Callback]:
        return [mlc.callbacks.EarlyStopping("loss", patience=1, min_delta=100.0)]

    x, y = points()
    model = trainer()
    history = model.fit(x, y, epochs=9, callbacks=stopping(), verbose=0)
    assert history.stopped == "EarlyStopping"
    assert len(history.epochs) == 2
    model.save(tmp_path / "run")
    again = trainer().fit(x, y, epochs=9, callbacks=stopping(), resume=tmp_path / "run", verbose=0)
    assert again == history
    assert again.stopped == "EarlyStopping"


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "other data": ({"x": np.zeros((71, 4)), "y": np.zeros(71, int)}, "saved with samples 70, now it is 71"),
    "another batch size": ({"batch_size": 8}, "saved with batch_size 16, now it is 8"),
    "another seed": ({"shuffle_seed": 3}, "saved with shuffle_seed 0, now it is 3"),
    "no shuffling": ({"shuffle": False}, "saved with shuffle_seed 0, now it is None"),
    "other callbacks": ({"callbacks": []}, "saved with the callback ExponentialMovingAverage"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_resuming_something_else_is_refused_and_changes_nothing(name: str, tmp_path: Path) -> None:
    x, y = points()
    average = [mlc.callbacks.ExponentialMovingAverage()]
    model = made()
    model.fit(x, y, epochs=1, shuffle_seed=0, callbacks=average, verbose=0)
    model.save(tmp_path / "run")
    other = made(1)
    before = everything(other)
    changes, message = REFUSALS[name]
    with pytest.raises(mlc.DataError, match=message):
        other.fit(**{"x": x, "y": y, "callbacks": average, "verbose": 0, "resume": tmp_path / "run", **changes})
    assert_same(everything(other), before)


def test_another_loss_is_not_resumed(tmp_path: Path) -> None:
    x, y = points()
    model = trainer(metrics=[])
    model.fit(x, y, epochs=1, verbose=0)
    model.save(tmp_path / "run")
    dense = np.eye(3, dtype=np.float32)[y]
    for loss in ("mse", lambda y, t: ((y - t) ** 2).mean(-1)):
        with pytest.raises(mlc.DataError, match=r"saved with losses \['softmax_cross_entropy'\], now it is"):
            trainer(loss=loss, metrics=[]).fit(x, dense, epochs=2, resume=tmp_path / "run", verbose=0)
    loaded: Any = mlc.load(tmp_path / "run")
    mlc.Trainer(loaded).fit(x, y, epochs=2, resume=tmp_path / "run", verbose=0)


class Remembers(mlc.callbacks.Callback):
    """A callback with a state."""

    value = 0

    def state(self) -> dict[str, Any]:
        return {"value": 1}

    def restore(self, state: Any) -> None:
        self.value = state["value"]


def test_a_graph_that_does_not_fit_leaves_the_callbacks_alone(tmp_path: Path) -> None:
    x, y = points()
    model = trainer()
    model.fit(x, y, callbacks=[Remembers()], verbose=0)
    model.save(tmp_path / "run")
    remembers = Remembers()
    with pytest.raises(mlc.Error, match="norm"):
        trainer(norm=True).fit(x, y, callbacks=[remembers], resume=tmp_path / "run", verbose=0)
    assert remembers.value == 0
    assert not hasattr(remembers, "trainer"), "no log is opened, no record is written"


def test_a_file_of_other_data_is_refused(tmp_path: Path) -> None:
    def fit(classes: Sequence[str], shift: float = 0.0, source: str = "here", **options: Any) -> mlc.Trainer:
        columns = {"a": np.arange(40) * 0.5 % 7 + shift, "label": list(classes) * 20}
        data = mlc.data.table(columns, "label")
        data = dataclasses.replace(data, preprocessing=dataclasses.replace(data.preprocessing, source=source))
        graph = mlc.Graph()
        graph.dense(data.input(graph, 8), 2)
        model = mlc.Trainer(graph, loss=data.loss, metrics=data.metrics)
        model.fit(data, verbose=0, **options)
        return model

    fit(("cat", "dog")).save(tmp_path / "run")
    fit(("cat", "dog"), source="elsewhere", epochs=2, resume=tmp_path / "run")
    with pytest.raises(mlc.DataError, match="saved with other data: its target classes 1 was 'dog', now it is 'owl'"):
        fit(("cat", "owl"), epochs=2, resume=tmp_path / "run")
    with pytest.raises(mlc.DataError, match="saved with other data: its columns 0 mean was"):
        fit(("cat", "dog"), 1.0, epochs=2, resume=tmp_path / "run")


def test_a_rate_that_is_not_used_is_said(tmp_path: Path, capsys: Any) -> None:
    x, y = points()
    model = trainer()
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "run")
    other = trainer()
    other.learning_rate = 0.25
    other.fit(x, y, epochs=2, resume=tmp_path / "run", verbose=2)
    assert f"the learning rate is {model.learning_rate:g} as in {tmp_path / 'run'}, not 0.25" in capsys.readouterr().out


def test_what_may_change_the_numbers_is_said(tmp_path: Path, capsys: Any) -> None:
    x, y = points()
    model = trainer()
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "run")
    trainer().fit(x, y, epochs=2, resume=tmp_path / "run", verbose=2)
    assert "may differ" not in capsys.readouterr().out
    trainer(dropout=0.3).fit(x, y, epochs=2, resume=tmp_path / "run", verbose=2)
    said = capsys.readouterr().out
    assert "the graph is not built like the saved one" in said
    assert "the numbers may differ from a run that never stopped" in said


def test_files_that_are_no_run_are_refused(tmp_path: Path) -> None:
    x, y = points()
    model = made()
    mlc.save(tmp_path / "weights", model.training)
    with pytest.raises(mlc.DataError, match=r"(?s)does not come from a Trainer's run.*mlcompute.restore"):
        model.fit(x, y, resume=tmp_path / "weights", verbose=0)
    history = model.fit(x, y, verbose=0)
    steps = model.step
    with pytest.raises(mlc.Error, match="nowhere"):
        model.fit(x, y, resume=tmp_path / "nowhere", verbose=0)
    assert model.history is history
    assert model.step == steps


class Removes(mlc.callbacks.Callback):
    """Somebody removes a folder during training."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_batch_begin(self, batch: int, logs: Any) -> None:
        if self._folder.is_dir():
            self._folder.rmdir()


def test_a_run_that_cannot_be_saved_says_so(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    with pytest.raises(Interrupted) as caught:
        fit(made(), Removes(folder), SignalAt(2), checkpoint=folder / "run")
    assert caught.value.path is None
    assert "could not be saved" in capsys.readouterr().err


SCRIPT = """
    import sys, time
    import numpy as np
    import mlcompute as mlc
    from tests.trainer.test_resume import fit, made

    class Slowly(mlc.callbacks.Callback):
        def on_train_begin(self, logs):
            print("begun", flush=True)

        def on_train_batch_begin(self, batch, logs):
            time.sleep(0.01)

    resume = sys.argv[1] if sys.argv[2] == "resume" else None
    model = made()
    print("ready", flush=True)
    fit(model, Slowly(), checkpoint=sys.argv[1], resume=resume)
    np.savez(sys.argv[3], *model.copy_weights())
"""


def signalled(
    tmp_path: Path, number: signal.Signals, delay: float, environment: dict[str, str], *, lines: int = 1
) -> tuple[float, int]:
    """Run the script, send it a signal `delay` seconds after so many lines of it; (seconds to its end, exit code)."""
    arguments = [str(tmp_path / "run"), "begin", str(tmp_path / "weights.npz")]
    script = [sys.executable, str(tmp_path / "script.py"), *arguments]
    with subprocess.Popen(script, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(lines):
            process.stdout.readline()
        time.sleep(delay)
        sent = time.perf_counter()
        process.send_signal(number)
        process.communicate(timeout=240)
        return time.perf_counter() - sent, process.returncode


@pytest.mark.parametrize("count", [1, pytest.param(100, marks=pytest.mark.slow)])
def test_signals_at_random_moments(count: int, unstopped: Any, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    draw = random.Random(0)
    stopped = 0
    for number in range(count):
        kind = (signal.SIGTERM, signal.SIGINT)[number % 2]
        for name in ("run", "weights.npz"):
            (tmp_path / name).unlink(missing_ok=True)
        # A single try has to hit the training, however slow the machine is; of many, some may come before it.
        delay, lines = draw.uniform(0.0, 0.2), 2 if count == 1 else 1
        seconds, code = signalled(tmp_path, kind, delay, environment, lines=lines)
        if not (tmp_path / "run").exists():
            # Before fit began, or after it had ended, a signal does what it always does.
            continue
        stopped += 1
        assert code in (143, 130, -signal.SIGINT, 1), code
        assert seconds < 60  # seconds, not the minutes of a run to its end; the machine may have much other work
        model = made()
        assert fit(model, resume=tmp_path / "run") == unstopped[1]
        assert_same(everything(model), unstopped[0])
    assert stopped >= count // 2 + count % 2
