"""Watches a reader run by run: the error, the time, the memory, what is left behind."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import mlcompute as mlc
from tests.fuzzing.target import Target

SECONDS = 1.0
BYTES = 64 << 20
#: Somebody has to end a reader that never does; a signal does it, unless it hangs outside of Python.
_HANGS = 20.0
#: Looking at the memory costs as much as a short run; a batch is looked at together.
BATCH = 16
#: Less than this is not looked into; the fuzzer itself may have taken some of it.
_MUCH = 8 << 20

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MEMORY_IS_KNOWN = _RESET.exists()


class HangError(BaseException):
    """The reader was interrupted. Not an Exception: readers may catch those."""


@dataclass
class Counts:
    """What came of all runs so far.

    seconds  processor time of the reader alone
    slowest  the longest run, in seconds of processor time
    peak     the most memory a batch of runs took above what there was before, in bytes
    """

    runs: int = 0
    accepted: int = 0
    refused: int = 0
    findings: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    peak: int = 0

    def add(self, other: Counts) -> None:
        self.runs += other.runs
        self.accepted += other.accepted
        self.refused += other.refused
        self.findings += other.findings
        self.seconds += other.seconds
        self.slowest = max(self.slowest, other.slowest)
        self.peak = max(self.peak, other.peak)


@dataclass
class Watch:
    """Runs a target and keeps what goes wrong.

    folder  findings are written there, file and reason; None: they are only listed
    timed   how long reading a file takes without what slows it down here, in seconds of processor time
    """

    target: Target
    folder: Path | None = None
    timed: Callable[[bytes], float] | None = None
    counts: Counts = field(default_factory=Counts)
    findings: list[str] = field(default_factory=list)
    _batch: list[bytes] = field(default_factory=list)
    _rss: int = 0
    _state: object = None

    def __post_init__(self) -> None:
        signal.signal(signal.SIGPROF, _interrupt)

    def run(self, data: bytes) -> None:
        """One run, the file made from the fuzzer's bytes."""
        file = self.target.file(data)
        if not self._batch:
            self._begin_batch()
        self._once(file)
        self._batch.append(file)
        if len(self._batch) >= BATCH:
            self.end_batch()

    def _begin_batch(self) -> None:
        self._state = self.target.state()
        if MEMORY_IS_KNOWN:
            _reset_peak()
            self._rss = _memory("VmRSS")

    def end_batch(self) -> None:
        """Look at what a batch of runs has left and taken. Where all together took much, each is repeated alone."""
        files, self._batch = self._batch, []
        if not files:
            return
        if self.target.state() != self._state:
            self.found(b"\n".join(files), "one of these files has changed something", "state")
        if not MEMORY_IS_KNOWN:
            return
        peak = max(0, _memory("VmHWM") - self._rss)
        if peak <= _MUCH:
            self.counts.peak = max(self.counts.peak, peak)
            return
        for file in files:
            peak = self.peak_of(file)
            self.counts.peak = max(self.counts.peak, peak)
            if peak > BYTES + 2 * len(file):
                self.found(file, f"memory: {peak >> 20} MB for a file of {len(file)} bytes", "memory")

    def peak_of(self, file: bytes) -> int:
        """Bytes of memory one run takes at most, above what there was before."""
        gc.collect()
        _reset_peak()
        before = _memory("VmRSS")
        self._once(file)
        return max(0, _memory("VmHWM") - before)

    def _once(self, file: bytes) -> None:
        counts = self.counts
        seconds, refused, wrong = self._read(file)
        if seconds > SECONDS and not isinstance(wrong, HangError):
            # A virtual machine that is paused counts as busy; a slow reader is slow again.
            seconds = min(seconds, self._read(file)[0])
            if seconds > SECONDS and self.timed is not None:
                seconds = min(seconds, self.timed(file))
        counts.runs += 1
        counts.refused += refused
        counts.accepted += not refused and wrong is None
        counts.seconds += seconds
        counts.slowest = max(counts.slowest, seconds)
        if wrong is not None:
            self.found(file, "".join(traceback.format_exception(wrong)), _place(wrong))
        if seconds > SECONDS:
            self.found(file, f"time: {seconds:.2f} s", "time")

    def _read(self, file: bytes) -> tuple[float, bool, BaseException | None]:
        """Seconds of processor time, whether the file was refused, and what should not have happened."""
        refused, wrong = False, None
        begin = time.thread_time()
        try:
            with _interrupted():
                self.target.read(file)
        except mlc.Error as error:
            refused = True
            try:
                message = str(error)
                assert len(message) <= self.target.longest_message, f"a message of {len(message)} characters"
            except Exception as failure:
                wrong = failure
        except (Exception, HangError) as error:
            wrong = error
        return time.thread_time() - begin, refused, wrong

    def found(self, file: bytes, reason: str, kind: str) -> None:
        """The first few of a kind are kept."""
        self.counts.findings += 1
        self.findings.append(f"{kind}: {reason}")
        if self.folder is None:
            return
        name = hashlib.sha256(kind.encode()).hexdigest()[:10]
        self.folder.mkdir(parents=True, exist_ok=True)
        if len(list(self.folder.glob(f"{name}-*.txt"))) < 3:
            whole = self.folder / f"{name}-{hashlib.sha256(file).hexdigest()[:10]}"
            whole.with_suffix(".bin").write_bytes(file)
            whole.with_suffix(".txt").write_text(f"{kind}\n{reason}", errors="replace")


def _place(error: BaseException) -> str:
    """Where an error came from: mistakes at one place count as one."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if f"{os.sep}mlcompute{os.sep}" in frame.filename] or frames[-1:]
    return f"{type(error).__name__} in {ours[-1].filename}:{ours[-1].lineno}"


@contextmanager
def _interrupted() -> Iterator[None]:
    """Raise HangError after much processor time. The clock on the wall would count pauses of the whole process too."""
    signal.setitimer(signal.ITIMER_PROF, _HANGS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise HangError(f"still running after {_HANGS:.0f} s")


def _memory(key: str) -> int:
    text = _STATUS.read_bytes()
    at = text.index(key.encode())
    return int(text[at:].split(None, 2)[1]) << 10


def _reset_peak() -> None:
    """VmHWM begins anew from what is used now."""
    _RESET.write_bytes(b"5")
