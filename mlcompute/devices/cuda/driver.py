"""What the engine needs of CUDA, as a small interface: memory, streams, events, kernels, captured graphs.

`cuda_bindings.py` fulfils it with NVIDIA's driver. Handles and addresses are plain integers, so that nothing above
depends on the types of a particular binding. Everything may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mlcompute.devices.cuda.kernels.launch import Extents
from mlcompute.devices.cuda.libraries import Gpu
from mlcompute.devices.cuda.memory_account import MemoryAccount


class Driver(Protocol):
    """One device.

    ordinal          which of the machine's devices it is
    device_name      as its maker calls it
    architecture     what kernels are compiled for: "sm_90"
    multiprocessors  how many thread blocks run side by side, at least
    total_memory     bytes
    compute_capability   its generation: (9, 0)
    account          what this process takes of its memory
    """

    ordinal: int
    device_name: str
    architecture: str
    multiprocessors: int
    total_memory: int
    compute_capability: tuple[int, int]
    account: MemoryAccount

    def activate(self) -> Gpu | None:
        """Make the device the current one of this thread. What libraries have to know of it; None without them."""

    def identity(self) -> str:
        """Tells it from all other devices, on this and other machines."""

    def versions(self) -> dict[str, str]:
        """What it is made of here, for people to read."""

    # Memory -----------------------------------------------------------------------------------------------------

    def free_memory(self) -> int:
        """Bytes that are free on the device."""

    def allocate(self, nbytes: int) -> int:
        """The address of device memory, aligned to 256 bytes; DeviceError when there is not enough."""

    def free(self, address: int) -> None:
        """Give device memory back, when what was started before has finished with it."""

    def allocate_pinned(self, nbytes: int) -> int:
        """The address of host memory that the device copies from and to by itself."""

    def free_pinned(self, address: int) -> None:
        """Give pinned memory back."""

    # Work on streams ----------------------------------------------------------------------------------------------

    def create_stream(self) -> int:
        """A queue of work; what is enqueued runs in order, beside other streams."""

    def copy_to_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy from pinned memory."""

    def copy_to_host(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy into pinned memory."""

    def copy_on_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy inside the device."""

    def allow_access(self, other: Driver) -> None:
        """Let it read another device's memory itself, where the machine can do that: copies are faster then."""

    def copy_from(self, other: Driver, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy from another device's memory, on a stream of this one."""

    def fill(self, target: int, byte: int, nbytes: int, stream: int) -> None:
        """Enqueue setting all bytes."""

    def launch(
        self, function: int, grid: Extents, block: Extents, shared_bytes: int, stream: int, parameters: int
    ) -> None:
        """Enqueue a kernel. `parameters` is the address of an array with the address of every argument."""

    def synchronize(self, stream: int) -> None:
        """Return when everything enqueued on a stream is done."""

    # Events -------------------------------------------------------------------------------------------------------

    def create_event(self, timed: bool = False) -> int:
        """A mark in a stream. Before it is first recorded it counts as reached."""

    def free_event(self, event: int) -> None:
        """Give an event back."""

    def record(self, event: int, stream: int) -> None:
        """Enqueue the mark."""

    def is_reached(self, event: int) -> bool:
        """Has the work before the mark finished? Never waits."""

    def wait(self, event: int) -> None:
        """Return when the work before the mark has finished."""

    def wait_on_stream(self, stream: int, event: int) -> None:
        """What is enqueued on a stream from now on waits for the mark, the host does not."""

    def seconds_between(self, start: int, end: int) -> float:
        """Time between two timed marks that were reached."""

    # Kernels and graphs -------------------------------------------------------------------------------------------

    def functions(self, sources: Sequence[str]) -> list[int]:
        """Handles of kernels, each given as CUDA C++ in which the kernel is called `KERNEL`; compiled if need be."""

    def allow_shared_memory(self, function: int, nbytes: int) -> None:
        """Let a kernel be launched with so much dynamic shared memory: more than 48 kB in all must be asked for."""

    def begin_capture(self, stream: int) -> None:
        """From now on, what is enqueued on a stream is noted and not run."""

    def end_capture(self, stream: int) -> int:
        """What was noted since, as a graph that can be launched."""

    def abort_capture(self, stream: int) -> None:
        """Forget what was noted since."""

    def launch_graph(self, graph: int, stream: int, mark: int | None) -> None:
        """Enqueue a graph and, where one is given, a mark behind it."""

    def upload_graph(self, graph: int, stream: int) -> None:
        """Enqueue what the first launch of a graph would do besides running it."""

    def free_graph(self, graph: int) -> None:
        """Give a graph back; one that is running is given back when it has finished."""
