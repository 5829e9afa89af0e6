"""A few ops on the emulated engine, compared with their NumPy meanings; with MLCOMPUTE_ENGINE=cuda on a real GPU."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from mlcompute import devices
from mlcompute.compiler.fuse_elementwise import fused
from mlcompute.compiler.plan_memory import planned
from mlcompute.compiler.program import Program
from mlcompute.devices.cuda.device import Cuda
from mlcompute.devices.cuda.executable import CudaExecutable
from mlcompute.ops.op import Array, Trace, Value, emit_all
from tests.devices.cuda_emulator.compiling import COMPILER
from tests.devices.cuda_emulator.engine import EmulatedCuda
from tests.harness import assert_close, interpret

Described = Callable[..., "Value | Sequence[Value]"]


ON_GPU = os.environ.get("MLCOMPUTE_ENGINE") == "cuda"
needs_engine = pytest.mark.skipif(COMPILER is None and not ON_GPU, reason="the emulator needs g++")


@functools.cache
def engine() -> Cuda:
    if not ON_GPU:
        return EmulatedCuda()
    found = devices.devices("cuda")[0]
    assert isinstance(found, Cuda)
    return found


def op(name: str, **attributes: Any) -> Described:
    """A function on symbolic values that is one op of the table."""
    return lambda *values: emit_all(name, *values, **attributes)


def run(
    fn: Described, arrays: Sequence[Array], *, fuses: bool = False, times: int = 2
) -> tuple[list[Array], list[Array], CudaExecutable]:
    """What `fn` gives on the emulated engine (once as single launches, then from a captured graph) and in NumPy."""
    trace = Trace()
    inputs = [trace.value(array.shape, array.dtype, "input") for array in arrays]
    answer = fn(*inputs)
    results = [answer] if isinstance(answer, Value) else list(answer)
    steps = fused(trace.steps, results) if fuses else trace.steps
    for step in steps:
        assert engine().supports(step), f"not supported: {step}"
    plan = planned(steps, results, workspace=engine().workspace)
    program = Program("test", 1, steps, plan, dict(trace.constants), kept=set(results))
    executable = engine().build(program, engine().allocate(plan.nbytes))
    assert isinstance(executable, CudaExecutable)
    for value, array in zip(inputs, arrays, strict=True):
        executable.bind(value, engine().upload(array))
    found: list[Array] = []
    for turn in range(times):
        completion = executable.run(("forward",))
        assert completion is not None
        completion.wait()
        again = [executable.read(value) for value in results]
        for a, b in zip(found, again, strict=False):
            assert a.tobytes() == b.tobytes(), f"run {turn} gives other numbers"
        found = again
    memory = interpret(trace, dict(zip(inputs, arrays, strict=True)))
    return found, [memory[value] for value in results], executable


def check(fn: Described, *arrays: Array, scale: float = 1.0, fuses: bool = False) -> list[Array]:
    """The emulated engine agrees with NumPy."""
    found, expected, _ = run(fn, arrays, fuses=fuses)
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.dtype == b.dtype
        assert_close(a, b, scale, f"result {number}")
    return found
