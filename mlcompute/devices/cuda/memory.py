"""Memory of the device, and the pinned memory through which data goes there and back."""

from __future__ import annotations

import copy
import ctypes
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from mlcompute.devices.device import Buffer
from mlcompute.devices.loop_nest import Operand
from mlcompute.ops.op import Array, Value

if TYPE_CHECKING:
    from mlcompute.devices.cuda.cuda_bindings import CudaDriver

#: Pinned memory is used in turn, in so many parts of so many bytes: one is filled while others are being copied.
PART_BYTES, PARTS = 4 << 20, 8
#: Small arrays begin at multiples of so many bytes.
_ALIGNMENT = 64

#: Constants begin at multiples of so many bytes, as buffers do.
_CONSTANT_ALIGNMENT = 256


class Staging:
    """Copies between the host and a device on one stream, through pinned memory.

    What is sent may be reused at once: it has been copied into pinned memory, and the device fetches it from there
    when the stream's turn has come. Parts of the pinned memory are used in turn, so many small arrays may be waiting
    while a program runs.
    """

    def __init__(self, driver: CudaDriver, stream: int) -> None:
        self._driver, self._stream = driver, stream
        #: A graph that nobody needs any more is taken apart in the middle of anything, and keeps its last results.
        self._lock = threading.RLock()
        self._sent: list[_Part] = []
        self._fetched: list[_Part] = []
        #: The part that is being filled, and how far.
        self._current, self._used = 0, 0

    def send(self, array: Array, address: int) -> None:
        """Enqueue a copy of an array to the device."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        with self._lock:
            done = 0
            while done < data.nbytes:
                part, start = self._room(data.nbytes - done)
                count = min(data.nbytes - done, PART_BYTES - start)
                part.memory[start : start + count] = data[done : done + count]
                self._driver.copy_to_device(address + done, part.address + start, count, self._stream)
                self._used = -(-(start + count) // _ALIGNMENT) * _ALIGNMENT
                done += count

    def _room(self, needed: int) -> tuple[_Part, int]:
        """Pinned memory that nobody reads any more, at least as large as what is needed or as a part."""
        if not self._sent:
            self._sent = [_Part(self._driver) for _ in range(PARTS)]
        if PART_BYTES - self._used < min(needed, PART_BYTES):
            # The device has read a part when the stream has come to this mark.
            self._driver.record(self._sent[self._current].event, self._stream)
            self._current, self._used = (self._current + 1) % PARTS, 0
            self._driver.wait(self._sent[self._current].event)
        return self._sent[self._current], self._used

    def fetch(self, out: Array, address: int) -> None:
        """Copy from the device into an array, after everything that was enqueued before."""
        target = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
        data = target.reshape(-1).view(np.uint8)
        with self._lock:
            parts, self._fetched = self._fetched or [_Part(self._driver) for _ in range(2)], []
            pieces = [(start, min(PART_BYTES, data.nbytes - start)) for start in range(0, data.nbytes, PART_BYTES)]
            # One piece is on its way while the one before it is copied out.
            for number in range(len(pieces) + 1):
                if number < len(pieces):
                    start, count = pieces[number]
                    part = parts[number % 2]
                    self._driver.copy_to_host(part.address, address + start, count, self._stream)
                    self._driver.record(part.event, self._stream)
                if number:
                    start, count = pieces[number - 1]
                    part = parts[(number - 1) % 2]
                    self._driver.wait(part.event)
                    data[start : start + count] = part.memory[:count]
            self._fetched = parts
        if target is not out:
            np.copyto(out, target)


class Pinned:
    """Host memory that the device copies from and to by itself, as an array of bytes."""

    def __init__(self, driver: CudaDriver, nbytes: int) -> None:
        self.address = driver.allocate_pinned(nbytes)
        self.memory: Array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.address))
        # With the array, which the cyclic collector does not see (see _unseen): a destructor may pass it on.
        weakref.finalize(self.memory, driver.free_pinned, self.address).atexit = False


class _Part(Pinned):
    """A part of the pinned memory; `event` marks when the stream has finished with it."""

    def __init__(self, driver: CudaDriver) -> None:
        super().__init__(driver, PART_BYTES)
        self.event = driver.create_event()
        weakref.finalize(self, driver.free_event, self.event).atexit = False


class _DeviceMemory:
    """Owns device memory."""

    __slots__ = ("_address", "_driver")

    def __init__(self, driver: CudaDriver, address: int) -> None:
        self._driver, self._address = driver, address

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # When the interpreter ends, the driver may be gone already, and memory goes with the process.
        if not is_finalizing():
            self._driver.free(self._address)


def _unseen(owner: object) -> Array:
    """An owner of memory where the cyclic collector does not see it, which is in an array.

    The collector calls destructors of unreachable objects in any order, and a graph's reads what the device computed.
    What it does not see goes when nothing refers to it any more, after all of these.
    """
    holder = np.empty((), object)
    holder[()] = owner
    return holder


class CudaBuffer(Buffer):
    """Bytes on the device, given back with the last reference to them."""

    __slots__ = ("__weakref__", "_memory", "_nbytes", "_staging", "address")
    host = None

    def __init__(self, driver: CudaDriver, staging: Staging, nbytes: int) -> None:
        self._staging, self._nbytes = staging, nbytes
        self._memory: Array | None = None
        self.address = 0
        if nbytes:
            self.address = driver.allocate(nbytes)
            self._memory = _unseen(_DeviceMemory(driver, self.address))

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @classmethod
    def over(cls, staging: Staging, address: int, nbytes: int, owner: object) -> CudaBuffer:
        """Memory of somebody else, who keeps it as long as the buffer is there."""
        found = cls.__new__(cls)
        found._staging, found._nbytes, found._memory = staging, nbytes, _unseen(owner)  # noqa: SLF001
        found.address = address
        return found

    def part(self, offset: int, nbytes: int) -> CudaBuffer:
        """Some of the same bytes."""
        assert 0 <= offset <= offset + nbytes <= self._nbytes
        found = copy.copy(self)
        found._nbytes, found.address = nbytes, self.address + offset  # noqa: SLF001
        return found

    def write(self, array: Array, offset: int = 0) -> None:
        self._staging.send(array, self.address + offset)

    def read(self, out: Array, offset: int = 0) -> None:
        self._staging.fetch(out, self.address + offset)


class PlacedConstants(CudaBuffer):
    """The constants of a program: one after the other in one buffer, sent at once."""

    def __init__(self, driver: CudaDriver, staging: Staging, constants: Mapping[Value, Array]) -> None:
        self._places: dict[Value, int] = {}
        size = 0
        for value in constants:
            self._places[value] = size
            size += -(-value.nbytes // _CONSTANT_ALIGNMENT) * _CONSTANT_ALIGNMENT
        super().__init__(driver, staging, size)
        memory = np.zeros(size, np.uint8)
        for value, array in constants.items():
            data = np.ascontiguousarray(array, value.dtype).reshape(-1).view(np.uint8)
            memory[self._places[value] : self._places[value] + value.nbytes] = data
        self.write(memory)

    def address_of(self, operand: Operand) -> int | None:
        """Where an operand begins; None for what is no constant."""
        place = self._places.get(operand.base)
        return None if place is None else self.address + place + operand.byte_offset
