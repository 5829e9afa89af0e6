"""Recording gradient norms while training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from mlcompute.layers.arguments import number_of
from mlcompute.tensor import Tensor
from mlcompute.trainer.callbacks.callback import Callback
from mlcompute.trainer.history import Curve
from mlcompute.trainer.metrics import Array


class GradientWatch(Callback):
    """Every so many steps the Euclidean norm of the gradients of each layer goes into `history.gradient_norms`.

    every  a watched step runs pass by pass and waits; the others stay as fast as they are

    The norm of all parameters together is there as "total".
    """

    runs_on_every_process: ClassVar[bool] = True

    def __init__(self, every: int = 100) -> None:
        self.every = number_of("GradientWatch", "every", every, 1)

    def wants_gradients(self, step: int) -> bool:
        return step % self.every == 0

    def on_gradients(self, step: int, gradients: Mapping[Tensor, Array]) -> None:
        norms = self.trainer.history.gradient_norms
        total = norms.get("total")
        if not self.wants_gradients(step) or (total is not None and total.recent and total.recent[-1][0] == step + 1):
            return  # not asked for here, or another one has written it down
        squares: dict[str, float] = {}
        for tensor, gradient in gradients.items():
            layer = self.trainer.parameter_names[tensor].rsplit(".", 1)[0]
            flat = gradient.reshape(-1).astype(np.float64)
            squares[layer] = squares.get(layer, 0.0) + float(flat @ flat)
        squares["total"] = sum(squares.values())
        for layer, square in squares.items():
            norms.setdefault(layer, Curve()).add(step + 1, float(np.sqrt(square)))
