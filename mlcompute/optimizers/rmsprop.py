"""RMSProp: gradients divided by the root of their running mean square."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from mlcompute import ops
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Value
from mlcompute.optimizers.descriptor import OptimizerDescriptor, OptimizerSettings, checked_number
from mlcompute.optimizers.optimizer import Optimizer
from mlcompute.optimizers.parameter_group import ParameterGroup

if TYPE_CHECKING:
    from typing_extensions import Unpack


class RMSPropOptimizer(Optimizer):
    """n = a n + (1-a) g²;  delta = s delta - lr g / (√n + epsilon);  w += delta.

    Centered: n minus the square of the running mean of g takes the place of n under the root. The rate is inside
    delta, so after a change of rate old contributions keep the old one (PyTorch multiplies by the rate afterwards).

    >>> import mlcompute as mlc
    >>> mlc.RMSPropOptimizer(mlc.OptimizerDescriptor(learning_rate=0.01), is_centered=True).alpha
    0.99
    """

    largest_sensible_rate: ClassVar[float] = 10.0

    momentum_scale = ReadOnly[float]("Share of the last change kept per step; 0 keeps none.")
    alpha = ReadOnly[float]("Share of the running means kept per step.")
    epsilon = ReadOnly[float]("Added to the root.")
    is_centered = ReadOnly[bool](
        "True to divide by an estimate of the standard deviation instead of the root mean square."
    )

    def __init__(
        self,
        descriptor: OptimizerDescriptor | None = None,
        *,
        momentum_scale: float = 0.0,
        alpha: float = 0.99,
        epsilon: float = 1e-8,
        is_centered: bool = False,
        groups: Sequence[ParameterGroup] = (),
        **shared: Unpack[OptimizerSettings],
    ) -> None:
        super().__init__(descriptor, groups, **shared)
        who = "RMSPropOptimizer"
        self._momentum_scale = checked_number(who, "momentum_scale", momentum_scale, least=0.0, below=1.0)
        self._alpha = checked_number(who, "alpha", alpha, least=0.0, below=1.0)
        self._epsilon = checked_number(who, "epsilon", epsilon, least=0.0)
        self._is_centered = bool(is_centered)

    @property
    def state_names(self) -> tuple[str, ...]:
        centre = ("mean_gradient",) if self._is_centered else ()
        change = ("delta",) if self._momentum_scale else ()
        return ("mean_square", *centre, *change)

    def update(self, h: Mapping[str, Value], w: Value, g: Value, state: Sequence[Value]) -> tuple[Value, list[Value]]:
        n = state[0] * self._alpha + g * g * (1.0 - self._alpha)
        kept, spread = [n], n
        if self._is_centered:
            a = state[1] * self._alpha + g * (1.0 - self._alpha)
            kept.append(a)
            # A variance is not negative, but the rounded difference of nearly equal numbers can be.
            spread = ops.maximum(n - a * a, 0.0)
        step = h["learning_rate"] * g / (ops.sqrt(spread) + self._epsilon)
        if not self._momentum_scale:
            return w - step, kept
        delta = state[-1] * self._momentum_scale - step
        return w + delta, [*kept, delta]
