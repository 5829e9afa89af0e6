"""reference: runs the ops' NumPy meanings, slowly. Its results define what is right."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mlcompute.compiler.program import Program
from mlcompute.devices import register
from mlcompute.devices.device import Buffer, Engine, Executable, Profile
from mlcompute.devices.host_memory import HostBuffer, allocate
from mlcompute.enums import DeviceType
from mlcompute.errors import ExecutionError
from mlcompute.ops.op import Array, Step, Value, run_meaning

#: Called after every step, with what the step gave.
Watch = Callable[[Step, Sequence[Array]], None]


class Reference(Engine):
    """Every op by its NumPy meaning, one step after the other, in planned memory.

    reason  why it stands in for a faster engine, for people to read
    """

    name = "reference"
    device_type = DeviceType.CPU
    precisions = ("float32", "bf16")

    def __init__(self, watch: Watch | None = None, reason: str = "") -> None:
        self._watch = watch
        self._reason = reason

    def facts(self) -> dict[str, str]:
        note = {"note": f"slow; {self._reason}"} if self._reason else {}
        return {"loops": f"NumPy {np.__version__}", "libraries": "NumPy", **note}

    def supports(self, step: Step) -> bool:
        return True

    def allocate(self, nbytes: int) -> Buffer:
        return allocate(nbytes)

    def wrap(self, array: Array) -> Buffer | None:
        return HostBuffer(array)

    def build(self, program: Program, arena: Buffer | None = None, like: Executable | None = None) -> Executable:
        executable = ReferenceExecutable(program, self._watch)
        if arena is not None:
            executable.place(arena)
        return executable


class ReferenceExecutable(Executable):
    """Steps in NumPy. What a value holds is looked up by the value, arena or not."""

    def __init__(self, program: Program, watch: Watch | None = None) -> None:
        self.program = program
        self.kernels: Mapping[Step, str] = dict.fromkeys(program.steps, "NumPy")
        self._watch = watch
        self._slots: dict[Value, Array] = {}
        self._memory: dict[Value, Array] = dict(program.constants)

    def place(self, arena: Buffer) -> None:
        memory = arena.host
        assert memory is not None
        self._slots = {
            value: memory[place.offset : place.offset + place.nbytes].view(value.dtype).reshape(value.shape)
            for value, place in self.program.plan.placements.items()
        }
        self._memory = {value: array for value, array in self._memory.items() if value.kind != "temporary"}

    def bind(self, value: Value, buffer: Buffer) -> None:
        assert buffer.host is not None
        self._memory[value] = buffer.host

    def run(self, phases: Sequence[str], profile: Profile | None = None) -> None:
        # Infinities and NaN are legal numbers here; NumPy's warnings about them would only be noise.
        with np.errstate(all="ignore"):
            for step in self.program.steps:
                if step.phase not in phases:
                    continue
                if profile is None:
                    self._run(step)
                else:
                    start = time.perf_counter()
                    self._run(step)
                    profile.add(step, time.perf_counter() - start)

    def _run(self, step: Step) -> None:
        memory = self._memory
        try:
            arrays = run_meaning(step, [memory[value] for value in step.inputs])
        except (ValueError, IndexError) as error:
            raise ExecutionError(f"layer '{step.layer}': {error}", step=step.op.name, phase=step.phase) from error
        for value, array in zip(step.results, arrays, strict=True):
            slot = self._slots.get(value)
            if value.kind != "temporary":  # memory from outside
                np.copyto(memory[value].reshape(array.shape), array)
            elif slot is None:  # a view: it shows its source's memory
                memory[value] = array
            else:
                np.copyto(slot, array)
                memory[value] = slot
        if self._watch is not None:
            self._watch(step, arrays)

    def read(self, value: Value) -> Array:
        array: Array = self._memory[value].copy()
        return array


register("reference", lambda: [Reference()])
