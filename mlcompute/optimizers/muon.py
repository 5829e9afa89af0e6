"""Muon: the momentum of a matrix, made orthogonal; AdamW for everything else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from mlcompute import ops
from mlcompute.errors import DataError
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Shape, Value
from mlcompute.optimizers.descriptor import OptimizerDescriptor, OptimizerSettings, checked_count, checked_number
from mlcompute.optimizers.moments import MomentsOptimizer
from mlcompute.optimizers.parameter_group import ParameterGroup

if TYPE_CHECKING:
    from typing_extensions import Unpack


#: Coefficients of the odd polynomial whose iteration drives singular values towards 1.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ADJUSTMENTS = ("match_rms_adamw", "original")


class MuonOptimizer(MomentsOptimizer):
    """Matrices: m = s m + (1-s) g;  w -= lr a U + lr d, U ≈ the orthogonal factor of s m + (1-s) g. Others: AdamW.

    U comes from a few Newton-Schulz iterations, matrix products in the parameter's precision
    (K. Jordan et al., Muon: An optimizer for hidden layers in neural networks). The factor a makes one rate serve:
    "match_rms_adamw" is 0.2 √max(rows, columns), for rates of AdamW (arXiv:2502.16982), which the other parameters get
    too; "original" is √max(1, rows / columns), for rates around 0.02.

    Parameters of two axes are matrices. Embeddings and the last layer are usually better left to AdamW:

    >>> import mlcompute as mlc
    >>> muon = mlc.MuonOptimizer(learning_rate=3e-4, weight_decay=0.1, groups=[
    ...     mlc.ParameterGroup("embedding*", optimizer=mlc.AdamWOptimizer(learning_rate=3e-4))])
    """

    decouples_penalty: ClassVar[bool] = True

    momentum_scale = ReadOnly[float]("Share of the momentum of a matrix kept per step.")
    uses_nesterov_momentum = ReadOnly[bool]("True to make the momentum of the next step orthogonal.")
    iterations = ReadOnly[int]("Newton-Schulz iterations.")
    rate_adjustment = ReadOnly[str]('"match_rms_adamw" or "original".')
    beta1 = ReadOnly[float]("AdamW's share of the running mean of gradients.")
    beta2 = ReadOnly[float]("AdamW's share of the running mean of squared gradients.")
    epsilon = ReadOnly[float]("AdamW's, added to the root of the second moment.")

    def __init__(
        self,
        descriptor: OptimizerDescriptor | None = None,
        *,
        momentum_scale: float = 0.95,
        uses_nesterov_momentum: bool = True,
        iterations: int = 5,
        rate_adjustment: str = "match_rms_adamw",
        beta1: float = 0.9,
        beta2: float = 0.95,
        epsilon: float = 1e-8,
        time_step: int = 1,
        groups: Sequence[ParameterGroup] = (),
        **shared: Unpack[OptimizerSettings],
    ) -> None:
        super().__init__(
            descriptor, beta1=beta1, beta2=beta2, epsilon=epsilon, time_step=time_step, groups=groups, **shared
        )
        who = "MuonOptimizer"
        self._momentum_scale = checked_number(who, "momentum_scale", momentum_scale, least=0.0, below=1.0)
        self._uses_nesterov_momentum = bool(uses_nesterov_momentum)
        self._iterations = checked_count(who, "iterations", iterations, least=1)
        if rate_adjustment not in _ADJUSTMENTS:
            raise DataError(f"{who}: rate_adjustment is {rate_adjustment!r}", expected=" or ".join(_ADJUSTMENTS))
        self._rate_adjustment = rate_adjustment

    def state_shapes(self, shape: Shape) -> dict[str, Shape]:
        return {"momentum": shape} if len(shape) == 2 else {"momentum": shape, "velocity": shape}

    def rates(self, time_step: int) -> dict[str, float]:
        correction = math.sqrt(1.0 - self._beta2**time_step) / (1.0 - self._beta1**time_step)
        return {"learning_rate": self.learning_rate, "step_size": self.learning_rate * correction}

    def update(self, h: Mapping[str, Value], w: Value, g: Value, state: Sequence[Value]) -> tuple[Value, list[Value]]:
        if len(w.shape) == 2:
            m = state[0] * self._momentum_scale + g * (1.0 - self._momentum_scale)
            ahead = m * self._momentum_scale + g * (1.0 - self._momentum_scale) if self._uses_nesterov_momentum else m
            step = h["learning_rate"] * orthogonal(ahead, self._iterations) * self._adjustment(*w.shape)
            kept = [m]
        else:
            m, v = self._moments(g, state)
            step = h["step_size"] * m / (ops.sqrt(v) + self._epsilon)
            kept = [m, v]
        if self.has_penalty:
            step = step + h["learning_rate"] * self.penalty(h, w)
        return w - step, kept

    def _adjustment(self, rows: int, columns: int) -> float:
        if self._rate_adjustment == "original":
            return math.sqrt(max(1.0, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))


def orthogonal(x: Value, iterations: int) -> Value:
    """A matrix with the singular vectors of x and singular values near 1: x = a x + (b y + c y²) x with y = x xᵀ."""
    is_tall = x.shape[0] > x.shape[1]
    x = ops.transpose(x) if is_tall else x  # y is then the smaller of the two
    x = x / ops.maximum(ops.sqrt(ops.sum_(x * x, (0, 1))), 1e-7)
    for _ in range(iterations):
        y = ops.matmul(x, ops.transpose(x))
        x = x * _A + ops.matmul(y * _B + ops.matmul(y, y) * _C, x)
    return ops.transpose(x) if is_tall else x
