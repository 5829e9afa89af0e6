"""Adadelta: steps in units of the steps before, divided by the size of gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mlcompute import ops
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Value
from mlcompute.optimizers.descriptor import OptimizerDescriptor, OptimizerSettings, checked_number
from mlcompute.optimizers.optimizer import Optimizer
from mlcompute.optimizers.parameter_group import ParameterGroup

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AdadeltaOptimizer(Optimizer):
    """n = a n + (1-a) g²;  u = √(c + epsilon) / √(n + epsilon) g;  c = a c + (1-a) u²;  w -= lr u.   (arXiv:1212.5701)

    >>> import mlcompute as mlc
    >>> mlc.AdadeltaOptimizer(learning_rate=1.0).alpha
    0.9
    """

    alpha = ReadOnly[float]("Share of the running means kept per step.")
    epsilon = ReadOnly[float]("Added under both roots.")

    def __init__(
        self,
        descriptor: OptimizerDescriptor | None = None,
        *,
        alpha: float = 0.9,
        epsilon: float = 1e-6,
        groups: Sequence[ParameterGroup] = (),
        **shared: Unpack[OptimizerSettings],
    ) -> None:
        super().__init__(descriptor, groups, **shared)
        who = "AdadeltaOptimizer"
        self._alpha = checked_number(who, "alpha", alpha, least=0.0, below=1.0)
        self._epsilon = checked_number(who, "epsilon", epsilon, least=0.0)

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("mean_square", "mean_square_change")

    def update(self, h: Mapping[str, Value], w: Value, g: Value, state: Sequence[Value]) -> tuple[Value, list[Value]]:
        n = state[0] * self._alpha + g * g * (1.0 - self._alpha)
        step = ops.sqrt(state[1] + self._epsilon) / ops.sqrt(n + self._epsilon) * g
        c = state[1] * self._alpha + step * step * (1.0 - self._alpha)
        return w - h["learning_rate"] * step, [n, c]
