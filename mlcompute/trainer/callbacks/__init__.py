"""Callbacks with Keras's names: stopping, checkpoints, logging, learning rates."""

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
