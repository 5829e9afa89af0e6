"""OptimizerMemory: an optimizer's data about parameters. Users have `Tensor.optimizer_data`."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from mlcompute.optimizers.optimizer import Optimizer
    from mlcompute.runtime.optimizer_state import Clock
    from mlcompute.runtime.storage import Storage
    from mlcompute.tensor import Tensor


class OptimizerMemory:
    """State per parameter, and how often it was updated; see runtime/optimizer_state.py."""

    def __init__(self) -> None:
        self.buffers: WeakKeyDictionary[Tensor, list[Storage]] = WeakKeyDictionary()
        #: One per set of parameters that graphs update.
        self.clocks: list[Clock] = []
        #: Parameters that have not been updated yet, where some state starts as the parameter.
        self.fresh: WeakKeyDictionary[Tensor, None] = WeakKeyDictionary()
        #: How many updates went by without a parameter, and the number of the first that one not trained now missed.
        self.missed: WeakKeyDictionary[Tensor, int] = WeakKeyDictionary()
        self.left_at: WeakKeyDictionary[Tensor, int] = WeakKeyDictionary()

    def wait_for_updates(self) -> None:
        """Return when the queued runs of all graphs with the optimizer have finished."""
        for clock in list(self.clocks):
            for user in list(clock.users):
                user.wait()


#: What an optimizer remembers.
memory_of: Callable[[Optimizer], OptimizerMemory] = attrgetter("_memory")
