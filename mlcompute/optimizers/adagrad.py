"""Adagrad: gradients divided by the root of the sum of all their squares so far."""

from __future__ import annotations

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


class AdagradOptimizer(CountingOptimizer):
    """s = s + g²;  w -= lr / (1 + (t-1) rate_decay) g / (√s + epsilon).

    initial_sum: what every s starts as.

    >>> import mlcompute as mlc
    >>> mlc.AdagradOptimizer(learning_rate=0.01).epsilon
    1e-10
    """

    largest_sensible_rate: ClassVar[float] = 10.0

    rate_decay = ReadOnly[float]("How fast the rate falls with the number of updates; 0: it stays.")
    initial_sum = ReadOnly[float]("What the sums of squares start as.")
    epsilon = ReadOnly[float]("Added to the root.")

    def __init__(
        self,
        descriptor: OptimizerDescriptor | None = None,
        *,
        rate_decay: float = 0.0,
        initial_sum: float = 0.0,
        epsilon: float = 1e-10,
        time_step: int = 1,
        groups: Sequence[ParameterGroup] = (),
        **shared: Unpack[OptimizerSettings],
    ) -> None:
        super().__init__(descriptor, groups, time_step=time_step, **shared)
        who = "AdagradOptimizer"
        self._rate_decay = checked_number(who, "rate_decay", rate_decay, least=0.0)
        self._initial_sum = checked_number(who, "initial_sum", initial_sum, least=0.0)
        self._epsilon = checked_number(who, "epsilon", epsilon, least=0.0)

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("sum_of_squares",)

    def initial_state(self, name: str) -> float:
        return self._initial_sum

    def rates(self, time_step: int) -> dict[str, float]:
        return {"step_size": self.learning_rate / (1.0 + (time_step - 1) * self._rate_decay)}

    def update(self, h: Mapping[str, Value], w: Value, g: Value, state: Sequence[Value]) -> tuple[Value, list[Value]]:
        s = state[0] + g * g
        return w - h["step_size"] * g / (ops.sqrt(s) + self._epsilon), [s]
