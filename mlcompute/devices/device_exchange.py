"""Memory of several devices: sums in it, and copies from one to another, without the host. An engine implements it.

Everything is enqueued behind what was started on the devices before, and nothing here waits. Where an engine can
capture what is enqueued, copies between devices too, a step is captured once and then launched as one graph per device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mlcompute.devices.device import Buffer, Completion, Engine, Executable
from mlcompute.devices.foreign_array import DeviceArray
from mlcompute.ops.op import Array, Value

#: Numbers to add: a buffer, or two sums that are added. So the order of all additions is said.
SumTree = Buffer | tuple["SumTree", "SumTree"]


class Transfer(NamedTuple):
    """Bytes on their way from one device to another, by rank; None for memory of another process."""

    source: int
    target: int
    read: Buffer | None
    written: Buffer | None


class Work(NamedTuple):
    """A part of a training step that nothing on the host interrupts.

    key           equal for parts that enqueue the same on the same memory, but for the slots of what they are fed
    bank          which slots: those of one bank are filled while a part that reads the other is still waiting
    executables   the programs it runs
    enqueue       enqueues it
    """

    key: Hashable
    bank: int
    executables: Sequence[Executable]
    enqueue: Callable[[], None]


class DeviceExchange(ABC):
    """The devices that train together, seen from one process.

    engines   those of this process
    rank      of the first of them; they follow each other
    size      devices of all processes
    name      what carries the bytes, for people to read
    captures  does `perform` capture work and launch it again? Then programs are fed in slots
    """

    engines: Sequence[Engine]
    rank: int
    size: int
    name: str
    captures: bool = False

    # Programs ---------------------------------------------------------------------------------------------------------

    def reserve(self, rank: int, executable: Executable, slots: int) -> None:
        """Let a program be fed in so many slots before it runs."""
        return

    def overlaps(self, executable: Executable) -> bool:
        """Is what the program is fed so large that it should be copied while another run computes?"""
        return False

    def feed(self, rank: int, executable: Executable, inputs: Mapping[Value, Array], slot: int) -> None:
        """Let the run of a slot read these arrays; a device without slots lets the next run read them."""
        executable.feed(self.engines[rank - self.rank], inputs)

    def run(self, rank: int, executable: Executable, phases: Sequence[str], slot: int) -> None:
        """Enqueue some phases, which read what a slot was fed."""
        executable.run(phases)

    def readiness(self, work: Work) -> int:
        """What can be done with it: 0 enqueue it, 1 capture it, for it was enqueued before, 2 launch what was captured.

        All processes must do the same, which is what the least ready of them can do.
        """
        return 0

    def perform(self, work: Work, readiness: int) -> None:
        """Enqueue, capture or launch it (see `readiness`)."""
        work.enqueue()

    # Failures: a captured step goes on after invalid data, and must not change anything that outlives it -----------

    def clear_failures(self) -> None:
        """Nothing has failed on the devices of this process."""
        return

    def note_failure(self, rank: int, executable: Executable) -> None:
        """Look whether the runs of a program have failed."""
        return

    def failures(self) -> Sequence[Transfer]:
        """What tells every device of failures on all others."""
        return ()

    def guard(self, rank: int, executable: Executable | None) -> None:
        """A device has been told: where something has failed, a program and sums that are guarded change nothing."""
        return

    def has_failed(self, executables: Sequence[Executable], phases: Sequence[str]) -> bool:
        """Wait; raise ExecutionError where a program of this process has failed. Has one of another?"""
        return False

    # Memory -----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def part(self, buffer: Buffer, offset: int, nbytes: int) -> Buffer:
        """Some of a buffer's bytes."""

    @abstractmethod
    def copy(self, rank: int, target: Buffer, source: Buffer) -> None:
        """Copy within a device."""

    @abstractmethod
    def add(self, rank: int, target: Buffer, tree: SumTree, dtype: np.dtype[Any], *, is_guarded: bool = False) -> None:
        """target = the sum of buffers of one device, added in the order of the tree; the target may be one of them.

        is_guarded   the target stays as it is where something has failed (see `guard`)
        """

    @abstractmethod
    def move(self, transfers: Sequence[Transfer]) -> None:
        """Copies between devices. All processes ask for the same ones, in the same order."""

    @abstractmethod
    def keep(self, rank: int, array: DeviceArray) -> Callable[[], Array]:
        """Values of a device as they are when it has come so far, whatever it does then."""

    @abstractmethod
    def mark(self) -> Completion:
        """What was enqueued so far on the devices of this process."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Return when everything is done; DeviceError when it takes longer: another process may be gone."""
