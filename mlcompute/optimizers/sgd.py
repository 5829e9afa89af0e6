"""Stochastic gradient descent, plain or with momentum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Value
from mlcompute.optimizers.descriptor import OptimizerDescriptor, OptimizerSettings, checked_number
from mlcompute.optimizers.optimizer import Optimizer
from mlcompute.optimizers.parameter_group import ParameterGroup

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SGDOptimizer(Optimizer):
    """w -= lr g;   momentum: m = s m + lr g, w -= m;   Nesterov: m = s m + g, w -= lr (g + s m).

    The rate is inside the momentum but not inside Nesterov's: only the latter follows a changed rate at once.

    >>> import mlcompute as mlc
    >>> mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=0.1), momentum_scale=0.9).momentum_scale
    0.9
    """

    momentum_scale = ReadOnly[float]("Share of the momentum kept per step; 0 keeps none and needs no state.")
    uses_nesterov_momentum = ReadOnly[bool]("True for Nesterov's variant.")

    def __init__(
        self,
        descriptor: OptimizerDescriptor | None = None,
        *,
        momentum_scale: float = 0.0,
        uses_nesterov_momentum: bool = False,
        groups: Sequence[ParameterGroup] = (),
        **shared: Unpack[OptimizerSettings],
    ) -> None:
        super().__init__(descriptor, groups, **shared)
        self._momentum_scale = checked_number("SGDOptimizer", "momentum_scale", momentum_scale, least=0.0, below=1.0)
        self._uses_nesterov_momentum = bool(uses_nesterov_momentum)

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum",) if self._momentum_scale else ()

    def update(self, h: Mapping[str, Value], w: Value, g: Value, state: Sequence[Value]) -> tuple[Value, list[Value]]:
        rate, scale = h["learning_rate"], self._momentum_scale
        if not scale:
            return w - rate * g, []
        (m,) = state
        if self._uses_nesterov_momentum:
            m = m * scale + g
            return w - rate * (g + m * scale), [m]
        m = m * scale + rate * g
        return w - m, [m]
