"""Averages of the weights over the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from mlcompute.errors import DataError
from mlcompute.layers.arguments import real
from mlcompute.trainer.callbacks.callback import Callback, Logs


class ExponentialMovingAverage(Callback):
    """average = decay * average + (1 - decay) * weights after every step; it starts at the first weights.

    validates  validation uses the averages, and what is kept is what was validated: checkpoints hold the averages as
               the weights of the graph (the weights being trained lie beside them, for resuming), and EarlyStopping
               restores the averages of the best epoch
    applies    at the end the weights become the averages, unless EarlyStopping has restored those of the best epoch

    Parameters only; running statistics of normalizations stay what they are.
    """

    runs_on_every_process: ClassVar[bool] = True

    def __init__(self, decay: float = 0.999, *, validates: bool = True, applies: bool = True) -> None:
        if not 0 <= real("ExponentialMovingAverage", "decay", decay) < 1:
            raise DataError(f"ExponentialMovingAverage: decay is {decay}", expected="0 <= decay < 1")
        self.decay, self.validates, self.applies = decay, validates, applies
        self.averages: list[Any] = []

    def on_train_begin(self, logs: Logs) -> None:
        self.averages = self.trainer.copy_parameters()

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        for average, tensor in zip(self.averages, self.trainer.parameters, strict=True):
            average += (np.asarray(tensor) - average) * average.dtype.type(1.0 - self.decay)

    def evaluated_parameters(self) -> Sequence[Any] | None:
        return self.averages if self.validates and self.averages else None

    def on_train_end(self, logs: Logs) -> None:
        if self.applies and not self.trainer.has_final_weights:
            self.trainer.set_parameters(self.averages)

    def state(self) -> dict[str, Any]:
        return {"averages": self.averages}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.averages = [np.array(array) for array in state["averages"]]
