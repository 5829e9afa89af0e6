"""Training processes, a bounded number at a time; none outlives the sweep that started it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import mlcompute

#: Seconds processes have to finish their step and save, before they are killed.
GRACE = 60.0


@dataclass(frozen=True)
class Job:
    """A command of `mlcompute`, and the file its output goes to."""

    trial: int
    words: list[str]
    log: Path


#: A session of its own: Ctrl-C in the terminal reaches the sweep, which passes it on once.
_OWN_SESSION: dict[str, Any] = (
    {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}
    if sys.platform == "win32"
    else {"start_new_session": True}
)


def _passed_on(number: int) -> int:
    """The signal that asks a process to save and end; on Windows only Ctrl-Break reaches another process."""
    return int(getattr(signal, "CTRL_BREAK_EVENT", number))


class Stopped(Exception):  # noqa: N818  no error: somebody asked for it
    """Ctrl-C or SIGTERM came: every process has saved and ended. `number`: the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Processes:
    """Runs jobs, at most `most` at a time, each with its share of the cores."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._running: dict[subprocess.Popen[bytes], Job] = {}
        self._asked = 0
        self._signalled: set[subprocess.Popen[bytes]] = set()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Processes:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        self._end_all()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        """The first signal lets processes save; a second one, whichever, kills them."""
        if self._asked:
            for process in self._running:
                process.kill()
        self._asked = self._asked or number
        self._forward_signal()

    def _forward_signal(self) -> None:
        """Pass the signal on, once to each: also to one that was being started when it came."""
        for process in self._running:
            if process not in self._signalled:
                self._signalled.add(process)
                process.send_signal(_passed_on(self._asked))

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, int]]:
        """(job, exit code) as they end. Raises Stopped when a signal came and everything has ended."""
        waiting = iter(jobs)
        is_more = True
        while True:
            while is_more and len(self._running) < self.most and not self._asked:
                job = next(waiting, None)
                if job is None:
                    is_more = False
                else:
                    self._running[self._started(job)] = job
            ended = [process for process in self._running if process.poll() is not None]
            for process in ended:
                job = self._running.pop(process)
                _close(process)
                yield job, process.returncode
            if self._asked and not ended:
                self._forward_signal()
                self._end_all()
            if self._asked and not self._running:
                raise Stopped(self._asked)
            if not self._running and not is_more:
                return
            if not ended:
                time.sleep(0.02)

    def _started(self, job: Job) -> subprocess.Popen[bytes]:
        threads = str(max(1, (os.cpu_count() or 1) // self.most))
        package = str(Path(mlcompute.__file__).parents[1])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {"MLCOMPUTE_NUM_THREADS": threads, "OMP_NUM_THREADS": threads, **os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "mlcompute.runs.child", *job.words],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                **_OWN_SESSION,
            )

    def _end_all(self) -> None:
        """Wait for those that were asked to end; ask, and then kill, those that were not."""
        if not self._asked:
            for process in self._running:
                process.terminate()
        deadline = time.monotonic() + GRACE
        for process in list(self._running):
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _close(process)


def _close(process: subprocess.Popen[bytes]) -> None:
    """Its end of the pipe has gone with it; ours goes now."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
