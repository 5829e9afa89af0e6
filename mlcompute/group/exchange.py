"""The operations of a group of processes, on one page. Exchange engines (MPI, threads, sockets) implement it.

Calls are collective: every process makes the same ones in the same order. One that is not answered in time, or answered
by another call, raises ProcessError on every process that can still be reached; nothing waits for ever.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


class Kind(enum.IntEnum):
    """What a call is for. Processes that make different calls are told so."""

    ABORT = 0
    LEAVE = 1
    GREET = 2
    COMPILE = 3
    STEP = 4
    PARAMETERS = 5
    STATE = 6
    RESULTS = 7
    GRADIENTS = 8
    TRAINER = 9
    BARRIER = 10
    BROADCAST = 11
    GATHER = 12
    NORM = 13
    STATISTICS = 14

    @property
    def words(self) -> str:
        """As messages call it."""
        return _WORDS[self]


_WORDS = {
    Kind.ABORT: "abort",
    Kind.LEAVE: "the end of its program",
    Kind.GREET: "Group",
    Kind.COMPILE: "compile",
    Kind.STEP: "a training step",
    Kind.PARAMETERS: "the parameters of a training step",
    Kind.STATE: "reading optimizer state",
    Kind.RESULTS: "reading results",
    Kind.GRADIENTS: "reading gradients",
    Kind.TRAINER: "the Trainer",
    Kind.BARRIER: "Group.barrier",
    Kind.BROADCAST: "Group.broadcast",
    Kind.GATHER: "Group.allgather",
    Kind.NORM: "the norm of the gradients",
    Kind.STATISTICS: "batch statistics",
}


class Among(NamedTuple):
    """Some processes that exchange something between them.

    ranks      the others of them
    patience   seconds to wait beyond the timeout: where some wait for others that wait themselves, those who wait for
               the silent one shall be the first to say so
    """

    ranks: Sequence[int]
    patience: float = 0.0


class Exchange(ABC):
    """The processes of a group, seen from one of them.

    rank, size  which of how many processes this is
    timeout     seconds to wait for the others in one call
    engine      "mpi", "tcp", "local" or "alone"
    """

    rank: int
    size: int
    timeout: float
    engine: str

    @abstractmethod
    def alltoall(
        self,
        kind: Kind,
        sends: Sequence[Array],
        receives: Sequence[Array],
        *,
        same: int = 0,
        word: int = 0,
        among: Among | None = None,
    ) -> list[int]:
        """Send each process an array and receive one from each into the memory given, whose sizes everybody knows.

        same     a number that must be equal on all processes: how many samples a step has, say
        among    only between these, while all others do the same between them
        returns  the `word` of every process, by rank; 0 where nothing was sent
        """

    @abstractmethod
    def allgather(self, kind: Kind, part: Array, receives: Sequence[Array], *, among: Among | None = None) -> None:
        """Send all processes the same array and receive one from each. The own one stays where it is."""

    @abstractmethod
    def gather_bytes(self, kind: Kind, message: bytes) -> list[bytes]:
        """Messages of any length from all processes, by rank."""

    @abstractmethod
    def broadcast(self, kind: Kind, array: Array, root: int = 0) -> None:
        """The array of one process, into the memory of all others."""

    def barrier(self) -> None:
        """Return when all processes have called it."""
        self.gather_bytes(Kind.BARRIER, b"")

    @property
    def machine(self) -> range:
        """The ranks that share memory with this one, itself among them. Collective."""
        return range(self.rank, self.rank + 1)

    def share(self, nbytes: int) -> dict[int, Array]:
        """Memory that all of `machine` read and write, by rank, each with a part of so many bytes; empty: not here."""
        return {}

    def expect_usable(self) -> None:
        """Raise what the group has failed with, if it has."""
        return

    def expect_alive(
        self, kind: Kind, waiting: Sequence[int], is_missing: Callable[[int], bool], begun: float, spins: int
    ) -> None:
        """Somebody waits for others without messages: raise ProcessError where they are gone, or say something else.

        is_missing   has a process still not come? One that has may already have sent its next message
        """
        return

    def refuse(self, peer: int, kind: Kind, theirs: Kind, same: int, their_same: int) -> None:
        """Raise ProcessError: another process makes another call, or with another number that must be the same."""
        return

    @property
    def sends_early(self) -> bool:
        """Is it worth to send something while more is computed: over a network, and from any thread? Collective."""
        return False

    @abstractmethod
    def abort(self, message: str) -> None:
        """Let the others fail with this message, at once where they wait and else in their next call."""

    @abstractmethod
    def shrink(self) -> list[int]:
        """Go on without the processes that are gone; rank and size become those among the survivors.

        returns  the former ranks of the survivors, in their new order
        """


class Alone(Exchange):
    """A group of one process."""

    rank, size, engine = 0, 1, "alone"

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout

    def alltoall(
        self,
        kind: Kind,
        sends: Sequence[Array],
        receives: Sequence[Array],
        *,
        same: int = 0,
        word: int = 0,
        among: Among | None = None,
    ) -> list[int]:
        return [word]

    def allgather(self, kind: Kind, part: Array, receives: Sequence[Array], *, among: Among | None = None) -> None:
        return

    def gather_bytes(self, kind: Kind, message: bytes) -> list[bytes]:
        return [message]

    def broadcast(self, kind: Kind, array: Array, root: int = 0) -> None:
        return

    def abort(self, message: str) -> None:
        return

    def shrink(self) -> list[int]:
        return [0]
