"""What `CudaDriver` does, over host memory: everything happens in the caller's thread.

It happens at once, unless it waits for another device (fake_nccl.py): then so does all that is enqueued behind it,
until somebody who waits for any device lets them all go on.
"""

from __future__ import annotations

import ctypes
import functools
import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from mlcompute.devices.cuda.kernels.launch import Extents
from mlcompute.devices.cuda.memory_account import MemoryAccount
from mlcompute.errors import DeviceError
from tests.devices.cuda_emulator.compiling import Kernel, compiled
from tests.devices.cuda_emulator.fenced import Fenced

#: Where memory of the device begins, and pinned memory, which kernels read 16 bytes at a time.
_ALIGNMENT, _PINNED_ALIGNMENT = 256, 16
#: Threads of a kernel share memory that belongs to the process: devices take turns.
_one_at_a_time = threading.RLock()
#: What is enqueued; False when it has to wait for another device.
Work = Callable[[], bool | None]
#: Devices that have something to do.
_waiting: dict[EmulatedDriver, None] = {}
#: The driver that was activated last, by thread.
current = threading.local()
#: Seconds that one device may wait for another.
_PATIENCE = 20.0


class EmulatedDriver:
    """A device that is the host. Who strays from an allocation is found when it is given back, or dies at once."""

    device_name = "emulated"
    architecture = "sm_90"
    multiprocessors = 4
    total_memory = 1 << 30
    compute_capability = (9, 0)

    def __init__(self, ordinal: int = 0) -> None:
        self.ordinal = ordinal
        self.account = MemoryAccount(self.free_memory)
        self._memory: dict[int, Fenced] = {}
        self._pinned: dict[int, Fenced] = {}
        self._kernels: list[Kernel] = []
        self._handles: dict[Kernel, int] = {}
        self._numbers = itertools.count(1)
        self._captured: dict[int, Capture] = {}
        self._graphs: dict[int, Capture] = {}
        self._pending: deque[Work] = deque()
        self._times: dict[int, float] = {}
        self._lock = _one_at_a_time
        #: How often graphs were captured and launched, for tests.
        self.captures, self.graph_launches, self.kernel_launches = 0, 0, 0
        #: How often something was copied from one place of the device to another.
        self.device_copies = 0

    def activate(self) -> None:
        current.driver = self  # no library can be asked for anything

    def identity(self) -> str:
        return f"emulated {id(self)}"

    def versions(self) -> dict[str, str]:
        return {"loops": "generated CUDA C++ on the host", "libraries": "NumPy"}

    def free_memory(self) -> int:
        return self.total_memory - sum(memory.nbytes for memory in list(self._memory.values()))

    def allocate(self, nbytes: int) -> int:
        if nbytes > self.free_memory():
            raise DeviceError(
                f"device 'cuda:{self.ordinal}': out of memory",
                asked=f"{nbytes} bytes",
                free=f"{self.free_memory()} bytes",
            )
        memory = Fenced(nbytes, _ALIGNMENT)
        memory.spoil()
        self._memory[memory.address] = memory
        self.account.allocated(memory.address, nbytes)
        return memory.address

    def free(self, address: int) -> None:
        self.account.freed(address)
        self._memory.pop(address).give_back()

    def allocate_pinned(self, nbytes: int) -> int:
        memory = Fenced(nbytes, _PINNED_ALIGNMENT)
        self._pinned[memory.address] = memory
        return memory.address

    def free_pinned(self, address: int) -> None:
        self._pinned.pop(address).give_back()

    # Work on streams ----------------------------------------------------------------------------------------------

    def _do(self, stream: int, work: Work) -> None:
        with self._lock:
            if stream in self._captured:
                self._captured[stream].add(work, stream)
            else:
                self._pending.append(work)
                self._go_on()

    def _go_on(self) -> bool:
        """Do what can be done now; True when that is all."""
        with self._lock:
            while self._pending:
                if self._pending[0]() is False:
                    _waiting[self] = None
                    return False
                self._pending.popleft()
            _waiting.pop(self, None)
            return True

    def _wait(self) -> None:
        end = time.monotonic() + _PATIENCE
        while not self._is_done():
            assert time.monotonic() < end, f"device {self.ordinal} waits for another one"
            time.sleep(0)

    def _is_done(self) -> bool:
        with self._lock:
            for driver in list(_waiting):
                driver._go_on()
            return not self._pending

    def give_up(self) -> None:
        """What waits for another device is not waited for any more."""
        with self._lock:
            self._pending.clear()
            _waiting.pop(self, None)

    def create_stream(self) -> int:
        return next(self._numbers)

    def copy_to_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._do(stream, lambda: _move(target, source, nbytes))

    copy_to_host = copy_to_device

    def copy_on_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.device_copies += 1
        self._do(stream, lambda: _move(target, source, nbytes))

    def allow_access(self, other: object) -> None:
        return

    def copy_from(self, other: object, target: int, source: int, nbytes: int, stream: int) -> None:
        assert isinstance(other, EmulatedDriver)
        self.holds(target, nbytes)
        other.holds(source, nbytes)
        self._do(stream, lambda: _move(target, source, nbytes))

    def holds(self, address: int, nbytes: int) -> None:
        """Fails unless bytes are memory of this device."""
        found = any(
            start <= address and address + nbytes <= start + memory.nbytes for start, memory in self._memory.items()
        )
        assert found, f"device {self.ordinal} has no such memory"

    def fill(self, target: int, byte: int, nbytes: int, stream: int) -> None:
        self._do(stream, lambda: _set(target, byte, nbytes))

    def launch(
        self, function: int, grid: Extents, block: Extents, shared_bytes: int, stream: int, parameters: int
    ) -> None:
        assert 1 <= block[0] * block[1] * block[2] <= 1024, block
        assert 1 <= grid[0] < 2**31, grid
        assert 1 <= grid[1] <= 65535, grid
        assert 1 <= grid[2] <= 65535, grid
        assert shared_bytes <= 227 << 10, shared_bytes
        kernel = self._kernels[function]
        arguments = kernel.saved(parameters)  # a driver copies them when it is called
        self.kernel_launches += stream not in self._captured
        self._do(stream, lambda: kernel(ctypes.addressof(arguments), grid, block))

    def synchronize(self, stream: int) -> None:
        self._wait()

    # Events -------------------------------------------------------------------------------------------------------

    def create_event(self, timed: bool = False) -> int:
        return next(self._numbers)

    def free_event(self, event: int) -> None:
        self._times.pop(event, None)

    def record(self, event: int, stream: int) -> None:
        self._times[event] = time.perf_counter()
        if stream in self._captured:
            self._captured[stream].record(event, stream)

    def is_reached(self, event: int) -> bool:
        return self._is_done()

    def wait(self, event: int) -> None:
        self._wait()

    def wait_on_stream(self, stream: int, event: int) -> None:
        capture = next((each for each in self._captured.values() if event in each.events), None)
        if capture is not None:
            assert self._captured.setdefault(stream, capture) is capture
            capture.wait(stream, event)

    def seconds_between(self, start: int, end: int) -> float:
        return self._times[end] - self._times[start]

    # Kernels and graphs -------------------------------------------------------------------------------------------

    def functions(self, sources: Sequence[str]) -> list[int]:
        handles = []
        for kernel in compiled(sources):
            if kernel not in self._handles:
                self._handles[kernel] = len(self._kernels)
                self._kernels.append(kernel)
            handles.append(self._handles[kernel])
        return handles

    def allow_shared_memory(self, function: int, nbytes: int) -> None:
        assert nbytes <= 227 << 10, nbytes

    def begin_capture(self, stream: int) -> None:
        self._captured[stream] = Capture()

    def end_capture(self, stream: int) -> int:
        graph = next(self._numbers)
        self._graphs[graph] = capture = self._captured[stream]
        self.abort_capture(stream)
        assert capture.ends_in(stream), "a branch of a captured graph was not joined"
        self.captures += 1
        return graph

    def is_capturing(self, stream: int) -> bool:
        return stream in self._captured

    def abort_capture(self, stream: int) -> None:
        capture = self._captured[stream]
        self._captured = {key: each for key, each in self._captured.items() if each is not capture}

    def launch_graph(self, graph: int, stream: int, mark: int | None) -> None:
        self.graph_launches += 1
        if mark is not None:
            self.record(mark, stream)
        with self._lock:
            self._pending.extend(self._graphs[graph].ordered())
            self._go_on()

    def upload_graph(self, graph: int, stream: int) -> None:
        assert graph in self._graphs

    def free_graph(self, graph: int) -> None:
        del self._graphs[graph]

    def enqueue(self, work: Work, stream: int) -> None:
        """Something the host does in a stream's order."""
        self._do(stream, work)


class Capture:
    """A graph: nodes, and which others each comes after.

    It runs in the order of its capture, and every second time with what was captured last as early as possible: where
    nodes do not wait for each other, that must not matter.
    """

    def __init__(self) -> None:
        self.nodes: list[tuple[Work, frozenset[int]]] = []
        self.events: dict[int, frozenset[int]] = {}
        self._ends: dict[int, frozenset[int]] = {}
        self._runs = 0

    def add(self, work: Work, stream: int) -> None:
        self.nodes.append((work, self._ends.get(stream, frozenset())))
        self._ends[stream] = frozenset([len(self.nodes) - 1])

    def record(self, event: int, stream: int) -> None:
        self.events[event] = self._ends.get(stream, frozenset())

    def wait(self, stream: int, event: int) -> None:
        self._ends[stream] = self._ends.get(stream, frozenset()) | self.events[event]

    def ends_in(self, stream: int) -> bool:
        """Does a stream come after all nodes?"""
        reached, found = set(self._ends.get(stream, ())), list(self._ends.get(stream, ()))
        while found:
            found += [each for each in self.nodes[found.pop()][1] if each not in reached]
            reached.update(found)
        return len(reached) == len(self.nodes)

    def ordered(self) -> list[Work]:
        """The work, as it is done this time."""
        self._runs += 1
        return [self.nodes[number][0] for number in (range(len(self.nodes)) if self._runs % 2 else self._last_first)]

    @functools.cached_property
    def _last_first(self) -> list[int]:
        before = {number: set(after) for number, (_, after) in enumerate(self.nodes)}
        behind: dict[int, list[int]] = {number: [] for number in before}
        for number, after in before.items():
            for other in after:
                behind[other].append(number)
        ready = [-number for number, after in before.items() if not after]
        heapq.heapify(ready)
        order: list[int] = []
        while ready:
            order.append(-heapq.heappop(ready))
            for other in behind[order[-1]]:
                before[other].remove(order[-1])
                if not before[other]:
                    heapq.heappush(ready, -other)
        return order


def _move(target: int, source: int, nbytes: int) -> None:
    ctypes.memmove(target, source, nbytes)


def _set(target: int, byte: int, nbytes: int) -> None:
    ctypes.memset(target, byte, nbytes)
