"""Which recurrent layers are left to cuDNN: by a rule, or, with MLCOMPUTE_TUNE=1, measured when a graph is compiled.

What was measured is remembered on disk and used from then on. `python -m benchmarks.gpu.layers` shows both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlcompute.compiler.recurrent_reserve import library_form
from mlcompute.devices.cuda import tuning
from mlcompute.devices.cuda.compare_steps import fastest
from mlcompute.devices.cuda.cudnn import RecurrentProblem
from mlcompute.devices.cuda.kernels import cudnn_recurrent
from mlcompute.devices.cuda.libraries import current_gpu
from mlcompute.devices.precision import matmul_precision
from mlcompute.ops.op import Step, Trace, Value

if TYPE_CHECKING:
    from mlcompute.devices.cuda.device import Cuda

_CUDNN, _OURS = b"cuDNN", b"ours"
#: The compute capability that the rule is for; and, of one sample, from how many times and units on cuDNN is faster:
#: the forward pass alone, and both passes.
_MEASURED, _LEAST_TIMES = (9, 0), 32
_LEAST_UNITS = {"lstm": (256, 256), "gru": (768, 1024), "tanh": (2048, 2048), "relu": (2048, 2048)}


def reserve(engine: Cuda, step: Step, trains: bool) -> int | None:
    """Bytes cuDNN keeps between the passes of an `lstm` or `rnn` step; None where our kernels run it."""
    problem = cudnn_recurrent.problem_of(step, trains)
    # Asked first: what is not left to cuDNN need not load it.
    if problem is None or current_gpu() is None or not is_chosen(engine, step, problem):
        return None
    plan = cudnn_recurrent.plan_of(problem)
    return None if plan is None else cudnn_recurrent.reserve_bytes(plan)


def is_chosen(engine: Cuda, step: Step, problem: RecurrentProblem) -> bool:
    """Is cuDNN to run an `lstm` or `rnn` step: measured now, measured before, or by the rule?"""
    reverse: bool = step.attributes["reverse"]
    key = f"{current_gpu()}\n{problem}\n{reverse}\n{matmul_precision.allows_tf32}"
    known = tuning.recall(key)
    if known is None and tuning.is_on() and (plan := cudnn_recurrent.plan_of(problem)) is not None:
        ways, computed = _ways(step, problem.trains, cudnn_recurrent.reserve_bytes(plan))
        known = (_OURS, _CUDNN)[fastest(engine, ways, computed)]
        tuning.store_choice(key, known)
    return is_faster(problem) if known is None else known == _CUDNN


def is_faster(problem: RecurrentProblem) -> bool:
    """Is cuDNN faster than our kernels, as far as one can tell from the shapes?

    It is for one sample and many units: products with one row are slow by cuBLASLt, of which our kernels have one per
    time. Weights have to be brought into its order first, so that sequences must not be short. For several samples it
    was the slower by up to half, or the faster by less than can be told from the shapes.
    """
    gpu = current_gpu()
    if gpu is None or gpu.capability != _MEASURED or problem.samples > 1 or problem.times < _LEAST_TIMES:
        return False
    return problem.hidden >= _LEAST_UNITS[problem.cell][problem.trains]


def _ways(step: Step, trains: bool, nbytes: int) -> tuple[list[list[Step]], list[Value]]:
    """The steps of our kernels and of cuDNN, which keeps so many bytes; and what both of them compute."""
    trace = Trace()
    inputs = [trace.value(value.shape, value.dtype, "input") for value in step.inputs]
    made = trace.add(step.op, tuple(inputs), step.attributes)
    results = [*made[: len(inputs) - 3]]
    if trains:
        dy = trace.value(made[0].shape, made[0].dtype, "input")
        derivative: Any = step.op.derivative
        found = derivative((dy, *[None] * (len(made) - 1)), made, *inputs, **step.attributes)
        results += [value for value in found if value is not None]
    gradient = next((each for each in trace.steps if each.op.name.endswith("gradient")), None)
    (forward,) = (each for each in trace.steps if each.op is step.op)
    new = library_form(forward, gradient, nbytes, is_repeated=False)
    return [trace.steps, [new.get(each, each) for each in trace.steps]], results
