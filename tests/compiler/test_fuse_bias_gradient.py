"""fuse_bias_gradient: sums of rows go into the matmul that multiplies the same rows."""

from __future__ import annotations

import pytest

from mlcompute import ops
from mlcompute.compiler.fuse_bias_gradient import MATMUL_BIAS_GRADIENT, fuse_bias_gradient
from mlcompute.compiler.verify import verify_steps
from mlcompute.ops.bfloat16 import bfloat16
from mlcompute.ops.op import FLOAT32, Trace, Value
from tests.compiler.programs import apply, feed, run


def gradients(factor: int = 0, narrow: bool = False, reshapes: bool = False) -> tuple[Trace, list[Value], list[Value]]:
    """Inputs; dw and db of x (6, 3) and dz (6, 4), the sum before the product as derivatives are written."""
    trace = Trace()
    x, given = feed(trace, (6, 3)), feed(trace, (2, 3, 4) if reshapes else (6, 4))
    dz = ops.exp(given)
    if narrow:
        x, dz = ops.convert(x, bfloat16()), ops.convert(dz, bfloat16())
    rows = ops.reshape(dz, (6, 4)) if reshapes else dz
    db = ops.reshape(ops.sum_(dz, tuple(range(dz.rank - 1))), (4,))
    a, b = (ops.transpose(rows), x) if factor == 0 else (ops.transpose(x), rows)
    dw = ops.emit("matmul", a, b, to=FLOAT32) if narrow else ops.matmul(a, b)
    return trace, [trace.steps[0].inputs[0], given] if narrow else [x, given], [dw, db]


def names(trace: Trace) -> list[str]:
    return [step.op.name for step in trace.steps if not step.op.is_view and step.op.name not in ("exp", "convert")]


@pytest.mark.parametrize("reshapes", [True, False])
@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("factor", [0, 1])
def test_sums_of_rows_become_a_part_of_the_matmul(factor: int, narrow: bool, reshapes: bool) -> None:
    trace, _, results = gradients(factor, narrow, reshapes)
    inputs = [value for value in dict.fromkeys(v for s in trace.steps for v in s.inputs) if value.kind == "input"]
    expected = run(trace, inputs, results)
    apply(fuse_bias_gradient, trace, results)
    verify_steps(trace.steps)
    assert names(trace) == ["matmul_bias_gradient"]
    (fused,) = [step for step in trace.steps if step.op is MATMUL_BIAS_GRADIENT]
    assert fused.attributes["factor"] == factor
    assert fused.attributes["transposed"] == (True, False)
    assert fused.results[0] is results[0]
    for found, before in zip(run(trace, inputs, results), expected, strict=True):
        assert found.tobytes() == before.tobytes()


def test_every_sum_has_a_matmul_of_its_own() -> None:
    trace = Trace()
    x, dz = feed(trace, (6, 3)), feed(trace, (6, 4))
    results = []
    for _ in range(3):
        results += [ops.sum_(dz, (0,)), ops.matmul(ops.transpose(dz), x)]
    results.append(ops.sum_(dz, (0,)))  # one more
    expected = run(trace, [x, dz], results)
    apply(fuse_bias_gradient, trace, results)
    verify_steps(trace.steps)
    assert sorted(names(trace)) == [*["matmul_bias_gradient"] * 3, "sum"]
    for found, before in zip(run(trace, [x, dz], results), expected, strict=True):
        assert found.tobytes() == before.tobytes()


def test_what_a_device_does_not_support_stays() -> None:
    trace, _, results = gradients()
    before = list(trace.steps)
    apply(fuse_bias_gradient, trace, results, lambda step: False)
    assert trace.steps == before


def test_sums_that_are_read_before_the_matmul_stay() -> None:
    trace = Trace()
    x, dz = feed(trace, (6, 3)), feed(trace, (6, 4))
    db = ops.sum_(dz, (0,))
    y = ops.exp(db)
    dw = ops.matmul(ops.transpose(dz), x)
    apply(fuse_bias_gradient, trace, [dw, y])
    assert names(trace) == ["sum", "matmul"]


def test_other_sums_and_other_phases_stay() -> None:
    for axes in ((1,), (0, 1)):
        trace = Trace()
        x, dz = feed(trace, (4, 3)), feed(trace, (4, 4))
        kept = [ops.sum_(dz, axes), ops.matmul(ops.transpose(dz), x)]
        apply(fuse_bias_gradient, trace, kept)
        assert names(trace) == ["sum", "matmul"]
    trace = Trace()
    x, dz = feed(trace, (4, 3)), feed(trace, (4, 4))
    db = ops.sum_(dz, (0,))
    trace.phase = "gradient"
    apply(fuse_bias_gradient, trace, [db, ops.matmul(ops.transpose(dz), x)])
    assert names(trace) == ["sum", "matmul"]


def test_sums_of_what_is_not_summed_by_the_matmul_stay() -> None:
    trace = Trace()
    dz, w = feed(trace, (4, 4)), feed(trace, (4, 4))
    kept = [ops.sum_(dz, (0,)), ops.matmul(dz, w), ops.matmul(w, ops.transpose(dz))]
    apply(fuse_bias_gradient, trace, kept)
    assert names(trace) == ["sum", "matmul", "matmul"]
