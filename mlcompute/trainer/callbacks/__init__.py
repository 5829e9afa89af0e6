"""Callbacks with Keras's names: stopping, checkpoints, logging, learning rates."""

from typing import TYPE_CHECKING

from mlcompute.foreign_names import no_member
from mlcompute.trainer.callbacks.averaging import ExponentialMovingAverage
from mlcompute.trainer.callbacks.callback import Callback, Logs
from mlcompute.trainer.callbacks.live import Live
from mlcompute.trainer.callbacks.logging import CSVLogger, TensorBoard
from mlcompute.trainer.callbacks.monitor import EarlyStopping, ModelCheckpoint, Monitor, ReduceLROnPlateau
from mlcompute.trainer.callbacks.nan import NaNError, TerminateOnNaN
from mlcompute.trainer.callbacks.rates import LearningRateScheduler
from mlcompute.trainer.callbacks.tracking import MLflow, OptunaPruning, WandB
from mlcompute.trainer.callbacks.watching import GradientWatch

__all__ = [
    "CSVLogger", "Callback", "EarlyStopping", "ExponentialMovingAverage", "GradientWatch", "LearningRateScheduler",
    "Live", "Logs", "MLflow", "ModelCheckpoint", "Monitor", "NaNError", "OptunaPruning", "ReduceLROnPlateau",
    "TensorBoard", "TerminateOnNaN", "WandB",
]  # fmt: skip


if not TYPE_CHECKING:  # a type checker would take every name for one that is there

    def __getattr__(name: str) -> None:
        raise no_member(__name__, name, __all__)
