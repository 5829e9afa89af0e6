"""Flags on the GPUs that say whether a kernel of a captured step found invalid data: the update must then not run.

own            | of rank 0, 1, ...    | any
of the slices  | as NCCL brings them  | what guarded kernels look at
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mlcompute.devices.cuda.memory import CudaBuffer

if TYPE_CHECKING:
    from mlcompute.devices.cuda.device import Cuda
    from mlcompute.devices.cuda.executable import CudaExecutable

_NOTE = """
extern "C" __global__ void KERNEL(const int* words, long long count, int* own) {
    for (long long number = 0; number < count; ++number)
        if (words[2 + 2 * number]) *own = 1;
}
"""
_COMBINE = """
extern "C" __global__ void KERNEL(int* flags, long long size, int* guard) {
    int any = 0;
    for (long long number = 0; number <= size; ++number) any |= flags[number];
    flags[size + 1] = any;
    if (guard) *guard = any;
}
"""


class Kernel:
    """A kernel with its arguments, all of them 8 bytes: addresses and counts."""

    def __init__(self, engine: Cuda, source: str, values: Sequence[int], blocks: int = 1, threads: int = 1) -> None:
        self._driver, self._blocks, self._threads = engine.driver, blocks, threads
        self._function = engine.driver.functions([source])[0]
        self._values = np.array(values, np.uint64)
        self._parameters = self._values.ctypes.data + 8 * np.arange(len(values), dtype=np.uint64)

    def enqueue(self, stream: int) -> None:
        """Enqueue it."""
        parameters = int(self._parameters.ctypes.data)
        self._driver.launch(self._function, (self._blocks, 1, 1), (self._threads, 1, 1), 0, stream, parameters)


class FailureFlags:
    """The flags of one GPU.

    own   what it tells the others
    any   the address that guarded kernels look at
    """

    def __init__(self, engine: Cuda, size: int) -> None:
        self._engine, self._size = engine, size
        flags = engine.allocate(4 * (size + 2))
        assert isinstance(flags, CudaBuffer)
        self._flags = flags
        self.own = flags.part(0, 4)
        self.any = flags.address + 4 * (size + 1)
        self._kernels: dict[tuple[str, int], Kernel] = {}

    def received(self, rank: int) -> CudaBuffer:
        """Where the flag of another GPU goes."""
        return self._flags.part(4 * (1 + rank), 4)

    def clear(self, stream: int) -> None:
        """Nothing has failed here."""
        self._engine.driver.fill(self._flags.address, 0, self._flags.nbytes, stream)

    def note(self, executable: CudaExecutable, stream: int) -> None:
        """Look at what the kernels of a program have said."""
        address, count = executable.status_words
        self._kernel(_NOTE, address, (address, count, self._flags.address)).enqueue(stream)

    def combine(self, executable: CudaExecutable | None, stream: int) -> None:
        """All flags are here: let a program change nothing when one is set."""
        assert executable is None or not executable.can_fail  # its runs would begin with clearing the flag
        guard = 0 if executable is None else executable.guard
        self._kernel(_COMBINE, guard, (self._flags.address, self._size, guard)).enqueue(stream)

    def _kernel(self, source: str, address: int, values: Sequence[int]) -> Kernel:
        found = self._kernels.get((source, address))
        if found is None:
            found = self._kernels[source, address] = Kernel(self._engine, source, values)
        return found

    def is_set(self) -> bool:
        """Has anything failed anywhere? Waits for the device."""
        found = np.empty(1, np.int32)
        self._engine.staging.fetch(found, self.any)
        return bool(found[0])
