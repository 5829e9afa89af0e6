"""Is a fused step faster than separate steps? By a rule or by a stored measurement, and how it is measured.

A library may do several things in one call and yet be slower than a kernel of its own and one of ours. For steps that
are in question, the kernel table says what is faster as a rule (`Row.is_faster`). With MLCOMPUTE_TUNE=1 both ways are
measured when a graph is compiled, and what was found is remembered on disk and used from then on, with or without the
variable.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from mlcompute.compiler.fuse_elementwise import fused
from mlcompute.compiler.plan_memory import planned
from mlcompute.compiler.program import Program
from mlcompute.devices.cuda import cublaslt, tuning
from mlcompute.devices.cuda.executable import CudaExecutable
from mlcompute.devices.cuda.kernels.launch import Row
from mlcompute.devices.cuda.libraries import Gpu, current_gpu
from mlcompute.devices.precision import matmul_precision
from mlcompute.errors import DeviceError
from mlcompute.ops.op import TABLE, Step, Value

if TYPE_CHECKING:
    from mlcompute.devices.cuda.device import Cuda

_TOGETHER, _APART = b"together", b"apart"


def is_wanted(engine: Cuda, step: Step, row: Row) -> bool:
    """Can a step be run, and is it faster than what it is made of?"""
    usually, gpu = row.is_faster(step), current_gpu()
    if usually is None or gpu is None:
        return usually is not False and row.supports(step)
    key = _key(step, gpu)
    found = tuning.recall(key)
    beside = step.attributes.get("beside", ())
    if found is None and tuning.is_on() and row.supports(step) and all(map(engine.supports, beside)):
        found = _measured(engine, step)
        tuning.store_choice(key, found)
    return (usually if found is None else found == _TOGETHER) and row.supports(step)


def _key(step: Step, gpu: Gpu) -> str:
    values = " ".join(f"{value.dtype}{list(value.shape)}" for value in (*step.inputs, *step.results))
    form = {name: step.attributes[name] for name in ("transposed", "factor") if name in step.attributes}
    return f"{cublaslt.require().name}\n{gpu}\n{step.op.name} {values}\n{form}\n{matmul_precision.current}\nfaster"


def _measured(engine: Cuda, step: Step) -> bytes:
    """Measure both ways."""
    together = [*step.attributes.get("beside", ()), step]
    apart = list(step.attributes.get("apart", step.attributes["steps"]))
    made = {value for each in apart for value in each.results}
    kept = [value for each in together for value in each.results if value in made]
    views = _transposed(together)
    ways = [[*views, *steps] for steps in (fused(apart, kept), together)]
    return (_APART, _TOGETHER)[fastest(engine, ways, kept)]


def _transposed(laid: Sequence[Step]) -> list[Step]:
    """Views that make factors of fused steps lie as those steps say they do."""
    views: dict[Value, Step] = {}
    for step in laid:
        for value, transposed in zip(step.inputs, step.attributes["transposed"], strict=False):
            if transposed:
                base = value.trace.value(value.shape[::-1], value.dtype, "input")
                views[value] = Step(TABLE["transpose"], (base,), (value,), {"axes": (1, 0)}, step.layer, step.phase)
    return list(views.values())


def fastest(engine: Cuda, ways: Sequence[list[Step]], kept: Sequence[Value]) -> int:
    """Which of several lists of steps is run the fastest, of which the same values are kept? Inputs are zeros.

    Those that cannot be built or run are not; DeviceError if that is none.
    """
    runs = [_run(engine, steps, kept) for steps in ways]
    engine.synchronize()
    return tuning.fastest(runs, [])


def _run(engine: Cuda, steps: list[Step], kept: Sequence[Value]) -> tuning.Run:
    """A program of some steps, as it is put on a stream."""
    try:
        plan = planned(steps, kept, workspace=engine.workspace)
        made = {value for each in steps for value in each.results}
        read = dict.fromkeys(value for each in steps for value in each.inputs if value not in made)
        constants = {value: value.trace.constants[value] for value in read if value.kind == "constant"}
        program = Program("measured", 1, steps, plan, constants, kept=set(kept))
        executable = engine.build(program, engine.allocate(plan.nbytes))
        assert isinstance(executable, CudaExecutable)
        for value in read:
            if value not in constants:
                executable.bind(value, engine.allocate(value.nbytes))
    except DeviceError as error:
        return partial(_refuse, error)
    phases = list(dict.fromkeys(step.phase for step in steps))

    def run(stream: int, addresses: Sequence[int]) -> None:
        executable.enqueue_slot(phases, 0, stream, clears=False)

    return run


def _refuse(error: DeviceError, stream: int, addresses: Sequence[int]) -> None:
    raise error
