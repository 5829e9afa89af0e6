"""CountingOptimizer: rules whose step depends on how many updates came before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlcompute.optimizers.descriptor import OptimizerDescriptor, OptimizerSettings, checked_count
from mlcompute.optimizers.optimizer import Optimizer
from mlcompute.optimizers.parameter_group import ParameterGroup

if TYPE_CHECKING:
    from typing_extensions import Unpack


class CountingOptimizer(Optimizer):
    """Base of rules that count.

    time_step: number of the first update; more than 1 to resume, with the saved state bound to the tensors.
    """

    def __init__(
        self,
        descriptor: OptimizerDescriptor | None = None,
        groups: Sequence[ParameterGroup] = (),
        *,
        time_step: int = 1,
        **shared: Unpack[OptimizerSettings],
    ) -> None:
        super().__init__(descriptor, groups, **shared)
        self._time_step = self._begins_at = checked_count(type(self).__name__, "time_step", time_step, least=1)

    @property
    def time_step(self) -> int:
        """Number of the next update, 1 for the first; grows by one per update of all parameters.

        It waits for queued updates.
        """
        self._memory.wait_for_updates()
        return self._time_step

    @property
    def first_step(self) -> int:
        return self._begins_at

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._begins_at = self._time_step  # a copy goes on counting where the original was
