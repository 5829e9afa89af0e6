"""Algorithms that were measured: which one was the fastest, remembered on disk.

NVIDIA's libraries guess which of their algorithms is the fastest for a problem. With MLCOMPUTE_TUNE=1 all they propose
are measured when a graph is compiled; what was found is used from then on, with or without the variable.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence

from mlcompute.devices import kernel_files
from mlcompute.devices.cuda.libraries import imported
from mlcompute.errors import DeviceError

_RUNS = 10
#: Puts the work on a stream, given the addresses of its memory.
Run = Callable[[int, Sequence[int]], None]


def is_on() -> bool:
    """Are algorithms to be measured?"""
    return os.environ.get("MLCOMPUTE_TUNE") == "1"


def recall(key: str) -> bytes | None:
    """What is remembered for a key; None when there is nothing or it is damaged."""
    return kernel_files.read(_digest(key))


def remember(key: str, choice: bytes) -> None:
    """Keep a choice; a folder that cannot be written is not an error."""
    kernel_files.write(_digest(key), choice)


def _digest(key: str) -> str:
    return hashlib.sha256(f"choice\n{key}".encode()).hexdigest()


def fastest(runs: Sequence[Run], sizes: Sequence[int]) -> int:
    """Which of several ways is the fastest, each measured on memory of these sizes in bytes; those that fail are not.

    The GPU's context must be current.
    """
    driver = imported("cuda.bindings.driver", "cuda-bindings")

    def check(answer: tuple[object, ...]) -> object:
        if answer[0] != driver.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"CUDA: measuring algorithms: {answer[0]}")
        return answer[1] if len(answer) > 1 else None

    times: dict[int, float] = {}
    memory: list[object] = []
    stream = check(driver.cuStreamCreate(int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))
    start, end = (check(driver.cuEventCreate(0)) for _ in range(2))
    try:
        for size in sizes:
            memory.append(check(driver.cuMemAlloc(max(size, 256))))
            check(driver.cuMemsetD8Async(memory[-1], 0, max(size, 256), stream))
        addresses = [int(address) for address in memory]  # type: ignore[call-overload]
        for number, run in enumerate(runs):
            with contextlib.suppress(DeviceError):
                run(int(stream), addresses)  # type: ignore[call-overload]
                check(driver.cuEventRecord(start, stream))
                for _ in range(_RUNS):
                    run(int(stream), addresses)  # type: ignore[call-overload]
                check(driver.cuEventRecord(end, stream))
                check(driver.cuEventSynchronize(end))
                times[number] = float(check(driver.cuEventElapsedTime(start, end)))  # type: ignore[arg-type]
    finally:
        driver.cuStreamSynchronize(stream)
        for address in memory:
            driver.cuMemFree(address)
        for event in (start, end):
            driver.cuEventDestroy(event)
        driver.cuStreamDestroy(stream)
    if not times:
        raise DeviceError("CUDA: none of the proposed algorithms could be run")
    return min(times, key=lambda number: times[number])
