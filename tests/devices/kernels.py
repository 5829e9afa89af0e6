"""Running CPU kernels in tests: those of one op without an engine, or a few ops on an engine with real threads."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlcompute.compiler.plan_memory import planned
from mlcompute.compiler.program import Program
from mlcompute.devices.cpu.codegen.arguments import Argument
from mlcompute.devices.cpu.codegen.code import PIECE_BITS, PIECES_BITS, Code
from mlcompute.devices.cpu.device import Cpu
from mlcompute.devices.cpu.jit.cache import kernel_cache
from mlcompute.devices.cpu.runtime.entry import Entry, Maker
from mlcompute.devices.cpu.runtime.memory import address_of
from mlcompute.devices.cpu.runtime.threads import KERNEL
from mlcompute.devices.device import Engine, Executable
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.ops.op import TABLE, Array, Step, Trace, Value, emit_all, run_meaning

_GUARD = 64
THREADS = (1, 2, 5, 16)


def _row(workspaces: dict[str, Callable[[Step], int]], name: str) -> Callable[[Step], int] | None:
    """An op's row of a table, which may be filled when it is asked (`kernels.table`)."""
    try:
        return workspaces[name]
    except KeyError:
        return None


def meaning(name: str, *arrays: Array, **attributes: Any) -> Any:
    """What an op means, in NumPy, whose own products may report divisions by zero (aarch64, emulated)."""
    with np.errstate(all="ignore"):
        return TABLE[name].meaning(*arrays, **attributes)


class Bench:
    """One op with everything it needs to run, and what it should give: thread after thread, in guarded memory.

    views   a function from input values to the values the op is applied to, e.g. transposes of them
    """

    def __init__(
        self,
        makers: dict[str, Maker],
        name: str,
        arrays: Sequence[Array],
        attributes: dict[str, Any] | None = None,
        *,
        views: Callable[..., Sequence[Value]] | None = None,
        workspaces: dict[str, Callable[[Step], int]] | None = None,
    ) -> None:
        trace = Trace()
        self.inputs = [trace.value(array.shape, array.dtype, "input") for array in arrays]
        shown = list(views(*self.inputs)) if views is not None else self.inputs
        emit_all(name, *shown, **(attributes or {}))
        self.trace, self.step, self.arrays = trace, trace.steps[-1], [np.asarray(array) for array in arrays]
        measure = None if workspaces is None else _row(workspaces, name)
        needed = measure(self.step) if measure is not None else 0
        self.workspaces = {self.step: trace.value((needed,), np.dtype(np.uint8))} if needed else {}
        views_of = planned(trace.steps, self.step.results).views
        self.operands = Operands(trace.steps, views_of, self.workspaces, max(THREADS))
        self.entries = makers[name](self.step, self.operands)
        self._memory: dict[Value, Array] = {}

    def expected(self) -> tuple[Array, ...]:
        """What the op means, in NumPy."""
        memory = {**self.trace.constants, **dict(zip(self.inputs, self.arrays, strict=True))}
        for step in self.trace.steps:
            with np.errstate(all="ignore"):
                results = run_meaning(step, [memory[value] for value in step.inputs])
            memory.update(zip(step.results, results, strict=True))
        return tuple(memory[value] for value in self.step.results)

    def run(self, threads: int = 1, pieces: int = 1) -> list[Array]:
        """Results of the kernels, as `threads` threads would compute them; stray writes are an error.

        pieces   into which the work of each is cut; the last is run first
        """
        assert self.entries is not None, "there is no kernel for this"
        self._memory = dict(zip(self.inputs, self.arrays, strict=True))
        self._memory.update(self.trace.constants)
        rooms: dict[Value, Array] = {}
        for value in (*self.step.results, *self.workspaces.values()):
            rooms[value] = np.full(value.nbytes + 2 * _GUARD, 0xA5, np.uint8)
            self._memory[value] = rooms[value][_GUARD : _GUARD + value.nbytes]
            self._memory[value][:] = 0xFF  # NaN: what is read before it is written shows in the results
        for _, call, words in self.calls():
            for thread, piece in itertools.product(range(threads), reversed(range(pieces))):
                call(thread | piece << PIECE_BITS | pieces << PIECES_BITS, threads, words.ctypes.data)
        for value, room in rooms.items():
            assert (room[:_GUARD] == 0xA5).all(), f"{value!r}: written before its start"
            assert (room[_GUARD + value.nbytes :] == 0xA5).all(), f"{value!r}: written past its end"
        return [self._memory[value].view(value.dtype).reshape(value.shape).copy() for value in self.step.results]

    def calls(self) -> list[tuple[Entry, Any, Array]]:
        """Every entry with its compiled kernel and its argument words."""
        assert self.entries is not None
        addresses = kernel_cache.addresses([entry.code for entry in self.entries])
        made = []
        for entry, address in zip(self.entries, addresses, strict=True):
            words = [self._word(argument) for argument in entry.arguments]
            for operand, set_pointer in entry.pointers:
                set_pointer(self._address(operand))
            made.append((entry, KERNEL(address), np.array(words, np.int64)))
        return made

    def _word(self, argument: Argument) -> int:
        if isinstance(argument, Code):
            return kernel_cache.addresses([argument])[0]
        if isinstance(argument, Operand):
            return self._address(argument)
        return address_of(argument) if isinstance(argument, np.ndarray) else argument

    def _address(self, operand: Operand) -> int:
        return int(self._memory[operand.base].ctypes.data) + operand.byte_offset

    def check(self, compare: Callable[[Array, Array], None]) -> list[Array]:
        """Compare with the meaning, and bitwise between numbers of threads."""
        first, *others = [self.run(threads) for threads in THREADS]
        for found, expected in zip(first, self.expected(), strict=True):
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            compare(found, expected)
        for other in others:
            for a, b in zip(first, other, strict=True):
                assert a.tobytes() == b.tobytes(), "threads change the numbers"
        return first


@functools.cache
def _engine(threads: int) -> Cpu:
    """One engine per number of threads for the whole session: its workers wait in memory that must outlive them."""
    return Cpu(threads=threads)


def run_on_engine(
    fn: Callable[..., Sequence[Value]], arrays: Sequence[Array], threads: int, times: int = 3
) -> list[Array]:
    """What `fn`, a function on symbolic values, gives on the CPU engine with a team of real threads.

    The program runs several times: threads that do not wait for each other would hardly agree every time.
    """
    trace = Trace()
    inputs = [trace.value(array.shape, array.dtype, "input") for array in arrays]
    results = fn(*inputs)
    return run_steps(_engine(threads), trace, inputs, results, arrays, times)[0]


def run_steps(
    engine: Engine, trace: Trace, inputs: Sequence[Value], results: Sequence[Value], arrays: Sequence[Array], times: int
) -> tuple[list[Array], Executable]:
    """Results of the steps of a trace, from several runs of one program, which must give the same bits every time."""
    plan = planned(trace.steps, results, workspace=engine.workspace)
    program = Program("test", 1, trace.steps, plan, dict(trace.constants), kept=set(results))
    executable = engine.build(program, engine.allocate(plan.nbytes))
    runs = []
    for _ in range(times):
        executable.run_once(engine, ("forward",), dict(zip(inputs, arrays, strict=True)))
        runs.append([executable.read(value) for value in results])
    for again in runs[1:]:
        for a, b in zip(runs[0], again, strict=True):
            assert a.tobytes() == b.tobytes(), "a second run gives other numbers"
    return runs[0], executable
