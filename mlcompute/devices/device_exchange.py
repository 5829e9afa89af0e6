"""Memory of several devices: sums in it, and copies from one to another, without the host. An engine implements it.

Everything is enqueued behind what was started on the devices before, and nothing here waits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mlcompute.devices.device import Buffer, Completion, Engine
from mlcompute.devices.foreign_array import Lying
from mlcompute.ops.op import Array

#: Numbers to add: a buffer, or two sums that are added. So the order of all additions is said.
SumTree = Buffer | tuple["SumTree", "SumTree"]


class Transfer(NamedTuple):
    """Bytes on their way from one device to another, by rank; None for memory of another process."""

    source: int
    target: int
    read: Buffer | None
    written: Buffer | None


class DeviceExchange(ABC):
    """The devices that train together, seen from one process.

    engines   those of this process
    rank      of the first of them; they follow each other
    size      devices of all processes
    name      what carries the bytes, for people to read
    """

    engines: Sequence[Engine]
    rank: int
    size: int
    name: str

    @abstractmethod
    def part(self, buffer: Buffer, offset: int, nbytes: int) -> Buffer:
        """Some of a buffer's bytes."""

    @abstractmethod
    def copy(self, rank: int, target: Buffer, source: Buffer) -> None:
        """Copy within a device."""

    @abstractmethod
    def add(self, rank: int, target: Buffer, tree: SumTree, dtype: np.dtype[Any]) -> None:
        """target = the sum of buffers of one device, added in the order of the tree; the target may be one of them."""

    @abstractmethod
    def move(self, transfers: Sequence[Transfer]) -> None:
        """Copies between devices. All processes ask for the same ones, in the same order."""

    @abstractmethod
    def keep(self, rank: int, lying: Lying) -> Callable[[], Array]:
        """Values of a device as they are when it has come so far, whatever it does then."""

    @abstractmethod
    def mark(self) -> Completion:
        """What was enqueued so far on the devices of this process."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Return when everything is done; DeviceError when it takes longer: another process may be gone."""
