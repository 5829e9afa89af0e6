"""What a program is fed: inputs, scalars and random keys in one block of device memory, which one copy fills.

The copy of a small block is part of the captured graph. It comes from pinned memory, of which there are several parts
with a graph each: the host fills one while runs that read the others are still waiting. Small results, the loss above
all, come back the same way: a step whose result nobody reads costs the host nothing. Of large blocks there are two,
used in turn: while a run reads one, the next batch is copied into the other in a stream of its own. A captured training
step runs a program for many slices of a batch: it has as many blocks, or parts, as it is fed slots.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mlcompute.devices.cuda.completion import CudaCompletion
from mlcompute.devices.cuda.memory import CudaBuffer, Pinned
from mlcompute.devices.cuda.pinned_copies import Copy
from mlcompute.devices.foreign_array import Lying
from mlcompute.errors import DataError
from mlcompute.ops.op import Array, Value

if TYPE_CHECKING:
    from mlcompute.devices.cuda.device import Cuda

#: Copying so many bytes takes about as long as it takes two streams to wait for each other.
SMALL_BYTES = 1 << 18
#: Parts of pinned memory for small blocks: so many steps the host may be ahead of the device.
_PARTS = 4
#: Bytes of small results that a run reports by itself.
RESULT_BYTES = 256
_ALIGNMENT = 256


class InputBlocks:
    """The fed values of one program.

    turn       which of several graphs reads what was fed last: each has addresses of its own
    overlaps   is it copied while other runs compute?
    """

    def __init__(self, engine: Cuda, values: Sequence[Value], *, runs_at_once: bool) -> None:
        """runs_at_once   are all phases one run? If not, a later phase reads what was fed to an earlier one."""
        self._engine, self._driver = engine, engine.driver
        self.offsets: dict[Value, int] = {}
        size = 0
        for value in values:
            self.offsets[value] = size
            size += -(-max(value.nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        self.is_captured = runs_at_once and 0 < size <= SMALL_BYTES
        self.overlaps = runs_at_once and size > SMALL_BYTES
        self._size = size
        self._blocks = [CudaBuffer(self._driver, engine.staging, size) for _ in range(2 if self.overlaps else 1)]
        count = 2 if size > SMALL_BYTES else _PARTS
        self._parts = [_Part(engine, size, self.offsets) for _ in range(count)]
        #: When the last run that reads a block has finished.
        self._read = [engine.take_event() for _ in self._blocks] if self.overlaps else []
        weakref.finalize(self, engine.events.extend, self._read).atexit = False
        self._part = 0
        self.turn = 0
        #: So many parts, and blocks, are used in turn, the others in slots only.
        self._usual, self.turns = count, count if self.is_captured else len(self._blocks)
        #: The last run of every turn that nobody has waited for.
        self._readers: list[Reader | None] = [None] * self.turns

    def address(self, value: Value) -> int:
        """Where a value lies in the block of this turn."""
        return self._blocks[self.turn if self.overlaps else 0].address + self.offsets[value]

    def reserve(self, slots: int) -> None:
        """There shall be so many slots at least."""
        engine = self._engine
        while len(self._parts) < slots:
            self._parts.append(_Part(engine, self._size, self.offsets))
        self._readers += [None] * (slots - len(self._readers))
        while self.overlaps and len(self._blocks) < slots:
            self._blocks.append(CudaBuffer(self._driver, engine.staging, self._size))
            self._read.append(engine.take_event())

    def send(self, inputs: Mapping[Value, Array], slot: int | None = None) -> None:
        """Let the next run, or that of a slot, read these arrays, which may be reused when the call returns."""
        before = self._parts[self._part]
        self._part = number = (self._part + 1) % self._usual if slot is None else slot
        part = self._parts[number]
        if self.is_captured:
            self.settle(number)
        part.wait_until_free()
        views = part.views
        for value, array in inputs.items():
            if array.shape != value.shape:
                raise DataError(f"{value}: an array of shape {array.shape} was fed")
            views[value][...] = array
        if self.is_captured:
            if len(inputs) != len(views):  # the others keep what they were fed before
                for value in views.keys() - inputs.keys():
                    views[value][...] = before.views[value]
            self.turn = number
            return
        driver, stream = self._driver, self._engine.stream
        if self.overlaps:
            self.turn = (self.turn + 1) % self.turns if slot is None else slot
            stream = self._engine.copy_stream
            driver.wait_on_stream(stream, self._read[self.turn])
        block = self._blocks[self.turn if self.overlaps else 0].address
        if len(inputs) == len(views):
            driver.copy_to_device(block, part.address, self._size, stream)
        else:  # the others keep what they were fed before
            for value in inputs:
                if value.nbytes:
                    offset = self.offsets[value]
                    driver.copy_to_device(block + offset, part.address + offset, value.nbytes, stream)
        part.is_copied(stream)
        if self.overlaps:
            driver.wait_on_stream(self._engine.stream, part.event)

    def copy_directly(self) -> None:
        """From now on copies are no part of captured graphs."""
        for turn in range(len(self._readers)):
            self.settle(turn)
        self.is_captured = False

    def arrivals(self) -> list[Copy]:
        """Before the first kernel of a run, or of a graph that is captured: fetch what was fed."""
        if not self.is_captured:
            return []
        return [Copy(self._parts[self.turn].address, self._blocks[0].address, self._size)]

    def departures(self, results: Mapping[Value, int]) -> list[Copy]:
        """After the last kernel of a run, or of a graph that is captured: send small results, given by address."""
        if not self.is_captured:
            return []
        part = self._parts[self.turn]
        return [
            Copy(address, part.address + part.result_offset(results, value), value.nbytes)
            for value, address in results.items()
        ]

    def result(self, results: Mapping[Value, int], value: Value) -> ReportedValue | None:
        """A small result of the last run; None before there was one."""
        reader = self._readers[self.turn] if self.is_captured else None
        return None if reader is None else self._parts[self.turn].report(results, value, reader)

    def settle(self, turn: int) -> None:
        """Return when the last run of a turn has finished, and what it reports was read: the next overwrites it."""
        reader, latest = self._readers[turn], self._readers[self.turn]
        if reader is not None:
            if isinstance(reader, CudaCompletion) and isinstance(latest, CudaCompletion) and not reader.is_known():
                latest.is_done()  # if so, all before it are, and the next turns need not ask
            reader.finish()
            self._readers[turn] = None

    def is_read(self, run: Reader, turn: int) -> None:
        """A run that reads what was fed in a turn has been started."""
        self._readers[turn] = run
        if self.overlaps and not self.is_captured:
            self._driver.record(self._read[turn], self._engine.stream)


class Reader(Protocol):
    """A run that reads what was fed."""

    def finish(self) -> None:
        """Wait for it."""


class _Part(Pinned):
    """Pinned memory of a block's size.

    event    marks when it has been copied from, by itself
    """

    def __init__(self, engine: Cuda, size: int, offsets: Mapping[Value, int]) -> None:
        super().__init__(engine.driver, size + RESULT_BYTES)
        self._driver, self._size = engine.driver, size
        self._reported: weakref.ref[ReportedValue] | None = None
        self.event = engine.take_event()
        weakref.finalize(self, engine.events.append, self.event).atexit = False
        self._is_copied = False
        self.views = {value: self._view(value, offset) for value, offset in offsets.items()}
        self._results: dict[Value, Array] = {}

    def _view(self, value: Value, offset: int) -> Array:
        return self.memory[offset : offset + value.nbytes].view(value.dtype).reshape(value.shape)

    def is_copied(self, stream: int) -> None:
        """A copy from it has been enqueued."""
        self._driver.record(self.event, stream)
        self._is_copied = True

    def result_offset(self, results: Iterable[Value], value: Value) -> int:
        """Where a result lies in the part."""
        return self._size + sum(each.nbytes for each in itertools.takewhile(lambda each: each is not value, results))

    def report(self, results: Iterable[Value], value: Value, reader: Reader) -> ReportedValue:
        """A result of the run that copied from here."""
        known = self._reported() if self._reported is not None else None
        if known is not None:
            known.fetch()
        view = self._results.get(value)
        if view is None:
            view = self._results[value] = self._view(value, self.result_offset(results, value))
        found = ReportedValue(view, reader)
        self._reported = weakref.ref(found)
        return found

    def wait_until_free(self) -> None:
        """Return when nobody copies from it any more."""
        if self._reported is not None:
            reported = self._reported()
            if reported is not None:  # somebody still holds a result that lies here
                reported.fetch()
            self._reported = None
        if self._is_copied:
            self._driver.wait(self.event)
            self._is_copied = False


class ReportedValue:
    """A small result in pinned memory: called, it waits for its run and returns a copy."""

    __slots__ = ("__weakref__", "_array", "_memory", "_run")

    def __init__(self, memory: Array, run: Reader) -> None:
        self._memory = memory
        self._run = run
        self._array: Array | None = None

    def fetch(self) -> None:
        """Copy it before the memory is used again."""
        if self._array is None:
            self._run.finish()
            self._array = self._memory.copy()

    def __call__(self) -> Array:
        self.fetch()
        assert self._array is not None
        return self._array


class KeptValue:
    """A value that is on its way to the host: called, it waits for it and returns it."""

    def __init__(self, engine: Cuda, value: Value | Lying, address: int) -> None:
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
