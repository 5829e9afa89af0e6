"""NAdam: Adam that looks one step ahead, as Nesterov's momentum does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mlcompute import ops
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Value
from mlcompute.optimizers.descriptor import OptimizerDescriptor, OptimizerSettings, checked_number
from mlcompute.optimizers.moments import MomentsOptimizer
from mlcompute.optimizers.parameter_group import ParameterGroup

if TYPE_CHECKING:
    from typing_extensions import Unpack


class NAdamOptimizer(MomentsOptimizer):
    """Adam's moments;  w -= lr ((1-u) / (1-U) g + u' / (1-U u') m) / (√(v / (1-b2ᵗ)) + epsilon).

    u = b1 (1 - 0.96^(t momentum_decay) / 2), u' that of the next update, U the product of all u so far: the momentum
    warms up (T. Dozat, Incorporating Nesterov Momentum into Adam).

    >>> import mlcompute as mlc
    >>> mlc.NAdamOptimizer(learning_rate=2e-3).momentum_decay
    0.004
    """

    epsilon = ReadOnly[float]("Added to the root of the corrected second moment.")
    momentum_decay = ReadOnly[float]("How fast the momentum warms up.")

    def __init__(
        self,
        descriptor: OptimizerDescriptor | None = None,
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        momentum_decay: float = 4e-3,
        time_step: int = 1,
        groups: Sequence[ParameterGroup] = (),
        **shared: Unpack[OptimizerSettings],
    ) -> None:
        super().__init__(
            descriptor, beta1=beta1, beta2=beta2, epsilon=epsilon, time_step=time_step, groups=groups, **shared
        )
        self._momentum_decay = checked_number("NAdamOptimizer", "momentum_decay", momentum_decay, least=0.0)

    def _share(self, time_step: int) -> float:
        return self._beta1 * (1.0 - 0.5 * math.pow(0.96, time_step * self._momentum_decay))

    def rates(self, time_step: int) -> dict[str, float]:
        product, step = 1.0, 0
        while step < time_step and product > 1e-20:  # 1 - product is 1 from there on
            step += 1
            product *= self._share(step)
        now, coming = self._share(time_step), self._share(time_step + 1)
        return {
            "gradient_rate": self.learning_rate * (1.0 - now) / (1.0 - product),
            "momentum_rate": self.learning_rate * coming / (1.0 - product * coming),
            "correction": 1.0 / math.sqrt(1.0 - self._beta2**time_step),
        }

    def update(self, h: Mapping[str, Value], w: Value, g: Value, state: Sequence[Value]) -> tuple[Value, list[Value]]:
        m, v = self._moments(g, state)
        below = ops.sqrt(v) * h["correction"] + self._epsilon
        return w - (h["gradient_rate"] * g + h["momentum_rate"] * m) / below, [m, v]
