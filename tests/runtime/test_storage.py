"""Storage: one set of values, on the host and on devices, and every copy made when it is needed and no sooner."""

from __future__ import annotations

import numpy as np
import pytest

from mlcompute.devices.aligned_memory import aligned, aligned_full
from mlcompute.devices.device import Buffer, Engine
from mlcompute.devices.reference import Reference
from mlcompute.devices.remote import Remote
from mlcompute.ops.op import Array
from mlcompute.runtime.storage import Clock, Storage

VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)


def device_writes(buffer: Buffer, values: Array, clock: Clock) -> None:
    """What a run does: the device has other numbers afterwards."""
    engine = clock.engines[0]
    if isinstance(engine, Remote):
        writes, nbytes = engine.transfers.writes, engine.transfers.bytes_written
        buffer.write(values)
        engine.transfers.writes, engine.transfers.bytes_written = writes, nbytes
    else:
        buffer.write(values)
    clock.tick()


def count(remote: Remote) -> tuple[int, int]:
    return remote.transfers.writes, remote.transfers.reads


def test_shared_memory_is_used_in_place() -> None:
    engine, array = Reference(), VALUES.copy()
    storage = Storage(array, is_callers=True)
    assert storage.buffer(engine).host is array
    array[0, 0] = 7
    assert storage.array()[0, 0] == 7
    other = VALUES + 1
    storage.bind(other, is_callers=True)
    assert storage.buffer(engine).host is other


def test_read_only_memory_is_copied_before_a_device_may_write_it() -> None:
    array = VALUES.copy()
    array.flags.writeable = False
    storage, engine = Storage(array), Reference()
    assert storage.buffer(engine).host is array
    storage.overwritten_by(Clock(engine))
    buffer = storage.buffer(engine)
    assert buffer.host is not None
    assert buffer.host is not array
    assert buffer.host.flags.writeable


def test_values_are_sent_once() -> None:
    remote, storage = Remote(), Storage(VALUES.copy())
    buffer = storage.buffer(remote)
    assert storage.buffer(remote) is buffer
    assert count(remote) == (1, 0)
    np.testing.assert_array_equal(storage.array(), VALUES)
    assert count(remote) == (1, 0), "the host still has them"


def test_values_are_fetched_when_they_are_read_and_only_then() -> None:
    remote, storage = Remote(), Storage(VALUES.copy())
    clock = Clock(remote)
    storage.overwritten_by(clock)
    buffer = storage.buffer(remote)
    device_writes(buffer, VALUES + 1, clock)
    device_writes(buffer, VALUES + 2, clock)
    assert count(remote) == (1, 0)
    before = storage.array()
    np.testing.assert_array_equal(before, VALUES + 2)
    assert storage.array() is before
    assert count(remote) == (1, 1)
    device_writes(buffer, VALUES + 3, clock)
    np.testing.assert_array_equal(storage.array(), VALUES + 3)
    np.testing.assert_array_equal(before, VALUES + 2, "what was read before keeps its numbers")
    assert storage.buffer(remote) is buffer
    assert count(remote) == (1, 2), "the device has them already"


def test_what_the_host_writes_is_sent_before_the_next_run() -> None:
    remote, storage = Remote(), Storage(VALUES.copy())
    clock = Clock(remote)
    storage.overwritten_by(clock)
    device_writes(storage.buffer(remote), VALUES + 1, clock)
    changes = Storage.changes
    storage.write(VALUES * 2)
    assert Storage.changes > changes
    found = np.empty_like(VALUES)
    storage.buffer(remote).read(found)
    np.testing.assert_array_equal(found, VALUES * 2)
    np.testing.assert_array_equal(storage.array(), VALUES * 2)


def test_memory_that_is_new_on_a_device_gets_the_values() -> None:
    """Runs before it was there have not written it, whatever their clock says."""
    remote, storage = Remote(), Storage(VALUES.copy())
    clock = Clock(remote)
    clock.tick()
    storage.overwritten_by(clock)
    buffer, found = storage.buffer(remote), np.empty_like(VALUES)
    buffer.read(found)
    np.testing.assert_array_equal(found, VALUES)
    assert count(remote) == (1, 1)
    np.testing.assert_array_equal(storage.array(), VALUES)


def test_the_callers_memory_gets_what_is_fetched() -> None:
    remote, array = Remote(), VALUES.copy()
    storage = Storage(array, is_callers=True)
    clock = Clock(remote)
    storage.overwritten_by(clock)
    device_writes(storage.buffer(remote), VALUES + 1, clock)
    np.testing.assert_array_equal(array, VALUES)
    assert storage.array() is array
    np.testing.assert_array_equal(array, VALUES + 1)


@pytest.mark.parametrize("second", [Reference(), Remote("second")], ids=["shared", "own"])
def test_two_devices_take_turns(second: Engine) -> None:
    first, storage = Remote("first"), Storage(VALUES.copy())
    clocks = Clock(first), Clock(second)
    for clock in clocks:
        storage.overwritten_by(clock)
    expected = VALUES
    for turn in range(4):
        clock = clocks[turn % 2]
        buffer = storage.buffer(clock.engines[0])
        found = np.empty_like(VALUES)
        buffer.read(found)
        np.testing.assert_array_equal(found, expected)
        expected = expected + 1
        device_writes(buffer, expected, clock)
    np.testing.assert_array_equal(storage.array(), expected)


def test_what_a_graph_computed_survives_it() -> None:
    remote, storage = Remote(), Storage(VALUES.copy())
    clock = Clock(remote)
    storage.overwritten_by(clock)
    device_writes(storage.buffer(remote), VALUES + 1, clock)
    clock.is_retired = True
    later = Clock(remote)
    storage.overwritten_by(later)
    np.testing.assert_array_equal(storage.array(), VALUES + 1)
    device_writes(storage.buffer(remote), VALUES + 2, later)
    np.testing.assert_array_equal(storage.array(), VALUES + 2)


def test_numbers_have_a_device_copy_too() -> None:
    remote, storage = Remote(), Storage(np.array(3.0, np.float32))
    found = np.empty((), np.float32)
    storage.buffer(remote).read(found)
    assert found == 3.0


@pytest.mark.parametrize("shape", [(), (0,), (3,), (1, 1, 1), (33, 65)])
@pytest.mark.parametrize("number", [0.0, -1.5])
def test_equal_numbers_begin_at_a_cache_line(shape: tuple[int, ...], number: float) -> None:
    made = aligned_full(shape, number, np.dtype(np.float32))
    np.testing.assert_array_equal(made, np.full(shape, number, np.float32), strict=True)
    assert made.ctypes.data % 64 == 0 or not made.size
    assert made.flags.c_contiguous
    assert made.flags.writeable
    assert aligned(made) is made
