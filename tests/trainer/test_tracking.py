"""Weights & Biases, MLflow and Optuna. The packages are not installed here: modules with the part of their API that is
used stand in for them and record the calls."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

import mlcompute as mlc
from tests.trainer.nets import points, trainer

Calls = list[tuple[Any, ...]]


@pytest.fixture(scope="module")
def model() -> mlc.Trainer:
    return trainer()


def fit(model: mlc.Trainer, *callbacks: mlc.callbacks.Callback, epochs: int = 3) -> mlc.History:
    return model.fit(*points(), epochs=epochs, callbacks=callbacks, validation=points(), verbose=0)


class FakeWandb(types.ModuleType):
    def __init__(self) -> None:
        super().__init__("wandb")
        self.run: FakeRun | None = None
        self.runs: list[FakeRun] = []

    def init(self, *, project: str | None = None, **options: Any) -> FakeRun:
        self.run = FakeRun(self, {"project": project, **options})
        return self.run


class FakeRun:
    def __init__(self, module: FakeWandb, options: dict[str, Any]) -> None:
        self.module, self.options, self.finished = module, options, False
        self.logged: list[dict[str, float]] = []
        module.runs.append(self)

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        self.logged.append(data)

    def finish(self, exit_code: int | None = None) -> None:
        self.finished, self.module.run = True, None


def test_wandb_begins_a_run_of_its_own(model: mlc.Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    callback = mlc.callbacks.WandB("moons", config={"hidden": 8})
    history = fit(model, callback)
    fit(model, callback, epochs=1)
    first, second = wandb.runs
    assert first.options == {"project": "moons", "config": {"hidden": 8}}
    assert [row["epoch"] for row in first.logged] == [1, 2, 3]
    assert [row["val_loss"] for row in first.logged] == history["val_loss"]
    assert first.finished
    assert second.finished
    assert len(second.logged) == 1


def test_wandb_logs_to_the_run_that_is_active(model: mlc.Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    mine = wandb.init(project="mine")
    fit(model, mlc.callbacks.WandB())
    assert wandb.runs == [mine]
    assert len(mine.logged) == 3
    assert not mine.finished


class FakeMLflow(types.ModuleType):
    def __init__(self) -> None:
        super().__init__("mlflow")
        self.calls: Calls = []
        self.stack: list[Any] = []

    def active_run(self) -> Any:
        return self.stack[-1] if self.stack else None

    def start_run(self, run_id: str | None = None, *, run_name: str | None = None, **options: Any) -> Any:
        if self.stack:
            raise RuntimeError("Run is already active")
        self.calls.append(("start_run", run_name, options))
        self.stack.append(types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"id{len(self.calls)}")))
        return self.stack[-1]

    def log_params(self, params: dict[str, Any]) -> None:
        self.calls.append(("log_params", params))

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert all(type(value) is float for value in metrics.values())
        self.calls.append(("log_metrics", sorted(metrics), step))

    def end_run(self, status: str = "FINISHED") -> None:
        self.calls.append(("end_run", status))
        self.stack.pop()


def test_mlflow(model: mlc.Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    history = fit(model, mlc.callbacks.MLflow("first", {"hidden": 8}, tags={"a": "b"}), epochs=2)
    names = sorted(history.epochs[0])
    assert {"loss", "val_loss"} <= set(names)
    assert mlflow.calls[:2] == [("start_run", "first", {"tags": {"a": "b"}}), ("log_params", {"hidden": 8})]
    assert [(call[0], call[-1]) for call in mlflow.calls[2:]] == [
        ("log_metrics", 1),
        ("log_metrics", 2),
        ("end_run", "FINISHED"),
    ]


def test_mlflow_leaves_a_run_of_others_open(model: mlc.Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    mlflow.start_run(run_name="mine")
    fit(model, mlc.callbacks.MLflow(params={"hidden": 8}), epochs=1)
    assert [call[0] for call in mlflow.calls] == ["start_run", "log_metrics"]


class FakeTrial:
    def __init__(self, prune_at: int) -> None:
        self.prune_at = prune_at
        self.reported: dict[int, float] = {}

    def report(self, value: float, step: int) -> None:
        self.reported[step] = value

    def should_prune(self) -> bool:
        return max(self.reported) >= self.prune_at


class Ended(mlc.callbacks.Callback):
    has_ended = False

    def on_train_end(self, logs: Any) -> None:
        self.has_ended = True


def test_optuna_prunes(model: mlc.Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    optuna = types.ModuleType("optuna")
    optuna.TrialPruned = type("TrialPruned", (Exception,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "optuna", optuna)
    trial, ended = FakeTrial(1), Ended()
    with pytest.raises(optuna.TrialPruned, match="pruned after epoch 2, val_loss was"):
        fit(model, ended, mlc.callbacks.OptunaPruning(trial), epochs=5)
    assert list(trial.reported) == [0, 1]
    assert list(trial.reported.values()) == model.history["val_loss"]
    assert ended.has_ended
    good = FakeTrial(9)
    assert len(fit(model, mlc.callbacks.OptunaPruning(good, monitor="loss")).epochs) == len(good.reported) == 3
    with pytest.raises(mlc.DataError, match="OptunaPruning: there is no 'f1' in the logs"):
        fit(model, mlc.callbacks.OptunaPruning(good, monitor="f1"))


@pytest.mark.parametrize(("name", "package"), [("WandB", "wandb"), ("MLflow", "mlflow"), ("OptunaPruning", "optuna")])
def test_a_missing_package_is_named(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    said = f"(?s){name}: the package {package} is not installed.*pip install {package}"
    with pytest.raises(mlc.DataError, match=said):
        getattr(mlc.callbacks, name)(None)
