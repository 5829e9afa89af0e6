"""Storage: the values of a parameter, statistic or optimizer state, wherever they lie.

On a device that shares the host's memory there is one copy: the caller's NumPy memory itself. On any other device the
values are computed where that device has them, and the host has a mirror: fetched when somebody reads it and the
device has newer values, sent when somebody wrote it. Every copy knows the moment its values are from, so nothing is
lost and nothing is copied twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mlcompute.devices.aligned_memory import aligned
from mlcompute.ops.op import Array

if TYPE_CHECKING:
    from mlcompute.devices.device import Buffer, Engine

#: Numbers the writes to all storages on all devices: of two copies, the one with the larger number is newer.
_moments = itertools.count(1)
#: What storages have on devices with memory of their own, and of the caller's there, before there is something.
_NOWHERE: Mapping[Engine, tuple[Buffer, int]] = {}
_NO_DEVICES: AbstractSet[Engine] = frozenset()


class Clock:
    """When the runs of one compiled graph last overwrote what they update: one number for all its storages.

    engines   the devices it is overwritten on, with the same values on all of them
    """

    __slots__ = ("engines", "is_retired", "is_watched", "moment")

    def __init__(self, *engines: Engine) -> None:
        self.engines = engines
        self.moment = 0
        #: Is something overwritten that programs on another device use? They must then look for newer values.
        self.is_watched = False
        #: Is the clock stopped for ever? Its graph is gone.
        self.is_retired = False

    def retire(self) -> None:
        """Its graph is gone."""
        self.is_retired = True

    def tick(self) -> None:
        """Note that a run has overwritten the values."""
        self.moment = next(_moments)
        if self.is_watched:
            Storage.has_changed()


class Storage:
    """Values with a host mirror and a copy per device that has memory of its own."""

    __slots__ = ("__weakref__", "_callers_on", "_clocks", "_host", "_host_moment", "_is_callers", "_is_shared", "_own")

    #: Rises whenever a storage is written by the host or gets other memory: as long as it stays, what was bound to a
    #: program is still the newest.
    changes: ClassVar[int] = 0
    #: The same, without counting storages that alternate between two arrays (`alternate`).
    rebindings: ClassVar[int] = 0

    def __init__(self, array: Array, *, is_callers: bool = False) -> None:
        self._host = array
        self._host_moment = next(_moments)
        #: Memory the caller bound: fetched values are written into it, it is never replaced by another array.
        self._is_callers = is_callers
        #: Do devices use the host memory in place?
        self._is_shared = False
        # Most storages of a large graph leave these as they are: they are replaced, never changed in place.
        #: Buffers of devices with memory of their own, and the moment of the values that were last sent there.
        self._own: Mapping[Engine, tuple[Buffer, int]] = _NOWHERE
        #: Devices whose buffer is the caller's.
        self._callers_on = _NO_DEVICES
        self._clocks: tuple[Clock, ...] = ()

    @staticmethod
    def owning(array: Array) -> Storage:
        """For an array that nobody else has: where the CPU will write it, it begins at a cache line."""
        return Storage(aligned(array))

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the values."""
        shape: tuple[int, ...] = self._host.shape
        return shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""
        return self._host.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one copy."""
        return self._host.nbytes

    @property
    def is_callers(self) -> bool:
        """Is the host memory the caller's own?"""
        return self._is_callers

    def touched(self) -> None:
        """Note that the host's memory was written directly."""
        self._host_moment = next(_moments)

    def host_memory(self) -> Array:
        """The host's memory as it is, whether or not its values are the newest."""
        return self._host

    # On the host ----------------------------------------------------------------------------------------------------

    def array(self) -> Array:
        """The newest values in host memory, fetched if a device has newer ones. Not to be written: see `write`.

        An array that was given out before keeps its numbers where the device has memory of its own; where memory is
        shared, it is the memory that runs change.
        """
        engine, moment = self._newest_device() if self._own else (None, 0)
        if engine is not None and moment > self._moment_of_host():
            if not self._is_callers or not self._host.flags.writeable:
                self._host, self._is_callers, self._is_shared = np.empty_like(self._host), False, False
            self._own[engine][0].read(self._host)
            self._host_moment = moment
        return self._host

    def memory(self) -> Array:
        """The newest values in memory that may be written."""
        if not self.array().flags.writeable:
            self.bind(aligned(self._host.copy()))
        return self._host

    def write(self, values: Array) -> None:
        """New values, in the memory there is."""
        self.memory()[...] = values
        self._host_moment = next(_moments)
        Storage.has_changed()

    def bind(self, array: Array, *, is_callers: bool = False) -> None:
        """Other host memory, with the values it holds."""
        self._host, self._is_callers, self._is_shared = array, is_callers, False
        self._host_moment = next(_moments)
        if self._callers_on:  # memory the caller bound before keeps the values it has
            self._own = {engine: own for engine, own in self._own.items() if engine not in self._callers_on}
            self._callers_on = _NO_DEVICES
        Storage.has_changed()

    def alternate(self, array: Array) -> None:
        """Use newer values in other memory that only runs write.

        What the host writes from now on goes into memory of its own: the array is read-only.
        """
        self._host, self._is_callers = array, False
        self._host_moment = next(_moments)

    @staticmethod
    def has_changed() -> None:
        """Note that bound memory must be looked up again."""
        Storage.changes += 1
        Storage.rebindings += 1

    # On devices -----------------------------------------------------------------------------------------------------

    def overwritten_by(self, clock: Clock) -> None:
        """Runs of a compiled graph will overwrite the values, and its clock tells when."""
        if clock not in self._clocks:
            self._clocks = (*self._clocks, clock)
            self._watch()

    def in_place(self) -> Array:
        """The newest values in host memory, for a device that computes there."""
        array = self.array()
        for clock in self._clocks:
            if not clock.is_retired:  # nobody writes what is only read
                array = self.memory()
                break
        self._is_shared = True
        self._watch()
        return array

    def buffer(self, engine: Engine) -> Buffer:
        """The newest values on a device, sent there if need be."""
        if engine not in self._own:
            if engine.wrap(self._host) is not None:
                return engine.upload(self.in_place())
            # Fresh memory holds no values, whatever clocks tell of runs before it was there.
            values, buffer = self.array(), engine.allocate(self.nbytes)
            buffer.write(values)
            self._own = {**self._own, engine: (buffer, max(self._moment_of_host(), self._newest_device()[1]))}
            self._watch()
            return buffer
        buffer, _ = self._own[engine]
        newest = max(self._moment_of_host(), self._newest_device()[1])
        if self._moment_on(engine) < newest:
            buffer.write(self.array())
            self._own = {**self._own, engine: (buffer, newest)}
        return buffer

    def place(self, engine: Engine, buffer: Buffer, *, is_callers: bool = False) -> None:
        """Let the copy on a device lie in other memory of it, perhaps the caller's own; the values stay."""
        self.array()
        self._own = {**self._own, engine: (buffer, 0)}
        self._callers_on = (self._callers_on - {engine}) | ({engine} if is_callers else set())
        Storage.has_changed()
        self._watch()

    def newest_on(self, engine: Engine) -> Buffer | None:
        """The newest values on a device with memory of its own, if they are there."""
        if engine not in self._own:
            return None
        newest = max(self._moment_of_host(), self._newest_device()[1])
        return self._own[engine][0] if self._moment_on(engine) >= newest else None

    def lies_in(self, engine: Engine, buffer: Buffer) -> bool:
        """Is this where the copy on a device lies?"""
        return engine in self._own and self._own[engine][0] is buffer

    def _watch(self) -> None:
        """Clocks of runs that other devices must hear of: where all share the host's memory, none."""
        for clock in self._clocks if self._own else ():
            is_own = any(engine in self._own for engine in clock.engines)
            if any(engine not in clock.engines for engine in self._own) or (is_own and self._is_shared):
                clock.is_watched = True

    def copy(self) -> Storage:
        """The newest values in memory of their own."""
        return Storage.owning(self.array().copy())

    def _moment_of_host(self) -> int:
        """When the values in host memory were written, by the host or by a device that shares it."""
        self._host_moment = max([self._host_moment, *self._ticks(None)])
        return self._host_moment

    def _moment_on(self, engine: Engine) -> int:
        """When the values on a device with memory of its own were written."""
        buffer, sent = self._own[engine]
        moment = max([sent, *self._ticks(engine)])
        if moment != sent:
            self._own = {**self._own, engine: (buffer, moment)}
        return moment

    def _ticks(self, engine: Engine | None) -> list[int]:
        """Moments of runs on a device; None: on those that share the host's memory. What will not tick again goes."""
        if engine is None:
            found = [clock for clock in self._clocks if not any(one in self._own for one in clock.engines)]
        else:
            found = [clock for clock in self._clocks if engine in clock.engines]
        if any(clock.is_retired for clock in found):
            self._clocks = tuple([clock for clock in self._clocks if not (clock.is_retired and clock in found)])
        return [clock.moment for clock in found]

    def _newest_device(self) -> tuple[Engine | None, int]:
        """The device with memory of its own that has the newest values among those."""
        moments = {engine: self._moment_on(engine) for engine in self._own}
        newest = max(moments, key=moments.__getitem__, default=None)
        return newest, 0 if newest is None else moments[newest]
