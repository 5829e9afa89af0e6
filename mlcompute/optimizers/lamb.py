"""LAMB: Adam with a step length relative to the norm of each parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from mlcompute import ops
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Value
from mlcompute.optimizers.descriptor import OptimizerDescriptor, OptimizerSettings
from mlcompute.optimizers.moments import MomentsOptimizer
from mlcompute.optimizers.parameter_group import ParameterGroup

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LAMBOptimizer(MomentsOptimizer):
    """Adam's moments;  u = m / (1-b1ᵗ) / (√(v / (1-b2ᵗ)) + epsilon) + d;  w -= lr |w| / |u| u.   (arXiv:1904.00962)

    |.| is the norm of a whole parameter; where it is 0, the factor |w| / |u| is 1. The penalty d is part of u:
    regularization_scale * w for L2. Made for large batches.

    >>> import mlcompute as mlc
    >>> mlc.LAMBOptimizer(learning_rate=1e-3, weight_decay=0.01).epsilon
    1e-06
    """

    decouples_penalty: ClassVar[bool] = True

    epsilon = ReadOnly[float]("Added to the root of the corrected second moment.")

    def __init__(
        self,
        descriptor: OptimizerDescriptor | None = None,
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        time_step: int = 1,
        groups: Sequence[ParameterGroup] = (),
        **shared: Unpack[OptimizerSettings],
    ) -> None:
        super().__init__(
            descriptor, beta1=beta1, beta2=beta2, epsilon=epsilon, time_step=time_step, groups=groups, **shared
        )

    def rates(self, time_step: int) -> dict[str, float]:
        return {
            "learning_rate": self.learning_rate,
            "first_correction": 1.0 / (1.0 - self._beta1**time_step),
            "second_correction": 1.0 / math.sqrt(1.0 - self._beta2**time_step),
        }

    def update(self, h: Mapping[str, Value], w: Value, g: Value, state: Sequence[Value]) -> tuple[Value, list[Value]]:
        m, v = self._moments(g, state)
        step = h["first_correction"] * m / (ops.sqrt(v) * h["second_correction"] + self._epsilon)
        if self.has_penalty:
            step = step + self.penalty(h, w)
        return w - h["learning_rate"] * _trust(w, step) * step, [m, v]


def _trust(w: Value, step: Value) -> Value:
    """|w| / |step|, or 1 where one of them is 0."""
    size, length = (ops.sqrt(ops.sum_(x * x, range(x.rank))) for x in (w, step))
    usable = ops.logical_and(size > 0.0, length > 0.0)
    return ops.select(usable, size, 1.0) / ops.select(usable, length, 1.0)
