"""The share_recomputed pass: what a normalization's gradient computes again is not computed again after it."""

from __future__ import annotations

import numpy as np

from mlcompute import ops
from mlcompute.compiler.fuse_normalization import NORMALIZATION_GRADIENTS
from mlcompute.compiler.share_recomputed import share_recomputed
from mlcompute.compiler.verify import verify_steps
from mlcompute.ops.op import Trace, Value, emit_all
from tests.compiler.programs import apply, feed, run

SHAPE, STATISTICS = (6, 4, 5), (1, 4, 1)


def _described(trace: Trace, *, between: bool = False, cheap: bool = False) -> tuple[list[Value], list[Value]]:
    """A gradient that computes y again, and y once more behind it; perhaps with a matmul in between."""
    x, dy, m, v, w = (feed(trace, shape) for shape in (SHAPE, SHAPE, STATISTICS, STATISTICS, (5, 5)))
    trace.phase = "gradient"

    def again() -> tuple[Value, Value]:
        n = (x - m) * ops.rsqrt(v * v + 1e-5)
        return n, (ops.relu if cheap else ops.tanh)(n * 2.0)

    n, y = again()
    dz = ops.select(y <= 0.0, 0.0, dy)
    dx = emit_all("normalize_gradient", dz, n, v * v, axes=(0, 2), epsilon=1e-5)[0]
    product = ops.matmul(dx, w) if between else dx
    _, same = again()
    return [x, dy, m, v, w], [product, ops.matmul(same, w)]


def test_right_after_the_gradient() -> None:
    trace = Trace()
    inputs, results = _described(trace)
    before = run(trace, inputs, results)
    apply(lambda steps, context: share_recomputed(steps, context, NORMALIZATION_GRADIENTS), trace, results)
    verify_steps(trace.steps)
    assert [step.op.name for step in trace.steps].count("tanh") == 1
    for old, new in zip(before, run(trace, inputs, results), strict=True):
        np.testing.assert_array_equal(new, old)


def test_what_is_cheap_is_computed_again() -> None:
    trace = Trace()
    _, results = _described(trace, cheap=True)
    steps = list(trace.steps)
    apply(lambda steps, context: share_recomputed(steps, context, NORMALIZATION_GRADIENTS), trace, results)
    assert trace.steps == steps


def test_behind_another_step_it_would_have_to_be_kept() -> None:
    trace = Trace()
    _, results = _described(trace, between=True)
    steps = list(trace.steps)
    apply(lambda steps, context: share_recomputed(steps, context, NORMALIZATION_GRADIENTS), trace, results)
    assert trace.steps == steps
