"""Destructors run in the middle of anything, on the thread that is there: what they do must not wait for it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mlcompute.devices.cuda.memory import PART_BYTES, Staging
from mlcompute.devices.cuda.memory_account import MemoryAccount
from tests.devices.cuda_emulator.driver import EmulatedDriver


class Interrupted(EmulatedDriver):
    """Something is fetched while somebody waits for what he fetches."""

    inside: Callable[[], None] | None = None

    def wait(self, event: int) -> None:
        super().wait(event)
        fetch, self.inside = self.inside, None
        if fetch is not None:
            fetch()


def test_a_fetch_inside_of_another() -> None:
    driver = Interrupted()
    stream = driver.create_stream()
    staging = Staging(driver, stream)
    arrays = [np.arange(size, dtype=np.float32) for size in (PART_BYTES, 1000)]  # several parts, and a piece of one
    addresses = [driver.allocate(array.nbytes) for array in arrays]
    for array, address in zip(arrays, addresses, strict=True):
        staging.send(array, address)
    found = [np.zeros_like(array) for array in arrays]
    driver.inside = lambda: staging.fetch(found[1], addresses[1])
    staging.fetch(found[0], addresses[0])
    for array, one in zip(arrays, found, strict=True):
        np.testing.assert_array_equal(one, array)
    for address in addresses:
        driver.free(address)


class Size(int):
    """When it is rounded, the collector frees the buffer before it."""

    account: MemoryAccount

    def __neg__(self) -> int:
        self.account.freed(1)
        return -int(self)


def test_a_buffer_freed_while_memory_is_counted() -> None:
    account = MemoryAccount(lambda: 1 << 30)
    account.allocated(1, 3 << 20)
    size = Size(5 << 20)
    size.account = account
    account.allocated(2, size)
    with account.taking("graphs"):
        pass
    assert account.state(2 << 30).buffers == 5 << 20
