"""Measured algorithms: which one was the fastest, stored on disk.

NVIDIA's libraries guess which of their algorithms is the fastest for a problem. With MLCOMPUTE_TUNE=1 all they propose
are measured when a graph is compiled; what was found is used from then on, with or without the variable.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mlcompute.devices import kernel_files
from mlcompute.devices.cuda.libraries import imported
from mlcompute.errors import DeviceError

#: A way is enqueued so often in a graph, which is launched so often.
_RUNS, _LAUNCHES = 20, 5
#: Puts the work on a stream, given the addresses of its memory.
Run = Callable[[int, Sequence[int]], None]


def is_on() -> bool:
    """Are algorithms to be measured?"""
    return os.environ.get("MLCOMPUTE_TUNE") == "1"


def recall(key: str) -> bytes | None:
    """What is remembered for a key; None when there is nothing or it is damaged."""
    return kernel_files.read(_digest(key))


def store_choice(key: str, choice: bytes) -> None:
    """Keep a choice; a folder that cannot be written is not an error."""
    kernel_files.write(_digest(key), choice)


def _digest(key: str) -> str:
    return hashlib.sha256(f"choice\n{key}".encode()).hexdigest()


def fastest(runs: Sequence[Run], sizes: Sequence[int]) -> int:
    """Which of several ways is the fastest, each measured on memory of these sizes in bytes; those that fail are not.

    They are captured into graphs, as programs are: enqueueing one of them takes longer than many kernels run. The
    GPU's context must be current.
    """
    driver = imported("cuda.bindings.driver", "cuda-bindings")
    times: dict[int, float] = {}
    memory: list[object] = []
    stream = _check(driver.cuStreamCreate(int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))
    start, end = (_check(driver.cuEventCreate(0)) for _ in range(2))
    try:
        for size in sizes:
            memory.append(_check(driver.cuMemAlloc(max(size, 256))))
            _check(driver.cuMemsetD8Async(memory[-1], 0, max(size, 256), stream))
        addresses = [int(address) for address in memory]  # type: ignore[call-overload]
        for number, run in enumerate(runs):
            with contextlib.suppress(DeviceError), _captured(driver, run, stream, addresses) as graph:
                for _ in range(_LAUNCHES + 1):
                    _check(driver.cuEventRecord(start, stream))
                    _check(driver.cuGraphLaunch(graph, stream))
                    _check(driver.cuEventRecord(end, stream))
                    _check(driver.cuEventSynchronize(end))
                    seconds = float(_check(driver.cuEventElapsedTime(start, end)))
                    times[number] = min(seconds, times.get(number, seconds))
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


@contextlib.contextmanager
def _captured(driver: Any, run: Run, stream: Any, addresses: Sequence[int]) -> Iterator[Any]:
    """A graph that runs one way many times."""
    run(int(stream), addresses)  # what is loaded at the first use cannot be loaded while a graph is captured
    _check(driver.cuStreamSynchronize(stream))
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED  # others may allocate and free memory meanwhile
    _check(driver.cuStreamBeginCapture(stream, relaxed))
    try:
        for _ in range(_RUNS):
            run(int(stream), addresses)
    except DeviceError:
        driver.cuStreamEndCapture(stream)
        raise
    graph = _check(driver.cuStreamEndCapture(stream))
    try:
        executable = _check(driver.cuGraphInstantiate(graph, 0))
    finally:
        driver.cuGraphDestroy(graph)
    try:
        yield executable
    finally:
        driver.cuGraphExecDestroy(executable)


def _check(answer: tuple[Any, ...]) -> Any:
    """What a function of the driver gives besides its status, which must be success."""
    if int(answer[0]) != 0:
        raise DeviceError(f"CUDA: measuring algorithms: {answer[0]}")
    return answer[1] if len(answer) > 1 else None
