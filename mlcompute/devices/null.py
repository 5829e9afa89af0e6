"""null: plans and counts, runs nothing. For tests of the compiler and of memory, without hardware."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from mlcompute.compiler.program import Program
from mlcompute.devices.device import Buffer, Engine, Executable, Profile
from mlcompute.devices.host_memory import HostBuffer
from mlcompute.enums import DeviceType
from mlcompute.ops.op import Array, Step, Value


class Null(Engine):
    """Accepts every program, allocates nothing, gives zeros.

    lacks: names of composite ops it pretends to have no kernel for, so that the compiler expands them.
    """

    name = "null"
    device_type = DeviceType.CPU
    precisions = ("float32", "bf16")

    def __init__(self, lacks: AbstractSet[str] = frozenset()) -> None:
        self.lacks = lacks
        self.runs = 0

    def supports(self, step: Step) -> bool:
        return step.op.name not in self.lacks

    def allocate(self, nbytes: int) -> Buffer:
        return _Nothing(nbytes)

    def wrap(self, array: Array) -> Buffer | None:
        return HostBuffer(array)

    def build(self, program: Program, arena: Buffer | None = None, like: Executable | None = None) -> Executable:
        executable = _NullExecutable(self, program)
        if arena is not None:
            executable.place(arena)
        return executable


class _Nothing(Buffer):
    """A size without memory."""

    host = None

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def write(self, array: Array, offset: int = 0) -> None:
        return

    def read(self, out: Array, offset: int = 0) -> None:
        out[...] = 0


class _NullExecutable(Executable):
    def __init__(self, engine: Null, program: Program) -> None:
        self.engine, self.program = engine, program

    def place(self, arena: Buffer) -> None:
        assert self.program.plan.nbytes <= arena.nbytes

    def bind(self, value: Value, buffer: Buffer) -> None:
        return

    def run(self, phases: Sequence[str], profile: Profile | None = None) -> None:
        self.engine.runs += 1

    def read(self, value: Value) -> Array:
        return np.zeros(value.shape, value.dtype)
