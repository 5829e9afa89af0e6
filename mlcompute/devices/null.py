"""null: plans and counts, runs nothing. Compiler tests and memory questions need no hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from mlcompute.compiler.program import Program
from mlcompute.devices.device import Engine, Executable, Profile
from mlcompute.enums import DeviceType
from mlcompute.ops.op import Array, Step, Value


class Null(Engine):
    """Accepts every program, allocates nothing, answers zeros.

    lacks: names of composite ops it pretends to have no kernel for, so that the compiler expands them.
    """

    name = "null"
    device_type = DeviceType.CPU

    def __init__(self, lacks: AbstractSet[str] = frozenset()) -> None:
        self.lacks = lacks
        self.runs = 0

    def supports(self, step: Step) -> bool:
        return step.op.name not in self.lacks

    def allocate(self, nbytes: int) -> int:
        return nbytes

    def build(self, program: Program, arena: int) -> Executable:
        assert program.plan.nbytes <= arena
        return _NullExecutable(self, program)


class _NullExecutable(Executable):
    def __init__(self, engine: Null, program: Program) -> None:
        self.engine, self.program = engine, program

    def run(self, phases: Sequence[str], bindings: Mapping[Value, Array], profile: Profile | None = None) -> None:
        self.engine.runs += 1

    def read(self, value: Value) -> Array:
        return np.zeros(value.shape, value.dtype)
