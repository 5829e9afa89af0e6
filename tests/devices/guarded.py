"""Memory whose neighbours may not be touched: a page without access follows, or precedes, every single value.

    python -m tests.devices.guarded SIDE THREADS FIRST STEP

runs every STEP-th case of the layer table and every small network that way, printing its name first: whoever strays
dies with it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

import mlcompute as mlc
from mlcompute.compiler.plan_memory import MemoryPlan, planned
from mlcompute.compiler.program import Program
from mlcompute.devices.cpu.device import Cpu
from mlcompute.devices.host_memory import HostBuffer
from mlcompute.ops.op import Array, Value
from mlcompute.runtime.call_data import collect_inputs
from tests.devices.models import MODELS, Job, make
from tests.test_layers import CASES, Built, arrays_of

PAGE = mmap.PAGESIZE
_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Guarded:
    """Room for blocks of given sizes, each with a page that cannot be touched on one side ("left" or "right")."""

    def __init__(self, sizes: list[int], side: str) -> None:
        self.offsets: list[int] = []
        guards, end = [], 0
        for size in sizes:
            pages = -(-max(size, 1) // PAGE) * PAGE
            guards.append(end if side == "left" else end + pages)
            self.offsets.append(end + PAGE if side == "left" else end + pages - size)
            end += pages + PAGE
        self._map = mmap.mmap(-1, max(end, PAGE))
        self.memory = np.frombuffer(self._map, np.uint8)
        self._address, self._nbytes = self.memory.ctypes.data, max(end, PAGE)
        self.memory[:] = 0xFF  # NaN: what is read before it is written shows in the results
        for guard in guards:
            assert _mprotect(self._address + guard, PAGE, 0) == 0, "mprotect failed"

    def open(self) -> None:
        """Everything may be touched again, as the memory is given back."""
        _mprotect(self._address, self._nbytes, mmap.PROT_READ | mmap.PROT_WRITE)


def guarded_plan(program: Program, engine: Cpu, side: str) -> tuple[MemoryPlan, Guarded]:
    """A plan in which no two values share memory, and the memory for it."""
    plan = planned(
        program.steps, program.kept, rerunnable=program.name == "split", reuse=False, workspace=engine.workspace
    )
    places = list(plan.placements.items())
    room = Guarded([place.nbytes for _, place in places], side)
    for (value, place), offset in zip(places, room.offsets, strict=True):
        plan.placements[value] = dataclasses.replace(place, offset=offset)
    plan.nbytes = room.memory.size
    return plan, room


def guarded_arrays(arrays: Mapping[Value, Array], side: str) -> tuple[dict[Value, Array], Guarded]:
    """Copies of what a program is handed."""
    room = Guarded([array.nbytes for array in arrays.values()], side)
    copies = {}
    for (value, array), offset in zip(arrays.items(), room.offsets, strict=True):
        place = room.memory[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
        np.copyto(place, array)
        copies[value] = place
    return copies, room


def run(graph: mlc.TrainingGraph, program: Program, engine: Cpu, side: str | None) -> dict[Value, Array]:
    """What a program keeps, run in guarded memory or (no side) in an arena as usual."""
    phases = tuple(program.phases)
    course = graph._session.compiled.specification(program, phases, mlc.ExecutionOptions.SYNCHRONOUS)
    feeds: dict[Value, Any] = collect_inputs(graph._session, course, {}, "execute")
    keys = {value: np.array([1, 2, number, 4], np.uint32) for number, (value, _) in enumerate(program.random_keys)}
    scalars = {value: np.full((), 0.01, value.dtype) for value in program.scalars.values()}
    arrays = {**arrays_of(graph, program), **feeds, **keys, **scalars}
    arrays = {value: np.array(array) for value, array in arrays.items()}
    if side is None:
        executable = engine.build(program, engine.allocate(program.plan.nbytes))
        executable.run_once(engine, phases, arrays)
        return {value: executable.read(value) for value in program.kept if value not in arrays}
    before = program.plan
    program.plan, arena = guarded_plan(program, engine, side)
    copies, memory = guarded_arrays(arrays, side)
    executable = engine.build(program, HostBuffer(arena.memory))
    executable.run_once(engine, phases, copies)
    kept = {value: executable.read(value) for value in program.kept if value not in arrays}
    program.plan = before
    for room in (arena, memory):
        room.open()
    return kept


def check(built: Built | Job, engine: Cpu, side: str) -> None:
    """All styles of a case give in guarded memory what they give anywhere."""
    graph = built.graph if isinstance(built, Built) else built.training
    for style in ("inference", "fused", "split"):
        built.bind()
        program = graph._session.program(style, graph._session.compile_if_needed().batch_size)
        expected = run(graph, program, engine, None)
        for value, array in run(graph, program, engine, side).items():
            assert array.tobytes() == expected[value].tobytes(), f"{style}: {value!r} differs"


def main(side: str, threads: str, first: str, step: str) -> None:
    engine = Cpu(int(threads))
    for parameter in CASES[int(first) :: int(step)]:
        print(parameter.id, flush=True)
        check(Built(parameter.values[0], engine=engine), engine, side)
    for kind in MODELS:
        print(kind, flush=True)
        check(make(kind, engine), engine, side)
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
