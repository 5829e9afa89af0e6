"""RAdam: Adam whose adaptive steps begin once their variance can be trusted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from mlcompute import ops
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Value
from mlcompute.optimizers.counting import CountingOptimizer
from mlcompute.optimizers.descriptor import OptimizerDescriptor, OptimizerSettings, checked_number
from mlcompute.optimizers.parameter_group import ParameterGroup

if TYPE_CHECKING:
    from typing_extensions import Unpack


class RAdamOptimizer(CountingOptimizer):
    """Adam's moments;  w -= lr / (1-b1ᵗ) m r √(1-b2ᵗ) / (√v + epsilon), or lr / (1-b1ᵗ) m in the first updates.

    r corrects for the variance of v over few updates (arXiv:1908.03265); while v is an average of 5 gradients at most,
    it is not used at all.

    >>> import mlcompute as mlc
    >>> mlc.RAdamOptimizer(learning_rate=1e-3).beta2
    0.999
    """

    settings: ClassVar[tuple[str, ...]] = ("beta1", "beta2", "epsilon", "time_step")
    largest_sensible_rate: ClassVar[float] = 10.0

    beta1 = ReadOnly[float]("Share of the running mean of gradients kept per step.")
    beta2 = ReadOnly[float]("Share of the running mean of squared gradients kept per step.")
    epsilon = ReadOnly[float]("Added to the root of the second moment.")

    def __init__(
        self,
        descriptor: OptimizerDescriptor | None = None,
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        time_step: int = 1,
        groups: Sequence[ParameterGroup] = (),
        **shared: Unpack[OptimizerSettings],
    ) -> None:
        super().__init__(descriptor, groups, time_step=time_step, **shared)
        who = "RAdamOptimizer"
        self._beta1 = checked_number(who, "beta1", beta1, least=0.0, below=1.0)
        self._beta2 = checked_number(who, "beta2", beta2, least=0.0, below=1.0)
        self._epsilon = checked_number(who, "epsilon", epsilon, least=0.0)

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum", "velocity")

    def rates(self, time_step: int) -> dict[str, float]:
        kept = self._beta2**time_step
        longest = 2.0 / (1.0 - self._beta2) - 1.0
        length = longest - 2.0 * time_step * kept / (1.0 - kept)
        rate = self.learning_rate / (1.0 - self._beta1**time_step)
        if length <= 5.0:
            return {"plain_rate": rate, "adaptive_rate": 0.0}
        squared = (length - 4.0) * (length - 2.0) * longest / ((longest - 4.0) * (longest - 2.0) * length)
        return {"plain_rate": 0.0, "adaptive_rate": rate * math.sqrt(squared * (1.0 - kept))}

    def update(self, h: Mapping[str, Value], w: Value, g: Value, state: Sequence[Value]) -> tuple[Value, list[Value]]:
        m = state[0] * self._beta1 + g * (1.0 - self._beta1)
        v = state[1] * self._beta2 + g * g * (1.0 - self._beta2)
        return w - m * (h["adaptive_rate"] / (ops.sqrt(v) + self._epsilon) + h["plain_rate"]), [m, v]
