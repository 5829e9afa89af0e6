"""NCCL between emulated devices of one process, each driven by a thread of its own, or all by one."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

from mlcompute.devices.cuda.nccl import Communicator, Nccl
from tests.devices.cuda_emulator.driver import EmulatedDriver, current

_numbers = itertools.count(1)
#: Messages on their way: by group, source and target; and whether they were sent by a captured call.
_boxes: defaultdict[tuple[bytes, int, int], deque[tuple[bytes, bool]]] = defaultdict(deque)


class FakeNccl(Nccl):
    """Calls of a group are enqueued when it ends: sends, then receives, which wait on their devices."""

    captures_several = True
    name = "fake NCCL"

    def __init__(self) -> None:
        self._calls = threading.local()
        #: Bytes sent, and how many calls were made and how many of them captured, for tests.
        self.sent, self.calls, self.captured = 0, 0, 0

    def unique_id(self) -> bytes:
        return next(_numbers).to_bytes(128, "little")

    def communicator(self, unique_id: bytes, rank: int, size: int) -> FakeCommunicator:
        return FakeCommunicator(self, unique_id, rank, current.driver)

    def communicators(self, activate: Sequence[Callable[[], object]]) -> list[Communicator]:
        unique_id, made = self.unique_id(), list[Communicator]()
        for rank, become_current in enumerate(activate):
            become_current()
            made.append(FakeCommunicator(self, unique_id, rank, current.driver))
        return made

    @contextlib.contextmanager
    def grouped(self) -> Iterator[None]:
        calls = self._calls.made = []
        yield
        for driver, stream, work in sorted(calls, key=lambda call: call[2].__name__, reverse=True):  # sends first
            self.calls += 1
            driver.enqueue(work, stream)

    def add(self, driver: EmulatedDriver, stream: int, work: Callable[[], bool | None]) -> None:
        assert current.driver is driver, "another device is the current one"
        self.captured += driver.is_capturing(stream)
        self._calls.made.append((driver, stream, work))


class FakeCommunicator(Communicator):
    library: FakeNccl

    def __init__(self, library: FakeNccl, unique_id: bytes, rank: int, driver: EmulatedDriver) -> None:
        self.library, self._id, self._rank, self._driver = library, unique_id, rank, driver
        #: What NCCL shall say has gone wrong.
        self.fault = ""

    def send(self, address: int, nbytes: int, peer: int, stream: int) -> None:
        is_captured = self._driver.is_capturing(stream)

        def send() -> None:
            _boxes[self._id, self._rank, peer].append((ctypes.string_at(address, nbytes), is_captured))
            self.library.sent += nbytes

        self.library.add(self._driver, stream, send)

    def receive(self, address: int, nbytes: int, peer: int, stream: int) -> None:
        box, is_captured = _boxes[self._id, peer, self._rank], self._driver.is_capturing(stream)

        def receive() -> bool:
            if not box:
                return False
            message, was_captured = box.popleft()
            assert was_captured == is_captured, "one rank has captured a call, and the other has not"
            assert len(message) == nbytes
            ctypes.memmove(address, message, nbytes)
            return True

        self.library.add(self._driver, stream, receive)

    def error(self) -> str:
        return self.fault

    def abort(self) -> None:
        self._driver.give_up()
