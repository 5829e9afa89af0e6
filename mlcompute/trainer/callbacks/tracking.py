"""Experiment tracking: Weights & Biases, MLflow, and Optuna's pruning.

Each is imported when its callback is made.
"""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

from mlcompute.errors import DataError
from mlcompute.trainer.callbacks.callback import Callback, Logs
from mlcompute.trainer.callbacks.monitor import Monitor


class WandB(Callback):
    """Every epoch's numbers to Weights & Biases (`pip install wandb`).

    They go to the run that is active, `wandb.run`; without one a run is begun, and finished when training ends.

    project, options   for `wandb.init`, where a run is begun: name, config, mode="offline" ...
    """

    def __init__(self, project: str | None = None, **options: Any) -> None:
        self._wandb = _package("WandB", "wandb")
        self.project, self._options = project, options
        self._run: Any = None
        self._begun: Any = None

    def on_train_begin(self, logs: Logs) -> None:
        self._run = self._wandb.run
        if self._run is None:
            self._run = self._begun = self._wandb.init(project=self.project, **self._options)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self._run.log({"epoch": epoch + 1, **logs})

    def on_train_end(self, logs: Logs) -> None:
        if self._run is self._begun:
            self._run.finish()


class MLflow(Callback):
    """Every epoch's numbers to MLflow (`pip install mlflow`), with the epoch, counted from 1, as the step.

    They go to the run that is active; without one a run is begun, and ended when training ends. Where they are kept is
    set as ever: `mlflow.set_tracking_uri`, `mlflow.set_experiment`.

    params             hyperparameters to log where a run is begun
    run_name, options  for `mlflow.start_run`, where a run is begun
    """

    def __init__(self, run_name: str | None = None, params: dict[str, Any] | None = None, **options: Any) -> None:
        self._mlflow = _package("MLflow", "mlflow")
        self.run_name, self._params, self._options = run_name, params or {}, options
        self._begun = ""

    def on_train_begin(self, logs: Logs) -> None:
        if self._mlflow.active_run() is None:
            self._begun = self._mlflow.start_run(run_name=self.run_name, **self._options).info.run_id
            self._mlflow.log_params(self._params)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self._mlflow.log_metrics({name: float(value) for name, value in logs.items()}, step=epoch + 1)

    def on_train_end(self, logs: Logs) -> None:
        active = self._mlflow.active_run()
        if active is not None and active.info.run_id == self._begun:
            self._mlflow.end_run()


class OptunaPruning(Monitor):
    """Report a number to an Optuna trial after every epoch; where its pruner says so, end with `optuna.TrialPruned`.

    Training stops after that epoch, the other callbacks hear of its end, and `fit` raises: give it as the last one.

    trial    what Optuna gave to the objective
    monitor  its name in the logs; the study knows whether it is to rise or to fall
    """

    runs_on_every_process: ClassVar[bool] = False  # a trial lives in one; the others stop when rank 0 does

    def __init__(self, trial: Any, monitor: str = "val_loss") -> None:
        super().__init__(monitor, mode="min")
        self._optuna, self._trial = _package("OptunaPruning", "optuna"), trial
        self._pruned = ""

    def on_train_begin(self, logs: Logs) -> None:
        super().on_train_begin(logs)
        self._pruned = ""

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        value = self.watched(logs)
        self._trial.report(value, step=epoch)
        if self._trial.should_prune():
            self._pruned = f"pruned after epoch {epoch + 1}, {self.monitor} was {value:g}"
            self.trainer.stop("OptunaPruning")

    def on_train_end(self, logs: Logs) -> None:
        if self._pruned:
            raise self._optuna.TrialPruned(self._pruned)


def _package(who: str, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise DataError(f"{who}: the package {name} is not installed", fix=f"pip install {name}") from None
