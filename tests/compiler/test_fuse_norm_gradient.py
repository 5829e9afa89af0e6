"""The fuse_norm_gradient pass: one step gives all gradients of a normalisation, with the same numbers."""

from __future__ import annotations

import numpy as np
import pytest

from mlcompute import ops
from mlcompute.compiler.differentiate import differentiate
from mlcompute.compiler.fuse_norm_gradient import fuse_norm_gradient
from mlcompute.compiler.verify import verify_steps
from mlcompute.ops.op import Trace, Value, emit_all
from tests.compiler.programs import apply, feed, run, simplify

SHAPE, AXES, STATISTICS = (6, 3, 4), (0, 2), (1, 3, 1)


def gradients(trace: Trace, scale_shape: tuple[int, ...] = STATISTICS) -> tuple[list[Value], list[Value]]:
    """The inputs of y = scale normalize(x) + shift and its gradients by x, scale and shift."""
    x, scale, shift, dy = (feed(trace, shape) for shape in (SHAPE, scale_shape, STATISTICS, SHAPE))
    y = ops.normalize(x, AXES, 1e-5)[0] * scale + shift
    trace.phase = "gradient"
    found = differentiate(trace, {y: dy}, [x, scale, shift], set())
    return [x, scale, shift, dy], [found[value] for value in (x, scale, shift)]


def simplified(trace: Trace, results: list[Value]) -> list[Value]:
    substitution = apply(simplify, trace, results)
    return [substitution.final(value) for value in results]


def test_one_step_gives_all_gradients() -> None:
    trace = Trace()
    inputs, results = gradients(trace)
    results = simplified(trace, results)
    before = run(trace, inputs, results)
    apply(fuse_norm_gradient, trace, results)
    verify_steps(trace.steps)
    names = [step.op.name for step in trace.steps if step.phase == "gradient"]
    assert names.count("normalize_gradient") == 1
    assert "sum" not in names
    assert "multiply" not in names
    for old, new in zip(before, run(trace, inputs, results), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-5)


def test_scale_and_shift_may_be_lines_shown_in_another_shape() -> None:
    trace = Trace()
    x, scale, shift, dy = (feed(trace, shape) for shape in (SHAPE, (3,), (3,), SHAPE))
    y = ops.normalize(x, AXES, 1e-5)[0] * ops.reshape(scale, STATISTICS) + ops.reshape(shift, STATISTICS)
    trace.phase = "gradient"
    found = differentiate(trace, {y: dy}, [x, scale, shift], set())
    inputs = [x, scale, shift, dy]
    results = simplified(trace, [found[value] for value in (x, scale, shift)])
    before = run(trace, inputs, results)
    apply(fuse_norm_gradient, trace, results)
    verify_steps(trace.steps)
    names = [step.op.name for step in trace.steps if step.phase == "gradient"]
    assert names.count("normalize_gradient") == 1
    assert {"sum", "multiply"}.isdisjoint(names)
    for old, new in zip(before, run(trace, inputs, results), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-5)


def test_a_gradient_before_the_scale_that_somebody_reads_stays() -> None:
    trace = Trace()
    _, results = gradients(trace)
    results = simplified(trace, results)
    step = next(step for step in trace.steps if step.op.name == "normalize_gradient")
    apply(fuse_norm_gradient, trace, [*results, step.inputs[0]])
    assert len(next(s for s in trace.steps if s.op.name == "normalize_gradient").inputs) == 3
    assert step.inputs[0] in {value for step in trace.steps for value in step.results}


@pytest.mark.parametrize("shape", [SHAPE, (1, 3, 4), (4,)])
def test_a_scale_that_varies_along_the_sums_is_left_alone(shape: tuple[int, ...]) -> None:
    trace = Trace()
    inputs, results = gradients(trace, shape)
    results = simplified(trace, results)
    before = run(trace, inputs, results)
    apply(fuse_norm_gradient, trace, results)
    for old, new in zip(before, run(trace, inputs, results), strict=True):
        np.testing.assert_array_equal(new, old)


def test_a_sum_needed_early_is_taken_early() -> None:
    trace = Trace()
    x, scale, dy = feed(trace, SHAPE), feed(trace, STATISTICS), feed(trace, SHAPE)
    normalized, _, v = ops.normalize(x, AXES, 1e-5)
    early = ops.sum_(dy, AXES)
    dn = dy * scale + early * 0.0  # not the plain product
    dx = emit_all("normalize_gradient", dn, normalized, v, axes=AXES, epsilon=1e-5)[0]
    apply(fuse_norm_gradient, trace, [dx, early])
    verify_steps(trace.steps)
    assert [step.op.name for step in trace.steps].count("sum") == 1


def test_two_normalisations_of_one_sum_take_its_gradient_once() -> None:
    """As in a residual block with a normalised shortcut: both have the same dy, and one sum of it."""
    trace = Trace()
    a, b, dy = (feed(trace, SHAPE) for _ in range(3))
    scales, shifts = ([feed(trace, STATISTICS) for _ in range(2)] for _ in range(2))
    parts = [
        ops.normalize(x, AXES, 1e-5)[0] * scale + shift for x, scale, shift in zip((a, b), scales, shifts, strict=True)
    ]
    trace.phase = "gradient"
    wanted = [a, b, *scales, *shifts]
    found = differentiate(trace, {parts[0] + parts[1]: dy}, wanted, set())
    results = simplified(trace, [found[value] for value in wanted])
    before = run(trace, [a, b, *scales, *shifts, dy], results)
    apply(fuse_norm_gradient, trace, results)
    verify_steps(trace.steps)
    for old, new in zip(before, run(trace, [a, b, *scales, *shifts, dy], results), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [0, 1, 2], ids=["instances", "groups of one", "groups of two"])
def test_a_scale_that_samples_share(size: int) -> None:
    """Instance and group norm: the sums of all samples are added up, and nothing reads dy again."""
    trace = Trace()
    x, scale, shift, dy = (feed(trace, shape) for shape in ((3, 4, 5), (1, 4, 1), (1, 4, 1), (3, 4, 5)))
    n = ops.normalize_groups(x, (2,), 1, size, 1e-5) if size else ops.normalize(x, (2,), 1e-5)[0]
    y = n * scale + shift
    trace.phase = "gradient"
    found = differentiate(trace, {y: dy}, [x, scale, shift], set())
    inputs = [x, scale, shift, dy]
    results = simplified(trace, [found[value] for value in (x, scale, shift)])
    before = run(trace, inputs, results)
    apply(fuse_norm_gradient, trace, results)
    verify_steps(trace.steps)
    steps = [step for step in trace.steps if step.phase == "gradient"]
    assert [step.op.name for step in steps] == [
        "normalize_groups_gradient" if size else "normalize_gradient",
        "sum",
        "sum",
    ]
    assert all(step.inputs[0].shape == (3, 4, 1) for step in steps[1:])
    for old, new in zip(before, run(trace, inputs, results), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-4, atol=1e-5)
