"""remote: NumPy with separate memory. Tests use it for what a GPU needs from the runtime.

Nothing here can be reached by a host pointer: data goes in and out by copies, which are counted, and a run goes on
after `run` has returned.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mlcompute.compiler.program import Program
from mlcompute.devices import register
from mlcompute.devices.device import Buffer, Completion, Engine, Executable, Profile, Traits
from mlcompute.devices.host_memory import HostBuffer, allocate
from mlcompute.devices.reference import ReferenceExecutable
from mlcompute.enums import DeviceType
from mlcompute.ops.op import Array, Step, Value


@dataclass
class Transfers:
    """Copies between the host and a device: how many, and how many bytes."""

    writes: int = 0
    bytes_written: int = 0
    reads: int = 0
    bytes_read: int = 0


#: Families of ops that look at the numbers they are given: indices, lengths.
_CHECKED = ("indexing", "recurrent")


class Remote(Engine):
    """NumPy on a thread of its own, in memory of its own.

    transfers  what was copied to and from the device so far
    """

    device_type = DeviceType.GPU
    traits = Traits(fuses_elementwise=True, channels_last=True, runs_ahead=True)
    precisions = ("float32", "bf16")

    def __init__(self, name: str = "remote") -> None:
        self.name = name
        self.transfers = Transfers()
        self.stream = _Stream()

    def facts(self) -> dict[str, str]:
        return {"loops": f"NumPy {np.__version__}", "libraries": "NumPy", "memory": "its own"}

    def supports(self, step: Step) -> bool:
        return True

    def allocate(self, nbytes: int) -> Buffer:
        return _RemoteBuffer(self, allocate(nbytes))

    def wrap(self, array: Array) -> Buffer | None:
        return None

    def build(self, program: Program, arena: Buffer | None = None, like: Executable | None = None) -> Executable:
        executable = _RemoteExecutable(self, program)
        if arena is not None:
            executable.place(arena)
        return executable

    def synchronize(self) -> None:
        if not self.stream.is_here:  # the collector may drop a graph in the middle of another one's run
            self.stream.run(lambda: None).wait()


class _RemoteBuffer(Buffer):
    """Bytes on the other side."""

    __slots__ = ("_engine", "memory")
    host = None

    def __init__(self, engine: Remote, memory: HostBuffer) -> None:
        self._engine, self.memory = engine, memory

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def write(self, array: Array, offset: int = 0) -> None:
        # Behind what was started before, like a copy in a stream; from a copy, so that the caller may go on.
        own = np.array(array)
        self._engine.stream.run(lambda: self.memory.write(own, offset))
        self._engine.transfers.writes += 1
        self._engine.transfers.bytes_written += own.nbytes

    def read(self, out: Array, offset: int = 0) -> None:
        self._engine.synchronize()
        self.memory.read(out, offset)
        self._engine.transfers.reads += 1
        self._engine.transfers.bytes_read += out.nbytes


class _RemoteExecutable(Executable):
    def __init__(self, engine: Remote, program: Program) -> None:
        self.program = program
        self._engine = engine
        self._inner = ReferenceExecutable(program)
        self.kernels: Mapping[Step, str] = self._inner.kernels
        self.can_fail = any(step.op.family in _CHECKED for step in program.steps)
        self._last: Completion | None = None

    def place(self, arena: Buffer) -> None:
        assert isinstance(arena, _RemoteBuffer)
        self._engine.stream.run(lambda: self._inner.place(arena.memory))

    def bind(self, value: Value, buffer: Buffer) -> None:
        assert isinstance(buffer, _RemoteBuffer)
        typed = buffer.memory.host[: value.nbytes].view(value.dtype).reshape(value.shape)
        self._engine.stream.run(lambda: self._inner.bind(value, HostBuffer(typed)))

    def run(self, phases: Sequence[str], profile: Profile | None = None) -> Completion | None:
        self._last = self._engine.stream.run(lambda: self._inner.run(phases, profile))
        return self._last

    def read(self, value: Value) -> Array:
        last = self._last  # another thread may start the next pass meanwhile, which leaves this value alone
        self._engine.synchronize()
        assert last is None or last.is_done(), f"{value} is read before it is computed"
        array = self._inner.read(value)
        self._engine.transfers.reads += 1
        self._engine.transfers.bytes_read += array.nbytes
        return array


class _Started(Completion):
    """Work on the stream's thread, and how it ended."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work
        self._finished = threading.Event()
        self._error: BaseException | None = None

    def carry_out(self) -> None:
        try:
            self.work()
        except BaseException as error:
            self._error = error
        finally:
            self._finished.set()

    def is_done(self) -> bool:
        return self._finished.is_set()

    def wait(self) -> None:
        self._finished.wait()
        if self._error is not None:
            raise self._error


class _Stream:
    """Work in order, on a thread that goes away when there has been none for a while."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[_Started] = deque()
        self._thread: threading.Thread | None = None

    @property
    def is_here(self) -> bool:
        """Is the caller its own work?"""
        return threading.current_thread() is self._thread

    def run(self, work: Callable[[], object]) -> Completion:
        started = _Started(work)
        with self._changed:
            self._waiting.append(started)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="mlcompute remote", daemon=True)
                self._thread.start()
            self._changed.notify()
        return started

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting and not self._changed.wait(1.0) and not self._waiting:
                    self._thread = None
                    return
                if not self._waiting:
                    continue
                started = self._waiting.popleft()
            started.carry_out()


register("remote", lambda: [Remote()])
