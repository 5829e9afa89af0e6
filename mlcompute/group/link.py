"""Messages between pairs of processes: what an engine of exchange must be able to do (mpi.py, tcp.py, local.py)."""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from mlcompute.group.exchange import Array

#: Polls without news before the thread lets others have the core.
SPINS = 50


def _core_yielder() -> Callable[[], object]:
    """A function that yields the core to other processes, and the interpreter to other threads."""
    try:
        # From Python 3.11 on time.sleep(0) is a sleep of some 60 microseconds, on Linux.
        yielder: Callable[[], object] = ctypes.CDLL(None).sched_yield
    except (AttributeError, OSError, TypeError):  # Windows
        return lambda: time.sleep(0)
    return yielder


_yield_core = _core_yielder()


class LostError(Exception):
    """A process is gone: it was killed, or its connection broke."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(*ranks)
        self.ranks = tuple(ranks)


class Link(ABC):
    """Messages to and from each of the other processes, in order for each pair.

    A transfer is a function that gives True once it is done and raises LostError when it never will be. Its memory
    must stay as it is until then.
    """

    rank: int
    size: int
    engine: str
    #: May threads other than the first use it, one at a time?
    from_any_thread = True

    @abstractmethod
    def send(self, to: int, data: Array) -> Callable[[], bool]:
        """Start sending bytes."""

    @abstractmethod
    def receive(self, source: int, into: Array) -> Callable[[], bool]:
        """Start receiving bytes."""

    def idle(self, spins: int) -> None:
        """Nothing has come for some polls: let other threads and processes run."""
        # A step of a small network takes less than a sleep; whoever waits longer must not take a core from the others,
        # nor a half of one where two share it.
        if spins < 2 * SPINS:
            _yield_core()
        else:
            time.sleep(min(1e-3, 1e-7 * spins))

    @abstractmethod
    def survivors(self) -> list[int]:
        """Agree with everybody who is left on who that is; from then on the link is between those."""
