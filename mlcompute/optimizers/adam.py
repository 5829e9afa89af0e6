"""Adam and AdamW: steps scaled by running moments of the gradient."""

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


class _Adam(MomentsOptimizer):
    """What Adam and AdamW share: the step that the running moments give."""

    epsilon = ReadOnly[float]("Added to the root of the second moment, before any bias correction.")
    uses_amsgrad = ReadOnly[bool]("True to divide by the largest second moment seen so far.")

    def __init__(
        self,
        descriptor: OptimizerDescriptor | None = None,
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        uses_amsgrad: bool = False,
        time_step: int = 1,
        groups: Sequence[ParameterGroup] = (),
        **shared: Unpack[OptimizerSettings],
    ) -> None:
        super().__init__(
            descriptor, beta1=beta1, beta2=beta2, epsilon=epsilon, time_step=time_step, groups=groups, **shared
        )
        self._uses_amsgrad = bool(uses_amsgrad)

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum", "velocity", "maximum_velocity") if self._uses_amsgrad else ("momentum", "velocity")

    def rates(self, time_step: int) -> dict[str, float]:
        correction = math.sqrt(1.0 - self._beta2**time_step) / (1.0 - self._beta1**time_step)
        return {"step_size": self._learning_rate * correction}

    def _step(self, h: Mapping[str, Value], g: Value, state: Sequence[Value]) -> tuple[Value, list[Value]]:
        """What to subtract from the parameter, and the new state."""
        m, v = self._moments(g, state)
        kept = [m, v]
        if self._uses_amsgrad:
            v = ops.maximum(state[2], v)
            kept.append(v)
        return h["step_size"] * m / (ops.sqrt(v) + self._epsilon), kept


class AdamOptimizer(_Adam):
    """m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g²;  w -= lr √(1-b2ᵗ) / (1-b1ᵗ) m / (√v + epsilon).

    Epsilon is the "epsilon hat" of the paper (arXiv:1412.6980, end of section 2), as in Keras; PyTorch adds
    epsilon after the bias correction instead. AMSGrad divides by the largest v so far.

    time_step: number of the first update; more than 1 to resume, with the saved state bound to the tensors.

    >>> import mlcompute as mlc
    >>> mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=1e-3)).beta2
    0.999
    """

    def update(self, h: Mapping[str, Value], w: Value, g: Value, state: Sequence[Value]) -> tuple[Value, list[Value]]:
        step, kept = self._step(h, g, state)
        return w - step, kept


class AdamWOptimizer(_Adam):
    """Adam, and the penalty acts on the parameter instead of the gradient: w -= Adam's step + lr d.

    d is regularization_scale * w for L2, regularization_scale * sign(w) for L1, and nothing for NONE; it is taken
    from the parameter before the step (arXiv:1711.05101).

    >>> import mlcompute as mlc
    >>> decay = mlc.OptimizerDescriptor(
    ...     learning_rate=1e-3, regularization_type=mlc.RegularizationType.L2, regularization_scale=0.01)
    >>> mlc.AdamWOptimizer(decay).regularization_scale
    0.01
    """

    decouples_penalty: ClassVar[bool] = True

    def rates(self, time_step: int) -> dict[str, float]:
        decay_rate = {"learning_rate": self.learning_rate} if self.has_penalty else {}
        return {**super().rates(time_step), **decay_rate}

    def update(self, h: Mapping[str, Value], w: Value, g: Value, state: Sequence[Value]) -> tuple[Value, list[Value]]:
        step, kept = self._step(h, g, state)
        if self.has_penalty:
            step = step + h["learning_rate"] * self.penalty(h, w)
        return w - step, kept
