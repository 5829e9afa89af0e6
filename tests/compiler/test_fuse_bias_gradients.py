"""fuse_bias_gradients: column sums of a gradient go into the matmul that reads it, where nobody could notice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mlcompute import ops
from mlcompute.compiler.fuse_bias_gradients import MATMUL_BIAS_GRADIENT, fuse_bias_gradients
from mlcompute.compiler.verify import verify_steps
from mlcompute.ops.op import Trace, Value, emit
from tests.compiler.programs import apply, feed, run


def _sum(dy: Value, *axes: int) -> Value:
    return emit("sum", dy, axes=axes)


def gradients(
    factor: int = 0, sum_first: bool = True, between: Callable[[Value], Value] | None = None
) -> tuple[Trace, list[Value], list[Value]]:
    """dw = dyᵀ x or xᵀ dy, and db = the column sums of dy, in the order the gradient pass has or another."""
    trace = Trace()
    dy, x = feed(trace, (5, 3)), feed(trace, (5, 4))

    def bias() -> Value:
        db = ops.reshape(_sum(dy, 0), (3,))
        return db if between is None else between(db)

    first = bias() if sum_first else None
    dw = ops.matmul(ops.transpose(dy), x) if factor == 0 else ops.matmul(ops.transpose(x), dy)
    return trace, [dy, x], [dw, bias() if first is None else first]


@pytest.mark.parametrize("sum_first", [True, False])
@pytest.mark.parametrize("factor", [0, 1])
def test_column_sums_become_a_part_of_the_matmul(factor: int, sum_first: bool) -> None:
    trace, inputs, results = gradients(factor, sum_first)
    expected = run(trace, inputs, results)
    apply(fuse_bias_gradients, trace, results)
    verify_steps(trace.steps)
    names = [step.op.name for step in trace.steps]
    assert names == ["transpose", "matmul_bias_gradient", "reshape"]
    fused = trace.steps[1]
    assert fused.op is MATMUL_BIAS_GRADIENT
    assert (fused.attributes["factor"], fused.inputs[2], fused.results[0]) == (factor, inputs[0], results[0])
    for a, b in zip(run(trace, inputs, results), expected, strict=True):
        assert a.tobytes() == b.tobytes()


def test_a_sum_that_is_read_before_the_matmul_stays() -> None:
    trace, _, results = gradients(between=lambda db: db * 2.0)
    before = list(trace.steps)
    apply(fuse_bias_gradients, trace, results)
    assert trace.steps == before


def test_other_sums_and_matmuls_stay() -> None:
    def unchanged(make: Callable[[Value, Value], list[Value]], supports: bool = True) -> bool:
        trace = Trace()
        results = make(feed(trace, (4, 4)), feed(trace, (4, 4)))
        before = list(trace.steps)
        apply(fuse_bias_gradients, trace, results, lambda step: supports)
        return trace.steps == before

    assert unchanged(lambda dy, x: [_sum(dy, 1), ops.matmul(ops.transpose(dy), x)])
    assert unchanged(lambda dy, x: [_sum(dy, 0, 1), ops.matmul(ops.transpose(dy), x)])
    assert unchanged(lambda dy, x: [_sum(dy, 0), ops.matmul(dy, x)])  # the data gradient: its terms are columns
    assert unchanged(lambda dy, x: [_sum(x * 2.0, 0), ops.matmul(ops.transpose(dy), x)])
    assert unchanged(lambda dy, x: [_sum(dy, 0), ops.matmul(ops.transpose(dy), x)], supports=False)


def test_phases_stay_apart() -> None:
    trace = Trace()
    dy, x = feed(trace, (5, 3)), feed(trace, (5, 4))
    db = _sum(dy, 0)
    trace.phase = "gradient"
    dw = ops.matmul(ops.transpose(dy), x)
    apply(fuse_bias_gradients, trace, [db, dw])
    assert [step.op.name for step in trace.steps] == ["sum", "transpose", "matmul"]


def test_a_sum_goes_into_one_matmul_only() -> None:
    trace = Trace()
    dy, x, z = feed(trace, (5, 3)), feed(trace, (5, 4)), feed(trace, (5, 2))
    turned = ops.transpose(dy)
    results = [_sum(dy, 0), ops.matmul(turned, x), ops.matmul(turned, z)]
    apply(fuse_bias_gradients, trace, results)
    verify_steps(trace.steps)
    assert [step.op.name for step in trace.steps] == ["transpose", "matmul_bias_gradient", "matmul"]
