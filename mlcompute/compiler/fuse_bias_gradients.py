"""fuse_bias_gradients: the gradient of a bias is summed by the matmul that makes the gradient of the weights.

    db = sum of the rows of dy        dw = dyᵀ x (or xᵀ dy)        one step: dy is read once

In every style of execution, as another order of the sum rounds otherwise; not in groups of processes, where gradients
are written to where they are exchanged by steps with one result.
"""

from __future__ import annotations

from mlcompute.compiler.context import Context
from mlcompute.compiler.fuse_elementwise import FusedElementwise
from mlcompute.compiler.index import Index
from mlcompute.ops.op import TABLE, Step, Value

_MATMUL, _SUM, _TRANSPOSE = TABLE["matmul"], TABLE["sum"], TABLE["transpose"]


class MatmulBiasGradient(FusedElementwise):
    """A matmul, and the sum over the terms of one factor.   a (m, k)   b (k, n)   ->   a b (m, n)   sums (1, m or n)

    `inputs`: the factors, and the matrix whose rows are summed: what factor number `factor` shows.
    """

    name = "matmul_bias_gradient"
    elementwise = False


MATMUL_BIAS_GRADIENT = MatmulBiasGradient()


def fuse_bias_gradients(steps: list[Step], context: Context) -> list[Step]:
    """Matmuls together with the sums over the rows of the gradient they read, where the device can do both at once."""
    sums = {step.inputs[0]: step for step in steps if step.op is _SUM and step.attributes["axes"] == (0,)}
    if not sums:
        return steps
    index = context.index(steps)
    fused: dict[Step, Step] = {}
    moved: dict[Step, list[Step]] = {}  # views of the sums, which now are made later
    gone: set[Step] = set()
    for step in steps:
        if step.op is not _MATMUL or any(value.rank != 2 for value in step.inputs):
            continue
        for factor, gradient in _gradients(step, index):
            column_sum = sums.get(gradient)
            if column_sum is None or column_sum in gone or column_sum.phase != step.phase:
                continue
            views = _views_between(column_sum, step, index)
            inputs, results = (*step.inputs, gradient), (*step.results, *column_sum.results)
            attributes = {"steps": (step, column_sum), "stored": results, "inputs": inputs, "factor": factor}
            together = Step(MATMUL_BIAS_GRADIENT, inputs, results, attributes, step.layer, step.phase)
            if views is not None and context.engine.supports(together):
                fused[step], moved[step] = together, views
                gone.update((column_sum, *views))
                break
    if not fused:
        return steps
    done: list[Step] = []
    for step in steps:
        if step not in gone:
            done += [fused.get(step, step), *moved.get(step, ())]
    return done


def _gradients(step: Step, index: Index) -> list[tuple[int, Value]]:
    """Matrices of which a row is a term of every sum of a matmul aᵀ b: a and b, with the number of their factor."""
    a, b = step.inputs
    maker = index.makers.get(a)
    if maker is None or maker.op is not _TRANSPOSE:
        return []
    return [(0, maker.inputs[0]), (1, b)]


def _views_between(column_sum: Step, matmul: Step, index: Index) -> list[Step] | None:
    """Views of the sum before the matmul; None when anything else reads it there."""
    known, views = set(column_sum.results), []
    for step in index.steps[index.positions[column_sum] + 1 : index.positions[matmul]]:
        if known.intersection(step.inputs):
            if not step.op.is_view:
                return None
            views.append(step)
            known.update(step.results)
    return views
