"""Inputs of a program: data, scalars and random keys in one block of device memory, filled by one copy.

The copy of a small block is part of the captured graph. It comes from pinned memory, of which there are several parts
with a graph each: the host fills one while runs that read the others are still waiting. Small results, the loss above
all, come back the same way: a step whose result nobody reads costs the host nothing. Of large blocks there are two,
used in turn: while a run reads one, the next batch is copied into the other in a stream of its own. A captured training
step runs a program for many slices of a batch: it has as many blocks, or parts, as it is fed slots.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mlcompute.devices.cuda.memory import CudaBuffer, Pinned
from mlcompute.devices.cuda.pinned_copies import Copy
from mlcompute.devices.foreign_array import DeviceArray
from mlcompute.devices.scalars import Scalars
from mlcompute.errors import DataError
from mlcompute.ops.op import Array, Value

if TYPE_CHECKING:
    from mlcompute.devices.cuda.device import Cuda

#: Copying so many bytes takes about as long as it takes two streams to wait for each other.
SMALL_BYTES = 1 << 18
#: Parts of pinned memory for small blocks: so many steps the host may be ahead of the device.
_PARTS = 4
#: Bytes of small results that a run reports by itself.
RESULT_BYTES = 32
_ALIGNMENT = 256


class InputBlocks:
    """The fed values of one program.

    turn       which of several graphs reads what was fed last: each has addresses of its own
    overlaps   is it copied while other runs compute?
    """

    def __init__(self, engine: Cuda, values: Sequence[Value], scalars: Sequence[Value], *, runs_at_once: bool) -> None:
        """runs_at_once   are all phases one run? If not, a later phase reads what was fed to an earlier one."""
        self._engine, self._driver = engine, engine.driver
        self.offsets: dict[Value, int] = {}
        size = 0
        for value in values:
            self.offsets[value] = size
            size += -(-max(value.nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        #: Where the scalars lie, as those that are fed do.
        self._scalars = slice(size, size + Scalars.APART * len(scalars))
        self.offsets.update({value: size + Scalars.APART * place for place, value in enumerate(scalars)})
        size += -(-Scalars.APART * len(scalars) // _ALIGNMENT) * _ALIGNMENT
        self.is_captured = runs_at_once and 0 < size <= SMALL_BYTES
        self.overlaps = runs_at_once and size > SMALL_BYTES
        self._size = size
        self._blocks: list[CudaBuffer] = []
        self._parts: list[_Part] = []
        #: When the last run that reads a block has finished.
        self._read: list[int] = []
        weakref.finalize(self, engine.events.extend, self._read).atexit = False
        self._part = 0
        self.turn = 0
        #: So many parts, and blocks, are used in turn, the others in slots only.
        self._usual = 2 if size > SMALL_BYTES else _PARTS
        self.turns = self._usual if self.is_captured else 2 if self.overlaps else 1
        #: The last run of every turn that nobody has waited for.
        self._readers: list[Reader | None] = [None] * self.turns
        #: Small results that every run sends: where they lie on the device, and behind the inputs in a part.
        self._results: dict[Value, tuple[int, int]] = {}

    def allocate(self) -> None:
        """Take memory: before the first run, and not for programs that are never run."""
        engine = self._engine
        blocks = [CudaBuffer(self._driver, engine.staging, self._size) for _ in range(2 if self.overlaps else 1)]
        self._parts = [_Part(engine, self._size, self.offsets, self._scalars) for _ in range(self._usual)]
        self._blocks = blocks
        if self.overlaps:
            self._read += [engine.take_event() for _ in blocks]

    def address(self, value: Value) -> int:
        """Where a value lies in the block of this turn."""
        return self._blocks[self.turn if self.overlaps else 0].address + self.offsets[value]

    def reserve(self, slots: int) -> None:
        """There shall be so many slots at least."""
        engine = self._engine
        while len(self._parts) < slots:
            self._parts.append(_Part(engine, self._size, self.offsets, self._scalars))
        self._readers += [None] * (slots - len(self._readers))
        while self.overlaps and len(self._blocks) < slots:
            self._blocks.append(CudaBuffer(self._driver, engine.staging, self._size))
            self._read.append(engine.take_event())

    def send(self, inputs: Mapping[Value, Array], scalars: Scalars | None, slot: int | None = None) -> None:
        """Let the next run, or that of a slot, read these arrays, which may be reused when the call returns."""
        before = self._parts[self._part]
        self._part = number = (self._part + 1) % self._usual if slot is None else slot
        part = self._parts[number]
        if self.is_captured:
            self.finish_turn(number)
        part.wait_until_free()
        views = part.views
        for value, array in inputs.items():
            if array.shape != value.shape:
                raise DataError(f"{value}: an array of shape {array.shape} was fed")
            views[value][...] = array
        count = len(inputs)
        if scalars is not None:
            part.scalars[...] = scalars.memory
            count += len(scalars.arrays)
        if self.is_captured:
            if count != len(views):  # the others keep what they were fed before
                for value in views.keys() - inputs.keys() - (scalars.arrays.keys() if scalars is not None else set()):
                    views[value][...] = before.views[value]
            self.turn = number
            return
        driver, stream = self._driver, self._engine.stream
        if self.overlaps:
            self.turn = (self.turn + 1) % self.turns if slot is None else slot
            stream = self._engine.copy_stream
            driver.wait_on_stream(stream, self._read[self.turn])
        block = self._blocks[self.turn if self.overlaps else 0].address
        if count == len(views):
            driver.copy_to_device(block, part.address, self._size, stream)
        else:  # the others keep what they were fed before
            for value in (*inputs, *(scalars.arrays if scalars is not None else ())):
                if value.nbytes:
                    offset = self.offsets[value]
                    driver.copy_to_device(block + offset, part.address + offset, value.nbytes, stream)
        part.is_copied(stream)
        if self.overlaps:
            driver.wait_on_stream(self._engine.stream, part.event)

    def copy_directly(self) -> None:
        """From now on copies are no part of captured graphs."""
        for turn in range(len(self._readers)):
            self.finish_turn(turn)
        self.is_captured = False

    def arrivals(self) -> list[Copy]:
        """Before the first kernel of a run, or of a graph that is captured: fetch what was fed."""
        if not self.is_captured:
            return []
        return [Copy(self._parts[self.turn].address, self._blocks[0].address, self._size)]

    def send_back(self, results: Mapping[Value, int]) -> None:
        """While copies are captured, runs shall send these, given by address: `RESULT_BYTES` at most."""
        offset = 0
        for value, address in results.items():
            self._results[value] = address, offset
            offset += value.nbytes

    def departures(self) -> list[Copy]:
        """After the last kernel of a run, or of a graph that is captured: send small results."""
        if not self.is_captured:
            return []
        start = self._parts[self.turn].address + self._size
        return [Copy(address, start + offset, value.nbytes) for value, (address, offset) in self._results.items()]

    def result(self, reader: Reader, turn: int, value: Value) -> Array:
        """A small result of a run of some turn, which has finished."""
        with self._engine.lock:  # nobody settles the turn meanwhile
            report = reader.report or self._parts[turn].report.tobytes()
        _, offset = self._results[value]
        found = np.empty(value.shape, value.dtype)
        found.reshape(-1).view(np.uint8)[:] = np.frombuffer(report, np.uint8, value.nbytes, offset)
        return found

    def finish_turn(self, turn: int) -> None:
        """Return when the last run of a turn has finished, and what it reports was read: the next overwrites it."""
        reader = self._readers[turn]
        if reader is not None:
            reader.finish()
            if self._results:
                reader.report = self._parts[turn].report.tobytes()
            self._readers[turn] = None

    def is_read(self, run: Reader, turn: int) -> None:
        """A run that reads what was fed in a turn has been started."""
        self._readers[turn] = run
        if self.overlaps and not self.is_captured:
            self._driver.record(self._read[turn], self._engine.stream)


class Reader(Protocol):
    """A run that reads what was fed.

    report   small results it has sent; empty as long as they lie in pinned memory
    """

    report: bytes

    def finish(self) -> None:
        """Wait for it."""


class _Part(Pinned):
    """Pinned memory of a block's size.

    event    marks when it has been copied from, by itself
    report   behind the block: small results of the run that read it
    """

    def __init__(self, engine: Cuda, size: int, offsets: Mapping[Value, int], scalars: slice) -> None:
        super().__init__(engine.driver, size + RESULT_BYTES)
        self._driver = engine.driver
        self.event = engine.take_event()
        weakref.finalize(self, engine.events.append, self.event).atexit = False
        self._is_copied = False
        self.views = {
            value: self.memory[offset : offset + value.nbytes].view(value.dtype).reshape(value.shape)
            for value, offset in offsets.items()
        }
        self.scalars = self.memory[scalars].view(np.float32).reshape(-1, Scalars.APART // 4)
        self.report = self.memory[size:].data

    def is_copied(self, stream: int) -> None:
        """A copy from it has been enqueued."""
        self._driver.record(self.event, stream)
        self._is_copied = True

    def wait_until_free(self) -> None:
        """Return when nobody copies from it any more."""
        if self._is_copied:
            self._driver.wait(self.event)
            self._is_copied = False


class KeptValue:
    """A value that is on its way to the host: called, it waits for it and returns it."""

    def __init__(self, engine: Cuda, value: Value | DeviceArray, address: int) -> None:
        self._engine, self._value = engine, value
        self._memory = engine.small_parts.pop() if engine.small_parts else SmallPart(engine)
        engine.driver.copy_to_host(self._memory.address, address, value.nbytes, engine.stream)
        engine.driver.record(self._memory.event, engine.stream)

    def __call__(self) -> Array:
        self._engine.driver.wait(self._memory.event)
        value = self._value
        return np.array(self._memory.memory[: value.nbytes].view(value.dtype).reshape(value.shape))

    def __del__(self) -> None:
        memory = getattr(self, "_memory", None)
        if memory is not None:
            # Whoever takes it next copies into it behind this copy, in the same stream.
            self._engine.small_parts.append(memory)


class SmallPart(Pinned):
    """Pinned memory for one small value."""

    NBYTES = 4096

    def __init__(self, engine: Cuda) -> None:
        super().__init__(engine.driver, self.NBYTES)
        self.event = engine.take_event()
