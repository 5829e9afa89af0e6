"""Lion: steps of one size, in the direction of the sign of a running mean."""

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


class LionOptimizer(Optimizer):
    """w -= lr (sign(b1 m + (1-b1) g) + d);  m = b2 m + (1-b2) g.   (arXiv:2302.06675)

    The penalty d acts on the parameter: regularization_scale * w for L2. Every element moves by the rate, so rates are
    3 to 10 times smaller than Adam's, and decays as many times larger.

    >>> import mlcompute as mlc
    >>> mlc.LionOptimizer(learning_rate=1e-4, weight_decay=0.1).beta2
    0.99
    """

    largest_sensible_rate: ClassVar[float] = 1.0
    decouples_penalty: ClassVar[bool] = True

    beta1 = ReadOnly[float]("Share of the momentum in the direction of a step.")
    beta2 = ReadOnly[float]("Share of the momentum kept per step.")

    def __init__(
        self,
        descriptor: OptimizerDescriptor | None = None,
        *,
        beta1: float = 0.9,
        beta2: float = 0.99,
        groups: Sequence[ParameterGroup] = (),
        **shared: Unpack[OptimizerSettings],
    ) -> None:
        super().__init__(descriptor, groups, **shared)
        who = "LionOptimizer"
        self._beta1 = checked_number(who, "beta1", beta1, least=0.0, below=1.0)
        self._beta2 = checked_number(who, "beta2", beta2, least=0.0, below=1.0)

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum",)

    def update(self, h: Mapping[str, Value], w: Value, g: Value, state: Sequence[Value]) -> tuple[Value, list[Value]]:
        (m,) = state
        step = ops.sign(m * self._beta1 + g * (1.0 - self._beta1))
        if self.has_penalty:
            step = step + self.penalty(h, w)
        return w - h["learning_rate"] * step, [m * self._beta2 + g * (1.0 - self._beta2)]
