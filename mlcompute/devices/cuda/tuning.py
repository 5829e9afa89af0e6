"""Algorithms that were measured: which one was the fastest, remembered on disk.

NVIDIA's libraries guess which of their algorithms is the fastest for a problem. With MLCOMPUTE_TUNE=1 all they propose
are measured when a graph is compiled; what was found is used from then on, with or without the variable.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence

from mlcompute.devices.cpu.jit.cache import cache_folder
from mlcompute.errors import DeviceError

_RUNS = 10
#: Puts the work on a stream, given the addresses of its memory.
Run = Callable[[int, Sequence[int]], None]


def is_on() -> bool:
    """Are algorithms to be measured?"""
    return os.environ.get("MLCOMPUTE_TUNE") == "1"


def recall(key: str) -> bytes | None:
    """What is remembered for a key; None when there is nothing or it is damaged."""
    folder = cache_folder()
    if folder is None:
        return None
    try:
        data = (folder / _file(key)).read_bytes()
    except OSError:
        return None
    checksum, choice = data[:32], data[32:]
    return choice if hashlib.sha256(key.encode() + choice).digest() == checksum else None


def remember(key: str, choice: bytes) -> None:
    """Keep a choice. Readers see a full file or none; a folder that cannot be written is not an error."""
    folder = cache_folder()
    if folder is None:
        return
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=folder, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(key.encode() + choice).digest() + choice)
            os.replace(name, folder / _file(key))
        except OSError:
            os.unlink(name)
            raise


def _file(key: str) -> str:
    return f"{hashlib.sha256(key.encode()).hexdigest()}.choice"


def fastest(runs: Sequence[Run], sizes: Sequence[int]) -> int:
    """Which of several ways is the fastest, each measured on memory of these sizes in bytes; those that fail are not.

    The GPU's context must be current.
    """
    from cuda.bindings import driver

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
