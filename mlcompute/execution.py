"""Execution: the handle every `execute` call returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlcompute.devices.device import Profile
    from mlcompute.enums import ExecutionOptions
    from mlcompute.runtime.job import Job
    from mlcompute.runtime.run_result import RunResult
    from mlcompute.tensor import Tensor

#: Called when a run has finished, with (result tensor or None, error or None, seconds).
GraphCompletionHandler = Callable[["Tensor | None", "Exception | None", float], None]


def has_option(options: ExecutionOptions, option: ExecutionOptions) -> bool:
    """Is an option set? Whole numbers spare a small step the microseconds that arithmetic on enumerations takes."""
    return int.__and__(options, option) != 0


class Execution:
    """One run of a graph: truthy, awaitable, waitable. It is over when its completion handler has returned.

    result, seconds = await graph.execute_forward(...)
    graph.execute(...).wait().result
    """

    __slots__ = ("__weakref__", "_job")

    def __init__(self, _job: Job) -> None:
        self._job = _job

    def wait(self) -> Execution:
        """Return when the run has finished; raises what it failed with."""
        self._job.wait()
        return self

    @property
    def is_done(self) -> bool:
        """Has the run finished, well or not? Never waits."""
        return self._job.is_done

    @property
    def result(self) -> RunResult:
        """The final result (the loss, or the last layer's result), waiting for it. Its data stays this run's.

        A pass that computes none, a gradient pass or an update by itself, has None here.
        """
        self._job.wait()
        return self._job.result  # type: ignore[return-value]  # nobody has to rule None out after a forward pass

    @property
    def execution_time(self) -> float:
        """Seconds the run took; 0.0 unless PROFILING was asked for."""
        self._job.wait()
        return self._job.seconds

    @property
    def profile(self) -> Profile | None:
        """Time per layer and phase; None unless PER_LAYER_PROFILING was asked for."""
        return self._job.profile

    def __bool__(self) -> bool:
        return True

    def __await__(self) -> Generator[Any, None, tuple[Tensor | None, float]]:
        job = self._job
        if not job.is_done:
            import asyncio

            loop = asyncio.get_running_loop()
            finished = loop.create_future()

            def arrive() -> None:
                if not finished.done():  # the waiting task may have been cancelled
                    finished.set_result(None)

            def tell() -> None:
                with contextlib.suppress(RuntimeError):  # the loop was closed: nobody awaits the run any more
                    loop.call_soon_threadsafe(arrive)

            job.queue.when_done(job, tell)
            yield from finished.__await__()
        if job.completion is not None and not job.completion.is_done():
            import asyncio

            yield from asyncio.get_running_loop().run_in_executor(None, job.wait_for_device).__await__()
        job.raise_error()
        return job.result, job.seconds

    def __repr__(self) -> str:
        state = "failed" if self._job.error is not None else "done" if self._job.is_done else "queued"
        return f"Execution({state})"
