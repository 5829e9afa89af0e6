"""MomentsOptimizer: rules that keep running means of gradients and of their squares, as Adam does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Value
from mlcompute.optimizers.counting import CountingOptimizer
from mlcompute.optimizers.descriptor import OptimizerDescriptor, OptimizerSettings, checked_number
from mlcompute.optimizers.parameter_group import ParameterGroup

if TYPE_CHECKING:
    from typing_extensions import Unpack


class MomentsOptimizer(CountingOptimizer):
    """m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g²."""

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
        who = type(self).__name__
        self._beta1 = checked_number(who, "beta1", beta1, least=0.0, below=1.0)
        self._beta2 = checked_number(who, "beta2", beta2, least=0.0, below=1.0)
        self._epsilon = checked_number(who, "epsilon", epsilon, least=0.0)

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum", "velocity")

    def _moments(self, g: Value, state: Sequence[Value]) -> tuple[Value, Value]:
        """Both means with this gradient."""
        m = state[0] * self._beta1 + g * (1.0 - self._beta1)
        v = state[1] * self._beta2 + g * g * (1.0 - self._beta2)
        return m, v
